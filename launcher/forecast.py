"""Serves a journal's load once more on a modelled engine, in virtual time, with the code that really routes.

What :mod:`.replay` does for traces, with what a journal knows: exact token counts, measured rates, what each
call waited for. For the engine see :mod:`.modelled`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.values import Outcome, Prompt, Request, Status

from .modelled import BACKEND, EPSILON, POOL, Engine, Running, Work, content
from .rivals import EngineSelection

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmslot.router.residency import Context
    from warmslot.router.scheduler import InFlight
    from warmslot.router.values import HostMemory

    from .load import Job, Load
    from .speeds import Speeds

_WARM: Final = "warm "
"""Begins the names of what was there before."""

Queue = Literal["reuse", "fifo", "engine"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What is to be forecast. ``queue`` ``engine`` is llama-server by itself: no router."""

    slots: int
    context: int
    in_flight: InFlight = "auto"
    queue: Queue = "reuse"
    drafts: bool = False
    """Whether it drafts (speculative decoding): told by the rates."""
    host: HostMemory | None = None
    """The engine's prompt cache in host memory, where it has one."""


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
    from_host: int = 0
    """Of the cached ones, what the cache in host memory added to what slots held."""
    host_tokens: int = 0
    """The most that it kept at once."""
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
    host: int
    copying: float
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
    host: int
    """Of the cached tokens, what host memory added to what the slot held."""
    prefill: float
    """Seconds as the engine tells them: of the batches that its prompt was in, with all that was in them."""
    copying: float
    """Seconds of it that passed with copying to host memory and back."""
    in_flight: int


