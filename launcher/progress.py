"""Finds engines that live but do nothing: busy without a token, or deaf to ``/slots``, for too long.

Loading is not looked at here: it has its own bound. A suspect is diagnosed, what runs on it is cancelled
(which may free it), and if that does not help it is killed, so that its runner starts it anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from .command import key_header
from .process import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmslot.router.dispatcher import Dispatcher

    from .supervisor import Supervisor

log = logging.getLogger("warmslot.launcher")

_LOOKS = 4
"""Looks within one timeout. Each asks the engine for ``/slots``, which must not happen often."""

_LONGEST = 2.5
"""Most that counts of the time between two looks, in pauses between them. A look itself may take another
pause. What is longer, the machine or the launcher has slept through, and the engine perhaps as well."""

_SECOND_CHANCE = 0.25
"""Of the timeout: what a suspect gets after its requests were cancelled."""


class ProgressWatch:
    """Looks after one backend, as long as :meth:`run` is not cancelled. ``timeout`` in seconds."""

    def __init__(
        self,
        name: str,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._clock = clock
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._timeout = timeout

    async def run(self) -> None:
        """Look, for ever."""
        seen: object = None
        quiet, looked, pause = 0.0, self._clock(), self._timeout / _LOOKS
        while True:
            await asyncio.sleep(pause)
            status = self._supervisor.status_of(self._name)
            if status.state not in {State.READY, State.DRAINING} or status.url is None:
                seen, quiet, looked = None, 0.0, self._clock()
                continue
            signs = await self._signs(status.url)
            passed, looked = self._clock() - looked, self._clock()
            quiet += min(passed, _LONGEST * pause)
            if signs is not None and (signs != seen or not signs[1]):
                seen, quiet = signs, 0.0
            elif quiet >= self._timeout:
                await self._treat(status.url, status.pid, signs)
                seen, quiet, looked = None, 0.0, self._clock()

    async def _signs(self, url: str) -> tuple[int | None, list[object]] | None:
        """What changes as an engine works: its process, how far each busy slot is; ``None``: no answer."""
        pid = self._supervisor.status_of(self._name).pid
        headers, patience = key_header(self._supervisor.launch(self._name).backend), self._timeout / _LOOKS
        async with httpx.AsyncClient(timeout=patience, trust_env=False, headers=headers) as client:
            try:
                answer = await client.get(f"{url}/slots")
                told: Any = answer.json() if answer.is_success else []
            except (httpx.HTTPError, ValueError):
                return None
        slots = told if isinstance(told, list) else []
        busy = [slot for slot in slots if isinstance(slot, dict) and slot.get("is_processing") is True]
        fields = ("id", "id_task", "n_prompt_tokens", "n_prompt_tokens_processed", "next_token")
        return pid, [[slot.get(field) for field in fields] for slot in busy]

    async def _treat(self, url: str, pid: int | None, signs: object) -> None:
        what = "does not answer" if signs is None else "is busy without progress"
        reason = f"wedged: the engine {what} for {self._timeout:g} s ({diagnosis(pid)})"
        log.warning("%s: %s; its requests are cancelled", self._name, reason)
        backend = self._dispatcher.fleet.backend(self._name)
        if backend is not None and backend.client is not None:
            await backend.client.aclose()
        await asyncio.sleep(self._timeout * _SECOND_CHANCE)
        after = await self._signs(url)
        if after is not None and after != signs:
            log.warning("%s: goes on after its requests were cancelled", self._name)
        elif self._supervisor.status_of(self._name).pid == pid:
            self._supervisor.condemn(self._name, reason)


def diagnosis(pid: int | None) -> str:
    """How a process stands, for a log line."""
    if pid is None:
        return "no process"
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return (
                f"process {pid} is {process.status()}, {process.num_threads()} threads, "
                f"{times.user + times.system:.0f} s of CPU time"
            )
    except psutil.Error:
        return f"process {pid} is gone"
