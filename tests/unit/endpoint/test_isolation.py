"""With ``endpoint.isolation`` no request begins on what was computed for another client, whatever its way."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import chat, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from tests.fakes.http import Received
    from tests.fakes.slot_model import Slot
    from tests.support.router import Service

LONG = "what nobody else may learn of " * 20
KEYS = [{"name": "a", "value": "ka"}, {"name": "b", "value": "kb"}]
PATHS = ("/v1/chat/completions", "/v1/messages", "/completion", "/v1/responses")
FIRST = 2
"""Tokens with which every prompt of a template begins."""


class Holders:
    """Whose text the engine's slots really hold; bodies say in ``user`` whose they are.

    A call before a request does not say so: it belongs to the next one on that slot.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.reused = 0
        self._holders: dict[int, str] = {}
        self._ahead: dict[int, str | None] = {}

    def launched(self, slot: Slot, request: Received) -> None:
        """A prompt begins on a slot."""
        before, reuses = self._holders.get(slot.id, ""), slot.cached > FIRST
        if request.json.get("prompt") == ".":
            self._holders[slot.id] = ""
            return
        if request.json.get("n_predict") == 0:
            self._ahead = {slot.id: before if reuses else None}
            self._holders[slot.id] = before if reuses else "somebody's"
            return
        who = request.json["user"]
        if request.path == "/v1/messages" and slot.id in self._ahead:
            ahead = self._ahead.pop(slot.id)
            before, reuses = ahead or "", ahead is not None
        self.reused += reuses
        if reuses and before != who:
            self.wrong.append(f"{request.path} of {who} on slot {slot.id} of {before}")
        self._holders[slot.id] = who


@asynccontextmanager
async def isolated(slots: int = 4, **endpoint: Any) -> AsyncIterator[Service]:
    async with (
        FakeLlamaServer(slots=slots) as fake,
        serving([fake], keys=KEYS, endpoint={"isolation": True, **endpoint}) as service,
    ):
        yield service
        await service.watcher.until(lambda watcher: watcher.level.get("m", 0) == 0)
        assert fake.violations == []
        assert service.router.dispatcher.held() == {}


