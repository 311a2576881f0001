"""Looks, before a start, whether what a configuration names is there: models, engines, folders, files, CPUs.

Nothing stays changed by it: whether a folder can be written to is tried, by a folder in it that is removed at
once. What only a start can show (a port, memory, whether the engine loads the model) is left to that.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .command import CommandError, build_command, parse_cpus
from .engine import EngineError, find_engine
from .model import ModelError, find_model
from .prompt_file import WarmUpError, read_prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from warmslot.router.config import Backend, Config

    from .engine import Engine

Place = tuple[str | int, ...]
"""A setting, as steps from the top of the file: ``("pools", 0, "name")``."""

_OPTION = re.compile(r"--?[A-Za-z]")


class Lack(NamedTuple):
    """Something that a start will miss."""

    place: Place
    message: str
    """One line."""


def preflight(config: Config) -> list[Lack]:
    """Everything that is missing on this machine, in the order of the settings.

    Blocks for as long as each engine's ``--help`` takes.
    """
    return list(_lacks(config))


def _lacks(config: Config) -> Iterator[Lack]:
    if config.journal.path is not None:
        yield from _unwritable_file(("journal", "path"), Path(config.journal.path))
    if config.state.path is not None:
        yield from _unwritable_folder(("state", "path"), Path(config.state.path))
    for i, pool in enumerate(config.pools):
        for j, file in enumerate(pool.warm_up):
            try:
                read_prompt(Path(file))
            except WarmUpError as error:
                yield Lack(("pools", i, "warm_up", j), str(error).removeprefix("warm_up: "))
        for j, backend in enumerate(pool.backends):
            if backend.url is None:
                yield from _of_backend(config, backend, ("pools", i, "backends", j))


def _of_backend(config: Config, backend: Backend, place: Place) -> Iterator[Lack]:
    model: Path | None = None
    engine: Engine | None = None
    try:
        model = find_model(backend.model or "")
    except ModelError as error:
        yield Lack((*place, "model"), str(error))
    try:
        engine = find_engine(backend.engine or config.engine)
    except EngineError as error:
        yield Lack((*place, "engine") if backend.engine else ("engine",), str(error))
    if engine is not None:
        yield from _wrong_arguments(engine, backend, model, place)
    if backend.slot_save_path is not None:
        yield from _unwritable_folder((*place, "slot_save_path"), Path(backend.slot_save_path))
    if backend.cpus is not None and hasattr(os, "sched_getaffinity"):
        here = os.sched_getaffinity(0)
        if absent := sorted(parse_cpus(backend.cpus) - here):
            yield Lack((*place, "cpus"), f"there is no CPU {_ranges(absent)} for us here")


def _ranges(numbers: Iterable[int]) -> str:
    """``0, 2-5`` for ascending 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _wrong_arguments(engine: Engine, backend: Backend, model: Path | None, place: Place) -> Iterator[Lack]:
    try:
        build_command(engine, backend, model or Path(backend.model or ""), env={})
    except CommandError as error:
        yield Lack((*place, "args"), str(error).removeprefix(f"backend {backend.name!r}: "))
    for index, argument in enumerate(backend.args):
        name = argument.partition("=")[0]
        if _OPTION.match(argument) and not engine.knows(name):
            yield Lack((*place, "args", index), f"the engine {engine.path} has no option {name}")


def _unwritable_file(place: Place, path: Path) -> Iterator[Lack]:
    if not path.parent.is_dir():
        yield Lack(place, f"there is no folder {path.parent}")
    elif path.is_dir():
        yield Lack(place, f"{path} is a folder, a file is needed")
    elif path.exists():
        if not os.access(path, os.W_OK):
            yield Lack(place, f"{path} cannot be written")
    elif reason := _refusal(path.parent):
        yield Lack(place, f"{path} cannot be written: {path.parent}: {reason}")


def _unwritable_folder(place: Place, path: Path) -> Iterator[Lack]:
    """A folder that is there, or one that is made at the start."""
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    what = "" if nearest == path else f"{path} cannot be made: "
    if not nearest.is_dir():
        yield Lack(place, f"{what}{nearest} is no folder")
    elif reason := _refusal(nearest):
        yield Lack(place, f"{what}{nearest} cannot be written ({reason})")


def _refusal(folder: Path) -> str | None:
    """Why nothing can be made in a folder. Only trying tells: modes are nothing to root, nor to a mount."""
    try:
        Path(tempfile.mkdtemp(prefix=".warmslot-", dir=folder)).rmdir()
    except OSError as error:
        return error.strerror or type(error).__name__
    return None
