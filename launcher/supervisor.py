"""Keeps the backends of one machine running: starts, watches, restarts and stops them.

One task per backend drives it through the states of :mod:`.process`. What becomes of it is told to two
parties: a :class:`Listener` (the router, which needs to know what serves) and a :class:`Watcher` (people).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import httpx

from .command import CommandError, build_command
from .logs import Loading
from .model import ModelError, find_model
from .process import Child, Event, State, explain_exit, transition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmslot.router.config import Backend

    from .command import Flag
    from .engine import Engine
    from .logs import LogEvent, LogLine

_POLL = 0.1
"""Seconds between looks at a loading engine."""

_REMOTE_POLL = 2.0
"""Seconds between looks at an engine that runs elsewhere."""

_PROBE_TIMEOUT = 5.0
_OK = 200
_FIRST = asyncio.FIRST_COMPLETED


class Listener(Protocol):
    """Who needs to know which backends serve: the router's dispatcher."""

    async def backend_ready(self, name: str, url: str, slots: int, context: int, *, fresh: bool) -> None:
        """A backend serves at ``url`` with ``slots`` slots of ``context`` tokens each.

        ``fresh``: it was started just now, so that all slots are empty; else what they hold is unknown.
        """

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
class RestartPolicy:
    """How often, and how soon, a backend that dies is started again. Times in seconds."""

    first: float = 0.5
    """Wait before the first restart; it doubles with each further crash."""
    ceiling: float = 30.0
    jitter: float = 0.25
    """Share by which a wait is varied either way, so that several backends do not load in step."""
    budget: int = 8
    """Restarts within ``window``; one more crash and the backend has failed."""
    window: float = 600.0
    forgive: float = 3600.0
    """A life that was ready for this long clears all that came before."""


