"""What concerns all backends of a pool: ``GET /props`` adds them up, ``POST /lora-adapters`` tells all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import orjson

from . import errors
from .adapters import Scales, clear
from .backend import CONTROL_TIMEOUT, EngineBroke, EngineUnreachable
from .backends import NoBackendError
from .client import Client
from .generation import ATTEMPTS, Passage, without_length
from .pages import backend_named
from .passthrough import target
from .values import Loss, Route, Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from .adapters import ScaleKeeper
    from .backend import EngineClient
    from .backends import Backend
    from .client import Headers
    from .errors import RequestError
    from .generation import Shop

_Failure = EngineUnreachable | EngineBroke | NoBackendError


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one backend said, whole."""

    backend: str
    status: int
    headers: Headers
    body: bytes

    @property
    def fine(self) -> bool:
        """Whether it did what was asked."""
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES


class _PoolPage:
    """Base: sends a request as it is to the backends of a pool, or to the one that the query names."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._shop.attend(Client(scope, receive, send), Passage(Route.OTHER), self._serve)

    async def _serve(self, client: Client, passage: Passage) -> None:
        limits = self._shop.limits
        raw = await client.body(limits.max_body, limits.body_timeout)
        await client.unless_gone(self._respond(client, passage, raw))

    async def _respond(self, client: Client, passage: Passage, raw: bytes) -> None:
        raise NotImplementedError

    async def _backends(self, client: Client, passage: Passage) -> Sequence[Backend]:
        """Those that the request is for, once one of them can be asked. Raises 404, 503."""
        dispatcher = self._shop.dispatcher
        query = parse_qs(client.scope["query_string"].decode("latin-1"))
        if "backend" in query:
            found = backend_named(dispatcher, query["backend"][0])
            if not found.up:
                raise errors.unavailable(f"backend {found.name!r} is not up")
            passage.pool, passage.backend = found.pool, found.name
            return [found]

        async def in_pool() -> Sequence[Backend]:
            there = dispatcher.fleet.pools.get(passage.pool, ())
            if dispatcher.stopping or not any(self._may_ask(backend) for backend in there):
                await dispatcher.engine(passage.pool)
            return dispatcher.fleet.pools[passage.pool]

        return await self._shop.pools.serve(query.get("model", [None])[0], passage, in_pool)

    def _may_ask(self, backend: Backend) -> bool:
        return backend.usable

    async def _ask(self, engine: EngineClient, client: Client, raw: bytes | None) -> _Answer:
        """One exchange. Raises :class:`EngineUnreachable`, :class:`EngineBroke`."""
        scope, headers = client.scope, self._shop.outgoing(client)
        try:
            async with (
                asyncio.timeout(CONTROL_TIMEOUT),
                engine.open(scope["method"], target(scope), headers, raw) as response,
            ):
                return _Answer(engine.name, response.status, response.headers, await response.read())
        except TimeoutError:
            raise EngineUnreachable(engine.name, sent=True) from None

    @staticmethod
    async def _pass(client: Client, passage: Passage, answers: Sequence[_Answer], body: bytes) -> None:
        """Answer as the first of these backends did, with the names of all."""
        first = answers[0]
        if not first.fine:
            passage.status = Status.ERROR
        names = ", ".join(answer.backend for answer in answers)
        own = [*without_length(first.headers), (b"x-warmslot-backend", names.encode())]
        await client.answer(first.status, body, own)


class Props(_PoolPage):
    """``GET /props`` of a pool: its first backend's, with the slots of all and the least context of any."""

    async def _respond(self, client: Client, passage: Passage, raw: bytes) -> None:
        for _ in range(ATTEMPTS):
            up = [backend for backend in await self._backends(client, passage) if backend.usable]
            tasks = [self._of(backend, client, raw or None) for backend in up]
            answers = [answer for answer in await asyncio.gather(*tasks) if answer is not None]
            if answers:
                told = [answer for answer in answers if answer.fine] or answers[:1]
                body = told[0].body if len(told) == 1 else _together([answer.body for answer in told])
                await self._pass(client, passage, told, body)
                return
        raise errors.unavailable("no backend took the request")

    async def _of(self, backend: Backend, client: Client, raw: bytes | None) -> _Answer | None:
        if backend.client is None:
            return None
        try:
            return await self._ask(backend.client, client, raw)
        except (EngineUnreachable, EngineBroke):
            self._shop.dispatcher.fleet.suspect(backend.name)
            return None


