"""The part of a journal that advice is made from, and what the journal tells of the backend that it ran on.

A journal is read twice, so that only the stretch and a few samples are ever in memory.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from warmslot.router.journal import Reading, read
from warmslot.router.records import BackendChange, Opening, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_EARLIER: Final = 256
"""Requests before a stretch that tell what was warm when it began."""

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


def stretch(path: Path, limit: int, progress: Callable[[str, int, int], None]) -> tuple[Stretch, Reading]:
    """The busiest ``limit`` requests in a row of a journal. Raises JournalError."""
    times: list[tuple[float, int]] = []
    runs, reading = _Runs(), Reading()
    for number, entry in enumerate(read(path, reading)):
        if number % 1000 == 0:
            progress("reading", number, 0)
        if isinstance(entry, Opening):
            continue
        if isinstance(entry, BackendChange):
            runs.see(entry)
        elif _usable(entry):
            runs.see(entry)
            times.append((entry.time, entry.prompt_tokens + entry.output_tokens))
    records, earlier = _records(
        path, *_busiest(times, limit), lambda done: progress("reading again", done, reading.lines)
    )
    names = Counter(one.backend for one in records)
    backend = names.most_common(1)[0][0] if names else ""
    mine, before = ([one for one in part if one.backend == backend] for part in (records, earlier))
    run = runs.at(backend, mine[-1].time if mine else 0.0)
    otherwise = runs.sample(backend, drafts=not run.drafts)
    return (
        Stretch(mine, before, len(times), run.slots, run.context, backend, run.drafts, otherwise),
        reading,
    )


def _records(
    path: Path, first: int, last: int, progress: Callable[[int], None]
) -> tuple[list[Record], list[Record]]:
    """The usable requests from number ``first`` up to ``last``, and some before."""
    records: list[Record] = []
    earlier: deque[Record] = deque(maxlen=_EARLIER)
    place = 0
    for number, entry in enumerate(read(path) if last > first else ()):
        if number % 1000 == 0:
            progress(number)
        if isinstance(entry, Record) and _usable(entry):
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
