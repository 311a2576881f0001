"""From a journal's entries to the figures of a report: reuse, losses, rates, waits, concurrency. Pure.

Figures are sums first; shares and rates are properties computed from sums, so that two summaries can be
compared and nothing is averaged twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from warmslot.router.curves import LEVEL_NAMES, DemandClock, level_name
from warmslot.router.records import BackendChange, Record
from warmslot.router.values import Loss

from .overlap import Span, prefill_seconds, undisturbed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BLOCK_TOKENS: Final = 4096
"""Width of one block of the prefill curve."""

BUCKETS: Final = 60
"""The window is cut into at most this many pieces for charts over time."""

MENDED_BY_SLOTS: Final = (Loss.EVICTED, Loss.BUSY)
"""Losses that more slots, or fewer live conversations, would mend."""

_NEGLIGIBLE: Final = 1e-4
"""Share of the time below which a level of demand is left out: times are rounded in a journal."""

_ROUNDS = 8
"""Rounds of sharing out prefill seconds over blocks; the rates settle within a few."""


@dataclass(slots=True)
class Tokens:
    """Sums over some requests."""

    requests: int = 0
    prompt: int = 0
    """Prompt tokens of requests whose engine told what it reused; of the others nothing is known."""
    cached: int = 0
    predicted: int = 0
    host: int = 0
    output: int = 0
    losses: dict[str, int] = field(default_factory=dict)

    @property
    def processed(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt - self.cached

    @property
    def reuse(self) -> float | None:
        """Share of prompt tokens that were reused."""
        return self.cached / self.prompt if self.prompt else None

    def add(self, record: Record) -> None:
        """Count one request."""
        self.requests += 1
        self.output += record.output_tokens
        if record.cached_tokens is None:
            return
        self.prompt += record.prompt_tokens
        self.cached += record.cached_tokens
        self.predicted += record.predicted_tokens
        self.host += record.host_tokens
        for reason, tokens in record.losses.items():
            self.losses[reason] = self.losses.get(reason, 0) + tokens


@dataclass(frozen=True, slots=True)
class PrefillBlock:
    """Prefill of the prompt positions ``[start, end)``, in tokens."""

    start: int
    end: int
    tokens: float
    seconds: float
    cumulative: float
    """Seconds to compute a prompt from its beginning to ``end``."""

    @property
    def marginal_rate(self) -> float:
        """Tokens per second within the block."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def cumulative_rate(self) -> float:
        """Tokens per second of a whole prompt that ends with the block."""
        return self.end / self.cumulative if self.cumulative else 0.0


@dataclass(frozen=True, slots=True)
class Level:
    """So many requests at once. ``tokens`` were decoded by all of them together in ``seconds``."""

    level: str
    seconds: float
    tokens: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, all together."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of some times in seconds."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    highest: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of all values at hand."""
        ordered = sorted(values)
        if not ordered:
            return cls()

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        mean = sum(ordered) / len(ordered)
        return cls(len(ordered), mean, at(0.5), at(0.95), at(0.99), ordered[-1])


@dataclass(frozen=True, slots=True)
class Bucket:
    """One piece of the window, for charts over time."""

    start: float
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of a window."""

    source: str
    start: float
    """Unix time of the first arrival; 0 for a live router, which counts since it started."""
    end: float
    total: Tokens
    statuses: dict[str, int]
    decisions: dict[str, int]
    truth_missing: int
    guessed: int
    """Requests whose shared beginnings were guessed from lengths."""
    sessions: dict[str, Tokens]
    clients: dict[str, Tokens]
    routes: dict[str, Tokens]
    backends: dict[str, Tokens]
    slots: dict[str, int]
    """The slot count that each backend had last, where the journal tells."""
    context: dict[str, int]
    prefill_seconds: float
    decode_seconds: float
    avoided_seconds: float
    """What the reused tokens would have cost at their positions."""
    prefill: list[PrefillBlock]
    decode: list[Level]
    demand: list[Level]
    queue: Spread
    first_token: Spread
    whole: Spread
    """Arrival to end."""
    buckets: list[Bucket]

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end - self.start

    @property
    def prompt_per_output(self) -> float | None:
        """Prompt tokens to each generated one."""
        return self.total.prompt / self.total.output if self.total.output else None

    @property
    def calibration(self) -> float | None:
        """Observed to predicted reuse."""
        return self.total.cached / self.total.predicted if self.total.predicted else None


