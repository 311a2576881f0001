"""Who goes next, and how many run at once. Pure: the caller gives the waiting requests with their prices.

Order ``reuse``: the request that wastes least goes first, where waste is the seconds that serving it costs
(prefill and what it destroys) against the size of what it stands on. That keeps conversations that are warm
going, the large ones first, because they are the dearest to bring back; what is cold waits.

Nobody waits past the bound. A request is let in out of order not when its bound has passed but when serving
anybody else first would make some bound impossible to keep: waiting requests are taken to be served in the
order of their bounds, each for as long as it should take, and the next pick must leave that schedule
feasible. So the bound costs as few interruptions as can be, and what is let in late and is then warm goes
on by the same rule.

When even that schedule cannot keep the bound, there is more work than the bound has room for, and arrival
order would only make every request pay for everybody's eviction. The bound then gives way to
the time that one round takes if half of it goes into work that is not prefilled again.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from .values import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .host_tier import Seen
    from .placement import Choice, Demand
    from .values import Request, SlotRef

InFlight = Literal["serialize", "pair", "slots", "auto"]
Queue = Literal["reuse", "fifo"]
Overrun: TypeAlias = "Callable[[float], float]"
Price: TypeAlias = "Callable[[Waiting, bool], Choice | None]"
_Priced: TypeAlias = "tuple[Waiting, Choice]"

_first_rank = attrgetter("rank")
_SHORTLIST, _MOST_PRICED = 8, 24
"""Requests that are priced in full for a pick; the others rank behind them by a bound of their price."""

_TINY = 1e-6
_SIZE_POWER: float = 2.0
"""How strongly a large resident context speaks for going on with it.

With 1 the waste is relative to the size; above, dear contexts come before cheap ones. Measured on the traces
in the benchmark: 1 to 2 differ by under one point of reuse, 0.5 loses up to ten."""

_RESERVED = 0.5
"""Share of the time that a bound leaves beside one round which is kept for answers that take longer than
expected; the rest is for serving who wastes least. A quarter and all of it gave the same on the traces in the
benchmark, and with answers of very unequal length all of it left nothing to choose from."""

_AUTO_SHORTEST, _AUTO_LONGEST = 60.0, 300.0
_RELOADS_PER_ROUND = 10.0
_FAIR_SECONDS = 30.0
_CROWDED_OUT = 0.2
"""Share of the prompts that is taken to be lost when all slots are busy, over that with one in flight."""


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """A pool's policy. ``None`` for a time means that the core adapts it to the load. Times are seconds."""

    in_flight: InFlight = "auto"
    queue: Queue = "reuse"
    max_wait: float | None = None
    linger: float | None = None
    max_queue: int = 1024


@dataclass(slots=True)
class Waiting:
    """One request in the queue, with what is known of its price. Counts are tokens, times are seconds."""

    request: Request
    order: int
    """Arrival number within the pool."""
    since: float
    session: str
    reach: int = 0
    """Tokens that its conversation's context had before."""
    epoch: int = -1
    """State of the residency that the matches belong to."""
    matches: dict[SlotRef, int] = field(default_factory=dict)
    """Bytes that each slot shares with the prompt."""
    tokens: dict[SlotRef, int] = field(default_factory=dict)
    """Prompt tokens that each slot would reuse."""
    prompt_tokens: int = 0
    best_tokens: int = 0
    best_slot: SlotRef | None = None
    second_tokens: int = 0
    second_slot: SlotRef | None = None
    second_bytes: int = 0
    stale: set[SlotRef] = field(default_factory=set)
    """Slots that changed since ``matches`` were found; none of them is among the two best."""
    prefill_seconds: float = 0.0
    """On the slot that holds most of it."""
    full_seconds: float = 0.0
    """On an empty slot."""
    decode_seconds: float = 0.0
    seconds: float = 0.0
    """How long it will occupy its slot: the prefill there and the decoding."""
    spread_seconds: float = math.inf
    """How much longer than ``decode_seconds`` it may take at most, where its client set a limit."""
    waste: float = 0.0
    """Rank by what is known without pricing: what it costs on its best slot, if that destroys nothing."""
    rank: tuple[bool, float, int] = (False, 0.0, 0)
    """By priority, then ``waste``, then the youngest first."""
    host: dict[str, Seen] = field(default_factory=dict)
    """What each backend with a cache in host memory has of its prompt there."""
    demand: Demand | None = None
    """What it would lose if its best slot were overwritten."""
    choice: Choice | None = None


class Capacity(NamedTuple):
    """How much of a kind a pool does in the time that a single request alone takes for it."""

    requests: int = 1
    """How many run at once."""
    prompts: float = 1.0
    """An engine computes prompts one after the other, however many run."""
    answers: float = 1.0
    """Written together, each takes longer than alone."""

    def seconds(self, prefill: float, decode: float) -> float:
        """By how much a request that takes so long alone delays the next, where others run beside it."""
        return prefill / self.prompts + decode / self.answers


