"""Every other route: sent to a backend of the pool as it is, and its answer back as it is.

What may use a slot of the engine's own choice gets a lease for as long as it runs, so that no request of ours
meets it in the same slot. What uses none needs no lease.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import orjson

from . import errors
from .backend import EngineBroke, EngineError, EngineUnreachable
from .client import Client
from .generation import ATTEMPTS, Passage, name_of, priority
from .isolation import Visit
from .outbox import Outbox
from .prompt import without_mark
from .values import Outcome, Prompt, Request, Route, Status

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from .backend import EngineClient
    from .generation import Shop
    from .values import Lease

_ROUTES = {
    "/embedding": Route.EMBEDDINGS,
    "/embeddings": Route.EMBEDDINGS,
    "/v1/embeddings": Route.EMBEDDINGS,
    "/rerank": Route.RERANK,
    "/reranking": Route.RERANK,
    "/v1/rerank": Route.RERANK,
    "/v1/reranking": Route.RERANK,
}
"""Labels of the engine's routes that use a slot; all others are ``other``."""

_NO_SLOT = frozenset(
    {
        "/apply-template",
        "/chat/completions/input_tokens",
        "/detokenize",
        "/lora-adapters",
        "/props",
        "/responses/input_tokens",
        "/tokenize",
        "/v1/chat/completions/input_tokens",
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
    }
)
"""``POST`` routes that touch no slot."""

_KNOWN = frozenset({*_ROUTES, *_NO_SLOT})
"""What is passed where unknown routes are refused."""

_UNTRIED = frozenset({401, 403, 404, 405, 501})
"""Statuses with which an engine says that it does not do this at all. Of several inputs with one that it
refuses, the others may have been computed."""

_READING = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class _Work:
    """One request on its way."""

    client: Client
    passage: Passage
    raw: bytes


