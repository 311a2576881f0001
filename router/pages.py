"""What the router answers itself: models, health, metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson

from . import errors
from .backend import EngineBroke, EngineError, EngineUnreachable
from .backends import StoppingError
from .client import Client

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from .backends import Backend
    from .dispatcher import Dispatcher
    from .generation import Shop

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class Page:
    """Base of the pages: one answer in one piece, errors OpenAI-shaped."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        client = Client(scope, receive, send)
        try:
            status, body, kind = await self.content(scope)
        except errors.RequestError as error:
            await client.refuse(error)
        else:
            await client.answer(status, body, [kind])

    async def content(self, scope: Scope) -> tuple[int, bytes, tuple[bytes, bytes]]:
        """Status, body and content type."""
        raise NotImplementedError


def backend_named(dispatcher: Dispatcher, name: str) -> Backend:
    """A backend by the name in a path or a query. Raises 404 that lists those that exist."""
    found = dispatcher.fleet.backend(name)
    if found is None:
        raise errors.unknown_backend(
            one.name for backends in dispatcher.fleet.pools.values() for one in backends
        )
    return found


class Models(Page):
    """``GET /v1/models``."""

    async def content(self, scope: Scope) -> tuple[int, bytes, tuple[bytes, bytes]]:  # noqa: ARG002
        """Every pool."""
        return 200, orjson.dumps(self._shop.pools.listing()), errors.JSON


class Healthy(Page):
    """``GET /health``: 200 while any backend is up, in the engine's own words; 503 while the router stops."""

    async def content(self, scope: Scope) -> tuple[int, bytes, tuple[bytes, bytes]]:  # noqa: ARG002
        """Whether requests can be served."""
        if self._shop.dispatcher.stopping:
            raise errors.unavailable(str(StoppingError()))
        if any(backend.up for backends in self._shop.dispatcher.fleet.pools.values() for backend in backends):
            return 200, b'{"status":"ok"}', errors.JSON
        raise errors.unavailable("no backend is up")


class OwnMetrics(Page):
    """``GET /metrics``, written in a thread: thousands of lines would hold up every stream."""

    async def content(self, scope: Scope) -> tuple[int, bytes, tuple[bytes, bytes]]:  # noqa: ARG002
        """The router's metrics in Prometheus text format."""
        metrics = self._shop.metrics
        metrics.refresh(self._shop.dispatcher)
        return 200, await asyncio.to_thread(metrics.text), _TEXT


class EngineMetrics(Page):
    """``GET /backends/{name}/metrics``: an engine's own metrics."""

    async def content(self, scope: Scope) -> tuple[int, bytes, tuple[bytes, bytes]]:
        """The engine's text as it came."""
        name = scope["path_params"]["name"]
        backend = backend_named(self._shop.dispatcher, name)
        if backend.client is None or not backend.up:
            raise errors.unavailable(f"backend {name!r} is not up")
        try:
            return 200, (await backend.client.metrics()).encode(), _TEXT
        except EngineError as error:
            raise errors.RequestError(
                error.status, "server_error", f"backend {name!r} serves no metrics", code="engine_failed"
            ) from error
        except (EngineUnreachable, EngineBroke) as error:
            raise errors.engine_failed(str(error)) from error
