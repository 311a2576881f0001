"""Bodies and headers that no client should send, made from ones that it might. Equal numbers, equal ones."""

from __future__ import annotations

import random
from typing import Any

import orjson

from tests.support.likeness import CORPUS, REAL

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


def request_of(number: int) -> tuple[str, str, bytes, dict[str, str]]:
    """The request of a number: method, path, body, headers."""
    rng = random.Random(number)  # noqa: S311 - repeatable, which is the point
    _, path, seed = rng.choice(SEEDS)
    body = orjson.loads(orjson.dumps(seed))
    for _ in range(rng.randint(1, 3)):
        _mutate(rng, body)
    try:
        data = orjson.dumps(body)
    except orjson.JSONEncodeError:  # deeper than it writes
        data = b'{"messages":' + b"[" * 400 + b"]" * 400 + b"}"
    kind = rng.random()
    if kind < 0.1:
        data = rng.choice(RAW)
    elif kind < 0.3:
        data = _damaged(rng, data)
    if rng.random() < 0.1:
        path = rng.choice(PATHS)
    headers = dict(rng.choice(HEADERS)) if rng.random() < 0.3 else {}
    method = "POST" if rng.random() < 0.97 else rng.choice(("GET", "PUT", "DELETE", "OPTIONS", "HEAD"))
    return method, path, data, headers


def _mutate(rng: random.Random, body: Any) -> None:
    """Change one place of a JSON value."""
    while True:
        if isinstance(body, dict):
            if not body or rng.random() < 0.5:
                body[rng.choice(FIELDS)] = rng.choice(VALUES)
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
            body[key] = rng.choice(VALUES)
            return


def _damaged(rng: random.Random, data: bytes) -> bytes:
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
