"""What is on its way to one client: bounded, so that a client that does not read stalls nobody else."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from .client import Client

LIMIT = 1024 * 1024
"""Bytes that may wait for one client: a few thousand streamed tokens."""

STALL = 30.0
"""Seconds that a full outbox may stay full, or a finished answer unread; then the client counts as gone."""

_PING = b":\n\n"
_EVENT_STREAM = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # as the engine's: a proxy would keep the comments to itself
)


class ClientStalledError(Exception):
    """The client does not read what it asked for."""


class Outbox:
    """Sends pieces in a task of its own, joined where the client is slower than the engine.

    With ``ping`` seconds above 0, an event stream that has been silent that long gets a comment, which
    clients ignore and which keeps proxies from closing the connection. ``async with`` it; leaving cancels
    what has not been sent, so :meth:`flush` first.
    """

    def __init__(
        self, client: Client, *, ping: float = 0.0, limit: int = LIMIT, stall: float = STALL
    ) -> None:
        self._client = client
        self._ping = ping
        self._limit = limit
        self._stall = stall
        self._pieces: list[bytes] = []
        self._size = 0
        self._closing = False
        self._say: Callable[[], bytes | None] | None = None
        self._between_events = True
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last = time.monotonic()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run())
        if self._ping:
            self._timer = loop.call_later(self._ping, self._tick)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_pings()
        if self._task is not None:
            self._task.cancel()

    def put(self, data: bytes) -> bool:
        """Queue a piece. False when the outbox is over its limit now: wait for :meth:`room`."""
        self._pieces.append(data)
        self._size += len(data)
        self._work.set()
        self._between_events = data.endswith((b"\n\n", b"\r\n\r\n"))
        self._last = time.monotonic()
        return self._size <= self._limit

    def comment(self, text: Callable[[], bytes | None] | None) -> None:
        """What pings say from now on, first now, where ``text`` has something to say; ``None``: nothing."""
        self._say = text
        if text is not None and self._between_events and not self._closing and (said := text()):
            self.put(said)

    async def room(self) -> None:
        """Wait until there is room again. Raises :class:`ClientStalledError`."""
        try:
            async with asyncio.timeout(self._stall):
                while self._size > self._limit:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise ClientStalledError from None

    async def flush(self, *, broken: bool = False) -> None:
        """Wait until all is sent. Nothing can be put any more. Raises :class:`ClientStalledError`.

        A client that reads slowly may take its time, as long as it reads. ``broken``: an event that broke
        off is closed, so that what is sent next stands alone.
        """
        if broken and not self._between_events:
            self.put(b"\n\n")
        self._stop_pings()
        self._closing = True
        self._work.set()
        if self._task is None:
            return
        while not self._task.done():
            left = self._size
            done, _ = await asyncio.wait({self._task}, timeout=self._stall)
            if not done and self._size == left:
                raise ClientStalledError
        self._task.result()

    def _stop_pings(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        silent = time.monotonic() - self._last
        if silent >= self._ping and self._between_events and not self._pieces:
            self.put((self._say() if self._say is not None else None) or _PING)
            silent = 0.0
        self._timer = asyncio.get_running_loop().call_later(max(0.01, self._ping - silent), self._tick)

    async def _run(self) -> None:
        client = self._client
        while True:
            if not self._pieces:
                if self._closing:
                    return
                self._work.clear()
                await self._work.wait()
                continue
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            if not client.started:
                await client.start(200, _EVENT_STREAM, streams=True)
            await client.write(data)
            self._size -= len(data)
            self._room.set()
