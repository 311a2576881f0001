"""Drives one backend through its life: start, load, serve, drain, stop, and again after a crash.

A runner owns its backend's state; others express wishes (:class:`Wish`), and the runner acts on them when
it can. What becomes of the backend is told to a :class:`Listener` (the router) and a :class:`Watcher`
(people).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from .command import CommandError, build_command, key_header, parse_cpus
from .host_memory import fit_cache_ram
from .logs import Loading
from .model import ModelError, find_model
from .orphans import Adopted, LeftoverError
from .process import Child, Event, State, explain_exit, transition
from .restarts import RestartPolicy, Restarts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmslot.router.config import Backend

    from .command import Command, Flag
    from .engine import Engine
    from .logs import LogEvent, LogLine
    from .orphans import StateFolder

log = logging.getLogger("warmslot.launcher")

_POLL = 0.1
"""Seconds between looks at a loading engine."""

_PROBE_TIMEOUT = 5.0
_OK = 200
_FIRST = asyncio.FIRST_COMPLETED


class Listener(Protocol):
    """Who needs to know which backends serve: the router's fleet."""

    async def backend_ready(self, name: str, url: str, slots: int, context: int, *, fresh: bool) -> None:
        """A backend serves at ``url`` with ``slots`` slots of ``context`` tokens each.

        ``fresh``: it was started just now, so that all slots are empty; else what they hold is unknown.
        """

    async def backend_draining(self, name: str) -> None:
        """Send nothing new to a backend; return when nothing runs on it. Cancelled: it is in use again."""

    async def backend_down(self, name: str, reason: str) -> None:
        """A backend that was ready serves no longer; what its slots held is lost."""

    def log_event(self, name: str, event: LogEvent) -> None:
        """The engine's log told something. Called from the reader of its output: must return at once."""


class Watcher(Protocol):
    """Who shows people what happens. Every call must return at once."""

    def state(self, name: str, state: State, reason: str) -> None:
        """A backend entered a state; ``reason`` is one line, or empty."""

    def line(self, name: str, line: LogLine) -> None:
        """A line of the engine's output."""

    def loading(self, name: str, event: Loading) -> None:
        """Loading reached a stage."""

    def left_out(self, name: str, flags: Sequence[Flag]) -> None:
        """The engine does not know these flags; they were left out."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One backend to run here, on which engine."""

    backend: Backend
    engine: Engine
    port: int = 0
    env: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Manners:
    """How backends are treated. Times in seconds."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    drain_timeout: float = 60.0
    """How long requests may take to end before a restart cuts them off."""
    stop_timeout: float = 10.0
    """How long an engine may take to end before it is killed."""
    outlive: bool = False
    """Whether engines live on when the launcher is killed, to be taken over by the next one."""


@dataclass(slots=True)
class BackendStatus:
    """What is known about one backend, for status pages."""

    name: str
    state: State = State.ABSENT
    reason: str = ""
    pid: int | None = None
    url: str | None = None
    slots: int | None = None
    context: int | None = None
    restarts: int = 0
    tail: list[str] = field(default_factory=list)
    """The engine's last lines, where it ended badly."""

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return self.state is State.READY


class Wish(StrEnum):
    """What others want of a backend."""

    RUN = "run"
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class _End:
    """How one process ended."""

    reason: str
    hopeless: bool = False
    """Another try would end the same way."""
    ready_for: float = 0.0
    """Seconds that it had served."""


