"""Watches memory: caps the engine's own prompt cache before it starts, and warns while it runs.

What counts is what the host has *available*. A process's resident set misleads where a GPU shares the memory,
or where the model is mapped and counts as cache.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
from warmslot.router.values import HostMemory

from .memory import PlanError, read_model
from .model import ModelError, find_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from warmslot.router.config import Backend

    from .memory import Model

log = logging.getLogger("warmslot.launcher")

MIB = 1 << 20
_SHARE = 0.5
"""Of what is available once the model is loaded: the most that the prompt cache may take."""

_LEAST_CACHE = 256
"""MiB below which a prompt cache is not worth its copying."""

_CELL = 12
"""Bytes that a saved context takes for each token beside keys and values."""
_CACHE_TYPES = frozenset({"-ctk", "--cache-type-k", "-ctv", "--cache-type-v"})

_LOW = 0.05
"""Of all memory: less available than this is worth a warning."""

_INTERVAL = 15.0
_SMI = ("--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits")
_SMI_TIMEOUT = 10.0


def cap_cache_ram(wanted: int, available: int, model: int) -> int:
    """MiB for ``--cache-ram``: as wanted, or what the host can give (0: none). Sizes of the host in bytes."""
    room = int(max(0, available - model) * _SHARE) // MIB
    if wanted <= room:
        return wanted
    return room if room >= _LEAST_CACHE else 0


def fit_cache_ram(backend: Backend, model: Path) -> Backend:
    """The backend with a ``cache_ram`` that fits the host now; says so where that is less than asked for."""
    if not backend.cache_ram:
        return backend
    available = psutil.virtual_memory().available
    fits = cap_cache_ram(backend.cache_ram, available, model.stat().st_size)
    if fits == backend.cache_ram:
        return backend
    log.warning(
        "%s: cache_ram is %d MiB, but the host has %d MiB available: %s",
        backend.name,
        backend.cache_ram,
        available // MIB,
        f"it gets {fits} MiB" if fits else "it is switched off",
    )
    return backend.model_copy(update={"cache_ram": fits})


def cache_of(backend: Backend) -> HostMemory | None:
    """The prompt cache that a backend is started with, ``None`` where it has none.

    How much a token takes is known for the engine's own cache types, of models that keep all of a context.
    """
    if not backend.cache_ram:
        return None
    try:
        model = read_model(find_model(backend.model or ""))
    except (ModelError, PlanError):
        model = None
    return cache_for(backend.cache_ram, model, backend.args)


def cache_for(cache_ram: int, model: Model | None, args: Sequence[str]) -> HostMemory:
    """A prompt cache of so many MiB, for a model (if it is known) served with these flags."""
    limit = cache_ram * MIB
    if model is None or model.window or model.recurrent or _CACHE_TYPES.intersection(args):
        return HostMemory(limit)
    return HostMemory(limit, token_bytes=model.token_bytes() + _CELL)


def cache_ram(host: HostMemory | None) -> int:
    """MiB of a prompt cache; 0 of none."""
    return 0 if host is None else round(host.limit / MIB)


@dataclass(frozen=True, slots=True)
class Device:
    """Memory of one GPU in bytes."""

    index: int
    used: int
    total: int


async def devices() -> list[Device]:
    """The GPUs that ``nvidia-smi`` knows; none where there is no such program or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        process = await asyncio.create_subprocess_exec(
            program, *_SMI, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return []
    try:
        async with asyncio.timeout(_SMI_TIMEOUT):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return []
    return parse_devices(out.decode(errors="replace"))


def parse_devices(text: str) -> list[Device]:
    """What ``nvidia-smi`` printed; lines without figures (unified memory: ``[N/A]``) are left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and all(cell.isdigit() for cell in cells):  # noqa: PLR2004 - as asked for
            index, used, total = map(int, cells)
            found.append(Device(index, used * MIB, total * MIB))
    return found


class MemoryWatch:
    """Says once when memory gets short, and once when it is well again."""

    def __init__(self) -> None:
        self._short: set[str] = set()

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            self.look(psutil.virtual_memory().available, psutil.virtual_memory().total, await devices())
            await asyncio.sleep(_INTERVAL)

    def look(self, available: int, total: int, gpus: list[Device]) -> None:
        """One look, with figures in bytes."""
        self._tell("host", available, total)
        for gpu in gpus:
            self._tell(f"GPU {gpu.index}", gpu.total - gpu.used, gpu.total)

    def _tell(self, what: str, free: int, total: int) -> None:
        short = free < total * _LOW
        if short and what not in self._short:
            self._short.add(what)
            log.warning("%s: only %d of %d MiB of memory are free", what, free // MIB, total // MIB)
        elif not short and what in self._short and free > total * _LOW * 2:
            self._short.discard(what)
            log.warning("%s: %d MiB of memory are free again", what, free // MIB)
