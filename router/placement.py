"""Which slot serves a prompt, and what that costs in seconds. Pure.

The caller gives the facts of every slot in question; nothing here knows how they were found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .values import Candidate, Decision, SlotRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .rates import Rates

SAME_CONVERSATION = 0.5
"""A match that covers this share of the prompt or of the resident makes them one conversation."""


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """What placement may know of one slot. Lengths are tokens, times are seconds."""

    ref: SlotRef
    idle: bool
    """Known idle, and its backend may take one more request now."""
    resident_tokens: int
    match_tokens: int
    """Of the prompt, how many tokens the slot would reuse."""
    kept_tokens: int
    """Of the resident, how many tokens from the start are also resident elsewhere or match the prompt:
    overwriting the slot does not lose them."""
    return_chance: float
    """How likely the conversation in the slot is to be asked for again."""
    last_used: float
    rates: Rates
    wait_seconds: float = 0.0
    """Expected time until the slot is idle, if it is not."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The slot that a request should take now (or wait for), with the price of every candidate."""

    slot: SlotRef
    decision: Decision
    match_tokens: int
    prefill_seconds: float
    candidates: tuple[Candidate, ...]


def price(facts: SlotFacts, prompt_tokens: int) -> Candidate:
    """What serving a prompt of ``prompt_tokens`` on one slot costs, in seconds."""
    return Candidate(
        slot=facts.ref,
        idle=facts.idle,
        match_tokens=facts.match_tokens,
        prefill_seconds=facts.rates.prefill_seconds(facts.match_tokens, prompt_tokens),
        loss_seconds=facts.return_chance
        * facts.rates.prefill_seconds(facts.kept_tokens, facts.resident_tokens),
        wait_seconds=0.0 if facts.idle else facts.wait_seconds,
    )


def choose(slots: Sequence[SlotFacts], prompt_tokens: int) -> Choice | None:
    """The best slot among those that are idle, or ``None`` when none is.

    The longest match is taken where it is the same conversation; otherwise an empty slot, then the least
    recently used one.
    """
    idle = [facts for facts in slots if facts.idle]
    if not idle:
        return None
    longest = max(idle, key=lambda facts: (facts.match_tokens, facts.last_used))
    overlap = SAME_CONVERSATION * min(prompt_tokens, max(longest.resident_tokens, 1))
    best_anywhere = max(facts.match_tokens for facts in slots)
    if longest.match_tokens and longest.match_tokens >= overlap:
        chosen, decision = longest, Decision.AFFINITY
    else:
        chosen = min(idle, key=lambda facts: (facts.resident_tokens > 0, facts.last_used))
        decision = Decision.SPILL if best_anywhere > chosen.match_tokens else Decision.FRESH
    return Choice(
        slot=chosen.ref,
        decision=decision,
        match_tokens=chosen.match_tokens,
        prefill_seconds=chosen.rates.prefill_seconds(chosen.match_tokens, prompt_tokens),
        candidates=tuple(price(facts, prompt_tokens) for facts in slots),
    )
