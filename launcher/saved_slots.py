"""Slots in files: saved before an engine ends, offered to the next one, worth most first.

Beside each of the engine's files lies a note of our own, written last: what the file holds (as hashes, never
as text), what it is worth, its checksum, and the fingerprint of model, engine and settings. A file without a
note is unfinished. A file is marked while it is tried, so that one which kills the engine is tried once.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import secrets
import time
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from warmslot.router.core import Contents
from warmslot.router.residency import Context
from warmslot.router.trie import common_blocks

from .kv_file import UnknownLayoutError, restream
from .model import find_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .supervisor import Launch

log = logging.getLogger("warmslot.launcher")

DATA, NOTE, NEW, TRIED, FITTED = ".kv", ".json", ".new", ".tried", ".fitted"
_CHUNK = 1 << 20
_VERSION = 1


class DamagedError(Exception):
    """A file that cannot be used; one line."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One slot in a file."""

    path: Path
    contents: Contents
    worth: float
    """Tokens × the chance that they are asked for again, when it was saved."""
    saved: float
    size: int
    checksum: int
    fingerprint: str
    slots: int
    """Of the engine that wrote it."""

    @property
    def rank(self) -> tuple[float, float]:
        """The higher the more it is worth keeping."""
        return self.worth, self.saved


class Folder:
    """The saved slots of one backend, in a folder that others may share."""

    def __init__(self, path: Path, backend: str, limit: int) -> None:
        self.path = path
        self._prefix = f"{backend}."
        self.limit = limit
        self._whole: dict[str, Contents] = {}
        """What this process saved itself, with text and conversation, which no note holds."""

    def new_name(self) -> str:
        """A name for the engine's next file."""
        return f"{self._prefix}{secrets.token_hex(8)}{DATA}"

    def note(self, name: str, contents: Contents, fingerprint: str, slots: int) -> Saved:
        """The engine has written ``name``. Blocks while it is read. Raises OSError."""
        path = self.path / name
        size, checksum = _sum(path)
        saved = Saved(
            path=path,
            contents=contents,
            worth=contents.tokens * contents.chance,
            saved=time.time(),
            size=size,
            checksum=checksum,
            fingerprint=fingerprint,
            slots=slots,
        )
        fresh = path.with_suffix(NEW)
        fresh.write_bytes(orjson.dumps(_as_note(saved)))
        fresh.replace(_note_of(path))
        self._whole[name] = contents
        return saved

    def all(self) -> list[Saved]:
        """Everything that is whole, worth most first; what is not is removed."""
        found = []
        for path in sorted(self.path.glob(f"{self._prefix}*{DATA}")) if self.path.is_dir() else ():
            saved = self._read(path)
            if saved is None:
                self.drop(path)
            else:
                found.append(saved)
        return sorted(found, key=lambda saved: saved.rank, reverse=True)

    def fitting(self, fingerprint: str, context: int) -> list[Saved]:
        """What an engine of this fingerprint and context per slot can take, worth most first."""
        found = [saved for saved in self.all() if saved.contents.tokens < context]
        fit = [saved for saved in found if saved.fingerprint == fingerprint]
        if len(fit) < len(found):
            log.info(
                "%d saved slot(s) in %s are of another model, engine or setting and are not used",
                len(found) - len(fit),
                self.path,
            )
        return fit

    def trim(self, *, room: int = 0) -> None:
        """Keep to the size limit, least worth first out, and drop what a longer file contains."""
        everything = self.all()
        kept: list[Saved] = []
        for saved in everything:
            if any(_contains(other, saved) for other in everything if other is not saved):
                self.drop(saved.path)
            else:
                kept.append(saved)
        size = room
        for saved in kept:
            size += saved.size
            if size > self.limit:
                self.drop(saved.path)

    def drop(self, path: Path) -> None:
        """Remove a file and what lies beside it."""
        self._whole.pop(path.name, None)
        for one in (path, *(path.with_suffix(suffix) for suffix in (NOTE, TRIED, FITTED, NEW))):
            with contextlib.suppress(OSError):
                one.unlink(missing_ok=True)

    def begin_try(self, saved: Saved, slots: int) -> Path:
        """Mark a file as being tried; the file to restore on an engine with ``slots``. Blocks, reads it.

        Raises :class:`DamagedError`, OSError.
        """
        if _sum(saved.path) != (saved.size, saved.checksum):
            raise DamagedError("its checksum is wrong")
        saved.path.with_suffix(TRIED).touch()
        if saved.slots == slots:
            return saved.path
        fitted = saved.path.with_suffix(FITTED)
        try:
            restream(saved.path, fitted, saved.slots, slots)
        except UnknownLayoutError as error:
            raise DamagedError(str(error)) from None
        return fitted

    def end_try(self, saved: Saved) -> None:
        """The engine has survived it."""
        for suffix in (FITTED, TRIED):
            with contextlib.suppress(OSError):
                saved.path.with_suffix(suffix).unlink(missing_ok=True)

    def _read(self, path: Path) -> Saved | None:
        try:
            note = orjson.loads(_note_of(path).read_bytes())
            if path.with_suffix(TRIED).exists():
                log.warning("%s: the engine ended while it was restored; it is removed", path)
                return None
            if path.stat().st_size != note["size"]:
                log.warning("%s: the file is not as long as it was; it is removed", path)
                return None
            return _from_note(path, note, self._whole.get(path.name))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            log.warning("%s: its note is damaged; it is removed", path)
            return None


