"""Discrete-event replay of a trace: a modelled engine, virtual time, and the code that really routes.

The core under test decides; this module only plays the clients. For the engine see :mod:`.modelled`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from warmslot.router.values import Outcome, Request, Status

from .modelled import POOL, Running, Work, content

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from warmslot.router.residency import Context
    from warmslot.router.values import Lease

    from .modelled import Engine, Policy
    from .traces import Call, Trace


Arrival = Literal["closed", "round-robin", "open"]


@dataclass(frozen=True, slots=True)
class Speed:
    """The modelled engine's rates in tokens per second.

    ``gain``: what each further decoding request adds to the total rate, as a share of one that decodes alone.
    ``split``: what each further pass of a step costs, as a share of a step of one; 0 = all share one pass.
    ``halving``: prompt position at which the prefill rate has fallen to half; 0 = the rate is constant.
    ``copy``: at which contexts are saved to host memory and loaded from it; 0 = in no time.
    """

    prefill: float = 500.0
    decode: float = 24.0
    gain: float = 0.7
    batch: int = 2048
    halving: float = 0.0
    copy: float = 0.0
    split: float = 0.0

    def copy_seconds(self, tokens: int) -> float:
        """Seconds to copy so many tokens to host memory or back."""
        return tokens / self.copy if self.copy > 0 else 0.0

    def decode_rate(self, busy: int, passes: int) -> float:
        """Tokens per second of ``busy`` requests together, in so many passes a step."""
        step = busy / (1 + self.gain * (busy - 1)) + self.split * (passes - 1)
        return self.decode * busy / step

    def prefill_seconds(self, start: float, end: float) -> float:
        """Seconds to compute prompt tokens ``[start, end)`` with nothing else running."""
        linear = (end - start) / self.prefill
        if self.halving <= 0:
            return linear
        return linear + (end * end - start * start) / (2 * self.halving * self.prefill)


@dataclass(frozen=True, slots=True)
class Served:
    """What one request went through; times are seconds of virtual time, counts are tokens."""

    session: str
    arrived: float
    granted: float
    first_token: float
    finished: float
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    output_tokens: int
    losses: dict[str, int] = field(default_factory=dict)
    host_tokens: int = 0
    """Of the cached ones, those that host memory added to what the slot held."""


def held(call: Call) -> Context:
    """What a slot holds after a call."""
    return content(call.prompt, call.after, call.prompt_tokens, call.output_tokens)


@dataclass(slots=True)
class _Started:
    index: int
    call: Call
    lease: Lease
    arrived: float
    cached: int
    host: int
    """Of the cached tokens, those from host memory."""
    moved: int
    """Tokens that were copied to host memory or back."""
    first_token: float = -1.0


class Clients:
    """Who sends what when. ``live`` sessions are open at once; when one ends, the next begins."""

    def __init__(
        self, trace: Trace, live: int, arrival: Arrival, *, rate: float = 1.0, think: float = 0.0
    ) -> None:
        self.total = trace.calls
        self.think = think
        self._sessions = [list(session) for session in trace.sessions]
        self._next = [0] * len(self._sessions)
        self._waiting_sessions: Iterator[int] = iter(range(len(self._sessions)))
        self._arrivals: list[tuple[float, int, int, Call]] = []
        self._count = 0
        self._ring: Iterator[tuple[int, Call]] | None = None
        if arrival == "open":
            for index, session in enumerate(self._sessions):
                for call in session:
                    self._push(call.at / rate, index, call)
                self._next[index] = len(session)
            self._waiting_sessions = iter(())
        elif arrival == "closed":
            for _ in range(live):
                self._open(0.0)
        else:
            self._ring = self._round_robin(live)
            self._from_ring(0.0)

    def _push(self, at: float, index: int, call: Call) -> None:
        heapq.heappush(self._arrivals, (at, self._count, index, call))
        self._count += 1

    def _open(self, now: float) -> None:
        index = next(self._waiting_sessions, None)
        if index is not None:
            self._send(index, now)

    def _send(self, index: int, now: float) -> None:
        self._push(now, index, self._sessions[index][self._next[index]])
        self._next[index] += 1

    def _round_robin(self, live: int) -> Iterator[tuple[int, Call]]:
        ring = [index for _, index in zip(range(live), self._waiting_sessions, strict=False)]
        while ring:
            for index in list(ring):
                yield index, self._sessions[index][self._next[index]]
                self._next[index] += 1
                if self._next[index] == len(self._sessions[index]):
                    place = ring.index(index)
                    successor = next(self._waiting_sessions, None)
                    ring[place : place + 1] = [] if successor is None else [successor]

    def _from_ring(self, now: float) -> None:
        following = next(self._ring, None) if self._ring is not None else None
        if following is not None:
            self._push(now, *following)

    def due(self) -> float | None:
        """When the next request arrives, as far as is known."""
        return self._arrivals[0][0] if self._arrivals else None

    def take(self, now: float) -> list[tuple[int, Call]]:
        """Requests that have arrived by ``now``."""
        out = []
        while self._arrivals and self._arrivals[0][0] <= now:
            _, _, index, call = heapq.heappop(self._arrivals)
            out.append((index, call))
        return out

    def done(self, index: int, now: float) -> None:
        """A session's call is answered: its next follows, or another session begins."""
        if self._ring is not None:
            self._from_ring(now + self.think)
        elif self._next[index] < len(self._sessions[index]):
            self._send(index, now + self.think)
        else:
            self._open(now + self.think)


