"""Turns a backend's settings into the command line that starts it.

The launch profile makes residency stable: a fixed slot count, each slot with its own part of the KV cache,
and no saving and clearing of idle slots behind the router's back.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .engine import canonical
from .orphans import MARK

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from warmslot.router.config import Backend

    from .engine import Engine


KEY = "LLAMA_API_KEY"
"""Environment variable in which an engine finds its key: command lines are for all to see."""


class CommandError(Exception):
    """The settings make no command line; the message is one line."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of the launch profile."""

    name: str
    value: str | None
    why: str
    """What to change instead (a setting), or what it is needed for."""
    essential: bool = False
    """Whether an engine that lacks it cannot be used; others are left out."""

    @property
    def words(self) -> tuple[str, ...]:
        """As it stands in an argv."""
        return (self.name,) if self.value is None else (self.name, self.value)

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. ``left_out`` are the flags that this engine does not know."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    left_out: tuple[Flag, ...] = ()
    changes: Mapping[str, str] = field(default_factory=dict)
    """What of ``env`` the backend's own settings made."""

    @property
    def fingerprint(self) -> str:
        """Equal for commands that start the same thing."""
        words = "\0".join([*self.argv, *(f"{name}={value}" for name, value in sorted(self.changes.items()))])
        return hashlib.blake2b(words.encode(errors="surrogateescape"), digest_size=16).hexdigest()

    def marked(self, mark: str) -> Command:
        """The same, with an environment variable by which its processes are found again."""
        return replace(self, env={**self.env, MARK: mark})


def build_command(
    engine: Engine,
    backend: Backend,
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    env: Mapping[str, str] | None = None,
) -> Command:
    """The command line for ``backend``: the launch profile, then the backend's own ``args`` as given.

    ``port`` 0 lets the system choose. ``env`` is what the child inherits (default: ours) under the
    backend's own ``env``. Raises :class:`CommandError` when an extra argument sets what the profile sets,
    naming both, and when the engine lacks an essential option.
    """
    flags = _profile(backend, model, host, port)
    lacking = [flag for flag in flags if not engine.knows(flag.name)]
    for flag in lacking:
        if flag.essential:
            raise CommandError(
                f"backend {backend.name!r}: the engine {engine.path} has no option {flag.name}"
            )
    kept = [flag for flag in flags if flag not in lacking]
    _refuse_clashes(engine, backend, flags)
    argv = (*engine.command, *(word for flag in kept for word in flag.words), *backend.args)
    # An engine that asked for a key that is not ours to know would let nobody in.
    inherited = {name: value for name, value in (os.environ if env is None else env).items() if name != KEY}
    changes = {**backend.env, **_key(engine, backend)}
    return Command(argv, {**inherited, **changes}, tuple(lacking), changes)


def key_header(backend: Backend) -> dict[str, str]:
    """What a request to a backend's engine has to carry."""
    return (
        {} if backend.api_key is None else {"Authorization": f"Bearer {backend.api_key.get_secret_value()}"}
    )


def _key(engine: Engine, backend: Backend) -> dict[str, str]:
    if backend.api_key is None:
        return {}
    for argument in backend.args:
        if canonical(argument) in {"--api-key", "--api-key-file"}:
            raise CommandError(
                f"backend {backend.name!r}: the extra argument {argument} clashes with the setting api_key"
            )
    if not engine.knows("--api-key"):
        raise CommandError(
            f"backend {backend.name!r}: the engine {engine.path} has no option --api-key, so no api_key"
        )
    value = backend.api_key.get_secret_value()
    if "," in value:
        raise CommandError(f"backend {backend.name!r}: its api_key has a comma, which would make it two")
    return {KEY: value}


def parse_cpus(text: str) -> set[int]:
    """``0-3,8`` -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _profile(backend: Backend, model: Path, host: str, port: int) -> list[Flag]:
    total = backend.slots * backend.context
    flags = [
        Flag("-m", str(model), "the setting model", essential=True),
        Flag("-np", str(backend.slots), "the setting slots", essential=True),
        Flag("-c", str(total), "the setting context, which is per slot", essential=True),
        Flag("--host", host, "backends are reached through the router", essential=True),
        Flag("--port", str(port), "backends are reached through the router", essential=True),
        Flag("--kv-unified", None, "the setting kv_unified", essential=True)
        if backend.kv_unified
        else Flag(
            "--no-kv-unified", None, "a shared KV cache would let one slot's contents vanish for another's"
        ),
        Flag("--no-cache-idle-slots", None, "it keeps idle slots from being cleared"),
        Flag("--cache-ram", str(backend.cache_ram), "the setting cache_ram"),
        Flag("--slots", None, "the router reads what the slots hold"),
        Flag("--metrics", None, "the router reads the engine's counters"),
        Flag("--log-jsonl", None, "the launcher reads the engine's log"),
    ]
    if backend.threads is not None:
        flags.append(Flag("-t", str(backend.threads), "the setting threads"))
    if backend.slot_save_path is not None:
        flags.append(Flag("--slot-save-path", backend.slot_save_path, "the setting slot_save_path"))
    return flags


def _cache(backend: Backend) -> Flag:
    if backend.kv_unified:
        return Flag("--kv-unified", None, "the setting kv_unified", essential=True)
    return Flag(
        "--no-kv-unified", None, "a shared KV cache would let one slot's contents vanish for another's"
    )


def _refuse_clashes(engine: Engine, backend: Backend, flags: list[Flag]) -> None:
    ours = {name: flag for flag in flags for name in engine.names(flag.name)}
    for argument in backend.args:
        if flag := ours.get(canonical(argument)):
            raise CommandError(
                f"backend {backend.name!r}: the extra argument {argument} clashes with {flag}, "
                f"which warmslot sets itself ({flag.why})"
            )
