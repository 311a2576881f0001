"""The pure core: everything that is decided, and nothing that waits.

One object owns slots, queue and trie. Every method is synchronous and deterministic given its arguments;
time comes in as ``now`` (monotonic seconds). The dispatcher drives it with real engines, the simulator with
modelled ones: the same code routes in both.

The life of a request: ``submit`` -> (``withdraw`` | a lease from ``grant``) -> ``first_token`` -> ``finish``.
After any call, ask ``grant`` for what may start now and ``next_wake`` for when to ask again unprompted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import losses
from .contract import QueueFullError
from .host_tier import NOTHING, HostTier
from .pool_state import Active, Backend, Contents, Pool
from .rates import passes_of
from .scheduler import CoreSettings, Waiting
from .values import Decision, HostMemoryView, Lease, Loss, Report, Route, SlotRef, SlotView, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .host_tier import Exchange
    from .placement import Choice
    from .residency import Residency, SlotState
    from .values import HostMemory, Outcome, Request, SlotObservation

__all__ = ["Contents", "CoreSettings", "QueueFullError", "RouterCore"]

_RETRY_AFTER = 5.0
_SLACK = 16
"""Tokens by which what an engine reused may differ from what was expected of it without being a surprise."""
_UNCACHED = frozenset({Route.INFILL, Route.EMBEDDINGS, Route.RERANK})
"""Requests for which the engine leaves its cache in host memory alone."""


class RouterCore:
    """The core for a set of pools. See :class:`~.contract.Core` for the contract of each method."""

    def __init__(self, pools: Mapping[str, CoreSettings]) -> None:
        self._pools = {name: Pool(name, settings) for name, settings in pools.items()}
        self._backends: dict[str, Backend] = {}
        self._active: dict[str, Active] = {}

    # Backends

    def backend_up(
        self,
        backend: str,
        pool: str,
        slots: int,
        context: int,
        now: float,
        *,
        known_empty: bool,
        host: HostMemory | None = None,
        unified: bool = False,
    ) -> None:
        """A backend serves now. Coming up again replaces what was known of it."""
        if backend in self._backends:
            self.backend_down(backend, now)
        tier = HostTier(host) if host is not None else None
        state = Backend(backend, pool, slots, context, host=tier, unified=unified)
        self._backends[backend] = state
        owner = self._pools[pool]
        owner.backends[backend] = state
        for slot in range(slots):
            owner.residency.add(SlotRef(backend, slot), known_empty=known_empty)

    def backend_down(self, backend: str, now: float) -> None:
        """A backend is gone. Unknown backends are ignored."""
        state = self._backends.pop(backend, None)
        if state is None:
            return
        del now
        pool = self._pools[state.pool]
        del pool.backends[backend]
        for index in range(state.slots):
            ref = SlotRef(backend, index)
            slot = pool.residency.slots[ref]
            pool.lose(slot.held if slot.known else None, Loss.RESTARTED)
            pool.residency.remove(ref)
        for active in state.active.values():
            active.wiped = True
        if not pool.backends:
            pool.shadow.forget()

    def backend_admit(self, backend: str, admit: bool, *, soon: bool = False) -> None:
        """Stop or resume giving leases on a backend; raises KeyError for one that is not up."""
        state = self._backends[backend]
        state.admit, state.awaited = admit, admit or soon

    def reschedule(self, pool: str, settings: CoreSettings) -> None:
        """Put another policy in force; leases that are out stay."""
        self._pools[pool].settings = settings

    def add_pool(self, pool: str, settings: CoreSettings) -> None:
        """Begin a pool; one of that name must not be there."""
        self._pools[pool] = Pool(pool, settings)

    def remove_pool(self, pool: str) -> None:
        """Forget a pool with all that was learned of its requests."""
        del self._pools[pool]

    def contents(self, backend: str) -> list[Contents]:
        """What can be saved of a backend, to be believed again after its restart."""
        state = self._backends.get(backend)
        return [] if state is None else self._pools[state.pool].contents(state)

    def believe(self, backend: str, contents: Contents, now: float) -> None:
        """Raises KeyError for a slot that does not exist."""
        pool = self._pools[self._backends[backend].pool]
        pool.believe(SlotRef(backend, contents.slot), contents, now)

    # Requests

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises KeyError for an unknown pool, ValueError for an id in use."""
        pool = self._pools[request.pool]
        if request.id in self._active or any(request.id in other.waiting for other in self._pools.values()):
            raise ValueError(f"request id {request.id!r} is in use already")
        if len(pool.waiting) >= pool.settings.max_queue:
            raise QueueFullError(pool.name, pool.settings.max_queue, _RETRY_AFTER)
        pool.enter(request, now)

    def withdraw(self, request_id: str, now: float) -> None:
        """Take a request out of the queue."""
        for pool in self._pools.values():
            pool.leave(request_id, now)

    def grant(self, now: float) -> list[Lease]:
        """All leases that may start now."""
        leases: list[Lease] = []
        for pool in self._pools.values():
            pool.wake = None
            while pool.waiting and any(pool.has_room(backend) for backend in pool.backends.values()):
                pool.refresh()
                pick = pool.pick(now)
                if pick.start is None or pick.start.choice is None:
                    pool.wake = pick.wake
                    break
                leases.append(self._lease(pool, pick.start, pick.start.choice, now))
        return leases

    def next_wake(self, now: float) -> float | None:
        """The earliest moment at which the last :meth:`grant` left something to reconsider."""
        wakes = [pool.wake for pool in self._pools.values() if pool.wake is not None and pool.waiting]
        return min((wake for wake in wakes if wake > now), default=None)

    def first_token(self, request_id: str, now: float) -> None:
        """Unknown ids are ignored: the lease may have been finished in the meantime."""
        active = self._active.get(request_id)
        if active is not None and active.decoding_since is None:
            backend = active.backend
            backend.tick(now)
            # While this was computed, the others stood still.
            backend.stalled += now - active.lease.granted
            active.decoding_since = now
            active.crowd, active.parts, active.stalled = backend.crowd, backend.parts, backend.stalled

    def finish(self, request_id: str, outcome: Outcome, now: float) -> Report:
        """Take the lease back and learn from what the engine said."""
        active = self._active.pop(request_id)
        backend, lease = active.backend, active.lease
        backend.tick(now)
        backend.end(request_id)
        pool = self._pools[backend.pool]
        if outcome.engine_error:
            for other in backend.active.values():
                other.wiped = True
        if outcome.context_full and backend.active:
            backend.unified = True  # each has room for one: what they ran out of is what they share
        if backend.host is not None and (outcome.engine_error or outcome.untouched):
            backend.host.forget()
        told = outcome.cached_tokens is not None and outcome.processed_tokens is not None
        cached, processed = (outcome.cached_tokens or 0, outcome.processed_tokens or 0) if told else (0, 0)
        if told:
            backend.rates.saw_prefill(cached, cached + processed, outcome.prefill_seconds)
            if active.rolls_back and active.exchange.loaded is None:
                pool.learn_rollback(backend, active.held_tokens, cached)
            if not active.wiped:
                pool.learn_carried(backend, active.carried_tokens, cached)
            pool.learn_prompt(cached + processed)
        _learn_decode(active, outcome, now)
        waiting = active.waiting
        pool.learn_output(
            lease.request.client, outcome.output_tokens, outcome.prefill_seconds + outcome.decode_seconds
        )
        tokens = cached + processed + outcome.output_tokens if told else None
        pool.sessions.release(waiting.session, now, tokens)
        host_tokens = _from_host(active, outcome, cached) if told else 0
        _learn_copy(active, outcome, host_tokens)
        shadow: dict[str, int] = {}
        if self._backends.get(backend.name) is backend:
            self._settle(pool, active, outcome, now)
            if told and outcome.status is not Status.ERROR:
                shadow = pool.imagine(active, outcome)
        return Report(
            request=lease.request,
            slot=outcome.slot or lease.slot,
            decision=lease.decision,
            status=outcome.status,
            predicted_tokens=lease.predicted_tokens,
            cached_tokens=cached,
            processed_tokens=processed,
            output_tokens=outcome.output_tokens,
            queue_seconds=lease.granted - waiting.since,
            losses=losses.split(
                processed,
                cached,
                predicted=active.held_tokens,
                resident=active.best_tokens,
                gone=active.gone_tokens,
                gone_reason=active.gone_reason,
                session=waiting.reach,
            ),
            host_tokens=host_tokens,
            truth_missing=not told,
            session=waiting.session.removeprefix("="),
            shadow=shadow,
        )

    def observe(self, backend: str, slots: Sequence[SlotObservation], now: float) -> None:
        """Compare idle slots with what the engine says of them; ignored for a backend that is not up."""
        del now
        state = self._backends.get(backend)
        if state is None:
            return
        pool = self._pools[state.pool]
        for seen in slots:
            slot = pool.residency.slots.get(SlotRef(backend, seen.slot))
            if slot is None or slot.request is not None:
                continue
            held, known = slot.held, slot.known
            _compare(pool.residency, slot, seen)
            vanished = held is not None and slot.held is None
            if state.host is not None and (seen.processing or (known and vanished)):
                state.host.forget()
            if vanished:  # it slept, or made room by itself
                pool.missed(held, Loss.RESTARTED)
            elif not slot.known and (known or seen.resident_tokens is not None):  # somebody else was there
                pool.missed(held, Loss.EVICTED)
            elif slot.held is not None and slot.known and not known:
                pool.history.restored(slot.held)

    def doubt(self, backend: str, slots: Iterable[int]) -> None:
        """What these slots hold is unknown until observed; they are free to be given out."""
        state = self._backends.get(backend)
        if state is None:
            return
        residency = self._pools[state.pool].residency
        for index in slots:
            slot = residency.slots.get(SlotRef(backend, index))
            if slot is not None and slot.request is None:
                residency.doubt(slot.ref)

    def outdate(self, backend: str, reason: Loss, slots: Iterable[int]) -> None:
        """They hold something, but nothing that is recognised again; nor does its cache in host memory."""
        state = self._backends.get(backend)
        if state is None:
            return
        pool = self._pools[state.pool]
        for ref in (SlotRef(backend, index) for index in slots):
            slot = pool.residency.slots[ref]
            pool.lose(slot.held if slot.known else None, reason)
            pool.residency.hold(ref, None, known=slot.known and slot.held is None)
        if state.host is not None:
            state.host.forget()
        if reason is Loss.RESTARTED:  # more slots would not have kept it either
            pool.shadow.forget()

    def unobserved(self, backend: str) -> None:
        """The engine does not say any more what its slots do: none is taken to be somebody else's."""
        state = self._backends.get(backend)
        if state is None:
            return
        for ref, slot in self._pools[state.pool].residency.slots.items():
            if ref.backend == backend:
                slot.foreign = False

    # Views

    def queued(self, pool: str) -> int:
        """Requests of a pool that wait for a lease."""
        return len(self._pools[pool].waiting)

    def position(self, request_id: str, now: float) -> tuple[int, float] | None:
        """Place in the queue and the time that those before it and those running will take, roughly."""
        for pool in self._pools.values():
            if request_id not in pool.waiting:
                continue
            pool.refresh()
            order = sorted(pool.waiting.values(), key=_fifo if pool.settings.queue == "fifo" else _rank)
            place = next(i for i, w in enumerate(order) if w.request.id == request_id)
            room = max(1, sum(pool.limit(backend) for backend in pool.backends.values()))
            return place, (pool.seconds_left(now) + sum(w.seconds for w in order[:place])) / room
        return None

    def slots(self) -> list[SlotView]:
        """Every slot of every backend."""
        return [_view(pool, slot) for pool in self._pools.values() for slot in pool.residency.slots.values()]

    def is_unified(self, backend: str) -> bool:
        """Whether its slots are known to share one context; False if it is not up."""
        state = self._backends.get(backend)
        return state is not None and state.unified

    def host_memory(self, backend: str) -> HostMemoryView | None:
        """The engine's prompt cache in host memory; ``None`` if it has none or is not up."""
        state = self._backends.get(backend)
        if state is None or state.host is None:
            return None
        rates, seen = state.rates, state.rates.copies_pay
        return HostMemoryView(
            entries=len(state.host),
            tokens=state.host.tokens,
            copy_seconds=None if seen is None else rates.copy_rate,
            prefill_seconds=rates.prefill_rate(0),
            pays=seen,
        )

    # Inside

    def _lease(self, pool: Pool, waiting: Waiting, choice: Choice, now: float) -> Lease:
        request, ref, residency = waiting.request, choice.slot, pool.residency
        backend = pool.backends[ref.backend]
        del pool.waiting[request.id]
        # Copies of a prompt go to the lowest idle slots, as the engine will choose them.
        others = [other for other in pool.idle_slots(backend) if other != ref][: request.slots - 1]
        shared = waiting.matches.get(ref, 0)
        exchange = _exchange(backend, request, residency.slots[ref], waiting.prompt_tokens)
        lease = Lease(
            request=request,
            slot=ref,
            decision=choice.decision if request.pinned else Decision.UNPINNED,
            predicted_tokens=max(choice.match_tokens, _reused(exchange, waiting)),
            prompt_tokens=waiting.prompt_tokens,
            granted=now,
            extra_slots=tuple(others),
            candidates=choice.candidates,
        )
        gone_tokens, gone_reason = pool.gone(waiting)
        held = residency.reusable_tokens(request.prompt, ref, shared, lease.prompt_tokens)
        slot = residency.slots[ref]
        active = Active(
            lease=lease,
            backend=backend,
            waiting=waiting,
            before=slot.held,
            before_known=slot.known,
            before_unverified=slot.unverified,
            before_session=slot.session,
            held_tokens=held,
            best_tokens=max(held, waiting.best_tokens),
            gone_tokens=gone_tokens,
            gone_reason=gone_reason,
            rolls_back=pool.rolls_back(ref, shared),
            prefill_seconds=choice.prefill_seconds,
            exchange=exchange,
        )
        if slot.unverified:  # where it turns out not to be there, the restart took it
            active.carried_tokens = held
            active.held_tokens = active.best_tokens = 0
            active.gone_tokens, active.gone_reason = max(held, gone_tokens), Loss.RESTARTED
        elif (carried := pool.carried_tokens(waiting, lease.prompt_tokens)) > max(held, gone_tokens):
            active.gone_tokens, active.gone_reason = carried, Loss.RESTARTED
        filling = [other for other in backend.active.values() if other.decoding_since is None]
        for other in filling:
            other.beside = active.beside = True
        for taken in (ref, *others):
            state = residency.slots[taken]
            state.request, state.last_used = request.id, now
        if request.pinned and request.slots == 1:
            pool.lose(slot.held if slot.known else None, Loss.EVICTED, beyond=shared)
            slot.session = waiting.session
            residency.expect(ref, request.prompt, lease.prompt_tokens)
        self._active[request.id] = active
        backend.begin(request.id, active)
        return lease

    @staticmethod
    def _settle(pool: Pool, active: Active, outcome: Outcome, now: float) -> None:
        """Write down what the slots of a finished lease hold now."""
        residency, lease, request = pool.residency, active.lease, active.lease.request
        ran_on = outcome.slot or lease.slot
        for ref in (lease.slot, *lease.extra_slots):
            residency.slots[ref].request = None
            if ref in lease.extra_slots:
                pool.lose(residency.slots[ref].held, Loss.EVICTED)
                residency.doubt(ref)
        slot = residency.slots.get(ran_on)
        if slot is None:
            return
        slot.last_used = now
        if ran_on != lease.slot and request.pinned:
            # The engine went its own way: neither slot is what we think.
            residency.doubt(lease.slot)
            residency.doubt(ran_on)
        elif active.wiped or outcome.engine_error:
            pool.lose(active.before if active.before_known else None, Loss.RESTARTED)
            residency.hold(ran_on, None, known=False)
        elif outcome.untouched:
            _put_back(pool, active)
        elif outcome.status is Status.CANCELLED and outcome.cached_tokens is None and request.pinned:
            _interrupted(pool, active, slot, outcome)
        elif outcome.cached_tokens is None or outcome.processed_tokens is None or request.slots > 1:
            residency.doubt(ran_on)
        else:
            _served(pool, active, slot, outcome)


