"""Fits an engine's slot file to another slot count.

The file of a slot tells for each *stream* of the KV cache (one for each slot, where slots have parts of
their own) how many cells it holds: none in all but one. The engine refuses a file whose number of streams is
not its own, though only the one with cells is read. Written with another number of empty streams, it fits.

Layout (little endian): magic, version and token count, 4 bytes each, the tokens, then for each cache (a model
with sliding windows has two) the number of streams, and for each stream its cells, and where there are any
their positions, then keys and values by layer. What a file holds that is not laid out so is copied as it is:
the engine judges it.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = 0x67677371
_CHUNK = 1 << 20
_CELL = 12
"""Bytes of a cell's entry: position, number of sequences (1), the sequence."""
_MAX_LAYERS = 4096
_MAX_TYPE = 256
_MORE = (0, 8, 4)
"""Bytes that builds put between the number of layers and the first one (flags of how keys are stored)."""


class UnknownLayoutError(Exception):
    """The file is not laid out as expected."""


def restream(source: Path, target: Path, streams: int, wanted: int) -> None:
    """Write ``source``, saved with ``streams`` slots, to ``target`` for an engine with ``wanted``.

    Blocks. Raises :class:`UnknownLayoutError` for what is no slot file, OSError.
    """
    with source.open("rb") as old, target.open("wb") as new:
        end = os.fstat(old.fileno()).st_size
        magic, _, tokens = _numbers(old, 3)
        if magic != _MAGIC:
            raise UnknownLayoutError("no slot file")
        body = 12 + 4 * tokens
        if body > end:
            raise UnknownLayoutError("its tokens are cut off")
        _copy(old, new, 0, body)
        at = body
        while at < end:
            try:
                cells, first, last, after = _cache(old, at, end, streams)
            except UnknownLayoutError:
                _copy(old, new, at, end)
                return
            head = struct.pack("<II", wanted, cells) if cells else struct.pack("<I", wanted)
            new.write(head)
            _copy(old, new, first, last)
            new.write(bytes(4 * (wanted - (1 if cells else 0))))
            at = after


def _cache(file: BinaryIO, at: int, end: int, streams: int) -> tuple[int, int, int, int]:
    """One cache: its cells, where the data of its one filled stream begins and ends, where all of it ends."""
    file.seek(at)
    if _numbers(file, 1) != (streams,):
        raise UnknownLayoutError("no cache with these streams")
    at += 4
    cells = first = last = 0
    for _ in range(streams):
        file.seek(at)
        (count,) = _numbers(file, 1)
        at += 4
        if count:
            if cells:
                raise UnknownLayoutError("two streams hold cells")
            cells, first = count, at
            at = last = _data(file, at, end, count)
    return cells, first, last, at


def _data(file: BinaryIO, at: int, end: int, cells: int) -> int:
    """Where a stream's positions, keys and values end."""
    file.seek(at)
    if _numbers(file, 2)[1] != 1:
        raise UnknownLayoutError("cells of more than one sequence")
    at += cells * _CELL
    file.seek(at)
    transposed, layers = _numbers(file, 2)
    if transposed > 1 or not 0 < layers <= _MAX_LAYERS:
        raise UnknownLayoutError("no layers where they should be")
    at += 8
    for more in _MORE:
        with contextlib.suppress(UnknownLayoutError):
            return _layers(file, at + more, end, cells, layers, transposed=bool(transposed))
    raise UnknownLayoutError("no keys and values where they should be")


def _layers(file: BinaryIO, at: int, end: int, cells: int, layers: int, *, transposed: bool) -> int:
    """Where keys and values end: each part tells its type and the size of its rows."""
    for part in range(2 * layers):
        file.seek(at)
        if part < layers or not transposed:
            kind, row = _unpack(file, "<iQ")
            size = cells * row
            at += 12 + size
        else:
            kind, element, width = _unpack(file, "<iII")
            size = cells * element * width
            at += 12 + size
        if not 0 <= kind < _MAX_TYPE or not size or at > end:
            raise UnknownLayoutError("no keys and values here")
    return at


def _numbers(file: BinaryIO, count: int) -> tuple[int, ...]:
    return _unpack(file, f"<{count}I")


def _unpack(file: BinaryIO, layout: str) -> tuple[int, ...]:
    data = file.read(struct.calcsize(layout))
    if len(data) < struct.calcsize(layout):
        raise UnknownLayoutError("it ends too soon")
    return struct.unpack(layout, data)


def _copy(old: BinaryIO, new: BinaryIO, start: int, end: int) -> None:
    old.seek(start)
    left = end - start
    while left:
        chunk = old.read(min(_CHUNK, left))
        if not chunk:
            raise UnknownLayoutError("it ends too soon")
        new.write(chunk)
        left -= len(chunk)
