"""Prometheus' text format, written fast: thousands of series in a few milliseconds.

``prometheus_client.generate_latest`` builds an object for each sample and takes over 50 ms for eight backends
of 32 slots, with the interpreter's lock held. Here the text of a series is kept until its value changes. What
is written is held against ``generate_latest`` by a test, as the values are read from the library's insides.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

Labels = tuple[str, ...]


class Family(NamedTuple):
    """One metric of the library with what its text needs."""

    name: str
    """In full; counters end in ``_total``."""
    kind: str
    """``counter``, ``gauge`` or ``histogram``."""
    labels: Labels
    text: str
    metric: Any
    """The library's object."""


class _Written:
    """A child as it was last written: its text is good until a value changes."""

    __slots__ = ("cells", "heads", "last")

    def __init__(self, family: Family, values: Labels, child: Any) -> None:
        self.heads = list(_heads(family, values, child))
        self.cells = [child._value] if family.kind != "histogram" else [*child._buckets, child._sum]  # noqa: SLF001
        self.last: tuple[list[float], str] = [], ""
        """Replaced as a whole: two scrapes may be written at once."""

    def now(self, *, histogram: bool) -> str:
        """Its lines with the values that it has now."""
        values = [cell._value for cell in self.cells]  # noqa: SLF001 - reading a float needs no lock
        before, text = self.last
        if values != before:
            told = _cumulated(values) if histogram else values
            text = "".join([f"{head}{value!r}\n" for head, value in zip(self.heads, told, strict=True)])
            self.last = values, text
        return text


class Exposition:
    """Writes families. May run in another thread than the one that counts."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families
        self._written: list[dict[Labels, _Written]] = [{} for _ in families]

    def text(self) -> bytes:
        """Every sample."""
        parts: list[str] = []
        for family, written in zip(self._families, self._written, strict=True):
            parts.append(
                f"# HELP {family.name} {_escape(family.text, quotes=False)}\n"
                f"# TYPE {family.name} {family.kind}\n"
            )
            histogram = family.kind == "histogram"
            for values, child in _children(family):
                known = written.get(values)
                if known is None:
                    known = written[values] = _Written(family, values, child)
                parts.append(known.now(histogram=histogram))
            time.sleep(0)  # lets the event loop's thread in
        return "".join(parts).encode()


def _children(family: Family) -> list[tuple[Labels, Any]]:
    if not family.labels:
        return [((), family.metric)]
    with family.metric._lock:  # noqa: SLF001
        return list(family.metric._metrics.items())  # noqa: SLF001


def _heads(family: Family, values: Labels, child: Any) -> Iterator[str]:
    """The text before each value of a child, in the order in which they are written."""
    pairs = [f'{name}="{_escape(value)}"' for name, value in zip(family.labels, values, strict=True)]
    plain = f"{{{','.join(sorted(pairs))}}} " if pairs else " "
    if family.kind != "histogram":
        yield family.name + plain
        return
    for bound in child._upper_bounds:  # noqa: SLF001
        yield f"{family.name}_bucket{{{','.join(sorted([*pairs, _le(bound)]))}}} "
    yield f"{family.name}_count{plain}"
    yield f"{family.name}_sum{plain}"


def _cumulated(values: list[float]) -> list[float]:
    """The values of a histogram's lines: its buckets added up, their whole, and the sum."""
    *buckets, total = values
    counts = [*itertools.accumulate(buckets)]
    return [*counts, counts[-1], total]


def _le(bound: float) -> str:
    return f'le="{"+Inf" if bound == math.inf else repr(float(bound))}"'


def _escape(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
