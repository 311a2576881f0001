"""How likely a conversation is to be asked for again, learned from the gaps between its calls. Pure.

A survival estimate (Kaplan-Meier): for each step of idle time, of those conversations that were still silent,
how many returned within the step. Conversations that are still silent count as long as they were watched, so
ended ones pull the chance down without anybody saying that they ended. Old observations fade.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

_FIRST_EDGE = 0.01
_RATIO = 1.5
_STEPS = 32
EDGES = tuple(_FIRST_EDGE * _RATIO**step for step in range(_STEPS))
"""Upper ends of the steps of idle time, seconds: 10 ms to about 48 minutes; the last step is open."""

_FADE = 0.995
_PRIOR_WEIGHT = 1.0
_PRIOR_HAZARD = 0.1
"""Before anything was seen: each step of silence sees one in ten return."""

_LONGEST_LINGER = 2.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """An observation that can be taken back when a conversation that was given up returns after all."""

    kind: int
    step: int
    weight: float


def kind_of(turns: int) -> int:
    """One-shot requests, young and long conversations behave differently: 0, 1 or 2."""
    return 0 if turns <= 1 else 1 if turns <= 3 else 2  # noqa: PLR2004  # the classes themselves


class Returns:
    """Return chances of one pool's conversations."""

    def __init__(self) -> None:
        kinds = range(3)
        self._returned = [[0.0] * (_STEPS + 1) for _ in kinds]
        self._ended = [[0.0] * (_STEPS + 1) for _ in kinds]
        """Weight of conversations that returned in a step, and that were last seen silent in it."""
        self._weight = 1.0
        self._curves: dict[int, list[float]] = {}

    def saw_return(self, turns: int, gap: float) -> None:
        """A conversation of ``turns`` calls was asked for again ``gap`` seconds after its last answer."""
        self._fade()
        self._returned[kind_of(turns)][bisect_right(EDGES, gap)] += self._weight

    def saw_silence(self, turns: int, idle: float) -> Sighting:
        """A conversation was given up after ``idle`` seconds without a call."""
        self._fade()
        kind, step = kind_of(turns), bisect_right(EDGES, idle)
        self._ended[kind][step] += self._weight
        return Sighting(kind, step, self._weight)

    def take_back(self, sighting: Sighting) -> None:
        """The conversation of a :meth:`saw_silence` did return; tell :meth:`saw_return` as well."""
        ended = self._ended[sighting.kind]
        ended[sighting.step] = max(0.0, ended[sighting.step] - sighting.weight)
        self._curves.clear()

    def chance(self, turns: int, idle: float) -> float:
        """Chance in [0, 1] that a conversation that has been silent for ``idle`` seconds returns at all."""
        return 1.0 - self._silent(kind_of(turns))[bisect_right(EDGES, idle)]

    def chance_within(self, turns: int, idle: float, seconds: float) -> float:
        """Chance that it returns in the next ``seconds``."""
        silent = self._silent(kind_of(turns))
        start = silent[bisect_right(EDGES, idle)]
        stop = silent[bisect_right(EDGES, idle + seconds)]
        return 1.0 - start / stop if stop > 0 else 1.0

    def linger(self, turns: int, worth: float) -> float:
        """How long to hold a slot for a conversation that was answered just now, in seconds.

        ``worth``: the seconds that its return would save. The hold is the time after which the expected
        saving, less the expected waiting, is largest; 0 when no hold pays.
        """
        silent = self._silent(kind_of(turns))
        best, hold, waited, stayed = 0.0, 0.0, 0.0, 1.0
        for step, edge in enumerate(EDGES):
            if edge > _LONGEST_LINGER:
                break
            left = silent[0] / silent[step + 1] if silent[step + 1] > 0 else 0.0
            waited += (edge - (EDGES[step - 1] if step else 0.0)) * stayed
            stayed = left
            gain = (1.0 - left) * worth - waited
            if gain > best:
                best, hold = gain, edge
        return hold

    def _silent(self, kind: int) -> list[float]:
        """For each step: the chance to stay silent from its start for ever."""
        curve = self._curves.get(kind)
        if curve is None:
            curve = [1.0] * (_STEPS + 2)
            at_risk = _PRIOR_WEIGHT * self._weight
            for step in range(_STEPS, -1, -1):
                at_risk += self._returned[kind][step] + self._ended[kind][step]
                returned = self._returned[kind][step] + _PRIOR_HAZARD * _PRIOR_WEIGHT * self._weight
                curve[step] = curve[step + 1] * (1.0 - min(1.0, returned / at_risk))
            self._curves[kind] = curve
        return curve

    def _fade(self) -> None:
        """Newer observations weigh more; rescale now and then so that numbers stay small."""
        self._curves.clear()
        self._weight /= _FADE
        if self._weight > 1e6:  # noqa: PLR2004  # any large number
            for table in (*self._returned, *self._ended):
                table[:] = [value / self._weight for value in table]
            self._weight = 1.0
