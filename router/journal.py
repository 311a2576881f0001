"""The journal: an append-only record of requests in a file that rotates, written by a thread of its own.

The event loop only puts a finished request on a bounded queue; when that is full, the request is dropped and
counted. Hashing, fingerprints and writing happen in the thread. Each batch of lines goes to the operating
system at once, so that a crash of the router loses at most what was still queued; it is forced to the disk
every few seconds and when a file is full, so that a crash of the machine loses no more than those seconds. A
line that was torn by a crash is closed before the next is written, and dropped by whoever reads.

No text of prompts is written unless ``journal.text`` says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from .outline import Outliner
from .records import REQUEST, BackendChange, Decoder, Encoder, Entry, LineError, Opening, Record
from .values import Route, extend_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .config import Journal as JournalConfig
    from .values import Lease, Outcome, Report

log = logging.getLogger("warmslot.router")

QUEUE_BYTES: Final = 64 * 1024 * 1024
"""Prompts and bodies of this size may wait for the writer."""

QUEUE_ENTRIES: Final = 8192

CLOSE_SECONDS: Final = 5.0
"""How long :meth:`Journal.close` waits for what is queued."""


class JournalError(Exception):
    """The journal cannot be opened; the message names the file and why."""


@dataclass(slots=True)
class _Finished:
    """What the event loop hands over: nothing in it changes any more."""

    lease: Lease
    report: Report
    outcome: Outcome
    arrived: float
    ended: float
    body: Mapping[str, Any] | None
    in_flight: int
    demand: int
    size: int
    masked: int
    sorted_tools: bool


@dataclass(slots=True)
class _Running:
    in_flight: int
    demand: int
    body: Mapping[str, Any] | None = None
    masked: int = 0
    sorted_tools: bool = False


class Journal:
    """An :class:`~.observer.Observer` that writes what it is told. Use it from one event loop.

    ``clock`` is the dispatcher's; ``wall`` gives Unix time. Call :meth:`open` before and :meth:`close` after.
    """

    def __init__(
        self,
        config: JournalConfig,
        pools: Mapping[str, Sequence[str]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._keeps_text = config.text
        self._clock = clock
        self._offset = wall() - clock()
        self._running: dict[str, _Running] = {}
        self._in_flight: dict[str, int] = {}
        self._demand: dict[str, int] = {}
        self._queue: deque[_Finished | BackendChange] = deque()
        self._queued_bytes = 0
        self._stop = False
        self._changed = threading.Condition()
        self._outliner = Outliner()
        self._pools: dict[str, list[str]] = {}
        self.follow(pools or {})
        self._writer = Writer(config, lambda: Opening(self._wall(self._clock()), self._pools))
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Requests that were not written: the queue was full, or the disk was."""

    @property
    def written(self) -> int:
        """Requests that were written."""
        return self._writer.written

    def follow(self, pools: Mapping[str, Sequence[str]]) -> None:
        """From now on there are these pools with these backends: the next file begins with that."""
        self._pools = {pool: list(backends) for pool, backends in pools.items()}

    def open(self) -> None:
        """Open the file and start the thread. Raises :class:`JournalError`."""
        self._writer.open()
        self._thread = threading.Thread(target=self._work, name="warmslot-journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is queued and close the file. Blocks, for :data:`CLOSE_SECONDS` at most."""
        if self._thread is None:
            return
        with self._changed:
            self._stop = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)
        self._thread = None

    def _wall(self, moment: float) -> float:
        return moment + self._offset

    # -- told by the handlers ------------------------------------------------------------------------------

    def describe(
        self, request_id: str, body: Mapping[str, Any], *, masked: int = 0, sorted_tools: bool = False
    ) -> None:
        """The body of a request that has a lease. It must not be changed afterwards.

        ``masked`` bytes of its prompt were left out of the key; its tools were ``sorted_tools``.
        """
        running = self._running.get(request_id)
        if running is not None:
            running.body, running.masked, running.sorted_tools = body, masked, sorted_tools

    # -- told by the dispatcher ----------------------------------------------------------------------------

    def demanded(self, pool: str, by: int, now: float) -> None:
        """So many more requests are in flight or queued."""
        del now
        self._demand[pool] = self._demand.get(pool, 0) + by

    def granted(self, lease: Lease, decision_seconds: float) -> None:
        """A lease was given out."""
        del decision_seconds
        backend = lease.slot.backend
        self._in_flight[backend] = self._in_flight.get(backend, 0) + 1
        self._running[lease.request.id] = _Running(
            self._in_flight[backend], max(1, self._demand.get(lease.request.pool, 1))
        )

    def decoding(self, lease: Lease, now: float) -> None:
        """A first token: the outcome will tell when."""

    def finished(self, lease: Lease, report: Report, outcome: Outcome, now: float) -> None:
        """A lease was taken back."""
        backend, request = lease.slot.backend, lease.request
        self._in_flight[backend] = max(0, self._in_flight.get(backend, 0) - 1)
        running = self._running.pop(request.id, None)
        if running is None:  # given back before its taker had it
            return
        size = request.prompt.length * (2 if running.body else 1) + len(outcome.generated) + 1024
        arrived = request.arrived or lease.granted - report.queue_seconds
        self._put(
            _Finished(
                *(lease, report, outcome, arrived, now),
                *(running.body, running.in_flight, running.demand, size),
                *(running.masked, running.sorted_tools),
            ),
            size,
        )

    def backend_changed(self, backend: str, *, up: bool, slots: int, context: int, reason: str) -> None:
        """A backend came up or went down."""
        if not up:
            self._in_flight.pop(backend, None)
        self._put(BackendChange(self._wall(self._clock()), backend, up, slots, context, reason), 1024)

    def engine_selected(self, backend: str, by: str) -> None:
        """Of no interest here: the lease says where a request ran."""

    # -- between loop and thread ---------------------------------------------------------------------------

    def _put(self, item: _Finished | BackendChange, size: int) -> None:
        with self._changed:
            full = self._queued_bytes + size > QUEUE_BYTES or len(self._queue) >= QUEUE_ENTRIES
            if self._stop or (full and self._queue):
                self.dropped += 1
                return
            self._queue.append(item)
            self._queued_bytes += size
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stop:
                    if not self._changed.wait(self._writer.sync_due()):
                        break
                batch = list(self._queue)
                self._queue.clear()
                self._queued_bytes = 0
                over = self._stop and not batch
            if over:
                break
            lost = sum(not self._write(entry) for entry in self._entries(batch))
            lost += self._writer.flush()
            if lost:
                with self._changed:
                    self.dropped += lost
        self._writer.close()

    def _write(self, entry: Record | BackendChange) -> bool:
        try:
            return self._writer.put(entry)
        except Exception:  # the journal must outlive whatever a client sends
            log.exception("the journal cannot write down a request")
            return False

    def _entries(self, batch: Sequence[_Finished | BackendChange]) -> Iterator[Record | BackendChange]:
        for item in batch:
            if isinstance(item, BackendChange):
                yield item
                continue
            try:
                yield self._record(item)
            except Exception:  # the journal must outlive whatever a client sends
                log.exception("the journal cannot describe a request")
                with self._changed:
                    self.dropped += 1

    def _record(self, item: _Finished) -> Record:
        lease, report, outcome = item.lease, item.report, item.outcome
        request, prompt = lease.request, lease.request.prompt
        told = not report.truth_missing
        data, generated = prompt.data or b"", outcome.generated
        after, after_length = prompt.chain, prompt.length
        if generated and prompt.data is not None and request.slots == 1:
            after = extend_chain(prompt.chain, data + generated, root=prompt.root)
            after_length += len(generated)
        body = item.body
        return Record(
            id=request.id,
            time=self._wall(item.arrived),
            pool=request.pool,
            backend=report.slot.backend,
            slot=report.slot.slot,
            route=str(request.route),
            status=str(report.status),
            decision=str(report.decision),
            chain=prompt.chain,
            length=prompt.length,
            after=after,
            after_length=after_length,
            root=prompt.root,
            session=report.session or request.session or "",
            client=request.client,
            priority=str(request.priority),
            prompt_tokens=report.cached_tokens + report.processed_tokens if told else lease.prompt_tokens,
            cached_tokens=report.cached_tokens if told else None,
            host_tokens=report.host_tokens,
            predicted_tokens=report.predicted_tokens,
            output_tokens=report.output_tokens,
            max_output_tokens=request.max_output_tokens,
            losses={str(reason): tokens for reason, tokens in report.losses.items()},
            granted=lease.granted - item.arrived,
            queued=report.queue_seconds,
            first_token=outcome.ttft_seconds,
            ended=item.ended - item.arrived,
            prefill_seconds=outcome.prefill_seconds,
            decode_seconds=outcome.decode_seconds,
            drafted_tokens=outcome.drafted_tokens,
            accepted_tokens=outcome.accepted_tokens,
            in_flight=item.in_flight,
            demand=item.demand,
            slots=request.slots,
            pinned=request.pinned,
            keeps_prefix=request.keeps_prefix,
            masked=item.masked,
            sorted_tools=item.sorted_tools,
            candidates=lease.candidates,
            outline=self._outliner.outline({} if body is None else body, data),
            reply=self._outliner.reply(generated) if generated and request.route is Route.CHAT else None,
            text=_text_of(body, generated) if self._keeps_text else None,
        )


