"""An engine whose every step is taken by the test: no HTTP, no clock, nothing happens by itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from warmslot.router.backend import Health
from warmslot.router.values import SlotObservation


async def turns(count: int = 1) -> None:
    """Let the event loop run everything that is ready, ``count`` times over."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        done = loop.create_future()
        loop.call_soon(done.set_result, None)
        await done


@dataclass
class ScriptedEngine:
    """Stands in for :class:`EngineClient`, with the slots of the engine behind it."""

    name: str
    base_url: str
    count: int = 3
    waiting: dict[str, int] = field(default_factory=dict)
    """Requests that were sent and have not started: id -> slot."""
    running: dict[int, str] = field(default_factory=dict)
    """Requests at work: slot -> id."""
    asks: list[tuple[asyncio.Future[list[SlotObservation] | None], list[SlotObservation]]] = field(
        default_factory=list
    )
    looks: int = 0
    closed: bool = False
    _seen_waiting: set[str] = field(default_factory=set)

    async def slots(self) -> list[SlotObservation] | None:
        """Wait until the test answers."""
        self.looks += 1
        answer: asyncio.Future[list[SlotObservation] | None] = asyncio.get_running_loop().create_future()
        self.asks.append((answer, self._picture()))
        return await answer

    async def health(self) -> Health:
        """Always well."""
        return Health.OK

    async def aclose(self) -> None:
        """Nothing is open."""
        self.closed = True

    def send(self, request_id: str, slot: int) -> None:
        """A request has arrived."""
        self.waiting[request_id] = slot

    def launch(self, request_id: str) -> None:
        """A request that waited starts."""
        slot = self.waiting.pop(request_id)
        assert slot not in self.running, "two requests on one slot"
        self.running[slot] = request_id

    def drop(self, request_id: str) -> None:
        """A request ends, for whatever reason."""
        self.waiting.pop(request_id, None)
        self.running = {slot: one for slot, one in self.running.items() if one != request_id}

    def answer(self, *, as_asked: bool = False) -> None:
        """Answer the oldest look with what is true now, or with what was true when it was asked."""
        answer, picture = self.asks.pop(0)
        if not answer.done():
            answer.set_result(picture if as_asked else self._picture())

    def _picture(self) -> list[SlotObservation]:
        """What ``/slots`` says now.

        What had waited at the last picture has started by now: the engine takes its queue in between.
        """
        for request_id in self._seen_waiting & self.waiting.keys():
            self.launch(request_id)
        self._seen_waiting = set(self.waiting)
        return [
            SlotObservation(
                slot,
                processing=slot in self.running,
                task=hash(self.running[slot]) if slot in self.running else None,
                resident_tokens=0,
            )
            for slot in range(self.count)
        ]
