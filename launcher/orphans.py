"""Finds what a killed launcher left running, so that no second engine is started beside the first.

Each backend has a record in the state folder from before its process exists until it is known to be gone. A
process is ours when its id *and* start time are those of the record, or when its environment carries the
record's mark: an id alone may long belong to a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import orjson
import psutil

if TYPE_CHECKING:
    from pathlib import Path

    from .logs import LogLine

log = logging.getLogger("warmslot.launcher")

_MARK_BYTES = 8

MARK = "WARMSLOT_BACKEND"
"""Environment variable by which a backend's processes are known, wrappers' children included."""

_CLOCK_SLACK = 2.0
"""Seconds by which the start time of one process may differ between two readings (the clock was set)."""

_END_TIMEOUT = 10.0
"""Seconds that a killed process may take to be gone (memory of a GPU is given back in that time)."""


class LeftoverError(Exception):
    """An earlier launcher's engine is in the way and cannot be ended; one line."""


class OwnedError(Exception):
    """Another launcher runs this configuration; one line."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Processes of one backend that outlived their launcher. The first may be the engine's own."""

    processes: tuple[psutil.Process, ...]
    alive: bool
    """Whether the process that was started is among them, as the first."""
    url: str | None
    """Where it served, if it ever did."""
    fingerprint: str

    def end(self) -> None:
        """Kill them and wait until they are gone. Blocks. Raises :class:`LeftoverError`."""
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(list(self.processes), timeout=_END_TIMEOUT)
        if alive:
            pids = ", ".join(str(process.pid) for process in alive)
            raise LeftoverError(f"process {pids} of an earlier run does not end, even when killed")


class StateFolder:
    """The records of one configuration's backends, and the lock that keeps it to one launcher at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def acquire(self) -> None:
        """Make the folder and lock it until :meth:`release` or the end of this process.

        Raises :class:`OwnedError` where another launcher holds it, OSError where it cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise OwnedError(f"another warmslot (process {owner}) uses the state in {self.path}") from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._lock = descriptor

    def release(self) -> None:
        """Unlock it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def announce(self, name: str, fingerprint: str) -> str:
        """A process is about to be made for a backend; returns the mark that it is to carry."""
        mark = f"{name}-{secrets.token_hex(_MARK_BYTES)}"
        self._write(name, {"mark": mark, "announced": time.time(), "fingerprint": fingerprint})
        return mark

    def started(self, name: str, pid: int) -> None:
        """It was made."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._update(name, pid=pid, started=psutil.Process(pid).create_time())

    def serving(self, name: str, url: str) -> None:
        """It serves."""
        self._update(name, url=url)

    def remove(self, name: str) -> None:
        """It is gone."""
        self._file(name).unlink(missing_ok=True)

    def leftover(self, name: str) -> Leftover | None:
        """What still runs of a backend by its record. Looks at every process: slow, but rarely needed.

        Of a damaged record nothing is believed: what is named here may be killed.
        """
        record = self._read(name)
        if record is None:
            return None
        mark, announced = record.get("mark"), record.get("announced")
        if not _is_mark(mark, name) or not isinstance(announced, float):
            log.warning("%s: the record is damaged and ignored", self._file(name))
            return None
        leader = _started_at(record.get("pid"), record.get("started"), mark)
        others = [process for process in _marked(mark, announced) if process != leader]
        processes = (*([leader] if leader else []), *others)
        if not processes:
            self.remove(name)
            return None
        url = record.get("url")
        return Leftover(
            processes,
            alive=leader is not None,
            url=url if isinstance(url, str) else None,
            fingerprint=str(record.get("fingerprint")),
        )

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            record = orjson.loads(self._file(name).read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None
        return record if isinstance(record, dict) else None

    def _update(self, name: str, **fields: Any) -> None:
        self._write(name, {**(self._read(name) or {}), **fields})

    def _write(self, name: str, record: dict[str, Any]) -> None:
        """Replace a record whole: a launcher that is killed meanwhile leaves the old one or the new one."""
        fresh = self._file(name).with_suffix(".new")
        try:
            fresh.write_bytes(orjson.dumps(record))
            fresh.replace(self._file(name))
        except OSError as error:  # a full disk is no reason not to serve
            log.warning("%s: what runs there cannot be noted: %s", name, error.strerror)


class Adopted:
    """An engine that another launcher started; to a runner it is as a :class:`~.process.Child`.

    Its output went to its launcher and is lost. It is no child of ours, so its exit status is unknown.
    """

    def __init__(self, found: Leftover) -> None:
        self.pid = found.processes[0].pid
        self.tail: deque[LogLine] = deque()
        self._found = found
        self.exited: asyncio.Task[None] = asyncio.create_task(self._attend(), name=f"process {self.pid}")

    def address(self) -> str | None:
        """Where it serves."""
        return self._found.url

    def kill(self) -> None:
        """End it and all that belongs to it."""
        self._signal(signal.SIGKILL)

    async def stop(self, patience: float) -> None:
        """Ask it to end, wait ``patience`` seconds, then kill."""
        try:
            self._signal(signal.SIGTERM)
            done, _ = await asyncio.wait({self.exited}, timeout=patience)
            if not done:
                self.kill()
            await asyncio.shield(self.exited)
        finally:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._found.processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    async def _attend(self) -> None:
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()

        def wait() -> None:
            with contextlib.suppress(psutil.Error):
                self._found.processes[0].wait()
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody asks any more
                loop.call_soon_threadsafe(gone.set)

        threading.Thread(target=wait, daemon=True, name=f"wait {self.pid}").start()
        await gone.wait()
        self.kill()


def _started_at(pid: object, started: object, mark: str) -> psutil.Process | None:
    """The process with this id, if it started at this time and, where that can be read, carries the mark."""
    if not isinstance(pid, int) or not isinstance(started, float) or pid <= 1:
        return None
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - started) >= _CLOCK_SLACK or process.status() == psutil.STATUS_ZOMBIE:
            return None
        with contextlib.suppress(psutil.AccessDenied):
            if process.environ().get(MARK) != mark:
                return None
    except (psutil.Error, OSError):
        return None
    return process


def _is_mark(mark: object, name: str) -> TypeGuard[str]:
    """Whether this is a mark as :meth:`StateFolder.announce` makes them, for this backend."""
    if not isinstance(mark, str):
        return False
    return re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{{2 * _MARK_BYTES}}}", mark) is not None


def _marked(mark: str, announced: float) -> list[psutil.Process]:
    """The processes that carry the mark, as far as they let us look.

    Only such as began after it was made; never this process or one that it descends from.
    """
    found = []
    ourselves = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid in ourselves:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            carried = process.environ().get(MARK)
            if carried is not None and carried == mark and process.create_time() > announced - _CLOCK_SLACK:
                found.append(process)
    return found
