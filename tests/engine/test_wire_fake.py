"""The fake engine agrees with real ones: the same exchanges, compared in all that a router can see.

Compared: status, headers and their order, the framing of streams, the shape of every JSON object (names and
kinds of values), the arithmetic of cached and evaluated tokens, and where requests land.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from warmslot.router.backend import EngineClient
from warmslot.router.stream import TruthReader
from warmslot.router.values import Route

from tests.fakes.llama_server import FakeLlamaServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

JSON = [(b"Content-Type", b"application/json")]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
LONG = "one two three four five six seven eight nine ten "

EXCHANGES: dict[str, tuple[str, str, Any]] = {
    "health": ("GET", "/health", None),
    "slots": ("GET", "/slots", None),
    "apply-template": ("POST", "/apply-template", CHAT),
    "template-parts": (
        "POST",
        "/apply-template",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]},
    ),
    "template-prefill": (
        "POST",
        "/apply-template",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "pre"}]},
    ),
    "template-tools": (
        "POST",
        "/apply-template",
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "x", "content": "res"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        },
    ),
    "template-empty": ("POST", "/apply-template", {"messages": []}),
    "template-open": ("POST", "/apply-template", CHAT | {"add_generation_prompt": False}),
    "template-refused": ("POST", "/apply-template", {"messages": 3}),
    "template-missing": ("POST", "/apply-template", {}),
    "template-no-content": ("POST", "/apply-template", {"messages": [{"role": "user"}]}),
    "template-image": (
        "POST",
        "/apply-template",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ),
    "tokenize": ("POST", "/tokenize", {"content": "hi there"}),
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat-stream": ("POST", "/v1/chat/completions", CHAT | {"stream": True}),
    "chat-usage": (
        "POST",
        "/v1/chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat-progress": ("POST", "/v1/chat/completions", CHAT | {"stream": True, "return_progress": True}),
    "chat-none": ("POST", "/v1/chat/completions", CHAT | {"max_tokens": 0}),
    "chat-two": ("POST", "/v1/chat/completions", CHAT | {"n": 2}),
    "chat-pinned": ("POST", "/v1/chat/completions", CHAT | {"id_slot": 2}),
    "completions": ("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 3, "temperature": 0}),
    "completions-stream": (
        "POST",
        "/v1/completions",
        {"prompt": "hi", "max_tokens": 3, "stream": True, "temperature": 0},
    ),
    "completions-two": ("POST", "/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 2}),
    "completion": ("POST", "/completion", {"prompt": "hi", "n_predict": 3, "temperature": 0}),
    "completion-stream": ("POST", "/completion", {"prompt": "hi", "n_predict": 3, "stream": True}),
    "completion-progress": (
        "POST",
        "/completion",
        {"prompt": "hi", "n_predict": 2, "stream": True, "return_progress": True, "ignore_eos": True},
    ),
    "completion-several": (
        "POST",
        "/completion",
        {"prompt": ["hi", "ho"], "n_predict": 2, "ignore_eos": True},
    ),
    "completion-several-stream": (
        "POST",
        "/completion",
        {"prompt": ["hi", "ho"], "n_predict": 2, "stream": True, "ignore_eos": True},
    ),
    "responses": ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 3, "temperature": 0}),
    "responses-stream": (
        "POST",
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 3, "stream": True, "temperature": 0},
    ),
    "messages": ("POST", "/v1/messages", CHAT),
    "messages-stream": ("POST", "/v1/messages", CHAT | {"stream": True}),
    "bad-json": ("POST", "/v1/chat/completions", b"{bad"),
    "no-prompt": ("POST", "/completion", {"n_predict": 3}),
    "empty-prompt": ("POST", "/completion", {"prompt": []}),
    "object-prompt": ("POST", "/completion", {"prompt": {"a": 1}}),
    "messages-string": ("POST", "/v1/chat/completions", {"messages": "x"}),
    "messages-missing": ("POST", "/v1/chat/completions", {}),
    "anthropic-missing": ("POST", "/v1/messages", {}),
    "input-missing": ("POST", "/v1/responses", {}),
    "stream-string": ("POST", "/completion", {"prompt": "hi", "stream": "yes"}),
    "tokens-string": ("POST", "/v1/chat/completions", CHAT | {"max_tokens": "x"}),
    "n-string": ("POST", "/v1/chat/completions", CHAT | {"n": "x"}),
    "n-nine": ("POST", "/v1/chat/completions", CHAT | {"n": 9}),
    "too-long": ("POST", "/completion", {"prompt": "word " * 3000}),
    "too-long-stream": ("POST", "/completion", {"prompt": "word " * 3000, "stream": True}),
    "unknown-route": ("GET", "/nope", None),
    "wrong-method": ("GET", "/completion", None),
}

FREE = {"generation_settings", "params", "next_token", "has_new_line"}
"""Values that are the engine's or the model's own affair: only their being there is compared."""


@pytest.fixture
async def fake_client() -> AsyncIterator[EngineClient]:
    async with FakeLlamaServer() as fake:
        client = EngineClient("fake", fake.base_url)
        yield client
        await client.aclose()


def shape(value: Any) -> Any:
    """Names and kinds of a JSON value; equal neighbours in arrays count once."""
    if isinstance(value, dict):
        return {name: "free" if name in FREE else shape(part) for name, part in value.items()}
    if isinstance(value, list):
        return [key for key, _ in itertools.groupby(shape(part) for part in value)]
    if isinstance(value, bool) or value is None:
        return value
    return "number" if isinstance(value, int | float) else "text"


def events(raw: bytes) -> list[Any]:
    """The shapes of a stream's events, equal neighbours once: how many tokens come is the model's affair."""
    found = []
    for block in raw.split(b"\n\n"):
        lines = block.split(b"\n")
        data = next((line[6:] for line in lines if line.startswith(b"data: ")), None)
        parsed = shape(orjson.loads(data)) if data and data != b"[DONE]" else data
        found.append([lines[0] if len(lines) > 1 else b"", parsed])
    return [key for key, _ in itertools.groupby(found)]


async def exchange(client: EngineClient, name: str) -> tuple[int, list[Any], Any, bytes]:
    """Status, headers (a length only by name), shape and raw body of one exchange."""
    method, path, body = EXCHANGES[name]
    raw = body if isinstance(body, bytes | None) else orjson.dumps(body)
    async with client.open(method, path, JSON if raw else [], raw) as response:
        answer = await response.read()
    headers = [(key, b"" if key == b"Content-Length" else value) for key, value in response.headers]
    streamed = response.header(b"content-type") == b"text/event-stream"
    return response.status, headers, events(answer) if streamed else shape(orjson.loads(answer)), answer


def sorted_by_choice(stream: Any) -> Any:
    """Events of several sequences interleave as decoding goes; compare them as a set."""
    return sorted({repr(one) for one in stream})


@pytest.mark.parametrize("name", list(EXCHANGES))
async def test_the_fake_answers_as_the_engine(
    engine_client: EngineClient, fake_client: EngineClient, name: str
) -> None:
    status, headers, form, raw = await exchange(engine_client, name)
    fake_status, fake_headers, fake_form, fake_raw = await exchange(fake_client, name)
    assert fake_status == status
    assert fake_headers == headers
    if name.startswith("template") and status == 200:
        assert fake_raw == raw
    elif name == "slots":
        assert {key for one in fake_form for key in one} >= {"id", "n_ctx", "is_processing"}
    elif name.endswith("several-stream"):
        assert sorted_by_choice(fake_form) == sorted_by_choice(form)
    else:
        assert fake_form == form
    if status >= 400 and name != "bad-json":
        assert orjson.loads(fake_raw)["error"]["type"] == orjson.loads(raw)["error"]["type"]


async def truth(client: EngineClient, body: dict[str, Any]) -> TruthReader:
    reader = TruthReader(Route.COMPLETION, streaming=False)
    async with client.open("POST", "/completion", JSON, orjson.dumps(body)) as response:
        reader.feed(await response.read())
    assert reader.finished
    return reader


async def lengths(client: EngineClient, *texts: str) -> list[int]:
    return [len((await client.post_json("/tokenize", {"content": text}))["tokens"]) for text in texts]


@pytest.mark.parametrize("which", ["real", "fake"])
async def test_cached_and_evaluated_tokens_follow_the_same_rules(
    engine_client: EngineClient, fake_client: EngineClient, which: str
) -> None:
    client = engine_client if which == "real" else fake_client
    common = {"temperature": 0, "ignore_eos": True, "n_predict": 4}
    prompt = LONG * 4
    [length] = await lengths(client, prompt)

    def counts(reader: TruthReader) -> tuple[int | None, int | None, int]:
        return reader.cached_tokens, reader.processed_tokens, reader.output_tokens

    await truth(client, common | {"prompt": "x", "id_slot": 1, "cache_prompt": False})
    first = await truth(client, common | {"prompt": prompt, "id_slot": 1, "cache_prompt": False})
    assert counts(first) == (0, length, 4)
    again = await truth(client, common | {"prompt": prompt, "id_slot": 1})
    assert counts(again) == (length - 1, 1, 4)
    slots = await client.slots()
    assert slots is not None
    assert slots[1].resident_tokens == length + 4 - 1
    fresh = await truth(client, common | {"prompt": prompt, "id_slot": 1, "cache_prompt": False})
    assert counts(fresh) == (0, length, 4)
    modulo = await truth(client, common | {"prompt": prompt, "id_slot": 5})
    assert modulo.slot == 1
    assert modulo.cached_tokens == length - 1
    by_content = await truth(client, common | {"prompt": prompt + " and more"})
    assert by_content.slot == 1
    assert by_content.cached_tokens == length
    warmed = await truth(client, common | {"prompt": prompt, "id_slot": 2, "n_predict": 0})
    assert warmed.output_tokens == 1
    slots = await client.slots()
    assert slots is not None
    assert slots[2].resident_tokens == length