@dataclass(frozen=True, slots=True)
class Pick:
    """What to do next: start ``start``, or nothing until ``wake`` (or until something happens)."""

    start: Waiting | None = None
    wake: float | None = None


def waste(cost: float, full_seconds: float) -> float:
    """Rank of a request, lowest first: cost against the size of what it stands on."""
    size: float = max(full_seconds, _TINY) ** _SIZE_POWER
    return (cost + _TINY) / size


def bound(waiting: Iterable[Waiting], settings: CoreSettings, capacity: Capacity) -> float:
    """The bound on waiting in seconds that holds at this load, for requests that set none of their own.

    One round serves everybody who waits once: ``work`` is the time it takes, ``reloads`` the part spent on
    computing what was resident before. An automatic bound gives the reloads a tenth of the time, and is never
    so short that it would order the queue by itself; the more run at once, the shorter that may be. Where one
    round takes longer than the bound, no order could keep it, and it gives way.
    """
    work = reloads = 0.0
    for item in waiting:
        work += item.prefill_seconds / capacity.prompts + item.decode_seconds / capacity.answers
        if item.best_tokens * 2 < item.prompt_tokens:
            reloads += item.prefill_seconds
    reloads /= capacity.prompts
    longest = settings.max_wait
    if longest is None:
        shortest = _AUTO_SHORTEST / capacity.requests**0.5
        longest = min(_AUTO_LONGEST, max(shortest, work + _RELOADS_PER_ROUND * reloads))
    return max(longest, work + reloads) if work > longest else longest


def due(item: Waiting, limit: float, longest: float | None) -> float:
    """The moment by which a request is to be started.

    Its own bound counts as given, but where the load has pushed the pool's bound up, it cannot do better.
    """
    own = item.request.max_wait
    if own is None:
        return item.since + limit
    relaxed = longest is not None and limit > longest
    return item.since + (max(own, limit) if relaxed else min(own, limit))


class Deadlines:
    """When each waiting request is to be started, soonest first."""

    def __init__(
        self,
        waiting: Sequence[Waiting],
        settings: CoreSettings,
        now: float,
        capacity: Capacity,
        overrun: Overrun,
    ) -> None:
        limit = bound(waiting, settings, capacity)
        # No two have the same order, so the third is never compared; mostly sorted already, by arrival.
        longest = settings.max_wait
        self._dues = sorted(
            (
                item.since + limit if item.request.max_wait is None else due(item, limit, longest),
                item.order,
                item,
            )
            for item in waiting
        )
        self._now, self._capacity = now, capacity
        begin = now
        self._spare: list[float] = []
        """For each: how long it could wait beyond its turn, served in this order."""
        for moment, _, item in self._dues:
            self._spare.append(moment - begin)
            begin += item.prefill_seconds / capacity.prompts + item.decode_seconds / capacity.answers
        self._overrun = overrun(_RESERVED * (limit - (begin - now)) * capacity.answers)
        self._least = min(self._spare, default=math.inf)

    @cached_property
    def _place(self) -> dict[int, int]:
        return {order: at for at, (_, order, _) in enumerate(self._dues)}

    @cached_property
    def _spare_up_to(self) -> list[float]:
        """For each: the least that it or one before it has to spare."""
        return list(accumulate(self._spare, min))

    @cached_property
    def _spare_from(self) -> list[float]:
        return list(accumulate(reversed(self._spare), min))[::-1]

    def allow(self, first: Waiting, prefill_seconds: float) -> bool:
        """Whether all can still be started in time, in this order, once ``first`` was served before them.

        How long ``first`` will write is not known, so it is taken to write as long as anybody did of late,
        as far as there is time for it.
        """
        longer = min(self._overrun, first.spread_seconds)
        delay = self._capacity.seconds(prefill_seconds, first.decode_seconds + longer)
        if delay <= self._least:
            return True
        place = self._place[first.order]
        if place and delay > self._spare_up_to[place - 1]:
            return False
        if place + 1 == len(self._dues):
            return True
        # Those behind it do not wait for its turn any more.
        turn = self._capacity.seconds(first.prefill_seconds, first.decode_seconds)
        return delay - turn <= self._spare_from[place + 1]

    def force(self, price: Price, *, overdue: bool) -> Waiting | None:
        """The soonest (of those whose moment has come, if ``overdue``) for which a slot is idle."""
        for moment, _, item in self._dues:
            if overdue and moment > self._now:
                return None
            item.choice = price(item, False)
            if item.choice is not None:
                return item
        return None

    def next(self) -> float | None:
        """The soonest moment that is still to come."""
        return next((moment for moment, _, _ in self._dues if moment > self._now), None)


