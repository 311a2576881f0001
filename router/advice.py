"""How many slots to advise live, from reuse alone: a gauge has no load that could be replayed. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

LEAST_REQUESTS: Final = 30
"""Finished requests below which there is no advice."""

_WITHIN: Final = 0.01


def slots_for(reused: Mapping[int, int]) -> int:
    """The fewest slots whose reuse is within 1 % of what the most slots reach.

    ``reused``: tokens that were (or would have been) reused, by slot count. 0 where nothing is known.
    """
    if not reused:
        return 0
    enough = reused[max(reused)] * (1 - _WITHIN)
    return min(count for count, tokens in reused.items() if tokens >= enough)


def per_backend(requests: int, reused: Mapping[int, int], backends: int) -> int:
    """Slots of each of a pool's ``backends``, given what the pool as a whole would have reused."""
    if requests < LEAST_REQUESTS or backends < 1:
        return 0
    return -(-slots_for(reused) // backends)
