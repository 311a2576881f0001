"""Where ``warmslot up`` prints: a writer on a thread of its own, so that no slow reader stops the serving.

A terminal that is paused, a pager, a pipe that nobody empties: writing to any of them waits for the reader,
and the router would wait with it. Here a write only puts text aside. What is put aside is bounded; beyond
that the oldest lines give way to new ones, and a line in their place says how many.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_WRITES = 10_000
"""Writes (mostly a line each) that are put aside."""
_LAST_WAIT = 2.0
"""Seconds that :meth:`Output.close` gives the reader to take what is left."""


class Output(io.TextIOBase):
    """A text stream onto a file descriptor whose writes never wait and never raise.

    The descriptor stays open. Text goes out in the order in which it came, encoded as UTF-8 or as
    ``encoding`` says, with ``?`` for what that lacks. Once the reader has gone, what is written is dropped.
    """

    def __init__(self, descriptor: int, *, encoding: str = "utf-8", limit: int = _MOST_WRITES) -> None:
        self._descriptor = descriptor
        self._encoding = encoding
        self._texts: deque[str] = deque()
        self._limit = limit
        self._left_out = 0
        self._gone = self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute there
        """What text is encoded as."""
        return self._encoding

    def writable(self) -> bool:
        """True."""
        return True

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def write(self, text: str) -> int:
        """Put text aside to be written; its length."""
        with self._changed:
            if text and not self._gone and not self._ending:
                self._texts.append(text)
                while len(self._texts) > self._limit:
                    self._left_out += max(1, self._texts.popleft().count("\n"))
                self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Nothing: it is on its way."""

    def close(self) -> None:
        """Take no more, and wait a moment for what is left to be read."""
        if not self.closed:
            with self._changed:
                self._ending = True
                self._changed.notify()
            self._thread.join(_LAST_WAIT)
        super().close()

    def _run(self) -> None:
        while (text := self._next()) is not None:
            try:
                self._write(text.encode(self._encoding, "replace"))
            except OSError:
                with self._changed:
                    self._gone = True
                    self._texts.clear()
                return

    def _next(self) -> str | None:
        """The next text, once there is one; None at the end."""
        with self._changed:
            while not self._texts and not self._ending:
                self._changed.wait()
            if self._left_out:
                left_out, self._left_out = self._left_out, 0
                return f"({left_out:,} lines are left out here: this output was not read in time)\n"
            return self._texts.popleft() if self._texts else None

    def _write(self, rest: bytes) -> None:
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # whoever shares it has made it non-blocking
                select.select([], [self._descriptor], [])


@contextlib.contextmanager
def standard_output(stream: TextIO) -> Iterator[TextIO]:
    """``sys.stdout`` as one whose writes never wait; as it is where it has no descriptor."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        yield stream
        return
    stream.flush()
    output = Output(descriptor, encoding=stream.encoding)
    with contextlib.closing(output):
        yield output  # type: ignore[misc]  # a TextIO in all but its parent
