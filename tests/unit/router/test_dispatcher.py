"""Leases come and go exactly once, whatever is cancelled when."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warmslot.router.backend import EngineUnreachable
from warmslot.router.backends import NoBackendError, PoolRemovedError, StoppingError
from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.dispatcher import Dispatcher
from warmslot.router.settling import Timing
from warmslot.router.values import Outcome, Prompt, Request, Status

from tests.support.router import Watcher
from tests.support.scripted_engine import ScriptedEngine, turns

if TYPE_CHECKING:
    from warmslot.router.values import Lease

AT_ONCE = Timing(first_check=0, recheck=0, blind=0, health=0.01, hold=5)
OK = Outcome(Status.OK, cached_tokens=0, processed_tokens=5, output_tokens=1)


class World:
    """A dispatcher over scripted engines."""

    def __init__(self, *, slots: int = 3, timing: Timing = AT_ONCE) -> None:
        self.slots = slots
        self.engines: list[ScriptedEngine] = []
        self.watcher = Watcher()
        core = RouterCore({"m": CoreSettings(in_flight="slots", queue="fifo", linger=0)})
        self.dispatcher = Dispatcher(
            core,
            {"m": ["b"]},
            connect=cast("Any", self._connect),
            observers=[self.watcher],
            timing=timing,
        )

    def _connect(self, name: str, url: str) -> ScriptedEngine:
        self.engines.append(ScriptedEngine(name, url, self.slots))
        return self.engines[-1]

    @property
    def engine(self) -> ScriptedEngine:
        """The engine that runs now."""
        return self.engines[-1]

    async def up(self) -> None:
        """The backend starts."""
        await self.dispatcher.fleet.backend_ready(
            "b", f"http://{len(self.engines)}", self.slots, 1000, fresh=True
        )

    def acquire(self, request_id: str, **more: Any) -> asyncio.Task[Lease]:
        """Ask for a lease, in a task."""
        prompt = Prompt.of(f"{request_id} says something".encode())
        request = Request(id=request_id, prompt=prompt, pool="m", **more)
        return asyncio.create_task(self.dispatcher.acquire(request))


@pytest.fixture
async def world() -> World:
    world = World()
    await world.up()
    return world


async def test_a_lease_comes_without_waiting_where_a_slot_is_idle(world: World) -> None:
    lease = await world.acquire("a")
    assert world.dispatcher.held().keys() == {"a"}
    report = world.dispatcher.finish("a", OK)
    assert report.slot == lease.slot
    assert world.dispatcher.held() == {}


async def test_a_lease_ends_once(world: World) -> None:
    await world.acquire("a")
    world.dispatcher.finish("a", OK)
    for end in (world.dispatcher.finish, world.dispatcher.abandon):
        with pytest.raises(KeyError):
            end("a", OK)
    await world.acquire("b")
    world.dispatcher.sending("b")
    world.dispatcher.abandon("b", OK)
    for end in (world.dispatcher.finish, world.dispatcher.abandon):
        with pytest.raises(KeyError):
            end("b", OK)
    with pytest.raises(KeyError):
        world.dispatcher.unsent("b")
    await world.dispatcher.aclose()


async def test_cancelling_while_queued_withdraws(world: World) -> None:
    for name in "abc":
        await world.acquire(name)
    task = world.acquire("d")
    await turns()
    assert world.dispatcher.queued("m") == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.dispatcher.queued("m") == 0
    world.dispatcher.finish("a", OK)
    assert world.dispatcher.held().keys() == {"b", "c"}


async def test_cancelling_while_the_lease_is_on_its_way_gives_it_back(world: World) -> None:
    for name in "abc":
        await world.acquire(name)
    task, other = world.acquire("d"), world.acquire("e")
    await turns()
    world.dispatcher.finish("a", OK)
    assert "d" in world.dispatcher.held()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await other).request.id == "e"
    assert world.dispatcher.held().keys() == {"b", "c", "e"}
    assert [r.status for r in world.watcher.reports] == [Status.OK, Status.CANCELLED]


async def test_cancelling_in_the_very_call_that_gets_the_lease_keeps_it_usable(world: World) -> None:
    """``acquire`` does not yield when a slot is idle, so a cancellation comes at the taker's next wait."""

    async def take() -> None:
        await world.dispatcher.acquire(Request(id="a", prompt=Prompt.of(b"x"), pool="m"))
        try:
            await turns()
        except asyncio.CancelledError:
            world.dispatcher.abandon("a", Outcome(Status.CANCELLED))
            raise

    task = asyncio.create_task(take())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.dispatcher.held() == {}


