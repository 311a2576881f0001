"""Limits of keys that change while their requests run and wait."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from warmslot.router.config import Key
from warmslot.router.errors import RequestError
from warmslot.router.quota import Place, Quota


def keys(in_flight: int | None, queued: int | None = None) -> list[Key]:
    return [Key.model_validate({"name": "a", "value": "s", "in_flight": in_flight, "queued": queued})]


def running(places: list[Place]) -> list[int]:
    """The numbers of those that are let in."""
    return [number for number, place in enumerate(places) if place.let_in]


def test_a_higher_limit_lets_in_who_waits_in_order() -> None:
    quota = Quota(keys(1))
    places = [quota.enter("a") for _ in range(4)]
    assert running(places) == [0]
    quota.renew(keys(3))
    assert running(places) == [0, 1, 2]
    places[1].leave()
    assert running(places) == [0, 1, 2, 3]


@pytest.mark.parametrize("busy", [0, 1, 4])
def test_a_lower_limit_is_reached_as_requests_end(busy: int) -> None:
    quota = Quota(keys(4))
    places = [quota.enter("a") for _ in range(busy)]
    quota.renew(keys(2))
    places += [quota.enter("a") for _ in range(6 - busy)]
    first = max(busy, 2)
    assert running(places) == list(range(first))
    for ended in range(first - 2):
        places[ended].leave()
        assert running(places) == list(range(first))
    places[first - 1].leave()
    assert running(places) == list(range(first + 1))


def test_one_that_leaves_while_it_waits_takes_nothing_with_it() -> None:
    quota = Quota(keys(3))
    places = [quota.enter("a") for _ in range(2)]
    quota.renew(keys(1))
    places.append(quota.enter("a"))
    places[2].leave()
    places[0].leave()
    places += [quota.enter("a") for _ in range(3)]
    assert running(places) == [0, 1]
    for ended, then in ((1, 3), (3, 4), (4, 5)):
        places[ended].leave()
        assert running(places)[-1] == then


def test_too_many_that_wait_are_refused() -> None:
    quota = Quota(keys(1, queued=1))
    first, second = quota.enter("a"), quota.enter("a")
    with pytest.raises(RequestError):
        quota.enter("a")
    first.leave()
    assert second.let_in
    assert not quota.enter("a").let_in


def test_limits_end_and_begin() -> None:
    quota = Quota(keys(1))
    places = [quota.enter("a") for _ in range(6)]
    quota.renew(keys(None))
    assert running(places) == list(range(6))
    quota.renew(keys(1, queued=0))
    places[0].leave()
    with pytest.raises(RequestError):  # what began without a limit counts
        quota.enter("a")


async def test_one_that_is_cancelled_as_it_is_let_in_passes_its_place_on() -> None:
    quota, at_work = Quota(keys(1)), asyncio.Event()

    async def work() -> None:
        async with quota.place("a"):
            at_work.set()
            await asyncio.Event().wait()

    first = asyncio.create_task(work())
    await at_work.wait()
    second = asyncio.create_task(work())
    await asyncio.sleep(0)  # it comes, and waits
    third = quota.enter("a")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not third.let_in  # the place is the second one's, which has not heard of it yet
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert third.let_in


class Histories(RuleBasedStateMachine):
    """Any order of coming, leaving, cancelling and other limits, against what a list says."""

    def __init__(self) -> None:
        super().__init__()
        self.limit: int | None = 2
        self.queued: int | None = None
        self.quota = Quota(keys(self.limit))
        self.here: list[Place] = []
        self.inside: set[Place] = set()

    @rule()
    def come(self) -> None:
        waiting = sum(not place.let_in for place in self.here)
        full = self.limit is not None and len(self.here) - waiting >= self.limit
        if full and self.queued is not None and waiting >= self.queued:
            with pytest.raises(RequestError):
                self.quota.enter("a")
        else:
            self.here.append(self.quota.enter("a"))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """One that runs ends, or one that waits is cancelled."""
        self.here.pop(data.draw(st.integers(0, len(self.here) - 1))).leave()

    @rule(limit=st.one_of(st.none(), st.integers(1, 4)), queued=st.one_of(st.none(), st.integers(0, 3)))
    def renew(self, limit: int | None, queued: int | None) -> None:
        self.limit, self.queued = limit, queued if limit is not None else None
        self.quota.renew(keys(self.limit, self.queued))

    @invariant()
    def first_come_first_served_up_to_the_limit(self) -> None:
        stay = sum(place in self.inside for place in self.here)  # a lower limit sends nobody away
        room = len(self.here) if self.limit is None else min(self.limit, len(self.here))
        let_in = max(stay, room)
        assert [place.let_in for place in self.here] == [True] * let_in + [False] * (len(self.here) - let_in)
        self.inside = {place for place in self.here if place.let_in}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
