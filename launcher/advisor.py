"""Keeps advice up to date while a router runs: ``warmslot advise`` of its journal, in a process of its own.

The event loop only starts that process and reads its answer. There is one at a time, it has a bound on its
time, and it is killed when the advisor is cancelled. Where it fails, what was advised before stays, and a
line says so, once until it works again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from warmslot.router.journal import files_of

from .advise import LEAST_REQUESTS
from .advisor_child import question, read_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmslot.router.advice import Advised
    from warmslot.router.config import Backend, Config
    from warmslot.router.journal import Journal

log = logging.getLogger("warmslot.launcher")

PATIENCE: Final = 1800.0
"""Seconds that one answer may take: about a minute on a free core, and long where engines leave none."""

COMMAND: Final = (sys.executable, "-P", "-m", "warmslot.launcher.advisor_child")

_LOOK: Final = 5.0
"""Seconds between two looks at how many requests there are, at most."""

_AGAIN: Final = 60.0
"""Seconds after which it is tried again where there was too little data, at most."""


class AdvisorError(Exception):
    """No answer; the message is one line."""


@dataclass(slots=True)
class Schedule:
    """When advice is to be renewed: after ``every`` seconds, and only with enough new requests. Pure."""

    every: float
    seen: int = 0
    """Requests that the journal had had when it was asked last."""
    next: float = 0.0
    """When it may be asked again."""

    def due(self, now: float, written: int) -> bool:
        """Whether to ask at ``now``, when ``written`` requests are in the journal."""
        return now >= self.next and written - self.seen >= LEAST_REQUESTS

    def asked(self, now: float, written: int, *, soon: bool) -> None:
        """It was asked. ``soon``: there was too little to advise on, which may change before long."""
        self.seen = written
        self.next = now + (min(self.every, _AGAIN) if soon else self.every)


class Advisor:
    """Of one run. ``backends`` gives those that there are, ``publish`` is told what is found.

    ``config`` has a journal, and ``journal`` writes it; what earlier runs left in it counts at once.
    """

    def __init__(
        self,
        config: Config,
        journal: Journal,
        backends: Callable[[], Sequence[Backend]],
        publish: Callable[[Mapping[str, Advised]], None],
        *,
        command: Sequence[str] = COMMAND,
        patience: float = PATIENCE,
    ) -> None:
        self._path, self._settings = config.journal.path or "", config.advice
        self._journal, self._backends, self._publish = journal, backends, publish
        self._command, self._patience = command, patience
        earlier = any(file.stat().st_size for file in files_of(Path(self._path)))
        self._schedule = Schedule(config.advice.every, -LEAST_REQUESTS if earlier else 0)
        self._failing = False

    async def run(self) -> None:
        """Renew whenever that is due, for ever; at once return where that is switched off."""
        every = self._settings.every
        while every:
            await asyncio.sleep(min(every, _LOOK))
            if self._schedule.due(time.monotonic(), self._journal.written):
                await self.renew()

    async def renew(self) -> None:
        """Ask now, and publish the answer. One at a time."""
        written, soon = self._journal.written, False
        try:
            found = await self._ask()
        except AdvisorError as error:
            if not self._failing:
                log.warning("advice on the number of slots is not renewed: %s", error)
            self._failing = True
        else:
            self._failing = False
            self._publish(found)
            soon = not any(one.slots for one in found.values())
        self._schedule.asked(time.monotonic(), written, soon=soon)

    async def _ask(self) -> dict[str, Advised]:
        asked = question(self._path, self._settings.latest, self._backends())
        try:
            process = await asyncio.create_subprocess_exec(
                *(*self._command, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each of its threads would take memory
                start_new_session=True,  # Ctrl-C is not meant for it
            )
        except OSError as error:
            raise AdvisorError(f"no process could be started: {error.strerror or error}") from error
        try:
            async with asyncio.timeout(self._patience):
                out, err = await process.communicate(asked)
        except TimeoutError as error:
            raise AdvisorError(f"there was no answer in {self._patience:g} s") from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.communicate()  # closes its pipes as well
        if process.returncode:
            said = err.decode(errors="replace").strip().rpartition("\n")[2]
            how = f"exit status {process.returncode}"
            raise AdvisorError(f"{said} ({how})" if said else how)
        try:
            return read_answer(out)
        except (AttributeError, TypeError, ValueError) as error:
            raise AdvisorError("the answer cannot be understood") from error
