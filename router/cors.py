"""Web pages that may use the router from a browser (CORS): of origins that the configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

from .client import request_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.datastructures import Headers
    from starlette.responses import Response
    from starlette.types import ASGIApp

_SHOWN = (
    "Retry-After",
    "X-Request-Id",
    "X-Warmslot-Backend",
    "X-Warmslot-Decision",
    "X-Warmslot-Predicted-Tokens",
    "X-Warmslot-Slot",
)
"""What a script may read of an answer's headers, beside the few that it always may."""


class Cors(CORSMiddleware):
    """ASGI wrapper around all else: every answer to a page of one of ``origins`` says that it may be read.

    A browser asks beforehand (preflight) and is answered here: it can send no key, and no engine has a say.
    Any method and header may be sent. Cookies may not: there are none.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("*",),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=_SHOWN,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a preflight, with its id as any answer has it."""
        response = super().preflight_response(request_headers)
        given = request_headers.get("x-request-id", "").encode("latin-1")
        response.headers["x-request-id"] = request_id(given).decode("ascii")
        return response
