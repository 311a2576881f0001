"""Reads the configuration again while it runs, and brings what runs to what the file says, losing no request.

Everything is looked at before anything is touched: a file that is wrong, or names what is not there, changes
nothing. Then, in this order: settings of requests (keys, limits, masks, names) change in one step; new
backends start; changed ones are restarted one after the other; and those that are gone from the file finish
what they serve and stop, once something else of their pool serves. What only a start can change is named.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from warmslot.router.app import START_ONLY
from warmslot.router.backend import Health
from warmslot.router.config import Config
from warmslot.router.config_file import ConfigError, load, locate

from .control import ControlError
from .engine import EngineError, find_engine
from .preflight import preflight
from .process import State
from .supervisor import Launch, Manners, ReshapeError
from .warm_up import learned_of, prompts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from warmslot.router.app import Router
    from warmslot.router.config import Backend

    from .attendants import Attendants
    from .engine import Engine
    from .supervisor import BackendStatus, Supervisor
    from .warm_up import WarmUp
    from .warmth import Warmth

EASY = frozenset({"slot_save_size", "slot_save_every", "start_timeout", "progress_timeout"})
"""Settings of a launched backend that its engine does not know of: no restart for them."""

_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What one run consists of."""

    router: Router
    supervisor: Supervisor
    warmth: Warmth
    warm_up: WarmUp
    attendants: Attendants


@dataclass(slots=True)
class Came:
    """What a reload did: names of backends and pools, and of settings as they stand in the file."""

    started: list[str] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    """Restarted with new settings."""
    eased: list[str] = field(default_factory=list)
    """Have new settings without a restart."""
    removed: list[str] = field(default_factory=list)
    rescheduled: list[str] = field(default_factory=list)
    in_force: list[str] = field(default_factory=list)
    """Settings of requests that changed."""
    kept: list[str] = field(default_factory=list)
    """Gone from the file, but nothing else of their pool serves."""
    failed: dict[str, str] = field(default_factory=dict)
    needs_start: list[str] = field(default_factory=list)


def manners_for(config: Config) -> Manners:
    """How backends are treated. Every request ends within its own limit, so that a restart cuts none off."""
    return Manners(drain_timeout=config.limits.request_timeout or _DAY, outlive=config.state.outlive)


