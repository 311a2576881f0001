"""LoRA scales that were set over HTTP are in force on every later life of a backend before it is used."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.router.adapters import Scales

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import config_for, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.router import Service

LONG = "the same words for everybody " * 20
WANTED = [{"id": 0, "scale": 0.5}]


def as_its_flags_say(fake: FakeLlamaServer) -> None:
    """With one adapter, wholly on."""
    fake.adapters = [{"id": 0, "path": "a.gguf", "scale": 1.0}]


def scale(fake: FakeLlamaServer) -> float:
    return float(fake.adapters[0]["scale"])


def told(fake: FakeLlamaServer) -> int:
    """How often it was told scales."""
    return sum((one.method, one.path) == ("POST", "/lora-adapters") for one in fake.requests)


async def start_anew(service: Service, number: int = 0, *, lora: bool = True) -> None:
    """A backend's engine dies, and another takes its place."""
    fake, dispatcher = service.engines[number], service.router.dispatcher
    assert isinstance(fake, FakeLlamaServer)
    await dispatcher.fleet.backend_down(f"b{number}", "it exited")
    await fake.crash()
    fake.adapters = []
    if lora:
        as_its_flags_say(fake)
    await fake.restart()
    await dispatcher.fleet.backend_ready(f"b{number}", fake.base_url, fake.n_slots, fake.context, fresh=True)


@asynccontextmanager
async def pool_of(count: int, **more: Any) -> AsyncIterator[tuple[Service, list[FakeLlamaServer]]]:
    """A pool of engines with an adapter, on all of which it is set to a half."""
    fakes = [FakeLlamaServer(slots=2) for _ in range(count)]
    for fake in fakes:
        as_its_flags_say(fake)
        await fake.start()
    try:
        async with serving(fakes, **more) as service:
            assert (await service.http.post("/lora-adapters", json=WANTED)).status_code == 200
            yield service, fakes
    finally:
        for fake in fakes:
            await fake.crash()


def withheld(service: Service, name: str) -> str:
    backend = service.router.dispatcher.fleet.backend(name)
    assert backend is not None
    return backend.withheld


async def test_they_are_set_again_before_anything_is_served() -> None:
    async with pool_of(1) as (service, [fake]):
        await service.router.dispatcher.fleet.backend_down("b0", "it exited")
        as_its_flags_say(fake)
        asking = asyncio.create_task(service.chat("mark-a Hello"))
        await service.watcher.until(lambda seen: ("b0", False) in seen.changes)
        fake.answering.hold()
        coming = asyncio.create_task(
            service.router.dispatcher.fleet.backend_ready("b0", fake.base_url, 2, 2048, fresh=True)
        )
        await fake.answering.arrived()
        assert fake.requests[-1].path == "/lora-adapters"
        assert not asking.done()
        assert not coming.done()
        assert withheld(service, "b0")
        fake.answering.release()
        await coming
        assert (withheld(service, "b0"), scale(fake)) == ("", 0.5)
        assert (await asking).status_code == 200
        assert told(fake) == 2
        await start_anew(service)
        assert (scale(fake), told(fake)) == (0.5, 3)


async def test_whoever_was_down_or_comes_later_has_them_too() -> None:
    async with pool_of(2) as (service, [one, other]), FakeLlamaServer() as third:
        await service.router.dispatcher.fleet.backend_down("b1", "it exited")
        answer = await service.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.25}])
        assert (answer.status_code, answer.headers["x-warmslot-backend"]) == (200, "b0")
        await start_anew(service, 1)
        assert (scale(one), scale(other)) == (0.25, 0.25)
        as_its_flags_say(third)
        service.router.reconfigure(config_for(3))
        await service.router.dispatcher.fleet.backend_ready("b2", third.base_url, 4, 2048, fresh=True)
        assert scale(third) == 0.25


