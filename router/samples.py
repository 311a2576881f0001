"""What a quantity was of late: how often above a value, and at most up to one. Pure."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

_LAST = 512


@dataclass(slots=True)
class Samples:
    """The last observations of a quantity, sorted as well as in order of arrival."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    ordered: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """One more; beyond 512 the oldest is forgotten."""
        if len(self.recent) == _LAST:
            self.ordered.pop(bisect_right(self.ordered, self.recent[0]) - 1)
        self.recent.append(value)
        insort(self.ordered, value)

    def above(self, value: float) -> int:
        """How many are greater than ``value``."""
        return len(self.ordered) - bisect_right(self.ordered, value)

    def most(self, value: float) -> float | None:
        """The greatest that is no greater than ``value``; ``None`` if there is none."""
        at = bisect_right(self.ordered, value)
        return self.ordered[at - 1] if at else None
