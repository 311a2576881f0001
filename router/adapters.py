"""LoRA scales that were set over HTTP: kept, and in force on every later life of a backend before it is used.

An engine knows them for as long as it runs. Started anew it has those of its flags, and would answer
otherwise than its siblings, or than itself a minute before, with nobody the wiser. So a backend that lacks
them gets no requests: they are set on it, again and again if need be, and only then is it used.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson

from . import errors
from .backend import CONTROL_TIMEOUT, EngineBroke, EngineError, EngineUnreachable
from .backends import NoBackendError
from .isolation import empty
from .values import Loss

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from .backend import EngineClient
    from .backends import Backend
    from .client import Headers
    from .dispatcher import Dispatcher
    from .settling import SlotWatch

log = logging.getLogger("warmslot.router")

PATH = "/lora-adapters"

FLAGS = ""
"""The mark of the scales that an engine was started with."""

_FOREIGN = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED})
"""What an engine says to scales of adapters that it does not have; anything else may pass."""

_JSON = (b"content-type", b"application/json")
_COMING = "LoRA scales are being set on it"


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales as a client gave them (``body``), and headers to send with them: its key is shown nowhere."""

    body: bytes
    headers: Headers = field(default_factory=lambda: [_JSON], repr=False)

    @property
    def mark(self) -> str:
        """Equal for equal scales, and no other's. Never :data:`FLAGS`."""
        told = self.by_id()
        known = self.body if told is None else orjson.dumps(sorted(told.items()))
        return hashlib.blake2b(known, digest_size=16).hexdigest()

    def by_id(self) -> Mapping[int, float] | None:
        """Scale by adapter, less those that are switched off; ``None`` where the body is not understood."""
        return _by_id(self.body)

    async def are_in_force(self, engine: EngineClient) -> bool:
        """Whether an engine says so. Raises :class:`EngineUnreachable`, :class:`EngineBroke`."""
        try:
            listed = _by_id(await _call(engine, "GET", self.headers))
        except EngineError:
            return False
        wanted = self.by_id()
        if listed is None or wanted is None or listed.keys() != wanted.keys():
            return False
        # (An engine keeps them with 24 bits.)
        return all(math.isclose(scale, wanted[number], rel_tol=1e-6) for number, scale in listed.items())

    async def put(self, engine: EngineClient) -> None:
        """Set them. Raises :class:`EngineError`, :class:`EngineUnreachable`, :class:`EngineBroke`."""
        await _call(engine, "POST", self.headers, self.body)


def _by_id(body: bytes) -> dict[int, float] | None:
    try:
        told = orjson.loads(body)
        pairs = [(one["id"], one["scale"]) for one in told] if isinstance(told, list) else None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    if pairs is None or not all(isinstance(number, int) and _is_number(scale) for number, scale in pairs):
        return None
    return {number: float(scale) for number, scale in pairs if scale}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


async def _call(engine: EngineClient, method: str, headers: Headers, body: bytes | None = None) -> bytes:
    try:
        async with (
            asyncio.timeout(CONTROL_TIMEOUT),
            engine.open(method, PATH, headers, body) as response,
        ):
            answer = await response.read()
    except TimeoutError:
        raise EngineUnreachable(engine.name, sent=True) from None
    if not HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
        raise EngineError(response.status, answer, PATH)
    return answer


async def clear(dispatcher: Dispatcher, backend: Backend, engine: EngineClient, headers: Headers) -> None:
    """Count on nothing in a backend's slots, and leave nothing there that its engine might go on with.

    It was computed with other adapters, of which the engine takes no notice. Nothing else may run on it.
    """
    dispatcher.outdated(backend.name, Loss.RESTARTED)
    try:
        await empty(dispatcher, engine, headers, range(backend.slots))
    except errors.RequestError:
        log.warning("backend %s: slots that other adapters filled could not be cleared", backend.name)


