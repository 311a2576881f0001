"""What tests of the launcher share: a recorder in the place of router and terminal, and stub engines."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmslot.launcher.engine import Engine, EngineKind, parse_help
from warmslot.launcher.supervisor import Launch
from warmslot.router.config import Backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmslot.launcher.command import Flag
    from warmslot.launcher.logs import Loading, LogEvent, LogLine
    from warmslot.launcher.process import State

STUB = Path(__file__).with_name("stub_engine.py")

STUB_HELP = """\
-m,    --model FNAME
-np,   --parallel N
-c,    --ctx-size N
--host HOST
--port PORT
--mode MODE
--mark TEXT
"""

PATIENCE = 60.0
"""Seconds after which a test that waits for an event has failed."""


class Recorder:
    """Listener and watcher in one: writes down all that it is told, in order, and lets tests wait for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.events: list[LogEvent] = []
        self.lines: list[str] = []
        self.idle = asyncio.Event()
        """Clear it, and drains take until it is set."""
        self.idle.set()
        self._changed = asyncio.Condition()
        self._waker: set[asyncio.Task[None]] = set()

    async def backend_ready(self, name: str, url: str, slots: int, context: int, *, fresh: bool) -> None:
        self._note(("ready", name, url, slots, context, fresh))

    async def backend_draining(self, name: str) -> None:
        self._note(("draining", name))
        if not self.idle.is_set():
            try:
                await self.idle.wait()
            except asyncio.CancelledError:
                self._note(("resumed", name))
                raise

    async def backend_down(self, name: str, reason: str) -> None:
        self._note(("down", name, reason))

    def log_event(self, name: str, event: LogEvent) -> None:  # noqa: ARG002
        self.events.append(event)
        self._note(None)

    def state(self, name: str, state: State, reason: str) -> None:
        self._note(("state", name, state.value, reason))

    def line(self, name: str, line: LogLine) -> None:  # noqa: ARG002
        self.lines.append(line.message)
        self._note(None)

    def loading(self, name: str, event: Loading) -> None:
        self._note(("loading", name, event.stage.value))

    def left_out(self, name: str, flags: Sequence[Flag]) -> None:
        self._note(("left_out", name, [str(flag) for flag in flags]))

    def _note(self, call: tuple[Any, ...] | None) -> None:
        if call is not None:
            self.calls.append(call)
        task = asyncio.create_task(self._wake())
        self._waker.add(task)
        task.add_done_callback(self._waker.discard)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def states(self, name: str) -> list[str]:
        """The states that a backend went through."""
        return [call[2] for call in self.calls if call[:2] == ("state", name)]

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        """All calls of one kind, without the kind."""
        return [call[1:] for call in self.calls if call[0] == kind]

    async def until(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        """Wait for the ``count``-th call of a kind."""
        await self.until_true(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[count - 1]

    async def until_state(self, name: str, state: str, count: int = 1) -> str:
        """Wait until a backend has entered ``state`` ``count`` times; returns the reason of that time."""
        await self.until_true(lambda: Counter(self.states(name))[state] >= count)
        return [call[3] for call in self.calls if call[:3] == ("state", name, state)][count - 1]

    async def until_true(self, condition: Any) -> None:
        """Wait until ``condition()`` holds; asked again after each call."""
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(condition)


def stub_launch(folder: Path, mode: str, *, name: str = "stub", **settings: Any) -> Launch:
    """A launch of the stub engine in ``mode`` (see its docstring)."""
    model = folder / "model.gguf"
    model.write_bytes(b"GGUF and nothing else")
    engine = Engine(EngineKind.STOCK, (sys.executable, "-S", "-P", str(STUB)), "test", parse_help(STUB_HELP))
    args = ("--mode", mode, *settings.pop("args", ()))
    settings = {"model": str(model), "slots": 2, "context": 512, **settings}
    return Launch(Backend(name=name, args=args, **settings), engine)


def gone(pid: int) -> bool:
    """Wait until a process (no child of ours) is gone; False when it is still there after a long time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], PATIENCE)[0])
    finally:
        os.close(descriptor)
