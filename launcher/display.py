"""Tells the operator what happens: start and end of backends, loading, the engines' own logs.

On a terminal loading shows as one line that moves; elsewhere every stage is a line of its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console

from .logs import Level
from .process import State

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from rich.status import Status

    from .command import Flag
    from .logs import Loading, LogLine


def plain_console(output: TextIO) -> Console:
    """One that prints lines as they are."""
    return Console(file=output, soft_wrap=True, highlight=False, markup=False, emoji=False)


class Display:
    """The :class:`~.supervisor.Watcher` of ``warmslot up``.

    ``quiet`` leaves out all of the engines' log lines but errors.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._loading: dict[str, str] = {}
        self._began: dict[str, float] = {}
        self._status: Status | None = None

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text)

    def close(self) -> None:
        """Take the moving line away."""
        self._loading.clear()
        self._show_loading()

    # -- what a supervisor tells -------------------------------------------------------------------------

    def state(self, name: str, state: State, reason: str) -> None:
        """A backend entered a state."""
        if state in {State.STARTING, State.LOADING}:
            self._began.setdefault(name, time.monotonic())
            self._loading.setdefault(name, str(state))
        else:
            self._loading.pop(name, None)
        self._show_loading()
        if state is State.READY:
            seconds = time.monotonic() - self._began.pop(name, time.monotonic())
            self.say(f"{name}: ready after {seconds:.1f} s")
        elif state in {State.BACKING_OFF, State.FAILED}:
            self._began.pop(name, None)
            self.say(f"{name}: {state}: {reason}")

    def line(self, name: str, line: LogLine) -> None:
        """A line of the engine's output."""
        if line.message.strip() and (not self._quiet or line.level is Level.ERROR):
            self.say(f"{name} | {line.message.rstrip()}")

    def loading(self, name: str, event: Loading) -> None:
        """Loading reached a stage."""
        if name in self._loading:
            self._loading[name] = str(event.stage)
            self._show_loading()
        if not self._console.is_terminal:
            self.say(f"{name}: {event.stage}")

    def left_out(self, name: str, flags: Sequence[Flag]) -> None:
        """The engine does not know these flags."""
        for flag in () if self._quiet else flags:
            self.say(f"{name}: this engine has no option {flag.name}, left out ({flag.why})")

    def _show_loading(self) -> None:
        if not self._console.is_terminal:
            return
        text = "   ".join(f"{name}: {stage} …" for name, stage in self._loading.items())
        if not text:
            if self._status is not None:
                self._status.stop()
                self._status = None
        elif self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)
