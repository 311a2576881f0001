"""The same request to an engine and through the router: what may differ is taken out, the rest compared."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import httpx

_IDS = re.compile(rb"(chatcmpl-|resp_|msg_|rs_|fc_|call_)[A-Za-z0-9]+")
_TIMES = re.compile(rb'"(created|created_at|completed_at|[a-z_]*_ms|[a-z_]*_per_second)":[-0-9.e+]+')
_SLOT = re.compile(rb'"id_slot":[0-9]+')
_COUNTS = re.compile(rb'"(cache_n|prompt_n|cached_tokens)":[0-9]+')
_ADDED = ("x-warmslot-", "x-request-id")
_DROPPED = ("access-control-",)
"""Which web pages may read an answer is the router's to say."""
_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "date"}

SYSTEM = {"role": "system", "content": "You are brief."}
CHAT: dict[str, Any] = {"messages": [SYSTEM, {"role": "user", "content": "Count."}], "max_tokens": 5}
_COUNTING = "one two three four five six seven eight nine ten " * 3
PROMPT: dict[str, Any] = {"prompt": f"{_COUNTING}one two three", "n_predict": 5, "max_tokens": 5}
"""How it goes on is beyond doubt, whichever batches the engine computed the prompt in."""

SHAPED = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": SHAPED},
}
LONG = {"role": "user", "content": "word " * 3000}

CORPUS: dict[str, tuple[str, str, dict[str, Any] | bytes | None]] = {
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat-short": ("POST", "/chat/completions", CHAT),
    "chat-stream": ("POST", "/v1/chat/completions", CHAT | {"stream": True}),
    "chat-usage": (
        "POST",
        "/v1/chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat-progress": ("POST", "/v1/chat/completions", CHAT | {"stream": True, "return_progress": True}),
    "chat-two": ("POST", "/v1/chat/completions", CHAT | {"n": 2}),
    "chat-wrong": ("POST", "/v1/chat/completions", {"messages": [{"role": "user"}]}),
    "completions": ("POST", "/v1/completions", PROMPT),
    "completions-stream": ("POST", "/v1/completions", PROMPT | {"stream": True}),
    "completion": ("POST", "/completion", PROMPT),
    "completion-old": ("POST", "/completions", PROMPT),
    "completion-stream": ("POST", "/completion", PROMPT | {"stream": True}),
    "completion-long": ("POST", "/completion", {"prompt": "word " * 3000}),
    "responses": ("POST", "/v1/responses", {"input": "Count.", "max_output_tokens": 5}),
    "responses-stream": (
        "POST",
        "/v1/responses",
        {"input": "Count.", "max_output_tokens": 5, "stream": True},
    ),
    "responses-wrong": ("POST", "/v1/responses", {}),
    "messages": ("POST", "/v1/messages", CHAT | {"messages": CHAT["messages"][1:]}),
    "messages-stream": ("POST", "/v1/messages", CHAT | {"messages": CHAT["messages"][1:], "stream": True}),
    "messages-wrong": ("POST", "/v1/messages", {}),
    "tokenize": ("POST", "/tokenize", {"content": "One two"}),
    "detokenize": ("POST", "/detokenize", {"tokens": [1, 2]}),
    "apply-template": ("POST", "/apply-template", CHAT),
    "props": ("GET", "/props", None),
    "nowhere": ("GET", "/nowhere", None),
}
"""Requests that both engines take, and some that they refuse."""

REAL: dict[str, tuple[str, str, dict[str, Any] | bytes | None]] = {
    "chat-logprobs": ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat-shaped": (
        "POST",
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": SHAPED}}},
    ),
    "chat-grammar": ("POST", "/v1/chat/completions", CHAT | {"grammar": 'root ::= "yes" | "no"'}),
    "chat-bad-grammar": ("POST", "/v1/chat/completions", CHAT | {"grammar": "root ::= ("}),
    "chat-image": (
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
    ),
    "chat-audio": (
        "POST",
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
                }
            ]
        },
    ),
    "chat-tools": ("POST", "/v1/chat/completions", CHAT | {"tools": [TOOL]}),
    "chat-tools-stream": (
        "POST",
        "/v1/chat/completions",
        CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40, "stream": True},
    ),
    "chat-two-stream": ("POST", "/v1/chat/completions", CHAT | {"n": 2, "stream": True}),
    "chat-stop": ("POST", "/v1/chat/completions", CHAT | {"stop": ["e"], "stream": True}),
    "chat-logprobs-stream": (
        "POST",
        "/v1/chat/completions",
        CHAT | {"logprobs": True, "top_logprobs": 1, "stream": True},
    ),
    "chat-no-cache": ("POST", "/v1/chat/completions", CHAT | {"cache_prompt": False}),
    "chat-lora": ("POST", "/v1/chat/completions", CHAT | {"lora": []}),
    "completions-echo": ("POST", "/v1/completions", PROMPT | {"echo": True}),
    "completions-probs": ("POST", "/v1/completions", PROMPT | {"logprobs": 2}),
    "completion-probs": ("POST", "/completion", PROMPT | {"n_probs": 2, "stream": True}),
    "completion-several": ("POST", "/completion", PROMPT | {"prompt": ["One two", "Three four"]}),
    "completion-tokens": ("POST", "/completion", PROMPT | {"prompt": [1, 2, 3, 4], "return_tokens": True}),
    "completion-mixed": ("POST", "/completion", PROMPT | {"prompt": [1, "two three", 4]}),
    "completion-bad-grammar": ("POST", "/completion", PROMPT | {"grammar": "root ::= ("}),
    "completion-stop": ("POST", "/completion", PROMPT | {"stop": ["six"], "stream": True}),
    "completions-long": ("POST", "/v1/completions", {"prompt": "word " * 3000, "stream": True}),
    "infill": ("POST", "/infill", {"input_prefix": "def f(", "input_suffix": "return", "n_predict": 3}),
    "responses-short": ("POST", "/responses", {"input": "Count.", "max_output_tokens": 5}),
    "responses-tools": (
        "POST",
        "/v1/responses",
        {
            "input": "Count.",
            "max_output_tokens": 40,
            "stream": True,
            "tools": [{"type": "function"} | TOOL["function"]],
            "tool_choice": "required",
        },
    ),
    "messages-long": ("POST", "/v1/messages", {"messages": [LONG], "max_tokens": 2, "stream": True}),
    "messages-tools": (
        "POST",
        "/v1/messages",
        CHAT
        | {
            "messages": CHAT["messages"][1:],
            "tools": [{"name": "look", "input_schema": SHAPED}],
            "tool_choice": {"type": "any"},
            "max_tokens": 40,
            "stream": True,
        },
    ),
    "embeddings": ("POST", "/v1/embeddings", {"input": "One"}),
    "rerank": ("POST", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    "count": ("POST", "/v1/messages/count_tokens", CHAT | {"messages": CHAT["messages"][1:]}),
    "count-responses": ("POST", "/v1/responses/input_tokens", {"input": "Count."}),
    "count-wrong": ("POST", "/v1/messages/count_tokens", {}),
    "lora": ("GET", "/lora-adapters", None),
    "lora-set": ("POST", "/lora-adapters", b"[]"),
    "lora-wrong": ("POST", "/lora-adapters", {"id": 0}),
    "tokenize-empty": ("POST", "/tokenize", {}),
    "detokenize-wrong": ("POST", "/detokenize", {"tokens": "x"}),
    "apply-template-wrong": ("POST", "/apply-template", {}),
    "tokenize-pieces": ("POST", "/tokenize", {"content": "One", "with_pieces": True, "add_special": True}),
}
"""More, which the fake engine does not know."""

