"""What clients are told when a request cannot be served: a status, and the body that their library expects.

Messages name what was wrong, where, and what is allowed. They never hold prompt text or keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable

JSON = (b"content-type", b"application/json; charset=utf-8")


_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's names of what a status means."""


@dataclass
class RequestError(Exception):
    """A request that ends with an error of ours. ``kind`` is OpenAI's ``error.type``."""

    status: int
    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """The JSON body, in the shape that OpenAI's clients parse."""
        return orjson.dumps({"error": self.fields()})

    def event(self) -> bytes:
        """The same as one server-sent event, for a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"

    def anthropic_body(self) -> bytes:
        """The JSON body in the shape that Anthropic's clients parse."""
        kind = _ANTHROPIC.get(self.status, "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message}})

    def anthropic_event(self) -> bytes:
        """That as one server-sent event."""
        return b"event: error\ndata: " + self.anthropic_body() + b"\n\n"

    def fields(self) -> dict[str, str | None]:
        """The ``error`` object."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of an answer made of this error alone (without its length)."""
        out = [JSON]
        if self.retry_after is not None:
            out.append((b"retry-after", str(max(1, round(self.retry_after))).encode()))
        if self.status in {408, 413, 431}:
            out.append((b"connection", b"close"))
        if self.status == 415:  # noqa: PLR2004 - RFC 9110, 15.5.16
            out.append((b"accept-encoding", b"identity"))
        return out


def invalid(message: str, *, param: str | None = None) -> RequestError:
    """The request itself is wrong (400)."""
    return RequestError(400, "invalid_request_error", message, param=param)


def too_large(limit: int) -> RequestError:
    """The body is larger than the limit (413)."""
    return RequestError(
        413,
        "invalid_request_error",
        f"request body: more than {limit} bytes, allowed: at most {limit} (setting limits.max_body)",
        code="request_too_large",
    )


def encoded() -> RequestError:
    """The body is compressed (415): the router has to read it, and engines take none that is."""
    return RequestError(
        415,
        "invalid_request_error",
        "request body: Content-Encoding is not supported, allowed: identity (send the body uncompressed)",
        code="unsupported_encoding",
    )


def too_slow(seconds: float) -> RequestError:
    """The body did not arrive in time (408)."""
    return RequestError(
        408,
        "invalid_request_error",
        f"request body: not complete after {seconds:g} s (setting limits.body_timeout)",
        code="request_timeout",
    )


def head_too_slow(seconds: float) -> RequestError:
    """Request line and headers did not arrive in time (408)."""
    return RequestError(
        408,
        "invalid_request_error",
        f"request headers: not complete after {seconds:g} s (setting limits.header_timeout)",
        code="request_timeout",
    )


def head_too_large(limit: int) -> RequestError:
    """Request line and headers are too long (431)."""
    return RequestError(
        431,
        "invalid_request_error",
        f"request headers: more than {limit} bytes",
        code="headers_too_large",
    )


def bad_key() -> RequestError:
    """No key, or one that is not ours (401)."""
    return RequestError(
        401,
        "invalid_request_error",
        "missing or unknown API key: send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        code="invalid_api_key",
    )


def unknown_model(names: Iterable[str]) -> RequestError:
    """The body names a model that no pool serves (404). The name itself is not echoed."""
    return RequestError(
        404,
        "invalid_request_error",
        f"model: not served here, allowed: {', '.join(names)}",
        code="model_not_found",
        param="model",
    )


def unknown_backend(names: Iterable[str]) -> RequestError:
    """The path or the query names a backend that is not there (404). The name itself is not echoed."""
    return RequestError(
        404,
        "invalid_request_error",
        f"backend: not known, allowed: {', '.join(names)}",
        code="backend_not_found",
        param="backend",
    )


def unknown_route() -> RequestError:
    """A route that the router does not know, where such are refused (404)."""
    return RequestError(
        404,
        "invalid_request_error",
        "route: not known here, and unknown ones are refused (setting endpoint.unknown_routes)",
        code="not_found",
    )


def queue_full(limit: int, retry_after: float) -> RequestError:
    """The pool's queue is at its limit (429)."""
    return RequestError(
        429,
        "rate_limit_error",
        f"{limit} requests are waiting already (setting scheduling.max_queue); try again later",
        code="queue_full",
        retry_after=retry_after,
    )


def key_full(in_flight: int, queued: int) -> RequestError:
    """The key has as many requests as it may have (429)."""
    return RequestError(
        429,
        "rate_limit_error",
        f"this key has {in_flight} requests in flight and {queued} waiting, which is all that it may have "
        "(settings keys.in_flight and keys.queued); try again later",
        code="key_limit",
        retry_after=5.0,
    )


def forbidden(what: str) -> RequestError:
    """A key that is good for something else (403)."""
    return RequestError(403, "permission_error", f"this key is not for {what}", code="key_scope")


def unavailable(message: str, *, retry_after: float | None = 5.0) -> RequestError:
    """Nothing can serve it now (503)."""
    return RequestError(503, "unavailable_error", message, code="unavailable", retry_after=retry_after)


def engine_failed(message: str) -> RequestError:
    """The engine broke while it worked on the request (502)."""
    return RequestError(502, "server_error", message, code="engine_failed")


def expired(seconds: float) -> RequestError:
    """The request took longer than its bound (504)."""
    return RequestError(
        504,
        "timeout_error",
        f"request: not finished after {seconds:g} s (setting limits.request_timeout)",
        code="timeout",
    )


def internal() -> RequestError:
    """A mistake of ours (500); the log says more."""
    return RequestError(
        500, "server_error", "internal error of the router; its log says more", code="internal"
    )
