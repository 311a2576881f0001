"""The routes that need more than a pin, on real engines: what the router believes is what the engine says."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.launcher.engine import EngineKind
from warmslot.router.backend import EngineClient
from warmslot.router.conversion import chat_of
from warmslot.router.values import Route

from tests.engine.conftest import CONTEXT, SLOTS, RunningEngine
from tests.support.router import chat, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from warmslot.launcher.engine import Engine

    from tests.support.router import Service

SELECTED = re.compile(r"get_availabl: id\s+(\d+) .* selected slot by (\w+)")
TOOLS_TEMPLATE = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.content is string %}
{{ message.content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that shows tools and calls: the demo model's own leaves both out."""

TOOLS = [
    {
        "name": f"tool_{number}",
        "description": f"Does the thing of number {number}, and nothing else.",
        "input_schema": {
            "type": "object",
            "properties": {"what": {"type": "string", "description": "The thing."}},
            "required": ["what"],
        },
    }
    for number in range(3)
]


@dataclass
class Address:
    """A running engine as the router needs it."""

    base_url: str
    n_slots: int
    context: int


@pytest.fixture(scope="module")
def tooled(installed_engine: Engine, demo_model: Path) -> Iterator[RunningEngine]:
    """An engine of these tests' own, whose template shows tools."""
    running = RunningEngine(installed_engine, demo_model, "--jinja", "--chat-template", TOOLS_TEMPLATE)
    yield running
    running.stop()


@pytest.fixture
async def service(tooled: RunningEngine) -> AsyncIterator[Service]:
    async with serving([Address(tooled.base_url, SLOTS, CONTEXT)], fresh=False) as running:
        yield running
        await running.watcher.until(lambda w: w.level.get("m", 0) == 0)


MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "user", "content": "hello there"}]},
    "system": {
        "system": [{"type": "text", "text": "Be kind."}, {"type": "text", "text": " And brief."}],
        "messages": [{"role": "user", "content": "one"}],
    },
    "tools": {
        "system": "You use tools.",
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "find x"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "tool_1", "input": {"what": "é", "n": [1, 2.5]}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "found"}]},
        ],
    },
    "forced": {
        "tools": TOOLS,
        "tool_choice": {"type": "any"},
        "messages": [{"role": "user", "content": "find x"}],
    },
    "stamped": {
        "system": "x-anthropic-billing-header: cc_version=2; cch=ab12c;You are.",
        "messages": [{"role": "user", "content": "find x"}],
    },
    "begun": {
        "messages": [{"role": "user", "content": "find x"}, {"role": "assistant", "content": "I thought"}]
    },
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"input": "hello"},
    "items": {
        "instructions": "Be kind.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"role": "user", "content": "more"},
        ],
    },
    "tools": {
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}],
        "input": [
            {"role": "user", "content": "q"},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "res"},
        ],
    },
}


async def computed(client: EngineClient, route: Route, body: dict[str, Any], slot: int) -> int:
    """Compute in a slot what the router takes for the prompt of a body; its length in tokens."""
    text = await client.apply_template(chat_of(route, body) or {})
    answer = await client.post_json("/completion", {"prompt": text, "n_predict": 0, "id_slot": slot})
    timings = answer["timings"]
    return int(timings["cache_n"] + timings["prompt_n"])


@pytest.fixture
async def client(tooled: RunningEngine) -> AsyncIterator[EngineClient]:
    found = EngineClient("direct", tooled.base_url)
    yield found
    await found.aclose()
    await tooled.settled()


@pytest.mark.parametrize("name", MESSAGES)
async def test_the_text_of_messages_is_what_the_engine_evaluates(client: EngineClient, name: str) -> None:
    body = MESSAGES[name]
    total = await computed(client, Route.MESSAGES, body, 1)
    usage = (await client.post_json("/v1/messages", body | {"max_tokens": 1}))["usage"]
    assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (total - 1, 1)


@pytest.mark.parametrize("name", RESPONSES)
async def test_the_text_of_responses_is_what_the_engine_evaluates(client: EngineClient, name: str) -> None:
    body = RESPONSES[name]
    total = await computed(client, Route.RESPONSES, body, 1)
    answer = await client.post_json("/v1/responses", body | {"max_output_tokens": 1, "id_slot": 1})
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (total, total - 1)