class Reloader:
    """Of one run, started with ``config``."""

    def __init__(self, config: Config, file: Path | None, parts: Parts) -> None:
        self.config = config
        """What is in force, less what was changed by hand since."""
        self._file = file
        self._parts = parts

    async def reload(self) -> Came:
        """Read the file and apply it. One at a time. Raises ControlError, having changed nothing."""
        if self._file is None:
            raise ControlError("there is no configuration file to read again")
        old, new = self.config, await asyncio.to_thread(_read, self._file)
        engines = await asyncio.to_thread(_engines, new)
        target = _for_now(old, new)
        came = Came(needs_start=[*_differing_in(old, new, START_ONLY)], in_force=[*_of_requests(old, target)])
        came.rescheduled = _rescheduled(old, target)
        self._refuse_if_stopping()
        await self._apply(target, engines, came)
        return came

    async def _apply(self, target: Config, engines: Mapping[str, Engine], came: Came) -> None:
        parts = self._parts
        wanted = {backend.name: (pool.name, backend) for pool in target.pools for backend in pool.backends}
        there = {one.name: pool for pool, ones in parts.router.dispatcher.fleet.pools.items() for one in ones}
        replaced = [name for name in there if name in wanted and self._is_another(name, *wanted[name])]
        parts.router.reconfigure(target)
        parts.warm_up.configure(prompts_of(target), learned_of(target))
        parts.supervisor.treat(manners_for(target))
        before, self.config = self.config, target
        await self._start([wanted[name][1] for name in wanted if name not in there], engines, came)
        for name in wanted.keys() & there.keys() - set(replaced):
            if name in engines:
                await self._change(wanted[name][1], engines[name], came)
        for name in replaced:
            self._refuse_if_stopping()
            await self._retire(name)
            parts.router.reconfigure(target)
            await self._start([wanted[name][1]], engines, came)
        await self._remove({name: pool for name, pool in there.items() if name not in wanted}, before, came)

    def _is_another(self, name: str, pool: str, backend: Backend) -> bool:
        """Whether a backend only shares its name with the one that is there: no restart makes it that one."""
        known = self._parts.router.dispatcher.fleet.backend(name)
        old = _backend(self.config, name)
        if known is None or old is None or known.pool != pool:
            return True
        if backend.url is None:  # the router's own key for it is the one that its engine was started with
            same = (old.api_key, old.kv_unified) == (backend.api_key, backend.kv_unified)
            return old.url is not None or not same
        return old != backend

    async def _start(self, backends: list[Backend], engines: Mapping[str, Engine], came: Came) -> None:
        """Start new backends, as many at a time as may load together, and wait for what becomes of them."""
        parts = self._parts
        for backend in backends:
            if backend.name in engines:
                parts.supervisor.add(Launch(backend, engines[backend.name]))
                parts.attendants.attend(backend.name)
        for backend in backends:
            reason = await (self._tried if backend.name in engines else self._looked_at)(backend.name)
            if reason is None:
                came.started.append(backend.name)
            else:
                came.failed[backend.name] = reason

    async def _tried(self, name: str) -> str | None:
        """Wait until a launched backend was tried; why it does not serve."""
        status = await self._parts.supervisor.tried(name)
        return self._withheld(name) if status.is_ready else advice(self._parts.supervisor.status_of(name))

    def _withheld(self, name: str) -> str | None:
        """Why a backend that runs gets no requests, where that is so."""
        known = self._parts.router.dispatcher.fleet.backend(name)
        return f"runs, but gets no requests: {known.withheld}" if known and known.withheld else None

    async def _looked_at(self, name: str) -> str | None:
        """Wait until a backend elsewhere was looked at; why it does not serve."""
        known = self._parts.router.dispatcher.fleet.backend(name)
        if known is None:
            return "removed meanwhile"
        await known.looked_at()
        return None if known.up else f"added, but down: {known.trouble} (it is asked again and again)"

    async def _change(self, backend: Backend, engine: Engine, came: Came) -> None:
        """Bring a launched backend to other settings, by a restart where its engine has to know of them."""
        name, supervisor = backend.name, self._parts.supervisor
        running = supervisor.launch(name)
        other = {
            one
            for one in type(backend).model_fields
            if getattr(running.backend, one) != getattr(backend, one)
        }
        if running.engine.command == engine.command and other <= EASY:
            if other:
                supervisor.ease(name, backend)
                came.eased.append(name)
        else:
            try:
                status = await supervisor.restart(name, backend, engine)
            except ReshapeError as error:
                came.failed[name] = f"{error}; it runs with the old ones again"
                return
            if not status.is_ready:
                came.failed[name] = advice(status)
                return
            if (reason := self._withheld(name)) is not None:
                came.failed[name] = reason
            else:
                came.applied.append(name)
        if other:
            self._parts.attendants.attend(name)

    async def _remove(self, gone: Mapping[str, str], before: Config, came: Came) -> None:
        """Let backends that are not wanted any more finish and stop, and pools that have none left vanish."""
        router, wanted = self._parts.router, {pool.name for pool in self.config.pools}
        kept: dict[str, list[Backend]] = {}
        for name, pool in gone.items():
            self._refuse_if_stopping()
            if pool not in wanted:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(manners_for(self.config).drain_timeout):
                        await router.dispatcher.unused(pool)
            elif (old := _backend(before, name)) is not None and not await self._can_go(name, pool, gone):
                kept.setdefault(pool, []).append(old)
                came.kept.append(name)
                continue
            await self._retire(name)
            came.removed.append(name)
        for pool in [pool for pool in router.dispatcher.fleet.pools if pool not in wanted]:
            await router.remove_pool(pool)
        if kept:
            self.config = _with_backends(self.config, kept)

    async def _can_go(self, name: str, pool: str, gone: Mapping[str, str]) -> bool:
        """Whether something of the pool that stays serves, or this one does not serve either."""
        dispatcher = self._parts.router.dispatcher
        known = dispatcher.fleet.backend(name)
        if known is None or not known.usable:
            return True
        for other in dispatcher.fleet.pools[pool]:
            if other.name not in gone and (other.usable or await self._answers(other.name)):
                return True
        return False

    async def _answers(self, name: str) -> bool:
        """Whether a backend elsewhere is healthy, though nobody may have looked at it yet."""
        backend = _backend(self.config, name)
        if backend is None or backend.url is None:
            return False
        client = self._parts.router.connector(name, backend.url)
        try:
            return await client.health() is Health.OK
        finally:
            await client.aclose()

    async def _retire(self, name: str) -> None:
        """Let a backend finish what it serves, save what its slots hold, stop it and forget it."""
        parts, dispatcher = self._parts, self._parts.router.dispatcher
        launched = name in parts.supervisor
        drain = parts.warmth.backend_draining if launched else dispatcher.fleet.backend_draining
        draining = asyncio.create_task(drain(name), name=f"drain {name}")
        try:
            await asyncio.wait({draining}, timeout=manners_for(self.config).drain_timeout)
            if launched:
                parts.attendants.leave(name)
                await parts.supervisor.remove(name)
            await parts.router.remove_backend(name)
        finally:  # called off only now, so that nothing new comes in between
            draining.cancel()
            await asyncio.wait({draining})

    def _refuse_if_stopping(self) -> None:
        if self._parts.router.dispatcher.stopping:
            raise ControlError("warmslot is stopping")


