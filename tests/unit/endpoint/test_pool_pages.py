"""``/props`` and ``/lora-adapters`` are of a whole pool; the query may name one backend."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.router import Service

LONG = "the same words for everybody " * 20
KEYS = [{"name": "app", "value": "k1", "use": "requests"}, {"name": "ops", "value": "k2", "use": "admin"}]


@asynccontextmanager
async def two(**more: Any) -> AsyncIterator[tuple[Service, FakeLlamaServer, FakeLlamaServer]]:
    """A pool of two backends that differ in size, both with an adapter that is switched on."""
    async with (
        FakeLlamaServer(slots=2, context=1024) as one,
        FakeLlamaServer(slots=3, context=512) as other,
        serving([one, other], **more) as service,
    ):
        for fake in (one, other):
            fake.adapters = [{"id": 0, "path": "a.gguf", "scale": 1.0}]
        yield service, one, other


async def test_props_of_a_pool_add_up() -> None:
    async with two() as (service, one, other):
        answer = await service.http.get("/props")
        told, own = answer.json(), (await service.http.get(f"{one.base_url}/props")).json()
        assert (told["total_slots"], told["default_generation_settings"]["n_ctx"]) == (5, 512)
        own["total_slots"] = 5
        own["default_generation_settings"]["n_ctx"] = 512
        assert told == own
        assert answer.headers["x-warmslot-backend"] == "b0, b1"
        for name, fake in (("b0", one), ("b1", other)):
            its = await service.http.get(f"/props?backend={name}")
            direct = await service.http.get(f"{fake.base_url}/props")
            assert its.content == direct.content
            assert its.headers["x-warmslot-backend"] == name


@pytest.mark.parametrize("page", ["/props", "/props?model=alias"])
async def test_props_are_of_those_that_answer(page: str) -> None:
    async with two() as (service, one, other):
        await one.crash()
        told = (await service.http.get(page)).json()
        assert (told["total_slots"], told["default_generation_settings"]["n_ctx"]) == (3, 512)
        other.missing.add("props")
        refused = await service.http.get(page)
        assert (refused.status_code, refused.json()["error"]["message"]) == (404, "File Not Found")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/props?backend=no", 404),
        ("POST", "/lora-adapters?backend=no", 404),
        ("GET", "/props?model=no", 404),
        ("POST", "/lora-adapters?model=no", 404),
    ],
)
async def test_names_that_do_not_exist(service: Service, method: str, path: str, status: int) -> None:
    answer = await service.http.request(method, path)
    assert answer.status_code == status
    assert "allowed" in answer.json()["error"]["message"]


async def test_an_unknown_backend_is_told_alike_wherever_it_is_named() -> None:
    async with FakeLlamaServer() as fake, serving([fake], endpoint={"slot_actions": True}) as service:
        told = [
            await service.http.request(method, path)
            for method, path in (
                ("GET", "/backends/no/metrics"),
                ("GET", "/props?backend=no"),
                ("GET", "/slots?backend=no"),
                ("GET", "/slots?backend=b0&backend=no"),
                ("POST", "/slots/0?action=erase&backend=no"),
                ("POST", "/lora-adapters?backend=no"),
            )
        ]
        assert {answer.status_code for answer in told} == {404}
        assert {answer.content for answer in told} == {told[0].content}
        error = told[0].json()["error"]
        assert (error["code"], error["message"]) == ("backend_not_found", "backend: not known, allowed: b0")


async def test_a_backend_that_is_down_has_no_props() -> None:
    async with two() as (service, _, _):
        await service.router.dispatcher.fleet.backend_down("b1", "for the test")
        assert (await service.http.get("/props?backend=b1")).status_code == 503
        assert (await service.http.get("/props")).json()["total_slots"] == 2


async def test_adapters_are_set_on_all_and_nothing_is_counted_on_that_others_computed() -> None:
    async with two() as (service, one, other):
        for number in range(5):
            assert (await service.chat(f"mark-{number} {LONG} {number}")).status_code == 200
        assert sum(view.resident_tokens > 0 for view in service.router.dispatcher.slots()) == 5
        answer = await service.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        assert answer.headers["x-warmslot-backend"] == "b0, b1"
        assert [fake.adapters[0]["scale"] for fake in (one, other)] == [0.5, 0.5]
        assert not any(view.resident_tokens or view.known for view in service.router.dispatcher.slots())
        # Nor do the engines hold any of it; and what /slots tells makes nothing known again.
        for name, fake in (("b0", one), ("b1", other)):
            client = service.router.dispatcher.fleet.backend(name)
            assert client is not None
            assert client.client is not None
            service.router.dispatcher.observed(name, await client.client.slots() or [])
            assert not any(len(slot.tokens) > 100 for slot in fake.model.slots)
        assert not any(view.resident_tokens for view in service.router.dispatcher.slots())
        for number in range(5):
            assert (await service.chat(f"mark-{number} {LONG} {number}")).status_code == 200
        again = service.watcher.reports[-5:]
        assert [report.predicted_tokens for report in again] == [0] * 5
        assert [report.cached_tokens for report in again] == [0] * 5
        assert all(sum(report.losses.values()) == report.processed_tokens for report in again)
        # And from then on everything is as ever.
        await service.chat(f"mark-4 {LONG} 4")
        assert service.watcher.reports[-1].cached_tokens > 100


async def test_adapters_wait_for_what_runs() -> None:
    async with two() as (service, one, other):
        one.token.hold()
        running = asyncio.create_task(service.chat("mark-r hello"))
        await one.until(lambda fake: fake.busy == 1)
        setting = asyncio.create_task(service.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.0}]))
        await other.until(lambda fake: fake.adapters[0]["scale"] == 0.0)
        assert one.adapters[0]["scale"] == 1.0
        assert (await service.chat("mark-n meanwhile")).headers["x-warmslot-backend"] == "b1"
        one.token.release()
        assert (await running).status_code == (await setting).status_code == 200
        assert one.adapters[0]["scale"] == 0.0


async def test_two_at_once_leave_all_backends_alike() -> None:
    async with two() as (service, one, other):
        scales = [number / 8 for number in range(8)]
        answers = await asyncio.gather(
            *(service.http.post("/lora-adapters", json=[{"id": 0, "scale": scale}]) for scale in scales)
        )
        assert [answer.status_code for answer in answers] == [200] * 8
        assert one.adapters == other.adapters


async def test_it_waits_for_other_calls_that_need_the_backend_alone() -> None:
    async with two(endpoint={"slot_actions": True}) as (service, one, _):
        one.answering.hold()
        erasing = asyncio.create_task(service.http.post("/slots/0?action=erase", json={}))
        await one.answering.arrived()
        setting = asyncio.create_task(service.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}]))
        again = asyncio.create_task(service.http.post("/slots/1?action=erase", json={}))
        await one.until(lambda fake: fake.requests[-1].path.startswith("/slots/"))
        one.answering.release()
        answers = await asyncio.gather(erasing, setting, again)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert one.adapters[0]["scale"] == 0.5


async def test_a_failure_in_part_names_who_did_and_who_did_not() -> None:
    async with two() as (service, one, other):
        await service.chat(f"mark-w {LONG}")
        other.adapters = []
        answer = await service.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (502, "partly_done")
        assert error["message"] == (
            "lora-adapters: of pool 'm' set on b0; not on b1 (status 400), which gets no requests until it "
            "takes them"
        )
        assert one.adapters[0]["scale"] == 0.5
        assert (await service.chat("mark-o other")).headers["x-warmslot-backend"] == "b0"
        other.refuse()
        answer = await service.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])
        assert "not on b1 (backend 'b1' cannot be connected to)" in answer.json()["error"]["message"]
        await other.accept()
        other.adapters = [{"id": 0, "scale": 1.0}]  # (what it refused is asked of it again)
        await other.until(lambda fake: fake.adapters[0]["scale"] == 0.5)


async def test_what_every_engine_refuses_costs_nothing() -> None:
    async with two() as (service, one, _):
        await service.chat(f"mark-w {LONG}")
        direct = await service.http.post(f"{one.base_url}/lora-adapters", json={"id": 0})
        answer = await service.http.post("/lora-adapters", json={"id": 0})
        assert (answer.status_code, answer.content) == (400, direct.content)
        await service.chat(f"mark-w {LONG}")
        assert service.watcher.reports[-1].cached_tokens > 100


async def test_an_engine_that_dies_meanwhile() -> None:
    async with FakeLlamaServer() as fake, serving([fake]) as service:
        await service.chat(f"mark-d {LONG}")
        fake.answering.hold()
        setting = asyncio.create_task(service.http.post("/lora-adapters", json=[]))
        await fake.answering.arrived()
        await fake.crash()
        answer = await setting
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
        assert not any(view.resident_tokens for view in service.router.dispatcher.slots())
        fake.answering.release()
        await fake.restart()
        assert (await service.chat("mark-b back")).status_code == 200


async def test_adapters_are_for_admins() -> None:
    async with FakeLlamaServer() as fake, serving([fake], keys=KEYS) as service:
        for secret, post, get in (("k1", 403, 200), ("k2", 200, 403)):
            headers = {"authorization": f"Bearer {secret}"}
            assert (await service.http.post("/lora-adapters", json=[], headers=headers)).status_code == post
            assert (await service.http.get("/lora-adapters", headers=headers)).status_code == get
