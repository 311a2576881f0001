"""The part of a journal that advice is made from, and what the journal tells of the backend that it ran on.

A journal is read twice, so that only the stretch and a few samples are ever in memory.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from warmslot.router.journal import JournalError, Reading, files_of, newest_of, read
from warmslot.router.records import BackendChange, Opening, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_EARLIER: Final = 256
"""Requests before a stretch that tell what was warm when it began."""

_READINGS: Final = 3
"""Of a journal whose files are put aside meanwhile."""

_SAMPLE: Final = 400
"""Requests of each kind that are kept for their rates alone."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a journal that is forecast, and what is known of its backend."""

    records: list[Record]
    earlier: list[Record]
    """Requests just before them."""
    whole: int
    """Requests in the journal."""
    slots: int
    context: int
    """Of the backend as the journal tells; 0 where it does not."""
    backend: str
    drafts: bool = False
    """Whether the backend drafted (speculative decoding) during most of the stretch."""
    otherwise: list[Record] = field(default_factory=list)
    """Requests of the same backend while it drafted, or did not, unlike in the stretch; for their rates."""

    @property
    def host(self) -> bool:
        """Whether the engine's prompt cache in host memory gave anything during the stretch."""
        return any(one.host_tokens > 0 for one in self.records)

    @property
    def drafted(self) -> int:
        """Tokens that speculation drafted in the stretch."""
        return sum(one.drafted_tokens for one in self.records)

    @property
    def accepted(self) -> int:
        """Of the drafted tokens, those that were kept."""
        return sum(one.accepted_tokens for one in self.records)


@dataclass(slots=True)
class _Run:
    """A backend from its start to its end; what it is launched with cannot change in between."""

    begun: float
    slots: int = 0
    context: int = 0
    drafts: bool = False
    sample: deque[Record] = field(default_factory=lambda: deque(maxlen=_SAMPLE))


class _Runs:
    """All runs of all backends, as they are told by a journal in its order."""

    def __init__(self) -> None:
        self._runs: dict[str, list[_Run]] = {}

    def see(self, entry: BackendChange | Record) -> None:
        """The next entry."""
        runs = self._runs.setdefault(entry.backend, [])
        if isinstance(entry, BackendChange):
            if entry.up:
                runs.append(_Run(entry.time, entry.slots, entry.context))
                self._forget(runs)
            return
        if not runs:
            runs.append(_Run(entry.time))
        runs[-1].drafts |= entry.drafted_tokens > 0
        runs[-1].sample.append(entry)

    @staticmethod
    def _forget(runs: list[_Run]) -> None:
        """Keep the samples of the last run of each kind only."""
        kinds = set[bool]()
        for run in reversed(runs[:-1]):
            if run.sample and run.drafts in kinds:
                run.sample.clear()
            elif run.sample:
                kinds.add(run.drafts)

    def at(self, backend: str, time: float) -> _Run:
        """The run that was under way at a time."""
        runs = self._runs.get(backend) or [_Run(time)]
        return next((run for run in reversed(runs) if run.begun <= time), runs[0])

    def sample(self, backend: str, *, drafts: bool) -> list[Record]:
        """Requests of the last run of a kind."""
        runs = (run for run in reversed(self._runs.get(backend, [])) if run.drafts is drafts and run.sample)
        return list(next(runs, _Run(0.0)).sample)


@dataclass(slots=True)
class _Times:
    """What a first reading tells of the requests that can be used."""

    of: list[tuple[float, int]] = field(default_factory=list)
    """When each came, and its tokens."""
    latest: deque[int] = field(default_factory=deque)
    """For each of the latest requests of any kind: how many that can be used had come before it."""

    @property
    def first(self) -> int:
        """Number of the first one that is looked at."""
        return self.latest[0] if self.latest else 0


@dataclass(frozen=True, slots=True)
class _Source:
    """A journal, and what of it is looked at."""

    path: Path
    files: list[Path]
    backend: str

    def usable(self, record: Record) -> bool:
        """Whether a request tells what is needed, and is of the backend."""
        return _usable(record) and self.backend in {"", record.backend}