class Passthrough:
    """ASGI endpoint of all routes that have none of their own; ``unknown`` ones if so told."""

    def __init__(self, shop: Shop, *, unknown: bool = True) -> None:
        self._shop = shop
        self._unknown = unknown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        passage = Passage(_ROUTES.get(scope["path"], Route.OTHER))
        await self._shop.attend(Client(scope, receive, send), passage, self._serve)

    async def _serve(self, client: Client, passage: Passage) -> None:
        limits = self._shop.limits
        raw = await client.body(limits.max_body, limits.body_timeout)
        await client.unless_gone(self._answer(client, passage, raw))

    async def _answer(self, client: Client, passage: Passage, raw: bytes) -> None:
        scope = client.scope
        method, path = scope["method"], scope["path"]
        if not self._unknown and path not in _KNOWN:
            raise errors.unknown_route()
        if path.startswith("/slots/") and method not in _READING:
            raise errors.invalid("slots: the engine's own action is POST /slots/ID?action=save|restore|erase")
        asked = _object(raw).get("model")
        send = self._without_slot if method in _READING or path in _NO_SLOT else self._with_slot

        async def serve() -> None:
            for _ in range(ATTEMPTS):
                if await send(_Work(client, passage, raw)):
                    return
            raise errors.unavailable("no backend took the request")

        await self._shop.pools.serve(asked or _queried(scope, "model"), passage, serve)

    async def _without_slot(self, work: _Work) -> bool:
        engine = await self._shop.dispatcher.engine(work.passage.pool)
        work.passage.backend = engine.name
        try:
            await self._send(engine, work, None)
        except EngineUnreachable as error:
            self._shop.dispatcher.fleet.suspect(engine.name)
            if not error.sent:
                return False
            raise
        return True

    async def _with_slot(self, work: _Work) -> bool:
        dispatcher = self._shop.dispatcher
        lease = await dispatcher.acquire(
            Request(
                id=work.client.lease_id(),
                prompt=Prompt.of(b""),
                pool=work.passage.pool,
                route=work.passage.route,
                client=name_of(work.client),
                priority=priority(work.client),
                arrived=work.passage.began,
                pinned=False,
                keeps_prefix=False,
            )
        )
        work.passage.backend = lease.slot.backend
        try:
            engine = dispatcher.client(lease)
            dispatcher.sending(lease.request.id)
            visit = await self._keep_apart(engine, work, lease) if self._shop.isolate else None
            await self._send(engine, work, lease, visit)
        except EngineUnreachable as error:
            if not error.sent:
                dispatcher.unsent(lease.request.id)
                return False
            self._leave(lease, Status.ERROR)
            raise
        except EngineBroke:
            self._leave(lease, Status.ERROR)
            raise
        except BaseException:
            self._leave(lease, Status.CANCELLED)
            raise
        return True

    async def _keep_apart(self, engine: EngineClient, work: _Work, lease: Lease) -> Visit:
        """What follows may run in any slot. Embeddings and rerank compute all of it; others might reuse."""
        shop = self._shop
        visit = Visit(shop.tenants, shop.dispatcher, lease)
        if work.passage.route is Route.OTHER:
            await visit.empty(engine, shop.on_behalf(work.client), visit.strangers())
        return visit

    async def _is_untouched(
        self, engine: EngineClient, status: int, lease: Lease, visit: Visit | None
    ) -> bool:
        """Whether the slot of the lease is as it was before; if not, all of the engine's are looked at."""
        if visit is not None and status in _UNTRIED:
            visit.filled_only(())
        refused = 400 <= status < 500 or status == 501  # noqa: PLR2004 - status classes
        if refused and not (visit is not None and lease.slot.slot in visit.emptied):
            return True
        await self._look(engine)
        return False

    def _leave(self, lease: Lease, status: Status) -> None:
        """Unless it is finished, only the engine can say when it is over."""
        dispatcher = self._shop.dispatcher
        if lease.request.id in dispatcher.held():
            dispatcher.abandon(lease.request.id, Outcome(status))
            if status is Status.ERROR:
                dispatcher.fleet.suspect(lease.slot.backend)

    async def _look(self, engine: EngineClient) -> None:
        """Nothing is taken for known that the engine may have overwritten, until its ``/slots`` agrees.

        Nothing else runs now, so asking delays the notice of nobody's leaving.
        """
        dispatcher = self._shop.dispatcher
        slots = [view.ref.slot for view in dispatcher.slots() if view.ref.backend == engine.name]
        dispatcher.doubted(engine.name, slots)
        with contextlib.suppress(EngineBroke, EngineError, EngineUnreachable):
            dispatcher.observed(engine.name, await engine.slots() or [])

    async def _send(
        self, engine: EngineClient, work: _Work, lease: Lease | None, visit: Visit | None = None
    ) -> None:
        """Relay one exchange; a lease is finished when the answer's last byte has come."""
        shop, client = self._shop, work.client
        method = client.scope["method"]
        body = work.raw if work.raw or method not in _READING else None
        own = [(b"x-warmslot-backend", engine.name.encode())]
        if lease is not None:
            own.append((b"x-warmslot-decision", lease.decision.encode()))
        async with (
            Outbox(client) as outbox,
            engine.open(method, target(client.scope), shop.outgoing(client), body) as response,
        ):
            if lease is not None:
                shop.dispatcher.started(lease.request.id)
            kind = response.header(b"content-type") or b""
            streams = kind.startswith(b"text/event-stream")
            await client.start(response.status, [*response.headers, *own], streams=streams)
            if response.status >= 400:  # noqa: PLR2004 - status classes
                work.passage.status = Status.ERROR
            try:
                async for chunk in response.chunks():
                    if not outbox.put(chunk):
                        await outbox.room()
            except EngineBroke:
                if streams:
                    await outbox.flush(broken=True)
                raise
            if lease is not None:
                untouched = await self._is_untouched(engine, response.status, lease, visit)
                shop.dispatcher.finish(lease.request.id, Outcome(work.passage.status, untouched=untouched))
            await outbox.flush()
            await client.end()


def _queried(scope: Scope, name: str) -> str | None:
    found = parse_qs(scope["query_string"].decode("latin-1")).get(name)
    return found[0] if found else None


def target(scope: Scope) -> str:
    """The request's path and query as the client wrote them. Raises 400 where HTTP would not take them."""
    raw = scope.get("raw_path") or scope["path"].encode()
    query = scope["query_string"]
    whole = raw + (b"?" + query if query else b"")
    if any(byte <= 0x20 or byte >= 0x7F for byte in whole):  # noqa: PLR2004 - printable ASCII
        raise errors.invalid("path: holds a character that has to be percent-encoded")
    return str(whole, "ascii")


def _object(raw: bytes) -> dict[str, Any]:
    """The body if it is a JSON object, an empty one for any other: what it means is the engine's to say."""
    raw = without_mark(raw)
    if raw.lstrip()[:1] != b"{":
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}
