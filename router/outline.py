"""The outline of a request body: a fingerprint of each tool and message, field by field. Pure.

Two outlines of one conversation tell where a prompt stopped matching and of what kind the change is, without
any text being kept. Each field has an exact hash and hashes of what is left of it once a volatile part is
taken out: if two fields differ, yet agree once clocks are masked, it was a clock that changed.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from .clocks import CLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

TOOL: Final = "tool definition"
"""The role of parts that are tool definitions."""
PROMPT: Final = "prompt"
"""The role of a body's one prompt on routes without messages."""
REPLY: Final = "reply"
"""The role of what the engine generated."""

CONTENT: Final = "content"
REASONING: Final = "reasoning"
ARGUMENTS: Final = "arguments"
REST: Final = "rest"

_EXACT = 6
_LOOSE = 3
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_PIECE = 512
"""Characters from which on a piece of a prompt without messages ends with its line."""
_SEARCHED = 256
"""Bytes of a field's beginning that are searched in the canonical prompt to find where it stands."""

_NONCE = re.compile(
    r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
    r"|(?<![A-Za-z0-9_+/=.-])(?=[A-Za-z_+/=.-]*\d)[A-Za-z0-9_+/=.-]{6,}"
)
_HEADER = re.compile(r"(?m)^([A-Za-z][\w .-]{0,40}[:=][ \t]*)\S+[ \t]*$")
_NUMBER = re.compile(r"\d+")
_THINK = re.compile(r"<(think|thinking|reasoning)>.*?</\1>\s*", re.DOTALL)
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a part. Hashes are bytes; two that are equal stand for equal text."""

    name: str
    length: int
    """Characters."""
    exact: bytes
    clock: bytes
    """Of the text with dates and times masked."""
    nonce: bytes
    """Of the text with ids and counters masked as well."""
    shape: bytes
    """Of JSON without its order and white space; of other text without thinking and spacing."""
    thinks: bool = False
    """It holds a thinking block."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tool definition, a message, or a prompt. ``at``: where it stands in the canonical prompt, in bytes.

    ``at`` is -1 where its text was not found there.
    """

    role: str
    fields: tuple[Field, ...]
    at: int = -1

    def field(self, name: str) -> Field | None:
        """A field by name."""
        return next((field for field in self.fields if field.name == name), None)

    def same(self, other: Part) -> bool:
        """Whether both say exactly the same."""
        return (
            self.role == other.role
            and len(self.fields) == len(other.fields)
            and all(
                a.name == b.name and a.exact == b.exact
                for a, b in zip(self.fields, other.fields, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class Outline:
    """What a request body consists of."""

    tools: tuple[Part, ...] = ()
    messages: tuple[Part, ...] = ()


NO_OUTLINE: Final = Outline()
"""Of a request whose body nobody described."""


class Outliner:
    """Makes outlines; remembers the fields that it has seen, since conversations repeat themselves."""

    def __init__(self, remembered: int = 4096) -> None:
        self._limit = remembered
        self._seen: dict[tuple[bytes, bool], Field] = {}

    def outline(self, body: Mapping[str, Any], canonical: bytes = b"") -> Outline:
        """The outline of a body of any route; never raises on what clients send."""
        place = _Place(canonical)
        tools = body.get("tools") or body.get("functions")
        parts = [self._tool(tool, place) for tool in tools] if isinstance(tools, list) else []
        return Outline(tuple(parts), tuple(self._messages(body, place)))

    def reply(self, generated: bytes) -> Part:
        """What the engine generated, as the message that a client will send back."""
        text = generated.decode("utf-8", "replace")
        fields = []
        match = _THINK.match(text)
        if match is not None:
            fields.append(self._field(REASONING, match[0]))
            text = text[match.end() :]
        return Part(REPLY, (self._field(CONTENT, text), *fields))

    def _messages(self, body: Mapping[str, Any], place: _Place) -> Iterator[Part]:
        for name in ("system", "instructions"):
            if body.get(name):
                yield self._part("system", [(CONTENT, body[name])], place)
        messages = body.get("messages")
        if messages is None:
            messages = body.get("input")
        if isinstance(messages, list):
            for message in messages:
                yield self._message(message, place)
            return
        for value in (messages, body.get("prompt")):
            if value is not None:
                for piece in _pieces(_text(value)):
                    yield self._part(PROMPT, [(CONTENT, piece)], place)

    def _tool(self, tool: Any, place: _Place) -> Part:
        name = ""
        if isinstance(tool, dict):
            inner = tool.get("function", tool)
            name = str(inner.get("name", "")) if isinstance(inner, dict) else ""
        return self._part(TOOL, [("name", name), (CONTENT, tool)], place)

    def _message(self, message: Any, place: _Place) -> Part:
        if not isinstance(message, dict):
            return self._part("user", [(CONTENT, message)], place)
        fields: list[tuple[str, Any]] = []
        rest: dict[str, Any] = {}
        for key, value in message.items():
            if value is None or key == "role":
                continue
            if key in {"content", "text"}:
                fields.append((CONTENT, value))
            elif key in _REASONING_NAMES:
                if value:
                    fields.append((REASONING, value))
            elif key in {"tool_calls", "function_call", "arguments"}:
                if value:
                    fields.append((ARGUMENTS, value))
            else:
                rest[key] = value
        if rest:
            fields.append((REST, rest))
        fields.sort(key=lambda field: field[0])
        return self._part(str(message.get("role", message.get("type", "user")))[:20], fields, place)

    def _part(self, role: str, fields: Sequence[tuple[str, Any]], place: _Place) -> Part:
        made = tuple(self._field(name, value, system=role == "system") for name, value in fields)
        content = next((value for name, value in fields if name == CONTENT), None)
        return Part(role, made, place.find(_text(content)) if content is not None else -1)

    def _field(self, name: str, value: Any, *, system: bool = False) -> Field:
        text = _text(value)
        exact = _hash(text, 16)
        known = self._seen.get((exact, system))
        if known is None:
            known = Field(
                name=name,
                length=len(text),
                exact=exact[:_EXACT],
                clock=_hash(CLOCK.sub("\0", text), _LOOSE),
                nonce=_hash(_without_nonces(text, counters=system), _LOOSE),
                shape=_hash(_shape(value), _LOOSE),
                thinks=_THINK.search(text) is not None,
            )
            if len(self._seen) >= self._limit:
                del self._seen[next(iter(self._seen))]
            self._seen[exact, system] = known
        if known.name == name:
            return known
        return Field(name, known.length, known.exact, known.clock, known.nonce, known.shape, known.thinks)


class _Place:
    """Finds parts in the canonical prompt, in the order in which they stand there."""

    def __init__(self, canonical: bytes) -> None:
        self._data, self._from = canonical, 0

    def find(self, text: str) -> int:
        wanted = text.strip()[:_SEARCHED].encode("utf-8", "surrogatepass")
        at = self._data.find(wanted, self._from) if wanted else -1
        if at >= 0:
            self._from = at + len(wanted)
        return at


def _pieces(text: str) -> Iterator[str]:
    """A prompt without messages in pieces of whole lines, so that a change is found in one of them."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def _text(value: Any) -> str:
    """The text of a field; content in parts is the texts of its parts."""
    if isinstance(value, str):
        return value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value)
    ):
        return "\n".join(part["text"] for part in value)
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return repr(value)


