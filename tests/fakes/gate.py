"""Stop-and-go points in a fake, held and released by a test. No clock anywhere."""

from __future__ import annotations

import asyncio


class Gate:
    """Open until held. While held, whoever comes waits until released, one by one or all at once."""

    def __init__(self) -> None:
        self._open = True
        self._permits = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._watchers: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """How many are held up."""
        return len(self._waiters)

    def hold(self) -> None:
        """Let nobody through from now on."""
        self._open, self._permits = False, 0

    def release(self, count: int | None = None) -> None:
        """Open for good, or let ``count`` through (those who wait first, then those who come)."""
        if count is None:
            self._open = True
            count = len(self._waiters)
        for _ in range(count):
            while self._waiters and self._waiters[0].done():
                self._waiters.pop(0)
            if self._waiters:
                self._waiters.pop(0).set_result(None)
            elif not self._open:
                self._permits += 1

    async def passed(self) -> None:
        """Go through, or wait for it."""
        if self._open:
            return
        if self._permits:
            self._permits -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        for count, watcher in self._watchers:
            if len(self._waiters) >= count and not watcher.done():
                watcher.set_result(None)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    async def arrived(self, count: int = 1) -> None:
        """Return once ``count`` are held up."""
        if len(self._waiters) >= count:
            return
        watcher = asyncio.get_running_loop().create_future()
        entry = (count, watcher)
        self._watchers.append(entry)
        try:
            await watcher
        finally:
            self._watchers.remove(entry)