POOLED: dict[str, tuple[str, str, dict[str, Any] | bytes | None]] = {
    f"{path}-{name}": ("POST", path, body)
    for path in ("/v1/embeddings", "/embeddings", "/embedding")
    for name, body in {
        "one": {"input": "One two three"},
        "several": {"input": ["One two", "three"]},
        "base64": {"input": "One", "encoding_format": "base64"},
        "content": {"content": "One two"},
        "wrong": {},
    }.items()
}
"""For an engine that was started with ``--embeddings``."""

RANKED: dict[str, tuple[str, str, dict[str, Any] | bytes | None]] = {
    f"{path}-{name}": ("POST", path, body)
    for path in ("/v1/rerank", "/rerank", "/reranking", "/v1/reranking")
    for name, body in {
        "documents": {"query": "river", "documents": ["The sea.", "A river runs."]},
        "best": {"query": "river", "documents": ["The sea.", "A river runs."], "top_n": 1},
        "wrong": {"query": "river"},
    }.items()
}
"""For an engine that was started with ``--reranking``."""


@dataclass(frozen=True)
class Likeness:
    """What an answer is, less what may differ."""

    status: int
    headers: list[tuple[str, str]]
    pieces: list[bytes]


async def ask(http: httpx.AsyncClient, url: str, request: tuple[str, str, Any]) -> Likeness:
    """One exchange. Greedy, so that equal prompts have equal answers."""
    method, path, body = request
    content = body
    if isinstance(body, dict):
        greedy = {"temperature": 0, "seed": 1} if body.keys() & {"messages", "prompt", "input"} else {}
        content = orjson.dumps(body | greedy)
    headers = {"connection": "close"}  # the engine closes after a stream, whatever it announced
    if content is not None:
        headers["content-type"] = "application/json"
    answer = await http.request(method, url + path, content=content, headers=headers)
    kept = [
        (name, value)
        for name, value in answer.headers.multi_items()
        if not name.startswith((*_ADDED, *_DROPPED)) and name not in _CONNECTION
    ]
    data = _SLOT.sub(b'"id_slot":0', _TIMES.sub(rb'"\1":0', _IDS.sub(rb"\1", answer.content)))
    if isinstance(body, dict) and ("n" in body or isinstance(body.get("prompt"), list)):
        # Which slots several prompts take is the engine's choice: the next such request may start anew.
        data = _COUNTS.sub(rb'"\1":0', data)
    streams = answer.headers["content-type"].startswith("text/event-stream")
    pieces = data.split(b"\n\n") if streams else [data]
    if streams and isinstance(body, dict) and "n" in body:
        # So is which of two choices comes first in each step; each by itself is compared event by event.
        pieces.sort(key=_choice)
    return Likeness(answer.status_code, kept, pieces)


def _choice(piece: bytes) -> int:
    found = re.search(rb'"index":([0-9]+)', piece)
    return int(found[1]) if found else 1 << 30


async def both(
    http: httpx.AsyncClient, engine: str, router: str, request: tuple[str, str, Any]
) -> tuple[Likeness, Likeness]:
    """From the engine itself and through the router, each asked twice: then both find the prompt computed."""
    await ask(http, engine, request)
    direct = await ask(http, engine, request)
    await ask(http, router, request)
    return direct, await ask(http, router, request)