async def test_what_was_never_sent_is_free_at_once(world: World) -> None:
    await world.acquire("a")
    world.dispatcher.abandon("a", Outcome(Status.CANCELLED))
    assert world.dispatcher.held() == {}
    assert world.watcher.outcomes[0].untouched


async def test_one_idle_answer_does_not_free_what_may_not_have_started(world: World) -> None:
    lease = await world.acquire("a")
    world.dispatcher.sending("a")
    world.engine.send("a", lease.slot.slot)
    world.dispatcher.abandon("a", Outcome(Status.CANCELLED))
    await turns(5)
    world.engine.answer(as_asked=True)
    await turns(5)
    assert world.dispatcher.held().keys() == {"a"}
    world.engine.answer()
    await turns(5)
    assert world.dispatcher.held().keys() == {"a"}, "it has started in between"
    world.engine.drop("a")
    world.engine.answer()
    await turns(5)
    assert world.dispatcher.held() == {}


async def test_another_task_on_the_slot_means_that_ours_is_over(world: World) -> None:
    lease = await world.acquire("a")
    world.dispatcher.sending("a")
    world.engine.running[lease.slot.slot] = "a"
    world.dispatcher.abandon("a", Outcome(Status.CANCELLED))
    await turns(5)
    world.engine.answer()
    await turns(5)
    assert world.dispatcher.held().keys() == {"a"}
    world.engine.running[lease.slot.slot] = "somebody else's"
    world.engine.answer()
    await turns(5)
    assert world.dispatcher.held() == {}
    await world.dispatcher.aclose()


async def test_a_look_that_was_asked_before_the_leaving_proves_nothing(world: World) -> None:
    first, second = await world.acquire("a"), await world.acquire("b")
    for lease in (first, second):
        world.dispatcher.sending(lease.request.id)
        world.dispatcher.started(lease.request.id)
    world.dispatcher.abandon("a", Outcome(Status.CANCELLED))
    await turns(5)
    world.dispatcher.abandon("b", Outcome(Status.CANCELLED))
    world.engine.answer()
    await turns(5)
    assert "a" not in world.dispatcher.held()
    assert "b" in world.dispatcher.held()
    world.engine.answer()
    await turns(5)
    assert world.dispatcher.held() == {}


async def test_looks_stop_when_nothing_is_open(world: World) -> None:
    await world.acquire("a")
    world.dispatcher.sending("a")
    world.dispatcher.started("a")
    world.dispatcher.abandon("a", Outcome(Status.CANCELLED))
    await turns(5)
    world.engine.answer()
    await turns(20)
    assert world.engine.looks == 1
    assert world.engine.asks == []


async def test_an_unknown_backend_is_looked_at_once(world: World) -> None:
    await world.dispatcher.fleet.backend_ready("b", "http://elsewhere", 3, 1000, fresh=False)
    await turns(5)
    world.engine.answer()
    await turns(20)
    assert world.engine.looks == 1
    assert world.engines[0].closed


@dataclass(frozen=True)
class Selected:
    """A line of the engine's log: a slot was chosen."""

    slot: int
    by: str