async def test_one_that_refuses_gets_nothing_until_it_takes_them(caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of(2) as (service, [_, other]):
        await start_anew(service, 1, lora=False)
        reason = withheld(service, "b1")
        assert reason.endswith("not in force on it: it refused them (status 400: invalid adapter id)")
        for number in range(4):
            assert (await service.chat(f"mark-{number} {number}")).headers["x-warmslot-backend"] == "b0"
        before = told(other)
        await other.until(lambda fake: told(fake) > before + 2)
        assert sum("b1 gets no requests" in line for line in caplog.messages) == 1
        as_its_flags_say(other)
        await other.until(lambda fake: scale(fake) == 0.5)
        running = [asyncio.create_task(service.chat(f"mark-x {number}")) for number in range(8)]
        await other.until(lambda fake: fake.generations())
        assert {(await one).status_code for one in running} == {200}
        assert withheld(service, "b1") == ""


async def test_what_no_engine_has_any_more_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of(2) as (service, [one, _]):
        await start_anew(service, 0, lora=False)
        assert withheld(service, "b0")
        await service.router.dispatcher.fleet.backend_down("b1", "for the test")
        assert (await service.chat("mark-f Hello")).headers["x-warmslot-backend"] == "b0"
        assert any(
            "pool m: the LoRA scales that were set over HTTP are forgotten" in m for m in caplog.messages
        )
        await start_anew(service, 0)
        assert scale(one) == 1.0


async def test_what_may_pass_is_waited_for() -> None:
    async with pool_of(1) as (service, [fake]):
        fake.loading = True
        await service.router.dispatcher.fleet.backend_down("b0", "it exited")
        as_its_flags_say(fake)
        await service.router.dispatcher.fleet.backend_ready("b0", fake.base_url, 2, 2048, fresh=True)
        assert "status 503: Loading model" in withheld(service, "b0")
        asking = asyncio.create_task(service.chat("mark-w Hello"))
        before = told(fake)
        await fake.until(lambda fake: told(fake) > before + 1)
        assert not asking.done()
        fake.loaded()
        assert (await asking).status_code == 200
        assert scale(fake) == 0.5


async def test_other_scales_free_one_that_refuses() -> None:
    async with pool_of(2) as (service, [one, other]):
        await start_anew(service, 1, lora=False)
        assert withheld(service, "b1")
        answer = await service.http.post("/lora-adapters", json=[])
        assert (answer.status_code, answer.headers["x-warmslot-backend"]) == (200, "b0, b1")
        assert (scale(one), other.adapters) == (0.0, [])
        assert withheld(service, "b1") == ""


async def test_an_engine_that_was_started_anew_unseen_is_told_before_it_is_trusted() -> None:
    async with pool_of(1) as (service, [fake]):
        await fake.crash()
        asking = asyncio.create_task(service.chat("mark-u Hello"))
        await service.watcher.until(lambda seen: seen.reports)
        as_its_flags_say(fake)
        await fake.restart()
        assert (await asking).status_code == 200
        assert (scale(fake), told(fake)) == (0.5, 2)


async def test_one_that_was_only_out_of_reach_keeps_what_it_holds() -> None:
    async with pool_of(1) as (service, [fake]):
        await service.chat(f"mark-k {LONG}")
        fake.refuse()
        asking = asyncio.create_task(service.chat(f"mark-k {LONG}"))
        await service.watcher.until(lambda seen: len(seen.reports) == 2)
        await fake.accept()
        assert (await asking).status_code == 200
        assert told(fake) == 1
        assert service.watcher.reports[-1].cached_tokens > 100


async def test_what_was_put_back_from_files_counts_only_with_the_scales_that_filled_it() -> None:
    async with pool_of(1) as (service, [fake]):
        dispatcher = service.router.dispatcher
        await service.chat(f"mark-p {LONG}")
        held, mark = dispatcher.contents("b0"), dispatcher.fleet.mark_of("b0")
        assert len(held) == 1
        for filled_with, kept in ((mark, True), ("", False)):
            await dispatcher.fleet.backend_down("b0", "it exited")
            as_its_flags_say(fake)
            await dispatcher.fleet.backend_ready(
                "b0", fake.base_url, 2, 2048, fresh=True, restored=held, restored_with=filled_with
            )
            assert scale(fake) == 0.5
            assert bool(dispatcher.contents("b0")) is kept
            backend = dispatcher.fleet.backend("b0")
            assert backend is not None
            assert backend.filled_with == mark


async def test_a_backend_can_have_scales_of_its_own() -> None:
    async with pool_of(2) as (service, [one, other]):
        answer = await service.http.post("/lora-adapters?backend=b1", json=[{"id": 0, "scale": 0.125}])
        assert answer.headers["x-warmslot-backend"] == "b1"
        for number in (0, 1):
            await start_anew(service, number)
        assert (scale(one), scale(other)) == (0.5, 0.125)
        await service.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.75}])
        for number in (0, 1):
            await start_anew(service, number)
        assert (scale(one), scale(other)) == (0.75, 0.75)


