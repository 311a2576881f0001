"""The truth is read from streams however they are cut, and from whole bodies."""

from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from warmslot.router.backend import EngineClient
from warmslot.router.stream import TruthReader
from warmslot.router.values import Route

from tests.fakes.llama_server import FakeLlamaServer

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Time says nothing about these properties, least of all on a busy machine."""

TIMINGS = {"cache_n": 30, "prompt_n": 5, "prompt_ms": 50.0, "predicted_n": 3, "predicted_ms": 20.0}


def sse(*events: Any, end: str = "\n") -> bytes:
    """A stream of JSON events, or raw text where one is a string."""
    parts = [one if isinstance(one, str) else f"data: {orjson.dumps(one).decode()}" for one in events]
    return "".join(part + end + end for part in parts).encode()


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


CHAT = sse(
    chunk({"role": "assistant", "content": None}),
    chunk({"content": "Hé"}),
    chunk({"content": "llo"}),
    chunk({}, "stop", timings=TIMINGS),
    "data: [DONE]",
)
USAGE = sse(
    chunk({"role": "assistant", "content": None}),
    chunk({"content": "Hello"}),
    chunk({}, "length"),
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 35,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 30},
        },
    },
    "data: [DONE]",
)
PROGRESS = sse(
    chunk(
        {"role": "assistant", "content": None}, prompt_progress={"total": 35, "cache": 30, "processed": 30}
    ),
    chunk(
        {"role": "assistant", "content": None}, prompt_progress={"total": 35, "cache": 30, "processed": 33}
    ),
)
COMPLETION = sse(
    {"index": 0, "content": "He", "stop": False, "id_slot": -1},
    {"index": 0, "content": "llo", "stop": False, "id_slot": -1},
    {"index": 0, "content": "", "stop": True, "id_slot": 2, "stop_type": "eos", "timings": TIMINGS},
)
COMPLETIONS = sse(
    {"choices": [{"index": 0, "text": "Hello", "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "timings": TIMINGS},
    "data: [DONE]",
)
RESPONSES = sse(
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"Hello"}',
    {
        "type": "response.completed",
        "response": {
            "status": "completed",
            "output": [{"type": "message", "content": [{"type": "output_text", "text": "Hello"}]}],
            "usage": {"input_tokens": 35, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 30}},
        },
        "timings": TIMINGS,
    },
)
MESSAGES = sse(
    {
        "type": "message_start",
        "message": {"usage": {"cache_read_input_tokens": 30, "input_tokens": 5, "output_tokens": 0}},
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
    {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
)
STREAMS = {
    "chat": (Route.CHAT, CHAT),
    "usage": (Route.CHAT, USAGE),
    "completion": (Route.COMPLETION, COMPLETION),
    "completions": (Route.COMPLETIONS, COMPLETIONS),
    "responses": (Route.RESPONSES, RESPONSES),
    "messages": (Route.MESSAGES, MESSAGES),
}


def read(route: Route, *pieces: bytes, streaming: bool = True) -> TruthReader:
    reader = TruthReader(route, streaming)
    for piece in pieces:
        reader.feed(piece)
    return reader


def told(reader: TruthReader) -> tuple[Any, ...]:
    """All that a reader tells."""
    return (
        reader.first_token,
        reader.finished,
        reader.cached_tokens,
        reader.processed_tokens,
        reader.output_tokens,
        reader.prefill_seconds,
        reader.decode_seconds,
        reader.generated,
        reader.error,
        reader.stop_reason,
        reader.slot,
        reader.progress,
    )


@pytest.mark.parametrize("name", list(STREAMS))
def test_each_shape_tells_the_same_counts(name: str) -> None:
    reader = read(*STREAMS[name])
    assert reader.first_token
    assert reader.finished
    assert (reader.cached_tokens, reader.processed_tokens, reader.output_tokens) == (30, 5, 3)
    assert reader.generated == ("Héllo" if name == "chat" else "Hello").encode()
    assert reader.error is None
    if name not in {"usage", "messages"}:
        assert (reader.prefill_seconds, reader.decode_seconds) == (0.05, 0.02)


def test_stop_reasons_and_the_slot() -> None:
    reasons = {name: read(*stream).stop_reason for name, stream in STREAMS.items()}
    assert reasons == {
        "chat": "stop",
        "usage": "length",
        "completion": "eos",
        "completions": "length",
        "responses": "completed",
        "messages": "max_tokens",
    }
    assert read(*STREAMS["completion"]).slot == 2


@given(
    name=st.sampled_from(list(STREAMS)),
    cuts=st.lists(st.integers(0, 1200), max_size=40),
    crlf=st.booleans(),
    comments=st.booleans(),
)
@settings(CALM, max_examples=400)
def test_any_cutting_gives_the_same_truth(name: str, cuts: list[int], crlf: bool, comments: bool) -> None:
    route, raw = STREAMS[name]
    expected = told(read(route, raw))
    if comments:
        raw = b": ping\n\n" + raw.replace(b"\n\n", b"\n\n: ping\n\n:\n\n")
    if crlf:
        raw = raw.replace(b"\n", b"\r\n")
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    assert told(read(route, *(raw[a:b] for a, b in itertools.pairwise(edges)))) == expected


@given(st.lists(st.binary(max_size=60), max_size=20), st.sampled_from(list(Route)), st.booleans())
@settings(CALM)
def test_no_bytes_make_it_raise(pieces: list[bytes], route: Route, streaming: bool) -> None:
    told(read(route, *pieces, streaming=streaming))


FIELDS = [
    *("choices", "delta", "message", "content", "text", "index", "usage", "timings", "cache_n", "prompt_n"),
    *("type", "response", "output", "error", "stop", "prompt_progress", "total", "prompt_tokens"),
    *("prompt_tokens_details", "cached_tokens", "finish_reason", "tool_calls"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)
TYPES = [
    *("message", "message_start", "message_delta", "content_block_delta", "content_block_start"),
    *("response.completed", "response.failed", "response.output_text.delta", "response.reasoning.delta"),
]


@given(
    st.dictionaries(
        st.sampled_from(["choices", "content", "usage", "timings", "index", "delta", "message", "error"]),
        JSON,
    ),
    st.none() | st.sampled_from(TYPES),
    st.booleans(),
)
@settings(CALM, max_examples=300)
def test_no_schema_makes_it_raise(event: dict[str, Any], kind: str | None, streaming: bool) -> None:
    if kind:
        event = {**event, "type": kind}
    raw = orjson.dumps(event)
    told(read(Route.CHAT, b"data: " + raw + b"\n\n" if streaming else raw, streaming=streaming))


def test_progress_is_no_content_but_tells_what_is_cached() -> None:
    reader = read(Route.CHAT, PROGRESS)
    assert not reader.first_token
    assert not reader.finished
    assert reader.progress == (35, 30, 33)
    assert (reader.cached_tokens, reader.processed_tokens) == (30, 3)
    reader.feed(CHAT)
    assert (reader.cached_tokens, reader.processed_tokens) == (30, 5)


def test_an_opening_role_is_no_content() -> None:
    assert not read(Route.CHAT, sse(chunk({"role": "assistant", "content": None}))).first_token
    assert read(Route.CHAT, sse(chunk({"role": "assistant", "content": "a"}))).first_token


def test_a_stream_that_stops_short_tells_what_came() -> None:
    reader = read(Route.CHAT, CHAT[: CHAT.index(b'"timings"')])
    assert reader.first_token
    assert not reader.finished
    assert reader.cached_tokens is None
    assert reader.processed_tokens is None
    assert reader.output_tokens == 2
    assert reader.generated == "Héllo".encode()


def test_an_error_in_the_stream() -> None:
    error = {"error": {"code": 500, "message": "Invalid input batch.", "type": "server_error"}}
    for raw in (sse(error), b"error: " + orjson.dumps(error) + b"\n\n"):
        reader = read(Route.CHAT, CHAT[:200], b"\n\n", raw)
        assert reader.error == error["error"]
        assert reader.finished
    anthropic = {"type": "error", "error": {"type": "api_error", "message": "x"}}
    assert read(Route.MESSAGES, sse(anthropic)).error == anthropic["error"]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_refusal_instead_of_an_answer(streaming: bool) -> None:
    body = b'{"error":{"code":400,"message":"no","type":"invalid_request_error"}}'
    reader = read(Route.CHAT, body[:10], body[10:], streaming=streaming)
    assert reader.error == {"code": 400, "message": "no", "type": "invalid_request_error"}
    assert not reader.first_token
    assert reader.cached_tokens is None


def test_several_choices_are_kept_apart() -> None:
    def of(index: int, **choice: Any) -> dict[str, Any]:
        return {"index": index, "delta": {}, "finish_reason": None} | choice

    raw = sse(
        "data: null",
        {"choices": [of(0, delta={"content": "a"})]},
        {"choices": [of(1, delta={"content": "x"})]},
        {"choices": [of(0, delta={"content": "b"})]},
        {"choices": [of(1, finish_reason="stop")], "timings": TIMINGS | {"cache_n": 7}},
        {"choices": [of(0, finish_reason="length")], "timings": TIMINGS},
        "data: [DONE]",
    )
    reader = read(Route.CHAT, raw)
    assert reader.generated == b"ab"
    assert (reader.cached_tokens, reader.stop_reason) == (30, "length")
    assert reader.answers[1].cached_tokens == 7
    assert "".join(reader.answers[1].text) == "x"


def test_several_prompts_end_when_all_have() -> None:
    done = {"content": "", "stop": True, "stop_type": "limit", "timings": TIMINGS}
    begun = sse({"index": 0, "content": "a", "stop": False}, {"index": 1, "content": "b", "stop": False})
    reader = read(Route.COMPLETION, begun, sse({"index": 0, **done}))
    assert not reader.finished
    reader.feed(sse({"index": 1, **done}))
    assert reader.finished


def test_thought_goes_before_content_and_nothing_after_a_call() -> None:
    raw = sse(
        chunk({"reasoning_content": "hm"}),
        chunk({"content": "so"}),
        chunk({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}),
        chunk({"content": "after"}),
        chunk({}, "tool_calls", timings=TIMINGS),
    )
    reader = read(Route.CHAT, raw)
    assert reader.generated == b"<think>hm</think>so"
    assert reader.first_token
    call = sse({"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}})
    assert read(Route.MESSAGES, call).first_token


WHOLE: dict[Route, Any] = {
    Route.CHAT: {
        "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}],
        "timings": TIMINGS,
    },
    Route.COMPLETIONS: {
        "choices": [{"index": 0, "text": "Hello", "finish_reason": "stop"}],
        "timings": TIMINGS,
    },
    Route.COMPLETION: {"content": "Hello", "stop": True, "stop_type": "eos", "timings": TIMINGS},
    Route.RESPONSES: {
        "object": "response",
        "status": "completed",
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "Hello"}]}],
        "usage": {"input_tokens": 35, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 30}},
    },
    Route.MESSAGES: {
        "type": "message",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "usage": {"cache_read_input_tokens": 30, "input_tokens": 5, "output_tokens": 3},
    },
}


@pytest.mark.parametrize("route", list(WHOLE))
def test_whole_bodies_tell_the_same(route: Route) -> None:
    raw = orjson.dumps(WHOLE[route])
    reader = TruthReader(route, streaming=False)
    for index in range(len(raw)):
        reader.feed(raw[index : index + 1])
        assert reader.finished is (index == len(raw) - 1)
    assert (reader.cached_tokens, reader.processed_tokens, reader.output_tokens) == (30, 5, 3)
    assert reader.generated == b"Hello"
    assert reader.first_token
    assert reader.stop_reason is not None


def test_an_array_of_answers() -> None:
    one = WHOLE[Route.COMPLETION]
    raw = orjson.dumps([one | {"index": 0, "id_slot": 3}, one | {"index": 1, "content": "other"}])
    reader = read(Route.COMPLETION, raw, streaming=False)
    assert (reader.generated, reader.slot, reader.cached_tokens) == (b"Hello", 3, 30)
    assert "".join(reader.answers[1].text) == "other"


def test_a_huge_event_in_small_pieces_is_read_once() -> None:
    big = {"index": 0, "content": "", "stop": True, "prompt": "x" * 3_000_000, "timings": TIMINGS}
    raw = sse(big)
    reader = read(Route.COMPLETION, *(raw[at : at + 1000] for at in range(0, len(raw), 1000)))
    assert reader.events == 1
    assert reader.cached_tokens == 30


def test_of_a_huge_body_the_tail_is_enough() -> None:
    head = b'{"choices":[{"index":0,"message":{"content":"' + b"x" * 40_000_000
    tail = b'"}}],"timings":' + orjson.dumps(TIMINGS) + b"}"
    reader = read(Route.CHAT, head, tail, streaming=False)
    assert (reader.cached_tokens, reader.processed_tokens, reader.finished) == (30, 5, True)


async def test_a_build_without_timings_leaves_usage_and_without_both_nothing() -> None:
    async with FakeLlamaServer() as fake:
        client = EngineClient("a", fake.base_url)
        for missing, known in (({"timings"}, True), ({"timings", "usage"}, False)):
            fake.missing, fake.unknown_fields = missing, True
            body = orjson.dumps({"prompt": "say", "max_tokens": 3, "stream": True})
            reader = TruthReader(Route.COMPLETIONS, streaming=True)
            async with client.open("POST", "/v1/completions", [], body) as response:
                async for piece in response.chunks():
                    reader.feed(piece)
            assert reader.finished
            assert reader.output_tokens == 3
            assert (reader.cached_tokens is not None) is known
        await client.aclose()