def stretch(
    path: Path,
    limit: int,
    progress: Callable[[str, int, int], None],
    *,
    backend: str = "",
    latest: int | None = None,
) -> tuple[Stretch, Reading]:
    """The busiest ``limit`` requests in a row of a journal. Raises JournalError.

    ``backend``: of its requests; else of all, and then those of the backend that has most of them.
    ``latest``: of so many of the latest requests in the journal.
    """
    for _ in range(_READINGS):
        source = _Source(path, _files(path, latest), backend)
        times, runs, reading = _first_reading(source, latest, progress)
        begin = times.first
        first, last = (begin + at for at in _busiest(times.of[begin:], limit))
        records, earlier = _second_reading(source, first, last, reading.lines, progress)
        # A file that was put aside in between is another one by now.
        if [one.time for one in records] == [time for time, _ in times.of[first:last]]:
            break
    else:
        raise JournalError(f"journal {path}: its files are put aside faster than they are read")
    names = Counter(one.backend for one in records)
    backend = names.most_common(1)[0][0] if names else backend
    mine, before = ([one for one in part if one.backend == backend] for part in (records, earlier))
    run = runs.at(backend, mine[-1].time if mine else 0.0)
    otherwise = runs.sample(backend, drafts=not run.drafts)
    return (
        Stretch(mine, before, len(times.of) - begin, run.slots, run.context, backend, run.drafts, otherwise),
        reading,
    )


def _files(path: Path, latest: int | None) -> list[Path]:
    files = files_of(path)
    try:
        return files if latest is None else newest_of(files, latest)
    except OSError as error:
        raise JournalError(f"journal {path}: {error.strerror or error}") from error


def _first_reading(
    source: _Source, latest: int | None, progress: Callable[[str, int, int], None]
) -> tuple[_Times, _Runs, Reading]:
    times, runs, reading = _Times(latest=deque(maxlen=latest)), _Runs(), Reading()
    for number, entry in enumerate(read(source.path, reading, source.files)):
        if number % 1000 == 0:
            progress("reading", number, 0)
        if isinstance(entry, Opening):
            continue
        if isinstance(entry, BackendChange):
            runs.see(entry)
            continue
        if latest is not None:
            times.latest.append(len(times.of))
        if source.usable(entry):
            runs.see(entry)
            times.of.append((entry.time, entry.prompt_tokens + entry.output_tokens))
    return times, runs, reading


def _second_reading(
    source: _Source, first: int, last: int, lines: int, progress: Callable[[str, int, int], None]
) -> tuple[list[Record], list[Record]]:
    """The usable requests from number ``first`` up to ``last``, and some before."""
    records: list[Record] = []
    earlier: deque[Record] = deque(maxlen=_EARLIER)
    place = 0
    for number, entry in enumerate(read(source.path, files=source.files) if last > first else ()):
        if number % 1000 == 0:
            progress("reading again", number, lines)
        if isinstance(entry, Record) and source.usable(entry):
            (records if place >= first else earlier).append(replace(entry, candidates=(), text=None))
            place += 1
            if place == last:
                break
    return records, list(earlier)


def _usable(record: Record) -> bool:
    return record.cached_tokens is not None and record.status == "ok" and record.slots == 1


def _busiest(times: Sequence[tuple[float, int]], limit: int) -> tuple[int, int]:
    """The ``limit`` requests in a row with the most tokens in the least time."""
    if len(times) <= limit:
        return 0, len(times)
    sums = [0]
    for _, tokens in times:
        sums.append(sums[-1] + tokens)
    step = max(1, limit // 8)
    starts = range(0, len(times) - limit + 1, step)
    best = max(
        starts,
        key=lambda at: (sums[at + limit] - sums[at]) / max(1.0, times[at + limit - 1][0] - times[at][0]),
    )
    return best, best + limit
