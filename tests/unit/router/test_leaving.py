"""Clients that leave: no slot is lost, none is freed before the engine says so."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.router.settling import Timing
from warmslot.router.values import Status

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import QUICK, chat, serving
from tests.support.scripted_engine import turns
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from tests.support.router import Service

CHAT = "/v1/chat/completions"


@dataclass
class Released:
    """What the log of a launched engine tells of a slot that was let go."""

    slot: int
    truncated: bool = False


async def all_four_slots_serve(service: Service) -> None:
    """Four requests at once each get a slot of their own."""
    service.fake.token.hold()
    tasks = [asyncio.create_task(service.chat(f"mark-q{n} hi", max_tokens=6)) for n in range(4)]
    await service.fake.until(lambda f: f.busy == 4)
    service.fake.token.release()
    for number, answer in enumerate(await asyncio.gather(*tasks)):
        assert f"mark-q{number}" in answer.text
    assert service.fake.violations == []
    assert service.fake.deferred_total == 0


async def test_leaving_while_queued_withdraws_the_request(service: Service) -> None:
    fake = service.fake
    fake.token.hold()
    runs = [asyncio.create_task(service.chat(f"mark-{n} hi", max_tokens=6)) for n in range(4)]
    await fake.until(lambda f: f.busy == 4)
    client = await WireClient.post(service.url, CHAT, chat("mark-x hi"))
    await service.watcher.until(lambda w: w.level["m"] == 5)
    client.leave()
    await service.watcher.until(lambda w: w.level["m"] == 4)
    assert service.router.dispatcher.queued("m") == 0
    fake.token.release()
    await asyncio.gather(*runs)
    assert len(fake.generations()) == 4
    assert await service.metric("warmslot_requests_total", outcome="cancelled") == 1
    await all_four_slots_serve(service)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_byte_keeps_the_slot_until_the_engine_lets_go(
    service: Service, stream: bool
) -> None:
    fake = service.fake
    fake.prefill.hold()
    fake.notice.hold()
    client = await WireClient.post(service.url, CHAT, chat("mark-x hi", stream=stream))
    await fake.prefill.arrived()
    client.leave()
    await fake.notice.arrived()
    # The engine has not noticed: /slots shows it at work, look after look.
    looks = [r for r in fake.requests if r.path == "/slots"]
    await fake.until(lambda f: len([r for r in f.requests if r.path == "/slots"]) >= len(looks) + 3)
    assert len(service.router.dispatcher.held()) == 1
    fake.notice.release()
    await service.watcher.until(lambda w: w.reports)
    assert service.watcher.reports[0].status is Status.CANCELLED
    assert fake.busy == 0
    fake.prefill.release()
    await all_four_slots_serve(service)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_gave_up_and_asks_again_finds_the_work_done(
    service: Service, stream: bool
) -> None:
    fake = service.fake
    await service.chat("mark-o something else " * 20, max_tokens=2)
    fake.token.hold()
    body = chat("mark-x " + "so much to read " * 40, stream=stream, max_tokens=4)
    client = await WireClient.post(service.url, CHAT, body)
    await fake.token.arrived()
    client.leave()
    await service.watcher.until(lambda w: len(w.reports) == 2)
    fake.token.release()
    again = await service.http.post(CHAT, json={**body, "stream": False})
    assert int(again.headers["x-warmslot-slot"]) == service.watcher.reports[1].slot.slot
    assert again.json()["timings"]["prompt_n"] == 1
    assert abs(int(again.headers["x-warmslot-predicted-tokens"]) - again.json()["timings"]["cache_n"]) <= 1


@pytest.mark.parametrize("looked", [-10.0, -1.9, -0.1])
async def test_a_slot_is_asked_for_within_two_seconds_of_its_clients_leaving(looked: float) -> None:
    """``looked``: when ``/slots`` was asked last, in seconds from the leaving."""
    async with FakeLlamaServer() as fake, serving([fake], timing=Timing()) as service:
        fake.token.hold()
        client = await WireClient.post(service.url, CHAT, chat("mark-x hi", stream=True))
        fake.token.release(1)
        await client.head()
        [held] = service.router.dispatcher.held().values()
        client.leave()
        await fake.until(lambda f: f.busy == 0)
        assert held.left is not None
        due = held.life._due(held.left + looked)
        assert due is not None
        assert 0 <= due - held.left <= 2
        service.router.dispatcher.fleet.log_event("b0", Released(held.lease.slot.slot))
        await service.watcher.until(lambda w: w.reports)


async def test_leaving_in_mid_stream(service: Service) -> None:
    fake = service.fake
    fake.token.hold()
    fake.token.release(3)
    client = await WireClient.post(service.url, CHAT, chat("mark-x hi", stream=True, max_tokens=100))
    await client.head()
    await client.read_until(b"data: ")
    client.leave()
    await service.watcher.until(lambda w: w.reports)
    assert service.watcher.reports[0].status is Status.CANCELLED
    assert fake.busy == 0
    fake.token.release()
    await all_four_slots_serve(service)


async def test_leaving_while_another_streams(service: Service) -> None:
    fake = service.fake
    fake.token.hold()
    other = asyncio.create_task(service.chat("mark-o hi", stream=True, max_tokens=6))
    await fake.until(lambda f: f.busy == 1)
    client = await WireClient.post(service.url, CHAT, chat("mark-x hi", stream=True))
    await fake.until(lambda f: f.busy == 2)
    client.leave()
    await service.watcher.until(lambda w: w.reports)
    assert fake.busy == 1
    fake.token.release()
    assert (await other).text.endswith("[DONE]\n\n")
    await all_four_slots_serve(service)


async def test_an_engine_that_ignores_the_leaving_keeps_its_slot_until_it_is_done(service: Service) -> None:
    fake = service.fake
    fake.ignore_cancel = True
    fake.token.hold()
    client = await WireClient.post(service.url, CHAT, chat("mark-x hi", max_tokens=6))
    await fake.until(lambda f: f.busy == 1)
    client.leave()
    await fake.until(lambda f: [r.path for r in f.requests].count("/slots") >= 3)
    assert len(service.router.dispatcher.held()) == 1
    fake.token.release()
    await service.watcher.until(lambda w: w.reports)
    assert fake.busy == 0
    await all_four_slots_serve(service)


async def test_leaving_while_the_template_is_rendered(service: Service) -> None:
    service.fake.answering.hold()
    client = await WireClient.post(service.url, CHAT, chat("mark-x hi"))
    await service.fake.answering.arrived()
    client.leave()
    service.fake.answering.release()
    await all_four_slots_serve(service)
    assert service.router.dispatcher.held() == {}


async def test_a_backend_that_dies_ends_the_leases_of_those_who_left(service: Service) -> None:
    fake, dispatcher = service.fake, service.router.dispatcher
    fake.ignore_cancel = True
    fake.token.hold()
    client = await WireClient.post(service.url, CHAT, chat("mark-x hi"))
    await fake.until(lambda f: f.busy == 1)
    client.leave()
    await fake.until(lambda f: any(r.path == "/slots" for r in f.requests))
    await dispatcher.fleet.backend_down("b0", "it exited")
    assert dispatcher.held() == {}
    assert service.watcher.reports[0].status is Status.CANCELLED


async def test_without_slots_a_left_slot_is_kept_back_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeLlamaServer() as fake, serving([fake], timing=QUICK) as service:
        fake.missing.add("slots")
        fake.token.hold()
        client = await WireClient.post(service.url, CHAT, chat("mark-x hi", stream=True))
        await fake.until(lambda f: f.busy == 1)
        client.leave()
        await service.watcher.until(lambda w: w.reports)
        fake.token.release()
        assert [r for r in caplog.records if "has no /slots" in r.getMessage()]


async def test_a_release_in_the_engines_log_hastens_the_look() -> None:
    patient = replace(QUICK, first_check=3600.0, recheck=3600.0)
    async with FakeLlamaServer() as fake, serving([fake], timing=patient) as service:
        dispatcher = service.router.dispatcher
        fake.token.hold()
        client = await WireClient.post(service.url, CHAT, chat("mark-x hi", stream=True))
        fake.token.release(1)
        await client.head()
        client.leave()
        await fake.until(lambda f: f.busy == 0)
        [held] = dispatcher.held().values()
        dispatcher.fleet.log_event("b0", Released(held.lease.slot.slot))
        await service.watcher.until(lambda w: w.reports)


async def test_leaving_while_no_backend_is_up() -> None:
    async with FakeLlamaServer() as fake, serving([fake], ready=False) as service:
        client = await WireClient.post(service.url, CHAT, chat("mark-x hi"))
        await service.http.get("/health")
        client.leave()
        await service.router.dispatcher.fleet.backend_ready("b0", fake.base_url, 4, 2048, fresh=True)
        await all_four_slots_serve(service)
        assert len(fake.generations()) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_at_any_moment(service: Service, stream: bool) -> None:
    """The client goes after so many rounds of the event loop: that hits every place where anything waits."""
    raw = json.dumps(chat("mark-x hi", stream=stream, max_tokens=4)).encode()
    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "headers": []}
    stayed = 0
    for rounds in range(120):
        messages = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive(rounds: int = rounds, messages: list[Any] = messages) -> Any:
            if messages:
                return messages.pop()
            await turns(rounds)
            return {"type": "http.disconnect"}

        said: list[Any] = []

        async def send(message: Any, said: list[Any] = said) -> None:
            said.append(message)

        await service.router.app({**scope, "query_string": b""}, receive, send)
        await service.watcher.until(lambda w: w.level.get("m", 0) == 0)
        assert service.router.dispatcher.held() == {}
        stayed += bool(said) and said[-1].get("more_body") is False
    assert 0 < stayed < 120, "some left in time, some were served first"
    assert service.fake.violations == []
    await all_four_slots_serve(service)
