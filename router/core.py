"""The pure core: everything that is decided, and nothing that waits.

One object owns slots, queue and trie. Every method is synchronous and deterministic given its arguments;
time comes in as ``now`` (monotonic seconds). The dispatcher drives it with real engines, the simulator with
modelled ones: the same code routes in both.

The life of a request: ``submit`` -> (``withdraw`` | a lease from ``grant``) -> ``first_token`` -> ``finish``.
After any call, ask ``grant`` for what may start now and ``next_wake`` for when to ask again unprompted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from . import losses, placement, scheduler
from .placement import SlotFacts
from .rates import Rates
from .residency import Residency, SlotState
from .scheduler import CoreSettings, Waiting, in_flight_limit
from .values import Decision, Lease, Report, SlotRef, SlotView, Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .values import Outcome, Request, SlotObservation

__all__ = ["Core", "CoreSettings", "QueueFullError", "RouterCore"]

_RETRY_AFTER = 5.0


class QueueFullError(Exception):
    """The pool's queue is at its limit; ``retry_after`` is a hint in seconds."""

    def __init__(self, pool: str, limit: int, retry_after: float) -> None:
        super().__init__(f"pool {pool!r}: {limit} requests are waiting already")
        self.pool, self.limit, self.retry_after = pool, limit, retry_after


class Core(Protocol):
    """What the dispatcher and the simulator rely on."""

    def backend_up(
        self, backend: str, pool: str, slots: int, context: int, now: float, *, known_empty: bool
    ) -> None:
        """A backend serves now with ``slots`` slots of ``context`` tokens each.

        ``known_empty``: freshly started by us; otherwise what it holds is unknown until observed.
        """

    def backend_down(self, backend: str, now: float) -> None:
        """A backend is gone with all that its slots held. Leases on it must still be finished."""

    def backend_admit(self, backend: str, admit: bool) -> None:
        """Stop (drain) or resume giving leases on a backend that stays up."""

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises :class:`QueueFullError`."""

    def withdraw(self, request_id: str, now: float) -> None:
        """Take a request that has no lease out of the queue (the client left). Unknown ids are ignored."""

    def grant(self, now: float) -> list[Lease]:
        """All leases that may start now. Every lease names slots that are known to be idle."""

    def next_wake(self, now: float) -> float | None:
        """When ``grant`` could answer differently though nothing happens (a bound, a linger), or ``None``."""

    def first_token(self, request_id: str, now: float) -> None:
        """The prefill of a leased request is over, it decodes now."""

    def finish(self, request_id: str, outcome: Outcome, now: float) -> Report:
        """The engine says that the slot of this lease is free. Exactly once for each lease, else KeyError."""

    def observe(self, backend: str, slots: Sequence[SlotObservation], now: float) -> None:
        """Compare the picture with the engine's ``/slots``; foreign traffic makes a slot unknown."""

    def queued(self, pool: str) -> int:
        """Requests waiting for a lease."""

    def position(self, request_id: str) -> tuple[int, float] | None:
        """Place in the queue (0 = next) and an estimate of the wait in seconds; ``None`` if not queued."""

    def slots(self) -> list[SlotView]:
        """Every slot of every backend, for status pages and metrics."""


@dataclass(slots=True)
class _Backend:
    name: str
    pool: str
    slots: int
    context: int
    admit: bool = True
    rates: Rates = field(default_factory=Rates)
    active: dict[str, _Active] = field(default_factory=dict)


@dataclass(slots=True)
class _Active:
    """A lease that is out."""

    lease: Lease
    backend: _Backend
    submitted: float
    best_tokens: int
    """The most tokens of the prompt that any slot held when the lease was given."""
    decoding: bool = False
    wiped: bool = False
    """The engine lost what its slots held while this ran."""


@dataclass(slots=True)
class _Pool:
    name: str
    settings: CoreSettings
    residency: Residency = field(default_factory=Residency)
    backends: dict[str, _Backend] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    arrivals: int = 0


