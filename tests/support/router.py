"""A router on a port of its own in front of engines, real or fake, and an observer to wait on."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import uvicorn
from warmslot.router.app import Router, create_router, server_config
from warmslot.router.config import Config
from warmslot.router.settling import Timing

from tests.fakes.llama_server import FakeLlamaServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from warmslot.router.observer import Observer
    from warmslot.router.values import Lease, Outcome, Report

QUICK = Timing(first_check=0.02, recheck=0.02, blind=0.05, health=0.02, hold=5.0)
"""A dispatcher without patience: these tests wait for events, never for these times."""


@dataclass
class Watcher:
    """An observer that tests can wait on."""

    granted_leases: list[Lease] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    changes: list[tuple[str, bool]] = field(default_factory=list)
    level: dict[str, int] = field(default_factory=dict)
    _waiting: list[tuple[Callable[[Watcher], object], asyncio.Future[None]]] = field(default_factory=list)

    def demanded(self, pool: str, by: int, now: float) -> None:
        del now
        self.level[pool] = self.level.get(pool, 0) + by
        self._look()

    def granted(self, lease: Lease, decision_seconds: float) -> None:
        del decision_seconds
        self.granted_leases.append(lease)
        self._look()

    def decoding(self, lease: Lease, now: float) -> None:
        pass

    def finished(self, lease: Lease, report: Report, outcome: Outcome, now: float) -> None:
        del lease, now
        self.reports.append(report)
        self.outcomes.append(outcome)
        self._look()

    def backend_changed(self, backend: str, *, up: bool, slots: int, context: int, reason: str) -> None:
        del slots, context, reason
        self.changes.append((backend, up))
        self._look()

    def engine_selected(self, backend: str, by: str) -> None:
        pass

    async def until(self, predicate: Callable[[Watcher], object]) -> None:
        """Return once ``predicate(self)`` holds."""
        if predicate(self):
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((predicate, future))
        await future

    def _look(self) -> None:
        for predicate, future in self._waiting:
            if not future.done() and predicate(self):
                future.set_result(None)


class EngineAddress(Protocol):
    """An engine that runs."""

    @property
    def base_url(self) -> str:
        """Where it serves."""

    @property
    def n_slots(self) -> int:
        """Its slots."""

    @property
    def context(self) -> int:
        """Tokens per slot."""


@dataclass
class Service:
    """A running router."""

    router: Router
    watcher: Watcher
    engines: Sequence[EngineAddress]
    url: str
    http: httpx.AsyncClient

    @property
    def fake(self) -> FakeLlamaServer:
        """The first engine, which is a fake."""
        fake = self.engines[0]
        assert isinstance(fake, FakeLlamaServer)
        return fake

    async def chat(self, text: str, **more: Any) -> httpx.Response:
        """One chat request in one piece."""
        return await self.http.post("/v1/chat/completions", json=chat(text, **more))

    async def metric(self, name: str, **labels: str) -> float:
        """A sample of the router's ``/metrics``; 0 where it does not exist."""
        return sample((await self.http.get("/metrics")).text, name, **labels)


def chat(text: str, **more: Any) -> dict[str, Any]:
    """A chat body."""
    return {"messages": [{"role": "user", "content": text}], **more}


def sample(text: str, name: str, **labels: str) -> float:
    """One sample of an exposition, summed over the labels that are not given."""
    total = 0.0
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        found, _, rest = head.partition("{")
        if found == name and all(f'{label}="{wanted}"' in rest for label, wanted in labels.items()):
            total += float(value)
    return total


def text_of(answer: str) -> str:
    """The generated text of an answer of any generating route, streamed or whole."""
    out = []
    for line in answer.split("\n"):
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            continue
        event = json.loads(data)
        out.append(event.get("content") or "")
        for choice in event.get("choices", ()):
            part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            out.append(part.get("content") or "")
    return "".join(out)


def config_for(count: int, **more: Any) -> Config:
    """A configuration with backends ``b0``, ``b1`` … that nobody launches."""
    scheduling = more.pop("scheduling", {"in_flight": "slots", "queue": "fifo"})
    backends = [{"name": f"b{number}", "model": "demo"} for number in range(count)]
    pool = {"name": "m", "aliases": ["alias"], "scheduling": scheduling, "backends": backends}
    pool |= more.pop("pool", {})
    limits = {"drain_timeout": 1, **more.pop("limits", {})}
    return Config.model_validate({"pools": [pool], "listen": {"port": 0}, "limits": limits, **more})


@asynccontextmanager
async def serving(
    engines: Sequence[EngineAddress],
    *,
    ready: bool = True,
    fresh: bool = True,
    timing: Timing = QUICK,
    observers: Sequence[Observer] = (),
    **more: Any,
) -> AsyncIterator[Service]:
    """A router on its own port in front of ``engines``; ``more`` are settings of its configuration.

    ``ready``: it is told of them as their launcher would, ``fresh``: with empty slots.
    """
    watcher = Watcher()
    config = config_for(len(engines), **more)
    router = create_router(config, observers=[watcher, *observers], timing=timing)
    server = uvicorn.Server(server_config(router.app, config))
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        if ready:
            for number, engine in enumerate(engines):
                await router.dispatcher.fleet.backend_ready(
                    f"b{number}", engine.base_url, engine.n_slots, engine.context, fresh=fresh
                )
        async with httpx.AsyncClient(base_url=url, timeout=100, trust_env=False) as http:
            yield Service(router, watcher, engines, url, http)
    finally:
        server.should_exit = True
        await task