async def test_what_was_refused_by_all_is_not_kept() -> None:
    async with pool_of(1) as (service, [fake]):
        assert (await service.http.post("/lora-adapters", json=[{"id": 7, "scale": 1}])).status_code == 400
        await start_anew(service)
        assert scale(fake) == 0.5


async def test_a_pool_that_comes_again_knows_nothing_of_its_namesake() -> None:
    async with pool_of(1) as (service, [fake]):
        router, dispatcher = service.router, service.router.dispatcher
        await router.remove_backend("b0")
        await router.remove_pool("m")
        router.reconfigure(config_for(1))
        as_its_flags_say(fake)
        await dispatcher.fleet.backend_ready("b0", fake.base_url, 2, 2048, fresh=True)
        assert scale(fake) == 1.0


async def test_clients_keys_are_used_again_where_they_are_the_engines_own() -> None:
    async with FakeLlamaServer(api_key="engine") as fake, serving([fake]) as service:
        as_its_flags_say(fake)
        headers = {"authorization": "Bearer engine"}
        assert (await service.http.post("/lora-adapters", json=WANTED, headers=headers)).status_code == 200
        await start_anew(service)
        assert scale(fake) == 0.5


async def test_whoever_comes_after_one_that_was_killed_goes_on_with_them(tmp_path: Path) -> None:
    file = tmp_path / "lora-scales.json"
    async with FakeLlamaServer() as fake, serving([fake]) as service:
        as_its_flags_say(fake)
        service.router.lasting.scales.keep_in(file)
        assert (await service.http.post("/lora-adapters", json=WANTED)).status_code == 200
        await service.http.post("/lora-adapters?backend=b0", json=[{"id": 0, "scale": 0.75}])
        await service.chat(f"mark-k {LONG}")
        async with serving([fake], ready=False) as second:
            second.router.lasting.scales.keep_in(file)
            ready = second.router.dispatcher.fleet.backend_ready
            await ready("b0", fake.base_url, 4, 2048, fresh=False)  # it lived on
            assert (scale(fake), told(fake)) == (0.75, 2)
            await ready("b0", fake.base_url, 4, 2048, fresh=True)
            as_its_flags_say(fake)
            await start_anew(second)
            assert scale(fake) == 0.75
            second.router.lasting.scales.keep_no_more()
        assert not file.exists()


@pytest.mark.parametrize(
    "text", ["", "7", '[{"pool": "m"}]', '[["m"]]', '[{"pool":"m","backend":null,"scales":1}]']
)
async def test_a_damaged_file_costs_no_more_than_a_warning(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "lora-scales.json"
    file.write_text(text)
    async with FakeLlamaServer() as fake, serving([fake], ready=False) as service:
        as_its_flags_say(fake)
        service.router.lasting.scales.keep_in(file)
        assert "cannot be read" in caplog.text
        await service.router.dispatcher.fleet.backend_ready("b0", fake.base_url, 4, 2048, fresh=True)
        assert (scale(fake), told(fake)) == (1.0, 0)


def test_scales_are_alike_however_they_are_written() -> None:
    half = Scales(b'[{"id": 0, "scale": 0.5}]')
    assert half.mark == Scales(b'[{"scale":5e-1,"id":0},{"id":1,"scale":0}]').mark
    other = [Scales(b'[{"id": 0, "scale": 1}]'), Scales(b"[]"), Scales(b'{"new": "form"}'), Scales(b"\xff")]
    assert len({one.mark for one in (half, *other)}) == 5
    assert half.mark
    assert "secret" not in repr(Scales(b"[]", [(b"authorization", b"secret")]))
