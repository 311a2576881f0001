"""From a request body to what the router needs of it: the canonical prompt, bounds, flags, the pinned body.

A chat is rendered by the engine's own template (``/apply-template``), so that the key of a prompt is the text
that the engine will evaluate, tools and dropped reasoning included. Only what the router acts on is checked
here; everything else in a body is the engine's to judge.
"""

from __future__ import annotations

import codecs
import hashlib
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeGuard
from weakref import WeakKeyDictionary

import orjson

from . import conversion
from .backend import EngineBroke, EngineClient, EngineError, EngineUnreachable
from .values import ROOT, Prompt, Route

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "BadRequest",
    "dump",
    "expected_output_tokens",
    "has_several",
    "is_exact",
    "is_streaming",
    "keeps_prefix",
    "parse",
    "pin",
    "render",
    "root_of",
    "slots_needed",
    "text_of",
    "without_mark",
]

_CACHED_RENDERINGS: Final = 64
_CACHED_BYTES: Final = 16 * 1024 * 1024

_TOKEN_ROOT: Final = b"tokens"
"""Sets prompts of token ids apart from prompts of text."""

_NO_TEXT: Final = b"\xff"
"""Marks a token id inside a mixed prompt; the byte occurs in no UTF-8 text."""


class BadRequest(ValueError):  # noqa: N818 - named for what it becomes, an HTTP answer
    """A body that cannot be served: ``param`` is the field at fault, ``None`` for the body as such."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param, self.message = param, message


def parse(raw: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises :class:`BadRequest`, which quotes nothing of the body."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(None, f"the body is no valid JSON ({_flaw(raw, error)})") from None
    if not isinstance(body, dict):
        raise BadRequest(None, f"the body must be a JSON object, not {_kind(body)}")
    return body


def _flaw(raw: bytes, error: orjson.JSONDecodeError) -> str:
    """Where a body is at fault. It is looked at as a whole for its encoding first, so has no line then."""
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        return f"not UTF-8 at byte offset {wrong.start}"
    return f"line {error.lineno}, column {error.colno}"


def without_mark(raw: bytes) -> bytes:
    """A body without the byte order mark that some clients put before JSON, which a reader may ignore."""
    return raw.removeprefix(codecs.BOM_UTF8)


MOST_TOKENS = 2**31 - 1
"""Greater bounds on an answer mean this one: the engine counts tokens in 32 bits."""


# -- flags and bounds --------------------------------------------------------------------------------------


def is_streaming(body: Mapping[str, Any]) -> bool:
    """Whether the client asked for server-sent events."""
    return _flag(body, "stream", default=False)


def keeps_prefix(body: Mapping[str, Any], route: Route = Route.CHAT) -> bool:
    """False where the client wants the slot's former content thrown away (``cache_prompt: false``)."""
    return route is Route.MESSAGES or _flag(body, "cache_prompt", default=True)


def expected_output_tokens(body: Mapping[str, Any]) -> int | None:
    """The client's own bound on generated tokens, ``None`` where it gave none (or -1, which is none)."""
    bounds = []
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(name, f"'{name}' must be a number, not {_kind(value)}")
        if value >= 0:
            bounds.append(int(min(value, MOST_TOKENS)))
    return min(bounds, default=None)


def has_several(body: Mapping[str, Any], route: Route) -> bool:
    """Whether a body has several prompts: each is a task of its own, and one pin would be for all of them."""
    return _prompts(body, route) > 1


def _prompts(body: Mapping[str, Any], route: Route) -> int:
    given = body.get("prompt")
    return len(given) if route in {Route.COMPLETION, Route.COMPLETIONS} and _is_several(given) else 1


