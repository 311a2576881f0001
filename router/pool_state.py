"""The state of one pool: its backends, its queue, what its slots hold and held, and whose it is. Pure.

:mod:`.core` changes it in the course of requests; here it is turned into the facts that placement and
scheduling decide on. Matches of queued requests are kept and only looked up again for slots that changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import placement, scheduler
from .history import History
from .placement import Choice, Demand, SlotFacts
from .rates import Rates
from .residency import Residency
from .scheduler import CoreSettings, Pick, Waiting, in_flight_limit
from .sessions import Sessions
from .values import Loss, SlotRef

if TYPE_CHECKING:
    from .residency import Context, SlotState
    from .values import Lease, Request

_ROLLBACK_MEMORY = 0.7
_CUT_BYTES = 64
"""Less than this at the end of a slot is not counted as cutting it back."""
_PRICED_SLOTS = 12
"""Slots that are priced for one request in a large pool: those with the longest matches, and the cheapest."""
_SHORTEST_LINGER = 0.001
_OUTPUT_PRIOR = 128.0
_OUTPUT_MEMORY = 0.98
_SPREADS = 2.0
"""Mean deviations above the mean that an answer is planned for when a bound must be kept."""
_WORTH_A_LEVEL = 1.05
"""``auto`` lets one more decode beside the others while that raises the total rate by this factor."""


@dataclass(slots=True)
class Backend:
    """One engine that is up."""

    name: str
    pool: str
    slots: int
    context: int
    admit: bool = True
    rates: Rates = field(default_factory=Rates)
    active: dict[str, Active] = field(default_factory=dict)
    rollback: float = 1.0
    """Of the tokens that match where a slot must be cut back, the share that the engine reuses: near 0 for
    models whose cache cannot be cut (sliding window, recurrent)."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a slot holds, to be put back into one after its engine was started anew."""

    slot: int
    context: Context
    session: str = ""
    chance: float = 1.0
    """That it is asked for again at all."""

    @property
    def tokens(self) -> int:
        """Its length as the engine counts it."""
        return self.context.tokens + self.context.unread_tokens


@dataclass(slots=True)
class Active:
    """A lease that is out."""

    lease: Lease
    backend: Backend
    waiting: Waiting
    before: Context | None
    """What the slot held when the lease was given; ``before_known``: and whether that was known."""
    before_known: bool
    before_unverified: bool
    before_session: str
    held_tokens: int
    """Prompt tokens that the chosen slot held, whatever the engine can make of them."""
    best_tokens: int
    """The most prompt tokens that any slot held when the lease was given."""
    gone_tokens: int
    gone_reason: Loss
    rolls_back: bool
    prefill_seconds: float
    decoding_since: float | None = None
    wiped: bool = False
    """The engine lost what its slots held while this ran."""


