"""A backend's rates as its journal shows them: prefill by position, decoding by sharers, overhead. Pure.

Where requests overlapped, a prefill slows the answers that run beside it, and these slow the prefill. So
rates are taken from times without such overlap as far as there are enough of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

from .summary import PrefillCurve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmslot.router.records import Record

BATCH: Final = 2048
"""Prompt tokens of one engine step (``-b``): the answers that run beside a prefill get a token for each."""

UNSEEN_GAIN: Final = 0.4
"""What each further request adds to the decode rate, of one alone, where sharing was never seen."""

_ENOUGH: Final = 20
"""Clean observations from which on the others are left aside."""

_SECONDS: Final = 0.5
"""Seconds of decoding at a level from which on its rate counts."""

_MOST: Final = 64


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

    def prefill_seconds(self, start: int, end: int) -> float:
        """Seconds to compute prompt tokens ``[start, end)`` alone."""
        return self.prefill.seconds(start, end)

    def decode_rate(self, busy: int) -> float:
        """Tokens per second of all together."""
        return self.decode[min(max(1, busy), _MOST)]


def speeds_of(records: Sequence[Record]) -> Speeds | None:
    """The rates in a journal; ``None`` where it has no timings at all."""
    spans = _spans(records)
    told = [one for one in records if one.cached_tokens is not None and one.prefill_seconds > 0]
    every = [(one.cached_tokens or 0, one.prompt_tokens, one.prefill_seconds) for one in told]
    crowded = _crowded([_prefill_span(one) for one in told])
    alone = [one for index, one in enumerate(every) if index not in crowded]
    rates, seen = _decode(spans)
    if not every or not rates:
        return None
    rest = [
        one.ended - one.granted - one.prefill_seconds - one.decode_seconds
        for one in records
        if one.in_flight == 1 and one.prefill_seconds > 0
    ]
    curve = PrefillCurve(alone if len(alone) >= _ENOUGH else every)
    return Speeds(curve, rates, max(0.0, median(rest)) if rest else 0.0, seen)


def _prefill_span(one: Record) -> tuple[str, float, float]:
    """Backend, begin and end of a prefill."""
    end = one.time + one.ended - one.decode_seconds
    return one.backend, end - one.prefill_seconds, end


def _crowded(spans: Sequence[tuple[str, float, float]]) -> set[int]:
    """Prefills during which another prompt of the same backend was computed too."""
    crowded: set[int] = set()
    order = sorted(range(len(spans)), key=lambda index: spans[index])
    latest = -1
    for index in order:
        backend, begin, end = spans[index]
        if latest >= 0 and spans[latest][0] == backend:
            if begin < spans[latest][2]:
                crowded |= {index, latest}
            if end < spans[latest][2]:
                continue
        latest = index
    return crowded


def _spans(records: Sequence[Record]) -> list[tuple[str, float, float, float, int]]:
    """Backend, begin of prefill, begin of decoding, end, generated tokens."""
    spans = []
    for one in records:
        if one.decode_seconds > 0 and one.output_tokens > 1:
            end = one.time + one.ended
            decoding = end - one.decode_seconds
            spans.append((one.backend, decoding - one.prefill_seconds, decoding, end, one.output_tokens - 1))
    return spans


def _decode(spans: Sequence[tuple[str, float, float, float, int]]) -> tuple[dict[int, float], set[int]]:
    """Rates by level from the times in which nothing was prefilled."""
    tokens: dict[int, float] = {}
    seconds: dict[int, float] = {}
    for (*_, output), spent in zip(spans, _undisturbed(spans), strict=True):
        whole = sum(spent.values())
        for level, time in spent.items():
            tokens[level] = tokens.get(level, 0.0) + output * time / whole
            seconds[level] = seconds.get(level, 0.0) + time / level
    if not tokens:  # never a moment without a prefill: take the whole times
        for _, _, decoding, end, output in spans:
            tokens[1] = tokens.get(1, 0.0) + output
            seconds[1] = seconds.get(1, 0.0) + end - decoding
    known = {level: tokens[level] / seconds[level] for level in tokens if seconds[level] >= _SECONDS}
    if not known and tokens:
        level = max(seconds, key=lambda one: seconds[one])
        known = {level: tokens[level] / seconds[level]}
    return _filled(known), set(known)


def _undisturbed(spans: Sequence[tuple[str, float, float, float, int]]) -> list[dict[int, float]]:
    """For each span, the seconds in which so many decoded on its backend and no prompt was computed."""
    spent: list[dict[int, float]] = [{} for _ in spans]
    for backend in {span[0] for span in spans}:
        events: list[tuple[float, int, int]] = []
        for index, (where, prefill, decoding, end, _) in enumerate(spans):
            if where == backend:
                # -1 - index: its prefill; index: its decoding. Ends come before beginnings.
                events += [(prefill, 1, -1 - index), (decoding, 0, -1 - index)] * (decoding > prefill)
                events += [(decoding, 1, index), (end, 0, index)]
        at, going = 0.0, set[int]()
        for now, begins, which in sorted(events):
            if going and min(going) >= 0:
                for one in going:
                    spent[one][len(going)] = spent[one].get(len(going), 0.0) + now - at
            at = now
            if begins:
                going.add(which)
            else:
                going.discard(which)
    return [{level: time for level, time in one.items() if time > 0} for one in spent]


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