def replay(
    clients: Clients,
    policy: Policy,
    engine: Engine,
    speed: Speed,
    *,
    on_arrival: Callable[[Request, int, Context], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Served]:
    """Run a trace to its end and return what every request went through, in the order of their ends."""
    return _Replay(clients, policy, engine, speed, on_arrival=on_arrival, progress=progress).run()


class _Replay:
    def __init__(
        self,
        clients: Clients,
        policy: Policy,
        engine: Engine,
        speed: Speed,
        *,
        on_arrival: Callable[[Request, int, Context], None] | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._clients, self._policy, self._engine, self._speed = clients, policy, engine, speed
        self._on_arrival, self._progress = on_arrival, progress
        self._now = 0.0
        self._queued: dict[str, tuple[int, Call, float]] = {}
        self._started: dict[str, _Started] = {}
        self._running = Running(speed.decode_rate, speed.batch)
        self._served: list[Served] = []
        self._sent = 0

    def run(self) -> list[Served]:
        while len(self._served) < self._clients.total:
            self._arrive()
            self._start()
            self._advance()
        return self._served

    def _arrive(self) -> None:
        for index, call in self._clients.take(self._now):
            name = str(self._sent)
            self._sent += 1
            prompt = call.prompt
            request = Request(id=name, prompt=prompt, pool=POOL, arrived=self._now)
            self._queued[name] = (index, call, self._now)
            if self._on_arrival is not None:
                self._on_arrival(request, index, held(call))
            self._policy.submit(request, self._now)

    def _start(self) -> None:
        for lease in self._policy.grant(self._now):
            index, call, arrived = self._queued.pop(lease.request.id)
            prompt_tokens = call.prompt_tokens
            slot = lease.slot.slot
            alone = min(self._engine.cached(slot, call.prompt), prompt_tokens - 1)
            exchange = self._engine.take(slot, call.prompt, prompt_tokens)
            cached = min(self._engine.cached(slot, call.prompt), prompt_tokens - 1)
            seconds = self._speed.prefill_seconds(cached, prompt_tokens)
            name = lease.request.id
            host = max(0, cached - alone)
            self._started[name] = _Started(index, call, lease, arrived, cached, host, exchange.moved)
            self._running.work[name] = Work(
                slot,
                prefill=seconds + self._speed.copy_seconds(exchange.moved),
                tokens=prompt_tokens - cached,
                decode=float(call.output_tokens),
            )

    def _advance(self) -> None:
        """Move time to whatever happens next, and let it happen."""
        due, wake, left = self._clients.due(), self._policy.next_wake(self._now), self._running.until_next()
        if due is not None and due <= self._now:
            return
        moments = [at for at in (due, wake) if at is not None and at > self._now]
        if left is not None:
            moments.append(self._now + left)
        if not moments:
            raise RuntimeError(
                f"the replay stands still at {self._now:.1f} s: "
                f"{len(self._queued)} requests wait and none is granted"
            )
        elapsed = min(moments) - self._now
        self._now = min(moments)
        first, over = self._running.advance(elapsed)
        for name in first:
            self._started[name].first_token = self._now
            self._policy.first_token(name, self._now)
        for name in over:
            self._finish(name)

    def _finish(self, name: str) -> None:
        started = self._started.pop(name)
        work = self._running.work.pop(name)
        lease, call = started.lease, started.call
        self._engine.serve(lease.slot.slot, held(call))
        outcome = Outcome(
            status=Status.OK,
            cached_tokens=started.cached,
            processed_tokens=call.prompt_tokens - started.cached,
            output_tokens=call.output_tokens,
            prefill_seconds=work.computing - self._speed.copy_seconds(started.moved),
            decode_seconds=self._now - started.first_token,
            ttft_seconds=started.first_token - started.arrived,
            generated=call.generated,
            after=call.after,
        )
        report = self._policy.finish(name, outcome, self._now)
        self._served.append(
            Served(
                session=call.session,
                arrived=started.arrived,
                granted=lease.granted,
                first_token=started.first_token,
                finished=self._now,
                prompt_tokens=call.prompt_tokens,
                cached_tokens=started.cached,
                predicted_tokens=lease.predicted_tokens,
                output_tokens=call.output_tokens,
                losses={str(k): n for k, n in report.losses.items()} if report is not None else {},
                host_tokens=started.host,
            )
        )
        self._clients.done(started.index, self._now)
        if self._progress is not None:
            self._progress(len(self._served))