class Pool:
    """The backends that serve one model, and the requests that wait for them."""

    def __init__(self, name: str, settings: CoreSettings) -> None:
        self.name, self.settings = name, settings
        self.backends: dict[str, Backend] = {}
        self.residency = Residency()
        self.history = History()
        self.sessions = Sessions()
        self.waiting: dict[str, Waiting] = {}
        self.wake: float | None = None
        """When to pick again though nothing happens, as of the last pick."""
        self._arrivals = 0
        self._output_tokens = self._output_spread = _OUTPUT_PRIOR
        self._served: dict[str, float] = {}

    # The queue

    def enter(self, request: Request, now: float) -> None:
        """Queue a request: find what slots hold of it and which conversation it continues."""
        session, reach = self.sessions.arrive(request.prompt, request.session, now)
        waiting = Waiting(
            request=request,
            order=self._arrivals,
            since=now,
            session=session.id,
            reach=reach,
            epoch=self.residency.epoch,
            matches=self.residency.matches(request.prompt) if request.keeps_prefix else {},
        )
        self._arrivals += 1
        self._join(request.client)
        self.waiting[request.id] = waiting
        self._estimate(waiting)

    def leave(self, request_id: str, now: float) -> None:
        """Take a request out of the queue unserved; unknown ids are ignored."""
        waiting = self.waiting.pop(request_id, None)
        if waiting is not None:
            self.sessions.release(waiting.session, now)

    def _join(self, client: str) -> None:
        """A client that was away starts level with the least served one that is here."""
        here = {w.request.client for w in self.waiting.values()}
        here |= {a.lease.request.client for b in self.backends.values() for a in b.active.values()}
        if client not in here:
            least = min((self._served.get(name, 0.0) for name in here), default=0.0)
            self._served = {name: self._served.get(name, 0.0) for name in here}
            self._served[client] = max(self._served.get(client, 0.0), least)

    def learn_output(self, client: str, tokens: int, seconds: float) -> None:
        """A request of a client is over: how much it wrote, and how long it was served."""
        gap = abs(tokens - self._output_tokens)
        self._output_spread = _OUTPUT_MEMORY * self._output_spread + (1 - _OUTPUT_MEMORY) * gap
        self._output_tokens = _OUTPUT_MEMORY * self._output_tokens + (1 - _OUTPUT_MEMORY) * tokens
        self._served[client] = self._served.get(client, 0.0) + seconds

    # What is known of the waiting

    def refresh(self) -> None:
        """Bring every queued request's matches and estimates up to date."""
        residency = self.residency
        for waiting in self.waiting.values():
            if waiting.epoch == residency.epoch:
                continue
            if waiting.request.keeps_prefix:
                for ref in residency.changed_since(waiting.epoch):
                    shared = residency.match(waiting.request.prompt, ref) if ref in residency.slots else 0
                    if shared:
                        waiting.matches[ref] = shared
                    else:
                        waiting.matches.pop(ref, None)
            waiting.epoch = residency.epoch
            self._estimate(waiting)

    def _estimate(self, waiting: Waiting) -> None:
        request = waiting.request
        waiting.prompt_tokens = self.residency.prompt_tokens(request.prompt, waiting.matches)
        waiting.tokens = {
            ref: self._reusable(waiting, ref, shared) for ref, shared in waiting.matches.items()
        }
        waiting.best_slot, waiting.best_tokens, waiting.second_tokens = None, 0, 0
        for ref, tokens in waiting.tokens.items():
            if tokens > waiting.best_tokens:
                waiting.second_tokens = waiting.best_tokens
                waiting.best_slot, waiting.best_tokens = ref, tokens
            elif tokens > waiting.second_tokens:
                waiting.second_tokens = tokens
        name = waiting.best_slot.backend if waiting.best_slot is not None else next(iter(self.backends), None)
        if name is not None:
            rates = self.backends[name].rates
            waiting.prefill_seconds = rates.prefill_seconds(waiting.best_tokens, waiting.prompt_tokens)
            waiting.full_seconds = rates.prefill_seconds(0, waiting.prompt_tokens)
            most = request.max_output_tokens
            output = self._output_tokens if most is None else min(most, self._output_tokens)
            waiting.decode_seconds = rates.decode_seconds(output)
            spread = _SPREADS * self._output_spread
            waiting.spread_seconds = rates.decode_seconds(
                spread if most is None else min(spread, most - output)
            )

    def _reusable(self, waiting: Waiting, ref: SlotRef, shared: int) -> int:
        """Prompt tokens that the engine is expected to reuse on a slot that shares ``shared`` bytes."""
        prompt = waiting.request.prompt
        tokens = self.residency.reusable_tokens(prompt, ref, shared, waiting.prompt_tokens)
        if self.rolls_back(ref, shared):
            tokens = int(tokens * self.backends[ref.backend].rollback)
        return tokens

    def rolls_back(self, ref: SlotRef, shared: int) -> bool:
        """Whether the engine has to cut the slot back to reuse ``shared`` bytes of it."""
        held = self.residency.slots[ref].held
        return held is not None and 0 < shared < held.length - _CUT_BYTES

    def learn_rollback(self, backend: Backend, held_tokens: int, cached: int) -> None:
        """A slot that was to be cut back to ``held_tokens`` was reused for ``cached``."""
        if held_tokens > 0:
            ratio = min(1.0, cached / held_tokens)
            backend.rollback = _ROLLBACK_MEMORY * backend.rollback + (1 - _ROLLBACK_MEMORY) * ratio

    # Who goes next

    def pick(self, now: float) -> Pick:
        """What to start now; the estimates must be fresh."""
        demands: dict[SlotRef, list[Demand]] = {}
        for waiting in self.waiting.values():
            if waiting.best_slot is not None:
                demand = Demand(waiting.request.id, waiting.best_tokens, waiting.second_tokens)
                demands.setdefault(waiting.best_slot, []).append(demand)
        view = _View(self, demands, now)
        return scheduler.pick(
            list(self.waiting.values()),
            self.settings,
            now,
            capacity=max(1, sum(self.limit(backend) for backend in self.backends.values())),
            served=self._served,
            price=view.price,
            linger=view.linger,
        )

    def limit(self, backend: Backend) -> int:
        """How many requests may run at once on a backend, as far as its rates are known."""
        most = in_flight_limit(self.settings.in_flight, backend.slots)
        if self.settings.in_flight != "auto":
            return most
        level = 1
        while level < most and backend.rates.speedup(level + 1) >= _WORTH_A_LEVEL:
            level += 1
        return level

    def has_room(self, backend: Backend) -> bool:
        """Whether a backend may take one more request at all."""
        if not backend.admit or len(backend.active) >= self.limit(backend):
            return False
        # The engine may put an unpinned request on any idle slot: until it is seen, none is known idle.
        return all(a.lease.request.pinned or a.decoding_since is not None for a in backend.active.values())

    def idle_slots(self, backend: Backend) -> list[SlotRef]:
        """The backend's slots without a lease, lowest first."""
        refs = (SlotRef(backend.name, index) for index in range(backend.slots))
        return [ref for ref in refs if self.residency.slots[ref].request is None]

    def decode_left(self, active: Active, now: float) -> float:
        """Seconds that a running request is expected to go on decoding."""
        output = self._output_tokens
        most = active.lease.request.max_output_tokens
        if most is not None:
            output = min(output, most)
        seconds = active.backend.rates.decode_seconds(output, len(active.backend.active))
        since = active.decoding_since
        return seconds if since is None else max(seconds / 4, seconds - (now - since))

    # What is carried over a restart

    def contents(self, backend: Backend) -> list[Contents]:
        """What the backend's idle slots are known to hold."""
        wanted = {waiting.session for waiting in self.waiting.values()}
        found = []
        for ref in self.idle_slots(backend):
            slot = self.residency.slots[ref]
            if slot.known and slot.held is not None and not slot.at_most:
                chance = 1.0 if slot.session in wanted else self.sessions.chance(slot.session)
                found.append(Contents(ref.slot, slot.held, slot.session, chance))
        return found

    def believe(self, ref: SlotRef, contents: Contents, now: float) -> None:
        """An empty slot was filled again with this, as the engine says."""
        slot = self.residency.slots[ref]
        slot.session, slot.last_used = contents.session, now
        self.history.restored(contents.context)
        self.residency.hold(ref, contents.context, known=True, unverified=True)

    # What was lost

    def lose(self, context: Context | None, reason: Loss, *, beyond: int = 0) -> None:
        """A context is gone from its slot, but for its first ``beyond`` bytes."""
        if context is not None and context.length > beyond + _CUT_BYTES:
            self.history.add(context, reason)

    def gone(self, waiting: Waiting) -> tuple[int, Loss]:
        """The most tokens of a prompt that any slot held before, and why it does not any more."""
        request = waiting.request
        best, reason = 0, Loss.EVICTED
        if request.keeps_prefix:
            for ghost, shared in self.history.matches(request.prompt):
                tokens = ghost.context.tokens_at(shared)
                if tokens > best:
                    best, reason = tokens, ghost.reason
        return best, reason


