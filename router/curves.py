"""Sums over time and position that no single request tells: demand, decode sharing, prefill rates. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

POSITION_BLOCKS = (4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
"""Upper bounds, in tokens, of the parts of a prompt that prefill rates are told apart by."""

MOST_LEVELS = 32
"""Levels of demand and of decode sharing that are told apart; above it is ``more``."""


def block_name(bound: int) -> str:
    """The label of a block: ``4k`` for positions below 4096."""
    return f"{bound // 1024}k" if bound < 1024 * 1024 else f"{bound // (1024 * 1024)}M"


BLOCK_NAMES = tuple(block_name(bound) for bound in POSITION_BLOCKS)

LEVEL_NAMES = (*(str(level) for level in range(MOST_LEVELS + 1)), "more")


def level_name(level: int) -> str:
    """The label of a level."""
    return LEVEL_NAMES[min(level, MOST_LEVELS + 1)]


def blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """How many of the positions ``[begin, end)`` lie in each block: pairs of block index and tokens.

    Positions beyond the last bound count in the last block.
    """
    low = 0
    last = len(POSITION_BLOCKS) - 1
    for index, high in enumerate(POSITION_BLOCKS):
        top = end if index == last else min(end, high)
        tokens = top - max(begin, low)
        if tokens > 0:
            yield index, tokens
        low = high


class PrefillCurve:
    """What a token costs at its position, learned from finished prefills of one backend."""

    def __init__(self) -> None:
        self._tokens = [0.0] * len(POSITION_BLOCKS)
        self._seconds = [0.0] * len(POSITION_BLOCKS)

    def learn(self, begin: int, end: int, seconds: float) -> list[tuple[int, int, float]]:
        """Positions ``[begin, end)`` took ``seconds``: block index, tokens and seconds of each block.

        Within one prefill the seconds are shared out by what tokens of each block have cost so far.
        """
        parts = list(blocks(begin, end))
        weights = [tokens * (self._rate(index) or 1.0) for index, tokens in parts]
        whole = sum(weights)
        out = []
        for (index, tokens), weight in zip(parts, weights, strict=True):
            share = seconds * weight / whole
            self._tokens[index] += tokens
            self._seconds[index] += share
            out.append((index, tokens, share))
        return out

    def cost(self, begin: int, end: int) -> float:
        """Seconds that a prefill of positions ``[begin, end)`` would take; 0 while nothing is known."""
        return sum(tokens * (self._rate(index) or 0.0) for index, tokens in blocks(begin, end))

    def _rate(self, index: int) -> float | None:
        """Seconds per token in a block, or in the nearest one that is known."""
        known = [i for i, tokens in enumerate(self._tokens) if tokens > 0]
        if not known:
            return None
        nearest = min(known, key=lambda i: (abs(i - index), i))
        return self._seconds[nearest] / self._tokens[nearest]


class DemandClock:
    """How long each number of concurrent things lasted."""

    def __init__(self, now: float) -> None:
        self.level = 0
        self._since = now
        self.seconds = [0.0] * len(LEVEL_NAMES)

    def change(self, by: int, now: float) -> None:
        """The level goes up or down by ``by``."""
        self.settle(now)
        self.level += by

    def settle(self, now: float) -> None:
        """Count the time up to ``now``."""
        self.seconds[min(self.level, MOST_LEVELS + 1)] += max(0.0, now - self._since)
        self._since = now


class DecodeLevels:
    """How many tokens were decoded, and for how long, while how many requests of one backend decoded.

    A request's tokens are shared out over the levels by the time that it spent at each.
    """

    def __init__(self, now: float) -> None:
        self._clock = DemandClock(now)
        self._began: dict[str, list[float]] = {}
        self.tokens = [0.0] * len(LEVEL_NAMES)

    @property
    def seconds(self) -> list[float]:
        """Seconds at each level, up to the last change or :meth:`settle`."""
        return self._clock.seconds

    def begin(self, request_id: str, now: float) -> None:
        """A request decodes from now on."""
        self._clock.change(1, now)
        self._began[request_id] = list(self._clock.seconds)

    def end(self, request_id: str, tokens: int, now: float) -> None:
        """It has ended with so many tokens; ignored for one that never began."""
        began = self._began.pop(request_id, None)
        if began is None:
            return
        self._clock.change(-1, now)
        spent = [after - before for after, before in zip(self._clock.seconds, began, strict=True)]
        whole = sum(spent)
        for level, seconds in enumerate(spent):
            if whole > 0:
                self.tokens[level] += tokens * seconds / whole

    def settle(self, now: float) -> None:
        """Count the time up to ``now``."""
        self._clock.settle(now)