class Runner:
    """One backend. :meth:`run` is its task; it returns when the backend has stopped or failed for good."""

    def __init__(
        self,
        launch: Launch,
        listener: Listener,
        watcher: Watcher,
        manners: Manners,
        *,
        folder: StateFolder | None = None,
        gate: asyncio.Semaphore | None = None,
    ) -> None:
        self.status = BackendStatus(launch.backend.name)
        self.settled = asyncio.Event()
        """Set while the backend is ready, failed or stopped for good."""
        self.tried = asyncio.Event()
        """Set as well while another try is waited for."""
        self.launch = launch
        """What runs from the next start on."""
        self._listener = listener
        self._watcher = watcher
        self.manners = manners
        """How it is treated from now on."""
        self._folder = folder
        self._gate = gate
        """Who holds it may load."""
        self._in_gate = False
        self._restarts = Restarts(manners.policy)
        self._wish = Wish.RUN
        self._wished = asyncio.Event()
        self._left_out: tuple[Flag, ...] = ()
        self._served = False
        """Whether it ever was ready: what once worked is worth trying again, whatever the engine says."""
        self._child: Child | Adopted | None = None
        self._condemned = ""
        """Why the child was killed by us, where it was."""

    def wish(self, wish: Wish) -> None:
        """Have the backend stopped, or drained and started anew. A wish to stop is final."""
        if wish is Wish.RUN or self._wish is Wish.STOP:
            return
        self._wish = wish
        self._wished.set()
        if wish is Wish.RESTART:
            self.settled.clear()

    def condemn(self, reason: str) -> None:
        """Kill the engine, if there is one; that counts as a crash for this reason."""
        if self._child is not None:
            self._condemned = reason
            self._child.kill()

    async def run(self) -> None:
        """Keep the backend running until it is told to stop or has failed."""
        try:
            found = await self._look_for_leftover()
        except LeftoverError as error:
            for event in (Event.START, Event.EXITED, Event.GIVE_UP):
                self._step(event, str(error))
            return
        while not self._is_to_stop():
            if found is None and not await self._enter_gate():
                break
            try:
                end = await self._life(found)
            finally:
                self._leave_gate()
            found = None
            if self.status.state is State.STOPPED:
                if self._is_to_stop():
                    return
                self._granted()
                continue
            wait = self._wait_after(end)
            if wait is None:
                self._step(Event.GIVE_UP, self._last_words(end))
                return
            self._step(Event.BACK_OFF, f"{end.reason}; starting again in {wait:.1f} s")
            self.status.restarts += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wished.wait()
            if self._wish is Wish.RESTART:
                self._granted()
        self._step(Event.STOP)

    async def _enter_gate(self) -> bool:
        """Wait until this backend may load; False where it is to stop first."""
        if self._gate is None:
            return True
        entering = asyncio.ensure_future(self._gate.acquire())
        stop = asyncio.ensure_future(self._stop_wished())
        try:
            await asyncio.wait({entering, stop}, return_when=_FIRST)
        finally:
            stop.cancel()
            if not entering.done():
                entering.cancel()
                await asyncio.wait({entering})
            self._in_gate = entering.done() and not entering.cancelled()
        if self._wish is Wish.RESTART:  # it starts now, with whatever is in force now
            self._granted()
        return not self._is_to_stop()

    def _leave_gate(self) -> None:
        if self._gate is not None and self._in_gate:
            self._in_gate = False
            self._gate.release()

    def _is_to_stop(self) -> bool:
        return self._wish is Wish.STOP

    def _granted(self) -> None:
        """The wish for a restart is about to come true."""
        self._wish = Wish.RUN
        self._wished.clear()
        self._restarts.clear()
        self._served = False

    def _wait_after(self, end: _End) -> float | None:
        if self._wish is not Wish.RUN:
            return 0.0
        if end.hopeless and not self._served:
            return None
        return self._restarts.crashed(time.monotonic(), end.ready_for)

    def _last_words(self, end: _End) -> str:
        policy = self.manners.policy
        if end.hopeless and not self._served:
            return end.reason
        return f"{end.reason}; given up after {policy.budget} restarts within {policy.window:g} s"

    def _step(self, event: Event, reason: str = "") -> None:
        status = self.status
        status.state = transition(status.state, event)
        status.reason = reason
        self._watcher.state(status.name, status.state, reason)
        stopped = status.state is State.STOPPED and self._is_to_stop()
        if stopped or event in {Event.HEALTHY, Event.GIVE_UP}:
            self.settled.set()
            self.tried.set()
        elif event is Event.BACK_OFF:
            self.tried.set()
        elif event is Event.START:
            self.settled.clear()
            self.tried.clear()

    async def _look_for_leftover(self) -> Adopted | None:
        """What an earlier launcher left of this backend: taken over if it serves as it should, else ended."""
        if self._folder is None:
            return None
        name = self.status.name
        found = await asyncio.to_thread(self._folder.leftover, name)
        if found is None:
            return None
        if self.manners.outlive and found.url and found.alive and self.status.state is State.ABSENT:
            with contextlib.suppress(ModelError, CommandError):
                if self._command().fingerprint == found.fingerprint:
                    async with _client(self.launch.backend) as client:
                        if await _probe(client, found.url) is not None:
                            return Adopted(found)
        await asyncio.to_thread(found.end)
        self._folder.remove(name)
        return None

    def _command(self) -> Command:
        backend = self.launch.backend
        model = find_model(backend.model or "")
        if backend.slot_save_path is not None:
            try:
                Path(backend.slot_save_path).mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                reason = f"slot_save_path: {backend.slot_save_path} cannot be made: {error.strerror}"
                raise CommandError(f"backend {backend.name!r}: {reason}") from error
        backend = fit_cache_ram(backend, model)
        return build_command(self.launch.engine, backend, model, port=self.launch.port, env=self.launch.env)

    async def _life(self, found: Adopted | None) -> _End:
        """One process from start to end."""
        if found is not None:
            self._step(Event.ADOPT)
            return await self._with(found)
        self._step(Event.START)
        try:
            command = self._command()
            if command.left_out and command.left_out != self._left_out:
                self._left_out = command.left_out
                self._watcher.left_out(self.status.name, command.left_out)
            child = self._spawn(command)
        except (ModelError, CommandError) as error:
            self._step(Event.EXITED, str(error))
            return _End(str(error), hopeless=True)
        except OSError as error:
            reason = f"the engine {self.launch.engine.path} does not start: {error.strerror or error}"
            self._step(Event.EXITED, reason)
            return _End(reason, hopeless=isinstance(error, FileNotFoundError | PermissionError))
        self._pin(child.pid)
        self._step(Event.SPAWNED)
        return await self._with(child)

    def _pin(self, pid: int) -> None:
        """Keep the engine to its CPUs; threads that it makes from now on inherit that."""
        cpus = self.launch.backend.cpus
        if cpus is None:
            return
        try:
            os.sched_setaffinity(pid, parse_cpus(cpus))
        except (AttributeError, OSError) as error:
            reason = getattr(error, "strerror", None) or "not on this system"
            log.warning("%s: it cannot be kept to the CPUs %s: %s", self.status.name, cpus, reason)

    def _spawn(self, command: Command) -> Child:
        """Start the child; what is needed to find it again is on disk before and after."""
        name, outlive = self.status.name, self.manners.outlive
        if self._folder is None:
            return Child.spawn(command, self._on_line, outlive=outlive)
        mark = self._folder.announce(name, command.fingerprint)
        try:
            child = Child.spawn(command.marked(mark), self._on_line, outlive=outlive)
        except OSError:
            self._folder.remove(name)
            raise
        self._folder.started(name, child.pid)
        return child

    async def _with(self, child: Child | Adopted) -> _End:
        try:
            self.status.pid, self._child, self._condemned = child.pid, child, ""
            return await self._attend(child)
        finally:
            self._child = None
            child.kill()
            await asyncio.shield(child.exited)
            self.status.pid = self.status.url = None
            if self._folder is not None:
                self._folder.remove(self.status.name)

    async def _attend(self, child: Child | Adopted) -> _End:
        """Load, serve until the child ends or is to end, and account for the end."""
        wished = asyncio.create_task(self._wished.wait())
        loading = asyncio.create_task(self._load(child))
        ready_at: float | None = None
        try:
            timeout = self.launch.backend.start_timeout
            await asyncio.wait({child.exited, wished, loading}, timeout=timeout, return_when=_FIRST)
            overdue = not (child.exited.done() or wished.done() or loading.done())
            if loading.done() and not child.exited.done() and not wished.done():
                ready_at = time.monotonic()
                await self._serve(child, *loading.result())
                await asyncio.wait({child.exited, wished}, return_when=_FIRST)
        finally:
            wished.cancel()
            loading.cancel()
            await asyncio.wait({wished, loading})
        if self._wished.is_set() and not child.exited.done():
            await self._end(child, ready=ready_at is not None)
            if self.status.state is State.STOPPED:
                return _End("")
        if overdue:
            child.kill()
        end = self._account(await asyncio.shield(child.exited), child, ready_at=ready_at, overdue=overdue)
        if ready_at is not None:
            await self._listener.backend_down(self.status.name, end.reason)
        self._step(Event.EXITED, end.reason)
        return end

    async def _serve(self, child: Child | Adopted, url: str, slots: int, context: int) -> None:
        """The child is healthy: tell the router first, so that who sees it ready can use it."""
        self._served = True
        self._leave_gate()
        self.status.url, self.status.slots, self.status.context = url, slots, context
        if self._folder is not None:
            self._folder.serving(self.status.name, url)
        fresh = isinstance(child, Child)
        await self._listener.backend_ready(self.status.name, url, slots, context, fresh=fresh)
        if fresh:
            self._step(Event.HEALTHY)
        else:
            self.settled.set()

    async def _end(self, child: Child | Adopted, *, ready: bool) -> None:
        """End a living child as wished. It may end by itself while it is drained: then it is still to do."""
        name = self.status.name
        if not ready or self._is_to_stop():
            self._step(Event.STOP)
            if ready:
                await self._listener.backend_down(name, "stopped")
        else:
            self._step(Event.DRAIN)
            draining = asyncio.create_task(self._listener.backend_draining(name))
            stop = asyncio.create_task(self._stop_wished())
            try:
                timeout = self.manners.drain_timeout
                await asyncio.wait({draining, child.exited, stop}, timeout=timeout, return_when=_FIRST)
                if not child.exited.done():
                    self._step(Event.STOP)
                    await self._listener.backend_down(name, "restarting")
            finally:  # a drain is called off only now: nothing new may come in between
                draining.cancel()
                stop.cancel()
                await asyncio.wait({draining, stop})
            if not draining.cancelled():
                draining.result()
            if self.status.state is State.DRAINING:
                return
        await child.stop(self.manners.stop_timeout)
        self._step(Event.EXITED)

    async def _stop_wished(self) -> None:
        while self._wish is not Wish.STOP:
            self._wished.clear()
            await self._wished.wait()

    def _account(
        self, status: int | None, child: Child | Adopted, *, ready_at: float | None, overdue: bool
    ) -> _End:
        """Why a child ended that nobody told to."""
        self.status.tail = [line.message for line in child.tail]
        reason, hopeless = explain_exit(status, child.tail)
        if overdue:
            last = f"; the engine's last line: {child.tail[-1].message}" if child.tail else ""
            reason = f"not ready within {self.launch.backend.start_timeout:g} s (start_timeout){last}"
            hopeless = False
        if self._condemned:
            reason, hopeless = self._condemned, False
        ready_for = 0.0 if ready_at is None else time.monotonic() - ready_at
        return _End(reason, hopeless=hopeless, ready_for=ready_for)

    def _on_line(self, line: LogLine) -> None:
        self._watcher.line(self.status.name, line)
        if isinstance(line.event, Loading):
            self._watcher.loading(self.status.name, line.event)
        if line.event is not None:
            self._listener.log_event(self.status.name, line.event)

    async def _load(self, child: Child | Adopted) -> tuple[str, int, int]:
        """Wait until the engine is healthy: its address, slots, context per slot. Never gives up."""
        async with _client(self.launch.backend) as client:
            while True:
                url = await asyncio.to_thread(child.address)
                if url and (props := await _probe(client, url)) is not None:
                    return url, *self._shape(props)
                await asyncio.sleep(_POLL)

    def _shape(self, props: Mapping[str, Any]) -> tuple[int, int]:
        """Slots and context per slot: what the engine says of itself, else what it was told."""
        slots = props.get("total_slots")
        context = (props.get("default_generation_settings") or {}).get("n_ctx")
        return (
            slots if isinstance(slots, int) and slots > 0 else self.launch.backend.slots,
            context if isinstance(context, int) and context > 0 else self.launch.backend.context,
        )

    def reshape(self, launch: Launch) -> None:
        """Use other settings from the next start on."""
        self.launch = launch


def _client(backend: Backend) -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=_PROBE_TIMEOUT, trust_env=False, headers=key_header(backend))


async def _probe(client: httpx.AsyncClient, url: str) -> dict[str, Any] | None:
    """The engine's ``/props`` if it is healthy ({} if it has none), ``None`` while it loads or is away."""
    try:
        if (await client.get(f"{url}/health")).status_code != _OK:
            return None
        answer = await client.get(f"{url}/props")
        props = answer.json() if answer.status_code == _OK else {}
    except (httpx.HTTPError, ValueError):
        return None
    return props if isinstance(props, dict) else {}