def slots_needed(body: Mapping[str, Any], route: Route = Route.COMPLETIONS) -> int:
    """How many slots the request occupies at once: choices (``n``) times prompts."""
    if route in {Route.MESSAGES, Route.INFILL}:
        return 1
    choices = 1
    for name in ("n", "n_cmpl"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(name, f"'{name}' must be a whole number of at least 1")
        choices = max(choices, value)
    return choices * _prompts(body, route)


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(name, f"'{name}' must be true or false, not {_kind(value)}")
    return value


def _kind(value: object) -> str:
    kinds = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


# -- the canonical prompt ----------------------------------------------------------------------------------


def root_of(body: Mapping[str, Any], *, isolation: bytes = b"") -> bytes:
    """The seed of a prompt's chain: prompts with other LoRA adapters, or of another tenant, share nothing.

    ``isolation`` names the tenant where prefixes must not be shared (empty: shared by all).
    """
    root = _derive(ROOT, b"client", isolation) if isolation else ROOT
    return _lora_root(body, root)


def _lora_root(body: Mapping[str, Any], root: bytes) -> bytes:
    lora = body.get("lora")
    if lora is None:
        return root
    if not isinstance(lora, list) or not all(isinstance(one, Mapping) for one in lora):
        raise BadRequest("lora", "'lora' must be an array of objects with 'id' and 'scale'")
    adapters = []
    for one in lora:
        number, scale = one.get("id"), one.get("scale", 0.0)
        if isinstance(number, bool) or not isinstance(number, int):
            raise BadRequest("lora", "'id' of a LoRA adapter must be a whole number")
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise BadRequest("lora", "'scale' of a LoRA adapter must be a number")
        if scale:
            adapters.append((number, float(scale)))
    return _derive(root, b"lora", orjson.dumps(sorted(adapters))) if adapters else root


def _derive(root: bytes, kind: bytes, value: bytes) -> bytes:
    return hashlib.blake2b(value, key=root, person=kind, digest_size=8).digest()


async def render(
    client: EngineClient, route: Route, body: Mapping[str, Any], *, root: bytes = ROOT
) -> Prompt:
    """The canonical prompt of a body, rendered by ``client``'s engine where the route has a template.

    ``root`` is the tenant's seed (:func:`root_of` of an empty body); the body's LoRA set is added here.
    Raises :class:`BadRequest` for fields of a wrong type. An engine that cannot be asked, or refuses the
    body, costs exactness but no error: the text of tools and messages stands in, and the engine will answer
    for itself.
    """
    if route is not Route.MESSAGES:  # where the engine knows no such field
        root = _lora_root(body, root)
    if route in {Route.COMPLETIONS, Route.COMPLETION}:
        return _from_prompt(body.get("prompt"), root)
    chat: Mapping[str, Any] | None = None
    if route is Route.CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise BadRequest("messages", f"'messages' must be an array, not {_kind(messages)}")
        chat = body
    elif route in {Route.MESSAGES, Route.RESPONSES}:
        chat = conversion.chat_of(route, body)
    if chat is not None and conversion.has_media(chat.get("messages")):
        chat = None  # rendered, one image would look like any other
    text = None if chat is None else await _rendered(client, chat, root)
    if text is not None:
        return _prompt(text.encode("utf-8", "surrogatepass"), root)
    return _prompt(_plain(body), _derive(root, b"plain", route.encode()))


def _prompt(data: bytes, root: bytes, tokens: int | None = None) -> Prompt:
    """A prompt whose bytes differ from the first on where its root does: texts are compared as bytes too."""
    return Prompt.of(data if root == ROOT else root + data, root=root, tokens=tokens)


def text_of(prompt: Prompt) -> str | None:
    """The text that the engine evaluates, where it is known."""
    if prompt.data is None:
        return None
    return prompt.data[0 if prompt.root == ROOT else len(prompt.root) :].decode("utf-8", "surrogatepass")


def is_exact(prompt: Prompt, route: Route, root: bytes = ROOT) -> bool:
    """Whether a rendered prompt is the engine's own text and not what stands in for it."""
    return prompt.data is not None and prompt.root != _derive(root, b"plain", route.encode())


class _Renderings:
    """The last renderings of one engine, by hash of the body: a retry does not ask again."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, str] = OrderedDict()
        self._size = 0

    def get(self, key: bytes) -> str | None:
        if (text := self._found.get(key)) is not None:
            self._found.move_to_end(key)
        return text

    def put(self, key: bytes, text: str) -> None:
        if key in self._found or len(text) > _CACHED_BYTES:
            return
        self._found[key] = text
        self._size += len(text)
        while len(self._found) > _CACHED_RENDERINGS or self._size > _CACHED_BYTES:
            self._size -= len(self._found.popitem(last=False)[1])


_renderings: WeakKeyDictionary[EngineClient, _Renderings] = WeakKeyDictionary()


async def _rendered(client: EngineClient, body: Mapping[str, Any], root: bytes) -> str | None:
    content = dump({key: value for key, value in body.items() if key not in {"stream", "stream_options"}})
    key = hashlib.blake2b(content, key=root, digest_size=16).digest()  # nobody learns what others rendered
    cache = _renderings.setdefault(client, _Renderings())
    if (text := cache.get(key)) is not None:
        return text
    try:
        text = await client.apply_template(content)
    except (EngineError, EngineUnreachable, EngineBroke):
        return None
    cache.put(key, text)
    return text


def _plain(body: Mapping[str, Any]) -> bytes:
    """Tools, then system text, then messages: stable in the order in which conversations grow."""
    parts = [dump(body[name]) for name in ("tools", "functions", "system", "instructions") if body.get(name)]
    for name in ("messages", "input", "prompt", "query", "documents", "input_prefix", "input_suffix"):
        value = body.get(name)
        if isinstance(value, list):
            parts.extend(dump(element) for element in value)
        elif value is not None:
            parts.append(dump(value))
    return b"\n".join(parts)


def dump(value: Any) -> bytes:
    """Text as UTF-8, anything else as JSON. Raises :class:`BadRequest` for what is nested too deeply."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise BadRequest(None, "the body is nested too deeply, allowed: 254 levels") from None


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_several(prompt: object) -> TypeGuard[list[Any]]:
    """Whether a prompt is an array of prompts and not one array of tokens and strings.

    As the engine has it: an array with a token id at its top level is one prompt.
    """
    return isinstance(prompt, list) and bool(prompt) and not any(_is_token(part) for part in prompt)


def _from_prompt(prompt: Any, root: bytes) -> Prompt:
    if _is_several(prompt):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _prompt(prompt.encode("utf-8", "surrogatepass"), root)
    if isinstance(prompt, Mapping) and isinstance(text := prompt.get("prompt_string"), str):
        media = prompt.get("multimodal_data")
        data = text.encode("utf-8", "surrogatepass")
        if not media:
            return _prompt(data, root)
        return _prompt(data, _derive(root, b"media", dump(media)))
    if not isinstance(prompt, list) or not prompt:
        allowed = "a string, an array of token ids, a mixed array of both, or an array of such prompts"
        raise BadRequest(
            "prompt", f"'prompt' must be {allowed}, not {'empty' if prompt == [] else _kind(prompt)}"
        )
    token_root = _derive(root, _TOKEN_ROOT, b"")
    if all(_is_token(part) for part in prompt):
        packed = _pack(prompt)
        return Prompt.of(packed if root == ROOT else root + packed, root=token_root, tokens=len(prompt))
    if not all(_is_token(part) or isinstance(part, str) for part in prompt):
        raise BadRequest("prompt", "a mixed 'prompt' array may hold strings and token ids only")
    mixed = b"".join(
        part.encode("utf-8", "surrogatepass") if isinstance(part, str) else _NO_TEXT + _pack([part])
        for part in prompt
    )
    return _prompt(mixed, _derive(root, b"mixed", b""))


def _pack(tokens: Iterable[int]) -> bytes:
    ids = list(tokens)
    try:
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error:
        raise BadRequest("prompt", "a token id in 'prompt' is out of range") from None


# -- the body that is sent ---------------------------------------------------------------------------------


_ESCAPED_NAME: Final = re.compile(rb"\\u00(?:5[fF]|6|7[0-9aA])")
"""A letter or ``_`` that is written as an escape, perhaps in the name of a field that is set here."""


def pin(body: bytes | Mapping[str, Any], slot: int, *, fresh: bool = False) -> bytes:
    """The body with ``id_slot`` set to ``slot`` and ``cache_prompt`` on unless the client decided about it.

    ``fresh``: nothing of what the slot holds may be reused, whatever the client says.
    Bytes stay byte for byte what the client wrote (numbers keep their digits), with the two fields put before
    the closing brace; only where the client gave one of the two itself is the body written anew.
    Raises :class:`BadRequest` if bytes are no JSON object.
    """
    if isinstance(body, bytes):
        end = body.rstrip()
        simple = end.startswith(b"{") or end.lstrip().startswith(b"{")
        if not simple or not end.endswith(b"}"):
            raise BadRequest(None, "the body must be a JSON object")
        if not (b'"id_slot"' in end or b'"cache_prompt"' in end or _ESCAPED_NAME.search(end)):
            start = end[:-1].rstrip()
            comma = b"" if start.endswith(b"{") and len(start.lstrip()) == 1 else b","
            return b'%s%s"id_slot":%d,"cache_prompt":%s}' % (
                start,
                comma,
                slot,
                b"false" if fresh else b"true",
            )
        body = parse(body)
    pinned = dict(body)
    pinned["id_slot"] = slot
    if fresh or pinned.get("cache_prompt") is None:
        pinned["cache_prompt"] = not fresh
    return dump(pinned)