@pytest.mark.parametrize("by", ["id", "lcp", "lru"])
async def test_who_uses_the_engine_past_the_router_is_noticed_by_its_log(world: World, by: str) -> None:
    world.engine.running[1] = "somebody else's"
    world.dispatcher.fleet.log_event("b", Selected(1, by))
    await turns(5)
    world.engine.answer()
    await turns(5)
    leases = [await world.acquire(name) for name in "ac"]
    assert {lease.slot.slot for lease in leases} == {0, 2}
    last = world.acquire("d")
    await turns(5)
    assert not last.done()
    world.engine.drop("somebody else's")
    world.engine.answer()
    assert (await last).slot.slot == 1
    await turns(5)
    assert world.engine.asks == []


async def test_a_drain_lasts_when_a_call_that_had_the_backend_to_itself_ends(world: World) -> None:
    fleet = world.dispatcher.fleet
    async with fleet.alone("b"):
        await fleet.backend_draining("b")
    task = world.acquire("a")
    await turns(5)
    assert not task.done()
    assert world.dispatcher.queued("m") == 1
    await fleet.backend_down("b", "it was stopped")
    await world.up()
    await task


async def test_what_the_log_tells_of_our_own_requests_needs_no_look(world: World) -> None:
    lease = await world.acquire("a")
    world.dispatcher.fleet.log_event("b", Selected(lease.slot.slot, "id"))
    world.dispatcher.finish("a", OK)
    await world.acquire("b", pinned=False, keeps_prefix=False)
    world.dispatcher.fleet.log_event("b", Selected(2, "lru"))
    await turns(5)
    assert world.engine.looks == 0
    await world.dispatcher.aclose()


async def test_a_second_report_of_the_same_service_changes_nothing(world: World) -> None:
    await world.acquire("a")
    await world.dispatcher.fleet.backend_ready("b", "http://0", 3, 1000, fresh=False)
    assert world.watcher.changes == [("b", True)]
    assert world.dispatcher.held().keys() == {"a"}


async def test_a_lease_of_an_earlier_life_ends_with_it(world: World) -> None:
    lease = await world.acquire("a")
    world.dispatcher.sending("a")
    await world.dispatcher.fleet.backend_down("b", "it exited")
    await world.up()
    with pytest.raises(EngineUnreachable):
        world.dispatcher.client(lease)
    for name in "bcd":
        await world.acquire(name)
    world.dispatcher.abandon("a", Outcome(Status.ERROR))
    assert world.dispatcher.held().keys() == {"b", "c", "d"}
    assert world.engine.looks == 0


async def test_waiting_for_a_pool_that_is_down_has_a_bound() -> None:
    world = World(timing=Timing(hold=0.01))
    with pytest.raises(NoBackendError):
        await world.acquire("a")
    with pytest.raises(NoBackendError):
        await world.dispatcher.engine("m")
    assert world.dispatcher.queued("m") == 0


async def test_no_more_requests_once_it_drains(world: World) -> None:
    await world.acquire("a")
    drained = asyncio.create_task(world.dispatcher.drain())
    await turns(2)
    with pytest.raises(StoppingError):
        await world.acquire("b")
    assert not drained.done()
    world.dispatcher.finish("a", OK)
    await drained


@pytest.mark.parametrize("unpinned_first", [True, False])
async def test_what_the_engine_places_runs_alone(world: World, unpinned_first: bool) -> None:
    kinds = [False, True] if unpinned_first else [True, False]
    first = world.acquire("a", pinned=kinds[0], keeps_prefix=kinds[0])
    second = world.acquire("b", pinned=kinds[1], keeps_prefix=kinds[1])
    await turns(3)
    assert first.done()
    assert not second.done()
    world.dispatcher.first_token("a")
    await turns(3)
    assert second.done() is False
    world.dispatcher.finish("a", Outcome(Status.OK))
    assert (await second).request.id == "b"
    world.dispatcher.finish("b", OK)
    await world.dispatcher.aclose()


STEPS = (
    *("submit", "submit", "submit", "cancel", "cancel at once", "turn"),
    *("send", "send", "launch", "launch", "first byte", "complete", "complete"),
    *("abandon", "abandon", "notice", "answer", "answer", "unsent", "restart"),
)