def _served(pool: Pool, active: Active, slot: SlotState, outcome: Outcome) -> None:
    """The slot holds prompt and answer."""
    request = active.lease.request
    if not request.pinned:
        pool.lose(slot.held if slot.known else None, Loss.EVICTED, beyond=active.held_tokens)
        slot.session = active.waiting.session
    prompt_tokens = (outcome.cached_tokens or 0) + (outcome.processed_tokens or 0)
    pool.residency.commit(
        slot.ref,
        request.prompt,
        outcome.generated,
        prompt_tokens,
        outcome.output_tokens,
        after=outcome.after,
    )


def _put_back(pool: Pool, active: Active) -> None:
    """The slot was not touched: it holds what it held before the lease."""
    slot = pool.residency.slots[active.lease.slot]
    slot.session = active.before_session
    unverified = active.before_unverified
    pool.residency.hold(slot.ref, active.before, known=active.before_known, unverified=unverified)
    if active.before is not None:
        pool.history.restored(active.before)


def _interrupted(pool: Pool, active: Active, slot: SlotState, outcome: Outcome) -> None:
    """The client left: how far the engine came is known only if it said so.

    Until it does, the slot counts as holding the prompt: a client that tries again should come back to it.
    """
    held, unverified = slot.held, active.before_unverified
    if held is None or not slot.known:
        return
    if outcome.resident_tokens is not None:
        pool.residency.hold(slot.ref, held.cut_tokens(outcome.resident_tokens), known=True)
    elif active.decoding_since is None:
        pool.residency.hold(slot.ref, held, known=True, at_most=True, unverified=unverified)


