"""A journal's requests as a load that can be served again: who sends what, and what each call waited for.

Replaying recorded times as they are would tell nothing: a faster setup would have been asked sooner. So a
call follows its conversation's call before after the same pause, and a conversation that began just when
another one had ended (a worker that took its next task) follows that one. All others begin when they began.
Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable

    from warmslot.router.records import Record

HANDOVER: Final = 1.0
"""Seconds within which a conversation that begins after another has ended is taken to follow it."""


@dataclass(slots=True)
class Job:
    """One call. Lengths as in :class:`~warmslot.router.records.Record`; ``delay`` in seconds."""

    session: str
    chain: array[int]
    length: int
    after: array[int]
    after_length: int
    root: bytes
    prompt_tokens: int
    output_tokens: int
    keeps_prefix: bool
    recorded_cached: int
    counted: bool
    """Whether it counts for reuse: not if what it reused had been computed before the recording began."""
    delay: float
    after_end: bool
    """Whether ``delay`` counts from the end of the call before it (of its arrival otherwise)."""
    before: int = -1
    """The job that it follows; -1: it comes ``delay`` seconds after the beginning."""
    max_output_tokens: int | None = None
    """The bound on the answer that its client gave: what a router can know of its length beforehand."""
    followers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Load:
    """All calls in the order of their recorded arrivals."""

    jobs: list[Job]
    sessions: int
    returns: int
    """Calls that came back to a conversation."""
    seconds: float
    """Recorded time from the first arrival to the last end."""
    warm: list[Job] = field(default_factory=list)
    """What conversations had left in slots before that, the latest last."""

    @property
    def longest(self) -> int:
        """The most tokens that a slot must hold."""
        return max((job.prompt_tokens + job.output_tokens for job in self.jobs), default=0)

    def told(self) -> Load:
        """The same, where each client tells how long its answer is, as one that wants just so many tokens."""
        jobs = [replace(job, max_output_tokens=job.output_tokens) for job in self.jobs]
        return replace(self, jobs=jobs)

    def live(self) -> int:
        """The most conversations that were under way at once, as recorded order tells."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for index, job in enumerate(self.jobs):
            first.setdefault(job.session, index)
            last[job.session] = index
        events = sorted([(at, 1) for at in first.values()] + [(at + 0.5, -1) for at in last.values()])
        level = most = 0
        for _, by in events:
            level += by
            most = max(most, level)
        return most


class Sessions:
    """Names the conversation of each record: as the client did, else by what it continues."""

    def __init__(self) -> None:
        self._ends: dict[int, str] = {}
        self._count = 0

    def name(self, record: Record) -> str:
        """The conversation's name; what the record leaves behind is remembered."""
        name = record.session or self._continued(record.chain) or self._new()
        if record.chain:
            self._ends[record.chain[-1]] = name
        if record.after:
            self._ends[record.after[-1]] = name
        return name

    def _continued(self, chain: array[int]) -> str:
        for value in reversed(chain):
            if (name := self._ends.get(value)) is not None:
                return name
        return ""

    def _new(self) -> str:
        self._count += 1
        return f"conversation {self._count}"


def load_of(records: Iterable[Record], earlier: Iterable[Record] = ()) -> Load:
    """The load of finished requests; those that never got an answer are left out.

    ``earlier``: requests before them, whose contexts are warm at the beginning.
    """
    usable = sorted((one for one in records if one.prompt_tokens > 0), key=lambda one: one.time)
    if not usable:
        return Load([], 0, 0, 0.0)
    start, naming = usable[0].time, Sessions()
    warm: dict[str, Job] = {}
    for record in sorted(earlier, key=lambda one: one.time + one.ended):
        name = naming.name(record)
        warm.pop(name, None)
        warm[name] = _job(name, record, 0.0, counted=False)
    names = [naming.name(record) for record in usable]
    final = {name: index for index, name in enumerate(names)}
    # Calls with which a conversation ended, by the time of that: a worker may have taken up another one then.
    ends = sorted((usable[index].time + usable[index].ended, index) for index in final.values())
    jobs: list[Job] = []
    last: dict[str, int] = {}
    for index, (name, record) in enumerate(zip(names, usable, strict=True)):
        known = name in last or name in warm or (record.cached_tokens or 0) * 2 <= record.prompt_tokens
        job = _job(name, record, record.time - start, counted=known)
        before = last.get(name, -1)
        if before < 0:
            before = _handover(record, ends)
        if before >= 0:
            _follow(job, record, usable[before], before)
            jobs[before].followers.append(index)
        last[name] = index
        jobs.append(job)
    seconds = max(one.time + one.ended for one in usable) - start
    return Load(jobs, len(final), len(jobs) - len(final), seconds, list(warm.values()))


def _job(name: str, record: Record, delay: float, *, counted: bool) -> Job:
    return Job(
        session=name,
        chain=record.chain,
        length=record.length,
        after=record.after,
        after_length=record.after_length,
        root=record.root,
        prompt_tokens=record.prompt_tokens,
        output_tokens=max(1, record.output_tokens),
        keeps_prefix=record.keeps_prefix,
        recorded_cached=record.cached_tokens or 0,
        counted=counted,
        delay=delay,
        after_end=False,
        max_output_tokens=record.max_output_tokens,
    )


def _follow(job: Job, record: Record, before: Record, index: int) -> None:
    end = before.time + before.ended
    job.before = index
    job.after_end = record.time >= end
    job.delay = record.time - (end if job.after_end else before.time)


def _handover(record: Record, ends: list[tuple[float, int]]) -> int:
    """The call whose worker took up this conversation; -1 if none did. A call is followed once."""
    at = bisect_left(ends, (record.time - HANDOVER, -1))
    if at >= len(ends) or ends[at][0] > record.time:
        return -1
    return ends.pop(at)[1]
