"""Asking an engine the same question again, as seldom as it may and no longer than needed."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Pacer:
    """Runs ``ask`` whenever ``due`` says so, in one task, which ends when ``due`` answers ``None``.

    ``due(last)`` gets the clock's time at the end of the last ``ask`` (minus infinity before the first) and
    answers when the next one is due, on the same clock. Call :meth:`poke` after every change of what
    ``due`` would answer. ``ask`` handles its own failures.
    """

    def __init__(
        self,
        due: Callable[[float], float | None],
        ask: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._due = due
        self._ask = ask
        self._clock = clock
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.last = -math.inf

    def poke(self) -> None:
        """Look at ``due`` again, now."""
        if self._task is None or self._task.done():
            if self._due(self.last) is not None:
                self._task = asyncio.get_running_loop().create_task(self._run())
        else:
            self._changed.set()

    def stop(self) -> None:
        """End the task; a later :meth:`poke` starts a new one."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while (due := self._due(self.last)) is not None:
            delay = due - self._clock()
            if delay > 0:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._changed.wait()
            else:
                await self._ask()
                self.last = self._clock()
