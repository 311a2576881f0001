"""What the router is compared with in the simulator: the engine's own choice, and the bounds of any choice.

Each serves in arrival order with a fixed number in flight; only the choice of slot differs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmslot.router.values import Decision, Lease, SlotRef

from .modelled import BACKEND
from .traces import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from warmslot.router.residency import Context
    from warmslot.router.values import Outcome, Prompt, Request

    from .replay import Speed
    from .traces import Trace

_HORIZON = 6
"""Calls of a session that are looked ahead: a session may alternate between contexts."""

ENGINE_SIMILARITY = 0.10
"""``--slot-prompt-similarity``: the engine's default."""


@dataclass(slots=True)
class _Slot:
    held: Context | None = None
    busy: bool = False
    last_used: float = -1.0
    session: int = -1


class ArrivalOrder:
    """Base of the rivals: a queue in arrival order and slots that remember what they served."""

    def __init__(self, slots: int, in_flight: int) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._in_flight = in_flight
        self._queue: deque[Request] = deque()
        self._calls: dict[str, tuple[int, Context]] = {}
        self._leases: dict[str, int] = {}

    def expect(self, request: Request, session: int, held: Context) -> None:
        """Told beforehand whose call a request is, and what a slot holds after it."""
        self._calls[request.id] = (session, held)

    def submit(self, request: Request, now: float) -> None:
        """Queue a request."""
        del now
        self._queue.append(request)

    def next_wake(self, now: float) -> float | None:
        """Nothing here depends on time."""
        del now
        return None

    def first_token(self, request_id: str, now: float) -> None:
        """Nothing is learned."""
        del request_id, now

    def grant(self, now: float) -> list[Lease]:
        """In arrival order, as many as may run at once."""
        leases = []
        while self._queue and len(self._leases) < self._in_flight:
            request = self._queue.popleft()
            index = self.choose(request)
            slot = self._slots[index]
            slot.busy = True
            self._leases[request.id] = index
            leases.append(Lease(request, SlotRef(BACKEND, index), Decision.UNPINNED, 0, 0, now))
        return leases

    def finish(self, request_id: str, outcome: Outcome, now: float) -> None:
        """The slot is free and holds prompt and answer."""
        del outcome
        session, held = self._calls.pop(request_id)
        slot = self._slots[self._leases.pop(request_id)]
        slot.busy, slot.last_used, slot.held, slot.session = False, now, held, session

    def choose(self, request: Request) -> int:
        """The slot for a request; some slot is idle."""
        raise NotImplementedError


def _common(slot: _Slot, prompt: Prompt) -> int:
    return slot.held.common(prompt) if slot.held is not None else 0


class EngineSelection(ArrivalOrder):
    """llama-server's own choice: the best similarity above a threshold, else the least recently used slot."""

    def choose(self, request: Request) -> int:
        """Ties go to the highest index, as in the engine."""
        idle = [i for i, slot in enumerate(self._slots) if not slot.busy]
        prompt = request.prompt
        best = max(idle, key=lambda i: _common(self._slots[i], prompt))
        if _common(self._slots[best], prompt) > ENGINE_SIMILARITY * max(1, prompt.length):
            return best
        return min(reversed(idle), key=lambda i: self._slots[i].last_used)


class Clairvoyant(ArrivalOrder):
    """Knows every session's next call: overwrites what will be missed least."""

    def __init__(self, slots: int, in_flight: int, trace: Trace, speed: Speed) -> None:
        super().__init__(slots, in_flight)
        self._sessions, self._speed = trace.sessions, speed
        self._served = [0] * len(trace.sessions)

    def choose(self, request: Request) -> int:
        """The least of: what is computed now, and what overwriting makes to be computed at the next call."""
        session, _ = self._calls[request.id]
        self._served[session] += 1
        best, best_cost = -1, float("inf")
        for index, slot in enumerate(self._slots):
            if slot.busy:
                continue
            shared = _common(slot, request.prompt)
            cost = self._seconds(shared, request.prompt.length)
            cost += self._worth(slot, shared)
            if cost < best_cost:
                best, best_cost = index, cost
        return best

    def _worth(self, slot: _Slot, shared: int) -> float:
        """Seconds that the slot's content will save at its session's next call, beyond what survives."""
        if slot.held is None or slot.session < 0:
            return 0.0
        upcoming = self._served[slot.session]
        calls = self._sessions[slot.session]
        if upcoming >= len(calls):
            return 0.0
        saved = max(_common(slot, call.prompt) for call in calls[upcoming : upcoming + _HORIZON])
        return self._seconds(min(saved, shared), saved)

    def _seconds(self, start: int, end: int) -> float:
        return self._speed.prefill_seconds(start / BYTES_PER_TOKEN, end / BYTES_PER_TOKEN)


class Unbounded(ArrivalOrder):
    """Every context stays for ever: the engine model keeps them, so the slot does not matter."""

    def choose(self, request: Request) -> int:
        """Any idle slot."""
        del request
        return next(i for i, slot in enumerate(self._slots) if not slot.busy)