class Gatherer:
    """Is fed entries in any order; keeps numbers only."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._start, self._end = float("inf"), float("-inf")
        self._total = Tokens()
        self._groups: dict[str, dict[str, Tokens]] = {
            kind: {} for kind in ("session", "client", "route", "backend")
        }
        self._statuses: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()
        self._slots: dict[str, int] = {}
        self._context: dict[str, int] = {}
        self._missing = self._guessed = 0
        self._prefills: list[tuple[Span, int, int]] = []
        """When, and from where to where in the prompt."""
        self._answers: list[tuple[Span, int]] = []
        """When, and how many tokens."""
        self._there: list[tuple[float, float]] = []
        """From arrival to end."""
        self._waits: list[tuple[float, float | None, float]] = []
        self._avoidable: list[int] = []
        self._decode_seconds = 0.0
        self._points: list[tuple[float, int, int, dict[str, int]]] = []

    def add(self, entry: object) -> None:
        """Take one entry into account."""
        if isinstance(entry, BackendChange):
            if entry.up:
                self._slots[entry.backend], self._context[entry.backend] = entry.slots, entry.context
        elif isinstance(entry, Record):
            self._request(entry)

    def _request(self, record: Record) -> None:
        end = record.time + record.ended
        self._start, self._end = min(self._start, record.time), max(self._end, end)
        self._total.add(record)
        for kind, groups in self._groups.items():
            name = getattr(record, kind) or "(none)"
            groups.setdefault(name, Tokens()).add(record)
        self._statuses[record.status] += 1
        self._decisions[record.decision] += 1
        self._guessed += record.guessed
        self._decode_seconds += record.decode_seconds
        self._there.append((record.time, end))
        self._answers.append((Span.of(record), record.output_tokens))
        first = record.first_token
        if first is not None:
            first = min(first, record.ended - record.decode_seconds)
        self._waits.append((record.queued, first, record.ended))
        if record.cached_tokens is None:
            self._missing += record.status == "ok"
            return
        if record.prefill_seconds > 0:
            self._prefills.append((Span.of(record), record.cached_tokens, record.prompt_tokens))
        self._avoidable.append(record.cached_tokens)
        self._points.append((record.time, record.prompt_tokens, record.cached_tokens, record.losses))

    def summary(self) -> Summary:
        """The figures of all that was added."""
        empty = not self._total.requests
        spans, tokens = (
            [one for one, _, _ in self._prefills],
            [end - start for _, start, end in self._prefills],
        )
        seconds = prefill_seconds(spans, tokens)
        curve = PrefillCurve(
            [(start, end, spent) for (_, start, end), spent in zip(self._prefills, seconds, strict=True)]
        )
        return Summary(
            source=self._source,
            start=0.0 if empty else self._start,
            end=0.0 if empty else self._end,
            total=self._total,
            statuses=dict(self._statuses),
            decisions=dict(self._decisions),
            truth_missing=self._missing,
            guessed=self._guessed,
            sessions=self._groups["session"],
            clients=self._groups["client"],
            routes=self._groups["route"],
            backends=self._groups["backend"],
            slots=self._slots,
            context=self._context,
            prefill_seconds=sum(seconds),
            decode_seconds=self._decode_seconds,
            avoided_seconds=sum(curve.seconds(0, cached) for cached in self._avoidable),
            prefill=list(curve.blocks()),
            decode=list(self._decode_levels()),
            demand=list(self._demand_levels()),
            queue=Spread.of(queued for queued, _, _ in self._waits),
            first_token=Spread.of(first for _, first, _ in self._waits if first is not None),
            whole=Spread.of(ended for _, _, ended in self._waits),
            buckets=list(self._buckets()),
        )

    def _decode_levels(self) -> Iterator[Level]:
        """From the times in which no prompt was computed beside it, if there were any."""
        spans = [span for span, _ in self._answers]
        spent = undisturbed(spans)
        if not any(spent):
            spent = undisturbed([span._replace(prefill=span.decoding) for span in spans])
        tokens = dict.fromkeys(LEVEL_NAMES, 0.0)
        seconds = dict.fromkeys(LEVEL_NAMES, 0.0)
        for (_, output), levels in zip(self._answers, spent, strict=True):
            whole = sum(levels.values())
            for step, time in levels.items() if output else ():
                tokens[level_name(step.answers)] += output * time / whole
                seconds[level_name(step.answers)] += time / step.answers
        for name in LEVEL_NAMES:
            if tokens[name] > 0:
                yield Level(name, seconds[name], tokens[name])

    def _demand_levels(self) -> Iterator[Level]:
        events = sorted(
            event for begin, end in self._there for event in ((begin, 1), (end, -1)) if end > begin
        )
        clock = DemandClock(self._start if events else 0.0)
        for now, by in events:
            clock.change(by, now)
        whole = sum(clock.seconds)
        for name, seconds in zip(LEVEL_NAMES, clock.seconds, strict=True):
            if seconds > whole * _NEGLIGIBLE:
                yield Level(name, seconds)

    def _buckets(self) -> Iterator[Bucket]:
        if not self._points:
            return
        count = max(1, min(BUCKETS, len(self._points) // 2))
        width = (self._end - self._start) / count or 1.0
        buckets = [Bucket(self._start + width * index, Tokens()) for index in range(count)]
        for time, prompt, cached, losses in self._points:
            tokens = buckets[min(count - 1, int((time - self._start) / width))].tokens
            tokens.requests += 1
            tokens.prompt += prompt
            tokens.cached += cached
            for reason, lost in losses.items():
                tokens.losses[reason] = tokens.losses.get(reason, 0) + lost
        yield from buckets


class PrefillCurve:
    """The marginal rate of each 4k block, from prefills that each cover some blocks.

    ``prefills``: first position, last position, seconds. The seconds of one are shared out over its blocks by
    what tokens of each block cost, which is found by repeating that until it settles.
    """

    def __init__(self, prefills: Sequence[tuple[int, int, float]]) -> None:
        usable = [(start, end, seconds) for start, end, seconds in prefills if end > start and seconds > 0]
        last = max((end for _, end, _ in usable), default=0)
        count = -(-last // BLOCK_TOKENS)
        self._tokens = [0.0] * count
        self._spent = [0.0] * count
        parts = [list(_blocks(start, end)) for start, end, _ in usable]
        for found in parts:
            for block, tokens in found:
                self._tokens[block] += tokens
        cost = [1.0] * count
        for _ in range(_ROUNDS):
            spent = [0.0] * count
            for (_, _, seconds), found in zip(usable, parts, strict=True):
                whole = sum(tokens * cost[block] for block, tokens in found)
                for block, tokens in found:
                    spent[block] += seconds * tokens * cost[block] / whole
            cost = [s / t if t else 0.0 for s, t in zip(spent, self._tokens, strict=True)]
            self._spent = spent
        self._cost = _filled(cost)
        self._sums = [0.0]
        for price in self._cost:
            self._sums.append(self._sums[-1] + price * BLOCK_TOKENS)

    def seconds(self, start: int, end: int) -> float:
        """Seconds to compute the positions ``[start, end)``; beyond what is known the last block's rate."""
        return self._up_to(end) - self._up_to(start)

    def _up_to(self, end: int) -> float:
        if not self._cost:
            return 0.0
        block = min(end // BLOCK_TOKENS, len(self._cost) - 1)
        return self._sums[block] + (end - block * BLOCK_TOKENS) * self._cost[block]

    def blocks(self) -> Iterator[PrefillBlock]:
        """Every block up to the longest prompt in which tokens were computed."""
        for block, (tokens, spent) in enumerate(zip(self._tokens, self._spent, strict=True)):
            if tokens:
                start = block * BLOCK_TOKENS
                end = start + BLOCK_TOKENS
                yield PrefillBlock(start, end, tokens, spent, self._sums[block + 1])


def _blocks(start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        block = start // BLOCK_TOKENS
        stop = min(end, (block + 1) * BLOCK_TOKENS)
        yield block, stop - start
        start = stop


def _filled(cost: list[float]) -> list[float]:
    """Blocks in which nothing was computed cost what the nearest known one does."""
    known = [block for block, price in enumerate(cost) if price > 0]
    if not known:
        return cost
    filled = []
    for block, price in enumerate(cost):
        if price > 0:
            filled.append(price)
            continue
        at = bisect_right(known, block)
        near = min(known[max(0, at - 1) : at + 1], key=lambda other: abs(other - block))
        filled.append(cost[near])
    return filled


def as_json(summary: Summary) -> dict[str, Any]:
    """Everything as plain values, shares and rates included."""
    return {
        "source": summary.source,
        "start": summary.start,
        "end": summary.end,
        "seconds": summary.seconds,
        "total": _tokens_json(summary.total),
        "prompt_per_output": summary.prompt_per_output,
        "calibration": summary.calibration,
        "truth_missing": summary.truth_missing,
        "guessed": summary.guessed,
        "statuses": summary.statuses,
        "decisions": summary.decisions,
        **{
            kind: {name: _tokens_json(tokens) for name, tokens in getattr(summary, kind).items()}
            for kind in ("sessions", "clients", "routes", "backends")
        },
        "slots": summary.slots,
        "context": summary.context,
        "prefill_seconds": summary.prefill_seconds,
        "decode_seconds": summary.decode_seconds,
        "prefill_seconds_avoided": summary.avoided_seconds,
        "prefill_curve": [
            {
                "start": block.start,
                "end": block.end,
                "tokens": block.tokens,
                "seconds": block.seconds,
                "marginal_tokens_per_second": block.marginal_rate,
                "cumulative_tokens_per_second": block.cumulative_rate,
            }
            for block in summary.prefill
        ],
        "decode_levels": [
            {
                "busy": one.level,
                "seconds": one.seconds,
                "tokens": one.tokens,
                "tokens_per_second": one.rate,
            }
            for one in summary.decode
        ],
        "demand_seconds": {one.level: one.seconds for one in summary.demand},
        **{
            name: {
                field: getattr(spread, field) for field in ("count", "mean", "p50", "p95", "p99", "highest")
            }
            for name, spread in (
                ("queue_seconds", summary.queue),
                ("first_token_seconds", summary.first_token),
                ("request_seconds", summary.whole),
            )
        },
    }


def _tokens_json(tokens: Tokens) -> dict[str, Any]:
    return {
        "requests": tokens.requests,
        "prompt_tokens": tokens.prompt,
        "cached_tokens": tokens.cached,
        "processed_tokens": tokens.processed,
        "predicted_tokens": tokens.predicted,
        "host_tokens": tokens.host,
        "output_tokens": tokens.output,
        "reuse": tokens.reuse,
        "losses": tokens.losses,
    }
