"""Engines that die, refuse, drop and come back."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.router.values import Status

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import QUICK, chat, serving
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from tests.support.router import Service

CHAT = "/v1/chat/completions"


async def come_back(service: Service) -> None:
    """The engine has died; its launcher says so and starts it anew."""
    await service.router.dispatcher.fleet.backend_down("b0", "it exited")
    await service.fake.restart()
    await service.router.dispatcher.fleet.backend_ready("b0", service.fake.base_url, 4, 2048, fresh=True)


async def test_death_in_mid_stream_is_an_error_event_and_no_end_mark(service: Service) -> None:
    fake = service.fake
    fake.token.hold()
    fake.token.release(2)
    client = await WireClient.post(service.url, CHAT, chat("mark-x hi", stream=True), "Connection: close")
    status, _ = await client.head()
    assert status == 200
    await client.read_until(b"data: ")
    await fake.crash()
    text = await client.rest()
    assert b'"error"' in text
    assert b'"code":"engine_failed"' in text
    assert b"[DONE]" not in text
    assert text.endswith(b"0\r\n\r\n")
    await come_back(service)
    assert service.watcher.outcomes[0].status is Status.ERROR
    assert service.router.dispatcher.held() == {}
    assert all(view.resident_tokens == 0 for view in service.router.dispatcher.slots())
    fake.token.release()
    assert (await service.chat("mark-y hi", max_tokens=6)).status_code == 200


async def test_death_before_the_answer_is_a_502(service: Service) -> None:
    fake = service.fake
    fake.token.hold()
    answer = asyncio.create_task(service.chat("mark-x hi"))
    await fake.until(lambda f: f.busy == 1)
    await fake.crash()
    refused = await answer
    assert refused.status_code == 502
    assert refused.json()["error"]["type"] == "server_error"
    await come_back(service)
    assert service.router.dispatcher.held() == {}


async def test_what_may_have_been_worked_on_is_not_sent_twice(service: Service) -> None:
    service.fake.drop_next = 1
    answer = await service.chat("mark-x hi", max_tokens=6)
    assert answer.status_code == 502
    assert len(service.fake.generations()) == 1
    assert (await service.chat("mark-y hi", max_tokens=6)).status_code == 200


async def test_what_was_not_sent_waits_for_the_restart(service: Service) -> None:
    fake, dispatcher = service.fake, service.router.dispatcher
    await service.chat("mark-w hi", max_tokens=6)
    await fake.crash()
    answer = asyncio.create_task(service.chat("mark-x hi", max_tokens=6))
    await service.watcher.until(lambda _: not dispatcher.fleet.pools["m"][0].usable)
    await come_back(service)
    assert (await answer).status_code == 200
    assert len(fake.generations()) == 2


async def test_a_refused_connection_is_tried_again_on_another_backend() -> None:
    async with FakeLlamaServer() as one, FakeLlamaServer() as two, serving([one, two]) as service:
        await one.crash()
        for number in range(4):
            answer = await service.chat(f"mark-x{number} hi", max_tokens=6)
            assert answer.status_code == 200
            assert answer.headers["x-warmslot-backend"] == "b1"
        assert service.router.dispatcher.held() == {}


async def test_nothing_up_is_a_503_after_the_hold_time() -> None:
    async with (
        FakeLlamaServer() as fake,
        serving([fake], ready=False, timing=replace(QUICK, hold=0.02)) as service,
    ):
        answer = await service.chat("mark-x hi")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "no backend" in answer.json()["error"]["message"]


async def test_queued_requests_are_held_while_their_pool_is_down_and_not_for_ever() -> None:
    async with FakeLlamaServer(slots=1) as fake, serving([fake], timing=replace(QUICK, hold=0.05)) as service:
        fake.token.hold()
        running = asyncio.create_task(service.chat("mark-a hi"))
        await fake.until(lambda f: f.busy == 1)
        queued = asyncio.create_task(service.chat("mark-b hi"))
        await service.watcher.until(lambda w: w.level.get("m") == 2)
        await fake.crash()
        await service.router.dispatcher.fleet.backend_down("b0", "it exited")
        assert (await running).status_code == 502
        assert (await queued).status_code == 503
        assert service.router.dispatcher.queued("m") == 0


async def test_a_fatal_decode_error_reaches_the_client_and_empties_the_picture(service: Service) -> None:
    fake = service.fake
    fake.fail_after = 2
    answer = await service.chat("mark-x hi", stream=True, max_tokens=20)
    assert '"error"' in answer.text
    assert "[DONE]" not in answer.text
    assert service.watcher.outcomes[0].engine_error
    assert (await service.chat("mark-y hi", max_tokens=6)).status_code == 200
    assert fake.violations == []


async def test_a_fatal_decode_error_in_one_piece(service: Service) -> None:
    service.fake.fail_after = 2
    answer = await service.chat("mark-x hi", max_tokens=20)
    assert answer.status_code == 500
    assert service.watcher.outcomes[0].engine_error


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_without_timings_are_counted(service: Service, stream: bool) -> None:
    service.fake.missing |= {"timings", "usage"}
    assert (await service.chat("mark-x hi", stream=stream, max_tokens=6)).status_code == 200
    assert await service.metric("warmslot_truth_missing_total", backend="b0") == 1


async def test_a_backend_elsewhere_comes_up_goes_down_and_comes_back() -> None:
    async with FakeLlamaServer() as fake, serving([fake], ready=False) as service:
        dispatcher = service.router.dispatcher
        dispatcher.fleet.watch_remote("b0", fake.base_url)
        await service.watcher.until(lambda w: w.changes == [("b0", True)])
        assert (await service.chat("mark-x hi", max_tokens=6)).status_code == 200
        await fake.crash()
        await service.watcher.until(lambda w: w.changes[-1] == ("b0", False))
        await fake.restart()
        await service.watcher.until(lambda w: w.changes[-1] == ("b0", True))
        assert (await service.chat("mark-y hi", max_tokens=6)).status_code == 200
        assert await service.metric("warmslot_backend_restarts_total", reason="health") == 1


async def test_a_backend_that_still_loads_is_not_up() -> None:
    async with FakeLlamaServer(loading=True) as fake, serving([fake], ready=False) as service:
        service.router.dispatcher.fleet.watch_remote("b0", fake.base_url)
        await fake.until(lambda f: len(f.requests) >= 3)
        assert service.watcher.changes == []
        fake.loaded()
        await service.watcher.until(lambda w: w.changes == [("b0", True)])


async def all_are_sent_away(service: Service) -> None:
    """Whatever is asked of a router that stops, and by a load balancer: not now, and when to come back."""
    http, body = service.http, chat("hi", max_tokens=2)
    for answer in (
        await http.get("/health"),
        await http.get("/v1/health"),
        await http.post("/v1/chat/completions", json=body),
        await http.post("/v1/messages", json=body),
        await http.post("/v1/embeddings", json={"input": "hi"}),
        await http.post("/tokenize", json={"content": "hi"}),
        await http.get("/props"),
        await http.post("/lora-adapters", json=[]),
    ):
        assert answer.status_code == 503
        assert "stopping" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1


async def test_draining_sends_the_queue_away_and_waits_for_what_runs() -> None:
    async with FakeLlamaServer(slots=1) as fake, serving([fake]) as service:
        fake.token.hold()
        running = asyncio.create_task(service.chat("mark-a hi", max_tokens=6))
        await fake.until(lambda f: f.busy == 1)
        queued = asyncio.create_task(service.chat("mark-b hi"))
        await service.watcher.until(lambda w: w.level.get("m") == 2)
        drained = asyncio.create_task(service.router.dispatcher.drain())
        assert (await queued).status_code == 503
        await all_are_sent_away(service)
        assert not drained.done()
        fake.token.release()
        assert (await running).status_code == 200
        await drained


async def test_slots_are_counted_where_props_does_not_tell() -> None:
    async with FakeLlamaServer(slots=3) as fake, serving([fake], ready=False) as service:
        fake.missing |= {"total_slots", "default_generation_settings"}
        service.router.dispatcher.fleet.watch_remote("b0", fake.base_url)
        await service.watcher.until(lambda w: w.changes == [("b0", True)])
        assert len(service.router.dispatcher.slots()) == 3


@pytest.mark.parametrize(
    "missing",
    [
        *("slots", "id", "is_processing", "id_task", "n_prompt_tokens", "n_ctx", "metrics"),
        *("total_slots", "default_generation_settings", "model_alias", "apply-template"),
        *("timings", "usage", "prompt_n", "cache_n", "prompt_ms"),
    ],
)
async def test_a_build_that_lacks_something_and_has_other_things_is_served(
    missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it lacks is said once at most."""
    async with FakeLlamaServer() as fake, serving([fake], ready=False) as service:
        fake.missing.add(missing)
        fake.unknown_fields = True
        service.router.dispatcher.fleet.watch_remote("b0", fake.base_url)
        await service.watcher.until(lambda w: w.changes == [("b0", True)])
        messages: list[Any] = [{"role": "user", "content": "mark-t " + "tell me of the sea " * 20}]
        for turn in range(3):
            for path in (CHAT, "/v1/messages"):
                body = {"messages": messages, "max_tokens": 4, "stream": turn == 1}
                answer = await service.http.post(path, json=body)
                assert answer.status_code == 200
                assert "echo" in answer.text
            messages += [{"role": "assistant", "content": "aye"}, {"role": "user", "content": "go on"}]
        for number in range(2):
            fake.token.hold()
            gone = await WireClient.post(service.url, CHAT, chat(f"mark-g{number} hi", stream=True))
            await fake.until(lambda f: f.busy == 1)
            gone.leave()
            await service.watcher.until(lambda w: w.level["m"] == 0)
            fake.token.release()
        assert (await service.http.get("/metrics")).status_code == 200
        assert (await service.http.get("/backends/b0/metrics")).status_code in {200, 501}
        assert (await service.http.get("/slots")).status_code in {200, 501}
        assert service.router.dispatcher.held() == {}
        assert fake.violations == []
    told = Counter(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert max(told.values(), default=0) <= 1


async def test_a_backend_of_no_use_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeLlamaServer() as fake, serving([fake], ready=False) as service:
        fake.missing |= {"total_slots", "slots"}
        service.router.dispatcher.fleet.watch_remote("b0", fake.base_url)
        await fake.until(lambda f: [r.path for r in f.requests].count("/props") >= 3)
        assert service.watcher.changes == []
        assert len([r for r in caplog.records if "of no use" in r.getMessage()]) == 1
