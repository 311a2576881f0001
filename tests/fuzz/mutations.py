"""Bodies and headers that no client should send, made from ones that it might, as Hypothesis draws them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import orjson
from hypothesis import strategies as st

from tests.support.likeness import CORPUS, REAL

if TYPE_CHECKING:
    from random import Random

SEEDS = [request for request in (CORPUS | REAL).values() if isinstance(request[2], dict)]
PATHS = sorted(
    {request[1] for request in SEEDS} | {"/props", "/slots/0?action=erase", "/v1/models", "/nowhere"}
)

FIELDS = (
    *(
        "model",
        "stream",
        "n",
        "id_slot",
        "cache_prompt",
        "max_tokens",
        "n_predict",
        "max_output_tokens",
        "lora",
    ),
    *("messages", "prompt", "input", "tools", "tool_choice", "system", "instructions", "stream_options"),
    *("response_format", "grammar", "logprobs", "reasoning", "n_cmpl", "return_progress", "temperature"),
)
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        2**31,
        2**53,
        1e300,
        -0.5,
        "",
        "m",
        "nope",
        "\x00",
        "é" * 40,
        "\U0001f600",
    ),
    *([], {}, [[]], [None], [{}], [1, 2, 3], [1, "two"], ["a", "b"], [["a"], ["b"]], {"role": "user"}, DEEP),
    [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": 1, "name": None, "input": [DEEP]}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 3, "content": [3]}]}],
    [{"type": "function_call", "arguments": {"a": 1}}, {"call_id": 3, "output": 4}, 5, "six"],
    {"prompt_string": "x", "multimodal_data": [1]},
)
RAW = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b"\xff\xfe",
    b'{"a":NaN}',
    b'{"a":1e999}',
    b"{} {}",
    b"[" * 5000,
)
HEADERS: tuple[dict[str, str], ...] = (
    *({"x-warmslot-priority": "loud"}, {"x-warmslot-priority": "batch"}, {"x-warmslot-session": "s" * 300}),
    *(
        {"x-warmslot-session": "\xe9"},
        {"x-warmslot-queue": "1"},
        {"authorization": "Bearer"},
        {"x-api-key": ""},
    ),
    *(
        {"x-request-id": "\xff" * 20},
        {"x-conversation-id": "c"},
        {"content-type": "text/plain"},
        {"te": "trailers"},
    ),
    *(
        {"content-encoding": "gzip"},
        {"expect": "200-maybe"},
        {"connection": "x-api-key, close"},
        {"host": "x"},
    ),
)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
"""Any value."""

NAMES = st.sampled_from([name for headers in HEADERS for name in headers]) | st.from_regex(
    r"[a-z][a-z0-9-]{0,12}", fullmatch=True
)
HEADER = st.sampled_from(HEADERS) | st.dictionaries(
    NAMES.filter(lambda name: name not in {"content-length", "transfer-encoding"}),  # of the framing itself
    st.text(
        st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=30
    ).map(str.strip),
    max_size=3,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, bytes, dict[str, str]]:
    """A request that a client might send, with a few things wrong: method, path, body, headers."""
    rng = draw(st.randoms(use_true_random=False))
    _, path, seed = draw(st.sampled_from(SEEDS))
    body = orjson.loads(orjson.dumps(seed))
    for _ in range(rng.randint(1, 3)):
        value = draw(st.sampled_from(VALUES) | JSON)
        _mutate(rng, body, json.loads(json.dumps(value)))  # a copy, as a next mutation may go into it
    data = json.dumps(body, ensure_ascii=False).encode()  # which knows no bounds of numbers and depth
    kind = rng.random()
    if kind < 0.1:
        data = draw(st.sampled_from(RAW) | st.binary(max_size=200))
    elif kind < 0.3:
        data = _damaged(rng, data)
    if rng.random() < 0.1:
        path = draw(st.sampled_from(PATHS))
    headers = draw(HEADER) if rng.random() < 0.3 else {}
    method = "POST" if rng.random() < 0.97 else rng.choice(("GET", "PUT", "DELETE", "OPTIONS", "HEAD"))
    return method, path, data, headers


def _mutate(rng: Random, body: Any, value: Any) -> None:
    """Change one place of a JSON value, perhaps to another value."""
    while True:
        if isinstance(body, dict):
            if not body or rng.random() < 0.5:
                body[rng.choice(FIELDS)] = value
                return
            key = rng.choice(sorted(body))
        elif isinstance(body, list) and body:
            key = rng.randrange(len(body))
        else:
            return
        if rng.random() < 0.5 and isinstance(body[key], dict | list) and body[key]:
            body = body[key]
        elif rng.random() < 0.3:
            del body[key]
            return
        else:
            body[key] = value
            return


def _damaged(rng: Random, data: bytes) -> bytes:
    at = rng.randrange(len(data)) if data else 0
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 2:
            return (
                data[:at]
                + rng.choice((b"\\u005f", b"\\ud800", b'"id_slot":7,', b",", b"\x00", b"}"))
                + data[at:]
            )
        case _:
            return data[:at] + data
