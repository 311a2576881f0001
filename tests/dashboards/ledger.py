"""What the panels must show of a run, worked out from its journal.

The journal does not hold what reuse would be at other slot counts, when streams decode, what the engine's
log says and what clients were answered before they had a slot: those are noted beside it as they happen.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from warmslot.router.metrics import RESTARTS
from warmslot.router.values import Decision, Loss, Status

from tests.dashboards.series import quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from warmslot.router.records import BackendChange, Record
    from warmslot.router.values import Lease, Outcome, Report

    from tests.dashboards.panels import Shown

WINDOW = 300.0
"""Seconds that every rate looks back: all that happens here, from the first scrape on, when all was 0."""

ROUNDING = 0.5e-4
"""What a journal's time is off by at most, in seconds."""

LAG = 0.05
"""What two looks at the clock in the same turn of the loop may lie apart, in seconds, all in all."""

SCRAPE = 0.25
"""Interval and timeout of scrapes, in seconds: a sample may be so much younger than its time says."""

FIRST_TOKEN = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
QUEUE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 300.0)
LENGTH = tuple(2.0**power for power in range(8, 21))

Range = tuple[float, float]
"""The least and the most that a panel may show."""


@dataclass
class Notes:
    """An observer of what the journal leaves out."""

    moments: list[tuple[float, int, str]] = field(default_factory=list)
    """When streams began (1) and ended (-1) to decode, by request."""
    generated: dict[str, int] = field(default_factory=dict)
    """Tokens of each stream."""
    shadow: Counter[str] = field(default_factory=Counter)
    """Tokens that would have been reused, by slot count."""

    def demanded(self, pool: str, by: int, now: float) -> None:
        """In the journal."""

    def granted(self, lease: Lease, decision_seconds: float) -> None:
        """In the journal."""

    def decoding(self, lease: Lease, now: float) -> None:
        """A stream has its first token."""
        self.moments.append((now, 1, lease.request.id))
        self.generated[lease.request.id] = 0

    def finished(self, lease: Lease, report: Report, outcome: Outcome, now: float) -> None:
        """A request is over."""
        del outcome
        self.shadow.update(report.shadow)
        if lease.request.id in self.generated:
            self.moments.append((now, -1, lease.request.id))
            self.generated[lease.request.id] = report.output_tokens

    def backend_changed(self, backend: str, *, up: bool, slots: int, context: int, reason: str) -> None:
        """In the journal."""

    def engine_selected(self, backend: str, by: str) -> None:
        """Counted in the engine's log."""

    def decoded(self) -> Shown:
        """Tokens per second by how many streams decoded at once."""
        tokens: dict[int, float] = defaultdict(float)
        seconds: dict[int, float] = defaultdict(float)
        spent: dict[str, dict[int, float]] = {}
        running: set[str] = set()
        for (since, step, request), (until, _, _) in itertools.pairwise([*self.moments, (0.0, 0, "")]):
            if step > 0:
                running.add(request)
                spent[request] = defaultdict(float)
            elif step < 0:
                running.discard(request)
                whole = sum(spent[request].values())
                for level, time in spent[request].items():
                    tokens[level] += self.generated[request] * time / whole
            if running:
                seconds[len(running)] += until - since
                for one in running:
                    spent[one][len(running)] += until - since
        return {f"{level} busy": tokens[level] / time for level, time in seconds.items()}


