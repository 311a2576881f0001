"""``/slots``: the slots of all backends as their engines show them, and actions on one of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import orjson

from . import errors
from .backend import EngineBroke, EngineError, EngineUnreachable
from .client import Client
from .generation import Passage
from .pages import Page, backend_named
from .values import Route, SlotObservation, Status

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from .backends import Backend
    from .generation import Shop

_FRESH = 2.0
"""Seconds for which an engine's answer is kept: asked more often, it notices late that clients have left."""

_ACTIONS = ("save", "restore", "erase")


class Slots(Page):
    """``GET /slots``: every backend's own list, each element with the names of its backend and pool."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(shop)
        self._kept: dict[str, tuple[float, list[Any]]] = {}

    async def content(self, scope: Scope) -> tuple[int, bytes, tuple[bytes, bytes]]:
        """The slots of all backends that are up, or of the ``backend`` that the query names. Raises 404."""
        wanted = parse_qs(scope["query_string"].decode("latin-1")).get("backend", [])
        for name in wanted:
            backend_named(self._shop.dispatcher, name)
        found: list[Any] = []
        refusal: EngineError | None = None
        for pool, backends in self._shop.dispatcher.fleet.pools.items():
            for backend in backends:
                if not backend.usable or (wanted and backend.name not in wanted):
                    continue
                try:
                    slots = await self._of(backend)
                except EngineError as error:
                    refusal = error
                except (EngineUnreachable, EngineBroke):
                    self._shop.dispatcher.fleet.suspect(backend.name)
                else:
                    found += [{"backend": backend.name, "pool": pool, **slot} for slot in slots]
        if not found and refusal is not None:
            return refusal.status, refusal.body, errors.JSON
        return 200, orjson.dumps(found), errors.JSON

    async def _of(self, backend: Backend) -> list[Any]:
        at, slots = self._kept.get(backend.name, (0.0, []))
        if backend.client is not None and time.monotonic() - at > _FRESH:
            data = await backend.client.get_json("/slots")
            slots = [slot for slot in data if isinstance(slot, dict)] if isinstance(data, list) else []
            self._kept[backend.name] = (time.monotonic(), slots)
        return slots


class SlotAction:
    """``POST /slots/{id}?action=…``: done while nothing else runs on the backend; the picture follows.

    The query may name a ``backend``; the first one of the default pool is meant without it.
    """

    def __init__(self, shop: Shop, *, allowed: bool) -> None:
        self._shop = shop
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._shop.attend(Client(scope, receive, send), Passage(Route.OTHER), self._serve)

    async def _serve(self, client: Client, passage: Passage) -> None:
        limits = self._shop.limits
        raw = await client.body(limits.max_body, limits.body_timeout)
        if not self._allowed:
            raise errors.RequestError(
                403,
                "permission_error",
                "slots: actions from clients are switched off, they would change what slots hold "
                "(setting endpoint.slot_actions)",
                code="slot_actions_off",
            )
        await client.unless_gone(self._act(client, passage, raw))

    async def _act(self, client: Client, passage: Passage, raw: bytes) -> None:
        query = parse_qs(client.scope["query_string"].decode("latin-1"))
        backend = self._backend(query)
        passage.pool, passage.backend = backend.pool, backend.name
        given, action = client.scope["path_params"]["slot"], query.get("action", [""])[0]
        if not given.isdecimal() or int(given) >= backend.slots:
            raise errors.invalid(f"slot: not there, allowed: 0 to {backend.slots - 1}")
        if action not in _ACTIONS:
            raise errors.invalid(f"action: not known, allowed: {', '.join(_ACTIONS)}")
        slot = int(given)
        dispatcher = self._shop.dispatcher
        async with dispatcher.fleet.alone(backend.name) as engine:
            # Whatever becomes of it: until the engine has answered, nobody knows what the slot holds.
            if action != "save":
                dispatcher.doubted(backend.name, [slot])
                if backend.life is not None:
                    self._shop.tenants.doubt(backend.life, [slot])
            headers = self._shop.outgoing(client)
            async with engine.open("POST", f"/slots/{slot}?action={action}", headers, raw) as response:
                body = await response.read()
                if response.status >= 400:  # noqa: PLR2004 - status classes
                    passage.status = Status.ERROR
                elif action == "erase":
                    empty = SlotObservation(slot, processing=False, resident_tokens=0)
                    dispatcher.observed(backend.name, [empty])
                own = [(b"x-warmslot-backend", backend.name.encode())]
                kind = (b"content-type", response.header(b"content-type") or errors.JSON[1])
        await client.answer(response.status, body, [kind, *own])

    def _backend(self, query: dict[str, list[str]]) -> Backend:
        dispatcher = self._shop.dispatcher
        named = query.get("backend")
        if named is not None:
            return backend_named(dispatcher, named[0])
        pool = self._shop.pools.of_model(query.get("model", [None])[0])
        for backend in dispatcher.fleet.pools[pool]:
            return backend
        raise errors.unavailable(f"pool {pool!r} has no backend at the moment")