def _text_of(body: Mapping[str, Any] | None, generated: bytes) -> dict[str, Any]:
    names = ("tools", "functions", "system", "instructions", "messages", "input", "prompt")
    text = {name: body[name] for name in names if name in body} if body else {}
    text["reply"] = generated.decode("utf-8", "replace")
    return text


class Writer:
    """The files: appends entries, rotates by size, forces to disk. Belongs to one thread after :meth:`open`.

    ``opening`` makes the line that begins a file. Full files become ``NAME.1``, ``NAME.2`` and so on, the
    highest number being the oldest; all together stay below ``config.file_size`` times ``config.files``.
    """

    def __init__(
        self,
        config: JournalConfig,
        opening: Callable[[], Opening],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.path is None:
            raise JournalError("journal.path is not set")
        self.path = Path(config.path)
        self._limit, self._files, self._interval = config.file_size, config.files, config.sync
        self._opening, self._clock = opening, clock
        self._encoder = Encoder()
        self._file: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None
        self._size = 0
        self._pending: list[bytes] = []
        self._pending_requests = 0
        self._unsynced_since: float | None = None
        self._failing = False
        self._up: dict[str, BackendChange] = {}
        self.written = 0

    def open(self) -> None:
        """Open or create the file. Raises :class:`JournalError`: the folder is missing, or it is in use."""
        try:
            self._lock = _lock(self.path)
            self._open()
        except OSError as error:
            self._unlock()
            raise JournalError(f"journal {self.path}: {error.strerror or error}") from error

    def _open(self) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._size = self._file.seek(0, os.SEEK_END)
        if self._size and os.pread(descriptor, 1, self._size - 1) != b"\n":
            self._pending.append(b"\n")  # closes a line that was torn by a crash
        self._pending.append(self._encoder.opening(self._opening()))
        # Said in every file, since the one in which it was said first is thrown away one day.
        self._pending += [self._encoder.change(entry) for entry in self._up.values()]

    def put(self, entry: Record | BackendChange) -> bool:
        """Add one entry; whole files are rotated on the way. False if it was lost."""
        if isinstance(entry, BackendChange):
            self._up.pop(entry.backend, None)
            if entry.up:
                self._up[entry.backend] = entry
        if self._file is None and not self._reopen():
            return False
        line = self._line(entry)
        before = self._size + sum(map(len, self._pending))
        if before + len(line) > self._limit and (self._size or len(self._pending) > 1):
            self._write()
            self._rotate()
            if self._file is None:
                return False
            line = self._line(entry)
        self._pending.append(line)
        self._pending_requests += isinstance(entry, Record)
        return True

    def _line(self, entry: Record | BackendChange) -> bytes:
        return self._encoder.request(entry) if isinstance(entry, Record) else self._encoder.change(entry)

    def flush(self) -> int:
        """Hand what was put to the operating system, and force it to disk when that is due.

        Gives how many requests were lost because it could not be written.
        """
        lost = self._write()
        if self._file is not None and self._unsynced_since is not None and self.sync_due() == 0:
            self._sync()
        return lost

    def sync_due(self) -> float | None:
        """Seconds until the next forcing to disk; ``None`` when nothing waits for it."""
        if self._unsynced_since is None:
            return None
        return max(0.0, self._unsynced_since + self._interval - self._clock())

    def close(self) -> None:
        """Write, force to disk, close."""
        self._write()
        self._sync()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._unlock()

    def _write(self) -> int:
        if not self._pending or self._file is None:
            return 0
        data, requests = b"".join(self._pending), self._pending_requests
        self._pending.clear()
        self._pending_requests = 0
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._fail(error)
            return requests
        self._failing = False
        self._size += len(data)
        self.written += requests
        if self._unsynced_since is None:
            self._unsynced_since = self._clock()
        return 0

    def _fail(self, error: OSError) -> None:
        """Say so once, and begin anew with the next entry: later lines must not build on lost ones."""
        if not self._failing:
            log.error("journal %s cannot be written: %s", self.path, error.strerror or error)
        self._failing = True
        self._pending.clear()
        self._pending_requests = 0
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _reopen(self) -> bool:
        try:
            self._open()
        except OSError as error:
            self._fail(error)
        return self._file is not None

    def _sync(self) -> None:
        self._unsynced_since = None
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._fail(error)

    def _rotate(self) -> None:
        self._sync()
        if self._file is not None:
            self._file.close()
            self._file = None
        try:
            for number in range(self._files - 1, 0, -1):
                older = _numbered(self.path, number)
                newer = _numbered(self.path, number - 1)
                if newer.exists():
                    newer.replace(older)
            if self._files == 1:
                self.path.unlink()
        except OSError as error:
            self._fail(error)
        self._reopen()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _lock(path: Path) -> IO[bytes] | None:
    """Keep a second router from writing the same journal; the lock ends with the process."""
    try:
        import fcntl  # noqa: PLC0415  # not on every system
    except ImportError:  # no such locks on this system
        return None
    file = path.with_name(f"{path.name}.lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise JournalError(f"journal {path}: another router writes it") from None
    return file


# -- reading -----------------------------------------------------------------------------------------------


def files_of(path: Path) -> list[Path]:
    """The files of a journal, oldest first: the rotated ones, then ``path`` itself."""
    rotated = []
    for file in path.parent.glob(f"{path.name}.*"):
        number = file.name[len(path.name) + 1 :]
        if number.isdigit():
            rotated.append((int(number), file))
    found = [file for _, file in sorted(rotated, reverse=True)]
    return [*found, path] if path.exists() else found


def newest_of(files: Sequence[Path], requests: int) -> list[Path]:
    """The last of a journal's files, as many as hold so many requests; all of them if those are fewer.

    Raises OSError.
    """
    kept: list[Path] = []
    for file in reversed(files):
        if requests <= 0:
            break
        kept.insert(0, file)
        with file.open("rb") as stream:
            requests -= sum(line.startswith(REQUEST) for line in stream)
    return kept


@dataclass(slots=True)
class Reading:
    """How the reading of a journal went."""

    lines: int = 0
    skipped: int = 0
    """Lines that were torn, foreign, or shared their beginning with a lost one."""
    why: str = ""
    """File, line number and what was wrong with the first of these."""


def read(path: Path, reading: Reading | None = None, files: Sequence[Path] | None = None) -> Iterator[Entry]:
    """All entries of a journal, rotated files included, in the order in which they were written.

    That a backend is up is said again in each file; it is given once. What cannot be read is skipped and
    counted in ``reading``. ``files``: those that are read, in their order, else all. Raises
    :class:`JournalError` where there is no file, or not one line of a journal in it.
    """
    reading = Reading() if reading is None else reading
    files = files_of(path) if files is None else files
    told: dict[str, BackendChange] = {}
    if not files:
        raise JournalError(f"journal {path}: no such file")
    understood = False
    for file in files:
        decoder = Decoder()
        try:
            with file.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    reading.lines += 1
                    try:
                        entry = decoder.feed(line)
                    except LineError as error:
                        reading.skipped += 1
                        reading.why = reading.why or f"{file}:{number}: {error}"
                        continue
                    if entry is None:
                        continue
                    understood = True
                    if isinstance(entry, BackendChange):
                        if told.get(entry.backend) == entry:
                            continue
                        told[entry.backend] = entry
                    yield entry
        except OSError as error:
            raise JournalError(f"journal {file}: {error.strerror or error}") from error
    if reading.lines and not understood:
        why = reading.why or "nothing of a known kind"
        raise JournalError(f"{path} is not a journal: {why}; no line of it is readable")