class RouterCore:
    """The core for a set of pools. See :class:`Core` for the contract of each method."""

    def __init__(self, pools: Mapping[str, CoreSettings]) -> None:
        self._pools = {name: _Pool(name, settings) for name, settings in pools.items()}
        self._backends: dict[str, _Backend] = {}
        self._active: dict[str, _Active] = {}

    # Backends

    def backend_up(
        self, backend: str, pool: str, slots: int, context: int, now: float, *, known_empty: bool
    ) -> None:
        """A backend serves now. Coming up again replaces what was known of it."""
        if backend in self._backends:
            self.backend_down(backend, now)
        state = _Backend(backend, pool, slots, context)
        self._backends[backend] = state
        owner = self._pools[pool]
        owner.backends[backend] = state
        for slot in range(slots):
            owner.residency.add(SlotRef(backend, slot), known_empty=known_empty)

    def backend_down(self, backend: str, now: float) -> None:
        """A backend is gone. Unknown backends are ignored."""
        del now
        state = self._backends.pop(backend, None)
        if state is None:
            return
        pool = self._pools[state.pool]
        del pool.backends[backend]
        for slot in range(state.slots):
            pool.residency.remove(SlotRef(backend, slot))
        for active in state.active.values():
            active.wiped = True

    def backend_admit(self, backend: str, admit: bool) -> None:
        """Stop or resume giving leases on a backend; raises KeyError for one that is not up."""
        self._backends[backend].admit = admit

    # Requests

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises KeyError for an unknown pool, ValueError for an id in use."""
        pool = self._pools[request.pool]
        if request.id in pool.waiting or request.id in self._active:
            raise ValueError(f"request id {request.id!r} is in use already")
        if len(pool.waiting) >= pool.settings.max_queue:
            raise QueueFullError(pool.name, pool.settings.max_queue, _RETRY_AFTER)
        pool.waiting[request.id] = Waiting(request=request, order=pool.arrivals, since=now)
        pool.arrivals += 1

    def withdraw(self, request_id: str, now: float) -> None:
        """Take a request out of the queue."""
        del now
        for pool in self._pools.values():
            pool.waiting.pop(request_id, None)

    def grant(self, now: float) -> list[Lease]:
        """All leases that may start now."""
        leases: list[Lease] = []
        for pool in self._pools.values():
            while pool.waiting and any(self._has_room(pool, b) for b in pool.backends.values()):
                for waiting in pool.waiting.values():
                    waiting.choice = self._choose(pool, waiting.request)
                chosen = scheduler.pick(list(pool.waiting.values()), pool.settings, now)
                if chosen is None:
                    break
                leases.append(self._lease(pool, chosen, now))
        return leases

    def next_wake(self, now: float) -> float | None:
        """The earliest moment at which any pool has something to reconsider."""
        wakes = [
            wake
            for pool in self._pools.values()
            if (wake := scheduler.next_wake(list(pool.waiting.values()), pool.settings, now)) is not None
        ]
        return min(wakes, default=None)

    def first_token(self, request_id: str, now: float) -> None:
        """Unknown ids are ignored: the lease may have been finished in the meantime."""
        del now
        active = self._active.get(request_id)
        if active is not None:
            active.decoding = True

    def finish(self, request_id: str, outcome: Outcome, now: float) -> Report:
        """Take the lease back and learn from what the engine said."""
        active = self._active.pop(request_id)
        backend, lease = active.backend, active.lease
        del backend.active[request_id]
        pool = self._pools[backend.pool]
        if outcome.engine_error:
            for other in backend.active.values():
                other.wiped = True
        if self._backends.get(backend.name) is backend:
            self._settle(pool, active, outcome, now)
        told = outcome.cached_tokens is not None and outcome.processed_tokens is not None
        cached, processed = outcome.cached_tokens or 0, outcome.processed_tokens or 0
        if told and processed:
            backend.rates.saw_prefill(cached, cached + processed, outcome.prefill_seconds)
        backend.rates.saw_decode(outcome.output_tokens, outcome.decode_seconds, len(backend.active) + 1)
        return Report(
            request=lease.request,
            slot=outcome.slot or lease.slot,
            decision=lease.decision,
            status=outcome.status,
            predicted_tokens=lease.predicted_tokens,
            cached_tokens=cached if told else 0,
            processed_tokens=processed if told else 0,
            output_tokens=outcome.output_tokens,
            queue_seconds=lease.granted - active.submitted,
            losses=losses.split(
                processed, cached, predicted=lease.predicted_tokens, resident=active.best_tokens
            )
            if told
            else {},
            truth_missing=not told,
            session=lease.request.session or "",
        )

    def observe(self, backend: str, slots: Sequence[SlotObservation], now: float) -> None:
        """Compare idle slots with what the engine says of them; ignored for a backend that is not up."""
        del now
        state = self._backends.get(backend)
        if state is None:
            return
        residency = self._pools[state.pool].residency
        for seen in slots:
            slot = residency.slots.get(SlotRef(backend, seen.slot))
            if slot is None or slot.request is not None:
                continue
            _compare(residency, slot, seen)

    # Views

    def queued(self, pool: str) -> int:
        """Requests of a pool that wait for a lease."""
        return len(self._pools[pool].waiting)

    def position(self, request_id: str) -> tuple[int, float] | None:
        """Place in the queue and the time that those before it and those running will take, roughly."""
        for pool in self._pools.values():
            if request_id in pool.waiting:
                order = sorted(pool.waiting.values(), key=lambda w: w.order)
                place = next(i for i, w in enumerate(order) if w.request.id == request_id)
                room = sum(in_flight_limit(pool.settings.in_flight, b.slots) for b in pool.backends.values())
                seconds = sum(self._seconds(pool, w.request) for w in order[:place])
                return place, seconds / max(1, room)
        return None

    def slots(self) -> list[SlotView]:
        """Every slot of every backend."""
        return [
            self._view(pool, slot) for pool in self._pools.values() for slot in pool.residency.slots.values()
        ]

    # Inside

    def _has_room(self, pool: _Pool, backend: _Backend) -> bool:
        if not backend.admit or len(backend.active) >= in_flight_limit(
            pool.settings.in_flight, backend.slots
        ):
            return False
        # The engine may put an unpinned request on any idle slot: until it is seen where, none is known idle.
        return all(a.lease.request.pinned or a.decoding for a in backend.active.values())

    def _choose(self, pool: _Pool, request: Request) -> placement.Choice | None:
        residency = pool.residency
        matches = residency.matches(request.prompt) if request.keeps_prefix else {}
        prompt_tokens = residency.prompt_tokens(request.prompt, matches)
        facts = []
        for ref, slot in residency.slots.items():
            backend = pool.backends[ref.backend]
            idle = slot.request is None and self._has_room(pool, backend)
            if not request.pinned:
                idle = idle and not backend.active
            if request.slots > 1:
                idle = idle and self._idle_count(pool, backend) >= request.slots
            shared = matches.get(ref, 0)
            match = residency.reusable_tokens(request.prompt, ref, shared, prompt_tokens)
            facts.append(
                SlotFacts(
                    ref=ref,
                    idle=idle,
                    resident_tokens=slot.resident_tokens,
                    match_tokens=match,
                    kept_tokens=min(match, slot.resident_tokens),
                    return_chance=1.0,
                    last_used=slot.last_used,
                    rates=backend.rates,
                )
            )
        return placement.choose(facts, prompt_tokens)

    def _idle_count(self, pool: _Pool, backend: _Backend) -> int:
        slots = pool.residency.slots
        return sum(slots[SlotRef(backend.name, i)].request is None for i in range(backend.slots))

    def _lease(self, pool: _Pool, waiting: Waiting, now: float) -> Lease:
        choice = waiting.choice
        if choice is None:
            raise AssertionError("the scheduler picked a request that has no slot")
        request = waiting.request
        backend = pool.backends[choice.slot.backend]
        residency = pool.residency
        del pool.waiting[request.id]
        taken = [choice.slot]
        for index in range(backend.slots):
            # Copies of a prompt go to the lowest idle slots, as the engine will choose them.
            ref = SlotRef(backend.name, index)
            if len(taken) < request.slots and ref not in taken and residency.slots[ref].request is None:
                taken.append(ref)
        for ref in taken:
            slot = residency.slots[ref]
            slot.request, slot.last_used = request.id, now
        matches = residency.matches(request.prompt) if request.keeps_prefix else {}
        prompt_tokens = residency.prompt_tokens(request.prompt, matches)
        lease = Lease(
            request=request,
            slot=choice.slot,
            decision=choice.decision if request.pinned else Decision.UNPINNED,
            predicted_tokens=choice.match_tokens,
            prompt_tokens=prompt_tokens,
            granted=now,
            extra_slots=tuple(taken[1:]),
            candidates=choice.candidates,
        )
        active = _Active(
            lease=lease,
            backend=backend,
            submitted=waiting.since,
            best_tokens=max((c.match_tokens for c in choice.candidates), default=0),
        )
        self._active[request.id] = active
        backend.active[request.id] = active
        return lease

    def _settle(self, pool: _Pool, active: _Active, outcome: Outcome, now: float) -> None:
        """Write down what the slots of a finished lease hold now."""
        residency, lease = pool.residency, active.lease
        ran_on = outcome.slot or lease.slot
        for ref in (lease.slot, *lease.extra_slots):
            residency.slots[ref].request = None
            if ref != ran_on and lease.extra_slots:
                residency.doubt(ref)
        slot = residency.slots.get(ran_on)
        if slot is None:
            return
        slot.last_used = now
        request = lease.request
        if outcome.untouched and not active.wiped:
            return
        if active.wiped or outcome.engine_error:
            residency.hold(ran_on, None, known=False)
        elif (
            outcome.cached_tokens is not None and outcome.processed_tokens is not None and request.slots == 1
        ):
            slot.session = request.session or ""
            residency.commit(
                ran_on,
                request.prompt,
                outcome.generated,
                outcome.cached_tokens + outcome.processed_tokens,
                outcome.output_tokens,
            )
        elif (
            outcome.status is Status.CANCELLED
            and slot.held is not None
            and slot.known
            and request.keeps_prefix
        ):
            # The engine cut the slot back to the shared prefix first; how far it came after that is unknown.
            residency.hold(ran_on, slot.held.cut(residency.match(request.prompt, ran_on)), known=True)
        else:
            residency.doubt(ran_on)

    def _seconds(self, pool: _Pool, request: Request) -> float:
        residency = pool.residency
        backend = next(iter(pool.backends.values()), None)
        if backend is None:
            return 0.0
        return backend.rates.prefill_seconds(0, residency.prompt_tokens(request.prompt, {}))

    def _view(self, pool: _Pool, slot: SlotState) -> SlotView:
        shared, other = pool.residency.shared_tokens(slot.ref)
        group = ""
        if shared and other is not None:
            # Named after the shared prefix's first block, so that all who share it show the same name.
            chain = slot.held.chain if slot.held is not None else None
            group = f"{chain[0]:016x}"[:8] if chain else ""
        return SlotView(
            ref=slot.ref,
            busy=slot.request is not None,
            resident_tokens=slot.resident_tokens,
            shared_tokens=shared,
            shared_group=group,
            session=slot.session,
            known=slot.known,
            request=slot.request,
            last_used=slot.last_used,
        )


def _compare(residency: Residency, slot: SlotState, seen: SlotObservation) -> None:
    believed = slot.held.tokens if slot.held is not None else 0
    if seen.processing:  # not ours: somebody else uses the engine
        residency.doubt(slot.ref)
    elif seen.resident_tokens is None:
        return
    elif seen.resident_tokens == 0:
        residency.hold(slot.ref, None, known=True)
    elif seen.resident_tokens != believed:
        residency.doubt(slot.ref)
    elif not slot.known:
        residency.hold(slot.ref, slot.held, known=True)
