"""The configuration file: pools, backends, policies, listening address, keys.

One YAML file is validated into :class:`Config`. Whoever reads a setting reads it from here, so that its
name, type, default and meaning exist once. Durations are seconds (``30``, ``"30s"``, ``"5m"``, ``"1h"``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(value: object) -> object:
    if isinstance(value, str):
        text = value.strip()
        for unit in sorted(_UNITS, key=len, reverse=True):
            if text.endswith(unit):
                try:
                    return float(text[: -len(unit)]) * _UNITS[unit]
                except ValueError:
                    break
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Scheduling(Section):
    """How a pool's requests are ordered and how many run at once on each backend."""

    in_flight: Literal["serialize", "pair", "slots", "auto"] = "auto"
    queue: Literal["reuse", "fifo"] = "reuse"
    max_wait: Seconds | Literal["auto"] = "auto"
    linger: Seconds | Literal["auto"] = "auto"
    max_queue: int = Field(default=1024, ge=1)


class Backend(Section):
    """One llama-server: launched here (``model``) or already running elsewhere (``url``)."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    url: str | None = None
    model: str | None = None
    """A GGUF file, or ``demo`` for the bundled demo model."""
    engine: str | None = None
    """Overrides the top-level ``engine``."""
    slots: int = Field(default=4, ge=1, le=256)
    context: int = Field(default=4096, ge=256)
    """Tokens per slot."""
    threads: int | None = Field(default=None, ge=1)
    cache_ram: int = Field(default=0, ge=0)
    """MiB of host memory for the engine's own prompt cache; 0 = off."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    slot_save_path: str | None = None
    start_timeout: Seconds = 600.0


class Pool(Section):
    """The backends that serve one model."""

    name: str
    aliases: tuple[str, ...] = ()
    default: bool = False
    scheduling: Scheduling = Scheduling()
    backends: tuple[Backend, ...] = Field(min_length=1)


class Listen(Section):
    """Where the router serves. Port 0 takes a free port."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)


class Config(Section):
    """The whole file."""

    listen: Listen = Listen()
    engine: str | None = None
    """Path of a llama-server, ``embedded``, or ``None`` to search."""
    keys: tuple[str, ...] = ()
    pools: tuple[Pool, ...] = Field(min_length=1)
