"""What the journal holds: one record for each finished request, and the lines that they become. Pure.

A journal is text, one JSON object a line, told apart by ``kind``: ``open`` begins a run (and each file),
``backend`` says that one came up or went down, ``request`` is one finished request. Prompts are chains of
block hashes (see :class:`~.values.Prompt`). A request's line holds only what its chain and outline add to
those of an earlier request of the same file, its ``parent``; so a journal grows by what is new, and every
chain can be had again exactly. ``docs/journal.md`` lists all fields.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from .outline import NO_OUTLINE, Outline, Part, pack, shared, unpack
from .trie import common_blocks
from .values import ROOT, Candidate, Prompt, SlotRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VERSION: Final = 1

REQUEST: Final = b'{"kind":"request"'
"""How the line of a request begins."""

WINDOW: Final = 512
"""A parent is one of this many requests before."""

_LEAVES = 32
"""How many requests with the same first block are compared to find a parent."""


@dataclass(frozen=True, slots=True)
class Record:
    """One finished request. Times are seconds; ``time`` is Unix time, the others count from it.

    ``chain`` and ``length`` are the canonical prompt's, ``after`` and ``after_length`` those of prompt and
    answer together: what the slot held afterwards. A replay of records needs nothing else.
    """

    id: str
    time: float
    """When the request arrived."""
    pool: str
    backend: str
    slot: int
    route: str
    status: str
    decision: str
    chain: array[int]
    length: int
    after: array[int]
    after_length: int
    root: bytes = ROOT
    session: str = ""
    client: str = "other"
    priority: str = "interactive"
    prompt_tokens: int = 0
    """As the engine counted them, or the router's estimate where the engine told nothing."""
    cached_tokens: int | None = None
    """Observed reuse; ``None`` where the engine told nothing."""
    host_tokens: int = 0
    """Of the reuse, what the engine's prompt cache in host memory added to what the slot held."""
    predicted_tokens: int = 0
    output_tokens: int = 0
    max_output_tokens: int | None = None
    losses: dict[str, int] = field(default_factory=dict)
    granted: float = 0.0
    """From arrival to the lease."""
    queued: float = 0.0
    """Of that, the time in the queue."""
    first_token: float | None = None
    """From arrival to the first token; ``None`` where there was none. Of whole answers, by decode time."""
    ended: float = 0.0
    """From arrival to the release of the slot."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Of the drafted ones, those that were kept."""
    in_flight: int = 1
    """Leases of the backend when this one was given, itself included."""
    demand: int = 1
    """Requests of the pool that were queued or in flight then, itself included."""
    slots: int = 1
    pinned: bool = True
    keeps_prefix: bool = True
    masked: int = 0
    """Bytes of volatile text that masks left out of the key."""
    sorted_tools: bool = False
    """Its tools were put in order before it was sent."""
    guessed: bool = False
    """What it shares with earlier requests was guessed from lengths (imported from an engine's log)."""
    candidates: tuple[Candidate, ...] = ()
    outline: Outline = NO_OUTLINE
    reply: Part | None = None
    text: dict[str, Any] | None = None
    """Where text is kept: ``tools``, ``messages`` (or ``prompt``) and ``reply`` as they were sent."""

    @property
    def prompt(self) -> Prompt:
        """What was asked."""
        return Prompt(self.chain, self.length, root=self.root)

    @property
    def content(self) -> Prompt:
        """What the slot held afterwards: prompt and answer."""
        return Prompt(self.after, max(self.length, self.after_length), root=self.root)

    @property
    def processed_tokens(self) -> int | None:
        """Prompt tokens that the engine computed."""
        return None if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class BackendChange:
    """A backend came up (``slots`` and ``context`` tell how large) or went down (``reason`` tells why)."""

    time: float
    backend: str
    up: bool
    slots: int
    context: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Opening:
    """A router began to write. What came before is another run."""

    time: float
    pools: dict[str, list[str]] = field(default_factory=dict)
    """The backends of each pool."""


Entry = Record | BackendChange | Opening


class LineError(ValueError):
    """A line that is no journal line; the message says what is wrong with it, and quotes none of it."""


def to_bytes(chain: array[int]) -> bytes:
    """Hashes as little-endian bytes on every machine."""
    if sys.byteorder == "little":
        return chain.tobytes()
    swapped = array("Q", chain)
    swapped.byteswap()
    return swapped.tobytes()


def from_bytes(raw: bytes) -> array[int]:
    """The reverse of :func:`to_bytes`. Raises ValueError for a length that is no multiple of 8."""
    chain = array("Q")
    chain.frombytes(raw)
    if sys.byteorder != "little":
        chain.byteswap()
    return chain


@dataclass(slots=True)
class _Kept:
    """What of a request later ones may share."""

    after: array[int]
    outline: Outline


