"""Client of one llama-server: health, slots and templates in small calls, and the way of one generation.

Every request gets a connection of its own (:mod:`.wire`): the engine closes a connection after streaming on
it though it announces ``Keep-Alive``, and closing it is how an engine learns that nobody waits any more.
Small calls do the same, as connecting costs less than a pool's bookkeeping (``python -m tests.bench.wire``).
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from .values import SlotObservation
from .wire import EngineBroke, EngineResponse, EngineUnreachable, Exchange, Target, request_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from .wire import HeaderPairs

__all__ = [
    "EngineBroke",
    "EngineClient",
    "EngineError",
    "EngineResponse",
    "EngineUnreachable",
    "Health",
    "Props",
]


CONNECT_TIMEOUT = 5.0
"""Seconds until a connection attempt is given up."""

CONTROL_TIMEOUT = 30.0
"""Seconds that a small call may take: templates of long prompts are rendered beside inference."""

_ABSENT = frozenset({403, 404, 405, 501})
"""Statuses by which an engine says that it has no such endpoint (``--no-slots``: 501)."""


class Health(StrEnum):
    """What ``/health`` says."""

    OK = "ok"
    LOADING = "loading"
    DOWN = "down"


class EngineError(Exception):
    """The engine answered a small call with an error status.

    ``body`` is its answer as it came. The message of this exception never holds it: it may quote a prompt.
    """

    def __init__(self, status: int, body: bytes, path: str) -> None:
        super().__init__(f"the engine answered {path} with status {status}")
        self.status, self.body, self.path = status, body, path


@dataclass(frozen=True, slots=True)
class _Answer:
    path: str
    status: int
    body: bytes

    def checked(self) -> bytes:
        if not HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES:
            raise EngineError(self.status, self.body, self.path)
        return self.body


@dataclass(frozen=True, slots=True)
class Props:
    """What ``/props`` tells of an engine; ``None`` where it did not say."""

    total_slots: int | None
    context: int | None
    """Tokens per slot."""
    model: str | None
    """The model's alias (its path where no alias was given)."""
    model_path: str | None
    modalities: frozenset[str]
    """Kinds of input beside text that the model takes, such as ``vision`` and ``audio``."""
    sleeping: bool | None = None


