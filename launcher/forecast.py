"""Serves a journal's load once more on a modelled engine, in virtual time, with the code that really routes.

What :mod:`.replay` does for traces, with what a journal knows: exact token counts, measured rates, what each
call waited for. Engine rules are llama-server's: a slot holds prompt and answer, the longest common prefix is
reused, at least one token is computed, prompts are computed one at a time in slot order, and while one is
computed the answers beside it get a token for each batch.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.trie import common_blocks
from warmslot.router.values import BLOCK, Decision, Lease, Outcome, Prompt, Request, SlotRef, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from warmslot.router.scheduler import InFlight

    from .load import Job, Load
    from .speeds import Speeds

POOL: Final = "pool"
BACKEND: Final = "backend"
_EPSILON: Final = 1e-7
_WARM: Final = "warm "
"""Begins the names of what was there before."""
_SIMILAR: Final = 0.10
"""``--slot-prompt-similarity``: the engine's default."""

Queue = Literal["reuse", "fifo", "engine"]


class Policy(Protocol):
    """What a forecast needs of a core."""

    def submit(self, request: Request, now: float) -> None:
        """Queue a request."""

    def grant(self, now: float) -> list[Lease]:
        """Leases that start now."""

    def next_wake(self, now: float) -> float | None:
        """When to ask again though nothing happened."""

    def first_token(self, request_id: str, now: float) -> None:
        """A prefill is over."""

    def finish(self, request_id: str, outcome: Outcome, now: float) -> object:
        """A lease is over."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is to be forecast. ``queue`` ``engine`` is llama-server by itself: no router."""

    slots: int
    context: int
    in_flight: InFlight = "auto"
    queue: Queue = "reuse"
    drafts: bool = False
    """Whether it drafts (speculative decoding): told by the rates."""


@dataclass(slots=True)
class Forecast:
    """What a load would go through. Times are seconds of virtual time, counts are tokens."""

    setup: Setup
    requests: int = 0
    too_long: int = 0
    """Requests that no slot could hold; they are left out."""
    prompt: int = 0
    """Of the requests that count for reuse."""
    cached: int = 0
    output: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    makespan: float = 0.0
    mean_seconds: float = 0.0
    """Of a request, from arrival to end."""
    ttft_p50: float = 0.0
    ttft_p95: float = 0.0
    longest_wait: float = 0.0

    @property
    def reuse(self) -> float:
        """Share of the prompt tokens that is reused."""
        return self.cached / self.prompt if self.prompt else 0.0


def forecast(
    load: Load, speeds: Speeds, setup: Setup, progress: Callable[[int], None] | None = None
) -> Forecast:
    """Serve the load under a setup."""
    return _Run(load, speeds, setup, progress).run()


def serve(load: Load, speeds: Speeds, setup: Setup) -> list[Served]:
    """Serve the load and give every call's story, in the order of their ends."""
    run = _Run(load, speeds, setup, None)
    run.run()
    return run.served


@dataclass(slots=True)
class _Active:
    index: int
    job: Job
    slot: int
    arrived: float
    cached: int
    setup: float
    prefill: float
    decode: float
    granted: float
    in_flight: int
    first_token: float = -1.0


@dataclass(frozen=True, slots=True)
class Served:
    """What one call went through. Times are seconds of virtual time."""

    job: Job
    slot: int
    arrived: float
    granted: float
    first_token: float
    ended: float
    cached: int
    in_flight: int