def _exchange(backend: Backend, request: Request, slot: SlotState, prompt_tokens: int) -> Exchange:
    """What the engine's cache in host memory does for a request on a slot, as far as the slot is known.

    Where the engine chooses the slots itself, what the cache holds is not known any more.
    """
    if backend.host is None or request.route in _UNCACHED:
        return NOTHING
    if not request.pinned or request.slots > 1 or not slot.known or slot.at_most:
        backend.host.forget()
        return NOTHING
    return backend.host.exchange(slot.held, request.prompt, prompt_tokens)


def _reused(exchange: Exchange, waiting: Waiting) -> int:
    """Prompt tokens that a load gives; the last is computed all the same."""
    if exchange.loaded is None or not waiting.request.keeps_prefix:
        return 0
    return min(exchange.kept, max(0, waiting.prompt_tokens - 1))


def _from_host(active: Active, outcome: Outcome, cached: int) -> int:
    """Of the cached tokens those that a load added; what was to be loaded and was not there is forgotten."""
    host, exchange = active.backend.host, active.exchange
    if host is None or outcome.status is Status.ERROR:
        return 0
    if exchange.loaded is None or not active.lease.request.keeps_prefix:
        return 0
    promised = _reused(exchange, active.waiting)
    if cached <= active.held_tokens + _SLACK and promised > active.held_tokens + 2 * _SLACK:
        host.missed(exchange)
        return 0
    return max(0, cached - active.held_tokens)


