"""One engine process: its states, and the child that goes through them.

The life of a backend is the table :data:`TRANSITIONS`, and nothing else changes a state. :class:`Child` is
the operating-system half: own session, dead with its parent, output read without ever holding it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

import psutil

from .logs import Level, Listening, LogLine, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from .command import Command


class State(StrEnum):
    """Where a backend is in its life."""

    ABSENT = "absent"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    CRASHED = "crashed"
    BACKING_OFF = "backing-off"
    FAILED = "failed"


class Event(StrEnum):
    """What can happen to a backend."""

    ADOPT = "adopt"
    """It runs already, started by an earlier launcher, and serves."""
    START = "start"
    """It is to run (asked for, or its back-off is over)."""
    SPAWNED = "spawned"
    HEALTHY = "healthy"
    DRAIN = "drain"
    """It is to finish what it does and take nothing new."""
    RESUME = "resume"
    """The drain is called off."""
    STOP = "stop"
    """It is to end (after a drain: nothing runs any more)."""
    EXITED = "exited"
    """The process is gone, or could not be made."""
    BACK_OFF = "back-off"
    GIVE_UP = "give-up"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.ABSENT, Event.START): State.STARTING,
    (State.ABSENT, Event.ADOPT): State.READY,
    (State.ABSENT, Event.STOP): State.STOPPED,
    (State.STARTING, Event.SPAWNED): State.LOADING,
    (State.STARTING, Event.EXITED): State.CRASHED,
    (State.STARTING, Event.STOP): State.STOPPING,
    (State.LOADING, Event.HEALTHY): State.READY,
    (State.LOADING, Event.EXITED): State.CRASHED,
    (State.LOADING, Event.DRAIN): State.STOPPING,
    (State.LOADING, Event.STOP): State.STOPPING,
    (State.READY, Event.DRAIN): State.DRAINING,
    (State.READY, Event.STOP): State.STOPPING,
    (State.READY, Event.EXITED): State.CRASHED,
    (State.DRAINING, Event.RESUME): State.READY,
    (State.DRAINING, Event.STOP): State.STOPPING,
    (State.DRAINING, Event.EXITED): State.CRASHED,
    (State.STOPPING, Event.EXITED): State.STOPPED,
    (State.STOPPING, Event.STOP): State.STOPPING,
    (State.STOPPED, Event.START): State.STARTING,
    (State.STOPPED, Event.STOP): State.STOPPED,
    (State.CRASHED, Event.BACK_OFF): State.BACKING_OFF,
    (State.CRASHED, Event.GIVE_UP): State.FAILED,
    (State.CRASHED, Event.STOP): State.STOPPED,
    (State.BACKING_OFF, Event.START): State.STARTING,
    (State.BACKING_OFF, Event.STOP): State.STOPPED,
    (State.FAILED, Event.START): State.STARTING,
    (State.FAILED, Event.STOP): State.STOPPED,
}
"""Every legal step. A pair that is not here is a mistake of ours and raises."""

ALIVE = frozenset({State.LOADING, State.READY, State.DRAINING, State.STOPPING})
"""The states in which a process may exist."""


class IllegalTransitionError(Exception):
    """An event that cannot happen in this state."""


def transition(state: State, event: Event) -> State:
    """The state after ``event``. Raises :class:`IllegalTransitionError`."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(f"a backend that is {state} cannot meet the event {event}") from None


MAX_LINE = 16 * 1024
"""Bytes of one line of output that are kept; what is beyond is dropped."""

_TAIL = 60
"""Lines of output kept for the explanation of a failure."""

_LATE = 2.0
"""Seconds that output may still come after the process group is gone."""

_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


class _Output(asyncio.Protocol):
    """Cuts what comes out of a pipe into lines. Reads as fast as the child writes, whatever the lines are."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_line = on_line
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """Hand over the lines that are complete; of an endless one only the beginning is kept."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line)
        self._rest = rest[: MAX_LINE + 1]

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - an end is an end
        """The last writer is gone."""
        if self._rest:
            self._on_line(self._rest)
        if not self.closed.done():
            self.closed.set_result(None)