async def post(service: Service, key: str, path: str, body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await service.http.post(path, json=body, headers=headers)


async def say(service: Service, key: str, text: str, **more: Any) -> dict[str, Any]:
    """A chat; the engine's account of it."""
    answer = await post(service, key, "/v1/chat/completions", chat(text, max_tokens=2, **more))
    assert answer.status_code == 200
    timings: dict[str, Any] = answer.json()["timings"]
    return timings


async def message(service: Service, key: str, text: str) -> int:
    """A request on ``/v1/messages``; how much of it the client is told to have been found."""
    answer = await post(service, key, "/v1/messages", chat(text, max_tokens=2))
    assert answer.status_code == 200
    return int(answer.json()["usage"]["cache_read_input_tokens"])


def emptied(service: Service) -> list[int]:
    """The slots that were filled with nobody's text since this was asked last."""
    calls = [one for one in service.fake.generations() if one.json.get("prompt") == "."]
    for call in calls:
        service.fake.requests.remove(call)
    return sorted(slot for call in calls for slot in call.slots)


def taken(service: Service) -> int:
    """The slot in which the engine served the last request."""
    return service.fake.generations()[-1].slots[0]


async def test_messages_that_cannot_be_rendered() -> None:
    async with isolated() as service:
        service.fake.missing.add("apply-template")
        for key in ("ka", "kb", "ka"):
            assert await message(service, key, LONG) <= FIRST
        # One's own is no secret.
        assert await message(service, "ka", LONG + "and more") > 100
        # And nobody finds there what a chat left.
        await say(service, "ka", LONG)
        assert await message(service, "kb", LONG) <= FIRST


async def test_only_slots_that_may_hold_text_of_others_are_emptied() -> None:
    """Not those that are empty, those of the client's own, and those that were emptied before."""
    async with isolated() as service:
        service.fake.missing.add("apply-template")
        await message(service, "ka", LONG)
        first = taken(service)
        await message(service, "ka", LONG + "and more")
        assert (taken(service), emptied(service)) == (first, [])
        await message(service, "kb", LONG)
        second = taken(service)
        assert emptied(service) == [first]
        assert await message(service, "kb", LONG + "and more") > 100
        assert (taken(service), emptied(service)) == (second, [])
        talk = await post(service, "ka", "/v1/chat/completions", chat("a talk " + LONG, max_tokens=2))
        await message(service, "kb", "what is new " + LONG)
        assert emptied(service) == [int(talk.headers["x-warmslot-slot"])]
        await message(service, "ka", LONG)
        assert second in emptied(service)
        await message(service, "ka", LONG)
        assert emptied(service) == []


@pytest.mark.parametrize("seen", [True, False])
async def test_what_a_client_left_that_went_is_emptied(seen: bool) -> None:
    """In a slot that was empty when the engine took it; ``seen``: and the engine says that it is not now."""
    async with isolated() as service:
        fake = service.fake
        fake.missing |= {"apply-template"} if seen else {"apply-template", "slots"}
        fake.token.hold()
        going = asyncio.create_task(post(service, "ka", "/v1/messages", chat(LONG, max_tokens=2)))
        await fake.token.arrived()
        going.cancel()
        await service.watcher.until(lambda watcher: watcher.level["m"] == 0)
        fake.token.release()
        left = taken(service)
        assert len(fake.model.slots[left].tokens) > 100
        assert await message(service, "kb", LONG) <= FIRST
        assert left in emptied(service)


async def test_what_a_client_left_that_went_is_its_own() -> None:
    """Nobody had anything there before, so the work that was done is found when it asks again."""
    async with isolated() as service:
        fake = service.fake
        fake.missing.add("apply-template")
        fake.token.hold()
        going = asyncio.create_task(post(service, "ka", "/v1/messages", chat(LONG, max_tokens=2)))
        await fake.token.arrived()
        going.cancel()
        await service.watcher.until(lambda watcher: watcher.level["m"] == 0)
        fake.token.release()
        assert await message(service, "ka", LONG) > 100
        assert emptied(service) == []


async def test_a_slot_that_could_not_be_emptied_is_emptied_later() -> None:
    async with isolated() as service:
        await say(service, "ka", LONG)
        slot = taken(service)
        service.fake.missing |= {"apply-template", "completion"}
        assert (await post(service, "kb", "/v1/messages", chat(LONG))).status_code == 501
        service.fake.missing.remove("completion")
        assert await message(service, "kb", LONG) <= FIRST
        assert slot in emptied(service)


async def test_the_time_does_not_tell_whether_a_slot_had_to_be_emptied() -> None:
    """It is emptied while the prompt is computed, not before or after it."""
    async with isolated() as service:
        fake = service.fake
        assert await message(service, "ka", LONG) == 0
        held, before = taken(service), len(fake.generations())
        fake.prefill.hold()
        asking = asyncio.create_task(message(service, "kb", LONG))
        await fake.until(lambda fake: fake.busy > 1)
        running = {request.slots[0]: request.json["prompt"] for request in fake.generations()[before:]}
        assert running.pop(held) == "."
        assert [LONG in prompt for prompt in running.values()] == [True]
        fake.prefill.release()
        assert await asking == 0


async def test_messages_whose_prompt_is_not_computed_ahead() -> None:
    """The engine refused the call before the request, or did not tell what came of it."""
    async with isolated() as service:
        await say(service, "ka", LONG)
        service.fake.missing.add("timings")
        assert await message(service, "kb", LONG) <= FIRST


async def test_a_prompt_that_another_client_holds_whole_is_run_in_a_slot_of_its_own() -> None:
    async with isolated() as service:
        assert await message(service, "ka", LONG) == 0
        for _ in range(2):
            own = await post(service, "kb", "/v1/messages", chat(LONG, max_tokens=2))
            slot = int(own.headers["x-warmslot-slot"])
            assert service.fake.generations()[-1].slots == [slot]
        # What the client is told is the same as if nobody had ever asked that.
        usage = own.json()["usage"]
        assert usage["cache_read_input_tokens"] > 100
        assert usage["input_tokens"] == 1
        turn = [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": own.json()["content"]},
            {"role": "user", "content": "and then?"},
        ]
        answer = await post(service, "kb", "/v1/messages", {"messages": turn, "max_tokens": 2})
        assert answer.json()["usage"]["cache_read_input_tokens"] > usage["cache_read_input_tokens"]


async def test_conversations_of_two_clients_keep_their_slots() -> None:
    async with isolated() as service:
        said: dict[str, list[Any]] = {
            key: [{"role": "user", "content": f"{key} {LONG}"}] for key in ("ka", "kb")
        }
        for turn in range(4):
            for key, messages in said.items():
                answer = await post(service, key, "/v1/messages", {"messages": messages, "max_tokens": 2})
                found = answer.json()["usage"]["cache_read_input_tokens"]
                assert (found > 100) is (turn > 0)
                messages += [{"role": "assistant", "content": answer.json()["content"]}]
                messages += [{"role": "user", "content": f"go on {turn}"}]


async def test_a_client_that_left_early_has_left_the_slot_as_it_was() -> None:
    """It asks for what somebody else has there and leaves before the engine begins; then it asks again."""
    async with isolated(slots=1) as service:
        fake = service.fake
        await say(service, "ka", LONG)
        fake.drop_next = 1  # read, and never begun
        headers = {"authorization": "Bearer kb"}
        gone = await service.http.post("/v1/chat/completions", json=chat(LONG), headers=headers)
        assert gone.status_code == 502
        await service.watcher.until(lambda watcher: watcher.level["m"] == 0)
        assert len(fake.model.slots[0].tokens) > 100
        assert (await say(service, "kb", LONG))["cache_n"] == 0
        assert (await say(service, "kb", LONG))["cache_n"] > 100


async def test_a_prompt_that_was_computed_for_a_request_that_the_engine_refuses() -> None:
    """Its slot holds that prompt then, and not what its former owner had there."""
    async with isolated(slots=1) as service:
        await say(service, "ka", "first " + LONG)
        service.fake.missing.add("v1/messages")
        assert (await post(service, "kb", "/v1/messages", chat("second " + LONG))).status_code == 404
        assert [request.path for request in service.fake.generations()][-2:] == [
            "/completion",
            "/v1/messages",
        ]
        assert (await say(service, "ka", "second " + LONG))["cache_n"] == 0


async def test_several_prompts() -> None:
    async with isolated() as service:
        for number in range(4):
            await post(service, "ka", "/completion", {"prompt": f"{number} {LONG}", "n_predict": 1})
        await post(service, "kb", "/completion", {"prompt": f"own {LONG}", "n_predict": 1})
        prompts = [f"own {LONG}", *(f"{number} {LONG}" for number in range(3))]
        answer = await post(service, "kb", "/completion", {"prompt": prompts, "n_predict": 1})
        assert [one["timings"]["cache_n"] for one in answer.json()] == [0] * 4
        assert (await post(service, "ka", "/completion", {"prompt": f"0 {LONG}", "n_predict": 1})).json()[
            "timings"
        ]["cache_n"] == 0


async def test_a_slot_of_the_clients_choice() -> None:
    async with isolated(client_slots=True) as service:
        own = await say(service, "ka", LONG, id_slot=2)
        assert own["cache_n"] == 0
        assert (await say(service, "kb", LONG, id_slot=1))["cache_n"] == 0
        assert (await say(service, "kb", LONG, id_slot=2))["cache_n"] == 0
        assert (await say(service, "kb", LONG, id_slot=2))["cache_n"] > 100
        assert (await say(service, "ka", LONG, id_slot=2))["cache_n"] == 0


@pytest.mark.parametrize(
    "name", ["cache_prompt", "cache\\u005fprompt", "c\\u0061che_prompt", "\\u0063ache_prompt"]
)
async def test_a_client_cannot_ask_for_it(name: str) -> None:
    async with isolated(slots=1) as service:
        await say(service, "ka", LONG)
        raw = json.dumps(chat(LONG, max_tokens=2))[:-1] + f', "{name}": true}}'
        headers = {"authorization": "Bearer kb"}
        answer = await service.http.post("/v1/chat/completions", content=raw, headers=headers)
        assert answer.json()["timings"]["cache_n"] == 0
        assert service.fake.generations()[-1].body.count(b"cache_prompt") == 1


async def test_a_route_that_nobody_knows_finds_empty_slots() -> None:
    async with isolated() as service:
        for number in range(4):
            await say(service, "ka", f"{number} {LONG}")
        await post(service, "kb", "/v1/audio/transcriptions", {})
        assert max(len(slot.tokens) for slot in service.fake.model.slots) <= FIRST
        assert not any(view.resident_tokens for view in service.router.dispatcher.slots())
        assert (await say(service, "ka", f"0 {LONG}"))["cache_n"] == 0
        assert (await say(service, "ka", f"0 {LONG}"))["cache_n"] > 100


async def test_a_route_that_nobody_knows_leaves_the_clients_own_alone() -> None:
    async with isolated() as service:
        await say(service, "ka", LONG)
        other = taken(service)
        await say(service, "kb", LONG)
        own = taken(service)
        await post(service, "kb", "/v1/audio/transcriptions", {})
        assert emptied(service) == [other]
        await post(service, "kb", "/v1/audio/transcriptions", {})
        assert emptied(service) == []
        assert (await say(service, "kb", LONG))["cache_n"] > 100
        assert taken(service) == own
        assert (await say(service, "ka", LONG))["cache_n"] == 0


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/audio/transcriptions"])
async def test_what_the_engine_does_not_do_costs_the_client_that_asks_nothing(path: str) -> None:
    async with isolated() as service:
        await say(service, "kb", LONG)
        assert (await post(service, "kb", path, {"input": "?"})).status_code == 404
        assert emptied(service) == []
        assert (await say(service, "kb", LONG))["cache_n"] > 100


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
async def test_embeddings_that_the_engine_does_not_do_cost_others_nothing(path: str) -> None:
    async with isolated() as service:
        await say(service, "ka", LONG)
        assert (await post(service, "kb", path, {"input": "?"})).status_code == 404
        assert emptied(service) == []
        assert (await say(service, "ka", LONG))["cache_n"] > 100


async def test_what_cannot_be_kept_apart_is_refused() -> None:
    async with isolated() as service:
        await say(service, "ka", LONG)
        service.fake.missing |= {"apply-template", "completion"}
        answer = await post(service, "kb", "/v1/messages", chat(LONG))
        assert answer.status_code == 501
        assert answer.json()["error"]["message"].startswith("with endpoint.isolation")
        assert [request.path for request in service.fake.generations()][-1] != "/v1/messages"


@pytest.mark.parametrize("isolation", [False, True])
async def test_a_prompt_that_is_too_long_costs_nobody_anything(isolation: bool) -> None:
    async with isolated(isolation=isolation) as service:
        await say(service, "ka", LONG)
        answer = await post(service, "kb", "/v1/messages", chat("word " * 3000))
        assert answer.status_code == 400
        assert (await say(service, "ka", LONG))["cache_n"] > 100


@pytest.mark.parametrize("rendered", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 4])
async def test_many_at_once_find_their_own_alone(slots: int, rendered: bool) -> None:
    """Every way at once, with leaving: no request begins on what was computed for somebody else."""
    rng = random.Random(slots)  # noqa: S311 - repeatable
    async with isolated(slots=slots) as service:
        if not rendered:
            service.fake.missing.add("apply-template")
        holders = Holders()
        service.fake.on_launch = holders.launched

        async def ask(number: int) -> None:
            key, path = rng.choice("ab"), rng.choice(PATHS)
            said = f"{LONG} {rng.choice('xy')}"
            body = {"prompt": said, "n_predict": 2} if path == "/completion" else chat(said, max_tokens=2)
            sending = asyncio.create_task(post(service, f"k{key}", path, body | {"user": key}))
            if number % 3 == 0:
                await asyncio.wait({sending}, timeout=0)
                sending.cancel()
            await asyncio.wait({sending})

        await asyncio.gather(*(ask(number) for number in range(120)))
        await service.watcher.until(lambda watcher: watcher.level["m"] == 0)
        assert holders.wrong == []
        assert holders.reused > 0