@dataclass(frozen=True)
class Run:
    """All that is known of a run of one backend, without its metrics."""

    records: Sequence[Record]
    changes: Sequence[BackendChange]
    notes: Notes
    selections: Counter[str]
    """The words ``id``, ``lcp`` and ``lru`` in the engine's log."""
    resident: int
    """Tokens in the slots at the end, as the engine says."""
    refused: int
    """Requests that were answered with 4xx before they had a slot."""
    seconds: float
    """Between the first scrape and the last."""
    advised: int
    """Slots that the router was told of."""

    @property
    def told(self) -> list[Record]:
        """Requests of which the engine told what it reused."""
        return [one for one in self.records if one.cached_tokens is not None]

    @property
    def backend(self) -> BackendChange:
        """The backend as it last served."""
        return [one for one in self.changes if one.up][-1]

    @property
    def slots(self) -> int:
        """Of the backend."""
        return self.backend.slots

    def expected(self, dashboard: str, title: str) -> dict[str, Range]:
        """What a panel must show. Rates are over :data:`WINDOW`, in which everything happened."""
        if title == "Time by demand":
            return self._demand()
        low, high = (self._figures(dashboard, title, off) for off in (-ROUNDING, ROUNDING))
        return {name: (min(low[name], high[name]), max(low[name], high[name])) for name in low}

    def _figures(  # noqa: C901, PLR0911, PLR0912, PLR0915 - a table of panels
        self, dashboard: str, title: str, off: float
    ) -> Shown:
        """A panel with every time of the journal longer by ``off``."""
        told, records = self.told, self.records
        name = self.backend.backend
        cached = sum(one.cached_tokens or 0 for one in told)
        presented = sum(one.prompt_tokens for one in told)
        losses: Counter[str] = Counter()
        for one in told:
            losses.update(one.losses)
        mended = losses["evicted"] + losses["busy"]
        match title:
            case "Reuse":
                return {"reuse" if dashboard == "overview" else "observed": cached / presented}
            case "Reuse by backend" | "Reuse by route" | "Reuse by client":
                return self._reuse(title.rpartition(" ")[2])
            case "Reuse by slot count" | "Reuse by slot count over time":
                table = title == "Reuse by slot count"
                prefix = "A " if table else "N = "
                modelled = {f"{prefix}{n.zfill(2)}": t / presented for n, t in self.notes.shadow.items()}
                return modelled | {f"B {self.slots:02}" if table else "observed": cached / presented}
            case "Prompt tokens: cached and processed":
                return per_second({"cached": cached, "processed": presented - cached})
            case "Where reused tokens were":
                host = sum(one.host_tokens for one in told)
                return per_second({"slot": cached - host, "host_ram": host})
            case "Why prompt tokens were computed":
                return per_second({why: losses[why] for why in Loss})
            case "Lost for want of slots":
                return {"evicted + busy": mended / presented}
            case "Losses that more slots would mend, and others":
                others = presented - cached - mended
                return per_second({"more slots would mend": mended, "they would not": others})
            case "Reuse: predicted and observed":
                predicted = sum(one.predicted_tokens for one in told)
                return per_second({"predicted": predicted, "observed": cached})
            case "Routing decisions":
                return per_second({why: sum(one.decision == why for one in records) for why in Decision})
            case "The engine's own slot selections":
                return per_second({f"by {by}": self.selections[by] for by in ("id", "lcp", "lru")})
            case "Prefill avoided":
                return per_second({"avoided": self._avoided(off)})
            case "Time to first token":
                return per_second(below(FIRST_TOKEN, self._first_tokens(off)))
            case "TTFT p95":
                return {"p95": quantile(0.95, below(FIRST_TOKEN, self._first_tokens(off)))}
            case "Time in the queue, p95":
                waits = [one.granted + off for one in records]
                return {records[0].pool: quantile(0.95, below(QUEUE, waits))}
            case "Requests by how they ended":
                ended = {how: sum(one.status == how for one in records) for how in Status}
                return per_second(ended | {Status.REJECTED: self.refused})
            case "Error ratio":
                failed = sum(one.status == Status.ERROR for one in records)
                return {"errors": failed / (len(records) + self.refused)}
            case "Waiting":
                return {"waiting": 0}
            case "Backends up":
                return {"up": 1, "configured": 1}
            case "Slot occupancy":
                held = {f"{name} slot {slot}": 0.0 for slot in range(self.slots)}
                for one in records:
                    held[f"{name} slot {one.slot}"] += one.ended - one.granted + 2 * off
                return per_second(held)
            case "Restarts per hour":
                count = Counter(restarts(self.changes))
                return {f"{name} {why}": 3600 * count[why] / WINDOW for why in RESTARTS}
            case "Slots: advised and current":
                return {f"{name} advised": self.advised, f"{name} current": self.slots}
            case "Decode throughput by busy slots":
                return self.notes.decoded()
            case "Context of a slot and length of prompts":
                lengths = below(LENGTH, [one.prompt_tokens for one in told])
                context = self.backend.context
                return {f"{name} context": context, f"{name} prompt p99": quantile(0.99, lengths)}
            case "Prompt tokens per generated token":
                return {name: presented / sum(one.output_tokens for one in records)}
            case "Cost of prefill by position":
                assert max(one.prompt_tokens for one in told) <= 4096
                spent = sum(one.prefill_seconds + off for one in told)
                return {f"{name} to 4k": 1000 * spent / (presented - cached)}
            case "KV memory: reserved and in use":
                reserved = self.slots * self.backend.context
                return {f"{name} reserved": reserved, f"{name} in use": self.resident}
        raise AssertionError(f"nothing is known of the panel {title!r}")

    def _reuse(self, label: str) -> Shown:
        whole: Counter[str] = Counter()
        cached: Counter[str] = Counter()
        for one in self.told:
            whole[getattr(one, label)] += one.prompt_tokens
            cached[getattr(one, label)] += one.cached_tokens or 0
        return {name: cached[name] / tokens for name, tokens in whole.items()}

    def _first_tokens(self, off: float) -> list[float]:
        return [one.first_token + off for one in self.records if one.first_token is not None]

    def _avoided(self, off: float) -> float:
        """Reused tokens at what a token had cost on average so far; all prompts end in the first block."""
        avoided, tokens, seconds = 0.0, 0, 0.0
        for one in self.told:
            tokens += one.processed_tokens or 0
            seconds += one.prefill_seconds + off
            avoided += (one.cached_tokens or 0) * seconds / tokens
        return avoided

    def _demand(self) -> dict[str, Range]:
        steps = sorted(
            step
            for one in self.records
            for step in ((one.time + one.granted - one.queued, 1), (one.time + one.ended, -1))
        )
        seconds: dict[int, float] = defaultdict(float)
        level = 0
        for (at, step), (until, _) in itertools.pairwise(steps):
            level += step
            seconds[level] += until - at
        seconds[0] = self.seconds - sum(seconds[level] for level in seconds if level)
        shown = {
            f"A {level:02}": around(time, LAG if level else LAG + 3 * SCRAPE)
            for level, time in seconds.items()
        }
        return shown | {f"B {self.slots:02}": shown[f"A {self.slots:02}"]}


def around(value: float, leeway: float) -> Range:
    """All values that are so near."""
    return value - leeway, value + leeway


def per_second(sums: dict[str, float]) -> Shown:
    """Rates over the window."""
    return {name: value / WINDOW for name, value in sums.items()}


def below(bounds: Sequence[float], values: Iterable[float]) -> dict[str, float]:
    """A histogram: how many values are no larger than each bound."""
    found = list(values)
    return {str(bound): sum(one <= bound for one in found) for bound in bounds} | {"+Inf": len(found)}


def restarts(changes: Iterable[BackendChange]) -> Iterator[str]:
    """Why a backend had gone, for each time that it came back."""
    gone = None
    for one in changes:
        if not one.up:
            gone = one.reason
        elif gone is not None:
            yield next((word for word in RESTARTS if gone.startswith(word)), "exited")
            gone = None