class _Table:
    """The last :data:`WINDOW` requests of a file by their number."""

    def __init__(self) -> None:
        self.kept: OrderedDict[int, _Kept] = OrderedDict()

    def add(self, number: int, kept: _Kept) -> None:
        self.kept[number] = kept
        while self.kept and next(iter(self.kept)) <= number - WINDOW:
            self.kept.popitem(last=False)


class Encoder:
    """Turns records into lines. Begin every file with :meth:`opening`."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._number = 0
        self._table = _Table()
        self._of_session: dict[str, int] = {}
        self._of_first: dict[int, deque[int]] = {}

    def opening(self, entry: Opening) -> bytes:
        """The first line of a file. Later records share nothing with earlier ones."""
        self._begin()
        return _line({"kind": "open", "version": VERSION, "time": round(entry.time, 3), "pools": entry.pools})

    @staticmethod
    def change(entry: BackendChange) -> bytes:
        """The line of a backend's coming or going."""
        fields: dict[str, Any] = {
            "kind": "backend",
            "time": round(entry.time, 3),
            "backend": entry.backend,
            "up": entry.up,
        }
        if entry.up:
            fields.update(slots=entry.slots, context=entry.context)
        else:
            fields["reason"] = entry.reason
        return _line(fields)

    def request(self, record: Record) -> bytes:
        """The line of a request."""
        self._number += 1
        parent, keep = self._parent(record)
        fields: dict[str, Any] = {"kind": "request", "n": self._number, "id": record.id}
        fields.update(_plain_fields(record))
        fields["length"] = record.length
        before = NO_OUTLINE
        if parent:
            fields["parent"], fields["keep"] = parent, keep
            before = self._table.kept[parent].outline
        fields["hashes"] = base64.b64encode(to_bytes(record.chain[keep:])).decode()
        if record.after_length > record.length:
            fields["after_length"] = record.after_length
            fields["after"] = base64.b64encode(to_bytes(record.after[len(record.chain) :])).decode()
        fields.update(_outline_fields(record.outline, before))
        if record.reply is not None:
            fields["reply"] = pack(record.reply)
        if record.text is not None:
            fields["text"] = record.text
        self._remember(record)
        return _line(fields)

    def _parent(self, record: Record) -> tuple[int, int]:
        """The request that shares most with this one, and how many blocks; (0, 0) if none shares any."""
        best, most = 0, 0
        numbers = list(self._of_first.get(record.chain[0], ())) if record.chain else []
        numbers.append(self._of_session.get(record.session, 0) if record.session else 0)
        for number in numbers:
            kept = self._table.kept.get(number)
            if kept is None:
                continue
            blocks = common_blocks(kept.after, record.chain)
            parts = shared(kept.outline.messages, record.outline.messages, Part.__eq__)
            if blocks + parts >= max(1, most):
                best, most = number, blocks + parts
        return best, common_blocks(self._table.kept[best].after, record.chain) if best else 0

    def _remember(self, record: Record) -> None:
        self._table.add(self._number, _Kept(record.after, record.outline))
        if record.session:
            self._of_session.pop(record.session, None)
            self._of_session[record.session] = self._number
            if len(self._of_session) > WINDOW:
                del self._of_session[next(iter(self._of_session))]
        if record.chain:
            first = record.chain[0]
            leaves = self._of_first.pop(first, None) or deque(maxlen=_LEAVES)
            leaves.append(self._number)
            self._of_first[first] = leaves
            if len(self._of_first) > WINDOW:
                del self._of_first[next(iter(self._of_first))]


class Decoder:
    """Turns the lines of one file, in their order, into entries."""

    def __init__(self) -> None:
        self._table = _Table()

    def feed(self, line: bytes) -> Entry | None:
        """The entry of a line, ``None`` for an empty one or one of a kind that is not known.

        Raises :class:`LineError` for a torn or foreign line, and for one whose parent was lost.
        """
        if not line.strip():
            return None
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise LineError("no valid JSON: torn, or not of a journal") from None
        if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
            raise LineError("no journal line: it has no 'kind'")
        try:
            match fields["kind"]:
                case "open":
                    return self._open(fields)
                case "backend":
                    return _change(fields)
                case "request":
                    return self._request(fields)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            if isinstance(error, LineError):
                raise
            what = f"field {error} is missing" if isinstance(error, KeyError) else "a field has a wrong value"
            raise LineError(f"a broken {fields['kind']!r} line: {what}") from None
        return None

    def _open(self, fields: Mapping[str, Any]) -> Opening:
        self._table = _Table()
        if fields["version"] > VERSION:
            raise LineError(f"written by a newer warmslot (journal version {fields['version']})")
        return Opening(float(fields["time"]), dict(fields.get("pools", {})))

    def _request(self, fields: Mapping[str, Any]) -> Record:
        chain, before = array("Q"), NO_OUTLINE
        if "parent" in fields:
            parent = self._table.kept.get(fields["parent"])
            if parent is None:
                raise LineError("shares its beginning with a request whose line was lost")
            chain, before = parent.after[: fields["keep"]], parent.outline
            if len(chain) != fields["keep"]:
                raise LineError("shares more with its parent than that has")
        chain = chain + from_bytes(base64.b64decode(fields["hashes"]))
        after, after_length = chain, int(fields["length"])
        if "after" in fields:
            after = chain + from_bytes(base64.b64decode(fields["after"]))
            after_length = int(fields["after_length"])
        outline = Outline(
            tuple(_parts(fields, "tools", before.tools)), tuple(_parts(fields, "messages", before.messages))
        )
        record = Record(
            chain=chain,
            length=int(fields["length"]),
            after=after,
            after_length=after_length,
            outline=outline,
            reply=unpack(fields["reply"]) if "reply" in fields else None,
            text=fields.get("text"),
            **_read_plain(fields),
        )
        self._table.add(int(fields["n"]), _Kept(after, outline))
        return record


