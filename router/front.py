"""The application that serves now, exchanged in one step where the configuration is read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import Receive, Scope, Send


class Front:
    """ASGI application in front of another: every request is served to its end by the one that it came to."""

    def __init__(self, serving: Starlette) -> None:
        self.serving = serving
        """The first one's lifespan is that of all: later ones have nothing of their own to start or end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""
        await self.serving(scope, receive, send)
