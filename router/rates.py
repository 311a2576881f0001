"""How fast a backend is, learned while it serves: prefill by position, decoding by how many share it.

Pure. Prefill slows down with position because each token attends to all before it, so the unit is the
marginal rate of a 4k block; a request's prefill is the sum over the blocks that it really computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BLOCK_TOKENS = 4096
"""Width of one position block of the prefill curve, in tokens."""

PREFILL_PRIOR = 1 / 500
"""Seconds per token assumed until the first prefill was seen."""

DECODE_PRIOR = 1 / 24
"""Seconds per output token of one request that decodes alone, until one was seen."""

_BATCHING_PRIOR = 0.7
"""What a second decoding request is taken to add to the rate of the first until it was measured."""

_MEMORY = 20_000
"""Tokens after which an observation has lost about two thirds of its weight."""


@dataclass(slots=True)
class _Mean:
    """A mean that forgets, weighted by tokens."""

    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: float, memory: float) -> None:
        keep = max(0.0, 1.0 - tokens / memory)
        self.seconds = self.seconds * keep + seconds
        self.tokens = self.tokens * keep + tokens

    @property
    def rate(self) -> float | None:
        return self.seconds / self.tokens if self.tokens > 0 else None


@dataclass(slots=True)
class Rates:
    """One backend's speed. All rates are seconds per token."""

    _blocks: dict[int, _Mean] = field(default_factory=dict)
    _decode: dict[int, _Mean] = field(default_factory=dict)
    _curve: list[tuple[float, float]] = field(default_factory=list)
    """Of each block, as far as asked for since the last lesson: seconds for all before it, and its rate."""

    def prefill_rate(self, block: int) -> float:
        """Marginal seconds per prompt token in a position block."""
        mean = self._blocks.get(block)
        if mean is not None and mean.rate is not None:
            return mean.rate
        known = [(abs(at - block), at) for at, other in self._blocks.items() if other.rate is not None]
        if not known:
            return PREFILL_PRIOR
        return self._blocks[min(known)[1]].rate or PREFILL_PRIOR

    def prefill_seconds(self, start: int, end: int) -> float:
        """Seconds to compute the prompt tokens ``[start, end)``."""
        return self._seconds_to(end) - self._seconds_to(start) if end > start else 0.0

    def _seconds_to(self, position: int) -> float:
        block, rest = divmod(max(0, position), BLOCK_TOKENS)
        curve = self._curve
        while len(curve) <= block:
            before = curve[-1][0] + BLOCK_TOKENS * curve[-1][1] if curve else 0.0
            curve.append((before, self.prefill_rate(len(curve))))
        seconds, rate = curve[block]
        return seconds + rest * rate

    def speedup(self, busy: int) -> float:
        """Tokens per second with ``busy`` requests decoding, against one fewer.

        Where neither was seen, what batching usually gives is assumed, so that it is tried.
        """
        more, fewer = self._decode.get(busy), self._decode.get(busy - 1)
        if busy <= 1 or more is None or fewer is None or not more.rate or not fewer.rate:
            return 1.0 + _BATCHING_PRIOR / max(1, busy - 1)
        return (busy / more.rate) / ((busy - 1) / fewer.rate)

    def decode_seconds(self, tokens: float, busy: int = 1) -> float:
        """Seconds to generate ``tokens`` while ``busy`` requests decode at once."""
        mean = self._decode.get(max(1, busy))
        rate = mean.rate if mean is not None else None
        if rate is None:
            known = [(abs(at - busy), at) for at, other in self._decode.items() if other.rate is not None]
            rate = self._decode[min(known)[1]].rate if known else None
        return tokens * (rate if rate is not None else DECODE_PRIOR)

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        """A request computed prompt tokens ``[start, end)`` in ``seconds``."""
        expected = self.prefill_seconds(start, end)
        if end <= start or seconds <= 0 or expected <= 0:
            return
        ratio = seconds / expected
        while start < end:
            block = start // BLOCK_TOKENS
            stop = min(end, (block + 1) * BLOCK_TOKENS)
            tokens = stop - start
            share = tokens * self.prefill_rate(block) * ratio
            self._blocks.setdefault(block, _Mean()).add(share, tokens, _MEMORY)
            start = stop
        self._curve.clear()

    def saw_decode(self, tokens: int, seconds: float, busy: int = 1) -> None:
        """A request generated ``tokens`` in ``seconds`` while ``busy`` requests decoded."""
        if tokens > 0 and seconds > 0:
            self._decode.setdefault(max(1, busy), _Mean()).add(seconds, tokens, _MEMORY)