# -- fields ------------------------------------------------------------------------------------------------

_DEFAULTS: Final[dict[str, Any]] = {
    "session": "",
    "client": "other",
    "priority": "interactive",
    "route": "chat",
    "max_output_tokens": None,
    "slots": 1,
    "pinned": True,
    "keeps_prefix": True,
    "masked": 0,
    "sorted_tools": False,
    "guessed": False,
    "drafted_tokens": 0,
    "accepted_tokens": 0,
    "losses": {},
    "host_tokens": 0,
    "first_token": None,
}
"""Fields that are left out of a line while they have these values."""

_ALWAYS: Final = (
    *("pool", "backend", "slot", "status", "decision", "prompt_tokens", "cached_tokens"),
    *("predicted_tokens", "output_tokens", "in_flight", "demand"),
)
_SECONDS: Final = ("granted", "queued", "first_token", "ended", "prefill_seconds", "decode_seconds")


def _plain_fields(record: Record) -> dict[str, Any]:
    fields: dict[str, Any] = {"time": round(record.time, 4)}
    for name in _ALWAYS:
        fields[name] = getattr(record, name)
    for name, default in _DEFAULTS.items():
        value = getattr(record, name)
        if value != default:
            fields[name] = value
    for name in _SECONDS:
        value = getattr(record, name)
        if value is not None:
            fields[name] = round(value, 4)
    if record.root != ROOT:
        fields["root"] = record.root.hex()
    if record.candidates:
        fields["candidates"] = [
            [
                *(c.slot.backend, c.slot.slot, c.idle, c.match_tokens),
                *(round(seconds, 3) for seconds in (c.prefill_seconds, c.loss_seconds, c.wait_seconds)),
            ]
            for c in record.candidates
        ]
    return fields


def _read_plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = {"id": str(fields["id"]), "time": float(fields["time"])}
    for name in _ALWAYS:
        read[name] = fields[name]
    for name, default in _DEFAULTS.items():
        read[name] = fields.get(name, default)
    read["losses"] = dict(read["losses"])
    for name in _SECONDS:
        value = fields.get(name)
        read[name] = None if value is None and name == "first_token" else float(value or 0.0)
    read["root"] = bytes.fromhex(fields["root"]) if "root" in fields else ROOT
    read["candidates"] = tuple(
        Candidate(SlotRef(backend, slot), idle, match, prefill, loss, wait)
        for backend, slot, idle, match, prefill, loss, wait in fields.get("candidates", ())
    )
    return read


def _outline_fields(outline: Outline, before: Outline) -> Iterator[tuple[str, Any]]:
    for name, now, then in (
        ("tools", outline.tools, before.tools),
        ("messages", outline.messages, before.messages),
    ):
        kept = shared(then, now, Part.__eq__)
        if kept:
            yield f"same_{name}", kept
        if len(now) > kept:
            yield name, [pack(part) for part in now[kept:]]


def _parts(fields: Mapping[str, Any], name: str, before: tuple[Part, ...]) -> Iterator[Part]:
    kept = fields.get(f"same_{name}", 0)
    if kept > len(before):
        raise LineError("its outline shares more with its parent than that has")
    yield from before[:kept]
    for packed in fields.get(name, ()):
        yield unpack(packed)


def _change(fields: Mapping[str, Any]) -> BackendChange:
    return BackendChange(
        time=float(fields["time"]),
        backend=str(fields["backend"]),
        up=bool(fields["up"]),
        slots=int(fields.get("slots", 0)),
        context=int(fields.get("context", 0)),
        reason=str(fields.get("reason", "")),
    )


def _line(fields: Mapping[str, Any]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
