"""Whether a backend answers: up and down with hysteresis, and quick doubt after a refused connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from .backend import EngineBroke, EngineError, EngineUnreachable, Health

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .backend import EngineClient

log = logging.getLogger("warmslot.router")

FAILURES = 3
"""Failed looks in a row after which a backend is down."""


class HealthWatch:
    """Looks at one backend's ``/health`` in a task of its own.

    With ``came_up`` and ``went_down`` it lasts and decides about a backend that runs elsewhere: one good
    answer (and ``came_up`` without an error) brings it up, ``FAILURES`` bad ones in a row take it down.
    Without them it only clears a suspicion, and ends with it. ``trusted`` is called when one is cleared.
    """

    def __init__(
        self,
        client: EngineClient,
        interval: float,
        *,
        is_up: Callable[[], bool],
        trusted: Callable[[], None],
        came_up: Callable[[], Awaitable[None]] | None = None,
        went_down: Callable[[str], None] | None = None,
    ) -> None:
        self._client = client
        self._interval = interval
        self._is_up = is_up
        self._came_up = came_up
        self._went_down = went_down
        self._trusted = trusted
        self._failures = 0
        self.trouble = ""
        """Why it is not up, where the last look told; said once, not at every look."""
        self.looked = asyncio.Event()
        """Set from the end of the first look on, and when none will come."""
        self._look_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.suspecting = False

    @property
    def lasting(self) -> bool:
        """Whether it goes on when the backend is down."""
        return self._came_up is not None

    def start(self) -> None:
        """Begin to look, now."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def suspect(self) -> None:
        """Something failed: look now and, until an answer is good, more often."""
        self.suspecting = True
        self._look_now.set()
        self.start()

    async def aclose(self) -> None:
        """End it, and close the client of a watch that lasts, which nobody else uses."""
        self.stop()
        if self.lasting:
            await self._client.aclose()

    def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.looked.set()
        self.suspecting = False

    async def _run(self) -> None:
        while self.lasting or self.suspecting:
            self._look_now.clear()
            await self._look()
            self.looked.set()
            pause = self._interval / 4 if self.suspecting or self._failures else self._interval
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look_now.wait()

    async def _look(self) -> None:
        good = await self._client.health() is Health.OK
        if good and not self._is_up() and self._came_up is not None:
            try:
                await self._came_up()
            except (EngineUnreachable, EngineBroke, EngineError) as error:
                self._complain("backend %s is healthy but of no use: %s", str(error))
                return
        if good:
            self._failures, self.trouble = 0, ""
            if self.suspecting:
                self.suspecting = False
                self._trusted()
            return
        self._failures += 1
        if self._failures >= FAILURES and self._is_up() and self._went_down is not None:
            self.suspecting = False
            self.trouble = self._client.trouble
            self._went_down(f"/health failed {self._failures} times in a row")
        elif self.lasting and not self._is_up():
            self._complain("backend %s: %s", self._client.trouble)

    def _complain(self, message: str, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            log.warning(message, self._client.name, trouble)
