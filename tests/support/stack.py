"""All of ``warmslot up`` but its terminal, in the test's own process: router, supervisor, slots kept warm."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from warmslot.launcher.orphans import StateFolder
from warmslot.launcher.restarts import RestartPolicy
from warmslot.launcher.supervisor import Launch, Manners, Supervisor
from warmslot.launcher.warmth import Warmth
from warmslot.router.app import Router, create_router, server_config
from warmslot.router.config import Config

from tests.support.launcher import PATIENCE, Recorder
from tests.support.router import Watcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from warmslot.launcher.engine import Engine
    from warmslot.launcher.logs import LogEvent
    from warmslot.launcher.warm_up import WarmUp
    from warmslot.router.observer import Observer
    from warmslot.router.values import Report

QUICK = RestartPolicy(first=0.05, ceiling=0.5, budget=50)


@dataclass
class Stack:
    """What a test works with. There is one backend, ``one``."""

    router: Router
    watcher: Watcher
    """Told of every request."""
    recorder: Recorder
    """Told of every state and line of the log."""
    supervisor: Supervisor
    warmth: Warmth
    http: httpx.AsyncClient
    sent: int = 0
    answers: list[httpx.Response] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """The engine's process."""
        pid = self.supervisor.status_of("one").pid
        assert pid is not None
        return pid

    @property
    def url(self) -> str:
        """The router's address."""
        return str(self.http.base_url).rstrip("/")

    async def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        """One request in one piece."""
        self.sent += 1
        body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": True, **fields}
        answer = await self.http.post("/completion", json=body)
        self.answers.append(answer)
        return answer

    async def ready(self, count: int) -> None:
        """Wait until the backend has become ready for the ``count``-th time."""
        await self.recorder.until_state("one", "ready", count)

    def reports(self) -> list[Report]:
        """Of all requests that were leased, in the order of their end."""
        return self.watcher.reports


class _Both(Warmth):
    """Keeps warm, and lets the test see log events as they come."""

    recorder: Recorder

    def watch(self, recorder: Recorder) -> None:
        """Tell the recorder as well."""
        tell = self.log_event

        def both(name: str, event: LogEvent) -> None:
            tell(name, event)
            recorder.log_event(name, event)

        self.log_event = both


@asynccontextmanager
async def stack(
    engine: Engine,
    model: Path,
    folder: Path,
    *,
    port: int = 0,
    warm_up: WarmUp | None = None,
    sections: Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    **settings: Any,
) -> AsyncIterator[Stack]:
    """A running stack of one backend that is ready; all of it has ended when this returns.

    ``settings`` are the backend's (and its pool's ``scheduling``), ``sections`` others of the configuration.
    """
    scheduling = settings.pop("scheduling", {"in_flight": "pair"})
    backend = {"name": "one", "model": str(model), "slots": 4, "context": 1024, "threads": 1}
    backend |= {"args": ["--no-warmup"], "slot_save_path": str(folder / "kv"), **settings}
    config = Config.model_validate(
        {
            "listen": {"port": 0},
            "limits": {"hold_timeout": PATIENCE, "ping_interval": 1},
            "pools": [{"name": "m", "scheduling": scheduling, "backends": [backend]}],
            **(sections or {}),
        }
    )
    watcher, recorder = Watcher(), Recorder()
    router = create_router(config, observers=[watcher, *filter(None, [warm_up]), *observers])
    server = uvicorn.Server(server_config(router.app, config))
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    state = StateFolder(folder / "state")
    state.acquire()
    launch = Launch(config.pools[0].backends[0], engine, port=port)
    supervisor: Supervisor | None = None

    def launch_of(name: str) -> Launch:
        assert supervisor is not None
        return supervisor.launch(name)

    warmth = _Both(router.dispatcher, launch_of, None if warm_up is None else warm_up.cold)
    warmth.watch(recorder)
    manners = Manners(QUICK, drain_timeout=PATIENCE, stop_timeout=PATIENCE)
    supervisor = Supervisor([launch], warmth, recorder, manners=manners, folder=state)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    async with AsyncExitStack() as ends:
        ends.callback(listening.close)
        ends.callback(state.release)
        ends.push_async_callback(asyncio.wait, {serving})
        ends.callback(setattr, server, "should_exit", True)
        await ends.enter_async_context(supervisor)
        http = await ends.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=5 * PATIENCE, trust_env=False)
        )
        if warm_up is not None:
            warming = asyncio.create_task(warm_up.run(url))
            ends.push_async_callback(asyncio.wait, {warming})
            ends.callback(warming.cancel)
        await recorder.until_state("one", "ready")
        yield Stack(router, watcher, recorder, supervisor, warmth, http)
