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

_LIVE = 0.5
"""A conversation that is likelier than this to return is not overwritten for the sake of a shared preamble
while an empty slot is there."""


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
    same_session: bool
    """The slot holds the conversation that the prompt continues."""
    wanted: bool
    """Another request that waits continues the conversation in the slot."""
    held: bool
    """The slot's own conversation is expected back within moments; nobody else should take it now."""
    return_chance: float
    """How likely the conversation in the slot is to be asked for again; 1 where ``wanted``."""
    last_used: float
    rates: Rates
    wait_seconds: float = 0.0
    """Expected time until the slot is idle, if it is not."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The slot that a request should take now, with the price of every candidate."""

    slot: SlotRef
    decision: Decision
    match_tokens: int
    prefill_seconds: float
    loss_seconds: float
    candidates: tuple[Candidate, ...]


def price(facts: SlotFacts, prompt_tokens: int) -> Candidate:
    """What serving a prompt of ``prompt_tokens`` on one slot costs, in seconds."""
    loss = 0.0
    if not facts.same_session and facts.resident_tokens > facts.kept_tokens:
        loss = facts.return_chance * facts.rates.prefill_seconds(facts.kept_tokens, facts.resident_tokens)
    return Candidate(
        slot=facts.ref,
        idle=facts.idle,
        match_tokens=facts.match_tokens,
        prefill_seconds=facts.rates.prefill_seconds(facts.match_tokens, prompt_tokens),
        loss_seconds=loss,
        wait_seconds=0.0 if facts.idle else facts.wait_seconds,
    )


def choose(slots: Sequence[SlotFacts], prompt_tokens: int) -> Choice | None:
    """The cheapest slot among those that may be taken, or ``None`` when there is none.

    Costs being equal, an empty slot goes before a used one, and that before one used more recently.
    """
    candidates = [price(facts, prompt_tokens) for facts in slots]
    open_to_it = [
        (candidate, facts)
        for candidate, facts in zip(candidates, slots, strict=True)
        if facts.idle and (facts.same_session or not facts.held)
    ]
    if not open_to_it:
        return None
    if any(facts.resident_tokens == 0 for _, facts in open_to_it):
        open_to_it = [
            (candidate, facts)
            for candidate, facts in open_to_it
            if facts.same_session or facts.resident_tokens == 0 or facts.return_chance < _LIVE
        ]
    best, facts = min(
        open_to_it, key=lambda pair: (pair[0].cost, pair[1].resident_tokens > 0, pair[1].last_used)
    )
    longest = max(candidate.match_tokens for candidate in candidates)
    if best.match_tokens and (facts.same_session or best.match_tokens == longest):
        decision = Decision.AFFINITY
    else:
        decision = Decision.SPILL if longest else Decision.FRESH
    return Choice(
        slot=best.slot,
        decision=decision,
        match_tokens=best.match_tokens,
        prefill_seconds=best.prefill_seconds,
        loss_seconds=best.loss_seconds,
        candidates=tuple(candidates),
    )