def _integer(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


class EngineClient:
    """Speaks to one llama-server at ``base_url``; knows nothing of what its slots should hold.

    ``api_key`` is sent as a bearer token in place of whatever the client sent. ``ca`` is a file of
    certificates (PEM) by which an ``https`` engine is trusted, in place of the system's. ``read_timeout``
    bounds the silence between two pieces of a generation (``None``: a long prefill may take minutes). All
    calls raise :class:`EngineUnreachable` or :class:`EngineBroke` when the engine does not answer as HTTP
    should.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        api_key: str | None = None,
        ca: str | None = None,
        connect_timeout: float = CONNECT_TIMEOUT,
        control_timeout: float = CONTROL_TIMEOUT,
        read_timeout: float | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"backend {name!r}: {base_url!r} is no http:// or https:// address")
        self.name = name
        self.base_url = base_url.rstrip("/")
        self._tls = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
        self.trouble = ""
        """Why the last :meth:`health` was not good; empty where it was."""
        self._target = Target(
            host=parts.hostname,
            port=parts.port or (443 if self._tls else 80),
            authority=parts.netloc.rpartition("@")[2].encode(
                "idna" if not parts.netloc.isascii() else "ascii"
            ),
            prefix=parts.path.rstrip("/").encode(),
        )
        self._authorization = f"Bearer {api_key}".encode() if api_key else None
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._control_timeout = control_timeout
        self._open: set[Exchange] = set()

    async def aclose(self) -> None:
        """Close every connection that is still open."""
        for exchange in list(self._open):
            exchange.close()

    # -- small calls ---------------------------------------------------------------------------------------

    async def health(self) -> Health:
        """Ask ``/health``. Never raises: an engine that cannot be asked is down."""
        try:
            answer = await self._call("GET", "/health")
        except EngineUnreachable as error:
            self.trouble = self._no_answer(error)
            return Health.DOWN
        except EngineBroke as error:
            self.trouble = f"/health: {error.reason}"
            return Health.DOWN
        if answer.status == HTTPStatus.OK:
            self.trouble = ""
            return Health.OK
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.trouble = "it loads its model"
            return Health.LOADING
        self.trouble = f"it answered /health with status {answer.status}"
        return Health.DOWN

    def _no_answer(self, error: EngineUnreachable) -> str:
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError):
            return f"no connection by TLS: {getattr(cause, 'verify_message', '') or cause.reason or 'no TLS'}"
        if error.sent:
            return f"{self.base_url} does not answer /health"
        reason = f"none within {self._connect_timeout:g} s"
        if isinstance(cause, socket.gaierror):
            reason = cause.strerror or "unknown host"
        elif isinstance(cause, OSError) and cause.errno:
            reason = os.strerror(cause.errno)
        return f"no connection to {self.base_url}: {reason}"

    async def props(self) -> Props:
        """Ask ``/props``; what is missing or of another type is ``None``. Raises :class:`EngineError`."""
        data = await self.get_json("/props")
        props = data if isinstance(data, Mapping) else {}
        settings = props.get("default_generation_settings")
        modalities = props.get("modalities")
        sleeping = props.get("is_sleeping")
        return Props(
            total_slots=_integer(props.get("total_slots")),
            context=_integer(settings.get("n_ctx")) if isinstance(settings, Mapping) else None,
            model=_text(props.get("model_alias")) or _text(props.get("model_path")),
            model_path=_text(props.get("model_path")),
            modalities=frozenset(k for k, v in modalities.items() if v is True)
            if isinstance(modalities, Mapping)
            else frozenset(),
            sleeping=sleeping if isinstance(sleeping, bool) else None,
        )

    async def slots(self) -> list[SlotObservation] | None:
        """Ask ``/slots``; ``None`` where the engine has no such endpoint or answers with something else.

        An engine that tells how much a slot holds says nothing of one that was not used since the model was
        loaded (also after it slept): that is empty.
        Not more often than every two seconds: polling delays the engine's notice of clients that left.
        """
        try:
            data = await self.get_json("/slots")
        except EngineError as error:
            if error.status in _ABSENT:
                return None
            raise
        if not isinstance(data, list):
            return None
        found = []
        tells = any(isinstance(element, Mapping) and "n_prompt_tokens" in element for element in data)
        for index, element in enumerate(data):
            if not isinstance(element, Mapping):
                continue
            number, task = _integer(element.get("id")), _integer(element.get("id_task"))
            processing = element.get("is_processing") is True
            unused = tells and task is None and not processing
            found.append(
                SlotObservation(
                    slot=index if number is None else number,
                    processing=processing,
                    task=task,
                    resident_tokens=_integer(element.get("n_prompt_tokens", 0 if unused else None)),
                )
            )
        return found

    async def apply_template(self, body: Mapping[str, Any] | bytes) -> str:
        """Render a chat body to the text that the engine would evaluate. Raises :class:`EngineError`."""
        data = await self.post_json("/apply-template", body)
        prompt = data.get("prompt") if isinstance(data, Mapping) else None
        if not isinstance(prompt, str):
            raise EngineBroke(self.name, "/apply-template answered without a prompt")
        return prompt

    async def metrics(self) -> str:
        """The engine's own metrics in Prometheus text format. Raises :class:`EngineError` where off."""
        return (await self._call("GET", "/metrics")).checked().decode("utf-8", "replace")

    async def get_json(self, path: str) -> Any:
        """``GET`` a small JSON document. Raises :class:`EngineError` unless the status is 2xx."""
        return self._json(await self._call("GET", path))

    async def post_json(self, path: str, body: Mapping[str, Any] | bytes) -> Any:
        """``POST`` JSON, get JSON. Raises :class:`EngineError` unless the status is 2xx."""
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return self._json(await self._call("POST", path, content))

    async def _call(self, method: str, path: str, content: bytes | None = None) -> _Answer:
        headers = [(b"Content-Type", b"application/json")] if content is not None else []
        try:
            async with (
                asyncio.timeout(self._control_timeout),
                self.open(method, path, headers, content) as response,
            ):
                return _Answer(path, response.status, await response.read())
        except TimeoutError:
            raise EngineUnreachable(self.name, sent=True) from None

    def _json(self, answer: _Answer) -> Any:
        try:
            return orjson.loads(answer.checked())
        except orjson.JSONDecodeError:
            reason = f"{answer.path} answered with something that is no JSON"
            raise EngineBroke(self.name, reason) from None

    # -- generations ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes | None = None
    ) -> AsyncIterator[EngineResponse]:
        """Send one request on a connection of its own; the answer's head has come when this enters.

        ``path`` may carry a query. Leaving the block closes the connection at once, whether or not the answer
        was complete; an engine takes that for a cancel. Raises :class:`EngineUnreachable` before the head,
        :class:`EngineBroke` (from ``chunks``) after it.
        """
        request = request_bytes(self._target, method, path, self._outgoing(headers), body)
        exchange = Exchange(self.name, head_only=method.upper() == "HEAD", read_timeout=self._read_timeout)
        self._open.add(exchange)
        try:
            await self._connect(exchange)
            exchange.send(request)
            yield await exchange.head()
        finally:
            exchange.close()
            self._open.discard(exchange)

    async def _connect(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                await loop.create_connection(
                    lambda: exchange, self._target.host, self._target.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise EngineUnreachable(self.name, sent=False) from error

    def _outgoing(self, headers: Iterable[tuple[bytes, bytes]]) -> HeaderPairs:
        if self._authorization is None:
            return list(headers)
        kept = [pair for pair in headers if pair[0].lower() not in {b"authorization", b"x-api-key"}]
        return [*kept, (b"Authorization", self._authorization)]
