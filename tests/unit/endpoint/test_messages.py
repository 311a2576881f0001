"""``/v1/messages``: the engine places these requests; the router foresees, steers, or lets them run alone."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from warmslot.router import generation, steering
from warmslot.router.steering import Way, way_of
from warmslot.router.stream import BODY_LIMIT
from warmslot.router.values import Decision as Why
from warmslot.router.values import Lease, Prompt, Request, Route, SlotRef, Status

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import serving

if TYPE_CHECKING:
    from warmslot.router.values import Report

    from tests.support.router import Service

STORY = "the sea was calm and the ship went on and nobody said a word "


def ask(text: str, **more: Any) -> dict[str, Any]:
    """A body with one user message."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


async def test_a_new_conversation_is_steered_to_the_slot_of_its_lease(service: Service) -> None:
    answer = await service.http.post("/v1/messages", json=ask("mark-a " + STORY))
    assert answer.status_code == 200
    slot = int(answer.headers["x-warmslot-slot"])
    warm, own = service.fake.generations()
    assert (warm.path, warm.json["n_predict"], warm.slots) == ("/completion", 0, [slot])
    assert (own.path, own.slots) == ("/v1/messages", [slot])
    usage = answer.json()["usage"]
    report = service.watcher.reports[-1]
    assert report.slot == SlotRef("b0", slot)
    # The engine found what had been computed for this request: it counts as computed, not as reused.
    assert (report.cached_tokens, report.processed_tokens) == (0, usage["input_tokens"])
    assert (usage["cache_read_input_tokens"], usage["input_tokens"] > 10) == (0, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_steered_client_is_told_what_an_unsteered_one_would_have_been(
    service: Service, stream: bool
) -> None:
    """Byte for byte, on an engine that is fresh too; what begins alike is told as cached."""
    async with FakeLlamaServer() as alone, httpx.AsyncClient(trust_env=False) as http:
        begun = {"role": "user", "content": f"mark-u {STORY * 8}"}
        for words in ("one", "two", "three"):
            told = [{"role": "assistant", "content": f"{words} and more"}, {"role": "user", "content": words}]
            body = {"messages": [begun, *told], "max_tokens": 4, "stream": stream}
            direct = await http.post(f"{alone.base_url}/v1/messages", json=body)
            routed = await service.http.post("/v1/messages", json=body)
            assert routed.content == direct.content
    assert {request.path for request in service.fake.generations()} >= {"/completion", "/v1/messages"}


@pytest.mark.parametrize(("most", "told_as_new"), [(BODY_LIMIT, True), (100, False)])
async def test_counts_of_a_long_answer(
    service: Service, monkeypatch: pytest.MonkeyPatch, most: int, told_as_new: bool
) -> None:
    """What is too long to be held for other reasons is held for them; not what nobody could keep."""
    monkeypatch.setattr(generation, "WHOLE", 100)
    monkeypatch.setattr(steering, "BODY_LIMIT", most)
    answer = await service.http.post("/v1/messages", json=ask("mark-l " + STORY))
    assert len(answer.content) > 100
    usage = answer.json()["usage"]
    assert (usage["cache_read_input_tokens"] == 0) is told_as_new
    assert (
        usage["cache_read_input_tokens"] + usage["input_tokens"]
        == service.watcher.reports[-1].processed_tokens
    )


async def test_a_next_turn_needs_no_steering_and_is_reported_as_reused(service: Service) -> None:
    messages: list[Any] = [{"role": "user", "content": "mark-b " + STORY * 8}]
    for turn in range(4):
        answer = await service.http.post("/v1/messages", json={"messages": messages, "max_tokens": 8})
        slot = int(answer.headers["x-warmslot-slot"])
        assert service.fake.generations()[-1].slots == [slot]
        messages += [
            {"role": "assistant", "content": answer.json()["content"]},
            {"role": "user", "content": f"go on {turn}"},
        ]
    paths = [request.path for request in service.fake.generations()]
    assert paths == ["/completion", *["/v1/messages"] * 4]
    last = service.watcher.reports[-1]
    usage = answer.json()["usage"]
    assert last.cached_tokens == usage["cache_read_input_tokens"] > 100
    assert last.processed_tokens == usage["input_tokens"]
    assert not last.truth_missing


@pytest.mark.parametrize("at_once", [1, 3])
async def test_it_runs_where_the_lease_says_whatever_slots_share(service: Service, at_once: int) -> None:
    """Conversations with one preamble: the engine alone would often take another slot than the router."""
    spoken: dict[int, list[Any]] = {
        talk: [{"role": "user", "content": f"mark-s {STORY * 4} talk {talk} " * 2}] for talk in range(6)
    }
    limit = asyncio.Semaphore(at_once)

    async def say(talk: int) -> None:
        messages = spoken[talk]
        async with limit:
            answer = await service.http.post("/v1/messages", json={"messages": messages, "max_tokens": 3})
        assert answer.status_code == 200
        messages += [{"role": "assistant", "content": answer.json()["content"]}]
        messages += [{"role": "user", "content": f"more of {talk} " * 3}]

    for _ in range(3):
        await asyncio.gather(*(say(talk) for talk in spoken))
    ran = [request.slots[0] for request in service.fake.generations() if request.path == "/v1/messages"]
    assert sorted(ran) == sorted(report.slot.slot for report in reports_of(service))
    assert sum(report.cached_tokens + report.processed_tokens for report in reports_of(service)) > 0
    steered = [request for request in service.fake.generations() if request.path == "/completion"]
    assert 0 < len(steered) < len(ran)
    assert service.fake.violations == []


def reports_of(service: Service) -> list[Report]:
    """What was finished, without leases that went back unused."""
    return [report for report in service.watcher.reports if report.status is Status.OK]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_another_slot_holds_whole_runs_alone_and_is_found(
    service: Service, stream: bool
) -> None:
    body = ask("mark-d " + STORY * 4)
    for slot in (0, 1):
        await compute(service.fake.base_url + "/completion", prompt_of(body), slot)
    await service.router.dispatcher.fleet.backend_down("b0", "to forget")
    await service.router.dispatcher.fleet.backend_ready("b0", service.fake.base_url, 4, 2048, fresh=False)
    answer = await service.http.post("/v1/messages", json=body | {"stream": stream})
    assert "mark" in answer.text
    assert service.watcher.reports[-1].slot == SlotRef("b0", service.fake.generations()[-1].slots[0])
    assert service.fake.violations == []


def prompt_of(body: dict[str, Any]) -> str:
    """What the fake evaluates for a body."""
    text = body["messages"][0]["content"]
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


async def compute(url: str, prompt: str, slot: int) -> None:
    """Foreign traffic: straight to the engine."""
    async with httpx.AsyncClient(trust_env=False) as http:
        await http.post(url, json={"prompt": prompt, "n_predict": 0, "id_slot": slot})


async def test_the_same_prompt_twice_at_once(service: Service) -> None:
    """Both would land in the lower of two equal slots, so they do not overlap."""
    bodies = [ask("mark-e " + STORY * 4) for _ in range(4)]
    answers = await asyncio.gather(*(service.http.post("/v1/messages", json=body) for body in bodies))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert service.fake.violations == []
    assert service.router.dispatcher.held() == {}


async def test_many_at_once_never_meet(service: Service) -> None:
    routes = ["/v1/messages", "/v1/chat/completions", "/v1/responses"]

    async def one(number: int) -> httpx.Response:
        body = ask(f"mark-{number} " + STORY * (number % 5) + f"number {number} ")
        path = routes[number % 3]
        if path == "/v1/responses":
            body = {"input": body["messages"], "max_output_tokens": 8}
        return await service.http.post(path, json=body)

    answers = await asyncio.gather(*(one(number) for number in range(30)))
    assert [answer.status_code for answer in answers] == [200] * 30
    assert all(f"mark-{number}" in answer.text for number, answer in enumerate(answers))
    assert service.fake.violations == []
    assert service.fake.deferred_total == 0
    for request in service.fake.generations():
        assert len(request.slots) == 1


async def test_a_client_that_leaves_while_its_prompt_is_computed(service: Service) -> None:
    service.fake.prefill.hold()
    task = asyncio.create_task(service.http.post("/v1/messages", json=ask("mark-f " + STORY)))
    await service.fake.prefill.arrived()
    task.cancel()
    await service.watcher.until(lambda watcher: watcher.reports)
    assert [request.path for request in service.fake.generations()] == ["/completion"]
    assert service.fake.busy == 0
    service.fake.prefill.release()
    assert (await service.http.post("/v1/messages", json=ask("mark-g hi"))).status_code == 200
    assert service.router.dispatcher.held() == {}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": [{"role": "user", "content": "word " * 3000}], "max_tokens": 2}, 400),
        ({"messages": 3, "max_tokens": 2}, 200),
        ({}, 500),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
                ]
            },
            500,
        ),
    ],
)
async def test_the_engine_speaks_for_itself(service: Service, body: dict[str, Any], status: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        alone = await http.post(service.fake.base_url + "/v1/messages", json=body)
    answer = await service.http.post("/v1/messages", json=body)
    assert answer.status_code == alone.status_code == status
    if status != 200:
        assert answer.content == alone.content
    assert service.router.dispatcher.held() == {}


async def test_our_own_errors_have_anthropics_shape() -> None:
    async with FakeLlamaServer() as fake, serving([fake], keys=[{"name": "k", "value": "secret"}]) as service:
        answer = await service.http.post("/v1/messages", json=ask("hi"))
        assert answer.status_code == 401
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "authentication_error"
        fine = await service.http.post("/v1/messages", json=ask("hi"), headers={"x-api-key": "secret"})
        assert fine.status_code == 200
        wrong = await service.http.post(
            "/v1/messages", content=b"{", headers={"authorization": "Bearer secret"}
        )
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_event(service: Service) -> None:
    service.fake.token.hold()
    body = ask("mark-h hi", stream=True)
    service.fake.token.release(4)
    async with service.http.stream("POST", "/v1/messages", json=body) as answer:
        lines = answer.aiter_lines()
        async for line in lines:
            if "text_delta" in line:
                break
        await service.fake.crash()
        rest = [line async for line in lines]
    assert "event: error" in rest
    last = json.loads(rest[-2].removeprefix("data: "))
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"


def lease(slot: int, own: int, total: int) -> Lease:
    """A lease of a prompt of ``total`` tokens, ``own`` of them resident."""
    request = Request(id="r", prompt=Prompt.of(b"x" * total * 4), pool="m", route=Route.MESSAGES)
    return Lease(request, SlotRef("b", slot), Why.FRESH, own, total, 0.0)


@pytest.mark.parametrize(
    ("own", "others", "exact", "known", "way"),
    [
        (900, [(0, 0), (2, 0)], True, True, Way.FORESEEN),
        (900, [(0, 890), (2, 0)], True, True, Way.STEERED),
        (150, [(0, 0)], True, True, Way.STEERED),
        (0, [(0, 500)], True, True, Way.STEERED),
        (0, [(0, 999)], True, True, Way.ALONE),
        (0, [(2, 999)], True, True, Way.STEERED),
        (900, [(0, 0)], False, True, Way.ALONE),
        (900, [(0, 0)], True, False, Way.ALONE),
    ],
)
def test_ways(own: int, others: list[tuple[int, int]], exact: bool, known: bool, way: Way) -> None:
    assert way_of(lease(1, own, 1000), exact=exact, known=known, others=others) is way
