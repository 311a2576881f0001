"""One HTTP/1.1 exchange with an engine over a connection of its own.

``httptools`` parses over a plain asyncio protocol: a streamed answer is thousands of small chunks, and the
general clients spend most of the time that the whole relay may take on them (``tests/bench/wire.py``).
Nothing is re-chunked: what has arrived is handed on, joined only where the reader was slower than the engine.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httptools

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

HeaderPairs = list[tuple[bytes, bytes]]

_HIGH_WATER: Final = 256 * 1024
"""Bytes waiting for a slow reader above which the engine's connection is no longer read."""

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

_NOT_SENT: Final = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"accept-encoding",  # the relay reads what passes, so it must not be compressed
    b"x-conversation-id",  # the engine would go on generating after a disconnect
}


class EngineUnreachable(Exception):  # noqa: N818 - it names a state of the engine
    """No answer came. ``sent``: whether any byte of the request may have reached the engine."""

    def __init__(self, backend: str, *, sent: bool) -> None:
        how = "closed the connection without an answer" if sent else "cannot be connected to"
        super().__init__(f"backend {backend!r} {how}")
        self.backend, self.sent = backend, sent


class EngineBroke(Exception):  # noqa: N818 - it names a state of the engine
    """The engine died, fell silent or broke the protocol in the middle of an answer."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"backend {backend!r} broke off: {reason}")
        self.backend, self.reason = backend, reason


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: ``authority`` is the Host header, ``prefix`` the path of the base address."""

    host: str
    port: int
    authority: bytes
    prefix: bytes


def strip_hop_by_hop(headers: Iterable[tuple[bytes, bytes]]) -> HeaderPairs:
    """Without the headers that belong to one connection (and those that ``Connection`` names)."""
    return _without(list(headers), _HOP_BY_HOP)


def _without(pairs: HeaderPairs, names: frozenset[bytes]) -> HeaderPairs:
    named = {
        token.strip().lower()
        for name, value in pairs
        if name.lower() == b"connection"
        for token in value.split(b",")
    }
    return [(name, value) for name, value in pairs if (low := name.lower()) not in names and low not in named]


def request_bytes(
    target: Target, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes | None
) -> bytes:
    """The request as it goes over the wire. Raises ValueError where a part would break its framing."""
    lines = [b"%s %s HTTP/1.1" % (method.encode("ascii"), target.prefix + path.encode("ascii"))]
    lines.append(b"Host: " + target.authority)
    for name, value in _without(list(headers), _NOT_SENT):
        lines.append(name + b": " + value)
    lines.append(b"Accept-Encoding: identity")
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    lines.append(b"Connection: close")
    if any(b"\r" in line or b"\n" in line or b"\0" in line for line in lines) or b" " in path.encode():
        raise ValueError("a request line or header holds a control character or a space")
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


class EngineResponse:
    """An answer whose head has come; ``headers`` are raw pairs as written, hop-by-hop ones stripped."""

    __slots__ = ("_exchange", "headers", "status")

    def __init__(self, exchange: Exchange, status: int, headers: HeaderPairs) -> None:
        self._exchange, self.status, self.headers = exchange, status, headers

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, transfer encoding undone. Raises :class:`EngineBroke` if it is cut off."""
        while (chunk := await self._exchange.read()) is not None:
            yield chunk

    async def read(self) -> bytes:
        """The whole body. Raises :class:`EngineBroke` if it is cut off."""
        return b"".join([chunk async for chunk in self.chunks()])


class Exchange(asyncio.Protocol):
    """The connection's side of one request: parses what comes and wakes the one reader."""

    def __init__(self, backend: str, *, head_only: bool, read_timeout: float | None) -> None:
        self._backend = backend
        self._head_only = head_only
        self._read_timeout = read_timeout
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._raw: HeaderPairs = []
        self._status = 0
        self._framed = False
        self._pieces: list[bytes] = []
        self._held = 0
        self._paused = False
        self._complete = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # -- for the client ------------------------------------------------------------------------------------

    def send(self, request: bytes) -> None:
        """Write the whole request; the transport keeps what the engine is slow to take."""
        if self._transport is None or self._transport.is_closing():
            raise EngineUnreachable(self._backend, sent=False)
        self._transport.write(request)

    async def head(self) -> EngineResponse:
        """Wait for status and headers."""
        while not self._status:
            await self._wait()
        return EngineResponse(self, self._status, strip_hop_by_hop(self._raw))

    async def read(self) -> bytes | None:
        """The bytes that have arrived since the last call (at least one), ``None`` at the end of the body."""
        while not self._pieces:
            if self._complete:
                return None
            await self._wait()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._held = 0
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        """Close the connection now, without waiting for anything."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(EngineBroke(self._backend, "it was closed from this side"))

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if self._read_timeout is None:
                await self._waiter
            else:
                async with asyncio.timeout(self._read_timeout):
                    await self._waiter
        except TimeoutError:
            self.close()
            reason = f"nothing came for {self._read_timeout:g} s"
            raise EngineBroke(self._backend, reason) from None
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake()

    # -- for the event loop --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and have the system find out when the engine's machine is gone."""
        self._transport = transport  # type: ignore[assignment]
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in {socket.AF_INET, socket.AF_INET6}:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, option):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def data_received(self, data: bytes) -> None:
        """Parse what came; bytes after the end of the answer are of no interest."""
        if self._complete or self._failure is not None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self._complete:
                self._fail(EngineBroke(self._backend, "its answer is no valid HTTP"))
            if self._transport is not None:
                self._transport.abort()
        if self._held > _HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Decide what the end of the connection means for the answer."""
        if self._complete:
            return
        if not self._status:
            self._fail(EngineUnreachable(self._backend, sent=True))
        elif exc is None and not self._framed:
            self._complete = True
            self._wake()
        else:
            self._fail(EngineBroke(self._backend, "the connection ended in mid-answer"))

    # -- for the parser ------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect one header (also trailers, which nobody asks for)."""
        if self._status:
            return
        self._raw.append((name, value))
        if name.lower() in {b"content-length", b"transfer-encoding"}:
            self._framed = True

    def on_headers_complete(self) -> None:
        """Take the head, unless it is an interim one (1xx)."""
        status = self._parser.get_status_code()
        if status < 200:  # noqa: PLR2004 - an interim answer, as RFC 9110 defines it
            self._raw.clear()
            self._framed = False
            return
        self._status = status
        if self._head_only:
            self._complete = True

    def on_body(self, data: bytes) -> None:
        """Hand on a piece of the body."""
        self._pieces.append(data)
        self._held += len(data)

    def on_message_complete(self) -> None:
        """The body's framing says that it is all there."""
        if self._status:
            self._complete = True
