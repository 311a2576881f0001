"""The router as an ASGI application: its routes, and how its parts are put together."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route as Path

from .adapters import ScaleKeeper
from .auth import KeyCheck
from .backend import EngineClient
from .connection import connection
from .core import CoreSettings, RouterCore
from .cors import Cors
from .dispatcher import Dispatcher
from .front import Front
from .generation import Generation, Shop
from .isolation import Tenants
from .journal import Journal
from .live import Live
from .metrics import Metrics
from .pages import EngineMetrics, Healthy, Models, OwnMetrics
from .passthrough import Passthrough
from .pool_pages import Adapters, Props
from .pools import Pools
from .quota import Quota
from .settling import Timing
from .slots_page import SlotAction, Slots
from .steering import Steered
from .ui import Feed, LiveEvents, LivePage, SwitchedOff
from .values import Route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from starlette.types import ASGIApp

    from .advice import Advised
    from .config import Backend, Config, Scheduling
    from .observer import Observer

GENERATING = {
    "/v1/chat/completions": Route.CHAT,
    "/chat/completions": Route.CHAT,
    "/v1/completions": Route.COMPLETIONS,
    "/completion": Route.COMPLETION,
    "/completions": Route.COMPLETION,
    "/infill": Route.INFILL,
    "/v1/responses": Route.RESPONSES,
    "/responses": Route.RESPONSES,
}
"""The routes whose requests are sent to a slot of the router's choice."""

STEERED = {"/v1/messages": Route.MESSAGES}
"""Generating routes whose requests the engine places itself, and how they land where they should."""


