"""Which slot serves a prompt, and what that costs in seconds. Pure.

Each slot is priced: the prefill of what it does not hold, plus what overwriting it destroys, plus the wait
until it is idle. Where the engine keeps contexts in host memory as well, what it would load from there need
not be computed and what it saves there is not destroyed; what copying costs is paid instead. Destroyed is

* for a request that waits now and would have run on that slot: the extra prefill that it will need, exactly;
* otherwise the part of the content that only this slot holds, times the chance that it is asked for again.
  Where that belongs to another conversation the two would go on displacing each other, so it is weighed by
  the turns that are expected to follow. That is what puts two agents with one preamble on two slots.

The caller gives the facts of every slot in question; nothing here knows how they were found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .host_tier import NO_SWAP, Swap
from .values import Candidate, Decision, SlotRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .rates import Rates


_LIVE, _OVER = 0.5, 0.1
"""Chances of a return above which a conversation counts as going on, and below which as over."""


class Demand(NamedTuple):
    """A waiting request whose best match is a certain slot. Counts are tokens."""

    request: str
    match_tokens: int
    """What it would reuse on that slot."""
    elsewhere_tokens: int
    """What it would reuse on the next best slot."""


@dataclass(slots=True)
class SlotFacts:
    """What placement may know of one slot, whoever asks. Counts are tokens, times are seconds."""

    ref: SlotRef
    session: str
    """The conversation whose content it holds."""
    asked_tokens: int
    """How far the content is a prompt that somebody sent, as opposed to the answer that followed it."""
    shared_tokens: int
    """Of the content, how many tokens from the start are also resident in another slot."""
    return_chance: float
    """How likely its conversation is to be asked for again."""
    last_used: float
    rates: Rates
    goes_on: float = 0.0
    """Of a busy slot: how likely its conversation is to be asked for again after what runs there."""
    demands: Sequence[Demand] = ()
    restore_seconds: float = math.inf
    """To load what it holds from the engine's host memory again, if it was saved there."""
    busy_seconds: float = 0.0
    """Expected time until the slot is idle; of an idle one, what a request loses by others that run there."""


class Offer(NamedTuple):
    """A slot that a request could take (``idle``) or wait for, and the tokens that it would reuse there."""

    slot: SlotFacts
    match_tokens: int
    idle: bool
    swap: Swap = NO_SWAP
    """What the engine would copy from and to its host memory for it, and ``copy_seconds``: for how long."""
    copy_seconds: float = 0.0


class Ask(NamedTuple):
    """What placement may know of the request. Counts are tokens."""

    request: str
    session: str
    prompt_tokens: int
    rollback_chance: float
    """How often what a conversation went back from is asked for again."""
    turns: float
    """How many more turns a conversation that goes on has."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The slot that a request should take, with the price of every candidate.

    ``hold``: the best slot is busy, and waiting for it costs less than any idle one.
    """

    slot: SlotRef
    decision: Decision
    match_tokens: int
    prefill_seconds: float
    cost: float
    """What it takes away from others: prefill and loss, without the wait."""
    candidates: tuple[Candidate, ...]
    hold: bool = False
    tail_seconds: float = 0.0
    """What the conversation that was in the chosen slot would have to compute again, should it come back."""


def _kept(slot: SlotFacts, match_tokens: int) -> int:
    """Tokens of a content that overwriting does not lose.

    The last token of a prompt is always computed: one that is sent again matches all but that, and keeps all.
    """
    return max(match_tokens + 1, slot.shared_tokens)


def tail_seconds(slot: SlotFacts, match_tokens: int, *, saved: bool = False) -> float:
    """Seconds to have again what only this slot holds and the prompt would overwrite.

    ``saved``: the engine keeps it in host memory, so that it need not be computed.
    """
    kept = _kept(slot, match_tokens)
    seconds = slot.rates.prefill_seconds(kept, slot.asked_tokens) if slot.asked_tokens > kept else 0.0
    return min(seconds, slot.restore_seconds) if saved else seconds