class Restarts:
    """The restart decision for one backend. Pure: time and chance come in."""

    def __init__(self, policy: RestartPolicy, chance: Callable[[], float] = random.random) -> None:
        self._policy = policy
        self._chance = chance
        self._crashes: deque[float] = deque()
        self._streak = 0

    def crashed(self, now: float, ready_for: float = 0.0) -> float | None:
        """Note a crash after ``ready_for`` seconds of service: the wait for a restart, ``None``: give up."""
        policy = self._policy
        if ready_for >= policy.forgive:
            self.clear()
        while self._crashes and self._crashes[0] <= now - policy.window:
            self._crashes.popleft()
        if len(self._crashes) >= policy.budget:
            return None
        self._crashes.append(now)
        wait = min(policy.ceiling, policy.first * 2.0 ** min(self._streak, 32))
        self._streak += 1
        return wait * (1 + policy.jitter * (2 * self._chance() - 1))

    def clear(self) -> None:
        """Forget all crashes."""
        self._crashes.clear()
        self._streak = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One backend to supervise. ``engine`` is ``None`` for one that runs elsewhere (``backend.url``)."""

    backend: Backend
    engine: Engine | None
    port: int = 0
    env: Mapping[str, str] | None = None


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


class Supervisor:
    """All backends of one configuration.

    ``async with Supervisor(...) as supervisor`` starts them; leaving the block, for whatever reason, stops
    them and returns only when no process is left.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        listener: Listener,
        watcher: Watcher,
        *,
        policy: RestartPolicy | None = None,
        stop_timeout: float = 10.0,
    ) -> None:
        self._listener = listener
        self._watcher = watcher
        self._runners = {
            launch.backend.name: _Runner(launch, listener, watcher, policy or RestartPolicy(), stop_timeout)
            for launch in launches
        }
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Begin to start all backends."""
        for name, runner in self._runners.items():
            self._tasks[name] = asyncio.create_task(runner.run(), name=f"backend {name}")

    async def stop(self) -> None:
        """Stop all backends: asked first, killed after ``stop_timeout``. Returns when none is left."""
        for runner in self._runners.values():
            runner.request_stop()
        try:
            await self.wait()
        except BaseException:
            await self.kill()
            raise

    async def kill(self) -> None:
        """End all backends at once, without asking. Returns when none is left."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def wait(self) -> None:
        """Wait until every backend has stopped or failed. Raises what a listener or watcher raised."""
        if self._tasks:
            await asyncio.gather(*(asyncio.shield(task) for task in self._tasks.values()))

    async def wait_settled(self) -> list[BackendStatus]:
        """Wait until every backend is ready, failed or stopped for the first time; returns their status."""
        settled = [asyncio.ensure_future(runner.settled.wait()) for runner in self._runners.values()]
        tasks = [*self._tasks.values()]
        try:
            while not all(waiting.done() for waiting in settled):
                await asyncio.wait({*settled, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task.done()]:
                    tasks.remove(task)
                    task.result()
        finally:
            for waiting in settled:
                waiting.cancel()
        return self.status()

    def status(self) -> list[BackendStatus]:
        """What is known about each backend, in the order of the configuration."""
        return [runner.status for runner in self._runners.values()]


@dataclass(frozen=True, slots=True)
class _End:
    """How one process ended."""

    reason: str
    hopeless: bool = False
    """Another try would end the same way."""
    ready_for: float = 0.0
    """Seconds that it had served."""


class _Runner:
    """One backend's task."""

    def __init__(
        self, launch: Launch, listener: Listener, watcher: Watcher, policy: RestartPolicy, stop_timeout: float
    ) -> None:
        self.status = BackendStatus(launch.backend.name)
        self.settled = asyncio.Event()
        self._launch = launch
        self._backend = launch.backend
        self._listener = listener
        self._watcher = watcher
        self._restarts = Restarts(policy)
        self._stop_timeout = stop_timeout
        self._stop = asyncio.Event()
        self._served = False
        """Whether it ever was ready: what once worked is worth trying again, whatever the engine says."""

    def request_stop(self) -> None:
        """Have :meth:`run` stop the backend and return."""
        self._stop.set()

    async def run(self) -> None:
        """Keep the backend running until it is told to stop or has failed."""
        if self._launch.engine is None:
            await self._run_remote()
            return
        while not self._stop.is_set():
            self._step(Event.START)
            end = await self._life(self._launch.engine)
            if self.status.state is State.STOPPED:
                return
            hopeless = end.hopeless and not self._served
            wait = None if hopeless else self._restarts.crashed(time.monotonic(), end.ready_for)
            if wait is None:
                self._step(Event.GIVE_UP, end.reason)
                return
            self._step(Event.BACK_OFF, f"{end.reason}; starting again in {wait:.1f} s")
            self.status.restarts += 1
            await self._or_stop(wait)
        self._step(Event.STOP)

    def _step(self, event: Event, reason: str = "") -> None:
        status = self.status
        status.state = transition(status.state, event)
        status.reason = reason
        self._watcher.state(status.name, status.state, reason)
        if status.state in {State.READY, State.FAILED, State.STOPPED}:
            self.settled.set()

    async def _or_stop(self, seconds: float) -> None:
        """Wait, but not once there is a request to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    async def _life(self, engine: Engine) -> _End:
        """One process from start to end."""
        try:
            model = find_model(self._backend.model or "")
            command = build_command(
                engine, self._backend, model, port=self._launch.port, env=self._launch.env
            )
            if command.left_out and not self.status.restarts:
                self._watcher.left_out(self.status.name, command.left_out)
            child = Child.spawn(command, self._on_line)
        except (ModelError, CommandError) as error:
            self._step(Event.EXITED, str(error))
            return _End(str(error), hopeless=True)
        except OSError as error:
            reason = f"the engine {engine.path} does not start: {error.strerror or error}"
            self._step(Event.EXITED, reason)
            return _End(reason, hopeless=isinstance(error, FileNotFoundError | PermissionError))
        try:
            self.status.pid = child.pid
            self._step(Event.SPAWNED)
            return await self._attend(child)
        finally:
            child.kill()
            await asyncio.shield(child.exited)
            self.status.pid = self.status.url = None

    async def _attend(self, child: Child) -> _End:
        """Load, serve until the child ends or is to end, and account for the end."""
        stopping = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self._load(child))
        ready_at: float | None = None
        try:
            timeout = self._backend.start_timeout
            await asyncio.wait({child.exited, stopping, loading}, timeout=timeout, return_when=_FIRST)
            overdue = not (child.exited.done() or stopping.done() or loading.done())
            if loading.done() and not child.exited.done() and not stopping.done():
                ready_at = time.monotonic()
                await self._serve(*loading.result())
                await asyncio.wait({child.exited, stopping}, return_when=_FIRST)
        finally:
            stopping.cancel()
            loading.cancel()
            await asyncio.wait({stopping, loading})
        if self._stop.is_set() and not child.exited.done():
            self._step(Event.STOP)
            if ready_at is not None:
                await self._listener.backend_down(self.status.name, "stopped")
            await child.stop(self._stop_timeout)
            self._step(Event.EXITED)
            return _End("")
        if overdue:
            child.kill()
        end = self._account(await asyncio.shield(child.exited), child, ready_at=ready_at, overdue=overdue)
        if ready_at is not None:
            await self._listener.backend_down(self.status.name, end.reason)
        self._step(Event.EXITED, end.reason)
        return end

    async def _serve(self, url: str, slots: int, context: int) -> None:
        """The child is healthy: tell the router first, so that who sees it ready can use it."""
        self._served = True
        self.status.url, self.status.slots, self.status.context = url, slots, context
        await self._listener.backend_ready(self.status.name, url, slots, context, fresh=True)
        self._step(Event.HEALTHY)

    def _account(self, status: int, child: Child, *, ready_at: float | None, overdue: bool) -> _End:
        """Why a child ended that nobody told to."""
        self.status.tail = [line.message for line in child.tail]
        reason, hopeless = explain_exit(status, child.tail)
        if overdue:
            last = f"; the engine's last line: {child.tail[-1].message}" if child.tail else ""
            reason = f"not ready within {self._backend.start_timeout:g} s (start_timeout){last}"
            hopeless = False
        ready_for = 0.0 if ready_at is None else time.monotonic() - ready_at
        return _End(reason, hopeless=hopeless, ready_for=ready_for)

    def _on_line(self, line: LogLine) -> None:
        self._watcher.line(self.status.name, line)
        if isinstance(line.event, Loading):
            self._watcher.loading(self.status.name, line.event)
        if line.event is not None:
            self._listener.log_event(self.status.name, line.event)

    async def _load(self, child: Child) -> tuple[str, int, int]:
        """Wait until the engine is healthy: its address, slots, context per slot. Never gives up."""
        async with _client() as client:
            while True:
                url = await asyncio.to_thread(child.address)
                if url and (shape := await _probe(client, url)):
                    return url, *self._shape(shape)
                await asyncio.sleep(_POLL)

    def _shape(self, props: Mapping[str, Any]) -> tuple[int, int]:
        """Slots and context per slot: what the engine says of itself, else what it was told."""
        slots = props.get("total_slots")
        context = (props.get("default_generation_settings") or {}).get("n_ctx")
        return (
            slots if isinstance(slots, int) and slots > 0 else self._backend.slots,
            context if isinstance(context, int) and context > 0 else self._backend.context,
        )

    async def _run_remote(self) -> None:
        """Watch an engine that runs elsewhere: it is ready as long as it answers."""
        url = (self._backend.url or "").rstrip("/")
        self._step(Event.START)
        self._step(Event.SPAWNED)
        ready = False
        async with _client() as client:
            while not self._stop.is_set():
                props = await _probe(client, url)
                if props is not None and not ready:
                    self.status.url = url
                    self.status.slots, self.status.context = self._shape(props)
                    self._step(Event.HEALTHY)
                    await self._listener.backend_ready(
                        self.status.name, url, self.status.slots, self.status.context, fresh=False
                    )
                elif props is None and ready:
                    self._step(Event.EXITED, f"no answer from {url}")
                    await self._listener.backend_down(self.status.name, f"no answer from {url}")
                    self._step(Event.BACK_OFF)
                    self._step(Event.START)
                    self._step(Event.SPAWNED)
                ready = props is not None
                await self._or_stop(_REMOTE_POLL)
        self._step(Event.STOP)
        if ready:
            await self._listener.backend_down(self.status.name, "stopped")
        self._step(Event.EXITED)


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=_PROBE_TIMEOUT, trust_env=False)


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
