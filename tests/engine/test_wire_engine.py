"""The wire modules on real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest
from warmslot.router import prompt as prompts
from warmslot.router.backend import EngineError, Health
from warmslot.router.stream import TruthReader
from warmslot.router.values import Route

if TYPE_CHECKING:
    from warmslot.router.backend import EngineClient

JSON = [(b"Content-Type", b"application/json")]
PATHS = {
    Route.CHAT: "/v1/chat/completions",
    Route.COMPLETIONS: "/v1/completions",
    Route.COMPLETION: "/completion",
    Route.RESPONSES: "/v1/responses",
    Route.MESSAGES: "/v1/messages",
}


def body_for(route: Route, text: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A body that asks for ``tokens`` tokens after ``text`` on that route."""
    match route:
        case Route.CHAT:
            return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}
        case Route.COMPLETIONS:
            return {"prompt": text, "max_tokens": tokens, **more}
        case Route.COMPLETION:
            return {"prompt": text, "n_predict": tokens, **more}
        case Route.RESPONSES:
            return {"input": text, "max_output_tokens": tokens, **more}
        case _:
            return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}


async def ask(client: EngineClient, route: Route, body: dict[str, Any], slot: int = 0) -> TruthReader:
    """Send a body pinned to a slot, read the truth from the whole answer."""
    raw = prompts.pin(orjson.dumps(body), slot)
    async with client.open("POST", PATHS[route], JSON, raw) as response:
        reader = TruthReader(route, prompts.is_streaming(body))
        async for chunk in response.chunks():
            reader.feed(chunk)
        assert response.status == 200, response.status
    assert reader.finished
    return reader


async def test_props_slots_health_and_metrics(engine_client: EngineClient) -> None:
    assert await engine_client.health() is Health.OK
    props = await engine_client.props()
    assert (props.total_slots, props.context) == (4, 2048)
    assert props.modalities == frozenset()
    slots = await engine_client.slots()
    assert slots is not None
    assert [one.slot for one in slots] == [0, 1, 2, 3]
    assert "llamacpp:requests_deferred 0" in await engine_client.metrics()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("route", list(PATHS))
async def test_truth_of_a_repeated_prompt(engine_client: EngineClient, route: Route, stream: bool) -> None:
    body = body_for(route, f"Tell me of {route} and {stream}.", 4, stream=stream, temperature=0)
    first = await ask(engine_client, route, body)
    again = await ask(engine_client, route, body)
    assert first.first_token
    assert first.cached_tokens is not None
    assert first.processed_tokens is not None
    length = first.cached_tokens + first.processed_tokens
    assert (again.cached_tokens, again.processed_tokens) == (length - 1, 1)
    assert again.output_tokens == first.output_tokens == 4
    assert again.generated == first.generated != b""
    assert first.error is None
    assert first.stop_reason is not None


async def test_what_the_slot_holds_is_prompt_and_generated_text(engine_client: EngineClient) -> None:
    """A second turn that appends to prompt + generated reuses all of it but the last sampled token."""
    body = body_for(Route.CHAT, "Count from one to ten.", 12, temperature=0, stream=True)
    first = await ask(engine_client, Route.CHAT, body, 1)
    rendered = await prompts.render(engine_client, Route.CHAT, body)
    assert rendered.data is not None
    resident = rendered.data + first.generated
    follow = {"prompt": resident.decode() + " And so on.", "n_predict": 1, "temperature": 0}
    second = await ask(engine_client, Route.COMPLETION, follow, 1)
    assert first.cached_tokens is not None
    assert first.processed_tokens is not None
    assert second.cached_tokens == first.cached_tokens + first.processed_tokens + first.output_tokens - 1
    assert second.slot == 1


async def test_render_is_what_the_engine_evaluates(engine_client: EngineClient) -> None:
    """The text of the template, sent as a plain prompt, is found whole in the chat's slot."""
    body = body_for(Route.CHAT, "Say a word about rivers.", 1, temperature=0)
    chat = await ask(engine_client, Route.CHAT, body, 2)
    rendered = await prompts.render(engine_client, Route.CHAT, body)
    assert rendered.data is not None
    plain = await ask(engine_client, Route.COMPLETION, {"prompt": rendered.data.decode(), "n_predict": 1}, 2)
    assert plain.processed_tokens == 1
    assert chat.cached_tokens is not None
    assert chat.processed_tokens is not None
    assert plain.cached_tokens == chat.cached_tokens + chat.processed_tokens - 1


async def test_token_arrays_count_exactly(engine_client: EngineClient) -> None:
    tokens = (await engine_client.post_json("/tokenize", {"content": "many small words in a row"}))["tokens"]
    prompt = await prompts.render(engine_client, Route.COMPLETION, {"prompt": tokens})
    truth = await ask(engine_client, Route.COMPLETION, {"prompt": tokens, "n_predict": 1}, 3)
    assert truth.cached_tokens is not None
    assert truth.processed_tokens is not None
    assert prompt.tokens == len(tokens) == truth.cached_tokens + truth.processed_tokens


async def test_the_last_id_slot_wins_where_a_body_has_two(engine_client: EngineClient) -> None:
    """What ``pin`` relies on where it cannot see a client's escaped key."""
    raw = b'{"prompt":"hi","n_predict":1,"id_slot":0,"id_slot":2}'
    async with engine_client.open("POST", "/completion", JSON, raw) as response:
        assert orjson.loads(await response.read())["id_slot"] == 2


async def test_refusals(engine_client: EngineClient) -> None:
    with pytest.raises(EngineError) as refusal:
        await engine_client.apply_template({"messages": 1})
    assert refusal.value.status == 400
    raw = orjson.dumps({"prompt": "word " * 3000, "stream": True})
    async with engine_client.open("POST", "/completion", JSON, raw) as response:
        reader = TruthReader(Route.COMPLETION, streaming=True)
        reader.feed(await response.read())
    assert response.status == 400
    assert reader.error is not None
    assert reader.error["type"] == "exceed_context_size_error"
