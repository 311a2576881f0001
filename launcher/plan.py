"""``warmslot plan MODEL``: how many slots of which context fit, and what to set.

Sizes of KV cache and state come from the model's metadata (:mod:`.memory`). What metadata does not tell, the
engine does: it is started once with what is about to be recommended, answers a short request, and its log
says what it allocated. A cache type that makes it fail is not recommended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx

from .bare import BareEngineError, bare_engine
from .host_memory import MIB, cap_cache_ram

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .engine import Engine
    from .logs import LogLine
    from .memory import Model

SLOTS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
_RESERVE = 0.08
"""Of the memory: left free for compute buffers and others, until a try has told what they take."""

_TYPES = (("f16", "f16"), ("q8_0", "q8_0"))
"""Cache types by preference: the second halves the cache and costs little quality."""

_WANTED_SLOTS = 4
_LEAST_CONTEXT = 4096
_BUFFER = re.compile(r"\s(model|KV|RS|compute|output) buffer size =\s*([\d.]+) MiB")
_ANSWER_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One slot count with one context."""

    slots: int
    context: int
    bytes: int
    """Of weights, KV cache and state together."""
    fits: bool


@dataclass(slots=True)
class Allocated:
    """What an engine said that it allocated, in MiB, by kind of buffer."""

    sizes: dict[str, float] = field(default_factory=dict)

    def line(self, line: LogLine) -> None:
        """A line of its log."""
        for kind, size in _BUFFER.findall(line.message):
            self.sizes[kind] = self.sizes.get(kind, 0.0) + float(size)

    @property
    def cache(self) -> float:
        """KV cache and recurrent state."""
        return self.sizes.get("KV", 0.0) + self.sizes.get("RS", 0.0)

    @property
    def total(self) -> float:
        """Everything."""
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a try: what was allocated, or why not."""

    allocated: Allocated
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set. ``cache_ram`` in MiB."""

    slots: int
    context: int
    types: tuple[str, str]
    cache_ram: int
    tried: Tried | None = None
    refused: tuple[str, ...] = ()
    """Cache types that were tried and failed, with the reason."""


def need(model: Model, slots: int, context: int, types: tuple[str, str] = ("f16", "f16")) -> int:
    """Bytes of weights, KV cache and state."""
    return model.weights + slots * model.slot_bytes(context, *types)


def table(
    model: Model,
    memory: int,
    types: tuple[str, str] = ("f16", "f16"),
    *,
    slots: Sequence[int] = SLOTS,
    contexts: Sequence[int] = CONTEXTS,
) -> list[list[Cell]]:
    """A row for each slot count, a cell for each context that the model was trained for."""
    longest = model.trained_context or max(contexts)
    columns = [context for context in contexts if context <= longest] or [longest]
    room = memory * (1 - _RESERVE)
    rows = []
    for count in slots:
        sizes = [(context, need(model, count, context, types)) for context in columns]
        rows.append([Cell(count, context, size, size <= room) for context, size in sizes])
    return rows


def choose(model: Model, memory: int, types: tuple[str, str]) -> tuple[int, int] | None:
    """Slots and context: four slots of as much context as fits, then more slots; fewer where it must be."""
    rows = table(model, memory, types)
    fitting = [cell for row in rows for cell in row if cell.fits]
    if not fitting:
        return None
    enough = [cell for cell in fitting if cell.slots >= _WANTED_SLOTS and cell.context >= _LEAST_CONTEXT]
    if not enough:
        best = max(fitting, key=lambda cell: (cell.context, cell.slots))
        return best.slots, best.context
    context = max(cell.context for cell in enough if cell.slots == min(one.slots for one in enough))
    # Beyond 32k, more conversations that stay warm are worth more than longer ones.
    context = min(context, max(32768, _LEAST_CONTEXT)) if context > 32768 else context  # noqa: PLR2004
    return max(cell.slots for cell in enough if cell.context == context), context


async def try_settings(
    engine: Engine, path: Path, slots: int, context: int, types: tuple[str, str], *flags: str
) -> Tried:
    """Start the engine so, have it answer something, and read what it allocated."""
    allocated = Allocated()
    words = ["-np", str(slots), "-c", str(slots * context), "-ctk", types[0], "-ctv", types[1], "-lv", "4"]
    if engine.knows("--no-kv-unified"):
        words.append("--no-kv-unified")
    for option, value in (("--fit", "off"), ("--cache-ram", "0")):
        if engine.knows(option):
            words += [option, value]
    try:
        async with (
            bare_engine(engine, path, *words, *flags, on_line=allocated.line) as url,
            httpx.AsyncClient(timeout=_ANSWER_TIMEOUT, trust_env=False) as client,
        ):
            body = {"prompt": "1 2 3 4", "n_predict": 4, "ignore_eos": True}
            answer = await client.post(f"{url}/completion", json=body)
            failure = "" if answer.is_success else f"it answers with status {answer.status_code}"
    except (BareEngineError, httpx.HTTPError) as error:
        failure = str(error) or "it ended while it answered"
    return Tried(allocated, failure)


async def advise(
    model: Model, path: Path, memory: int, host_available: int, engine: Engine | None
) -> Advice | None:
    """The first cache type with which enough fits, tried on the engine where there is one.

    ``None``: the model does not fit at all.
    """
    refused: list[str] = []
    best: tuple[tuple[str, str], tuple[int, int]] | None = None
    for types in _TYPES:
        shape = choose(model, memory, types)
        if shape is None or (best is not None and shape <= best[1]):
            continue
        best = best or (types, shape)
        if shape[0] >= _WANTED_SLOTS:
            best = (types, shape)
            break
    if best is None:
        return None
    types, (slots, context) = best
    tried = None if engine is None else await try_settings(engine, path, slots, context, types)
    if tried is not None and tried.failure and types != _TYPES[0] and engine is not None:
        refused.append(f"{types[0]}/{types[1]}: {tried.failure}")
        types = _TYPES[0]
        slots, context = choose(model, memory, types) or (1, _LEAST_CONTEXT)
        tried = await try_settings(engine, path, slots, context, types)
    elif tried is not None and not tried.failure and tried.allocated.total * MIB > memory and slots > 1:
        slots -= 1
    # On a GPU the prompt cache is a second tier in host memory; without one it takes from the same.
    spare = host_available - (need(model, slots, context, types) if memory == host_available else 0)
    cache_ram = cap_cache_ram(8192, spare, 0) if model.window or model.recurrent else 0
    return Advice(slots, context, types, cache_ram, tried, tuple(refused))
