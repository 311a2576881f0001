"""Many at once: every answer belongs to its own prompt, and no slot ever has two."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import chat, serving, text_of
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from tests.support.router import Service

CHAT = "/v1/chat/completions"


async def conversation(service: Service, number: int, turns: int) -> int:
    """A conversation of some turns whose answers must echo its mark; tokens that were reused."""
    mark = f"mark-c{number}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{mark} " + "hello there " * (number % 7)}]
    reused = 0
    for turn in range(turns):
        stream = (number + turn) % 2 == 0
        body = {"messages": messages, "max_tokens": 8, "stream": stream}
        answer = await service.http.post(CHAT, json=body)
        assert answer.status_code == 200
        said = text_of(answer.text)
        assert mark in said
        reused += int(answer.headers["x-warmslot-predicted-tokens"])
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"{mark} go on {turn}"},
        ]
    return reused


@pytest.mark.parametrize("in_flight", ["serialize", "pair", "slots"])
async def test_two_hundred_requests_on_four_slots(in_flight: str) -> None:
    scheduling = {"in_flight": in_flight, "queue": "fifo"}
    async with FakeLlamaServer(slots=4) as fake, serving([fake], scheduling=scheduling) as service:
        await asyncio.gather(*(conversation(service, number, 4) for number in range(50)))
        assert len(fake.generations()) == 200
        assert fake.violations == []
        assert fake.deferred_total == 0
        assert service.router.dispatcher.held() == {}
        assert await service.metric("warmslot_requests_total", outcome="ok") == 200
        cached = await service.metric("warmslot_prompt_tokens_total", reuse="cached")
        processed = await service.metric("warmslot_prompt_tokens_total", reuse="processed")
        assert (cached, processed) == (fake.counts["cached"], fake.counts["prompt"])
        assert cached > 0
        assert await service.metric("warmslot_recomputed_tokens_total") == processed


@pytest.mark.parametrize("seed", range(3))
async def test_two_hundred_clients_of_which_many_leave(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - reproducible, not secret
    async with FakeLlamaServer(slots=4) as fake, serving([fake]) as service:

        async def one(number: int) -> None:
            mark = f"mark-l{number}"
            client = await WireClient.post(
                service.url, CHAT, chat(f"{mark} hi", stream=True, max_tokens=12), "Connection: close"
            )
            phase = chance.choice(("stay", "at once", "after the head", "in mid-stream"))
            if phase != "at once":
                await client.head()
            if phase == "in mid-stream":
                await client.read_until(b"data: ")
            if phase == "stay":
                assert mark.encode() in text_of((await client.rest()).decode()).encode()
            client.leave()

        await asyncio.gather(*(one(number) for number in range(200)))
        await service.watcher.until(lambda w: w.level.get("m", 0) == 0)
        assert service.router.dispatcher.held() == {}
        assert fake.busy == 0
        assert fake.violations == []
        assert fake.deferred_total == 0
        tasks = [service.chat(f"mark-z{n} hi", max_tokens=6) for n in range(8)]
        for number, answer in enumerate(await asyncio.gather(*tasks)):
            assert f"mark-z{number}" in answer.text


async def test_an_engine_that_dies_under_load_answers_all_or_tells_of_an_error() -> None:
    async with FakeLlamaServer(slots=4) as fake, serving([fake]) as service:
        tasks = [asyncio.create_task(service.chat(f"mark-d{n} hi", max_tokens=8)) for n in range(60)]
        await fake.until(lambda f: len(f.generations()) >= 20)
        await fake.crash()
        await service.router.dispatcher.fleet.backend_down("b0", "it exited")
        await fake.restart()
        await service.router.dispatcher.fleet.backend_ready("b0", fake.base_url, 4, 2048, fresh=True)
        answers = await asyncio.gather(*tasks)
        for number, answer in enumerate(answers):
            assert (answer.status_code == 502) or f"mark-d{number}" in answer.text
        assert sum(answer.status_code == 502 for answer in answers) <= 4
        assert service.router.dispatcher.held() == {}
        assert fake.violations == []