class _Run:
    def __init__(
        self, load: Load, speeds: Speeds, setup: Setup, progress: Callable[[int], None] | None
    ) -> None:
        self._jobs, self._speeds, self._setup, self._progress = load.jobs, speeds, setup, progress
        self._policy: RouterCore | EngineSelection = _policy(load, setup)
        self._engine = Engine(setup.slots, host=setup.host, pinned=setup.queue != "engine")
        self._arrivals: list[tuple[float, int]] = []
        self._queued: dict[str, float] = {}
        self._active: dict[str, _Active] = {}
        self._running = Running(speeds.decode_rate, speeds.batch)
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
        self._submit(f"{_WARM}{number}", job)
        for lease in self._policy.grant(0.0):
            self._engine.serve(lease.slot.slot, held(job))
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
        out.host_tokens = self._engine.host_tokens
        ordered = sorted(self._ttft)
        if ordered:
            out.ttft_p50 = ordered[len(ordered) // 2]
            out.ttft_p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
            out.mean_seconds = self._whole / len(ordered)
        return out

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now + EPSILON:
            _, index = heapq.heappop(self._arrivals)
            job = self._jobs[index]
            for follower in job.followers:
                if not self._jobs[follower].after_end:
                    heapq.heappush(self._arrivals, (self._now + self._jobs[follower].delay, follower))
            if job.prompt_tokens + job.output_tokens > self._setup.context:
                self._out.too_long += 1
                self._done(index)
                continue
            self._queued[str(index)] = self._now
            self._submit(str(index), job)

    def _submit(self, name: str, job: Job) -> None:
        request = Request(
            id=name,
            prompt=_prompt(job),
            pool=POOL,
            arrived=self._now,
            max_output_tokens=job.max_output_tokens,
            keeps_prefix=job.keeps_prefix,
        )
        if isinstance(self._policy, EngineSelection):
            self._policy.expect(request, 0, held(job))
        self._policy.submit(request, self._now)

    def _done(self, index: int) -> None:
        self._left -= 1
        for follower in self._jobs[index].followers:
            if self._jobs[follower].after_end:
                heapq.heappush(self._arrivals, (self._now + self._jobs[follower].delay, follower))
        if self._progress is not None:
            self._progress(len(self._jobs) - self._left)

    def _start(self) -> None:
        for lease in self._policy.grant(self._now):
            name, slot = lease.request.id, lease.slot.slot
            job = self._jobs[int(name)]
            alone = self._reused(slot, job)
            exchange = self._engine.take(slot, lease.request.prompt, job.prompt_tokens)
            cached = self._reused(slot, job)
            seconds = self._speeds.prefill_seconds(cached, job.prompt_tokens)
            copying = exchange.moved * self._speeds.copy
            self._running.work[name] = Work(
                slot,
                prefill=seconds + copying,
                tokens=job.prompt_tokens - cached,
                decode=float(max(1, job.output_tokens - 1)),
                setup=self._speeds.overhead,
            )
            host = max(0, cached - alone)
            arrived, at_once = self._queued.pop(name), len(self._running.work)
            self._active[name] = _Active(
                *(int(name), job, slot, arrived, cached, host, copying, self._now, at_once)
            )
            self._out.prefill_seconds += seconds

    def _reused(self, slot: int, job: Job) -> int:
        """Prompt tokens that a slot's content saves a call."""
        return min(self._engine.cached(slot, _prompt(job)), job.prompt_tokens - 1) if job.keeps_prefix else 0

    def _advance(self) -> None:
        """Move time to whatever happens next, and let it happen."""
        due = self._arrivals[0][0] if self._arrivals else None
        left, wake = self._running.until_next(), self._policy.next_wake(self._now)
        moments = [at for at in (due, wake) if at is not None and at > self._now]
        if left is not None:
            moments.append(self._now + left)
        if not moments:
            if due is None and self._left:
                raise RuntimeError(f"the forecast stands still at {self._now:.1f} s")
            return
        elapsed = min(moments) - self._now
        self._now = min(moments)
        first, over = self._running.advance(elapsed)
        for name in first:
            self._active[name].first_token = self._now
            self._policy.first_token(name, self._now)
        for name in over:
            self._finish(name)

    def _finish(self, name: str) -> None:
        active, out = self._active.pop(name), self._out
        told = self._running.work.pop(name).computing - active.copying
        job = active.job
        self._engine.serve(active.slot, held(job))
        decode = self._now - active.first_token
        outcome = _outcome(job, active.cached, told, decode, active.first_token - active.arrived)
        self._policy.finish(name, outcome, self._now)
        out.requests += 1
        if job.counted:
            out.prompt += job.prompt_tokens
            out.cached += active.cached
            out.from_host += active.host
        out.output += job.output_tokens
        out.decode_seconds += decode
        out.makespan = max(out.makespan, self._now)
        out.longest_wait = max(out.longest_wait, active.granted - active.arrived)
        times = (active.arrived, active.granted, active.first_token, self._now)
        self.served.append(
            Served(
                job, active.slot, *times, active.cached, active.host, told, active.copying, active.in_flight
            )
        )
        self._ttft.append(active.first_token - active.arrived)
        self._whole += self._now - active.arrived
        self._done(active.index)


def _prompt(job: Job) -> Prompt:
    return Prompt(chain=job.chain, length=job.length, root=job.root)


def _after(job: Job) -> Prompt:
    return Prompt(chain=job.after, length=max(job.length, job.after_length), root=job.root)


def held(job: Job) -> Context:
    """What a slot holds after a call."""
    return content(_prompt(job), _after(job), job.prompt_tokens, job.output_tokens)


def _outcome(job: Job, cached: int, prefill: float, decode: float, first: float | None = None) -> Outcome:
    return Outcome(
        status=Status.OK,
        cached_tokens=cached,
        processed_tokens=job.prompt_tokens - cached,
        output_tokens=job.output_tokens,
        prefill_seconds=prefill,
        decode_seconds=decode,
        ttft_seconds=first,
        after=_after(job),
    )


def _policy(load: Load, setup: Setup) -> RouterCore | EngineSelection:
    if setup.queue == "engine":
        limit = {"serialize": 1, "pair": 2}.get(setup.in_flight, setup.slots)
        return EngineSelection(setup.slots, min(limit, setup.slots))
    settings = CoreSettings(in_flight=setup.in_flight, queue=setup.queue, max_queue=max(1, len(load.jobs)))
    core = RouterCore({POOL: settings})
    core.backend_up(BACKEND, POOL, setup.slots, setup.context, 0.0, known_empty=True, host=setup.host)
    return core
