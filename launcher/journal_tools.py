"""``warmslot journal``: take out what identifies anybody, other forms of journals, journals of logs."""

from __future__ import annotations

import csv
import hashlib
import json
import secrets
from array import array
from collections import Counter
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final, Literal

from warmslot.router.journal import Reading, read
from warmslot.router.outline import Field, Outline, Part
from warmslot.router.records import BackendChange, Encoder, Entry, Opening, Record
from warmslot.router.values import BLOCK

from .log_import import BYTES_PER_TOKEN, Import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

Format = Literal["csv", "trace"]

_BLOCK_TOKENS: Final = 512
"""Tokens to one id of the trace form."""

COLUMNS: Final = (
    *(
        "id",
        "time",
        "session",
        "client",
        "pool",
        "backend",
        "slot",
        "route",
        "status",
        "decision",
        "priority",
    ),
    *("prompt_tokens", "cached_tokens", "processed_tokens", "predicted_tokens", "output_tokens"),
    *("new", "evicted", "busy", "diverged", "restarted", "engine"),
    *("queued", "first_token", "ended", "prefill_seconds", "decode_seconds", "in_flight", "demand"),
    *("drafted_tokens", "accepted_tokens"),
)


def write(path: Path, entries: Iterable[Entry]) -> int:
    """A journal file of these entries; gives how many requests it holds. Raises OSError."""
    encoder, count = Encoder(), 0
    with path.open("wb") as stream:
        for entry in entries:
            if isinstance(entry, Opening):
                stream.write(encoder.opening(entry))
            elif isinstance(entry, BackendChange):
                stream.write(encoder.change(entry))
            else:
                stream.write(encoder.request(entry))
                count += 1
    return count


class Scrubber:
    """Takes text, names and the meaning of hashes out of entries; what is equal stays equal.

    Hashes are hashed again with a secret that is thrown away, so that nobody who guesses a prompt can look it
    up. Names of sessions, clients and requests become numbers; pools and backends keep theirs.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(32)
        self._names: dict[tuple[str, str], str] = {}
        self._counts: Counter[str] = Counter()

    def scrub(self, entry: Entry) -> Entry:
        """An entry that may be given away."""
        if isinstance(entry, BackendChange):
            return replace(entry, reason="")
        if not isinstance(entry, Record):
            return entry
        return replace(
            entry,
            id=self._name("request", entry.id),
            session=self._name("session", entry.session) if entry.session else "",
            client=entry.client if entry.client == "other" else self._name("client", entry.client),
            root=self._hash(entry.root, 8) if any(entry.root) else entry.root,
            chain=self._chain(entry.chain),
            after=self._chain(entry.after),
            outline=Outline(
                tuple(map(self._part, entry.outline.tools)), tuple(map(self._part, entry.outline.messages))
            ),
            reply=None if entry.reply is None else self._part(entry.reply),
            text=None,
        )

    def _name(self, kind: str, name: str) -> str:
        known = self._names.get((kind, name))
        if known is None:
            self._counts[kind] += 1
            known = self._names[kind, name] = f"{kind}-{self._counts[kind]}"
        return known

    def _hash(self, value: bytes, size: int) -> bytes:
        return hashlib.blake2b(value, key=self._secret, digest_size=size).digest()

    def _chain(self, chain: array[int]) -> array[int]:
        return array(
            "Q", (int.from_bytes(self._hash(value.to_bytes(8, "little"), 8), "little") for value in chain)
        )

    def _part(self, part: Part) -> Part:
        return replace(part, fields=tuple(self._field(field) for field in part.fields))

    def _field(self, field: Field) -> Field:
        hashes = {
            name: self._hash(value, len(value))
            for name in ("exact", "clock", "nonce", "shape")
            if isinstance(value := getattr(field, name), bytes)
        }
        return replace(field, **hashes)  # type: ignore[arg-type]


def scrub(source: Path, target: Path, progress: Callable[[int], None]) -> tuple[int, Reading]:
    """Write a journal that may be given away. Raises OSError and JournalError."""
    reading, scrubber = Reading(), Scrubber()
    return write(target, (scrubber.scrub(entry) for entry in _counted(source, reading, progress))), reading


def export(source: Path, target: Path, form: Format, progress: Callable[[int], None]) -> tuple[int, Reading]:
    """Write one row for each request as CSV, or one line as a trace of hashed blocks.

    The trace form has ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``, one for each
    512 tokens, equal where all up to there is equal. A token of ``input_length`` stands for four bytes.
    """
    reading = Reading()
    records = (one for one in _counted(source, reading, progress) if isinstance(one, Record))
    with target.open("w", encoding="utf-8", newline="") as stream:
        count = 0
        if form == "csv":
            rows = csv.writer(stream)
            rows.writerow(COLUMNS)
            for count, record in enumerate(records, 1):  # noqa: B007  # counted
                rows.writerow(_row(record))
        else:
            ids: dict[int, int] = {}
            start: float | None = None
            for count, record in enumerate(records, 1):  # noqa: B007  # counted
                start = record.time if start is None else start
                stream.write(json.dumps(_trace(record, start, ids)) + "\n")
    return count, reading


def _counted(source: Path, reading: Reading, progress: Callable[[int], None]) -> Iterator[Entry]:
    for number, entry in enumerate(read(source, reading)):
        if number % 2000 == 0:
            progress(number)
        yield entry


def _row(record: Record) -> list[object]:
    known = {field.name for field in fields(Record)} | {"processed_tokens"}
    return [
        getattr(record, column) if column in known else record.losses.get(column, 0) for column in COLUMNS
    ]


def _trace(record: Record, start: float, ids: dict[int, int]) -> dict[str, object]:
    chain, step = record.chain, _BLOCK_TOKENS * BYTES_PER_TOKEN // BLOCK
    hashes = [chain[at - 1] for at in range(step, len(chain) + 1, step)]
    if len(chain) % step:
        hashes.append(chain[-1])
    return {
        "timestamp": round((record.time - start) * 1000),
        "input_length": record.length // BYTES_PER_TOKEN,
        "output_length": record.output_tokens,
        "hash_ids": [ids.setdefault(value, len(ids)) for value in hashes],
    }


def import_log(source: Path, target: Path, *, backend: str, start: float | None, guess: bool) -> Import:
    """Make a journal of an engine's log. Raises OSError."""
    begin = source.stat().st_mtime if start is None else start
    importing = Import(backend, begin, guess)
    with source.open(encoding="utf-8", errors="replace") as lines:
        write(target, importing.entries(lines))
    return importing
