"""Which slot serves a prompt, and what that costs in seconds. Pure.

Each slot is priced: the prefill of what it does not hold, plus what overwriting it destroys, plus the wait
until it is idle. What is destroyed is

* for a request that waits now and would have run on that slot: the extra prefill that it will need, exactly;
* otherwise the part of the content that only this slot holds, times the chance that it is asked for again.
  Where that belongs to another conversation the two would go on displacing each other, so it is weighed by
  the turns that are expected to follow. That is what puts two agents with one preamble on two slots.

The caller gives the facts of every slot in question; nothing here knows how they were found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .values import Candidate, Decision, SlotRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .rates import Rates


@dataclass(frozen=True, slots=True)
class Demand:
    """A waiting request whose best match is a certain slot. Counts are tokens."""

    request: str
    match_tokens: int
    """What it would reuse on that slot."""
    elsewhere_tokens: int
    """What it would reuse on the next best slot."""


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """What placement may know of one slot and one prompt. Counts are tokens, times are seconds."""

    ref: SlotRef
    idle: bool
    """Known idle, and its backend may take one more request now."""
    match_tokens: int
    """Of the prompt, how many tokens the slot would reuse."""
    asked_tokens: int
    """How far the content is a prompt that somebody sent, as opposed to the answer that followed it."""
    shared_tokens: int
    """Of the content, how many tokens from the start are also resident in another slot."""
    return_chance: float
    """How likely the part that would be overwritten is to be asked for again."""
    recurring: float
    """How many times over that would happen (1 = once)."""
    last_used: float
    rates: Rates
    demands: Sequence[Demand] = ()
    wait_seconds: float = 0.0
    """Expected time until the slot is idle, if it is not."""


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
    candidates: tuple[Candidate, ...]
    hold: bool = False
    tail_seconds: float = 0.0
    """What the conversation that was in the chosen slot would have to compute again, should it come back."""


def tail_seconds(facts: SlotFacts) -> float:
    """Seconds to compute again what only this slot holds and the prompt would overwrite."""
    kept = max(facts.match_tokens, facts.shared_tokens)
    return facts.rates.prefill_seconds(kept, facts.asked_tokens) if facts.asked_tokens > kept else 0.0


def price(facts: SlotFacts, prompt_tokens: int, request: str) -> Candidate:
    """What serving a prompt of ``prompt_tokens`` on one slot costs, in seconds."""
    demanded = 0.0
    for demand in facts.demands:
        left = max(demand.elsewhere_tokens, facts.match_tokens)
        if demand.request != request and demand.match_tokens > left:
            demanded = max(demanded, facts.rates.prefill_seconds(left, demand.match_tokens))
    tail = tail_seconds(facts) * facts.return_chance * facts.recurring if facts.return_chance else 0.0
    return Candidate(
        slot=facts.ref,
        idle=facts.idle,
        match_tokens=facts.match_tokens,
        prefill_seconds=facts.rates.prefill_seconds(facts.match_tokens, prompt_tokens),
        loss_seconds=max(demanded, tail),
        wait_seconds=0.0 if facts.idle else facts.wait_seconds,
    )


def choose(slots: Sequence[SlotFacts], prompt_tokens: int, request: str, *, patient: bool) -> Choice | None:
    """The cheapest slot for a prompt, or ``None`` when no slot is idle.

    ``patient``: a busy slot may be worth waiting for. Ties go to the slot that was left longest ago.
    """
    if not slots:
        return None
    priced = [(price(facts, prompt_tokens, request), facts) for facts in slots]
    open_to = [pair for pair in priced if pair[1].idle]
    if not open_to:
        return None
    best, facts = min(open_to, key=lambda pair: (pair[0].cost, pair[1].last_used))
    hold = False
    if patient:
        busy = [pair for pair in priced if not pair[1].idle and pair[0].match_tokens > best.match_tokens]
        if busy:
            later, later_facts = min(busy, key=lambda pair: pair[0].cost)
            if later.cost < best.cost:
                best, facts, hold = later, later_facts, True
    most = max(candidate.match_tokens for candidate, _ in priced)
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
        cost=best.cost,
        candidates=tuple(candidate for candidate, _ in priced),
        hold=hold,
        tail_seconds=tail_seconds(facts),
    )
