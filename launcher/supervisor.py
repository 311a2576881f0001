"""Keeps the backends of one machine running: starts, watches, restarts and stops them, one task for each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from .process import State
from .runner import BackendStatus, Launch, Listener, Manners, Runner, Watcher, Wish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmslot.router.config import Backend

    from .engine import Engine
    from .orphans import StateFolder

__all__ = ["BackendStatus", "Launch", "Listener", "Manners", "ReshapeError", "Supervisor", "Watcher"]


class ReshapeError(Exception):
    """A backend did not come up with its new settings and was put back to the old ones; one line."""


class Supervisor:
    """All backends of one configuration that run here.

    ``async with Supervisor(...) as supervisor`` starts them; leaving the block, for whatever reason, stops
    them and returns only when no process is left. ``folder``, locked by the caller, remembers what runs, so
    that what a killed launcher left is found by the next one. ``load_at_once`` bounds how many load together.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        listener: Listener,
        watcher: Watcher,
        *,
        manners: Manners | None = None,
        folder: StateFolder | None = None,
        load_at_once: int | None = None,
    ) -> None:
        self._manners = manners or Manners()
        self._told = (listener, watcher)
        self._folder = folder
        self._gate = None if load_at_once is None else asyncio.Semaphore(load_at_once)
        self._runners = {launch.backend.name: self._make(launch) for launch in launches}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending = False
        self.began = asyncio.Event()
        """Set whenever a backend begins to run, and cleared by whoever waits for that."""

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Begin to start all backends."""
        for name in self._runners:
            self._run(name)

    def __contains__(self, name: object) -> bool:
        """Whether a backend of this name runs here, or has failed here."""
        return name in self._runners

    def add(self, launch: Launch) -> None:
        """One backend more, whose name is new; it begins to start."""
        name = launch.backend.name
        runner = self._runners[name] = self._make(launch)
        if self._ending:
            runner.wish(Wish.STOP)
        self._run(name)

    async def remove(self, name: str) -> None:
        """One backend less: stopped without a drain. Returns when no process of it is left; KeyError."""
        self._runners[name].wish(Wish.STOP)
        await asyncio.wait({self._tasks[name]})
        self._raise_broken()
        del self._runners[name], self._tasks[name]

    def treat(self, manners: Manners) -> None:
        """Treat all backends so from now on."""
        self._manners = manners
        for runner in self._runners.values():
            runner.manners = manners

    def ease(self, name: str, backend: Backend) -> None:
        """Give a backend settings for which its engine need not be started anew. Raises KeyError."""
        runner = self._runners[name]
        runner.reshape(replace(runner.launch, backend=backend))

    def _make(self, launch: Launch) -> Runner:
        return Runner(launch, *self._told, self._manners, folder=self._folder, gate=self._gate)

    def _run(self, name: str) -> None:
        self.began.set()
        self._tasks[name] = asyncio.create_task(self._runners[name].run(), name=f"backend {name}")

    async def restart(
        self, name: str, backend: Backend | None = None, engine: Engine | None = None
    ) -> BackendStatus:
        """Let a backend finish what runs on it and start it anew, also when it has failed.

        With ``backend`` it gets new settings (the name stays), with ``engine`` as well another engine.
        Returns when it is ready, has failed or was stopped. Raises KeyError for an unknown name and
        :class:`ReshapeError` where it does not come up with the new settings though it had with the old ones,
        which are then in force again.
        """
        runner = self._runners[name]
        before, worked = runner.launch, runner.status.state in {State.READY, State.DRAINING}
        if backend is not None:
            runner.reshape(replace(before, backend=backend, engine=engine or before.engine))
        await self._restart(name)
        if backend is not None and worked and runner.status.state is State.FAILED:
            reason = runner.status.reason
            runner.reshape(before)
            await self._restart(name)
            raise ReshapeError(f"{name} does not start with the new settings: {reason}")
        return runner.status

    async def _restart(self, name: str) -> None:
        runner = self._runners[name]
        if not self._tasks[name].done():
            runner.wish(Wish.RESTART)
        elif runner.status.state is State.FAILED:
            runner.settled.clear()
            self._run(name)
        await self._settled(name)

    async def _settled(self, name: str) -> None:
        await self._either(name, self._runners[name].settled)

    async def _either(self, name: str, event: asyncio.Event) -> None:
        """Wait for an event, or until nothing will set it."""
        coming = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({coming, self._tasks[name]}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            coming.cancel()
        self._raise_broken()

    async def stop(self) -> None:
        """Stop all backends: asked first, killed after ``stop_timeout``. Returns when none is left."""
        self._ending = True
        for runner in self._runners.values():
            runner.wish(Wish.STOP)
        try:
            await self.wait()
        except BaseException:
            await self.kill()
            raise

    async def kill(self) -> None:
        """End all backends at once, without asking. Returns when none is left."""
        self._ending = True
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def wait(self) -> None:
        """Wait until every backend has stopped or failed. Raises what a listener or watcher raised."""
        while running := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            self._raise_broken()
        self._raise_broken()

    def _raise_broken(self) -> None:
        for task in self._tasks.values():
            if task.done() and not task.cancelled():
                task.result()

    async def wait_settled(self) -> list[BackendStatus]:
        """Wait until every backend is ready, failed or stopped; returns their status."""
        for name in list(self._runners):
            if name in self._runners:  # removed while others were waited for
                await self._settled(name)
        return self.status()

    async def tried(self, name: str) -> BackendStatus:
        """Wait until a backend is ready or a try to start it has ended otherwise. Raises KeyError."""
        await self._either(name, self._runners[name].tried)
        return self._runners[name].status

    def condemn(self, name: str, reason: str) -> None:
        """Kill a backend's engine and let it be started again, as after a crash. Raises KeyError."""
        self._runners[name].condemn(reason)

    def status_of(self, name: str) -> BackendStatus:
        """What is known about one backend. Raises KeyError for an unknown name."""
        return self._runners[name].status

    def launch(self, name: str) -> Launch:
        """What of a backend is in force. Raises KeyError for an unknown name."""
        return self._runners[name].launch

    def backend(self, name: str) -> Backend:
        """A backend's settings that are in force. Raises KeyError for an unknown name."""
        return self._runners[name].launch.backend

    def status(self) -> list[BackendStatus]:
        """What is known about each backend, in the order in which they came."""
        return [runner.status for runner in self._runners.values()]
