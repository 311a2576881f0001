"""A client's connection: closed where the head of a request is too slow to come, or too long.

Uvicorn bounds the time between requests only. A client that sends a byte now and then, or none, would keep
its connection, and with many of them all that the process may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from . import errors
from .client import Client

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Receive, Scope, Send

    from .errors import RequestError

LARGEST_HEAD = 64 * 1024
"""Bytes of a request's line and headers, without optional white space."""


class Connection(HttpToolsProtocol):
    """Uvicorn's, with bounds on what comes before a request is a request.

    The clock runs from the first moment at which a head is waited for (the connection is new, or a byte came
    that belongs to no request that is being served) until the head is whole.
    """

    header_timeout: ClassVar[float] = 0.0
    """Seconds; 0 = no bound."""

    _timer: asyncio.TimerHandle | None = None
    _head_bytes: int = 0
    """What came of a head that is not whole, less a piece in which another request ended."""
    _begun = False
    """A head has begun and is not whole."""
    _mixed = False
    """A request has ended in the piece that is being parsed: the rest of it may be of the next one."""

    # -- what the event loop tells -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The clock runs before the first byte."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Bytes of whatever a client sends."""
        self._mixed = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._begun:
            self._head_bytes += 0 if self._mixed else len(data)
            if self._head_bytes > LARGEST_HEAD:
                self._refuse(errors.head_too_large(LARGEST_HEAD))
        elif not self._serving and self.timeout_keep_alive_task is None:
            # Blank lines before a request, or the rest of a body that was answered without being read.
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._disarm()
        super().connection_lost(exc)

    # -- what the parser tells -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        super().on_message_begin()
        self._begun, self._head_bytes = True, 0
        self._arm()

    def on_headers_complete(self) -> None:
        """A head is whole, and served unless it is too long."""
        self._begun = False
        self._disarm()
        serves = self.app
        if self._whole_head > LARGEST_HEAD:
            self.app = _refuse_head
        try:
            super().on_headers_complete()
        finally:
            self.app = serves

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._mixed = True
        super().on_message_complete()

    # -- the clock -----------------------------------------------------------------------------------------

    @property
    def _whole_head(self) -> int:
        """Bytes of the head that has just been parsed."""
        line = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n")
        return line + sum(len(name) + len(value) + 4 for name, value in self.headers) + 2

    @property
    def _serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self) -> None:
        if self._timer is None and self.header_timeout:
            self._timer = self.loop.call_later(self.header_timeout, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._serving:
            # A next request that dribbles in during the answer to this one: that answer is not cut off.
            self.cycle.keep_alive = False
        elif self._begun:
            self._refuse(errors.head_too_slow(self.header_timeout))
        else:
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        """Answer in place of the application, which has not heard of the request, and close."""
        if not self._serving:
            body = error.body()
            headers = [*error.headers(), (b"content-length", b"%d" % len(body))]
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        self.transport.close()


async def _refuse_head(scope: Scope, receive: Receive, send: Send) -> None:
    """Serves a request whose head came whole and is too long: in its turn, as any other."""
    await Client(scope, receive, send).refuse(errors.head_too_large(LARGEST_HEAD))


def connection(header_timeout: float) -> type[Connection]:
    """Connections whose request heads may take so many seconds."""
    return type("Connection", (Connection,), {"header_timeout": header_timeout})
