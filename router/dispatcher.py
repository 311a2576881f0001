"""The one owner of slots, queue and trie: it gives out leases and takes them back.

The pure core decides. This object calls it from the event loop only, never with an ``await`` between reading
and changing, and carries its decisions out. Its own part is what has to wait: for a lease, for the engine to
say that a slot is free, for a backend to come up.

A request's life here: ``engine``, ``acquire``, perhaps ``first_token``; then ``finish``, ``abandon`` or
``unsent``. Only the first two wait, and both may be cancelled at any moment. The last three are plain
calls, so that no cancellation can come between the engine's word and the release of a slot.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .backend import EngineBroke, EngineClient, EngineUnreachable
from .backends import Backend, NoBackendError, StoppingError
from .health import HealthWatch
from .observer import Audience
from .settling import Held, SlotWatch, Timing
from .values import Outcome, Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from .contract import Core
    from .core import Contents, CoreSettings
    from .observer import Observer
    from .values import HostMemory, HostMemoryView, Lease, Loss, Report, Request, SlotObservation, SlotView

log = logging.getLogger("warmslot.router")

Connect = Callable[[str, str], EngineClient]
"""Makes the client of a backend from its name and address."""

_SLACK = 16
"""Tokens by which an answer may reuse less than predicted before the picture of the slots is doubted."""


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    lease: asyncio.Future[Lease]
    since: float


class Dispatcher:
    """Leases of the slots of all backends; see the module's text for the order of calls.

    ``pools`` maps each pool to the names of its backends. Whoever launches engines calls ``backend_ready``,
    ``backend_down`` and ``log_event``; :meth:`watch_remote` looks after one that runs elsewhere. All methods
    belong to one event loop.
    """

    def __init__(
        self,
        core: Core,
        pools: Mapping[str, Sequence[str]],
        *,
        connect: Connect = EngineClient,
        observers: Sequence[Observer] = (),
        timing: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._connect = connect
        self._observers = Audience(observers)
        self._timing = timing or Timing()
        self._clock = clock
        self._backends: dict[str, Backend] = {}
        self._pools: dict[str, list[Backend]] = {}
        self._came_up: dict[str, asyncio.Event] = {}
        self._down_since: dict[str, float] = {}
        for pool, names in pools.items():
            self._begin_pool(pool)
            for name in names:
                self.add_backend(name, pool)
        self._waiting: dict[str, _Waiting] = {}
        self._held: dict[str, Held] = {}
        self._wake: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._stopping = False
        self._nothing_held = asyncio.Event()
        self._nothing_held.set()
        self._fewer = asyncio.Event()
        """Set whenever a request is over, and cleared by whoever waits for that."""
        self._closing: set[asyncio.Task[None]] = set()

    # -- for requests --------------------------------------------------------------------------------------

    async def engine(self, pool: str) -> EngineClient:
        """A backend of the pool that serves, for calls that use no slot. Waits for one, within bounds.

        Raises :class:`NoBackendError`, :class:`StoppingError`.
        """
        until = self._clock() + self._timing.hold
        while True:
            self._refuse_if_stopping()
            for backend in self._pools.get(pool, ()):
                if backend.usable and backend.client is not None:
                    return backend.client
            self._refuse_if_removed(pool)
            try:
                async with asyncio.timeout(until - self._clock()):
                    await self._came_up[pool].wait()
            except TimeoutError:
                raise NoBackendError(pool, self._timing.hold) from None

    async def acquire(self, request: Request) -> Lease:
        """Wait for a lease. When cancelled, the request leaves the queue, or its lease goes back unused.

        Raises :class:`~warmslot.router.core.QueueFullError`, :class:`NoBackendError`, :class:`StoppingError`.
        """
        self._refuse_if_stopping()
        self._refuse_if_removed(request.pool)
        waiting = _Waiting(request, asyncio.get_running_loop().create_future(), self._clock())
        self._core.submit(request, waiting.since)
        self._waiting[request.id] = waiting
        self._demand(request, 1)
        self._pump()
        self._arm_expiry()
        try:
            return await waiting.lease
        except asyncio.CancelledError:
            if waiting.lease.done() and not waiting.lease.cancelled() and waiting.lease.exception() is None:
                # The lease was on its way when its taker was cancelled.
                self._release(self._held[request.id], Outcome(Status.CANCELLED, untouched=True))
            else:
                self._withdraw(request.id)
            raise

    def client(self, lease: Lease) -> EngineClient:
        """The engine that serves a lease. Raises :class:`EngineUnreachable` where it is gone by now."""
        client = self._backends[lease.slot.backend].client if self._is_there(lease) else None
        if client is None:
            raise EngineUnreachable(lease.slot.backend, sent=False)
        return client

    def sending(self, request_id: str) -> None:
        """From now on the engine may know of the request, so only the engine can free its slot.

        Also said again between two calls to the engine that belong to one request.
        """
        held = self._held[request_id]
        held.sent, held.started = True, False

    def started(self, request_id: str) -> None:
        """The engine has answered something: it has taken the request into a slot, or refused it."""
        self._held[request_id].started = True

    def first_token(self, request_id: str) -> None:
        """The prefill is over.

        Of a request that the engine placed, the core is not told: until it ends, no slot is known to be idle.
        """
        held = self._held[request_id]
        if held.decoding or held.left is not None or not held.pinned:
            return
        held.started = held.decoding = True
        now = self._clock()
        self._core.first_token(request_id, now)
        self._observers.decoding(held.lease, now)
        self._pump()

    def finish(self, request_id: str, outcome: Outcome) -> Report:
        """The engine has said that the slot is free: take the lease back. Exactly once; KeyError else."""
        return self._release(self._ours(request_id), outcome)

    def abandon(self, request_id: str, outcome: Outcome) -> None:
        """Nobody reads the answer any more: the lease ends when the engine says that the slot is free.

        The connection to the engine is closed already. Exactly once, in place of ``finish``; KeyError else.
        """
        held = self._ours(request_id)
        if not held.sent:
            self._release(held, replace(outcome, untouched=True))
        elif not self._is_there(held.lease):
            self._release(held, outcome)
        else:
            held.life.leave(held, outcome)

    def unsent(self, request_id: str) -> None:
        """Not a byte reached the engine: the lease goes back unused, and the backend has to prove itself."""
        held = self._ours(request_id)
        if self._is_there(held.lease):
            self.suspect(held.lease.slot.backend)
        self._release(held, Outcome(Status.ERROR, untouched=True))

    def suspect(self, name: str) -> None:
        """A backend refused or broke a connection: no leases on it until its ``/health`` answers."""
        backend = self._backends.get(name)
        if backend is not None and backend.usable and backend.client is not None:
            self._core.backend_admit(name, admit=False)
            if backend.watch is None:
                backend.watch = HealthWatch(
                    backend.client,
                    self._timing.health,
                    is_up=lambda: backend.up,
                    trusted=lambda: self._trust(backend),
                )
            backend.watch.suspect()
            self._refresh_pool(backend.pool)

    # -- for status pages and metrics ----------------------------------------------------------------------

    @property
    def pools(self) -> Mapping[str, Sequence[Backend]]:
        """Every pool with its backends. Read only."""
        return self._pools

    def backend(self, name: str) -> Backend | None:
        """One backend by name. Read only."""
        return self._backends.get(name)

    def queued(self, pool: str) -> int:
        """Requests of the pool that wait for a lease."""
        return self._core.queued(pool)

    def slots(self) -> list[SlotView]:
        """Every slot, as the core sees it."""
        return self._core.slots()

    def host_memory(self, name: str) -> HostMemoryView | None:
        """The prompt cache in host memory of one backend's engine, if it has one and is up."""
        return self._core.host_memory(name)

    def waiting(self) -> list[Request]:
        """Requests that wait for a lease, in the order of their arrival."""
        return [waiting.request for waiting in self._waiting.values()]

    @property
    def stopping(self) -> bool:
        """Whether it takes no more requests."""
        return self._stopping

    def held(self) -> Mapping[str, Held]:
        """Leases that are out, by request id. Read only."""
        return self._held

    # -- for whoever launches engines ----------------------------------------------------------------------

    async def backend_ready(
        self,
        name: str,
        url: str,
        slots: int,
        context: int,
        *,
        fresh: bool,
        restored: Sequence[Contents] = (),
        host: HostMemory | None = None,
    ) -> None:
        """A backend serves at ``url``. ``fresh``: all of its slots are empty, but for those ``restored``.

        ``host``: its prompt cache in host memory, where it has one.

        A second report of the same service changes nothing.
        """
        backend = self._backends[name]
        client = self._connect(name, url)
        if (
            backend.up
            and backend.client is not None
            and not fresh
            and backend.client.base_url == client.base_url
        ):
            await client.aclose()
            return
        self._take_down(backend, "replaced")
        backend.client = client
        backend.slots, backend.context = slots, context
        backend.life = SlotWatch(client, self, self._timing, self._clock, slots)
        self._core.backend_up(name, backend.pool, slots, context, self._clock(), known_empty=fresh, host=host)
        for contents in restored:
            self._core.believe(name, contents, self._clock())
        self._observers.backend_changed(name, up=True, slots=slots, context=context, reason="")
        if not fresh:
            backend.life.want()
        self._refresh_pool(backend.pool)
        self._pump()

    def add_pool(self, pool: str, settings: CoreSettings) -> None:
        """A pool more, without backends so far."""
        self._core.add_pool(pool, settings)
        self._begin_pool(pool)

    def add_backend(self, name: str, pool: str) -> None:
        """A backend more, that is down until it is reported as ready."""
        backend = self._backends[name] = Backend(name, pool)
        self._pools[pool].append(backend)

    async def remove_backend(self, name: str) -> None:
        """A backend less. What it serves should have ended (:meth:`backend_draining`): it is cut off else."""
        backend = self._backends[name]
        self._take_down(backend, "removed")
        del self._backends[name]
        self._pools[backend.pool].remove(backend)
        self._refresh_pool(backend.pool)
        if backend.watch is not None:
            await backend.watch.aclose()

    async def remove_pool(self, pool: str) -> None:
        """A pool less, whose backends were removed: what waits is refused, what is cut off may end first."""
        for waiting in [one for one in self._waiting.values() if one.request.pool == pool]:
            self._fail(waiting, NoBackendError(pool, 0.0))
        await self.unused(pool)
        self._core.remove_pool(pool)
        del self._pools[pool]
        self._came_up.pop(pool).set()
        self._down_since.pop(pool, None)

    async def unused(self, pool: str) -> None:
        """Wait until no request of a pool waits or runs."""
        while any(one.request.pool == pool for one in self._waiting.values()) or any(
            held.lease.request.pool == pool for held in self._held.values()
        ):
            self._fewer.clear()
            await self._fewer.wait()

    def hold_for(self, seconds: float) -> None:
        """Another bound for what waits while its pool has no backend, from now on."""
        self._timing = replace(self._timing, hold=seconds)
        self._arm_expiry()

    def reschedule(self, pool: str, settings: CoreSettings) -> None:
        """Another policy for a pool, from now on, for what waits as well. Raises KeyError."""
        self._core.reschedule(pool, settings)
        self._pump()

    def contents(self, name: str) -> list[Contents]:
        """What the idle slots of a backend are known to hold, to be saved."""
        return self._core.contents(name)

    async def backend_down(self, name: str, reason: str) -> None:
        """A backend is gone, with all that its slots held."""
        self._take_down(self._backends[name], reason)

    async def backend_draining(self, name: str) -> None:
        """Give no new leases on a backend; returns when none is out. What waits goes to others, or waits on.

        Cancelled, the backend is in use again.
        """
        backend = self._backends[name]
        life = backend.life
        if life is None:
            return
        backend.draining = True
        self._core.backend_admit(name, admit=False)
        self._pump()
        try:
            await life.idle.wait()
        except asyncio.CancelledError:
            if backend.life is life:
                backend.draining = False
                self._core.backend_admit(name, admit=backend.usable)
                self._pump()
            raise

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[EngineClient]:
        """A backend on which nothing runs and nothing starts, for a call that changes what a slot holds.

        Waits for what runs, and for other calls like it. Raises :class:`NoBackendError` for one that is down,
        or drains because it will be.
        """
        backend = self._backends[name]
        async with backend.turn, self._alone(backend) as client:
            yield client

    @asynccontextmanager
    async def _alone(self, backend: Backend) -> AsyncIterator[EngineClient]:
        life, client = backend.life, backend.client
        if life is None or client is None or backend.draining:
            raise NoBackendError(backend.pool, 0.0)
        await self.backend_draining(backend.name)
        try:
            yield client
        finally:
            if backend.life is life:
                backend.draining = False
                self._core.backend_admit(backend.name, admit=backend.usable)
                self._pump()

    def observed(self, name: str, slots: Sequence[SlotObservation]) -> None:
        """What a backend says of its slots, other than in the course of requests.

        One at work without a lease is looked at again until it is idle.
        """
        self._core.observe(name, slots, self._clock())
        life = self._life(name)
        if life is not None and any(seen.processing for seen in slots):
            life.want()
        self._pump()

    def doubted(self, name: str, slots: Iterable[int]) -> None:
        """What these idle slots of a backend hold is not known any more, until it is observed."""
        self._core.doubt(name, slots)

    def outdated(self, name: str, reason: Loss, slots: Iterable[int] | None = None) -> None:
        """What these slots of a backend, or all, hold is of no use any more (other adapters, or emptied)."""
        self._core.outdate(name, reason, range(self._backends[name].slots) if slots is None else slots)

    def position(self, request_id: str) -> tuple[int, float] | None:
        """Place in the queue (0 = next) and about how many seconds are before it; ``None`` if not queued."""
        return self._core.position(request_id, self._clock())

    def log_event(self, name: str, event: object) -> None:
        """A line of a launched engine's log, understood: selections are counted, releases hasten a look.

        Events are told apart by their fields: a selection has ``by``, a release ``slot`` and ``truncated``.
        """
        by = getattr(event, "by", None)
        if isinstance(by, str):
            self._observers.engine_selected(name, by)
        slot, life = getattr(event, "slot", None), self._life(name)
        if isinstance(slot, int) and hasattr(event, "truncated") and life is not None:
            life.released(slot)

    # -- for backends that run elsewhere -------------------------------------------------------------------

    def watch_remote(self, name: str, url: str) -> None:
        """Look after a backend that is not launched here: up when healthy, down after repeated failures."""
        backend = self._backends[name]
        client = self._connect(name, url)

        async def came_up() -> None:
            props = await client.props()
            slots = props.total_slots or len(await client.slots() or ())
            if not slots:
                raise EngineBroke(name, "neither /props nor /slots tells how many slots it has")
            await self.backend_ready(name, url, slots, props.context or 0, fresh=False)

        backend.watch = HealthWatch(
            client,
            self._timing.health,
            is_up=lambda: backend.up,
            trusted=lambda: self._trust(backend),
            came_up=came_up,
            went_down=lambda reason: self._take_down(backend, reason),
        )
        backend.watch.start()

    # -- end of life ---------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no new requests, send away those that wait, and wait until every lease is back.

        Cancel it to stop waiting.
        """
        self._stop_admission()
        await self._nothing_held.wait()

    async def aclose(self) -> None:
        """Stop everything at once, leases included."""
        self._stop_admission()
        for timer in (self._wake, self._expiry):
            if timer is not None:
                timer.cancel()
        for backend in self._backends.values():
            if backend.life is not None:
                backend.life.stop()
            if backend.watch is not None:
                await backend.watch.aclose()
            self._retire(backend)
        await asyncio.gather(*self._closing)

    def _stop_admission(self) -> None:
        self._stopping = True
        for waiting in list(self._waiting.values()):
            self._fail(waiting, StoppingError())
        for event in self._came_up.values():
            event.set()

    def _refuse_if_stopping(self) -> None:
        if self._stopping:
            raise StoppingError

    def _refuse_if_removed(self, pool: str) -> None:
        if pool not in self._pools:
            raise NoBackendError(pool, 0.0)

    # -- inside: leases ------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Hand out what the core grants now, and come back when it asks for that."""
        began, now = time.perf_counter(), self._clock()
        unused = True
        while unused:
            unused = False
            for lease in self._core.grant(now):
                waiting = self._waiting.pop(lease.request.id, None)
                self._hold(lease)
                if waiting is None or waiting.lease.done():
                    self._take_back(self._held[lease.request.id], Outcome(Status.CANCELLED, untouched=True))
                    unused = True
                    continue
                waiting.lease.set_result(lease)
                self._observers.granted(lease, time.perf_counter() - began)
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        due = self._core.next_wake(now)
        if due is not None and not self._stopping:
            self._wake = asyncio.get_running_loop().call_later(max(0.001, due - now), self._pump)

    def _hold(self, lease: Lease) -> None:
        life = self._backends[lease.slot.backend].life
        if life is None:
            raise AssertionError("the core gave a lease on a backend that is down")
        held = Held(lease, life, frozenset(ref.slot for ref in (lease.slot, *lease.extra_slots)))
        self._held[lease.request.id] = held
        self._nothing_held.clear()
        life.add(held)

    def _life(self, name: str) -> SlotWatch | None:
        """A backend's life; ``None`` while it is down, and once it was removed."""
        backend = self._backends.get(name)
        return None if backend is None else backend.life

    def _is_there(self, lease: Lease) -> bool:
        """Whether the engine that a lease was given on is still the one that serves there."""
        return self._life(lease.slot.backend) is self._held[lease.request.id].life

    def _ours(self, request_id: str) -> Held:
        held = self._held[request_id]
        if held.left is not None:
            raise KeyError(request_id)
        return held

    def _take_back(self, held: Held, outcome: Outcome) -> Report:
        lease, now = held.lease, self._clock()
        del self._held[lease.request.id]
        held.life.remove(held)
        report = self._core.finish(lease.request.id, outcome, now)
        if self._life(lease.slot.backend) is held.life:
            self._judge(self._backends[lease.slot.backend])
        self._observers.finished(lease, report, outcome, now)
        self._demand(lease.request, -1)
        if not self._held:
            self._nothing_held.set()
        surprised = not report.truth_missing and report.predicted_tokens - report.cached_tokens > _SLACK
        doubtful = surprised or outcome.engine_error or not held.pinned
        if doubtful and self._life(lease.slot.backend) is held.life:
            held.life.want()
        return report

    def _judge(self, backend: Backend) -> None:
        """Say whether an engine's cache in host memory saves time, once that is known and when it changes."""
        seen = self._core.host_memory(backend.name)
        if seen is None or seen.pays is None or seen.copy_seconds is None or seen.pays is backend.copies_pay:
            return
        backend.copies_pay = seen.pays
        log.info(
            "backend %s: cache_ram %s: 1,000 tokens are saved and loaded in %.3f s and computed in %.3f s",
            *(backend.name, "pays" if seen.pays else "does not pay"),
            *(2000 * seen.copy_seconds, 1000 * seen.prefill_seconds),
        )

    def _release(self, held: Held, outcome: Outcome) -> Report:
        report = self._take_back(held, outcome)
        self._pump()
        return report

    def _withdraw(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._core.withdraw(request_id, self._clock())
            self._demand(waiting.request, -1)
            self._pump()

    def _fail(self, waiting: _Waiting, error: Exception) -> None:
        self._withdraw(waiting.request.id)
        if not waiting.lease.done():
            waiting.lease.set_exception(error)

    def _demand(self, request: Request, by: int) -> None:
        now = self._clock()
        self._observers.demanded(request.pool, by, now)
        if by < 0:
            self._fewer.set()

    # -- inside: what the engine says of its slots ---------------------------------------------------------

    def slots_seen(
        self, life: SlotWatch, free: Sequence[tuple[Held, Outcome]], others: Sequence[SlotObservation]
    ) -> None:
        """For :class:`SlotWatch`: leases that are over by the engine's word, and a look at other slots."""
        for held, outcome in free:
            self._take_back(held, outcome)
        name = next((b.name for b in self._backends.values() if b.life is life), None)
        if name is not None:
            self._core.observe(name, others, self._clock())
        self._pump()

    def slots_hidden(self, life: SlotWatch) -> None:
        """For :class:`SlotWatch`: the backend has no ``/slots``."""
        for backend in self._backends.values():
            if backend.life is life:
                self._core.unobserved(backend.name)

    def slots_unseen(self, life: SlotWatch, error: Exception) -> None:
        """For :class:`SlotWatch`: the backend did not answer."""
        for backend in self._backends.values():
            if backend.life is life:
                log.warning("%s; its /slots cannot be asked", error)
                self.suspect(backend.name)

    # -- inside: backends that come and go -----------------------------------------------------------------

    def _take_down(self, backend: Backend, reason: str) -> None:
        life = backend.life
        if life is None:
            return
        log.warning("backend %s is down: %s", backend.name, reason)
        life.stop()
        backend.life = None
        backend.draining = False
        if backend.watch is not None and not backend.watch.lasting:
            backend.watch.stop()
            backend.watch = None
        self._core.backend_down(backend.name, self._clock())
        for held in [held for held in life.held.values() if held.left is not None]:
            self._take_back(held, held.outcome)
        self._retire(backend)
        self._observers.backend_changed(backend.name, up=False, slots=0, context=0, reason=reason)
        self._refresh_pool(backend.pool)
        self._pump()

    def _trust(self, backend: Backend) -> None:
        """It answers again. It may have been started anew in between, so what its slots hold is looked at."""
        if backend.life is not None:
            self._core.backend_admit(backend.name, admit=not backend.draining)
            backend.life.want()
            self._refresh_pool(backend.pool)
            self._pump()

    def _retire(self, backend: Backend) -> None:
        client, backend.client = backend.client, None
        if client is not None:
            task = asyncio.get_running_loop().create_task(client.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _begin_pool(self, pool: str) -> None:
        self._pools[pool] = []
        self._came_up[pool] = asyncio.Event()
        self._down_since[pool] = self._clock()

    def _refresh_pool(self, pool: str) -> None:
        if any(backend.usable for backend in self._pools[pool]) or self._stopping:
            self._came_up[pool].set()
            self._down_since.pop(pool, None)
        else:
            self._came_up[pool].clear()
            self._down_since.setdefault(pool, self._clock())
        self._arm_expiry()

    def _arm_expiry(self) -> None:
        """One timer, for the next request that has waited long enough for a pool without a backend."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if not self._down_since:
            return
        due = min((self._expires(waiting) for waiting in self._waiting.values()), default=math.inf)
        if due < math.inf:
            delay = max(0.0, due - self._clock())
            self._expiry = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expires(self, waiting: _Waiting) -> float:
        down = self._down_since.get(waiting.request.pool)
        return math.inf if down is None else max(down, waiting.since) + self._timing.hold

    def _expire(self) -> None:
        now = self._clock()
        for waiting in [one for one in self._waiting.values() if self._expires(one) <= now]:
            self._fail(waiting, NoBackendError(waiting.request.pool, self._timing.hold))
        self._arm_expiry()
