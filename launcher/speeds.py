"""A backend's rates as its journal shows them: prefill by position, decoding by sharers, overhead. Pure.

Where requests overlapped, each one's own timings hold the work of the others too. So prefills that overlap
are taken together, and decode rates from times in which no prompt was computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

from .modelled import Engine, content
from .overlap import Span, Together, prefill_seconds, undisturbed
from .summary import PrefillCurve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmslot.router.records import Record
    from warmslot.router.values import HostMemory

BATCH: Final = 2048
"""Prompt tokens of one engine step (``-b``): the answers that run beside a prefill get a token for each."""

UNSEEN_GAIN: Final = 0.4
"""What each further request adds to the decode rate, of one alone, where sharing was never seen."""

_ROUNDS: Final = 8
"""Of finding the start of prefills and their curve in turn; both settle within a few."""

_SECONDS: Final = 0.5
"""Seconds of decoding at a level from which on its rate counts."""

_MOST: Final = 64

_LEAST_COPIES: Final = 5
"""Contexts that came back from host memory, below which nothing is said of how long that takes."""


@dataclass(slots=True)
class Speeds:
    """Rates of a modelled engine."""

    prefill: PrefillCurve
    decode: dict[int, float]
    """Tokens per second of all together, by how many decode at once; level 1 is always there."""
    overhead: float
    """Seconds of a request that are neither queue nor prefill nor decode."""
    seen: set[int] = field(default_factory=set)
    """Levels whose rate was seen; the others are filled in."""
    batch: int = BATCH
    start: float = 0.0
    """Seconds that any prefill takes, however few its tokens are."""
    copy: float = 0.0
    """Seconds to move a token's context to host memory or back."""
    split: float = 0.0
    """Seconds that each further pass of a step costs; ``decode`` is of steps in one pass."""

    def prefill_seconds(self, start: int, end: int) -> float:
        """Seconds to compute prompt tokens ``[start, end)`` alone."""
        return self.start + self.prefill.seconds(start, end) if end > start else 0.0

    def decode_rate(self, busy: int, passes: int = 1) -> float:
        """Tokens per second of all together, in so many passes a step."""
        busy = max(1, busy)
        rate = self.decode[min(busy, _MOST)]
        return rate / (1 + self.split * (passes - 1) * rate / busy)


def speeds_of(records: Sequence[Record]) -> Speeds | None:
    """The rates in a journal; ``None`` where it has no timings at all."""
    prefills = _prefills(
        [one for one in records if one.cached_tokens is not None and one.prefill_seconds > 0]
    )
    rates, seen, split = _decode(records)
    if not prefills or not rates:
        return None
    start, curve = _start_and_curve(prefills)
    return Speeds(curve, rates, _overhead(records), seen, start=start, split=split)


def copy_of(records: Sequence[Record], slots: int, host: HostMemory) -> float | None:
    """Seconds to move a token's context to host memory or back; ``None`` where too few were seen to be moved.

    What was moved is told by the rules of the engine's cache; how long that took, by what a request that got
    something from there took beside queue, prefill and decode, and others did not.
    """
    engine = Engine(slots, host=host)
    usual, found = _overhead(records), []
    for one in sorted(records, key=lambda one: one.time + one.granted):
        if not (one.pinned and 0 <= one.slot < slots):
            continue
        exchange = engine.take(one.slot, one.prompt, one.prompt_tokens)
        if one.host_tokens > 0 and exchange.moved > 0:
            rest = one.ended - one.granted - one.prefill_seconds - one.decode_seconds - usual
            found.append(max(0.0, rest) / exchange.moved)
        engine.serve(one.slot, content(one.prompt, one.content, one.prompt_tokens, one.output_tokens))
    return median(found) if len(found) >= _LEAST_COPIES else None


def _overhead(records: Sequence[Record]) -> float:
    """Seconds beside queue, prefill and decode; a request among others also waits for their steps."""
    rest = [
        (one.in_flight > 1, one.ended - one.granted - one.prefill_seconds - one.decode_seconds)
        for one in records
        if one.prefill_seconds > 0
    ]
    alone = [seconds for among, seconds in rest if not among]
    return max(0.0, median(alone) if alone else min((seconds for _, seconds in rest), default=0.0))


def _prefills(records: Sequence[Record]) -> list[tuple[int, int, float]]:
    """First position, last position and seconds of each prefill, as if it had been computed alone."""
    tokens = [one.processed_tokens or 0 for one in records]
    seconds = prefill_seconds([Span.of(one) for one in records], tokens)
    return [
        (one.prompt_tokens - own, one.prompt_tokens, spent)
        for one, own, spent in zip(records, tokens, seconds, strict=True)
        if own
    ]