class Adapters(_PoolPage):
    """``POST /lora-adapters``: on every backend of the pool, on each while nothing runs there.

    What their slots hold was computed with the adapters before, so nothing of it is counted on any more. What
    was taken is kept (:mod:`.adapters`): a backend that is down, and one that is started anew, has it before
    it is used. Where some took it and others did not, the answer is a 502 that names both.
    """

    def __init__(self, shop: Shop, keeper: ScaleKeeper) -> None:
        super().__init__(shop)
        self._keeper = keeper

    def _may_ask(self, backend: Backend) -> bool:
        """Also one that lacks what was set before: what is set now may be what it takes."""
        return backend.usable or bool(backend.withheld)

    async def _respond(self, client: Client, passage: Passage, raw: bytes) -> None:
        backends = list(await self._backends(client, passage))
        scales = Scales(raw, self._shop.on_behalf(client))
        one = backends[0].name if passage.backend != "none" else None
        async with self._keeper.changing(passage.pool, one, scales) as change:
            told = dict(zip(backends, await self._tell(backends, client, scales), strict=True))
            done = [answer for answer in told.values() if isinstance(answer, _Answer) and answer.fine]
            if done:
                change.accept()
        lacking = {
            backend.name: answer
            for backend, answer in told.items()
            if answer not in done and not isinstance(answer, NoBackendError)
        }
        if done and lacking:
            raise _partly(passage.pool, [answer.backend for answer in done], lacking)
        refused = [answer for answer in told.values() if isinstance(answer, _Answer)]
        if not refused:
            raise next(answer for answer in told.values() if not isinstance(answer, _Answer))
        await self._pass(client, passage, done or refused, (done or refused)[0].body)

    async def _tell(
        self, backends: Sequence[Backend], client: Client, scales: Scales
    ) -> list[_Answer | _Failure]:
        return await asyncio.gather(*(self._set(backend, client, scales) for backend in backends))

    async def _set(self, backend: Backend, client: Client, scales: Scales) -> _Answer | _Failure:
        dispatcher = self._shop.dispatcher
        if dispatcher.fleet.backend(backend.name) is not backend:  # removed meanwhile
            return NoBackendError(backend.pool, 0.0)
        try:
            async with dispatcher.fleet.alone(backend.name) as engine:
                perhaps = True
                try:
                    answer = await self._ask(engine, client, scales.body)
                except EngineUnreachable as error:
                    perhaps = error.sent
                    raise
                else:
                    perhaps = answer.fine
                finally:
                    if perhaps:
                        backend.scales = None
                        dispatcher.outdated(backend.name, Loss.RESTARTED)
                if perhaps:
                    await clear(dispatcher, backend, engine, scales.headers)
                    backend.scales = backend.filled_with = scales.mark
                return answer
        except (EngineUnreachable, EngineBroke) as error:
            dispatcher.fleet.suspect(backend.name)
            return error
        except NoBackendError as error:
            return error


def _partly(pool: str, done: Sequence[str], lacking: Mapping[str, _Answer | _Failure]) -> RequestError:
    """Some backends of a pool took what others did not."""
    reasons = [f"{name} ({_reason(one)})" for name, one in lacking.items()]
    return errors.RequestError(
        502,
        "server_error",
        f"lora-adapters: of pool {pool!r} set on {', '.join(done)}; not on {', '.join(reasons)}, "
        "which gets no requests until it takes them",
        code="partly_done",
    )


def _reason(one: _Answer | _Failure) -> str:
    return f"status {one.status}" if isinstance(one, _Answer) else str(one)


def _together(bodies: Sequence[bytes]) -> bytes:
    """The first of several ``/props``, with the sum of ``total_slots`` and the least ``n_ctx``.

    As it came where one of them is no object.
    """
    try:
        told = [orjson.loads(body) for body in bodies]
    except orjson.JSONDecodeError:
        return bodies[0]
    if not all(isinstance(one, dict) for one in told):
        return bodies[0]
    first: dict[str, Any] = told[0]
    slots = [one["total_slots"] for one in told if _is_count(one.get("total_slots"))]
    if slots:
        first["total_slots"] = sum(slots)
    settings = [one.get("default_generation_settings") for one in told]
    limits = [one["n_ctx"] for one in settings if isinstance(one, dict) and _is_count(one.get("n_ctx"))]
    if isinstance(settings[0], dict) and limits:
        settings[0]["n_ctx"] = min(limits)
    return orjson.dumps(first)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
