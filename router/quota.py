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


class Quota:
    """Counts requests by the name of their key; names without a limit are never held."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._places = {
            key.name: _Place(asyncio.Semaphore(key.in_flight), key.in_flight, key.queued)
            for key in keys
            if key.in_flight is not None
        }

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
            await place.room.acquire()
        finally:
            place.waiting -= 1
        try:
            yield
        finally:
            place.room.release()
