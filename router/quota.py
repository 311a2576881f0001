"""How many requests of one key run at once, and how many of it may wait for that."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from .config import Key


@dataclass(slots=True)
class _Place:
    room: asyncio.Semaphore
    in_flight: int
    queued: int | None
    waiting: int = 0
    surplus: int = 0
    """Permits that are out or free and belong to an earlier, higher limit; whoever can takes them away."""


class Quota:
    """Counts requests by the name of their key; names without a limit are never held."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._places: dict[str, _Place] = {}
        self.renew(keys)

    def renew(self, keys: Iterable[Key]) -> None:
        """Other limits from now on; what runs and waits counts on. A lower one is reached as requests end."""
        before, self._places = self._places, {}
        for key in keys:
            if key.in_flight is not None:
                place = before.get(key.name) or _Place(
                    asyncio.Semaphore(key.in_flight), key.in_flight, key.queued
                )
                place.surplus += place.in_flight - key.in_flight
                place.in_flight, place.queued = key.in_flight, key.queued
                while place.surplus < 0:
                    place.surplus += 1
                    place.room.release()
                self._places[key.name] = place

    @asynccontextmanager
    async def place(self, name: str) -> AsyncIterator[None]:
        """Enter when the key has room, in order of arrival. Raises 429 where too many wait already."""
        place = self._places.get(name)
        if place is None:
            yield
            return
        if place.room.locked() and place.queued is not None and place.waiting >= place.queued:
            raise errors.key_full(place.in_flight, place.queued)
        place.waiting += 1
        try:
            await self._enter(place)
        finally:
            place.waiting -= 1
        try:
            yield
        finally:
            self._leave(place)

    @staticmethod
    async def _enter(place: _Place) -> None:
        await place.room.acquire()
        while place.surplus > 0:  # this permit is one too many: it is gone, and another is needed
            place.surplus -= 1
            await place.room.acquire()

    @staticmethod
    def _leave(place: _Place) -> None:
        if place.surplus > 0:
            place.surplus -= 1
        else:
            place.room.release()
