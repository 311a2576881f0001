"""Readers of request traces: recorded conversations as the simulator and the benches replay them.

Three formats are told apart by what their first line holds:

- *text sessions* (``{timestamp µs, input, output, session_id}``, one call a line; a folder of such files is
  one trace): the whole prompt as text. Characters become single bytes, so that four bytes stand for a token.
- *hash blocks* (``{timestamp ms, input_length, output_length, hash_ids}``): each id stands for 512 tokens and
  for all before them. Sessions are found by shared beginnings.
- *journal*: what the router itself writes (see :mod:`warmslot.router.records`).

Lengths are bytes, ``BYTES_PER_TOKEN`` to a token; times are seconds from the trace's first request.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from warmslot.router.journal import read
from warmslot.router.records import Record
from warmslot.router.values import BLOCK, Prompt, extend_chain

from .load import Sessions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BYTES_PER_TOKEN = 4
"""The simulator's tokenizer: characters divided by four."""

Order = Literal["time", "name"]

_HASH_BLOCK_TOKENS = 512
_CONTINUES = 0.5
"""A prompt that holds at least this share of a session's last one continues that session."""


class TraceError(ValueError):
    """A trace cannot be read; the message names the file, the line and what was expected."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a session. ``at`` is when it was sent in the recording."""

    session: str
    prompt: Prompt
    generated: bytes
    output_tokens: int
    at: float
    prompt_tokens: int
    after: Prompt
    """What a slot holds after it: prompt and answer."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in the order in which they began; each is a list of calls in their order."""

    name: str
    sessions: list[list[Call]] = field(repr=False)
    prefill: float | None = None
    decode: float | None = None
    """Rates that the recording engine had, tokens per second, where the trace tells."""

    @property
    def calls(self) -> int:
        """How many requests the trace holds."""
        return sum(len(session) for session in self.sessions)