def loss_seconds(slot: SlotFacts, match_tokens: int, ask: Ask, *, saved: bool = False) -> float:
    """What overwriting the slot beyond the match destroys, in expected seconds. ``saved``: as above."""
    demanded = 0.0
    for demand in slot.demands:
        left = max(demand.elsewhere_tokens, match_tokens)
        if demand.match_tokens > left and demand.request != ask.request:
            demanded = max(demanded, slot.rates.prefill_seconds(left, demand.match_tokens))
    if saved:
        demanded = min(demanded, slot.restore_seconds)
    own = slot.session == ask.session
    weight = ask.rollback_chance if own else slot.return_chance * ask.turns
    tail = tail_seconds(slot, match_tokens, saved=saved) * weight if weight else 0.0
    return max(demanded, tail)


def price(offer: Offer, ask: Ask) -> Candidate:
    """What serving a request on one slot costs, in seconds."""
    slot, match, idle, swap, copying = offer
    reused = max(match, min(swap.kept, max(0, ask.prompt_tokens - 1)))
    return Candidate(
        slot=slot.ref,
        idle=idle,
        match_tokens=match,
        prefill_seconds=slot.rates.prefill_seconds(reused, ask.prompt_tokens) + copying,
        loss_seconds=loss_seconds(slot, match, ask, saved=swap.saves),
        wait_seconds=slot.busy_seconds,
    )


def _is_free(slot: SlotFacts) -> bool:
    """Whether hardly anything is lost with what the slot holds."""
    return slot.asked_tokens == 0 or slot.return_chance < _OVER


def _displaces(offer: Offer, ask: Ask) -> bool:
    """Whether a request would overwrite what another conversation will ask for again.

    For the sake of a common preamble that may look cheap, again and again; two conversations belong on two
    slots as long as there are slots that nobody needs. Nor is a busy slot worth waiting for that would be
    refused as soon as it is idle.
    """
    slot = offer.slot
    lasting = slot.asked_tokens > _kept(slot, offer.match_tokens)
    return slot.session != ask.session and lasting and max(slot.return_chance, slot.goes_on) >= _LIVE


def choose(offers: Sequence[Offer], ask: Ask, *, patient: bool) -> Choice | None:
    """The cheapest slot for a prompt, or ``None`` when no slot is idle.

    ``patient``: a busy slot may be worth waiting for. Ties go to the slot that was left longest ago.
    """
    priced = [(price(offer, ask), offer) for offer in offers if offer.idle or patient]
    open_to = [pair for pair in priced if pair[1].idle]
    if not open_to:
        return None
    unneeded = any(_is_free(pair[1].slot) for pair in open_to)
    if unneeded:
        open_to = [pair for pair in open_to if not _displaces(pair[1], ask)] or open_to
    best, taken = min(open_to, key=lambda pair: (pair[0].cost, pair[1].slot.last_used))
    hold = False
    if patient:
        busy = [pair for pair in priced if not pair[1].idle and pair[0].match_tokens > best.match_tokens]
        if unneeded:
            busy = [pair for pair in busy if not _displaces(pair[1], ask)]
        if busy:
            later, later_taken = min(busy, key=lambda pair: pair[0].cost)
            if later.cost < best.cost:
                best, taken, hold = later, later_taken, True
    most = max(offer.match_tokens for offer in offers)
    if hold:
        decision = Decision.WAIT
    elif best.match_tokens < most:
        decision = Decision.SPILL
    else:
        decision = Decision.AFFINITY if best.match_tokens else Decision.FRESH
    return Choice(
        slot=best.slot,
        decision=decision,
        match_tokens=best.match_tokens,
        prefill_seconds=best.prefill_seconds,
        cost=best.prefill_seconds + best.loss_seconds,
        candidates=tuple(candidate for candidate, _ in priced),
        hold=hold,
        tail_seconds=tail_seconds(taken.slot, best.match_tokens, saved=taken.swap.saves),
    )