def fingerprint(launch: Launch, scales: str = "") -> str:
    """Equal where an engine can take what another one saved: same model, engine, flags and environment.

    ``scales`` marks the LoRA scales that were set over HTTP. Slot count, context and threads may differ.
    Reads little of the model: its size, time and first bytes. Raises :class:`~.model.ModelError`, OSError.
    """
    backend = launch.backend
    model = find_model(backend.model or "")
    stat = model.stat()
    with model.open("rb") as file:
        head = hashlib.blake2b(file.read(_CHUNK), digest_size=16).hexdigest()
    engine: list[object] = list(launch.engine.command)
    with contextlib.suppress(OSError):
        program = Path(launch.engine.path).stat()
        engine += [program.st_size, program.st_mtime_ns]
    engine.append(launch.engine.build)
    told = [
        _VERSION,
        (stat.st_size, stat.st_mtime_ns, head),
        engine,
        backend.args,
        sorted(backend.env.items()),
        *([scales] if scales else []),
    ]
    return hashlib.blake2b(orjson.dumps(told), digest_size=16).hexdigest()


def _note_of(path: Path) -> Path:
    return path.with_suffix(NOTE)


def _sum(path: Path) -> tuple[int, int]:
    """Size and checksum of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
        with contextlib.suppress(OSError, AttributeError):  # it is not read twice: leave the memory to others
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return size, checksum


def _contains(longer: Saved, shorter: Saved) -> bool:
    """Whether one file has all that the other has, and is newer or longer."""
    if longer.fingerprint != shorter.fingerprint:
        return False
    a, b = longer.contents.context, shorter.contents.context
    if (a.length, longer.saved) <= (b.length, shorter.saved):
        return False
    return common_blocks(a.chain, b.chain) == len(b.chain) > 0


def _as_note(saved: Saved) -> dict[str, Any]:
    context = saved.contents.context
    return {
        "version": _VERSION,
        "fingerprint": saved.fingerprint,
        "size": saved.size,
        "checksum": saved.checksum,
        "worth": saved.worth,
        "chance": saved.contents.chance,
        "saved": saved.saved,
        "slots": saved.slots,
        "slot": saved.contents.slot,
        "chain": base64.b64encode(context.chain.tobytes()).decode(),
        "length": context.length,
        "anchors": context.anchors,
        "asked": context.asked,
        "unread": context.unread_tokens,
    }


def _from_note(path: Path, note: dict[str, Any], whole: Contents | None) -> Saved:
    if note["version"] != _VERSION:
        raise ValueError(note["version"])
    chain = array("Q")
    chain.frombytes(base64.b64decode(note["chain"]))
    anchors = tuple((int(at), int(tokens)) for at, tokens in note["anchors"])
    context = Context(
        chain, int(note["length"]), None, anchors, asked=int(note["asked"]), unread_tokens=int(note["unread"])
    )
    contents = whole or Contents(int(note["slot"]), context, chance=float(note["chance"]))
    return Saved(
        path=path,
        contents=contents,
        worth=float(note["worth"]),
        saved=float(note["saved"]),
        size=int(note["size"]),
        checksum=int(note["checksum"]),
        fingerprint=str(note["fingerprint"]),
        slots=int(note["slots"]),
    )


def assign(chosen: Sequence[Saved], slots: int) -> dict[int, Saved]:
    """A slot for each file: its own where that is free, else the lowest."""
    taken: dict[int, Saved] = {}
    homeless = []
    for saved in chosen:
        if saved.contents.slot < slots and saved.contents.slot not in taken:
            taken[saved.contents.slot] = saved
        else:
            homeless.append(saved)
    free: Iterable[int] = (slot for slot in range(slots) if slot not in taken)
    taken.update(zip(free, homeless, strict=False))
    return dict(sorted(taken.items()))
