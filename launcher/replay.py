"""Discrete-event replay of a trace: a modelled engine, virtual time, and the code that really routes.

The core under test decides; this module only plays the clients and the engine. Engine rules are those of
llama-server: a slot holds prompt and answer, the longest common prefix is reused, at least one prompt token
is evaluated, prompts are computed one after the other in slot order, and while one is computed the requests
that decode get one token for each batch.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from warmslot.router.host_tier import NOTHING, Exchange, HostTier
from warmslot.router.residency import Context
from warmslot.router.trie import PrefixTrie
from warmslot.router.values import HostMemory, Outcome, Prompt, Request, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from warmslot.router.values import Lease, Report

    from .traces import Call, Trace

POOL = "sim"
BACKEND = "sim"
_EPSILON = 1e-7

Arrival = Literal["closed", "round-robin", "open"]


class Policy(Protocol):
    """What a replay needs of a core; :class:`~warmslot.router.core.RouterCore` has it all."""

    def submit(self, request: Request, now: float) -> None:
        """Queue a request."""

    def grant(self, now: float) -> list[Lease]:
        """Leases that start now."""

    def next_wake(self, now: float) -> float | None:
        """When to ask again though nothing happened."""

    def first_token(self, request_id: str, now: float) -> None:
        """A prefill is over."""

    def finish(self, request_id: str, outcome: Outcome, now: float) -> Report | None:
        """A lease is over."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The modelled engine's rates in tokens per second.

    ``gain``: what each further decoding request adds to the total rate, as a share of one that decodes alone.
    ``halving``: prompt position at which the prefill rate has fallen to half; 0 = the rate is constant.
    ``copy``: at which contexts are saved to host memory and loaded from it; 0 = in no time.
    """

    prefill: float = 500.0
    decode: float = 24.0
    gain: float = 0.7
    batch: int = 2048
    halving: float = 0.0
    copy: float = 0.0

    def copy_seconds(self, tokens: int) -> float:
        """Seconds to copy so many tokens to host memory or back."""
        return tokens / self.copy if self.copy > 0 else 0.0

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


class Engine:
    """Slots of one modelled llama-server. ``unbounded`` keeps every context for ever.

    ``host``: with a prompt cache in host memory (``--cache-ram``). ``pinned``: requests name their slots.
    """

    def __init__(
        self, slots: int, *, unbounded: bool = False, host: HostMemory | None = None, pinned: bool = True
    ) -> None:
        self._host = HostTier(host) if host is not None else None
        self._pinned = pinned
        self.held: list[Context | None] = [None] * slots
        self._everything = PrefixTrie() if unbounded else None
        self._kept: list[Context] = []

    def cached(self, slot: int, prompt: Prompt) -> int:
        """Prompt tokens that a slot's content covers (the engine computes the last one all the same)."""
        if self._everything is None:
            held = self.held[slot]
            return held.tokens_at(held.common(prompt)) if held is not None else 0
        blocks = self._everything.match(prompt.chain)
        # Without a whole block in common, the few shared bytes are found the long way.
        found = [(self._kept[key], n) for key, n in blocks.items()] or [(kept, 0) for kept in self._kept]
        return max((context.tokens_at(context.refine(prompt, n)) for context, n in found), default=0)

    def take(self, slot: int, prompt: Prompt, prompt_tokens: int) -> Exchange:
        """A request is given a slot: what is saved to host memory and loaded from it first."""
        if self._host is None:
            return NOTHING
        exchange = self._host.exchange(self.held[slot], prompt, prompt_tokens, pinned=self._pinned)
        if exchange.loaded is not None:
            self.held[slot] = exchange.loaded.context
        return exchange

    def serve(self, slot: int, call: Call) -> None:
        """The slot holds prompt and answer from now on."""
        context = content(call)
        self.held[slot] = context
        if self._everything is not None:
            self._everything.put(len(self._kept), context.chain)
            self._kept.append(context)


def content(call: Call) -> Context:
    """What a slot holds after a call."""
    prompt, after = call.prompt, call.after
    anchors = [(0, 0), (prompt.length, call.prompt_tokens)]
    if after.length > prompt.length:
        anchors.append((after.length, call.prompt_tokens + max(0, call.output_tokens - 1)))
    return Context(chain=after.chain, length=after.length, data=after.data, anchors=tuple(anchors))