def pick(
    waiting: Sequence[Waiting],
    settings: CoreSettings,
    now: float,
    *,
    capacity: Capacity,
    served: dict[str, float],
    overrun: Overrun,
    idle: Callable[[Waiting], bool],
    price: Price,
    linger: Callable[[Waiting, Choice], float],
) -> Pick:
    """The request that starts next among those that can.

    ``capacity``: what the pool does at once. ``served``: seconds of service that each client has had.
    ``overrun(most)``: by how many seconds an answer may take longer than expected, as far as that is
    no more than ``most``. ``idle(item)``: whether its best slot is. ``price(item, patient)``: the placement
    of a request now, ``None`` if no slot is idle for it.
    ``linger(item, choice)``: seconds for which the chosen slot should still be kept for its conversation.
    """
    if settings.queue == "fifo":
        return _in_order(waiting, price)
    deadlines = Deadlines(waiting, settings, now, capacity, overrun)
    wakes: list[float] = []
    for item, choice in _by_price(_eligible(waiting, served), idle, price):
        if not deadlines.allow(item, choice.prefill_seconds):
            forced = deadlines.force(price, overdue=False)
            return Pick(start=forced) if forced is not None else Pick(start=item)
        wait = linger(item, choice)
        if wait <= 0:
            return Pick(start=item)
        wakes.append(now + wait)
    forced = deadlines.force(price, overdue=True)
    if forced is not None:
        return Pick(start=forced)
    soonest = deadlines.next()
    return Pick(wake=min(wakes if soonest is None else [*wakes, soonest], default=None))


def _in_order(waiting: Sequence[Waiting], price: Price) -> Pick:
    for item in sorted(waiting, key=lambda w: w.order):
        item.choice = price(item, False)
        if item.choice is not None:
            return Pick(start=item)
    return Pick()


def _by_price(waiting: Sequence[Waiting], idle: Callable[[Waiting], bool], price: Price) -> list[_Priced]:
    """Those that can start now, cheapest first.

    Only the first few by a lower bound of their price are priced in full; more if none of those can start, up
    to a limit. Those whose best slot is busy, and who may do best to wait, come last.
    """
    ready: list[Waiting] = []
    later: list[Waiting] = []
    for item in waiting:
        (ready if idle(item) else later).append(item)
    ranked = heapq.nsmallest(_MOST_PRICED, ready, key=_first_rank)
    ranked += heapq.nsmallest(_MOST_PRICED - len(ranked), later, key=_first_rank)
    for at in range(0, len(ranked), _SHORTLIST):
        able: list[_Priced] = []
        for item in ranked[at : at + _SHORTLIST]:
            item.choice = price(item, True)
            if item.choice is not None and not item.choice.hold:
                able.append((item, item.choice))
        if able:
            return sorted(able, key=lambda pair: rank(pair[0], waste(pair[1].cost, pair[0].full_seconds)))
    return []


def rank(item: Waiting, wasted: float) -> tuple[bool, float, int]:
    """The order of two requests, lower first: by priority, then ``wasted``, then the youngest first."""
    return item.request.priority is not Priority.INTERACTIVE, wasted, -item.order


def _eligible(waiting: Sequence[Waiting], served: dict[str, float]) -> list[Waiting]:
    """Those whose client is not far ahead of the least served client that waits."""
    if len({w.request.client for w in waiting}) < 2:  # noqa: PLR2004  nobody to be fair to
        return list(waiting)
    least = min(served.get(w.request.client, 0.0) for w in waiting)
    return [w for w in waiting if served.get(w.request.client, 0.0) - least <= _FAIR_SECONDS]


def in_flight_limit(policy: InFlight, slots: int) -> int:
    """The most requests that may ever run at once on a backend of ``slots`` slots."""
    if policy == "serialize":
        return 1
    return min(slots, 2) if policy == "pair" else slots


def best_level(
    most: int, decode_seconds: float, reload_seconds: float, gain: Callable[[float], float]
) -> int:
    """How many of ``most`` requests should run at once where more are waiting than there are slots.

    Each further one shares the decoding steps of the others, but also takes a slot away from those that can
    be chosen from, so that more of what is warm is overwritten. The best level has the least time for each
    request: its share of the decoding, plus the prefill that is lost. ``decode_seconds``: of one answer
    alone; ``reload_seconds``: of a whole prompt; ``gain(k)``: tokens per second of ``k`` at once, one = 1.
    """

    def seconds(level: int) -> float:
        crowding = (level - 1) / (most - 1) if most > 1 else 0.0
        return decode_seconds / gain(level) + reload_seconds * _CROWDED_OUT * crowding * crowding

    return min(range(1, most + 1), key=seconds)
