"""The engines' logs in files of our own, which are put aside when they are full.

Writing never raises and never stops a backend: a full disk costs log lines, and is said once.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .logs import LogLine
    from .process import State

log = logging.getLogger("warmslot.launcher")

FOLDER = "logs"
_POLL = 0.2
"""Seconds between looks at a file that is followed."""


class _File(RotatingFileHandler):
    """A log file that says once when it cannot be written."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Called in an ``except`` block of the library."""
        del record
        if not self.failed:
            self.failed = True
            log.warning("%s cannot be written; lines of this log are lost", self.baseFilename)


class LogFiles:
    """One log file for each backend: the engine's lines, and what became of its process."""

    def __init__(self, state: Path, *, size: int, files: int) -> None:
        self._folder = state / FOLDER
        self._size, self._files = size, files
        self._open: dict[str, _File] = {}

    def line(self, name: str, line: LogLine) -> None:
        """A line of the engine's output."""
        if line.message.strip():
            self._write(name, str(line.level or " "), line.message.rstrip())

    def state(self, name: str, state: State, reason: str) -> None:
        """A backend entered a state."""
        self._write(name, "*", f"{state}: {reason}" if reason else str(state))

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _write(self, name: str, level: str, text: str) -> None:
        file = self._open.get(name)
        if file is None:
            file = self._make(name)
        moment = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        record = logging.makeLogRecord({"msg": f"{moment} {level} {text}", "args": ()})
        file.handle(record)

    def _make(self, name: str) -> _File:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("%s: %s; no log is kept", self._folder, error.strerror)
        file = self._open[name] = _File(
            self._folder / f"{name}.log",
            maxBytes=self._size,
            backupCount=max(0, self._files - 1),
            encoding="utf-8",
            errors="replace",
            delay=True,
        )
        return file


def file_of(state: Path, name: str) -> Path:
    """The current log file of a backend."""
    return state / FOLDER / f"{name}.log"


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log. Raises OSError."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return list(deque(file, maxlen=count))


def follow(path: Path, count: int) -> Iterator[str]:
    """The last ``count`` lines, then those that come, over every rotation; never ends by itself.

    Raises OSError where there is no such file.
    """
    file = path.open(encoding="utf-8", errors="replace")
    yield from deque(file, maxlen=count)
    while True:
        if line := file.readline():
            yield line
            continue
        if _replaced(path, file.fileno()):
            yield from file
            file.close()
            file = path.open(encoding="utf-8", errors="replace")
            continue
        time.sleep(_POLL)


def _replaced(path: Path, descriptor: int) -> bool:
    try:
        now = path.stat()
    except FileNotFoundError:  # between two steps of a rotation
        return False
    return (now.st_dev, now.st_ino) != (os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino)
