"""What is done beside each launched backend while it is there: looks at its progress, saving in idle."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .progress import ProgressWatch

if TYPE_CHECKING:
    from warmslot.router.dispatcher import Dispatcher

    from .supervisor import Supervisor
    from .warmth import Warmth


class Attendants:
    """The tasks of all backends."""

    def __init__(self, supervisor: Supervisor, dispatcher: Dispatcher, warmth: Warmth) -> None:
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._warmth = warmth
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    def attend(self, name: str) -> None:
        """Look after a backend as its settings in force say, in place of whatever was done for it so far."""
        self.leave(name)
        backend = self._supervisor.backend(name)
        tasks = self._tasks[name] = []
        if timeout := backend.progress_timeout:
            watch = ProgressWatch(name, self._supervisor, self._dispatcher, timeout)
            tasks.append(asyncio.create_task(watch.run(), name=f"progress {name}"))
        if backend.slot_save_path is not None and (every := backend.slot_save_every):
            keeping = self._warmth.keep_saved(name, every)
            tasks.append(asyncio.create_task(keeping, name=f"save {name}"))

    def leave(self, name: str) -> None:
        """Look after a backend no more."""
        for task in self._tasks.pop(name, ()):
            task.cancel()

    def close(self) -> None:
        """Look after none."""
        for name in list(self._tasks):
            self.leave(name)
