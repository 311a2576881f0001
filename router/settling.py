"""When a slot whose answer nobody reads any more is free: the engine's ``/slots`` says, asked sparingly."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from .backend import EngineBroke, EngineError, EngineUnreachable
from .pace import Pacer
from .values import Outcome, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from .values import Lease, SlotObservation

log = logging.getLogger("warmslot.router")

_SURE = 2
"""Idle answers in a row after which even a request that the engine never answered cannot start any more."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How patient the dispatcher is, in seconds."""

    first_check: float = 1.25
    """From leaving an answer to the first look at ``/slots``: an engine notices within a second."""
    recheck: float = 2.0
    """Between two looks: more often, and the engine notices later."""
    blind: float = 60.0
    """How long a left slot is kept back where the engine has no ``/slots`` to ask."""
    health: float = 2.0
    """Between two looks at ``/health``."""
    hold: float = 60.0
    """How long requests wait while no backend of their pool is up."""


@dataclass(slots=True, eq=False)
class Held:
    """A lease that is out."""

    lease: Lease
    life: SlotWatch
    """The backend's life that it belongs to: it is over with that life."""
    slots: frozenset[int]
    sent: bool = False
    """The engine may know of it."""
    started: bool = False
    """The engine has answered something, so it is or was in a slot."""
    decoding: bool = False
    left: float | None = None
    """When its answer was left unread (clock time)."""
    outcome: Outcome = field(default_factory=lambda: Outcome(Status.CANCELLED))
    task: int | None = None
    """The engine's id of it, where ``/slots`` has shown it."""
    idle_answers: int = 0
    hurry: bool = False
    """The engine's log mentioned a release of its slot: look at once."""

    @property
    def pinned(self) -> bool:
        """Whether its slots are those that the lease names, and not the engine's choice."""
        return self.lease.request.pinned


def is_free(held: Held, seen: Sequence[SlotObservation], pinned: Collection[int]) -> bool:
    """Whether this answer of ``/slots``, asked after the request was left, proves its slots to be free.

    Remembers in ``held`` what it learned. ``pinned`` are all slots with a pinned lease; a request whose slot
    the engine chose is over when nothing but those is at work.

    One idle answer proves nothing for a request of which the engine has shown no sign: ``/slots`` overtakes
    what waits in the engine's queue, so the request may be about to start. What waited when one answer was
    given has started before the next one.
    """
    own = [one for one in seen if (one.slot in held.slots if held.pinned else one.slot not in pinned)]
    if held.pinned and len(own) < len(held.slots):
        return False
    working = [one for one in own if one.processing]
    if not working:
        held.idle_answers += 1
        return held.started or held.idle_answers >= _SURE
    held.idle_answers = 0
    held.started = True
    if len(own) > 1 or not held.pinned:
        return False
    task = working[0].task
    if held.task is None:
        held.task = task
        return False
    return task is not None and task != held.task


class Owner(Protocol):
    """Who owns the leases: the dispatcher."""

    def slots_seen(
        self, life: SlotWatch, free: Sequence[tuple[Held, Outcome]], others: Sequence[SlotObservation]
    ) -> None:
        """These leases are over; and this is what the engine says of slots that no lease has touched."""

    def slots_hidden(self, life: SlotWatch) -> None:
        """The backend has no ``/slots`` to ask: nothing more will be heard of slots without a lease."""

    def slots_unseen(self, life: SlotWatch, error: Exception) -> None:
        """The backend did not answer at all."""


class _Asked(Protocol):
    @property
    def name(self) -> str: ...

    async def slots(self) -> list[SlotObservation] | None: ...


