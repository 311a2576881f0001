"""How soon, and how often, a backend that dies is started again. Pure: time and chance come in."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often, and how soon, a backend that dies is started again. Times in seconds."""

    first: float = 0.5
    """Wait before the first restart; it doubles with each further crash."""
    ceiling: float = 30.0
    jitter: float = 0.25
    """Share by which a wait is varied either way, so that several backends do not load in step."""
    budget: int = 8
    """Restarts within ``window``; one more crash and the backend has failed."""
    window: float = 600.0
    forgive: float = 3600.0
    """A life that was ready for this long clears all that came before."""


class Restarts:
    """The restart decision for one backend."""

    def __init__(self, policy: RestartPolicy, chance: Callable[[], float] = random.random) -> None:
        self._policy = policy
        self._chance = chance
        self._crashes: deque[float] = deque()
        self._streak = 0

    def crashed(self, now: float, ready_for: float = 0.0) -> float | None:
        """Note a crash after ``ready_for`` seconds of service: the wait for a restart, ``None``: give up."""
        policy = self._policy
        if ready_for >= policy.forgive:
            self.clear()
        while self._crashes and self._crashes[0] <= now - policy.window:
            self._crashes.popleft()
        if len(self._crashes) >= policy.budget:
            return None
        self._crashes.append(now)
        wait = min(policy.ceiling, policy.first * 2.0 ** min(self._streak, 32))
        self._streak += 1
        return wait * (1 + policy.jitter * (2 * self._chance() - 1))

    def clear(self) -> None:
        """Forget all crashes."""
        self._crashes.clear()
        self._streak = 0