def _hash(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def _without_nonces(text: str, *, counters: bool) -> str:
    # Ids first: the digits of one may look like a date.
    text = _HEADER.sub("\\1\0", CLOCK.sub("\0", _NONCE.sub("\0", text)))
    return _NUMBER.sub("\0", text) if counters else text


def _shape(value: Any) -> str:
    found = _sorted(value)
    if isinstance(found, str):
        return _SPACE.sub(" ", _THINK.sub("", found)).strip()
    return orjson.dumps(found, option=orjson.OPT_SORT_KEYS).decode()


def _sorted(value: Any) -> Any:
    """A value in which strings that hold JSON are the JSON that they hold."""
    if isinstance(value, str):
        if value[:1] in {"{", "["} and len(value) < 1 << 20:
            try:
                return _sorted(orjson.loads(value))
            except orjson.JSONDecodeError:
                return value
        return value
    if isinstance(value, list):
        return [_sorted(element) for element in value]
    if isinstance(value, dict):
        return {str(key): _sorted(element) for key, element in value.items()}
    return value


# -- as the journal keeps it -------------------------------------------------------------------------------


def pack(part: Part) -> list[Any]:
    """A part as JSON: role, place, then name, length and hashes of each field."""
    out: list[Any] = [part.role, part.at]
    for field in part.fields:
        hashes = base64.b64encode(field.exact + field.clock + field.nonce + field.shape).decode()
        out += [field.name, -field.length - 1 if field.thinks else field.length, hashes]
    return out


def unpack(packed: Sequence[Any]) -> Part:
    """The reverse of :func:`pack`. Raises ValueError, TypeError or IndexError on what it did not write."""
    role, at, *rest = packed
    fields = []
    for index in range(0, len(rest), 3):
        name, length, hashes = rest[index : index + 3]
        raw = base64.b64decode(hashes, validate=True)
        if len(raw) != _EXACT + 3 * _LOOSE:
            raise ValueError(f"hashes of field {name!r} have {len(raw)} bytes")
        cuts = (_EXACT, _EXACT + _LOOSE, _EXACT + 2 * _LOOSE)
        fields.append(
            Field(
                name=str(name),
                length=-length - 1 if length < 0 else int(length),
                exact=raw[: cuts[0]],
                clock=raw[cuts[0] : cuts[1]],
                nonce=raw[cuts[1] : cuts[2]],
                shape=raw[cuts[2] :],
                thinks=length < 0,
            )
        )
    return Part(str(role), tuple(fields), int(at))


def shared(first: Sequence[Part], second: Sequence[Part], same: Callable[[Part, Part], bool]) -> int:
    """How many parts two sequences share from the start."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if not same(a, b):
            break
        count += 1
    return count
