"""A pool as one decision sees it: every slot priced for every request that might start now. Pure.

:class:`~.pool_state.Pool` knows what holds for longer; what is worked out here is good for one pick.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from . import placement
from .host_tier import NO_SWAP, Held, Swap, length_of
from .placement import Ask, Choice, Demand, Offer, SlotFacts

if TYPE_CHECKING:
    from .pool_state import Backend, Pool
    from .scheduler import Waiting
    from .values import SlotRef

_ALL_PRICED = 12
_LONGEST_PRICED, _CHEAPEST_PRICED = 4, 4
"""Up to how many slots all are priced for a request; in a larger pool: how many with the longest matches, and
how many with least to lose."""
_MOST_DEMANDS = 4
"""Demands on one slot that are told apart; the largest decide."""
_SHORTEST_LINGER = 0.001


def _size(demand: Demand) -> int:
    return demand.match_tokens - demand.elsewhere_tokens


class View:
    """The pool as one pick sees it: what does not depend on the request is worked out once."""

    def __init__(self, pool: Pool, demands: dict[SlotRef, list[Demand]], now: float) -> None:
        self._pool, self._demands, self._now = pool, demands, now
        self._turns = pool.sessions.turns_ahead()
        self._room = {name: pool.has_room(backend) for name, backend in pool.backends.items()}
        self._backlog = {
            name: self._held_up(backend) if self._room[name] else self._full(backend)
            for name, backend in pool.backends.items()
        }
        """Seconds that one more request would lose on each backend by what runs there, passes apart: beside
        it where there is room, else until there is."""
        self._idle = {
            ref for ref, slot in pool.residency.slots.items() if slot.idle and self._room[ref.backend]
        }
        self._slots: dict[SlotRef, SlotFacts] = {}
        self._cheapest: list[SlotRef] | None = None

    def at_home(self, waiting: Waiting) -> bool:
        """Whether a request need not wait for a busy slot: its best is idle, or holds little of it."""
        best = waiting.best_slot
        return (
            best is None
            or best in self._idle
            or not self._pool.backends[best.backend].awaited
            or 2 * waiting.best_tokens < waiting.prompt_tokens
        )

    def price(self, waiting: Waiting, patient: bool) -> Choice | None:  # as the scheduler asks
        """The placement of a request now; ``patient``: another may be waited for, and running ones spared."""
        pool = self._pool
        refs = self._refs(waiting)
        stale = waiting.stale.intersection(refs)
        if stale:
            pool.resolve(waiting, stale)
        ask = self._ask(waiting)
        tokens = waiting.tokens
        offers = []
        for ref in refs:
            if not pool.backends[ref.backend].awaited:
                continue
            match = tokens.get(ref, 0)
            idle = ref in self._idle and self._fits(waiting, ref.backend)
            if idle and patient:
                idle = self._worth_it(waiting, ref, match)
            facts = self._facts(ref)
            swap = self._swap(waiting, ref, match) if waiting.host else NO_SWAP
            copying = facts.rates.copy_seconds(swap.moved) if swap.moved else 0.0
            offers.append(Offer(facts, match, idle, swap, copying))
        return placement.choose(offers, ask, patient=patient)

    def _swap(self, waiting: Waiting, ref: SlotRef, match_tokens: int) -> Swap:
        """What the engine would copy from and to host memory to serve a request on a slot."""
        host, slot = self._pool.backends[ref.backend].host, self._pool.residency.slots[ref]
        if host is None or slot.held is None or not slot.known or not waiting.request.pinned:
            return NO_SWAP
        seen = waiting.host.get(ref.backend)
        matches = seen.matches if seen is not None and seen.tier is host else ()
        return host.foresee(matches, Held(match_tokens, length_of(slot.held)), waiting.prompt_tokens)

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

    def _ask(self, waiting: Waiting) -> Ask:
        return Ask(
            request=waiting.request.id,
            session=waiting.session,
            prompt_tokens=waiting.prompt_tokens,
            rollback_chance=self._pool.sessions.tail_chance(waiting.session),
            turns=self._turns,
        )

    def _refs(self, waiting: Waiting) -> list[SlotRef]:
        """The slots to price: all of a small pool, else the longest matches and those with least to lose."""
        slots = self._pool.residency.slots
        if len(slots) <= _ALL_PRICED:
            return list(slots)
        tokens = waiting.tokens
        refs = heapq.nlargest(_LONGEST_PRICED, tokens, key=tokens.__getitem__)
        return refs + [ref for ref in self._by_loss() if ref not in refs]

    def _by_loss(self) -> list[SlotRef]:
        """Of each backend the idle slots where overwriting all of it would destroy least."""
        if self._cheapest is None:
            nobody = Ask("", "", 0, 0.0, self._turns)
            losses: dict[str, list[tuple[float, float, SlotRef]]] = {}
            for ref, slot in self._pool.residency.slots.items():
                if ref in self._idle:
                    lost = placement.loss_seconds(self._facts(ref), 0, nobody)
                    losses.setdefault(ref.backend, []).append((lost, slot.last_used, ref))
            each = max(1, _CHEAPEST_PRICED // max(1, len(losses)))
            self._cheapest = [ref for some in losses.values() for _, _, ref in heapq.nsmallest(each, some)]
        return self._cheapest

    def _facts(self, ref: SlotRef) -> SlotFacts:
        facts = self._slots.get(ref)
        if facts is None:
            facts = self._slots[ref] = self._look(ref)
        return facts

    def _look(self, ref: SlotRef) -> SlotFacts:
        pool = self._pool
        slot, backend = pool.residency.slots[ref], pool.backends[ref.backend]
        asked = slot.held.asked_tokens if slot.held is not None and slot.known else 0
        busy = slot.request is not None
        demands = self._demands.get(ref, ())
        return SlotFacts(
            ref=ref,
            session=slot.session,
            asked_tokens=asked,
            shared_tokens=pool.residency.shared_tokens(ref)[0],
            return_chance=pool.sessions.chance(slot.session) if asked and not busy else 0.0,
            goes_on=pool.sessions.going_on(slot.session) if asked and busy else 0.0,
            last_used=slot.last_used,
            rates=backend.rates,
            restore_seconds=backend.rates.copy_seconds(slot.resident_tokens)
            if backend.host is not None
            else math.inf,
            demands=demands
            if len(demands) <= _MOST_DEMANDS
            else heapq.nlargest(_MOST_DEMANDS, demands, _size),
            busy_seconds=self._beside(backend, ref)
            if slot.request is None
            else self._wait(backend, slot.request),
        )

    def _fits(self, waiting: Waiting, name: str) -> bool:
        pool, request = self._pool, waiting.request
        backend = pool.backends[name]
        if not request.pinned and backend.active:
            return False
        if not pool.has_context(backend, waiting):
            return False
        return request.slots == 1 or len(pool.idle_slots(backend)) >= request.slots

    def _worth_it(self, waiting: Waiting, ref: SlotRef, match: int) -> bool:
        """Whether a request should start beside those that run, whose decoding its prefill holds up.

        It costs its prefill, and wins what decoding together saves over decoding one after the other.
        """
        pool = self._pool
        backend = pool.backends[ref.backend]
        running = len(backend.active)
        if not running or pool.settings.in_flight != "pair":
            return True
        prefill = backend.rates.prefill_seconds(match, waiting.prompt_tokens)
        overlap = min(
            waiting.decode_seconds,
            sum(pool.decode_left(active, self._now) for active in backend.active.values()) / running,
        )
        before = backend.rates.gain(running, backend.passes)
        after = backend.rates.gain(running + 1, backend.passes + _further_passes(backend, ref))
        return prefill <= overlap * (1.0 - before / after)

    def _beside(self, backend: Backend, ref: SlotRef) -> float:
        """Seconds that a request on an idle slot would lose by what runs there.

        Who runs where has changed by the time that the first of them is over.
        """
        if not backend.active or not self._room[ref.backend]:
            return self._backlog[ref.backend]
        steps = self._pool.mean_output / (len(backend.active) + 1)
        passes = steps * backend.rates.pass_seconds * _further_passes(backend, ref)
        return self._backlog[ref.backend] + passes

    def _wait(self, backend: Backend, request_id: str) -> float:
        """Expected seconds until a running request leaves its slot."""
        active = backend.active.get(request_id)
        if active is None:
            return 0.0
        return self._pool.prefill_left(active, self._now) + self._pool.decode_left(active, self._now)

    def _full(self, backend: Backend) -> float:
        """Until one of those that run on a backend ends, which has no room for more."""
        return min((self._wait(backend, request_id) for request_id in backend.active), default=0.0)

    def _held_up(self, backend: Backend) -> float:
        """The engine computes one prompt after the other, and decoding is slower for each that shares it."""
        prefill = sum(self._pool.prefill_left(active, self._now) for active in backend.active.values())
        output, rates = self._pool.mean_output, backend.rates
        together = rates.decode_seconds(output, len(backend.active) + 1, backend.passes)
        return prefill + together - rates.decode_seconds(output)


def _further_passes(backend: Backend, ref: SlotRef) -> int:
    """How many passes more a step takes once this idle slot decodes as well: from -1 to 1."""
    return 1 - (ref.slot - 1 in backend.running) - (ref.slot + 1 in backend.running)
