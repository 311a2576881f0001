"""From bodies to canonical prompts, bounds, flags and pinned bodies."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from warmslot.router import prompt
from warmslot.router.prompt import BadRequest
from warmslot.router.values import BLOCK, ROOT, Route

from tests.fakes.slot_model import render as template

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmslot.router.backend import EngineClient

    from tests.fakes.llama_server import FakeLlamaServer

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def rendered(fake: FakeLlamaServer) -> int:
    """How often the template was asked for."""
    return sum(request.path == "/apply-template" for request in fake.requests)


async def test_a_chat_is_what_the_engines_template_makes_of_it(client: EngineClient) -> None:
    found = await prompt.render(client, Route.CHAT, CHAT)
    assert found.data == template(CHAT).encode()
    assert found.root == ROOT
    assert found.tokens is None


async def test_a_repeated_body_is_rendered_once(fake: FakeLlamaServer, client: EngineClient) -> None:
    first = await prompt.render(client, Route.CHAT, CHAT)
    again = await prompt.render(client, Route.CHAT, CHAT | {"stream": True})
    assert first == again
    assert rendered(fake) == 1
    await prompt.render(client, Route.CHAT, CHAT | {"tools": [{"type": "function"}]})
    assert rendered(fake) == 2


async def test_the_memory_of_renderings_is_bounded(fake: FakeLlamaServer, client: EngineClient) -> None:
    for number in range(70):
        await prompt.render(client, Route.CHAT, CHAT | {"seed": number})
    await prompt.render(client, Route.CHAT, CHAT | {"seed": 69})
    assert rendered(fake) == 70
    await prompt.render(client, Route.CHAT, CHAT | {"seed": 0})
    assert rendered(fake) == 71


async def test_without_a_template_tools_and_messages_stand_in(
    fake: FakeLlamaServer, client: EngineClient
) -> None:
    fake.missing.add("apply-template")
    tools = [{"type": "function", "function": {"name": "f"}}]
    one = await prompt.render(client, Route.CHAT, CHAT | {"tools": tools})
    longer = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "yes"}], "tools": tools}
    two = await prompt.render(client, Route.CHAT, longer)
    assert one.data is not None
    assert two.data is not None
    assert two.data.startswith(one.data)
    assert one.root == two.root != ROOT
    await fake.crash()
    assert await prompt.render(client, Route.CHAT, CHAT | {"tools": tools}) == one


async def test_a_prompt_string_and_a_rendered_chat_share_one_space(client: EngineClient) -> None:
    chat = await prompt.render(client, Route.CHAT, CHAT)
    assert chat.data is not None
    text = {"prompt": chat.data.decode()}
    assert await prompt.render(client, Route.COMPLETIONS, text) == chat
    assert await prompt.render(client, Route.COMPLETION, text) == chat


async def test_token_arrays_are_packed_exactly(client: EngineClient) -> None:
    tokens = list(range(1000, 1040))
    found = await prompt.render(client, Route.COMPLETION, {"prompt": tokens})
    assert found.data == struct.pack("<40i", *tokens)
    assert found.tokens == 40
    assert len(found.chain) == 160 // BLOCK
    assert found.root != ROOT


async def test_mixed_arrays_keep_text_and_ids_apart(client: EngineClient) -> None:
    one = await prompt.render(client, Route.COMPLETION, {"prompt": [5, "ab", 6]})
    two = await prompt.render(client, Route.COMPLETION, {"prompt": [5, "ab", 7]})
    assert one.data is not None
    assert two.data is not None
    assert one.data[:7] == two.data[:7]
    assert one.data != two.data
    assert one.tokens is None
    assert one.root == two.root


async def test_of_several_prompts_the_first_is_the_key(client: EngineClient) -> None:
    body = {"prompt": ["first", "second", [1, 2]]}
    found = await prompt.render(client, Route.COMPLETIONS, body)
    assert found.data == b"first"
    assert prompt.slots_needed(body) == 3
    assert prompt.slots_needed({"prompt": [1, 2, 3]}) == 1
    assert prompt.slots_needed({"prompt": [1, "a"]}) == 1
    assert prompt.slots_needed({"prompt": [[1, 2], [3]], "n": 2}) == 4
    assert prompt.slots_needed({"prompt": "a", "n_cmpl": 3}) == 3
    assert prompt.slots_needed({"n": None}) == 1


async def test_media_set_prompts_apart(client: EngineClient) -> None:
    async def of(**more: Any) -> Any:
        return await prompt.render(client, Route.COMPLETION, {"prompt": {"prompt_string": "see", **more}})

    plain, one, two = await of(), await of(multimodal_data=["AA"]), await of(multimodal_data=["BB"])
    assert [prompt.text_of(found) for found in (plain, one, two)] == ["see"] * 3
    assert len({found.data[:1] for found in (plain, one, two) if found.data}) == 3
    assert len({plain.root, one.root, two.root}) == 3


async def test_lora_and_tenant_set_prompts_apart(client: EngineClient) -> None:
    async def root(lora: Any, tenant: bytes = b"") -> bytes:
        base = prompt.root_of({}, isolation=tenant)
        return (await prompt.render(client, Route.CHAT, CHAT | {"lora": lora}, root=base)).root

    half = [{"id": 0, "scale": 0.5}]
    both = [{"id": 1, "scale": 1}, {"id": 0, "scale": 0.5}]
    assert await root([]) == await root(None) == await root([{"id": 0, "scale": 0}]) == ROOT
    assert await root(both) == await root(both[::-1])
    roots = [ROOT, await root(half), await root(both), await root(None, b"t1"), await root(None, b"t2")]
    roots += [await root(half, b"t1")]
    assert len(set(roots)) == len(roots)
    assert prompt.root_of({"lora": half}, isolation=b"t1") == await root(half, b"t1")


@pytest.mark.parametrize("route", [Route.RESPONSES, Route.MESSAGES])
async def test_other_routes_grow_as_their_conversations_do(client: EngineClient, route: Route) -> None:
    name = "input" if route is Route.RESPONSES else "messages"
    turn = {"role": "user", "content": "one"}
    first = await prompt.render(client, route, {"system": "S", "instructions": "S", name: [turn]})
    reply = {"role": "assistant", "content": "two"}
    second = await prompt.render(
        client, route, {"system": "S", "instructions": "S", name: [turn, reply, turn]}
    )
    assert first.data is not None
    assert second.data is not None
    assert b"S" in first.data
    assert second.root == first.root


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (Route.CHAT, {}, "messages"),
        (Route.CHAT, {"messages": "x"}, "messages"),
        (Route.COMPLETION, {}, "prompt"),
        (Route.COMPLETION, {"prompt": []}, "prompt"),
        (Route.COMPLETION, {"prompt": 5}, "prompt"),
        (Route.COMPLETION, {"prompt": True}, "prompt"),
        (Route.COMPLETION, {"prompt": [1.5]}, "prompt"),
        (Route.COMPLETION, {"prompt": [True]}, "prompt"),
        (Route.COMPLETION, {"prompt": {"a": 1}}, "prompt"),
        (Route.COMPLETION, {"prompt": [2**40]}, "prompt"),
        (Route.CHAT, CHAT | {"lora": 3}, "lora"),
        (Route.CHAT, CHAT | {"lora": [{"id": "a"}]}, "lora"),
        (Route.CHAT, CHAT | {"lora": [{"id": 1, "scale": "b"}]}, "lora"),
    ],
)
async def test_wrong_types_name_the_field(
    client: EngineClient, route: Route, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as refusal:
        await prompt.render(client, route, body)
    assert refusal.value.param == param
    assert (
        param in refusal.value.message or "LoRA" in refusal.value.message or "token" in refusal.value.message
    )


@pytest.mark.parametrize(
    ("ask", "body", "param"),
    [
        (prompt.is_streaming, {"stream": "yes"}, "stream"),
        (prompt.keeps_prefix, {"cache_prompt": 0}, "cache_prompt"),
        (prompt.expected_output_tokens, {"max_tokens": "5"}, "max_tokens"),
        (prompt.expected_output_tokens, {"n_predict": True}, "n_predict"),
        (prompt.slots_needed, {"n": 0}, "n"),
        (prompt.slots_needed, {"n": "2"}, "n"),
        (prompt.slots_needed, {"n": 1.5}, "n"),
    ],
)
def test_wrong_flags_name_the_field(ask: Callable[[Any], object], body: Any, param: str) -> None:
    with pytest.raises(BadRequest, match=f"'{param}' must be") as refusal:
        ask(body)
    assert refusal.value.param == param


def test_flags_and_bounds() -> None:
    assert prompt.is_streaming({"stream": True})
    assert not prompt.is_streaming({"stream": None})
    assert prompt.keeps_prefix({})
    assert not prompt.keeps_prefix({"cache_prompt": False})
    assert prompt.expected_output_tokens({}) is None
    assert prompt.expected_output_tokens({"n_predict": -1}) is None
    assert prompt.expected_output_tokens({"max_tokens": 7, "max_completion_tokens": 5}) == 5
    assert prompt.expected_output_tokens({"max_output_tokens": 9}) == 9
    assert prompt.expected_output_tokens({"n_predict": 0}) == 0


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"{bad", "line 1"),
        (b"", "line 1"),
        (b"[1]", "an array"),
        (b'"secret"', "a string"),
        (b"null", "null"),
    ],
)
def test_what_is_no_object_is_refused_without_quoting_it(raw: bytes, told: str) -> None:
    for refuse in (prompt.parse, lambda one: prompt.pin(one, 0)):
        with pytest.raises(BadRequest) as refusal:
            refuse(raw)
        assert refusal.value.param is None
        assert "secret" not in refusal.value.message
    with pytest.raises(BadRequest, match=told):
        prompt.parse(raw)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b'{"a": "' + b"x" * 50 + b'\xff"}', "not UTF-8 at byte offset 57"),
        (b'{"a": "\xc3', "not UTF-8 at byte offset 7"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8 at byte offset 7"),
        ('{"a": "ä",\n "b" 1}'.encode(), "line 2, column 6"),
    ],
)
def test_what_is_no_json_is_told_by_its_place(raw: bytes, told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        prompt.parse(raw)


def test_pinning_leaves_the_clients_bytes_alone() -> None:
    raw = b'{ "seed": 12345678901234567890123, "t": 0.10000000000000000001, "prompt": "\\u00e9}" }\n'
    pinned = prompt.pin(raw, 3)
    assert pinned.startswith(raw.rstrip()[:-1].rstrip())
    assert json.loads(pinned) == json.loads(raw) | {"id_slot": 3, "cache_prompt": True}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"{}", {"id_slot": 2, "cache_prompt": True}),
        (b" { } ", {"id_slot": 2, "cache_prompt": True}),
        (b'{"id_slot":9}', {"id_slot": 2, "cache_prompt": True}),
        (b'{"id\\u005fslot":9}', {"id_slot": 2, "cache_prompt": True}),
        (b'{"\\u0069d_slot":9}', {"id_slot": 2, "cache_prompt": True}),
        (b'{"cache_prompt":false}', {"id_slot": 2, "cache_prompt": False}),
        (b'{"cache_prompt":null}', {"id_slot": 2, "cache_prompt": True}),
        (b'{"a":"\\"id_slot\\""}', {"a": '"id_slot"', "id_slot": 2, "cache_prompt": True}),
    ],
)
def test_pinning_replaces_the_clients_own_slot(raw: bytes, expected: dict[str, Any]) -> None:
    assert json.loads(prompt.pin(raw, 2)) == expected
    assert orjson.loads(prompt.pin(orjson.loads(raw), 2)) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.text(max_size=6) | st.sampled_from(["id_slot", "cache_prompt", "prompt", "a}"])


@given(
    body=st.dictionaries(KEYS, VALUES, max_size=5), indent=st.none() | st.integers(0, 2), ascii_=st.booleans()
)
@settings(CALM, max_examples=300)
def test_pinning_changes_nothing_else(body: dict[str, Any], indent: int | None, ascii_: bool) -> None:
    raw = json.dumps(body, indent=indent, ensure_ascii=ascii_).encode()
    kept = body.get("cache_prompt")
    expected = {**body, "id_slot": 1, "cache_prompt": True if kept is None else kept}
    assert json.loads(prompt.pin(raw, 1)) == expected
    assert json.loads(prompt.pin(body, 1)) == expected
