"""What an operator can ask of a running ``warmslot up``: how it is, restart, other settings, reload."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import BaseModel, ValidationError
from warmslot.router.app import core_settings
from warmslot.router.config import Backend
from warmslot.router.config_file import ConfigError, load

from .control import ControlError
from .engine import EngineError, find_engine
from .model import ModelError, find_model
from .process import State
from .supervisor import ReshapeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from warmslot.router.config import Config
    from warmslot.router.dispatcher import Dispatcher

    from .engine import Engine
    from .supervisor import BackendStatus, Supervisor

SHAPE = ("slots", "context")
"""Settings of a backend that ``set`` changes."""


class Operations:
    """The actions of one run. ``address`` is where it serves."""

    def __init__(
        self,
        config: Config,
        file: Path | None,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        *,
        address: str,
    ) -> None:
        self._config = config
        self._file = file
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._address = address
        self._since = time.time()
        self._changing = asyncio.Lock()
        """Changes are made one after the other."""

    @property
    def actions(self) -> Mapping[str, Callable[[Mapping[str, Any]], Awaitable[Any]]]:
        """By verb, for :class:`~.control.Control`."""
        return {
            "status": lambda _: self.status(),
            "restart": lambda asked: self.restart(str(asked.get("name"))),
            "set": lambda asked: self.change(str(asked.get("name")), asked),
            "reload": lambda _: self.reload(),
        }

    # -- looking -------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Everything that ``warmslot status`` shows, as plain data. Sizes are bytes, times Unix seconds."""
        launched = {status.name: status for status in self._supervisor.status()}
        return {
            "version": version("warmslot"),
            "pid": os.getpid(),
            "since": self._since,
            "address": self._address,
            "config": None if self._file is None else str(self._file),
            "stopping": self._dispatcher.stopping,
            "pools": [
                {"name": pool.name, "queued": self._dispatcher.queued(pool.name)}
                for pool in self._config.pools
            ],
            "backends": [
                self._backend(pool.name, backend.name, launched.get(backend.name))
                for pool in self._config.pools
                for backend in pool.backends
            ],
        }

    def _backend(self, pool: str, name: str, status: BackendStatus | None) -> dict[str, Any]:
        known = self._dispatcher.backend(name)
        slots = [slot for slot in self._dispatcher.slots() if slot.ref.backend == name]
        shown: dict[str, Any] = {
            "name": name,
            "pool": pool,
            "busy": sum(slot.busy for slot in slots),
            "warm": sum(slot.resident_tokens > 0 for slot in slots),
            "resident_tokens": sum(slot.resident_tokens for slot in slots),
        }
        if status is None:
            up = known is not None and known.up
            return {
                **shown,
                "state": "remote" if up else "remote, down",
                "slots": known.slots if up and known else None,
                "context": known.context if up and known else None,
            }
        return {
            **shown,
            "state": str(status.state),
            "reason": _advice(status),
            "pid": status.pid,
            "url": status.url,
            "slots": status.slots,
            "context": status.context,
            "restarts": status.restarts,
            "memory": _memory(status.pid),
        }

    # -- changing ------------------------------------------------------------------------------------------

    async def restart(self, name: str) -> dict[str, Any]:
        """Let what runs on a backend end, and start it anew; also one that has failed."""
        self._known(name)
        async with self._changing:
            return _came_of(await self._supervisor.restart(name))

    async def change(self, name: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Give a backend other slots or another context; until the next reload or start."""
        self._known(name)
        async with self._changing:
            now = self._supervisor.backend(name)
            fields = {key: wanted[key] for key in SHAPE if wanted.get(key) is not None}
            changed = _with(now, fields)
            if changed == now:
                return {**_came_of(self._supervisor.status_of(name)), "unchanged": True}
            return await self._apply(name, changed)

    async def reload(self) -> dict[str, Any]:
        """Read the configuration file again and apply what can be applied while it runs.

        Backends that changed are restarted one after the other. Nothing is changed where the file is wrong.
        """
        if self._file is None:
            raise ControlError("there is no configuration file to read again")
        async with self._changing:
            try:
                config = await asyncio.to_thread(load, self._file)
            except ConfigError as error:
                raise ControlError(str(error)) from None
            old = {backend.name: backend for pool in self._config.pools for backend in pool.backends}
            changed: list[tuple[Backend, Engine]] = []
            for pool in config.pools:
                for backend in pool.backends:
                    if backend.url is not None or backend.name not in old or old[backend.name].url:
                        continue
                    engine = await asyncio.to_thread(_needs, config, backend)
                    kept = _with_key_of(backend, self._supervisor.backend(backend.name))
                    if self._differs(kept, engine):
                        changed.append((kept, engine))
            applied, failed = [], {}
            for backend, engine in changed:
                try:
                    await self._apply(backend.name, backend, engine)
                    applied.append(backend.name)
                except ControlError as error:
                    failed[backend.name] = str(error)
            rescheduled = self._reschedule(config)
            left = _left_for_a_start(self._config, config)
            return {"applied": applied, "rescheduled": rescheduled, "failed": failed, "needs_start": left}

    def _reschedule(self, config: Config) -> list[str]:
        """Put changed policies in force, without a restart; the names of their pools."""
        new = {pool.name: pool.scheduling for pool in config.pools}
        changed = [
            pool.name for pool in self._config.pools if pool.name in new and pool.scheduling != new[pool.name]
        ]
        for name in changed:
            self._dispatcher.reschedule(name, core_settings(new[name]))
        pools = tuple(
            pool.model_copy(update={"scheduling": new.get(pool.name, pool.scheduling)})
            for pool in self._config.pools
        )
        self._config = self._config.model_copy(update={"pools": pools})
        return changed

    def _differs(self, backend: Backend, engine: Engine) -> bool:
        running = self._supervisor.launch(backend.name)
        return running.backend != backend or running.engine.command != engine.command

    async def _apply(self, name: str, backend: Backend, engine: Engine | None = None) -> dict[str, Any]:
        try:
            return _came_of(await self._supervisor.restart(name, backend, engine))
        except ReshapeError as error:
            raise ControlError(f"{error}; it runs with the old ones again") from None

    def _known(self, name: str) -> None:
        names = [status.name for status in self._supervisor.status()]
        if name not in names:
            raise ControlError(
                f'found backend "{name}", allowed: {", ".join(names) or "none is launched here"}'
            )
        if self._dispatcher.stopping:
            raise ControlError("warmslot is stopping")


def _with(backend: Backend, fields: Mapping[str, Any]) -> Backend:
    try:
        # (The key itself is known by now, wherever it came from.)
        given = backend.model_dump(exclude_unset=True, exclude={"api_key_env", "api_key_file"})
        return Backend.model_validate({**given, **fields})
    except ValidationError as error:
        first = error.errors()[0]
        raise ControlError(f"{first['loc'][-1]}: found {first['input']!r}: {first['msg']}") from None


def _with_key_of(backend: Backend, running: Backend) -> Backend:
    """With the key by which the router asks a backend, which it learns at a start."""
    return backend.model_copy(
        update={name: getattr(running, name) for name in ("api_key", "api_key_env", "api_key_file")}
    )


def _needs(config: Config, backend: Backend) -> Engine:
    try:
        find_model(backend.model or "")
        return find_engine(backend.engine or config.engine)
    except (EngineError, ModelError) as error:
        raise ControlError(f"{backend.name}: {error}; nothing was changed") from None


def _came_of(status: BackendStatus) -> dict[str, Any]:
    if status.state is State.FAILED:
        raise ControlError(f"{status.name} has failed: {_advice(status)}")
    return {
        "name": status.name,
        "state": str(status.state),
        "slots": status.slots,
        "context": status.context,
    }


def _advice(status: BackendStatus) -> str:
    if status.state is State.FAILED:
        return f"{status.reason} (mend that, then: warmslot restart {status.name})"
    return status.reason


def _memory(pid: int | None) -> int | None:
    """Resident bytes of a process. A system that is short of memory, or a GPU, tells more elsewhere."""
    if pid is None:
        return None
    with contextlib.suppress(psutil.Error):
        size: int = psutil.Process(pid).memory_info().rss
        return size
    return None


def _left_for_a_start(old: Config, new: Config) -> list[str]:
    """Settings that differ and are read only at a start, each by its name in the file."""
    left = [
        name
        for section in type(old).model_fields
        if section not in {"pools", "engine"}
        for name in _differing(section, getattr(old, section), getattr(new, section))
    ]
    before, after = ({pool.name: pool for pool in config.pools} for config in (old, new))
    left += [f"pools: {name} is new" for name in after if name not in before]
    left += [f"pools: {name} is gone" for name in before if name not in after]
    for name in (name for name in before if name in after):
        pool, other = before[name], after[name]
        for setting in type(pool).model_fields:
            if setting != "backends":
                left += _differing(f"pools.{name}.{setting}", getattr(pool, setting), getattr(other, setting))
        had, has = ({backend.name: backend.api_key for backend in one.backends} for one in (pool, other))
        left += [f"pools.{name}.backends.{one}.api_key" for one in has if one in had and had[one] != has[one]]
        were, are = ({backend.name: backend.url for backend in one.backends} for one in (pool, other))
        left += [f"pools.{name}.backends: {one} is new" for one in are if one not in were]
        left += [f"pools.{name}.backends: {one} is gone" for one in were if one not in are]
        left += [f"pools.{name}.backends.{one}.url" for one in are if one in were and were[one] != are[one]]
    return left


def _differing(name: str, old: object, new: object) -> list[str]:
    """The names of the settings that differ, of a section or of one setting."""
    if old == new:
        return []
    if isinstance(old, BaseModel) and isinstance(new, BaseModel):
        return [
            found
            for field in type(old).model_fields
            for found in _differing(f"{name}.{field}", getattr(old, field), getattr(new, field))
        ]
    return [name]


def reload_lines(came: Mapping[str, Any]) -> list[str]:
    """What a reload did, in sentences."""
    lines = [f"{name}: runs with its new settings" for name in came["applied"]]
    lines += [f"pool {name}: schedules by its new settings" for name in came["rescheduled"]]
    lines += [f"{name}: {reason}" for name, reason in came["failed"].items()]
    if came["needs_start"]:
        lines.append(f"changed, but read only at a start: {', '.join(came['needs_start'])}")
    return lines or ["nothing to apply"]