class Child:
    """A running engine: its output as lines, its end as a future.

    Made by :meth:`spawn` only. Its whole process group is killed when its first process ends, so that an
    engine behind a wrapper script does not outlive it. (asyncio's own subprocesses count as running until
    the last holder of their pipes is gone: with them such an engine would hide the end of its wrapper.)
    """

    def __init__(self, process: subprocess.Popen[bytes], on_line: Callable[[LogLine], None]) -> None:
        self.pid = process.pid
        self.tail: deque[LogLine] = deque(maxlen=_TAIL)
        self._process = process
        self._on_line = on_line
        self._announced: str | None = None
        self.exited: asyncio.Task[int] = asyncio.create_task(self._attend(), name=f"process {self.pid}")
        """Done when the process is gone and all of its output was read; the result is the exit status,
        negative for a signal."""

    @classmethod
    def spawn(cls, command: Command, on_line: Callable[[LogLine], None], *, outlive: bool = False) -> Child:
        """Start ``command``; ``on_line`` gets each line of output and must return at once. Raises OSError.

        ``outlive``: it lives on when we are killed. Belongs on the main thread: the system ties the
        parent-death signal to the thread that forks.
        """
        process = subprocess.Popen(  # noqa: S603 - the program is the operator's own choice
            command.argv,
            env=dict(command.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=None if outlive else die_with_parent(os.getpid()),  # noqa: PLW1509 - two system calls, made ready before
        )
        return cls(process, on_line)

    def address(self) -> str | None:
        """Where the engine listens, or ``None`` as long as it does not.

        The engine says it in its log once it has loaded; before that the system is asked which port the
        processes of this group listen on, so that a stranger on a port that we wanted is never taken for
        our engine.
        """
        if self._announced is None and (ports := sorted(_listening(self.pid))):
            return f"http://127.0.0.1:{ports[0]}"
        return self._announced

    def terminate(self) -> None:
        """Ask the engine to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the engine and whatever else is in its process group."""
        self._signal(signal.SIGKILL)

    async def stop(self, patience: float) -> int:
        """Ask to end, wait ``patience`` seconds, then kill; returns the exit status.

        However this call ends, cancelled or not, the process has been killed or is gone.
        """
        try:
            self.terminate()
            done, _ = await asyncio.wait({self.exited}, timeout=patience)
            if not done:
                self.kill()
            return await asyncio.shield(self.exited)
        finally:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def _attend(self) -> int:
        """Read until the process is gone, then see to what it leaves."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[int] = loop.create_future()
        threading.Thread(target=self._wait, args=(loop, gone), daemon=True, name=f"wait {self.pid}").start()
        transport, output = await loop.connect_read_pipe(lambda: _Output(self._line), self._process.stdout)
        try:
            return await gone
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            await asyncio.wait({output.closed}, timeout=_LATE)  # longer only if a stranger holds the pipe
            transport.close()

    def _wait(self, loop: asyncio.AbstractEventLoop, gone: asyncio.Future[int]) -> None:
        status = self._process.wait()

        def tell() -> None:
            if not gone.done():
                gone.set_result(status)

        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody asks any more
            loop.call_soon_threadsafe(tell)

    def _line(self, raw: bytes) -> None:
        cut = "…" if len(raw) > MAX_LINE else ""
        line = parse(raw[:MAX_LINE].decode(errors="replace") + cut)
        if self._announced is None and isinstance(line.event, Listening):
            self._announced = line.event.url
        if line.message.strip():
            self.tail.append(line)
        self._on_line(line)


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """What a child does at its beginning, so that it cannot outlive a parent that is killed.

    An engine does it between fork and exec. ``None`` where the system knows no such thing.
    """
    prctl = _PRCTL
    if prctl is None:
        return None
    kill, getppid, leave = int(signal.SIGKILL), os.getppid, os._exit

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, kill)
        if getppid() != parent:  # it died before the call above
            leave(1)

    return prepare


def _listening(pid: int) -> set[int]:
    """The TCP ports that a process and its descendants listen on, as far as the system tells."""
    ports: set[int] = set()
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                ports.update(
                    connection.laddr.port
                    for connection in process.net_connections("inet")
                    if connection.status == psutil.CONN_LISTEN
                )
    return ports


_GENERIC = (
    "failed to load model",
    "failed to fit params",
    "while trying to fit params",
    "exiting due to",
    "error loading model: llama_model_loader",
)
"""Errors that only repeat that something went wrong."""

_HOPELESS = (
    "invalid argument",
    "invalid magic",
    "unknown model architecture",
    "failed to read key-value pairs",
    "data is not within the file bounds",
    "failed to open GGUF file",
    "error: option",
    "has no option",
)
"""What another try will not change."""


def explain_exit(status: int | None, tail: deque[LogLine]) -> tuple[str, bool]:
    """Say in one line why a process ended, and whether trying again is pointless.

    ``status`` is ``None`` where it is not known.

    The engine's most telling line is its first error that is not a mere echo of another.
    """
    errors = [
        " ".join(line.message.split()) for line in tail if line.level is Level.ERROR or _plain_error(line)
    ]
    telling = [text for text in errors if not any(generic in text for generic in _GENERIC)]
    said = (telling or errors or [""])[0]
    hopeless = any(mark in text for text in errors for mark in _HOPELESS)
    how = "it ended" if status is None else f"exit status {status}"
    if status is not None and status < 0:
        how = f"killed by {_signal_name(-status)}"
        if -status == signal.SIGKILL:
            how += " (out of memory?)"
    return (f"{said} ({how})" if said else how), hopeless


def _plain_error(line: LogLine) -> bool:
    return line.level is None and "error" in line.message.lower()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