async def test_five_turns_with_tools_beside_three_others(service: Service, tooled: RunningEngine) -> None:
    """What an Anthropic client's next turn shares with the one before is reused, and nobody else is hurt."""
    others = [
        chat(f"Number {number}. " + f"It is about {number}. " * 30, max_tokens=4) for number in range(3)
    ]
    lines = len(tooled.lines)
    for other in others:
        assert (await service.http.post("/v1/chat/completions", json=other)).status_code == 200
    messages: list[Any] = [{"role": "user", "content": "Please find out. " + "It matters a lot. " * 40}]
    shareable = reused = 0
    resident = 0
    for turn in range(5):
        body = {"system": "You use tools.", "tools": TOOLS, "messages": messages, "max_tokens": 6}
        answer = await service.http.post("/v1/messages", json=body, timeout=100)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        report = service.watcher.reports[-1]
        counted = await service.http.post("/v1/messages/count_tokens", json=body)
        total = counted.json()["input_tokens"]
        assert usage["cache_read_input_tokens"] + usage["input_tokens"] == total
        assert report.cached_tokens + report.processed_tokens == total
        selected = [match for line in tooled.lines[lines:] if (match := SELECTED.search(line))]
        assert int(selected[-1][1]) == report.slot.slot == int(answer.headers["x-warmslot-slot"])
        shareable += resident
        reused += report.cached_tokens if turn else 0
        resident = total
        call = {"type": "tool_use", "id": f"c{turn}", "name": "tool_1", "input": {"what": f"thing {turn}"}}
        found = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": f"It is {turn}. " * 12}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]
        again = await service.http.post("/v1/chat/completions", json=others[turn % 3])
        assert again.json()["timings"]["prompt_n"] == 1
    assert reused >= 0.95 * shareable
    assert not service.router.dispatcher.held()


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_token_fields_add_up(service: Service, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": f"Say {stream}. " * 30}], "max_tokens": 3}
    total = (await service.http.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    for _ in range(2):
        answer = await service.http.post("/v1/messages", json=body | {"stream": stream})
        if stream:
            events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
            usage = next(e for e in events if e["type"] == "message_start")["message"]["usage"]
        else:
            usage = answer.json()["usage"]
        assert usage["cache_read_input_tokens"] + usage["input_tokens"] == total
        report = service.watcher.reports[-1]
        assert report.cached_tokens + report.processed_tokens == total
    assert report.cached_tokens == total - 1


async def test_responses_are_pinned_and_reused(service: Service) -> None:
    items: list[Any] = [{"role": "user", "content": "Tell me of rivers. " * 30}]
    slots = set()
    for _ in range(3):
        body = {"input": items, "max_output_tokens": 4}
        answer = await service.http.post("/v1/responses", json=body)
        assert answer.status_code == 200
        slots.add(answer.headers["x-warmslot-slot"])
        items += [*answer.json()["output"], {"role": "user", "content": "Go on."}]
    report = service.watcher.reports[-1]
    assert len(slots) == 1
    assert report.cached_tokens > 0.85 * (report.cached_tokens + report.processed_tokens)
    assert report.predicted_tokens == pytest.approx(report.cached_tokens, abs=4)


async def test_what_embeddings_overwrite_is_not_counted_on(
    installed_engine: Engine, start_engine: Callable[..., Awaitable[str]]
) -> None:
    """They run alone, on a slot of the engine's choice; the router claims nothing that it cannot know."""
    if installed_engine.kind is EngineKind.EMBEDDED:
        pytest.skip("the embedded engine has no option --embeddings")
    profile = ("--no-kv-unified", "--no-cache-idle-slots", "--cache-ram", "0")
    url = await start_engine("-np", "2", "-c", "1024", *profile, "--embeddings", "--pooling", "last")
    async with serving([Address(url, 2, 512)]) as running:
        text = "Rivers run to the sea. " * 12
        for _ in range(2):
            assert (await running.http.post("/v1/chat/completions", json=chat(text, max_tokens=2))).is_success
        held = {view.ref.slot: view.resident_tokens for view in running.router.dispatcher.slots()}
        asked = running.router.dispatcher
        answers = await asyncio.gather(
            *(running.http.post("/v1/embeddings", json={"input": [f"One {n}", text]}) for n in range(3))
        )
        assert [len(answer.json()["data"]) for answer in answers] == [2, 2, 2]
        await running.watcher.until(lambda w: w.level["m"] == 0)
        assert not asked.held()
        assert max(held.values()) > 50
        again = await running.http.post("/v1/chat/completions", json=chat(text, max_tokens=2))
        assert int(again.headers["x-warmslot-predicted-tokens"]) <= again.json()["timings"]["cache_n"] + 2


async def test_an_engine_that_asks_for_a_key(start_engine: Callable[..., Awaitable[str]]) -> None:
    url = await start_engine("-np", "2", "-c", "1024", "--api-key", "its-own", "--metrics", "--slots")
    backend = {"name": "b0", "url": url, "api_key": "its-own"}
    async with serving([Address(url, 2, 512)], ready=False, pool={"backends": [backend]}) as running:
        await running.watcher.until(lambda watcher: ("b0", True) in watcher.changes)
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/apply-template"):
            answer = await running.http.post(path, json=chat("hello", max_tokens=2))
            assert answer.status_code == 200, answer.text
        for path in ("/props", "/slots", "/backends/b0/metrics"):
            assert (await running.http.get(path)).status_code == 200
        direct = await running.http.get(f"{url}/props")
        assert direct.status_code == 401


KEYS = [{"name": "a", "value": "ka"}, {"name": "b", "value": "kb"}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/completion"])
@pytest.mark.parametrize("isolation", [False, True])
async def test_isolated_tenants_learn_nothing_of_each_others_prompts(
    tooled: RunningEngine, path: str, isolation: bool
) -> None:
    """B's counts, and so the time that it waits, are the same whether A has asked that before or not."""
    text = f"The password of {path} is {isolation}. " + "Nobody else may learn of it. " * 30
    unheard = "Quite another matter. " + "Nobody has ever asked for this. " * 30
    async with serving(
        [Address(tooled.base_url, SLOTS, CONTEXT)],
        fresh=False,
        keys=KEYS,
        endpoint={"isolation": isolation},
    ) as service:

        async def ask(key: str, words: str) -> tuple[int, int, float]:
            """Prompt tokens reused, prompt tokens computed, seconds that the engine took for them."""
            body: dict[str, Any] = {"max_tokens": 1, **chat(words)}
            if path == "/v1/responses":
                body = {"max_output_tokens": 1, "input": words}
            if path == "/completion":
                body = {"n_predict": 1, "prompt": words}
            headers = {"authorization": f"Bearer {key}"}
            answer = await service.http.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            usage = told.get("usage", {})
            if path == "/v1/messages":
                cached, computed = usage["cache_read_input_tokens"], usage["input_tokens"]
            elif path == "/v1/responses":
                cached = usage["input_tokens_details"]["cached_tokens"]
                computed = usage["input_tokens"] - cached
            else:
                cached, computed = told["timings"]["cache_n"], told["timings"]["prompt_n"]
            return cached, computed, service.watcher.outcomes[-1].prefill_seconds

        for _ in range(2):
            await ask("ka", text)
        assert (await ask("ka", text))[0] > 100
        cached, computed, seconds = await ask("kb", text)
        if not isolation:
            assert cached > 100
            return
        assert cached == 0
        assert computed > 100
        # Every token was computed, which takes time even on a fast machine; one token would not.
        repeats = [await ask("kb", text) for _ in range(3)]  # a busy machine may hold up one of them
        assert max(rest for _, rest, _ in repeats) < computed / 10
        assert path == "/v1/responses" or seconds > 3 * min(again for _, _, again in repeats)
        # Neither a prompt's beginning nor a new one tells more.
        assert (await ask("kb", text[: len(text) // 2] + unheard))[0] < computed
        assert (await ask("ka", unheard))[1] > 100