class SlotWatch:
    """The leases of one backend from its start to its end, and the looks at ``/slots`` that settle them."""

    def __init__(
        self, client: _Asked, owner: Owner, timing: Timing, clock: Callable[[], float], count: int
    ) -> None:
        self._client = client
        self._owner = owner
        self._timing = timing
        self._clock = clock
        self._changes = [0] * count
        self.count = count
        """How many slots the backend has."""
        self._blind = False
        self._wanted = False
        self._pacer = Pacer(self._due, self._look, clock)
        self.held: dict[str, Held] = {}
        self.idle = asyncio.Event()
        """Set while no lease is out."""
        self.idle.set()

    def add(self, held: Held) -> None:
        """A lease was given out."""
        self.held[held.lease.request.id] = held
        self.idle.clear()
        self._touch(held)

    def remove(self, held: Held) -> None:
        """It was taken back."""
        del self.held[held.lease.request.id]
        if not self.held:
            self.idle.set()
        self._touch(held)

    def leave(self, held: Held, outcome: Outcome) -> None:
        """Nobody reads its answer any more."""
        held.left, held.outcome = self._clock(), outcome
        self._pacer.poke()

    def want(self) -> None:
        """Something about the slots is not known: look soon, until none is at work that has no lease."""
        self._wanted = True
        self._pacer.poke()

    def selected(self, slot: int) -> None:
        """The engine's log tells that this slot begins something. If that is no lease of ours, look.

        The line may be late, and what it tells of over by now; so it proves nothing, but is reason enough.
        """
        if not any(slot in held.slots or not held.pinned for held in self.held.values()):
            self.want()

    def released(self, slot: int) -> None:
        """The engine's log tells of a release, perhaps of the lease before: look at once if it may matter."""
        for held in self.held.values():
            if held.left is not None and (slot in held.slots or not held.pinned):
                held.hurry = True
                self._pacer.poke()

    def stop(self) -> None:
        """The backend's life is over."""
        self._pacer.stop()

    def _touch(self, held: Held) -> None:
        for slot in held.slots if held.pinned else range(len(self._changes)):
            self._changes[slot] += 1

    def _left(self) -> Iterable[Held]:
        return (held for held in self.held.values() if held.left is not None)

    def _due(self, last: float) -> float | None:
        timing, due = self._timing, math.inf
        patience = timing.blind if self._blind else timing.first_check
        for held in self._left():
            if held.hurry:
                return self._clock()
            due = min(due, (held.left or 0.0) + patience)
        if self._wanted and not self._blind:
            due = min(due, last + timing.recheck)
        return None if due == math.inf else max(due, last + timing.recheck)

    async def _look(self) -> None:
        for held in self.held.values():
            held.hurry = False
        before, asked = list(self._changes), self._clock()
        try:
            seen = await self._client.slots()
        except (EngineUnreachable, EngineBroke) as error:
            self._owner.slots_unseen(self, error)
            return
        except EngineError:
            seen = None
        if seen is None:
            self._see_nothing()
        else:
            self._blind = False
            self._see(seen, before, asked)

    def _see_nothing(self) -> None:
        if not self._blind:
            self._blind = True
            log.warning(
                "backend %s has no /slots to ask: a slot whose client left is kept back for %g s",
                self._client.name,
                self._timing.blind,
            )
            self._owner.slots_hidden(self)
        limit = self._clock() - self._timing.blind
        free = [held for held in self._left() if (held.left or 0.0) <= limit]
        self._owner.slots_seen(self, [(held, held.outcome) for held in free], [])

    def _see(self, seen: Sequence[SlotObservation], before: Sequence[int], asked: float) -> None:
        """An answer says nothing of slots that were leased or taken back while it was on its way."""
        pinned = {slot for held in self.held.values() if held.pinned for slot in held.slots}
        resident = {one.slot: one.resident_tokens for one in seen}
        free = []
        for held in self._left():
            if (held.left or 0.0) <= asked and is_free(held, seen, pinned):
                outcome = held.outcome
                if held.pinned and len(held.slots) == 1:
                    outcome = replace(outcome, resident_tokens=resident[held.lease.slot.slot])
                free.append((held, outcome))
        quiet = all(held.pinned for held in self.held.values())
        others = [
            one
            for one in seen
            if quiet
            and one.slot < len(before)
            and before[one.slot] == self._changes[one.slot]
            and one.slot not in pinned
        ]
        self._wanted = not quiet or any(one.processing for one in others)
        self._owner.slots_seen(self, free, others)