START_ONLY = (
    *("listen", "journal", "advice", "state", "ui", "load_at_once"),
    "limits.header_timeout",  # of connections, which outlast a reload
    "endpoint.isolation",  # what slots hold came in without it
)
"""Sections and settings of a configuration that are read at a start and never again."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """What requests of one application share with those of the next."""

    pools: Pools
    quota: Quota
    scales: ScaleKeeper
    tenants: Tenants = field(default_factory=Tenants)


@dataclass(frozen=True, slots=True)
class Router:
    """One router: the application to serve, and what a launcher tells of its backends."""

    app: Front
    dispatcher: Dispatcher
    metrics: Metrics
    connector: Connector
    lasting: Lasting
    journal: Journal | None = None
    live: Live | None = None
    advised: dict[str, Advised] = field(default_factory=dict)
    """What an advisor found last, by backend."""

    def reconfigure(self, config: Config) -> None:
        """Serve by another configuration from now on; what only a start reads is not looked at.

        Pools and backends that it has more are there when this returns: those that are launched are down
        until they are reported, those that run elsewhere are watched. Those that it lacks stay until they are
        removed (:meth:`remove_backend`, :meth:`remove_pool`).
        """
        dispatcher = self.dispatcher
        self.connector.learn(config)
        self.lasting.quota.renew(config.keys)
        dispatcher.hold_for(config.limits.hold_timeout)
        for pool in config.pools:
            if pool.name in dispatcher.fleet.pools:
                dispatcher.reschedule(pool.name, core_settings(pool.scheduling))
            else:
                dispatcher.add_pool(pool.name, core_settings(pool.scheduling))
            for backend in pool.backends:
                if dispatcher.fleet.backend(backend.name) is None:
                    dispatcher.fleet.add_backend(backend.name, pool.name)
                    self._tell(config)
                    if backend.kv_unified:
                        dispatcher.fleet.shares_context(backend.name)
                    if backend.url is not None:
                        dispatcher.fleet.watch_remote(backend.name, backend.url)
        self.lasting.pools.renew(config)
        self._tell(config)
        self.app.serving = create_app(
            config, dispatcher, self.metrics, self.journal, self.live, lasting=self.lasting
        )

    def advise(self, advised: Mapping[str, Advised]) -> None:
        """Say from now on what an advisor found, by backend; of others what was said of them stays.

        What it found of backends that were removed meanwhile is dropped.
        """
        fleet = self.dispatcher.fleet
        known = {name: one for name, one in advised.items() if fleet.backend(name) is not None}
        self.advised.update(known)
        self.metrics.advise(known)
        if self.live is not None:
            self.live.advise(known)

    async def remove_backend(self, name: str) -> None:
        """Forget a backend; see :meth:`.fleet.Fleet.remove_backend`."""
        await self.dispatcher.fleet.remove_backend(name)
        self.connector.forget(name)
        self.advised.pop(name, None)
        self._tell()

    async def remove_pool(self, name: str) -> None:
        """Forget a pool; see :meth:`.dispatcher.Dispatcher.remove_pool`."""
        await self.dispatcher.remove_pool(name)
        self._tell()

    def _tell(self, config: Config | None = None) -> None:
        """Have metrics, journal and live page know the pools and backends that there are now."""
        pools = _names(self.dispatcher)
        self.metrics.follow(pools)
        if config is not None:
            self.metrics.admit(key.name for key in config.keys)
        if self.journal is not None:
            self.journal.follow(pools)
        if self.live is not None:
            self.live.follow(pools)


def _names(dispatcher: Dispatcher) -> dict[str, list[str]]:
    return {pool: [backend.name for backend in backends] for pool, backends in dispatcher.fleet.pools.items()}


def create_app(
    config: Config,
    dispatcher: Dispatcher,
    metrics: Metrics,
    journal: Journal | None = None,
    live: Live | None = None,
    *,
    lasting: Lasting | None = None,
) -> Starlette:
    """The application over a dispatcher that somebody else starts and stops.

    Its lifespan watches backends that run elsewhere (``url``), and closes the dispatcher and the journal at
    the end.
    """
    keys = {key.name: key.value.get_secret_value() for key in config.keys if key.value is not None}
    lasting = lasting or Lasting(Pools(config, dispatcher), Quota(config.keys), ScaleKeeper(dispatcher))
    shop = Shop(
        dispatcher,
        lasting.pools,
        config.limits,
        metrics,
        keyed=bool(keys),
        journal=journal,
        isolate=config.endpoint.isolation,
        honours_slot=config.endpoint.client_slots,
        quota=lasting.quota,
        tenants=lasting.tenants,
    )
    routes = [
        *(Path(path, Generation(shop, route), methods=["POST"]) for path, route in GENERATING.items()),
        *(Path(path, Steered(shop, route), methods=["POST"]) for path, route in STEERED.items()),
        Path("/v1/models", Models(shop), methods=["GET"]),
        Path("/models", Models(shop), methods=["GET"]),
        Path("/health", Healthy(shop), methods=["GET"]),
        Path("/v1/health", Healthy(shop), methods=["GET"]),
        Path("/metrics", OwnMetrics(shop), methods=["GET"]),
        Path("/backends/{name}/metrics", EngineMetrics(shop), methods=["GET"]),
        *_live_page(dispatcher, live),
        Path("/props", Props(shop), methods=["GET"]),
        Path("/lora-adapters", Adapters(shop, lasting.scales), methods=["POST"]),
        Path("/slots", Slots(shop), methods=["GET"]),
        Path("/slots/{slot}", SlotAction(shop, allowed=config.endpoint.slot_actions), methods=["POST"]),
        Path("/{path:path}", Passthrough(shop, unknown=config.endpoint.unknown_routes == "pass")),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        for pool in config.pools:
            for backend in pool.backends:
                if backend.url is not None:
                    dispatcher.fleet.watch_remote(backend.name, backend.url)
        try:
            yield
        finally:
            await dispatcher.aclose()
            if journal is not None:
                await asyncio.to_thread(journal.close)

    inward = [Middleware(KeyCheck, keys=keys, uses={key.name: key.use for key in config.keys})]
    if config.endpoint.cors_origins:
        inward.insert(0, Middleware(Cors, origins=config.endpoint.cors_origins))
    return Starlette(routes=routes, lifespan=lifespan, middleware=inward)


def _live_page(dispatcher: Dispatcher, live: Live | None) -> list[Path]:
    if live is None:
        return [Path(path, SwitchedOff()) for path in ("/ui", "/ui/events")]
    feed = Feed(lambda: live.snapshot(dispatcher), over=lambda: dispatcher.stopping)
    # With every method, so that none of them reaches an engine by a path that needs no key.
    return [Path("/ui", LivePage()), Path("/ui/events", LiveEvents(feed))]


def create_router(
    config: Config, *, observers: Sequence[Observer] = (), timing: Timing | None = None
) -> Router:
    """A router for a configuration.

    It serves once its application runs; launched backends are reported to its dispatcher. The journal, where
    one is configured, is open already. Raises :class:`~.journal.JournalError` where it cannot be.
    """
    pools = {pool.name: [backend.name for backend in pool.backends] for pool in config.pools}
    launched = [backend for pool in config.pools for backend in pool.backends if backend.url is None]
    metrics = Metrics(
        pools,
        slots={backend.name: backend.slots for backend in launched},
        clients=[key.name for key in config.keys],
    )
    journal = None if config.journal.path is None else Journal(config.journal, pools)
    if journal is not None:
        journal.open()
        metrics.watch(journal)
    live = Live(pools) if config.ui else None
    core = RouterCore({pool.name: core_settings(pool.scheduling) for pool in config.pools})
    connector = Connector(config)
    timing = timing or Timing(hold=config.limits.hold_timeout)
    dispatcher = Dispatcher(
        core,
        pools,
        observers=[metrics, *(one for one in (journal, live) if one is not None), *observers],
        timing=timing,
        connect=connector,
    )
    for name in (one.name for pool in config.pools for one in pool.backends if one.kv_unified):
        dispatcher.fleet.shares_context(name)
    keeper = ScaleKeeper(dispatcher, pause=timing.health)
    lasting = Lasting(Pools(config, dispatcher), Quota(config.keys), keeper)
    app = Front(create_app(config, dispatcher, metrics, journal, live, lasting=lasting))
    return Router(app, dispatcher, metrics, connector, lasting, journal, live)


class Connector:
    """Makes clients of backends, with what each needs to be let in."""

    def __init__(self, config: Config) -> None:
        self._backends: dict[str, Backend] = {}
        self.learn(config)

    def learn(self, config: Config) -> None:
        """What is needed for backends that are new; for others it stays as it is until they are removed."""
        new = {backend.name: backend for pool in config.pools for backend in pool.backends}
        self._backends = new | self._backends

    def forget(self, name: str) -> None:
        """A backend was removed."""
        self._backends.pop(name, None)

    def __call__(self, name: str, url: str) -> EngineClient:
        """A client of one backend; KeyError for an unknown one."""
        backend = self._backends[name]
        key = None if backend.api_key is None else backend.api_key.get_secret_value()
        return EngineClient(name, url, api_key=key, ca=backend.tls_ca)


def core_settings(scheduling: Scheduling) -> CoreSettings:
    """A pool's policy as the core takes it: ``auto`` becomes ``None``."""
    return CoreSettings(
        in_flight=scheduling.in_flight,
        queue=scheduling.queue,
        max_wait=None if scheduling.max_wait == "auto" else scheduling.max_wait,
        linger=None if scheduling.linger == "auto" else scheduling.linger,
        max_queue=scheduling.max_queue,
    )


def server_config(app: ASGIApp, config: Config) -> uvicorn.Config:
    """How uvicorn serves the application: no log line per request, no headers beside those of the engine."""
    return uvicorn.Config(
        app,
        host=config.listen.host,
        port=config.listen.port,
        http=connection(config.limits.header_timeout),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(config.limits.drain_timeout)),
    )