class Play:
    """Carries out a list of steps and checks after each that no slot has two requests."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tasks: dict[str, asyncio.Task[Lease]] = {}
        self.granted: dict[str, tuple[Lease, ScriptedEngine]] = {}
        self.sent: set[str] = set()
        self.left: set[str] = set()
        self.number = 0

    async def step(self, step: str, choice: int) -> None:
        """One step; those for which there is no candidate do nothing."""
        engine, dispatcher = self.world.engine, self.world.dispatcher
        if step in {"submit", "cancel at once"}:
            name = f"r{self.number}"
            self.number += 1
            self.tasks[name] = self.world.acquire(name)
            if step == "cancel at once":
                await turns(choice % 3)
                self.tasks[name].cancel()
        elif step == "cancel" and (name := self._pick(self.tasks, choice)):
            self.tasks[name].cancel()
        elif step == "turn":
            await turns(choice % 4)
        elif step == "answer" and engine.asks:
            engine.answer(as_asked=choice % 2 == 1)
            await turns(3)
        elif step == "restart":
            await dispatcher.fleet.backend_down("b", "it exited")
            await self.world.up()
        elif step == "launch" and (name := self._pick(engine.waiting, choice)):
            engine.launch(name)
        elif step == "notice" and (name := self._pick(self.left, choice)):
            self.granted[name][1].drop(name)
        else:
            self._use_lease(step, choice)
        if choice != 0:
            await turns(2)
        await self._collect()
        self._check()

    def _use_lease(self, step: str, choice: int) -> None:
        dispatcher = self.world.dispatcher
        name = self._pick([one for one in self.granted if one not in self.left], choice)
        if name is None:
            return
        lease, engine = self.granted[name]
        if step == "send" and name not in self.sent:
            with contextlib.suppress(EngineUnreachable):
                dispatcher.client(lease)
                dispatcher.sending(name)
                engine.send(name, lease.slot.slot)
                self.sent.add(name)
        elif step == "first byte" and name in engine.running.values():
            dispatcher.started(name)
            dispatcher.first_token(name)
        elif step == "complete" and name in engine.running.values():
            engine.drop(name)
            dispatcher.finish(name, OK)
            del self.granted[name]
        elif step == "abandon":
            self.left.add(name)
            dispatcher.abandon(name, Outcome(Status.CANCELLED))
        elif step == "unsent" and name not in self.sent:
            dispatcher.unsent(name)
            del self.granted[name]

    def _pick(self, names: Any, choice: int) -> str | None:
        ordered = sorted(names)
        return ordered[choice % len(ordered)] if ordered else None

    async def _collect(self) -> None:
        for name, task in list(self.tasks.items()):
            if task.done():
                del self.tasks[name]
                if not task.cancelled():
                    self.granted[name] = (task.result(), self.world.engine)

    def _check(self) -> None:
        engine, held = self.world.engine, self.world.dispatcher.held()
        slots = [
            h.lease.slot for h in held.values() if h.life is self.world.dispatcher.fleet.pools["m"][0].life
        ]
        assert len(slots) == len(set(slots))
        for slot, name in [*engine.running.items(), *((s, n) for n, s in engine.waiting.items())]:
            assert name in held, f"{name} runs on slot {slot} without a lease"

    async def end(self) -> None:
        """Everybody leaves, the engine notices, and all slots can be leased again."""
        for task in self.tasks.values():
            task.cancel()
        await turns(3)
        await self._collect()
        for name in [one for one in self.granted if one not in self.left]:
            self.left.add(name)
            self.world.dispatcher.abandon(name, Outcome(Status.CANCELLED))
        for engine in self.world.engines:
            engine.waiting.clear()
            engine.running.clear()
        while self.world.dispatcher.held():
            await turns(3)
            assert self.world.engine.asks, "a lease is held and nobody looks after it"
            self.world.engine.answer()
            await turns(3)
        counts = [report.request.id for report in self.world.watcher.reports]
        assert len(counts) == len(set(counts)) == len(self.world.watcher.granted_leases) + self._undelivered()
        assert self.world.watcher.level.get("m", 0) == 0
        leases = [await self.world.acquire(f"last{n}") for n in range(self.world.slots)]
        assert len({lease.slot for lease in leases}) == self.world.slots
        await self.world.dispatcher.aclose()

    def _undelivered(self) -> int:
        """Leases that the core gave to requests that were gone: reported as finished, never as granted."""
        granted = {lease.request.id for lease in self.world.watcher.granted_leases}
        return sum(report.request.id not in granted for report in self.world.watcher.reports)


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), min_size=15, max_size=80))
@settings(max_examples=150, deadline=None)
def test_no_order_of_events_loses_doubles_or_frees_early(steps: list[tuple[str, int]]) -> None:
    async def play() -> None:
        world = World()
        await world.up()
        plot = Play(world)
        for step, choice in steps:
            await plot.step(step, choice)
        await plot.end()

    asyncio.run(play())


async def test_a_backend_that_is_removed_cuts_off_its_leases_and_another_of_its_name_knows_nothing_of_them(
    world: World,
) -> None:
    dispatcher = world.dispatcher
    for name in "abc":
        lease = await world.acquire(name)
    waiting = world.acquire("d")
    dispatcher.sending("b")
    dispatcher.abandon("b", OK)
    await dispatcher.fleet.remove_backend("b")
    assert dispatcher.fleet.backend("b") is None
    assert dispatcher.held().keys() == {"a", "c"}
    with pytest.raises(EngineUnreachable):
        dispatcher.client(lease)
    dispatcher.fleet.add_backend("b", "m")
    await world.up()
    await waiting
    for name in "ac":
        dispatcher.finish(name, Outcome(Status.ERROR, engine_error=True))
    assert dispatcher.held().keys() == {"d"}
    assert dispatcher.finish("d", OK).status is Status.OK
    await dispatcher.aclose()


async def test_a_pool_that_is_removed_refuses_what_waits_and_lets_end_what_runs(world: World) -> None:
    dispatcher = world.dispatcher
    for name in "abc":
        await world.acquire(name)
    waiting, unused = world.acquire("d"), asyncio.create_task(dispatcher.unused("m"))
    await turns()
    await dispatcher.fleet.remove_backend("b")
    removing = asyncio.create_task(dispatcher.remove_pool("m"))
    with pytest.raises(PoolRemovedError):
        await waiting
    with pytest.raises(PoolRemovedError):
        await world.acquire("late")
    for name in "abc":
        await turns()
        assert not removing.done()
        assert not unused.done()
        dispatcher.finish(name, OK)
    await removing
    await unused
    assert dispatcher.fleet.pools == {}
    with pytest.raises(PoolRemovedError):
        await world.acquire("e")
    with pytest.raises(PoolRemovedError):
        await dispatcher.engine("m")
    dispatcher.add_pool("m", CoreSettings())
    dispatcher.fleet.add_backend("b", "m")
    await world.up()
    assert (await world.acquire("f")).slot.backend == "b"
    await dispatcher.aclose()


async def test_who_waits_for_a_pool_hears_that_it_is_removed(world: World) -> None:
    await world.dispatcher.fleet.backend_down("b", "a crash")
    asking = asyncio.create_task(world.dispatcher.engine("m"))
    await turns()
    await world.dispatcher.fleet.remove_backend("b")
    await world.dispatcher.remove_pool("m")
    with pytest.raises(PoolRemovedError):
        await asking


async def test_another_bound_for_what_is_held_counts_at_once(world: World) -> None:
    await world.dispatcher.fleet.backend_down("b", "a crash")
    waiting = world.acquire("a")
    await turns()
    world.dispatcher.hold_for(0)
    with pytest.raises(NoBackendError):
        await waiting
