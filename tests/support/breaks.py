"""Conversations of agents with tools, and what clients do to them between two calls, drawn from a seed.

A case is two request bodies of one conversation, the earlier one's answer, and the truth about what changed.
Nothing here knows how changes are recognised.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Body = dict[str, Any]

KINDS = (
    "clock",
    "nonce",
    "reordered tools",
    "reserialised arguments",
    "dropped reasoning",
    "edited history",
    "new conversation",
)

_FILES = ("api/views.py", "core/cache.go", "src/parser.rs", "lib/queue.ts", "db/schema.sql", "app/login.vue")
_VERBS = ("fails", "hangs", "is slow", "returns the wrong page", "leaks memory", "prints nothing")
_THINGS = ("checkout", "the nightly import", "search", "the upload form", "the billing job", "the login page")
_PHRASES = (
    "Look at the code before you change it.",
    "Keep answers short and name the file that you talk about.",
    "Run the tests after each change.",
    "Never touch files outside the repository.",
    "Ask when a requirement can be read in two ways.",
    "Prefer small steps that can be undone.",
    "Report numbers with their units.",
    "Quote an error message in full.",
)
_TOOLS = (
    ("read_file", {"path": "string", "first": "integer", "last": "integer"}),
    ("search", {"pattern": "string", "path": "string", "ignore_case": "boolean"}),
    ("run_tests", {"path": "string", "verbose": "boolean"}),
    ("edit_file", {"path": "string", "old": "string", "new": "string"}),
    ("list_dir", {"path": "string", "depth": "integer"}),
    ("shell", {"command": "string", "timeout": "integer"}),
)


@dataclass(frozen=True)
class Case:
    """Two calls of one conversation with a change between them. ``index`` is -1 for the list of tools."""

    kind: str
    index: int
    before: Body
    reply: str
    after: Body
    note: str


def sentence(random: Random) -> str:
    return (
        f"{random.choice(_THINGS).capitalize()} {random.choice(_VERBS)} since the change in "
        f"{random.choice(_FILES)}, in about {random.randint(2, 95)} of {random.randint(100, 900)} tries."
    )


def system_text(random: Random) -> str:
    rules = random.sample(_PHRASES, random.randint(4, len(_PHRASES)))
    return f"You are an engineer on call for {random.choice(_THINGS)}.\n" + "\n".join(f"- {r}" for r in rules)


def tools(random: Random) -> list[Body]:
    chosen = random.sample(_TOOLS, random.randint(3, len(_TOOLS)))
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Use this for {random.choice(_THINGS)}: {name.replace('_', ' ')}.",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in arguments.items()},
                    "required": list(arguments)[:1],
                },
            },
        }
        for name, arguments in chosen
    ]


def tool_output(random: Random) -> str:
    if random.random() < 0.4:
        rows = [
            {"id": n, "file": random.choice(_FILES), "hits": random.randint(0, 99)}
            for n in range(random.randint(3, 8))
        ]
        return json.dumps({"rows": rows, "more": random.random() < 0.5})
    return "\n".join(
        f"{random.randint(1, 400):4d}: {random.choice(_FILES)} {random.choice(_VERBS)}"
        for _ in range(random.randint(5, 20))
    )


def turn(random: Random, number: int) -> list[Body]:
    """What the assistant did, and what the tool said."""
    name, arguments = random.choice(_TOOLS)
    values: dict[str, Any] = {}
    for key, kind in arguments.items():
        values[key] = {
            "string": random.choice(_FILES),
            "integer": random.randint(1, 500),
            "boolean": random.random() < 0.5,
        }[kind]
    call = f"call_{number}"
    message: Body = {
        "role": "assistant",
        "content": f"Next I look at {random.choice(_FILES)}. {sentence(random)}",
        "tool_calls": [
            {"id": call, "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
        ],
    }
    if random.random() < 0.5:
        message["reasoning_content"] = f"The user says that {sentence(random)} So I should check that first."
    return [message, {"role": "tool", "tool_call_id": call, "content": tool_output(random)}]


def conversation(random: Random) -> Body:
    messages: list[Body] = [
        {"role": "system", "content": system_text(random)},
        {"role": "user", "content": sentence(random)},
    ]
    for number in range(random.randint(2, 6)):
        messages += turn(random, number)
        if random.random() < 0.25:
            messages.append({"role": "user", "content": "And " + sentence(random)})
    return {"model": "m", "tools": tools(random), "messages": messages}


def appended(body: Body, reply: str, random: Random) -> Body:
    """The next call as a client sends it that only appends."""
    after = copy.deepcopy(body)
    after["messages"].append({"role": "assistant", "content": reply})
    after["messages"].append({"role": "user", "content": "Go on. " + sentence(random)})
    return after


def case(kind: str, random: Random) -> Case:
    """One case of a kind."""
    body = conversation(random)
    reply = f"I found it in {random.choice(_FILES)}. {sentence(random)}"
    return _MAKERS[kind](body, reply, random)


def _put(text: str, line: str, random: Random) -> str:
    """The text with a line of its own somewhere in it."""
    lines = text.split("\n")
    lines.insert(random.randint(0, len(lines)), line)
    return "\n".join(lines)


def _clock(body: Body, reply: str, random: Random) -> Case:
    moment = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=random.randint(0, 300 * 86400))
    later = moment + timedelta(seconds=random.choice([1, 47, 300, 4000, 90_000, 40 * 86_400]))
    form = random.choice(
        [
            "Current time: %Y-%m-%dT%H:%M:%SZ",
            "Today is %A, %d %B %Y.",
            "It is now %H:%M on %a %b %d %Y.",
            "Date: %m/%d/%Y %I:%M %p",
            "timestamp={epoch}",
            "Now: %Y-%m-%d %H:%M:%S.%f+00:00",
        ]
    )

    def line(at: datetime) -> str:
        return at.strftime(form).replace("{epoch}", str(int(at.timestamp())))

    if line(moment) == line(later):
        later = moment + timedelta(days=33, hours=2)
    index = 0 if random.random() < 0.7 else 1
    text = body["messages"][index]["content"]
    state = random.getstate()
    body["messages"][index]["content"] = _put(text, line(moment), random)
    after = appended(body, reply, random)
    random.setstate(state)
    after["messages"][index]["content"] = _put(text, line(later), random)
    return Case("clock", index, body, reply, after, form)


def _token(random: Random, form: str) -> str:
    hexes = "".join(random.choice("0123456789abcdef") for _ in range(32))
    if form == "uuid":
        return f"{hexes[:8]}-{hexes[8:12]}-{hexes[12:16]}-{hexes[16:20]}-{hexes[20:]}"
    if form == "hex":
        return hexes[: random.choice([12, 16, 32])]
    if form == "base":
        return "req_" + "".join(
            random.choice("ABCDEFGHJKLMNPQRSTUVWXYZabcdefghij0123456789") for _ in range(22)
        )
    return str(random.randint(1, 99_999))


def _nonce(body: Body, reply: str, random: Random) -> Case:
    form = random.choice(["uuid", "hex", "base", "counter"])
    line = random.choice(
        ["x-request-id: {}", "Session {}", "[trace {}]", "billing-header: cc={}; v=2", "<run id='{}'/>"]
    )
    index = 0 if form == "counter" or random.random() < 0.7 else 1
    text = body["messages"][index]["content"]
    state = random.getstate()
    body["messages"][index]["content"] = _put(text, line.format(_token(random, form)), random)
    after = appended(body, reply, random)
    rest = random.getstate()
    random.setstate(state)
    spot = Random(random.random())  # noqa: S311
    random.setstate(rest)
    after["messages"][index]["content"] = _same_place(
        text, body["messages"][index]["content"], line.format(_token(spot, form))
    )
    return Case("nonce", index, body, reply, after, f"{form}: {line}")


def _same_place(text: str, changed: str, line: str) -> str:
    """``line`` where ``changed`` has the line that ``text`` has not."""
    old, new = text.split("\n"), changed.split("\n")
    at = next((i for i, one in enumerate(old) if new[i] != one), len(old))
    return "\n".join([*old[:at], line, *old[at:]])


def _reordered(body: Body, reply: str, random: Random) -> Case:
    after = appended(body, reply, random)
    while after["tools"] == body["tools"]:
        random.shuffle(after["tools"])
    return Case("reordered tools", -1, body, reply, after, "")


def _reserialised(body: Body, reply: str, random: Random) -> Case:
    after = appended(body, reply, random)
    calls = [index for index, message in enumerate(body["messages"]) if "tool_calls" in message]
    index = random.choice(calls)
    function = after["messages"][index]["tool_calls"][0]["function"]
    values = json.loads(function["arguments"])
    way = random.choice(["order", "compact", "indent"])
    if way == "order" and len(values) > 1:
        keys = list(values)
        keys.reverse()
        function["arguments"] = json.dumps({key: values[key] for key in keys})
    elif way == "indent":
        function["arguments"] = json.dumps(values, indent=2)
    else:
        function["arguments"] = json.dumps(values, separators=(",", ":"))
    return Case("reserialised arguments", index, body, reply, after, way)


def _dropped(body: Body, reply: str, random: Random) -> Case:
    way = random.choice(["field", "inline", "answer"])
    assistants = [index for index, message in enumerate(body["messages"]) if message["role"] == "assistant"]
    index = random.choice(assistants)
    thought = f"Perhaps {sentence(random)} But that is not certain."
    if way == "answer":
        after = appended(body, reply, random)
        return Case(
            "dropped reasoning", len(body["messages"]), body, f"<think>{thought}</think>{reply}", after, way
        )
    message = body["messages"][index]
    if way == "field":
        message["reasoning_content"] = thought
        after = appended(body, reply, random)
        del after["messages"][index]["reasoning_content"]
    else:
        message.pop("reasoning_content", None)
        text = message["content"]
        message["content"] = f"<think>\n{thought}\n</think>\n\n{text}"
        after = appended(body, reply, random)
        after["messages"][index]["content"] = text
    return Case("dropped reasoning", index, body, reply, after, way)


def _edited(body: Body, reply: str, random: Random) -> Case:
    after = appended(body, reply, random)
    messages = after["messages"]
    way = random.choice(["shorten a tool's output", "reword", "leave out", "summary"])
    tool_messages = [index for index, message in enumerate(messages) if message["role"] == "tool"]
    index = random.choice(tool_messages)
    if way == "shorten a tool's output":
        messages[index]["content"] = messages[index]["content"][:40] + "\n[output truncated]"
    elif way == "reword":
        index = 1
        messages[index]["content"] = "Please help: " + messages[index]["content"].lower()
    elif way == "leave out":
        index = tool_messages[0] - 1
        del messages[index : index + 2]
    else:
        index = 2
        cut = tool_messages[-1] + 1
        messages[2:cut] = [
            {"role": "user", "content": "Summary of what was done so far: " + sentence(random)}
        ]
    return Case("edited history", index, body, reply, after, way)


def _new(body: Body, reply: str, random: Random) -> Case:
    other = conversation(random)
    messages = [body["messages"][0], *other["messages"][1 : 2 if random.random() < 0.6 else None]]
    after = {"model": "m", "tools": body["tools"], "messages": copy.deepcopy(messages)}
    return Case("new conversation", 1, body, reply, after, f"{len(messages)} messages")


_MAKERS: dict[str, Callable[[Body, str, Random], Case]] = {
    "clock": _clock,
    "nonce": _nonce,
    "reordered tools": _reordered,
    "reserialised arguments": _reserialised,
    "dropped reasoning": _dropped,
    "edited history": _edited,
    "new conversation": _new,
}


def cases(seed: int, count: int = 50) -> list[Case]:
    """``count`` cases, the kinds in turn."""
    random = Random(f"breaks {seed}")  # noqa: S311
    return [case(KINDS[number % len(KINDS)], random) for number in range(count)]


def render(body: Body) -> bytes:
    """The canonical prompt, as a chat template with tools makes it."""
    parts = ["<|im_start|>system\n", body["messages"][0]["content"] if body["messages"] else ""]
    parts += ["\n# Tools\n", *(json.dumps(tool) + "\n" for tool in body.get("tools", ())), "<|im_end|>\n"]
    for message in body["messages"][1:]:
        parts.append(f"<|im_start|>{message['role']}\n")
        if message.get("reasoning_content"):
            parts.append(f"<think>\n{message['reasoning_content']}\n</think>\n\n")
        parts.append(message["content"])
        parts += [
            f'\n<tool_call>\n{{"name": "{call["function"]["name"]}", '
            f'"arguments": {call["function"]["arguments"]}}}\n</tool_call>'
            for call in message.get("tool_calls", ())
        ]
        parts.append("<|im_end|>\n")
    return "".join([*parts, "<|im_start|>assistant\n"]).encode()