def advice(status: BackendStatus) -> str:
    """Why a backend is as it is, and where it has failed what to do."""
    if status.state is State.FAILED:
        return f"{status.reason} (mend that, then: warmslot restart {status.name})"
    return status.reason


def _read(file: Path) -> Config:
    """The file, if all that it names is there. Raises ControlError with everything that is wrong."""
    try:
        config = load(file)
        if lacks := preflight(config):
            at = locate(file)
            raise ControlError("\n".join(at(lack.place, lack.message) for lack in lacks))
    except ConfigError as error:
        raise ControlError(str(error)) from None
    return config


def _engines(config: Config) -> dict[str, Engine]:
    """The engine of each backend that is launched here."""
    try:
        return {
            backend.name: find_engine(backend.engine or config.engine)
            for pool in config.pools
            for backend in pool.backends
            if backend.url is None
        }
    except EngineError as error:  # gone since it was looked for
        raise ControlError(str(error)) from None


def _for_now(old: Config, new: Config) -> Config:
    """The new one, with what only a start reads left as it is. Raises ControlError where that clashes."""
    sections = {name: getattr(new, name) for name in Config.model_fields}
    for name in START_ONLY:
        section, _, setting = name.partition(".")
        kept = getattr(old, section)
        if setting:
            kept = sections[section].model_copy(update={setting: getattr(kept, setting)})
        sections[section] = kept
    try:
        return Config(**sections)
    except ValidationError as error:
        reason = "; ".join(one["msg"] for one in error.errors())
        raise ControlError(f"with what is read only at a start: {reason}; nothing was changed") from None


def _backend(config: Config, name: str) -> Backend | None:
    return next((one for pool in config.pools for one in pool.backends if one.name == name), None)


def _with_backends(config: Config, more: Mapping[str, list[Backend]]) -> Config:
    pools = tuple(
        pool.model_copy(update={"backends": (*pool.backends, *more.get(pool.name, ()))})
        for pool in config.pools
    )
    return config.model_copy(update={"pools": pools})


# -- what differs ------------------------------------------------------------------------------------------


def _differing_in(old: Config, new: Config, sections: tuple[str, ...]) -> Iterator[str]:
    for name in sections:
        of = attrgetter(name)
        yield from _differing(name, of(old), of(new))


def _of_requests(old: Config, new: Config) -> Iterator[str]:
    """Settings that hold for every request from now on: all but those of backends and of schedules."""
    yield from _differing_in(
        old, new, tuple(set_ for set_ in Config.model_fields if set_ not in {"pools", "engine"})
    )
    before, after = ({pool.name: pool for pool in config.pools} for config in (old, new))
    for name in (name for name in after if name in before):
        for setting in type(after[name]).model_fields:
            if setting not in {"backends", "scheduling"}:
                yield from _differing(
                    f"pools.{name}.{setting}", getattr(before[name], setting), getattr(after[name], setting)
                )


def _rescheduled(old: Config, new: Config) -> list[str]:
    before = {pool.name: pool.scheduling for pool in old.pools}
    return [pool.name for pool in new.pools if before.get(pool.name, pool.scheduling) != pool.scheduling]


def _differing(name: str, old: object, new: object) -> Iterator[str]:
    """The names of the settings that differ, of a section or of one setting."""
    if old == new:
        return
    if isinstance(old, BaseModel) and isinstance(new, BaseModel):
        for setting in type(old).model_fields:
            yield from _differing(f"{name}.{setting}", getattr(old, setting), getattr(new, setting))
    else:
        yield name


def reload_lines(came: Mapping[str, Any]) -> list[str]:
    """What a reload did (a :class:`Came` as plain data), in sentences."""
    lines = [f"{name}: added" for name in came["started"]]
    lines += [f"{name}: runs with its new settings" for name in came["applied"]]
    lines += [f"{name}: has its new settings, without a restart" for name in came["eased"]]
    lines += [f"{name}: removed" for name in came["removed"]]
    lines += [f"pool {name}: schedules by its new settings" for name in came["rescheduled"]]
    if came["in_force"]:
        lines.append(f"in force: {', '.join(came['in_force'])}")
    lines += [
        f"{name}: gone from the file, but kept: nothing else of its pool serves (reload again when it does)"
        for name in came["kept"]
    ]
    lines += [f"{name}: {reason}" for name, reason in came["failed"].items()]
    if came["needs_start"]:
        lines.append(f"changed, but read only at a start: {', '.join(came['needs_start'])}")
    return lines or ["nothing to apply"]
