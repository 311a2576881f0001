"""Who goes next. Pure: the caller gives the waiting requests and a function that places one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .placement import Choice
    from .values import Request

InFlight = Literal["serialize", "pair", "slots", "auto"]
Queue = Literal["reuse", "fifo"]

_WAIT_FLOOR = 30.0
_WAIT_FACTOR = 4.0


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
    """One request in the queue. Token counts and seconds are as of the last look at the slots."""

    request: Request
    order: int
    """Arrival number within the pool."""
    since: float
    prompt_tokens: int = 0
    idle_tokens: int = 0
    """The most prompt tokens that a slot holds which could be taken now."""
    best_tokens: int = 0
    """The most prompt tokens that any slot holds."""
    prefill_seconds: float = 0.0
    """To compute what ``idle_tokens`` leaves."""
    total_seconds: float = 0.0
    """To compute all of it."""


@dataclass(frozen=True, slots=True)
class Picked:
    """Who goes next, and where."""

    waiting: Waiting
    choice: Choice


def in_flight_limit(policy: InFlight, slots: int) -> int:
    """How many requests may run at once on a backend of ``slots`` slots."""
    if policy == "serialize":
        return 1
    return min(slots, 2) if policy in {"pair", "auto"} else slots


def wait_bound(waiting: Sequence[Waiting], settings: CoreSettings) -> float:
    """The bound on waiting in force, in seconds: the setting, or one that grows with the work that waits."""
    if settings.max_wait is not None:
        return settings.max_wait
    return max(_WAIT_FLOOR, _WAIT_FACTOR * sum(w.total_seconds for w in waiting))


def pick(
    waiting: Sequence[Waiting],
    settings: CoreSettings,
    now: float,
    place: Callable[[Waiting], Choice | None],
) -> Picked | None:
    """The request that starts next and its slot, or ``None`` when none can start now.

    ``fifo``: in arrival order. ``reuse``: those that waited longer than the bound, in arrival order, then by
    the least prefill that is left.
    """
    bound = wait_bound(waiting, settings)

    def rank(w: Waiting) -> tuple[int, float, int]:
        if settings.queue == "fifo" or now - w.since >= min(bound, w.request.max_wait or bound):
            return (0, 0.0, w.order)
        return (1, w.prefill_seconds, w.order)

    for candidate in sorted(waiting, key=rank):
        choice = place(candidate)
        if choice is not None:
            return Picked(candidate, choice)
    return None


def next_wake(waiting: Sequence[Waiting], settings: CoreSettings, now: float) -> float | None:
    """When ``pick`` could answer differently though nothing else happens."""
    if settings.queue == "fifo" or not waiting:
        return None
    bound = wait_bound(waiting, settings)
    ends = [w.since + min(bound, w.request.max_wait or bound) for w in waiting]
    return min((end for end in ends if end > now), default=None)