@dataclass(slots=True)
class _Running:
    call: Call
    lease: Lease
    arrived: float
    cached: int
    prompt_tokens: int
    host: int
    """Of the cached tokens, those from host memory."""
    prefill: float
    """Seconds that are left until the first token: of copying and prefill."""
    decode: float
    """Output tokens that are left."""
    prefill_total: float
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
    on_arrival: Callable[[Request, int, Call], None] | None = None,
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
        on_arrival: Callable[[Request, int, Call], None] | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._clients, self._policy, self._engine, self._speed = clients, policy, engine, speed
        self._on_arrival, self._progress = on_arrival, progress
        self._now = 0.0
        self._queued: dict[str, tuple[int, Call, float]] = {}
        self._running: dict[str, _Running] = {}
        self._index: dict[str, int] = {}
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
                self._on_arrival(request, index, call)
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
            self._index[lease.request.id] = index
            self._running[lease.request.id] = _Running(
                call=call,
                lease=lease,
                arrived=arrived,
                cached=cached,
                prompt_tokens=prompt_tokens,
                host=max(0, cached - alone),
                prefill=seconds + self._speed.copy_seconds(exchange.moved),
                decode=float(call.output_tokens),
                prefill_total=seconds,
            )

    def _rates(self) -> tuple[str | None, float]:
        """Which request is in its prefill, and how many tokens a second each decoding request gets."""
        filling = [r for r in self._running.values() if r.prefill > 0]
        decoding = len(self._running) - len(filling)
        if filling:
            first = min(filling, key=lambda r: r.lease.slot.slot)
            return first.lease.request.id, self._speed.prefill / self._speed.batch
        total = self._speed.decode * (1 + self._speed.gain * (decoding - 1))
        return None, total / max(1, decoding)

    def _advance(self) -> None:
        """Move time to whatever happens next, and let it happen."""
        filling, rate = self._rates()
        ends = [r.decode / rate for r in self._running.values() if r.prefill <= 0]
        if filling is not None:
            ends.append(self._running[filling].prefill)
        moments = [self._now + end for end in ends]
        due, wake = self._clients.due(), self._policy.next_wake(self._now)
        moments += [at for at in (due, wake) if at is not None and at > self._now]
        if due is not None and due <= self._now:
            return
        if not moments:
            raise RuntimeError(
                f"the replay stands still at {self._now:.1f} s: "
                f"{len(self._queued)} requests wait and none is granted"
            )
        elapsed = min(moments) - self._now
        self._now = min(moments)
        for name, running in list(self._running.items()):
            if name == filling:
                running.prefill -= elapsed
                if running.prefill <= _EPSILON:
                    running.prefill = 0.0
                    self._first_token(name, running)
            elif running.prefill <= 0:
                running.decode -= elapsed * rate
            if running.prefill <= 0 and running.decode <= _EPSILON:
                self._finish(name, running)

    def _first_token(self, name: str, running: _Running) -> None:
        running.first_token = self._now
        self._policy.first_token(name, self._now)

    def _finish(self, name: str, running: _Running) -> None:
        if running.first_token < 0:
            self._first_token(name, running)
        del self._running[name]
        lease, call = running.lease, running.call
        self._engine.serve(lease.slot.slot, call)
        outcome = Outcome(
            status=Status.OK,
            cached_tokens=running.cached,
            processed_tokens=running.prompt_tokens - running.cached,
            output_tokens=call.output_tokens,
            prefill_seconds=running.prefill_total,
            decode_seconds=self._now - running.first_token,
            ttft_seconds=running.first_token - running.arrived,
            generated=call.generated,
            after=call.after,
        )
        report = self._policy.finish(name, outcome, self._now)
        self._served.append(
            Served(
                session=call.session,
                arrived=running.arrived,
                granted=lease.granted,
                first_token=running.first_token,
                finished=self._now,
                prompt_tokens=running.prompt_tokens,
                cached_tokens=running.cached,
                predicted_tokens=lease.predicted_tokens,
                output_tokens=call.output_tokens,
                losses={str(k): n for k, n in report.losses.items()} if report is not None else {},
                host_tokens=running.host,
            )
        )
        self._clients.done(self._index.pop(name), self._now)
        if self._progress is not None:
            self._progress(len(self._served))