class _Trying:
    """What is under way to bring one life of a backend to its scales."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.once = asyncio.Event()
        """Set once the first try has ended."""
        self.again = asyncio.Event()
        """Set to have the next try now."""


class ScaleKeeper:
    """The scales of every pool, and of backends that were set by themselves; the fleet's guard.

    It outlives reloads. ``pause`` is in seconds: between two tries on a backend that does not take them.
    """

    def __init__(self, dispatcher: Dispatcher, *, pause: float = 2.0) -> None:
        self._dispatcher = dispatcher
        self._pause = pause
        self._scales: dict[tuple[str, str | None], Scales] = {}
        """By pool and backend; ``None`` for all of the pool that have none of their own."""
        self._coming: dict[str, Scales] = {}
        """By backend: what it is being told."""
        self._one_at_a_time = asyncio.Lock()
        """Of two changes at once the later one holds on all backends, or a part of each would."""
        self._tries: dict[SlotWatch, _Trying] = {}
        self._file: Path | None = None
        dispatcher.fleet.guarded_by(self)

    def keep_in(self, file: Path) -> None:
        """Keep them in a file as well, and begin with what is in it: whoever wrote it was killed.

        Keys of clients are not written down.
        """
        self._file = file
        try:
            told = orjson.loads(file.read_bytes())
            self._scales = {
                (one["pool"], one["backend"]): Scales(one["scales"].encode()) for one in told
            } | self._scales
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("%s: LoRA scales that were set before cannot be read: %s", file, error)

    def keep_no_more(self) -> None:
        """Remove the file: who starts next begins with those of the flags."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
            self._file = None

    def _write(self) -> None:
        if self._file is None:
            return
        told = [
            {"pool": pool, "backend": backend, "scales": scales.body.decode(errors="replace")}
            for (pool, backend), scales in self._scales.items()
        ]
        fresh = self._file.with_suffix(".new")
        try:
            fresh.write_bytes(orjson.dumps(told))
            fresh.replace(self._file)
        except OSError as error:
            log.warning("%s: LoRA scales cannot be kept there: %s", self._file, error.strerror)

    def wanted(self, backend: Backend) -> Scales | None:
        """What is to be in force on a backend; ``None``: what its flags say."""
        own = self._scales.get((backend.pool, backend.name))
        return own or self._scales.get((backend.pool, None))

    @asynccontextmanager
    async def changing(self, pool: str, backend: str | None, scales: Scales) -> AsyncIterator[_Change]:
        """While a pool, or one backend of it, is told other scales: one change after the other.

        They are kept if it was :meth:`_Change.accept`-ed. Then whoever of the pool lacks them gets no more
        requests until it has them.
        """
        async with self._one_at_a_time:
            told = [one for one in self._dispatcher.fleet.pools.get(pool, ()) if backend in {None, one.name}]
            change = _Change()
            self._coming = {one.name: scales for one in told}
            try:
                yield change
            finally:
                self._coming = {}
                if change.accepted:
                    self._keep(pool, backend, scales)
                for one in self._dispatcher.fleet.pools.get(pool, ()):
                    if one.life is not None and one.life in self._tries:
                        self._tries[one.life].again.set()
                    self._dispatcher.fleet.readmit(one.name)

    def _keep(self, pool: str, backend: str | None, scales: Scales) -> None:
        if backend is None:
            self._scales = {key: kept for key, kept in self._scales.items() if key[0] != pool}
        self._scales[pool, backend] = scales
        self._write()

    # -- for the fleet -------------------------------------------------------------------------------------

    def mark(self, backend: Backend) -> str:
        """Of the scales that are to be in force on a backend."""
        wanted = self.wanted(backend)
        return FLAGS if wanted is None else wanted.mark

    def objection(self, backend: Backend) -> str:
        """Why a backend that is up gets no requests yet; empty where it may. Sees to it that it soon may."""
        mark = self.mark(backend)
        coming = self._coming.get(backend.name)
        if coming is not None:  # whoever tells it looks again at the end
            return "" if backend.scales in {mark, coming.mark} or mark == FLAGS else _COMING
        life = backend.life
        if life is None or self._is_settled(backend):
            return ""
        if life not in self._tries and not backend.draining:
            task = asyncio.create_task(self._try(backend, life), name=f"scales {backend.name}")
            self._tries[life] = _Trying(task)
        return backend.withheld or _COMING

    async def tried(self, backend: Backend) -> None:
        """Wait until a backend that was objected to has its scales, or a first try has failed."""
        trying = self._tries.get(backend.life) if backend.life is not None else None
        if trying is not None:
            await trying.once.wait()

    def pool_removed(self, pool: str) -> None:
        """Forget what was set for it."""
        if any(key[0] == pool for key in self._scales):
            self._scales = {key: kept for key, kept in self._scales.items() if key[0] != pool}
            self._write()

    async def aclose(self) -> None:
        """Try no more."""
        tasks = [trying.task for trying in self._tries.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one backend ---------------------------------------------------------------------------------------

    def _is_settled(self, backend: Backend) -> bool:
        """Whether a backend has its scales, and nothing in its slots that was computed with others."""
        mark = self.mark(backend)
        if mark == FLAGS and backend.scales != FLAGS:
            return True  # what its engine was told before we knew it is nothing that could be taken back
        return backend.scales == backend.filled_with == mark

    async def _try(self, backend: Backend, life: SlotWatch) -> None:
        """Set them on this life of a backend, until it has them or is over."""
        trying = self._tries[life]
        try:
            while backend.life is life and not self._is_settled(backend):
                trying.again.clear()
                trouble = await self._once(backend)
                if trouble:
                    self._complain(backend, life, trouble)
                    trying.once.set()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._pause):
                            await trying.again.wait()
        except NoBackendError:  # it is down, or drains: at the end of that it is looked at again
            pass
        finally:
            del self._tries[life]
            trying.once.set()
        if backend.life is life:
            self._dispatcher.fleet.readmit(backend.name)

    async def _once(self, backend: Backend) -> str:
        """One try; why it failed, or nothing. Raises :class:`NoBackendError`."""
        try:
            return await self._bring(backend, self.wanted(backend))
        except (EngineUnreachable, EngineBroke) as error:
            self._dispatcher.fleet.suspect(backend.name)
            return str(error)

    async def _bring(self, backend: Backend, wanted: Scales | None) -> str:
        mark = FLAGS if wanted is None else wanted.mark
        if wanted is not None and backend.scales is None and await self._found(backend, wanted):
            return ""
        async with self._dispatcher.fleet.alone(backend.name) as engine:
            life = backend.life
            if wanted is not None and backend.scales != mark:
                try:
                    await wanted.put(engine)
                except EngineError as error:
                    return self._refused(backend, wanted, error)
            if backend.filled_with != mark and self._holds_something(backend):
                await clear(self._dispatcher, backend, engine, [_JSON] if wanted is None else wanted.headers)
            if backend.life is life:
                backend.scales = backend.filled_with = mark
        if wanted is not None:
            log.info("backend %s: its LoRA scales are those that were set over HTTP", backend.name)
        return ""

    async def _found(self, backend: Backend, wanted: Scales) -> bool:
        """Whether an engine of which nothing is certain has the scales, and has had them all along."""
        life, engine = backend.life, backend.client
        if life is None or engine is None:
            raise NoBackendError(backend.pool, 0.0)
        there = await wanted.are_in_force(engine)
        if backend.life is not life:
            return False
        if not there:  # another one than that which was filled
            backend.filled_with = None
            return False
        backend.scales = wanted.mark
        if backend.filled_with is None:
            backend.filled_with = wanted.mark
        return backend.filled_with == wanted.mark

    def _holds_something(self, backend: Backend) -> bool:
        return any(
            view.resident_tokens or not view.known
            for view in self._dispatcher.slots()
            if view.ref.backend == backend.name
        )

    def _refused(self, backend: Backend, wanted: Scales, error: EngineError) -> str:
        """What follows from a refusal: what no engine has any more, none can be held to."""
        reason = f"it refused them (status {error.status}{_words(error.body)})"
        scope = next((key for key, kept in self._scales.items() if kept is wanted), None)
        if error.status not in _FOREIGN or scope is None:
            return reason
        pool, one = scope
        others = self._dispatcher.fleet.pools.get(pool, ()) if one is None else ()
        if any(other.up and other.scales == wanted.mark for other in others):
            return reason
        del self._scales[scope]
        self._write()
        log.warning(
            "%s: the LoRA scales that were set over HTTP are forgotten, those of the flags hold: backend %s "
            "was started anew and %s, and no other has them",
            *(f"pool {pool}" if one is None else f"backend {one}", backend.name, reason),
        )
        for other in others:
            if other is not backend:
                self._dispatcher.fleet.readmit(other.name)
        return ""

    def _complain(self, backend: Backend, life: SlotWatch, trouble: str) -> None:
        reason = f"LoRA scales that were set over HTTP are not in force on it: {trouble}"
        if backend.life is life and backend.withheld != reason:
            backend.withheld = reason
            log.error(
                "backend %s gets no requests: %s; it is asked again every %g s",
                *(backend.name, reason, self._pause),
            )


@dataclass(slots=True)
class _Change:
    """A change that is being made."""

    accepted: bool = False

    def accept(self) -> None:
        """Some engine has taken it: it is what is wanted from now on."""
        self.accepted = True


def _words(body: bytes) -> str:
    """The engine's own, where it has any. They hold no prompt: this call carries none."""
    try:
        told: Any = orjson.loads(body)
        message = told["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""
    return f": {message}" if isinstance(message, str) and message else ""
