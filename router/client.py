"""The client's side of one HTTP exchange: its body within bounds, its leaving, our answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from typing import TYPE_CHECKING

from . import errors

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from starlette.types import Receive, Scope, Send

    from .errors import RequestError

Headers = list[tuple[bytes, bytes]]

_DISCARDING = 5.0
"""Seconds for which the rest of a body that is too large is read."""

_ANTHROPIC = "/v1/messages"
"""Paths on which errors have Anthropic's shape."""

_CORS = b"access-control-"
"""Headers by which a server allows web pages to read an answer: the router's to say, not an engine's."""

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class ClientGoneError(Exception):
    """Nobody is there any more to answer to."""


def request_id(given: bytes) -> bytes:
    """The id of a request: the one that its client gave, if it is fit for a header, else a new one."""
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex.encode()


class Client:
    """One request's ASGI channels. The body is read first; after that only leaving can come in."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self.started = False
        """A status line has been sent."""
        self.ended = False
        """The answer is complete."""
        self.streams = False
        """What has been started is an event stream, so an error can still be told in it."""
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = request_id(given)
        self._own_id = self.request_id != given

    def lease_id(self) -> str:
        """An id for a lease of this request: its ``X-Request-Id``, and more where that may come again."""
        first, self._own_id = self._own_id, False
        name = self.request_id.decode("ascii")
        return name if first else f"{name}-{uuid.uuid4().hex[:12]}"

    def header(self, name: bytes) -> str | None:
        """A request header by its lower-case name."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def body(self, limit: int, seconds: float) -> bytes:
        """The whole body. Raises 413 above ``limit`` bytes, 408 after ``seconds``, 415 if compressed."""
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            await self._discard()
            raise errors.too_large(limit)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(seconds or None):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size > limit:
                        await self._discard()
                        raise errors.too_large(limit)
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise errors.too_slow(seconds) from None
        if size and self.headers.get(b"content-encoding", b"").strip().lower() not in {b"", b"identity"}:
            raise errors.encoded()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _discard(self) -> None:
        """Read on for a moment and keep nothing: a client that still sends would not see our refusal."""
        if b"expect" in self.headers:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARDING):
                while (message := await self._receive())["type"] != "http.disconnect":
                    if not message.get("more_body", False):
                        return

    async def gone(self) -> None:
        """Return when the client leaves before its answer is complete; for use after :meth:`body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self.ended:
            await asyncio.Event().wait()

    async def unless_gone(self, work: Coroutine[None, None, None]) -> None:
        """Do ``work``; it is cancelled, and ends before this does, when the client leaves.

        Raises :class:`ClientGoneError` then.
        """
        loop = asyncio.get_running_loop()
        task, watch = loop.create_task(work), loop.create_task(self.gone())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            raise ClientGoneError
        task.result()

    async def start(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], *, streams: bool = False
    ) -> None:
        """Send status and headers, the request id among them, those of CORS not."""
        self.started, self.streams = True, streams
        own = [(b"x-request-id", self.request_id)]
        others = [
            (name, value)
            for name, value in headers
            if (low := name.lower()) != b"x-request-id" and not low.startswith(_CORS)
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": own + others})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send a whole answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def refuse(self, error: RequestError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Tell an error: as an answer of its own, or as the last event of a stream that has begun.

        In an answer that is under way and no stream it cannot be told: the answer stays incomplete, and the
        server cuts the connection, so that nobody takes the part for the whole.
        """
        anthropic = self.scope["path"].startswith(_ANTHROPIC)
        if not self.started:
            body = error.anthropic_body() if anthropic else error.body()
            await self.answer(error.status, body, [*headers, *error.headers()])
        elif self.streams and not self.ended:
            await self.end(error.anthropic_event() if anthropic else error.event())