def _start_and_curve(prefills: Sequence[tuple[int, int, float]]) -> tuple[float, PrefillCurve]:
    """Seconds that any prefill takes beside its tokens, and the curve of the tokens.

    Found in turn: the curve from what is left without the start, the start from what short ones take longer
    than the curve says.
    """
    middle = median(end - begin for begin, end, _ in prefills)
    short = [one for one in prefills if one[1] - one[0] <= middle]
    start, curve = 0.0, PrefillCurve(prefills)
    for _ in range(_ROUNDS):
        start = max(0.0, median(seconds - curve.seconds(begin, end) for begin, end, seconds in short))
        curve = PrefillCurve([(begin, end, seconds - start) for begin, end, seconds in prefills])
    return start, curve


def _decode(records: Sequence[Record]) -> tuple[dict[int, float], set[int], float]:
    """Rates by level where steps take one pass, which levels were seen, and what a further pass costs.

    From the times in which no prompt was computed.
    """
    tokens: dict[Together, float] = {}
    seconds: dict[Together, float] = {}
    usable = [one for one in records if one.decode_seconds > 0 and one.output_tokens > 1]
    for one, spent in zip(records, undisturbed([Span.of(one) for one in records]), strict=True):
        if one.output_tokens <= 1:
            continue
        whole = sum(spent.values())
        for step, time in spent.items():
            tokens[step] = tokens.get(step, 0.0) + (one.output_tokens - 1) * time / whole
            seconds[step] = seconds.get(step, 0.0) + time / step.answers
    if not tokens:  # never a moment without a prefill: take the whole times
        alone = Together(1, 1)
        for one in usable:
            tokens[alone] = tokens.get(alone, 0.0) + one.output_tokens - 1
            seconds[alone] = seconds.get(alone, 0.0) + one.decode_seconds
    split = _split(tokens, seconds)
    count: dict[int, float] = {}
    spared: dict[int, float] = {}
    """Of each level: tokens, and the seconds that they would have taken in one pass a step."""
    for step, some in tokens.items():
        further = split * (step.passes - 1) * some / step.answers
        count[step.answers] = count.get(step.answers, 0.0) + some
        spared[step.answers] = spared.get(step.answers, 0.0) + seconds[step] - further
    known = {level: some / spared[level] for level, some in count.items() if spared[level] >= _SECONDS}
    if not known and count:
        level = max(spared, key=lambda one: spared[one])
        known = {level: count[level] / spared[level]}
    return _filled(known), set(known), split


def _split(tokens: dict[Together, float], seconds: dict[Together, float]) -> float:
    """Seconds that a further pass of a step costs: how steps of equally many answers differ.

    No more than the cheapest step takes, which is a pass too; 0 where no two could be compared.
    """
    steps = {step: tokens[step] / step.answers for step in tokens if seconds[step] >= _SECONDS}
    each = {step: seconds[step] / steps[step] for step in steps}
    above = below = 0.0
    for level in {step.answers for step in steps}:
        same = [step for step in steps if step.answers == level]
        weight = sum(steps[step] for step in same)
        passes = sum(steps[step] * step.passes for step in same) / weight
        usual = sum(steps[step] * each[step] for step in same) / weight
        above += sum(steps[step] * (step.passes - passes) * (each[step] - usual) for step in same)
        below += sum(steps[step] * (step.passes - passes) ** 2 for step in same)
    cheapest = min((each[step] / step.passes for step in steps), default=0.0)
    return min(max(above / below, 0.0), cheapest) if below else 0.0


def _filled(known: dict[int, float]) -> dict[int, float]:
    """All levels: between two known ones on the line through them, beyond the highest as fast as that.

    A level below the lowest known one has the rate that :data:`UNSEEN_GAIN` gives it, and so have those above
    where only level 1 is known.
    """
    if not known:
        return {}
    lowest, highest = min(known), max(known)
    alone = known.get(1, known[lowest] / (1 + UNSEEN_GAIN * (lowest - 1)))
    points = {1: alone, **known}
    if highest == 1:
        points |= {level: alone * (1 + UNSEEN_GAIN * (level - 1)) for level in (2, 4)}
    levels = sorted(points)
    rates: dict[int, float] = {}
    for level in range(1, _MOST + 1):
        above = next((one for one in levels if one >= level), levels[-1])
        below = max((one for one in levels if one <= level), default=levels[0])
        if above == below or level > levels[-1]:
            rates[level] = points[min(level, levels[-1])] if level > levels[-1] else points[level]
            continue
        share = (level - below) / (above - below)
        rates[level] = points[below] + share * (points[above] - points[below])
    return rates
