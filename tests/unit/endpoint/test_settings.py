"""What the section ``endpoint`` and the limits of keys change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import chat, serving

if TYPE_CHECKING:
    import httpx

    from tests.support.router import Service

LONG = "the same words for everybody " * 20
KEYS: list[dict[str, Any]] = [{"name": "a", "value": "ka"}, {"name": "b", "value": "kb"}]


def as_key(secret: str) -> dict[str, str]:
    """Headers with a key."""
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize("isolation", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_isolation_leaves_nothing_of_others_to_reuse(isolation: bool, path: str) -> None:
    """What one key has sent, another sends too; it finds no more than what it sent before itself."""
    async with (
        FakeLlamaServer() as fake,
        serving([fake], keys=KEYS, endpoint={"isolation": isolation}) as service,
    ):

        async def cached(secret: str, text: str) -> int:
            body = chat(text, max_tokens=2)
            if path == "/v1/responses":
                body = {"input": text, "max_output_tokens": 2}
            answer = await service.http.post(path, json=body, headers=as_key(secret))
            assert answer.status_code == 200
            return service.watcher.reports[-1].cached_tokens

        foreign = []
        for number in range(6):
            text = f"{number} {LONG}"
            await cached("ka", text)
            foreign.append(await cached("kb", text))
            assert await cached("kb", text) > 100
        if isolation:
            assert foreign[0] == 0
            assert max(foreign) < 30  # later on, the start of its own last prompt
        else:
            assert min(foreign) > 100
        assert fake.violations == []


async def test_a_slot_that_changes_hands_is_computed_anew() -> None:
    async with (
        FakeLlamaServer(slots=1) as fake,
        serving([fake], keys=KEYS, endpoint={"isolation": True}) as service,
    ):
        for secret in ("ka", "kb", "kb", "ka"):
            await service.http.post("/v1/chat/completions", json=chat(LONG), headers=as_key(secret))
        sent = [request.json["cache_prompt"] for request in fake.generations()]
        assert sent == [False, False, True, False]
        cached = [report.cached_tokens for report in service.watcher.reports]
        assert [count > 0 for count in cached] == [False, False, True, False]


async def test_a_clients_own_slot_is_overwritten_unless_it_may_choose(service: Service) -> None:
    answer = await service.chat("hi", id_slot=2)
    assert service.fake.generations()[-1].json["id_slot"] == int(answer.headers["x-warmslot-slot"])
    async with FakeLlamaServer() as fake, serving([fake], endpoint={"client_slots": True}) as other:
        for wanted, slot in ((1, 1), (6, 2), (1, 1)):
            answer = await other.chat("mark-x " + LONG, id_slot=wanted)
            assert answer.headers["x-warmslot-slot"] == str(slot)
            assert fake.generations()[-1].slots == [slot]
            assert other.watcher.reports[-1].slot.slot == slot
        free = await other.chat("mark-x " + LONG)
        assert int(free.headers["x-warmslot-slot"]) in {1, 2}
        assert free.json()["timings"]["prompt_n"] == 1


async def test_unknown_routes_can_be_refused(service: Service) -> None:
    assert (await service.http.get("/no/such")).json()["error"]["message"] == "File Not Found"
    async with FakeLlamaServer() as fake, serving([fake], endpoint={"unknown_routes": "refuse"}) as other:
        answer = await other.http.post("/no/such", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert fake.requests == []
        assert (await other.http.post("/tokenize", json={"content": "hi"})).status_code == 200


async def test_slots_of_all_backends_with_their_names() -> None:
    async with (
        FakeLlamaServer(slots=2) as one,
        FakeLlamaServer(slots=3) as two,
        serving([one, two]) as service,
    ):
        found = (await service.http.get("/slots")).json()
        assert [(slot["backend"], slot["id"]) for slot in found] == [
            *(("b0", number) for number in range(2)),
            *(("b1", number) for number in range(3)),
        ]
        assert {slot["pool"] for slot in found} == {"m"}
        only = (await service.http.get("/slots?backend=b1")).json()
        assert {slot["backend"] for slot in only} == {"b1"}
        # Asked again within two seconds, the engines are left alone.
        assert sum(request.path == "/slots" for request in one.requests) == 1


async def test_slots_where_the_engine_shows_none(service: Service) -> None:
    service.fake.missing.add("slots")
    assert (await service.http.get("/slots")).status_code == 501


async def test_the_picture_follows_an_erased_slot() -> None:
    async with FakeLlamaServer() as fake, serving([fake], endpoint={"slot_actions": True}) as service:
        first = await service.chat("mark-e " + LONG)
        slot = int(first.headers["x-warmslot-slot"])
        answer = await service.http.post(f"/slots/{slot}?action=erase", json={})
        assert answer.status_code == 200
        assert answer.json()["n_erased"] > 0
        view = next(view for view in service.router.dispatcher.slots() if view.ref.slot == slot)
        assert (view.known, view.resident_tokens) == (True, 0)
        assert (await service.chat("mark-e " + LONG)).headers["x-warmslot-decision"] == "fresh"


async def test_an_action_waits_for_what_runs_and_nothing_starts_meanwhile() -> None:
    async with FakeLlamaServer() as fake, serving([fake], endpoint={"slot_actions": True}) as service:
        fake.token.hold()
        running = asyncio.create_task(service.chat("mark-r " + LONG))
        await fake.until(lambda f: f.busy == 1)
        action = asyncio.create_task(service.http.post("/slots/0?action=restore", json={"filename": "x"}))
        fake.token.release()
        assert (await running).status_code == 200
        assert (await action).status_code == 200
        assert [request.path for request in fake.requests if request.method == "POST"][-1] == "/slots/0"
        views = {view.ref.slot: view.known for view in service.router.dispatcher.slots()}
        assert views[0] is False
        assert (await service.chat("mark-s hi")).status_code == 200


@pytest.mark.parametrize("call", ["/slots/0?action=restore", "/v1/embeddings"])
@pytest.mark.parametrize("tells", [True, False])
async def test_the_only_slot_is_given_out_again_after_a_call_that_is_not_pinned(
    call: str, tells: bool
) -> None:
    async with FakeLlamaServer(slots=1) as fake, serving([fake], endpoint={"slot_actions": True}) as service:
        if not tells:
            fake.missing.add("slots")
        await service.http.post(call, json={"filename": "x", "input": "some text"})
        assert (await service.chat("mark-t hi")).status_code == 200


@pytest.mark.parametrize("query", ["9?action=erase", "x?action=erase", "0?action=drop"])
async def test_wrong_actions(query: str) -> None:
    async with FakeLlamaServer() as fake, serving([fake], endpoint={"slot_actions": True}) as service:
        answer = await service.http.post(f"/slots/{query}", json={})
        assert answer.status_code == 400
        assert "allowed" in answer.json()["error"]["message"]


async def test_a_key_may_have_so_many_in_flight_and_so_many_waiting() -> None:
    keys = [{"name": "a", "value": "ka", "in_flight": 1, "queued": 1}, {"name": "b", "value": "kb"}]
    async with FakeLlamaServer() as fake, serving([fake], keys=keys) as service:

        async def ask(secret: str) -> httpx.Response:
            return await service.http.post("/v1/chat/completions", json=chat("hi"), headers=as_key(secret))

        fake.token.hold()
        first = asyncio.create_task(ask("ka"))
        await fake.until(lambda f: f.busy == 1)
        others = [asyncio.create_task(ask("ka")) for _ in range(2)]
        done, waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        refused = done.pop().result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
        assert int(refused.headers["retry-after"]) > 0
        free = asyncio.create_task(ask("kb"))
        await fake.until(lambda f: f.busy == 2)
        fake.token.release()
        answers = await asyncio.gather(first, free, *waiting)
        assert [answer.status_code for answer in answers] == [200, 200, 200]


async def test_keys_for_one_use_alone() -> None:
    keys = [
        {"name": "app", "value": "k1", "use": "requests"},
        {"name": "ops", "value": "k2", "use": "admin"},
    ]
    async with FakeLlamaServer() as fake, serving([fake], keys=keys) as service:
        for path in ("/metrics", "/backends/b0/metrics", "/slots"):
            assert (await service.http.get(path, headers=as_key("k1"))).status_code == 403
            assert (await service.http.get(path, headers=as_key("k2"))).status_code == 200
            assert (await service.http.get(path)).status_code == 401
        for secret, status in (("k1", 200), ("k2", 403)):
            answer = await service.http.post("/v1/chat/completions", json=chat("hi"), headers=as_key(secret))
            assert answer.status_code == status


async def test_a_waiting_stream_says_where_it_stands_if_asked() -> None:
    async with FakeLlamaServer(slots=1) as fake, serving([fake]) as service:
        fake.token.hold()
        running = asyncio.create_task(service.chat("mark-q hi"))
        await fake.until(lambda f: f.busy == 1)
        headers = {"x-warmslot-queue": "1"}
        body = chat("mark-w hi", stream=True)
        async with service.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith(": queued 1, about ")
            fake.token.release()
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"
        assert (await running).status_code == 200
        prompt = await service.http.post("/v1/chat/completions", json=body, headers=headers)
        assert ": queued" not in prompt.text
        assert "x-warmslot-slot" in prompt.headers


async def test_several_prompts_run_alone_and_none_waits_for_a_slot_of_another(service: Service) -> None:
    """One pin would be for all of them."""
    texts = [f"mark-{number} and more words" for number in range(6)]
    for count in (2, 4):
        body = {"prompt": texts[:count], "n_predict": 4, "id_slot": 1}
        answer = await service.http.post("/completion", json=body)
        assert [f"mark-{number}" in one["content"] for number, one in enumerate(answer.json())] == [
            True
        ] * count
        assert len(set(service.fake.generations()[-1].slots)) == count
    assert service.fake.violations == []