def _learn_copy(active: Active, outcome: Outcome, host_tokens: int) -> None:
    """How long copying to host memory and back took: the time to the first token, less the prefill."""
    backend, since, exchange = active.backend, active.decoding_since, active.exchange
    if backend.host is None or since is None or active.beside or outcome.status is not Status.OK:
        return
    if exchange.loaded is not None and not host_tokens:
        return  # it was not there
    backend.rates.saw_copy(exchange.moved, since - active.lease.granted - outcome.prefill_seconds)


def _fifo(waiting: Waiting) -> float:
    return waiting.order


def _rank(waiting: Waiting) -> float:
    return waiting.waste


def _view(pool: Pool, slot: SlotState) -> SlotView:
    shared, other = pool.residency.shared_tokens(slot.ref)
    group = ""
    if shared and other is not None and slot.held is not None and slot.held.chain:
        # Named after the shared prefix's first block, so that all who share it show the same name.
        group = f"{slot.held.chain[0]:016x}"[:8]
    return SlotView(
        ref=slot.ref,
        busy=slot.request is not None,
        resident_tokens=0 if slot.unverified else slot.resident_tokens,
        shared_tokens=shared,
        shared_group=group,
        session=slot.session.removeprefix("="),
        known=slot.known and not slot.unverified,
        request=slot.request,
        last_used=slot.last_used,
    )