def tokens_of(length: int) -> int:
    """Tokens of a prompt of ``length`` bytes; no prompt is empty to an engine."""
    return max(1, length // BYTES_PER_TOKEN)


def load(path: Path, order: Order = "time") -> Trace:
    """Read a trace file, or a folder of text-session files. Raises :class:`TraceError`.

    ``order``: sessions begin as recorded (``time``), or by name.
    """
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    lines = [(file, number, record) for file in files for number, record in _lines(file)]
    if not lines:
        raise TraceError(f"{path}: holds no requests (expected JSON lines)")
    first = lines[0][2]
    if "kind" in first:
        return _in_order(_load_journal(lines[0][0]), order)
    if "input" in first:
        sessions = _text_sessions(lines)
    elif "hash_ids" in first:
        sessions = _hash_sessions(lines)
    else:
        raise TraceError(
            f"{lines[0][0]}:{lines[0][1]}: no 'input' (text), 'hash_ids' (hash blocks) or 'kind' (journal); "
            f"the line has {', '.join(sorted(first)) or 'no fields'}"
        )
    return _in_order(Trace(path.stem if path.is_file() else path.name, sessions), order)


def _in_order(trace: Trace, order: Order) -> Trace:
    trace.sessions.sort(key=lambda session: session[0].at if order == "time" else session[0].session)
    return trace


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise TraceError(f"{file}:{number}: not JSON ({error.msg})") from error
            if not isinstance(record, dict):
                raise TraceError(f"{file}:{number}: expected an object, found {type(record).__name__}")
            yield number, record


def _need(file: Path, number: int, record: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = record.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TraceError(f"{file}:{number}: field {name!r} is missing or of the wrong type")
    return value


def _text_sessions(lines: list[tuple[Path, int, dict[str, Any]]]) -> list[list[Call]]:
    raw: dict[str, list[tuple[float, str, str]]] = {}
    for file, number, record in lines:
        key = str(record.get("session_id") or file.stem)
        at = float(_need(file, number, record, "timestamp", (int, float))) / 1e6
        text, output = (_need(file, number, record, name, str) for name in ("input", "output"))
        raw.setdefault(key, []).append((at, text, output))
    start = min(at for calls in raw.values() for at, _, _ in calls)
    sessions = []
    for key, calls in raw.items():
        calls.sort(key=lambda call: call[0])
        session: list[Call] = []
        for at, text, output in calls:
            data = text.encode("latin-1", "replace")
            before = session[-1].prompt if session else None
            if before is not None and before.data is not None and data.startswith(before.data):
                prompt = Prompt(chain=extend_chain(before.chain, data), length=len(data), data=data)
            else:
                prompt = Prompt.of(data)
            generated = output.encode("latin-1", "replace")
            both = data + generated
            after = Prompt(extend_chain(prompt.chain, both), len(both), both)
            session.append(
                Call(
                    session=key,
                    prompt=prompt,
                    generated=generated,
                    output_tokens=len(generated) // BYTES_PER_TOKEN,
                    at=at - start,
                    prompt_tokens=tokens_of(len(data)),
                    after=after,
                )
            )
        sessions.append(session)
    return sessions


def _hash_sessions(lines: list[tuple[Path, int, dict[str, Any]]]) -> list[list[Call]]:
    sessions: list[list[Call]] = []
    ends: dict[int, int] = {}  # the id of any block of a session's last prompt -> the session
    last: list[list[int]] = []
    for file, number, record in sorted(lines, key=lambda line: float(line[2].get("timestamp", 0))):
        ids = _need(file, number, record, "hash_ids", list)
        at = float(_need(file, number, record, "timestamp", (int, float))) / 1e3
        tokens = int(_need(file, number, record, "input_length", (int, float)))
        output = int(_need(file, number, record, "output_length", (int, float)))
        index = _continued(ids, last, ends)
        if index is None:
            index = len(sessions)
            sessions.append([])
            last.append([])
        for block in ids:
            ends[block] = index
        last[index] = ids
        prompt = Prompt(chain=_hash_chain(ids, tokens), length=tokens * BYTES_PER_TOKEN)
        sessions[index].append(Call(str(index), prompt, b"", output, at, max(1, tokens), prompt))
    return _from_start(sessions)


def _from_start(sessions: list[list[Call]]) -> list[list[Call]]:
    start = min(session[0].at for session in sessions)
    return [[replace(call, at=call.at - start) for call in session] for session in sessions]


def _load_journal(path: Path) -> Trace:
    """The requests that were answered, by conversation; with the rates that the engine had."""
    naming = Sessions()
    sessions: dict[str, list[Call]] = {}
    processed = prefill = output = decode = 0.0
    for record in read(path):
        if (
            not isinstance(record, Record)
            or record.status != "ok"
            or record.slots > 1
            or not record.keeps_prefix
        ):
            continue
        if record.cached_tokens is not None:
            processed += record.prompt_tokens - record.cached_tokens
            prefill += record.prefill_seconds
        output += record.output_tokens
        decode += record.decode_seconds
        key = f"{record.pool}/{naming.name(record)}"
        call = Call(
            session=key,
            prompt=replace(record.prompt, tokens=record.prompt_tokens),
            generated=b"",
            output_tokens=record.output_tokens,
            at=record.time,
            prompt_tokens=record.prompt_tokens,
            after=record.content,
        )
        sessions.setdefault(key, []).append(call)
    if not sessions:
        raise TraceError(f"{path}: the journal holds no answered requests")
    return Trace(
        name=path.stem,
        sessions=_from_start([sorted(calls, key=lambda call: call.at) for calls in sessions.values()]),
        prefill=processed / prefill if prefill > 0 else None,
        decode=output / decode if decode > 0 else None,
    )


def _continued(ids: list[int], last: list[list[int]], ends: dict[int, int]) -> int | None:
    for block in reversed(ids):
        index = ends.get(block)
        if index is not None:
            before = last[index]
            shared = sum(1 for a, b in zip(ids, before, strict=False) if a == b)
            return index if shared >= _CONTINUES * len(before) else None
    return None


def _hash_chain(ids: list[int], tokens: int) -> array[int]:
    """A chain in which two prompts agree exactly as far as their block ids do."""
    per_id = _HASH_BLOCK_TOKENS * BYTES_PER_TOKEN // BLOCK
    chain = array("Q", (block * per_id + part + 1 for block in ids for part in range(per_id)))
    del chain[tokens * BYTES_PER_TOKEN // BLOCK :]
    return chain
