"""A made-up fleet whose counters grow evenly, so that every rate is known, and panels worked out from it."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmslot.router.metrics import catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

POOLS = {"p": ("a", "b"), "q": ("c",)}
POOL_OF = {backend: pool for pool, backends in POOLS.items() for backend in backends}
VALUES = {
    "backend": ("a", "b", "c"),
    "block": ("4k", "8k"),
    "busy": ("1", "2"),
    "by": ("id", "lcp", "lru"),
    "client": ("ci", "other"),
    "decision": ("affinity", "fresh", "spill", "wait", "unpinned"),
    "label": ("client",),
    "level": ("0", "1", "2", "4", "8", "more"),
    "outcome": ("ok", "error", "cancelled", "rejected"),
    "pool": ("p", "q"),
    "reason": ("new", "evicted", "busy", "diverged", "restarted", "engine"),
    "reuse": ("cached", "processed"),
    "route": ("chat", "completion"),
    "slot": ("0", "1", "2", "3"),
    "slots": ("1", "2", "4", "8", "16", "32", "unbounded"),
    "source": ("slot", "host_ram"),
}
BUCKETS = {"prompt_length_tokens": ("256", "1024", "8192", "+Inf")}
USUAL_BUCKETS = ("0.25", "1", "4", "15", "+Inf")
GAUGES = {
    "backend_slots": 4.0,
    "slot_context_tokens": 8192.0,
    "backend_up": 1.0,
    "advised_slots": 2.0,
}
STEP, END, LENGTH = 15, 1_700_003_600, 4200
START = END - LENGTH


@dataclass(frozen=True)
class Series:
    """One time series: a counter that grows by ``each`` per second, or a gauge that stays at it."""

    name: str
    labels: dict[str, str]
    each: float
    counter: bool

    def fits(self, **wanted: str) -> bool:
        """Whether its labels match these regular expressions; a pool is found through the backend, too."""
        own = dict(self.labels)
        if "pool" not in own and "backend" in own:
            own["pool"] = POOL_OF[own["backend"]]
        return all(name not in own or re.fullmatch(value, own[name]) for name, value in wanted.items())


def fleet() -> list[Series]:
    """Series of the whole catalogue; growth differs from series to series."""
    found: list[Series] = []
    number = 0
    for one in catalogue():
        names = tuple(one.labels)
        for values in itertools.product(*(VALUES[name] for name in names)):
            labels = dict(zip(names, values, strict=True))
            if (
                "backend" in labels
                and labels.get("pool", POOL_OF[labels["backend"]]) != POOL_OF[labels["backend"]]
            ):
                continue
            number += 1
            each = 1 + (number * 37 % 101) / 8
            if one.kind == "histogram":
                found += _histogram(one.name, labels, each)
            elif one.kind == "counter":
                found.append(Series(f"warmslot_{one.name}", labels, each, counter=True))
            else:
                found.append(
                    Series(f"warmslot_{one.name}", labels, GAUGES.get(one.name, each), counter=False)
                )
    return found


def _histogram(name: str, labels: dict[str, str], each: float) -> Iterator[Series]:
    bounds = BUCKETS.get(name, USUAL_BUCKETS)
    for position, bound in enumerate(bounds, 1):
        share = each * (position / len(bounds)) ** 2
        yield Series(f"warmslot_{name}_bucket", {**labels, "le": bound}, share, counter=True)
    yield Series(f"warmslot_{name}_count", labels, each, counter=True)
    yield Series(f"warmslot_{name}_sum", labels, each * 2, counter=True)


def openmetrics(series: list[Series]) -> str:
    """All samples, as ``promtool tsdb create-blocks-from openmetrics`` reads them."""
    lines = []
    for one in series:
        labels = ",".join(f'{name}="{value}"' for name, value in one.labels.items())
        head = f'{one.name}{{job="w",instance="i"{"," if labels else ""}{labels}}}'
        for time in range(START, END + 1, STEP):
            value = one.each * (time - START) if one.counter else one.each
            lines.append(f"{head} {value!r} {time}")
    return "\n".join([*lines, "# EOF", ""])


class Expected:
    """What the panels must show for a choice of pools, backends (regular expressions)."""

    def __init__(self, series: list[Series], pool: str, backend: str) -> None:
        self._series = series
        self._chosen = {"pool": pool, "backend": backend}

    def sum(self, name: str, **wanted: str) -> float:
        """The summed growth per second, or value, of a metric's series."""
        return sum(one.each for one in self._of(name, **wanted))

    def by(self, label: str, name: str, **wanted: str) -> dict[str, float]:
        """The same by the values of a label."""
        sums: dict[str, float] = {}
        for one in self._of(name, **wanted):
            sums[one.labels[label]] = sums.get(one.labels[label], 0.0) + one.each
        return sums

    def quantile(self, q: float, name: str, **wanted: str) -> float:
        """A quantile of a histogram."""
        return quantile(q, self.by("le", f"{name}_bucket", **wanted))

    def _of(self, name: str, **wanted: str) -> list[Series]:
        chosen = {**self._chosen, **wanted}
        return [one for one in self._series if one.name == f"warmslot_{name}" and one.fits(**chosen)]


def quantile(q: float, buckets: Mapping[str, float]) -> float:
    """A quantile by linear interpolation inside its bucket; ``buckets``: how many lie below each bound."""
    counts = sorted(
        (math.inf if bound == "+Inf" else float(bound), count) for bound, count in buckets.items()
    )
    rank = q * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            return low if bound == math.inf else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    raise AssertionError("no bucket holds the rank")