class _Run:
    def __init__(
        self, load: Load, speeds: Speeds, setup: Setup, progress: Callable[[int], None] | None
    ) -> None:
        self._jobs, self._speeds, self._setup, self._progress = load.jobs, speeds, setup, progress
        self._policy: Policy = _policy(load, setup)
        self._held: list[Job | None] = [None] * setup.slots
        self._arrivals: list[tuple[float, int]] = []
        self._queued: dict[str, float] = {}
        self._active: dict[str, _Active] = {}
        self._now = 0.0
        self._left = len(load.jobs)
        self._out = Forecast(setup)
        self._ttft: list[float] = []
        self._whole = 0.0
        self.served: list[Served] = []

        for number, job in enumerate(load.warm[-setup.slots :]):
            self._warm(number, job)

    def _warm(self, number: int, job: Job) -> None:
        """A context that was there before: served at once, and not counted."""
        name = f"{_WARM}{number}"
        self._policy.submit(_request(name, job, 0.0), 0.0)
        for lease in self._policy.grant(0.0):
            self._held[lease.slot.slot] = job
            seconds = self._speeds.prefill_seconds(0, job.prompt_tokens)
            decode = job.output_tokens / self._speeds.decode_rate(1)
            outcome = _outcome(job, 0, seconds, decode)
            self._policy.first_token(lease.request.id, 0.0)
            self._policy.finish(lease.request.id, outcome, 0.0)

    def run(self) -> Forecast:
        for index, job in enumerate(self._jobs):
            if job.before < 0:
                heapq.heappush(self._arrivals, (job.delay, index))
        while self._left:
            self._arrive()
            self._start()
            self._advance()
        out = self._out
        ordered = sorted(self._ttft)
        if ordered:
            out.ttft_p50 = ordered[len(ordered) // 2]
            out.ttft_p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
            out.mean_seconds = self._whole / len(ordered)
        return out

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now + _EPSILON:
            _, index = heapq.heappop(self._arrivals)
            job = self._jobs[index]
            for follower in job.followers:
                if not self._jobs[follower].after_end:
                    heapq.heappush(self._arrivals, (self._now + self._jobs[follower].delay, follower))
            if job.prompt_tokens + job.output_tokens > self._setup.context:
                self._out.too_long += 1
                self._done(index)
                continue
            name = str(index)
            self._queued[name] = self._now
            self._policy.submit(_request(name, job, self._now), self._now)

    def _done(self, index: int) -> None:
        self._left -= 1
        for follower in self._jobs[index].followers:
            if self._jobs[follower].after_end:
                heapq.heappush(self._arrivals, (self._now + self._jobs[follower].delay, follower))
        if self._progress is not None:
            self._progress(len(self._jobs) - self._left)

    def _start(self) -> None:
        for lease in self._policy.grant(self._now):
            index = int(lease.request.id)
            job, slot = self._jobs[index], lease.slot.slot
            cached = reused(self._held[slot], job)
            seconds = self._speeds.prefill_seconds(cached, job.prompt_tokens)
            self._active[lease.request.id] = _Active(
                *(index, job, slot, self._queued.pop(lease.request.id), cached),
                setup=self._speeds.overhead,
                prefill=max(seconds, 2 * _EPSILON),
                decode=float(max(1, job.output_tokens - 1)),
                granted=self._now,
                in_flight=len(self._active) + 1,
            )
            self._out.prefill_seconds += seconds

    def _advance(self) -> None:
        """Move time to whatever happens next, and let it happen."""
        filling, rate = self._rates()
        due = self._arrivals[0][0] if self._arrivals else None
        moments = [self._now + left for left in self._lefts(filling, rate)]
        wake = self._policy.next_wake(self._now)
        moments += [at for at in (due, wake) if at is not None and at > self._now]
        if not moments:
            if due is None and self._left:
                raise RuntimeError(f"the forecast stands still at {self._now:.1f} s")
            return
        elapsed = min(moments) - self._now
        self._now = min(moments)
        for name, active in list(self._active.items()):
            self._pass(name, active, elapsed, rate, fills=active is filling)

    def _lefts(self, filling: _Active | None, rate: float) -> Iterator[float]:
        """Seconds that each request needs for what it is at, if it gets on at all."""
        for active in self._active.values():
            if active.setup > 0:
                yield active.setup
            elif active is filling:
                yield active.prefill
            elif active.prefill <= 0:
                yield active.decode / rate

    def _pass(self, name: str, active: _Active, elapsed: float, rate: float, *, fills: bool) -> None:
        if active.setup > 0:
            active.setup = _less(active.setup, elapsed)
        elif fills:
            active.prefill = _less(active.prefill, elapsed)
            if not active.prefill:
                active.first_token = self._now
                self._policy.first_token(name, self._now)
        elif active.prefill <= 0:
            active.decode = _less(active.decode, elapsed * rate)
            if not active.decode:
                self._finish(name, active)

    def _rates(self) -> tuple[_Active | None, float]:
        """Whose prompt is being computed, and how many tokens a second each answer gets."""
        ready = [one for one in self._active.values() if one.setup <= 0]
        filling = [one for one in ready if one.prefill > 0]
        if filling:
            first = min(filling, key=lambda one: one.slot)
            at = first.job.prompt_tokens
            per_batch = self._speeds.prefill_seconds(max(0, at - self._speeds.batch), at)
            return first, 1.0 / max(per_batch, _EPSILON)
        decoding = max(1, len(ready))
        return None, self._speeds.decode_rate(decoding) / decoding

    def _finish(self, name: str, active: _Active) -> None:
        job, out = active.job, self._out
        del self._active[name]
        self._held[active.slot] = job
        decode = self._now - active.first_token
        seconds = self._speeds.prefill_seconds(active.cached, job.prompt_tokens)
        outcome = _outcome(job, active.cached, seconds, decode, active.first_token - active.arrived)
        self._policy.finish(name, outcome, self._now)
        out.requests += 1
        if job.counted:
            out.prompt += job.prompt_tokens
            out.cached += active.cached
        out.output += job.output_tokens
        out.decode_seconds += decode
        out.makespan = max(out.makespan, self._now)
        out.longest_wait = max(out.longest_wait, active.granted - active.arrived)
        times = (active.arrived, active.granted, active.first_token, self._now)
        self.served.append(Served(job, active.slot, *times, active.cached, active.in_flight))
        self._ttft.append(active.first_token - active.arrived)
        self._whole += self._now - active.arrived
        self._done(active.index)


def _request(name: str, job: Job, now: float) -> Request:
    prompt = Prompt(chain=job.chain, length=job.length, root=job.root)
    return Request(
        id=name,
        prompt=prompt,
        pool=POOL,
        arrived=now,
        max_output_tokens=job.max_output_tokens,
        keeps_prefix=job.keeps_prefix,
    )


def _outcome(job: Job, cached: int, prefill: float, decode: float, first: float | None = None) -> Outcome:
    return Outcome(
        status=Status.OK,
        cached_tokens=cached,
        processed_tokens=job.prompt_tokens - cached,
        output_tokens=job.output_tokens,
        prefill_seconds=prefill,
        decode_seconds=decode,
        ttft_seconds=first,
    )


def _less(left: float, done: float) -> float:
    return left - done if left - done > _EPSILON else 0.0


def reused(held: Job | None, job: Job) -> int:
    """Prompt tokens that a slot which holds ``held`` (with its answer) saves ``job``."""
    if held is None or not job.keeps_prefix:
        return 0
    blocks = common_blocks(held.after, job.chain)
    if blocks >= len(job.chain) > 0:
        return job.prompt_tokens - 1
    whole = held.prompt_tokens + held.output_tokens - 1
    if blocks >= len(held.after) > 0:
        tokens = whole
    else:
        at = blocks * BLOCK
        if at <= held.length:
            tokens = held.prompt_tokens * at // max(1, held.length)
        else:
            answer = max(1, held.after_length - held.length)
            tokens = held.prompt_tokens + (held.output_tokens - 1) * (at - held.length) // answer
    return max(0, min(tokens, job.prompt_tokens - 1))


def _policy(load: Load, setup: Setup) -> Policy:
    if setup.queue == "engine":
        limit = {"serialize": 1, "pair": 2}.get(setup.in_flight, setup.slots)
        return EngineAlone(load, setup.slots, limit)
    settings = CoreSettings(in_flight=setup.in_flight, queue=setup.queue, max_queue=max(1, len(load.jobs)))
    core = RouterCore({POOL: settings})
    core.backend_up(BACKEND, POOL, setup.slots, setup.context, 0.0, known_empty=True)
    return core


class EngineAlone:
    """llama-server's own choice in arrival order: best similarity above a threshold, else the LRU slot."""

    def __init__(self, load: Load, slots: int, limit: int) -> None:
        self._jobs, self._limit = load.jobs, min(limit, slots)
        self._warm = load.warm[-slots:]
        self._held: list[Job | None] = [None] * slots
        self._used = [-1.0] * slots
        self._busy: dict[str, int] = {}
        self._queue: deque[Request] = deque()

    def submit(self, request: Request, now: float) -> None:
        """Queue a request."""
        del now
        self._queue.append(request)

    def next_wake(self, now: float) -> float | None:
        """Nothing here depends on time."""
        del now
        return None

    def first_token(self, request_id: str, now: float) -> None:
        """Nothing is learned."""
        del request_id, now

    def grant(self, now: float) -> list[Lease]:
        """In arrival order, as many as may run at once."""
        leases = []
        while self._queue and len(self._busy) < self._limit:
            request = self._queue.popleft()
            slot = self._choose(self._job(request.id))
            self._busy[request.id] = slot
            leases.append(Lease(request, SlotRef(BACKEND, slot), Decision.UNPINNED, 0, 0, now))
        return leases

    def finish(self, request_id: str, outcome: Outcome, now: float) -> None:
        """The slot is free."""
        del outcome
        slot = self._busy.pop(request_id)
        self._held[slot], self._used[slot] = self._job(request_id), now

    def _job(self, name: str) -> Job:
        if name.startswith(_WARM):
            return self._warm[int(name[len(_WARM) :])]
        return self._jobs[int(name)]

    def _choose(self, job: Job) -> int:
        taken = set(self._busy.values())
        idle = [slot for slot in range(len(self._held)) if slot not in taken]
        best = max(idle, key=lambda slot: reused(self._held[slot], job))
        if reused(self._held[best], job) > _SIMILAR * job.prompt_tokens:
            return best
        return min(reversed(idle), key=lambda slot: self._used[slot])
