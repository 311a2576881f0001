"""Who goes next. Pure: the caller gives the waiting requests with their best placements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .placement import Choice
    from .values import Request

InFlight = Literal["serialize", "pair", "slots", "auto"]
Queue = Literal["reuse", "fifo"]


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """A pool's policy. ``None`` for a time means that the core adapts it to the load. Times are seconds."""

    in_flight: InFlight = "auto"
    queue: Queue = "reuse"
    max_wait: float | None = None
    linger: float | None = None
    max_queue: int = 1024


@dataclass(slots=True)
class Waiting:
    """One request in the queue. ``choice`` is where it could run at this moment, if anywhere."""

    request: Request
    order: int
    """Arrival number within the pool."""
    since: float
    choice: Choice | None = None


def in_flight_limit(policy: InFlight, slots: int) -> int:
    """How many requests may run at once on a backend of ``slots`` slots."""
    if policy == "serialize":
        return 1
    return min(slots, 2) if policy in {"pair", "auto"} else slots


def pick(waiting: Sequence[Waiting], settings: CoreSettings, now: float) -> Waiting | None:
    """The request that starts next among those that can, or ``None`` to wait."""
    del settings, now
    return min((w for w in waiting if w.choice is not None), key=lambda w: w.order, default=None)


def next_wake(waiting: Sequence[Waiting], settings: CoreSettings, now: float) -> float | None:
    """When ``pick`` could answer differently though nothing else happens."""
    del waiting, settings, now
    return None
