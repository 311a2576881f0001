"""Limits of keys that change while their requests run and wait."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from warmslot.router.config import Key
from warmslot.router.errors import RequestError
from warmslot.router.quota import Quota


def keys(in_flight: int | None, queued: int | None = None) -> list[Key]:
    return [Key.model_validate({"name": "a", "value": "s", "in_flight": in_flight, "queued": queued})]


class Requests:
    """Requests of key ``a``, in the order of their numbers."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: list[asyncio.Event] = []
        self.entered: list[int] = []
        self.running = 0

    async def come(self, count: int) -> None:
        """So many more."""
        for _ in range(count):
            self._ends.append(asyncio.Event())
            self._tasks.append(asyncio.create_task(self._one(len(self._tasks))))
        await turns()

    async def end(self, *numbers: int) -> None:
        """These are served."""
        for number in numbers:
            self._ends[number].set()
        await turns()

    async def leave(self, number: int) -> None:
        """The client of this one is gone."""
        self._tasks[number].cancel()
        await turns()

    async def _one(self, number: int) -> None:
        async with self._quota.place("a"):
            self.entered.append(number)
            self.running += 1
            try:
                await self._ends[number].wait()
            finally:
                self.running -= 1

    async def aclose(self) -> None:
        """Nobody is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def turns() -> None:
    """Let everything happen that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_higher_limit_lets_in_who_waits_in_order() -> None:
    quota = Quota(keys(1))
    async with AsyncExitStack() as ends:
        requests = Requests(quota)
        ends.push_async_callback(requests.aclose)
        await requests.come(4)
        assert requests.entered == [0]
        quota.renew(keys(3))
        await turns()
        assert requests.entered == [0, 1, 2]
        await requests.end(1)
        assert requests.entered == [0, 1, 2, 3]


@pytest.mark.parametrize("busy", [0, 1, 4])
async def test_a_lower_limit_is_reached_as_requests_end(busy: int) -> None:
    quota = Quota(keys(4))
    async with AsyncExitStack() as ends:
        requests = Requests(quota)
        ends.push_async_callback(requests.aclose)
        await requests.come(busy)
        quota.renew(keys(2))
        await requests.come(6 - busy)
        assert requests.running == max(busy, 2)
        await requests.end(0, 1)
        assert requests.running == 2
        await requests.end(2, 3)
        assert requests.running == 2
        quota.renew(keys(3))
        await requests.come(4)
        assert requests.running == 3


async def test_one_that_leaves_while_it_waits_takes_nothing_with_it() -> None:
    quota = Quota(keys(3))
    async with AsyncExitStack() as ends:
        requests = Requests(quota)
        ends.push_async_callback(requests.aclose)
        await requests.come(2)
        quota.renew(keys(1))
        await requests.come(1)
        await requests.leave(2)
        await requests.end(0, 1)
        await requests.come(3)
        assert requests.running == 1
        await requests.end(3, 4, 5)
        assert requests.entered[2:] == [3, 4, 5]


async def test_limits_end_and_begin() -> None:
    quota = Quota(keys(1, queued=0))
    async with AsyncExitStack() as ends:
        requests = Requests(quota)
        ends.push_async_callback(requests.aclose)
        await requests.come(1)
        with pytest.raises(RequestError):
            async with quota.place("a"):
                pass
        quota.renew(keys(None))
        await requests.come(5)
        assert requests.running == 6
        quota.renew(keys(1))
        await requests.end(0)
        await requests.come(2)
        assert requests.running == 6
