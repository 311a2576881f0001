"""Who may come in: bearer keys, compared in constant time, and the name that metrics know a client by."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from . import errors
from .client import Client

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

CLIENT = "warmslot.client"
"""Key of the ASGI scope that holds the client's name."""

ANYONE = "other"
"""The name of a client without a key of its own."""

OPEN_PATHS = frozenset({"/health", "/v1/health", "/ui"})
"""Served without a key: load balancers ask for health; the live page holds no data before it has a key."""


ADMIN_PATHS = ("/metrics", "/backends/", "/slots", "/ui")
"""Where these begin a path, it tells of all clients or acts on all."""

ADMIN_POSTS = frozenset({"/lora-adapters"})
"""Where a ``POST`` acts on all clients, though to read is harmless."""


class KeyCheck:
    """ASGI wrapper that answers 401 unless the request carries one of ``keys`` (name -> secret).

    Without keys everyone may come in. ``uses`` narrows keys to ``requests`` or ``admin`` paths.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, str], uses: Mapping[str, str] | None = None) -> None:
        self._app = app
        self._uses = uses or {}
        self._keys = [(name, secret.encode()) for name, secret in keys.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it pass or refuse it."""
        if scope["type"] == "http":
            name = self._name(scope["headers"]) if self._keys else ANYONE
            if name is None and scope["path"] not in OPEN_PATHS:
                await Client(scope, receive, send).refuse(errors.bad_key())
                return
            use = self._uses.get(name or "", "all")
            path = scope["path"]
            admin = path.startswith(ADMIN_PATHS) or (scope["method"] == "POST" and path in ADMIN_POSTS)
            if name is not None and use != "all" and admin is (use == "requests"):
                what = "metrics, slots, adapters and the live page" if admin else "requests to models"
                await Client(scope, receive, send).refuse(errors.forbidden(what))
                return
            scope[CLIENT] = name or ANYONE
        await self._app(scope, receive, send)

    def _name(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        given = b""
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
                break
            if name == b"x-api-key":
                given = value.strip()
        found = None
        for client, secret in self._keys:
            if hmac.compare_digest(given, secret):
                found = client
        return found