def _learn_decode(active: Active, outcome: Outcome, now: float) -> None:
    """How fast a request was written, less the time in which it stood still for the prefill of others."""
    backend, since = active.backend, active.decoding_since
    if since is None or now <= since:
        passes = passes_of({*backend.running, active.lease.slot.slot})
        beside = len(backend.active)
        backend.rates.saw_decode(outcome.output_tokens, outcome.decode_seconds, beside + 1, passes)
        return
    stalled = min(backend.stalled - active.stalled, 0.9 * outcome.decode_seconds)
    crowd, parts = backend.crowd - active.crowd, backend.parts - active.parts
    backend.rates.saw_decode(
        outcome.output_tokens,
        outcome.decode_seconds - stalled,
        crowd / (now - since),
        parts / (now - since),
    )


def _compare(residency: Residency, slot: SlotState, seen: SlotObservation) -> None:
    held, tokens = slot.held, seen.resident_tokens
    believed = held.tokens + held.unread_tokens if held is not None else 0
    slot.foreign = seen.processing
    if seen.processing:  # not ours: somebody else uses the engine
        residency.doubt(slot.ref)
    elif tokens is None:
        return
    elif tokens == 0:
        residency.hold(slot.ref, None, known=True)
    elif slot.at_most and held is not None and tokens <= believed:
        residency.hold(slot.ref, held.cut_tokens(tokens), known=True)
    elif tokens != believed:
        residency.doubt(slot.ref)
    elif not slot.known:
        residency.hold(slot.ref, held, known=True)
