"""Prometheus' text format, written fast: thousands of series in a few milliseconds.

``prometheus_client.generate_latest`` builds an object for each sample and takes over 50 ms for eight backends
of 32 slots, with the interpreter's lock held. Here the text before each value is made once and kept. What is
written is held against ``generate_latest`` by a test, since the values are read from the library's insides.
"""

from __future__ import annotations

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


class Exposition:
    """Writes families. May run in another thread than the one that counts."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families
        self._heads: list[dict[Labels, list[str]]] = [{} for _ in families]

    def text(self) -> bytes:
        """Every sample."""
        lines: list[str] = []
        for family, heads in zip(self._families, self._heads, strict=True):
            lines.append(
                f"# HELP {family.name} {_escape(family.text, quotes=False)}\n"
                f"# TYPE {family.name} {family.kind}\n"
            )
            for values, child in _children(family):
                known = heads.get(values)
                if known is None:
                    known = heads[values] = list(_heads(family, values, child))
                for head, value in zip(known, _values(family.kind, child), strict=True):
                    lines.append(f"{head}{value!r}\n")
            time.sleep(0)  # lets the event loop's thread in
        return "".join(lines).encode()


def _children(family: Family) -> list[tuple[Labels, Any]]:
    if not family.labels:
        return [((), family.metric)]
    with family.metric._lock:  # noqa: SLF001
        return list(family.metric._metrics.items())  # noqa: SLF001


def _heads(family: Family, values: Labels, child: Any) -> Iterator[str]:
    """The text before each value of a child, in the order of :func:`_values`."""
    pairs = [f'{name}="{_escape(value)}"' for name, value in zip(family.labels, values, strict=True)]
    plain = f"{{{','.join(sorted(pairs))}}} " if pairs else " "
    if family.kind != "histogram":
        yield family.name + plain
        return
    for bound in child._upper_bounds:  # noqa: SLF001
        yield f"{family.name}_bucket{{{','.join(sorted([*pairs, _le(bound)]))}}} "
    yield f"{family.name}_count{plain}"
    yield f"{family.name}_sum{plain}"


def _values(kind: str, child: Any) -> Iterator[float]:
    if kind != "histogram":
        yield child._value.get()  # noqa: SLF001
        return
    total = 0.0
    for bucket in child._buckets:  # noqa: SLF001
        total += bucket.get()
        yield total
    yield total
    yield child._sum.get()  # noqa: SLF001


def _le(bound: float) -> str:
    return f'le="{"+Inf" if bound == math.inf else repr(float(bound))}"'


def _escape(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
