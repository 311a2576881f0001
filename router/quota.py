"""How many requests of one key run at once, and how many of it may wait for that.

Who runs is decided at once, whenever somebody comes, goes or gets another limit; a request that waits awaits
only the news. So it does not matter when that reaches it, nor whether it is cancelled on the way.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from .config import Key


@dataclass(slots=True)
class _Line:
    """The requests of one key. Whoever waits does so because ``in_flight`` run."""

    in_flight: int | None = None
    queued: int | None = None
    running: int = 0
    waiting: dict[Place, None] = field(default_factory=dict)
    """In order of arrival."""

    @property
    def full(self) -> bool:
        return self.in_flight is not None and self.running >= self.in_flight

    def let_in(self) -> None:
        """Everybody for whom there is room, in order."""
        while self.waiting and not self.full:
            place = next(iter(self.waiting))
            del self.waiting[place]
            self.running += 1
            place.news.set()


class Place:
    """One request among those of its key: it waits until it is let in, runs, and leaves."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self.news = asyncio.Event()

    @property
    def let_in(self) -> bool:
        """Whether it may run."""
        return self.news.is_set()

    async def wait(self) -> None:
        """Return when it may run. Cancelled, it still has its place, and has to :meth:`leave`."""
        await self.news.wait()

    def leave(self) -> None:
        """It is over, or waits no longer: its place is the next one's. Exactly once."""
        if self.let_in:
            self._line.running -= 1
            self._line.let_in()
        else:
            del self._line.waiting[self]


class Quota:
    """Counts requests by the name of their key; names without a limit are never held."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._lines: dict[str, _Line] = {}
        self.renew(keys)

    def renew(self, keys: Iterable[Key]) -> None:
        """Other limits from now on, for what waits as well. A lower one is reached as requests end."""
        limits = {key.name: key for key in keys if key.in_flight is not None}
        for name in limits.keys() | self._lines.keys():
            line, key = self._lines.setdefault(name, _Line()), limits.get(name)
            line.in_flight, line.queued = (None, None) if key is None else (key.in_flight, key.queued)
            line.let_in()
            if key is None and not line.running:
                del self._lines[name]

    def enter(self, name: str) -> Place:
        """A request more: it is let in, or waits behind those that came before.

        Raises 429 where too many wait already.
        """
        line = self._lines.setdefault(name, _Line())
        if line.full and line.queued is not None and len(line.waiting) >= line.queued:
            raise errors.key_full(line.running, line.queued)
        place = Place(line)
        line.waiting[place] = None
        line.let_in()
        return place

    @asynccontextmanager
    async def place(self, name: str) -> AsyncIterator[None]:
        """Enter when the key has room, in order of arrival. Raises 429 where too many wait already."""
        place = self.enter(name)
        try:
            await place.wait()
            yield
        finally:
            place.leave()