class _View:
    """The pool as one pick sees it."""

    def __init__(self, pool: Pool, demands: dict[SlotRef, list[Demand]], now: float) -> None:
        self._pool, self._demands, self._now = pool, demands, now
        self._room = {name: pool.has_room(backend) for name, backend in pool.backends.items()}
        self._turns = pool.sessions.turns_ahead()
        self._chances: dict[str, float] = {}
        self._cheapest: list[SlotRef] | None = None

    def price(self, waiting: Waiting, patient: bool) -> Choice | None:  # as the scheduler asks
        """The placement of a request now; ``patient``: another may be waited for, and running ones spared."""
        refs = self._refs(waiting)
        facts = [self._facts(waiting, ref, patient=patient) for ref in refs]
        return placement.choose(facts, waiting.prompt_tokens, waiting.request.id, patient=patient)

    def linger(self, waiting: Waiting, choice: Choice) -> float:
        """Seconds for which the chosen slot should still be kept for its own conversation."""
        pool = self._pool
        slot = pool.residency.slots[choice.slot]
        if not slot.session or slot.session == waiting.session or choice.tail_seconds <= 0:
            return 0.0
        if pool.settings.linger is not None:
            seconds = pool.sessions.fixed_linger(slot.session, pool.settings.linger, self._now)
        else:
            seconds = pool.sessions.linger_seconds(slot.session, choice.tail_seconds, self._now)
        return seconds if seconds >= _SHORTEST_LINGER else 0.0

    def _refs(self, waiting: Waiting) -> list[SlotRef]:
        slots = self._pool.residency.slots
        if len(slots) <= _PRICED_SLOTS:
            return list(slots)
        tokens = waiting.tokens
        refs = sorted(tokens, key=lambda ref: -tokens[ref])[: _PRICED_SLOTS // 2]
        refs += [ref for ref in self._by_loss() if ref not in refs][: _PRICED_SLOTS - len(refs)]
        return refs

    def _by_loss(self) -> list[SlotRef]:
        """Idle slots in the order of what overwriting all of them would destroy."""
        if self._cheapest is None:
            losses: list[tuple[float, float, SlotRef]] = []
            for ref, slot in self._pool.residency.slots.items():
                if slot.request is None and self._room[ref.backend]:
                    tail = placement.tail_seconds(self._slot_facts(slot, 0, idle=True, own=False))
                    lost = tail * self._chance(slot.session) * self._turns
                    for demand in self._demands.get(ref, ()):
                        rates = self._pool.backends[ref.backend].rates
                        lost = max(lost, rates.prefill_seconds(demand.elsewhere_tokens, demand.match_tokens))
                    losses.append((lost, slot.last_used, ref))
            self._cheapest = [ref for _, _, ref in sorted(losses)]
        return self._cheapest

    def _chance(self, session: str) -> float:
        chance = self._chances.get(session)
        if chance is None:
            # Who waits or runs is counted as demand, which says exactly what would be lost.
            sessions = self._pool.sessions
            chance = sessions.chance(session)
            self._chances[session] = chance
        return chance

    def _facts(self, waiting: Waiting, ref: SlotRef, *, patient: bool) -> SlotFacts:
        slot = self._pool.residency.slots[ref]
        match = waiting.tokens.get(ref, 0)
        idle = slot.request is None and self._room[ref.backend] and self._fits(waiting.request, ref.backend)
        if idle and patient:
            idle = self._worth_it(waiting, ref.backend, match)
        return self._slot_facts(slot, match, idle=idle, own=slot.session == waiting.session)

    def _slot_facts(self, slot: SlotState, match: int, *, idle: bool, own: bool) -> SlotFacts:
        pool, ref = self._pool, slot.ref
        backend = pool.backends[ref.backend]
        held = slot.held if slot.known else None
        asked = held.asked_tokens if held is not None else 0
        if slot.request is not None:
            chance = 0.0
        else:
            chance = pool.sessions.tail_chance if own else self._chance(slot.session)
        return SlotFacts(
            ref=ref,
            idle=idle,
            match_tokens=match,
            asked_tokens=asked,
            shared_tokens=pool.residency.shared_tokens(ref)[0],
            return_chance=chance if asked else 0.0,
            recurring=1.0 if own else self._turns,
            last_used=slot.last_used,
            rates=backend.rates,
            demands=self._demands.get(ref, ()),
            wait_seconds=0.0 if slot.request is None else self._wait(backend, slot.request),
        )

    def _fits(self, request: Request, name: str) -> bool:
        pool = self._pool
        backend = pool.backends[name]
        if not request.pinned and backend.active:
            return False
        return request.slots == 1 or len(pool.idle_slots(backend)) >= request.slots

    def _worth_it(self, waiting: Waiting, name: str, match: int) -> bool:
        """Whether a request should start beside those that run, whose decoding its prefill holds up.

        It costs its prefill, and wins what decoding together saves over decoding one after the other.
        """
        pool = self._pool
        backend = pool.backends[name]
        running = len(backend.active)
        if not running or pool.settings.in_flight in {"serialize", "slots"}:
            return True
        prefill = backend.rates.prefill_seconds(match, waiting.prompt_tokens)
        overlap = min(
            waiting.decode_seconds,
            sum(pool.decode_left(active, self._now) for active in backend.active.values()) / running,
        )
        return prefill <= overlap * (1.0 - 1.0 / max(1.0, backend.rates.speedup(running + 1)))

    def _wait(self, backend: Backend, request_id: str) -> float:
        """Expected seconds until a running request leaves its slot."""
        active = backend.active.get(request_id)
        if active is None:
            return 0.0
        prefill = 0.0
        if active.decoding_since is None:
            prefill = max(0.0, active.lease.granted + active.prefill_seconds - self._now)
        return prefill + self._pool.decode_left(active, self._now)
