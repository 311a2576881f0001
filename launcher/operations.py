"""What an operator can ask of a running ``warmslot up``: how it is, restart, other settings, reload."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import ValidationError
from warmslot.router.config import Backend

from .control import ControlError
from .process import State
from .reloading import advice
from .supervisor import ReshapeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from warmslot.router.advice import Advised
    from warmslot.router.backends import Backend as Known
    from warmslot.router.dispatcher import Dispatcher

    from .reloading import Reloader
    from .supervisor import BackendStatus, Supervisor

SHAPE = ("slots", "context")
"""Settings of a backend that ``set`` changes."""


class Operations:
    """The actions of one run. ``address`` is where it serves, ``advised`` what is advised, by backend."""

    def __init__(
        self,
        file: Path | None,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        reloader: Reloader,
        *,
        address: str,
        advised: Mapping[str, Advised],
    ) -> None:
        self._file = file
        self._reloader = reloader
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._address = address
        self._advised = advised
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
            "config": None if self._file is None else str(self._file.absolute()),
            "stopping": self._dispatcher.stopping,
            "pools": [
                {"name": pool, "queued": self._dispatcher.queued(pool)}
                for pool in self._dispatcher.fleet.pools
            ],
            "backends": [
                self._backend(pool, backend.name, launched.get(backend.name))
                for pool, backends in self._dispatcher.fleet.pools.items()
                for backend in backends
            ],
        }

    def _backend(self, pool: str, name: str, status: BackendStatus | None) -> dict[str, Any]:
        known = self._dispatcher.fleet.backend(name)
        slots = [slot for slot in self._dispatcher.slots() if slot.ref.backend == name]
        found = self._advised.get(name)
        shown: dict[str, Any] = {
            "name": name,
            "pool": pool,
            "busy": sum(slot.busy for slot in slots),
            "warm": sum(slot.resident_tokens > 0 for slot in slots),
            "resident_tokens": sum(slot.resident_tokens for slot in slots),
            "advised": None if found is None else asdict(found),
        }
        if status is None:
            up = known is not None and known.up
            return {
                **shown,
                "state": _state("remote" if up else "remote, down", known),
                "reason": (known.withheld or known.trouble) if known else "",
                "slots": known.slots if up and known else None,
                "context": known.context if up and known else None,
            }
        return {
            **shown,
            "state": _state(status.state, known),
            "reason": (known.withheld if known else "") or advice(status),
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
            came = _came_of(await self._supervisor.restart(name))
            known = self._dispatcher.fleet.backend(name)
            if known is not None and known.withheld:
                raise ControlError(f"{name} runs again, but gets no requests: {known.withheld}")
            return came

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
        """Read the configuration file again and apply it; see :mod:`.reloading`."""
        async with self._changing:
            return asdict(await self._reloader.reload())

    async def unchanging(self) -> None:
        """Wait until no change is being made."""
        async with self._changing:
            return

    async def _apply(self, name: str, backend: Backend) -> dict[str, Any]:
        try:
            return _came_of(await self._supervisor.restart(name, backend))
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


def _state(own: str, known: Known | None) -> str:
    """That of its process, and whether the router holds requests back from it."""
    return f"{own}, withheld" if known is not None and known.withheld else str(own)


def _with(backend: Backend, fields: Mapping[str, Any]) -> Backend:
    try:
        # (The key itself is known by now, wherever it came from.)
        given = backend.model_dump(exclude_unset=True, exclude={"api_key_env", "api_key_file"})
        return Backend.model_validate({**given, **fields})
    except ValidationError as error:
        first = error.errors()[0]
        raise ControlError(f"{first['loc'][-1]}: found {first['input']!r}: {first['msg']}") from None


def _came_of(status: BackendStatus) -> dict[str, Any]:
    if status.state is State.FAILED:
        raise ControlError(f"{status.name} has failed: {advice(status)}")
    return {
        "name": status.name,
        "state": str(status.state),
        "slots": status.slots,
        "context": status.context,
    }


def _memory(pid: int | None) -> int | None:
    """Resident bytes of a process. A system that is short of memory, or a GPU, tells more elsewhere."""
    if pid is None:
        return None
    with contextlib.suppress(psutil.Error):
        size: int = psutil.Process(pid).memory_info().rss
        return size
    return None
