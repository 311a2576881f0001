"""How fast a backend is, learned while it serves: prefill by position, decoding by how many share a step.

Pure. Prefill slows down with position because each token attends to all before it, so the unit is the
marginal rate of a 4k block; a request's prefill is the sum over the blocks that it really computes.

Where each slot has a key-value cache of its own (``--no-kv-unified``), llama-server computes in one pass only
slots whose numbers follow one another: answers on the slots 0, 1, 2 take one pass over the weights a step,
those on 0, 2, 4 take three. So a step has two sizes: how many answers, and how many passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCK_TOKENS = 4096
"""Width of one position block of the prefill curve, in tokens."""

PREFILL_PRIOR = 1 / 500
"""Seconds per token assumed until the first prefill was seen."""

DECODE_PRIOR = 1 / 24
"""Seconds per output token of one request that decodes alone, until one was seen."""

_SHARING_PRIOR = 0.2
"""By how much of itself each further request is taken to lengthen a decoding step until it was measured."""

_PRIOR_TOKENS = 500.0
"""Output tokens that the prior slope counts for."""

_MOST_AT_ONCE = 4.0
"""One observation counts as at most this many times slower or faster than expected: a machine that slept, a
clock that jumped or a cache that was asked for help must not spoil what is known."""

_SHORT = 128
"""Prefills of fewer tokens tell what a prefill costs at least, not what a token costs."""
_FIXED_PULL, _FIXED_STEP = 0.1, 0.05

_COPY_PRIOR = 0.5
"""What moving a token to host memory or back is taken to cost until it was seen, in prefills of one token."""
_COPY_MEMORY = 100_000
_COPY_PULL = 0.1
_UNSURE = 0.8, 1.25
"""Copying there and back, as a share of computing, between which what was said of it last stands."""

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


def passes_of(slots: Iterable[int]) -> int:
    """Into how many passes an engine without a unified cache divides a step of the answers on these slots."""
    taken = set(slots)
    return sum(slot - 1 not in taken for slot in taken)


def usual_passes(busy: float, slots: int) -> float:
    """Passes of a step of ``busy`` answers that lie anywhere among ``slots`` slots, on average."""
    return max(1.0, busy * (slots - busy + 1) / slots)


class _Line(NamedTuple):
    """Seconds of a step: ``alone + more * (busy - 1) + split * (passes - 1)``."""

    alone: float
    more: float
    split: float


_UNSEEN = _Line(DECODE_PRIOR, DECODE_PRIOR * _SHARING_PRIOR, 0.0)


@dataclass(slots=True)
class _Steps:
    """The time of a decoding step, by weighted least squares that forget.

    Reading the weights is the same for all answers of a pass, the rest grows with each: so a line in both,
    which also says what a level not seen yet would do. Until two levels were seen, the slope over the answers
    is the usual one; passes are taken to cost nothing until they were seen to.
    """

    weight: float = 0.0
    level: float = 0.0
    parts: float = 0.0
    seconds: float = 0.0
    level_level: float = 0.0
    level_parts: float = 0.0
    parts_parts: float = 0.0
    level_seconds: float = 0.0
    parts_seconds: float = 0.0
    line: _Line = _UNSEEN
    """Through all that was added."""

    def add(self, busy: float, passes: float, seconds: float, tokens: float) -> None:
        keep = max(0.0, 1.0 - tokens / _MEMORY)
        level, parts = busy - 1.0, passes - 1.0
        self.weight = self.weight * keep + tokens
        self.level = self.level * keep + tokens * level
        self.parts = self.parts * keep + tokens * parts
        self.seconds = self.seconds * keep + tokens * seconds
        self.level_level = self.level_level * keep + tokens * level * level
        self.level_parts = self.level_parts * keep + tokens * level * parts
        self.parts_parts = self.parts_parts * keep + tokens * parts * parts
        self.level_seconds = self.level_seconds * keep + tokens * level * seconds
        self.parts_seconds = self.parts_seconds * keep + tokens * parts * seconds
        self.line = self._fitted()

    def at(self, busy: float, passes: float) -> float:
        line = self.line
        return line.alone + line.more * (busy - 1.0) + line.split * (passes - 1.0)

    def _fitted(self) -> _Line:
        level, parts = self.level / self.weight, self.parts / self.weight
        seconds = self.seconds / self.weight
        # The priors stand for a few observations one level apart, so that one odd answer moves little.
        held = _PRIOR_TOKENS / (self.weight + _PRIOR_TOKENS)
        usual = _SHARING_PRIOR * seconds / (1.0 + _SHARING_PRIOR * level)
        wide = self.level_level / self.weight - level * level + held
        deep = self.parts_parts / self.weight - parts * parts + held
        both = self.level_parts / self.weight - level * parts
        by_level = self.level_seconds / self.weight - level * seconds + held * usual
        by_parts = self.parts_seconds / self.weight - parts * seconds
        # Neither an answer nor a pass more costs more than a step alone.
        split = (by_parts * wide - by_level * both) / (wide * deep - both * both)
        split = min(max(split, 0.0), seconds / (1.0 + parts))
        most = (seconds - split * parts) / (1.0 + level)
        more = min(max((by_level - both * split) / wide, 0.0), most)
        return _Line(seconds - more * level - split * parts, more, split)


@dataclass(slots=True)
class Rates:
    """One backend's speed. All rates are seconds per token."""

    _blocks: dict[int, _Mean] = field(default_factory=dict)
    _steps: _Steps = field(default_factory=_Steps)
    _fixed: float = 0.0
    """Seconds that a prefill takes however short it is."""
    _copies: _Mean = field(default_factory=_Mean)
    _before: float = 0.0
    """Seconds from a grant to the first token beside the prefill, where nothing is copied."""
    copies_pay: bool | None = None
    """Whether saving and loading a context takes less time than computing it; None: not seen yet."""
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
        """Seconds to compute the prompt tokens ``[start, end)``; neither is negative."""
        if end <= start:
            return 0.0
        curve, first, last = self._curve, start // BLOCK_TOKENS, end // BLOCK_TOKENS
        while len(curve) <= last:
            before = curve[-1][0] + BLOCK_TOKENS * curve[-1][1] if curve else 0.0
            curve.append((before, self.prefill_rate(len(curve))))
        seconds, rate = curve[last]
        skipped, first_rate = curve[first]
        return seconds + end % BLOCK_TOKENS * rate - skipped - start % BLOCK_TOKENS * first_rate

    @property
    def copy_rate(self) -> float:
        """Seconds per token to move a context to host memory or back."""
        seen = self._copies.rate
        return seen if seen is not None else _COPY_PRIOR * self.prefill_rate(0)

    def copy_seconds(self, tokens: int) -> float:
        """Seconds to move a context of ``tokens`` to host memory or back."""
        return tokens * self.copy_rate

    def loaded_seconds(self, tokens: int, kept: int, end: int) -> float:
        """Seconds to load a context of ``tokens`` and to compute ``[kept, end)``, the last token at least."""
        return self.copy_seconds(tokens) + self.prefill_seconds(min(kept, end - 1), end)

    def saw_copy(self, moved: int, seconds: float) -> None:
        """Between its grant and its first token a request took ``seconds`` beside its prefill.

        ``moved`` tokens were copied in that time; with none of them, it is what every request takes.
        """
        if moved > 0:
            self._copies.add(max(0.0, seconds - self._before), moved, _COPY_MEMORY)
            share = 2 * self.copy_rate / self.prefill_rate(0)
            if self.copies_pay is None or not _UNSURE[0] <= share <= _UNSURE[1]:
                self.copies_pay = share < 1.0
        else:
            self._before += (max(0.0, seconds) - self._before) * (_COPY_PULL if self._before else 1.0)

    def step_seconds(self, busy: float, passes: float = 1) -> float:
        """Seconds that one decoding step takes, a token for each of ``busy`` requests, in so many passes."""
        return self._steps.at(max(1.0, busy), max(1.0, passes))

    @property
    def pass_seconds(self) -> float:
        """Seconds that each further pass of a step costs; 0 where all answers share one."""
        return self._steps.line.split

    def gain(self, busy: float, passes: float = 1) -> float:
        """Tokens per second with ``busy`` requests decoding, in units of what one has alone."""
        return max(1.0, busy) * self.step_seconds(1) / self.step_seconds(busy, passes)

    def decode_seconds(self, tokens: float, busy: float = 1, passes: float = 1) -> float:
        """Seconds to generate ``tokens`` for each of ``busy`` requests that decode at once."""
        return tokens * self.step_seconds(busy, passes)

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        """A request computed prompt tokens ``[start, end)`` in ``seconds``.

        What a prefill costs however short it is, short ones tell; long ones are not charged with it.
        """
        tokens = end - start
        if tokens <= 0 or seconds <= 0:
            return
        if tokens < _SHORT and self._blocks:
            extra = max(0.0, seconds - self.prefill_seconds(start, end))
            self._fixed += (min(extra, _MOST_AT_ONCE * self._fixed + _FIXED_STEP) - self._fixed) * _FIXED_PULL
            return
        seconds = max(seconds - self._fixed, seconds / 2)
        ratio = seconds / self.prefill_seconds(start, end)
        if self._blocks:
            ratio = min(max(ratio, 1 / _MOST_AT_ONCE), _MOST_AT_ONCE)
        while start < end:
            block = start // BLOCK_TOKENS
            stop = min(end, (block + 1) * BLOCK_TOKENS)
            share = (stop - start) * self.prefill_rate(block) * ratio
            self._blocks.setdefault(block, _Mean()).add(share, stop - start, _MEMORY)
            start = stop
        self._curve.clear()

    def saw_decode(self, tokens: int, seconds: float, busy: float = 1, passes: float = 1) -> None:
        """A request generated ``tokens`` in ``seconds``.

        ``busy`` requests decoded meanwhile, in ``passes`` passes a step, on average. Time in which it stood
        still for the prefill of others does not belong to ``seconds``.
        """
        if tokens <= 0 or seconds <= 0:
            return
        busy, passes, step = max(1.0, busy), max(1.0, passes), seconds / tokens
        if self._steps.weight > 0:
            expected = self.step_seconds(busy, passes)
            step = min(max(step, expected / _MOST_AT_ONCE), expected * _MOST_AT_ONCE)
        self._steps.add(busy, passes, step, tokens)
