"""The one owner of slots, queue and trie: it gives out leases and takes them back.

The pure core decides. This object alone holds it, calls it from the event loop only, never with an ``await``
between reading and changing, and carries its decisions out. Two others help, which tell it what happens and
are told what it wants, and know nothing of the core: :class:`~.fleet.Fleet` which backends there are, and
:class:`~.waiters.Waiters` who awaits a lease, and until when.

A request's life here: ``engine``, ``acquire``, perhaps ``first_token``; then ``finish``, ``abandon`` or
``unsent``. Only the first two wait, and both may be cancelled at any moment. The last three are plain
calls, so that no cancellation can come between the engine's word and the release of a slot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from .backend import EngineClient, EngineUnreachable
from .backends import PoolRemovedError, StoppingError
from .fleet import Fleet
from .observer import Audience
from .settling import Held, Timing
from .values import Outcome, Status
from .waiters import Waiters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .backends import Backend
    from .contract import Core
    from .core import Contents, CoreSettings
    from .fleet import Connect
    from .observer import Observer
    from .settling import SlotWatch
    from .values import HostMemory, HostMemoryView, Lease, Loss, Report, Request, SlotObservation, SlotView

log = logging.getLogger("warmslot.router")

_SLACK = 16
"""Tokens by which an answer may reuse less than predicted before the picture of the slots is doubted."""


class Dispatcher:
    """Leases of the slots of all backends; see the module's text for the order of calls.

    ``pools`` maps each pool to the names of its backends. Whoever launches engines tells ``fleet`` of them.
    All methods belong to one event loop.
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
        timing = timing or Timing()
        self._core = core
        self._observers = Audience(observers)
        self._clock = clock
        self._waiters = Waiters(self._withdraw, timing.hold, clock)
        self._held: dict[str, Held] = {}
        self._wake: asyncio.TimerHandle | None = None
        self._stopping = False
        self._nothing_held = asyncio.Event()
        self._nothing_held.set()
        self._fewer = asyncio.Event()
        """Set whenever a request is over, and cleared by whoever waits for that."""
        for pool in pools:
            self._waiters.add_pool(pool)
        self.fleet = Fleet(self, pools, connect=connect, audience=self._observers, timing=timing, clock=clock)

    # -- for requests --------------------------------------------------------------------------------------

    async def engine(self, pool: str) -> EngineClient:
        """A backend of the pool that serves, for calls that use no slot. Waits for one, within bounds.

        Raises :class:`NoBackendError`, :class:`PoolRemovedError`, :class:`StoppingError`.
        """
        since = self._clock()
        while True:
            self._refuse_if_stopping()
            client = self.fleet.serving(pool)
            if client is not None:
                return client
            self._refuse_if_removed(pool)
            await self._waiters.serving(pool, since)

    async def acquire(self, request: Request) -> Lease:
        """Wait for a lease. When cancelled, the request leaves the queue, or its lease goes back unused.

        Raises :class:`~warmslot.router.core.QueueFullError`, :class:`NoBackendError`,
        :class:`PoolRemovedError`, :class:`StoppingError`.
        """
        self._refuse_if_stopping()
        self._refuse_if_removed(request.pool)
        now = self._clock()
        self._core.submit(request, now)
        waiter = self._waiters.enter(request, now)
        self._demand(request, 1)
        self._pump()
        self._waiters.arm()
        try:
            return await waiter.lease
        except asyncio.CancelledError:
            if waiter.lease.done() and not waiter.lease.cancelled() and waiter.lease.exception() is None:
                # The lease was on its way when its taker was cancelled.
                self._release(self._held[request.id], Outcome(Status.CANCELLED, untouched=True))
            else:
                self._withdraw(request.id)
            raise

    def client(self, lease: Lease) -> EngineClient:
        """The engine that serves a lease. Raises :class:`EngineUnreachable` where it is gone by now."""
        backend = self.fleet.backend(lease.slot.backend) if self._is_there(lease) else None
        if backend is None or backend.client is None:
            raise EngineUnreachable(lease.slot.backend, sent=False)
        return backend.client

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
            self.fleet.suspect(held.lease.slot.backend)
        self._release(held, Outcome(Status.ERROR, untouched=True))

    # -- for status pages and metrics ----------------------------------------------------------------------

    def queued(self, pool: str) -> int:
        """Requests of the pool that wait for a lease."""
        return self._core.queued(pool)

    def position(self, request_id: str) -> tuple[int, float] | None:
        """Place in the queue (0 = next) and about how many seconds are before it; ``None`` if not queued."""
        return self._core.position(request_id, self._clock())

    def slots(self) -> list[SlotView]:
        """Every slot, as the core sees it."""
        return self._core.slots()

    def host_memory(self, name: str) -> HostMemoryView | None:
        """The prompt cache in host memory of one backend's engine, if it has one and is up."""
        return self._core.host_memory(name)

    def waiting(self) -> list[Request]:
        """Requests that wait for a lease, in the order of their arrival."""
        return self._waiters.requests()

    @property
    def stopping(self) -> bool:
        """Whether it takes no more requests."""
        return self._stopping

    def held(self) -> Mapping[str, Held]:
        """Leases that are out, by request id. Read only."""
        return self._held

    # -- what slots hold, other than by requests -----------------------------------------------------------

    def contents(self, name: str) -> list[Contents]:
        """What the idle slots of a backend are known to hold, to be saved."""
        return self._core.contents(name)

    def observed(self, name: str, slots: Sequence[SlotObservation]) -> None:
        """What a backend says of its slots, other than in the course of requests.

        One at work without a lease is looked at again until it is idle.
        """
        self._core.observe(name, slots, self._clock())
        life = self.fleet.life(name)
        if life is not None and any(seen.processing for seen in slots):
            life.want()
        self._pump()

    def doubted(self, name: str, slots: Iterable[int]) -> None:
        """What these idle slots of a backend hold is not known any more, until it is observed."""
        self._core.doubt(name, slots)

    def outdated(self, name: str, reason: Loss, slots: Iterable[int] | None = None) -> None:
        """What these slots of a backend, or all, hold is of no use any more (other adapters, or emptied)."""
        backend = self.fleet.backend(name)
        if backend is not None:
            self._core.outdate(name, reason, range(backend.slots) if slots is None else slots)

    # -- pools and their policies --------------------------------------------------------------------------

    def add_pool(self, pool: str, settings: CoreSettings) -> None:
        """A pool more, without backends so far."""
        self._core.add_pool(pool, settings)
        self._waiters.add_pool(pool)
        self.fleet.add_pool(pool)

    async def remove_pool(self, pool: str) -> None:
        """A pool less, whose backends were removed; returns when what is cut off there has ended, too.

        Whoever waits for it, and whoever comes, hears at once that it is gone (:class:`PoolRemovedError`).
        """
        self.fleet.remove_pool(pool)
        self._waiters.remove_pool(pool)
        self._waiters.refuse(PoolRemovedError(pool), pool)
        await self.unused(pool)
        self._core.remove_pool(pool)

    async def unused(self, pool: str) -> None:
        """Wait until no request of a pool waits or runs."""
        while self._waiters.any_of(pool) or any(
            held.lease.request.pool == pool for held in self._held.values()
        ):
            self._fewer.clear()
            await self._fewer.wait()

    def reschedule(self, pool: str, settings: CoreSettings) -> None:
        """Another policy for a pool, from now on, for what waits as well. Raises KeyError."""
        self._core.reschedule(pool, settings)
        self._pump()

    def hold_for(self, seconds: float) -> None:
        """Another bound for what waits while its pool has no backend, from now on."""
        self._waiters.hold_for(seconds)

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
        if self._wake is not None:
            self._wake.cancel()
        self._waiters.disarm()
        await self.fleet.aclose()

    def _stop_admission(self) -> None:
        self._stopping = True
        self._waiters.refuse(StoppingError())
        self._waiters.look_again()

    def _refuse_if_stopping(self) -> None:
        if self._stopping:
            raise StoppingError

    def _refuse_if_removed(self, pool: str) -> None:
        if pool not in self.fleet.pools:
            raise PoolRemovedError(pool)

    # -- inside: leases ------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Hand out what the core grants now, and come back when it asks for that."""
        began, now = time.perf_counter(), self._clock()
        unused = True
        while unused:
            unused = False
            for lease in self._core.grant(now):
                waiter = self._waiters.pop(lease.request.id)
                held = self._hold(lease)
                if waiter is None or waiter.lease.done():
                    self._take_back(held, Outcome(Status.CANCELLED, untouched=True))
                    unused = True
                    continue
                waiter.lease.set_result(lease)
                self._observers.granted(lease, time.perf_counter() - began)
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        due = self._core.next_wake(now)
        if due is not None and not self._stopping:
            self._wake = asyncio.get_running_loop().call_later(max(0.001, due - now), self._pump)

    def _hold(self, lease: Lease) -> Held:
        life = self.fleet.life(lease.slot.backend)
        if life is None:
            raise AssertionError("the core gave a lease on a backend that is down")
        held = Held(lease, life, frozenset(ref.slot for ref in (lease.slot, *lease.extra_slots)))
        self._held[lease.request.id] = held
        self._nothing_held.clear()
        life.add(held)
        return held

    def _is_there(self, lease: Lease) -> bool:
        """Whether the engine that a lease was given on is still the one that serves there."""
        return self.fleet.life(lease.slot.backend) is self._held[lease.request.id].life

    def _ours(self, request_id: str) -> Held:
        held = self._held[request_id]
        if held.left is not None:
            raise KeyError(request_id)
        return held

    def _take_back(self, held: Held, outcome: Outcome) -> Report:
        lease, now = held.lease, self._clock()
        there = self._is_there(lease)
        del self._held[lease.request.id]
        held.life.remove(held)
        report = self._core.finish(lease.request.id, outcome, now)
        if there:
            if self._core.is_unified(lease.slot.backend):
                self.fleet.found_unified(lease.slot.backend)
            self.fleet.judge(lease.slot.backend, self._core.host_memory(lease.slot.backend))
        self._observers.finished(lease, report, outcome, now)
        self._demand(lease.request, -1)
        if not self._held:
            self._nothing_held.set()
        surprised = not report.truth_missing and report.predicted_tokens - report.cached_tokens > _SLACK
        if there and (surprised or outcome.engine_error or not held.pinned):
            held.life.want()
        return report

    def _release(self, held: Held, outcome: Outcome) -> Report:
        report = self._take_back(held, outcome)
        self._pump()
        return report

    def _withdraw(self, request_id: str) -> None:
        """Take a request out of the queue; nothing if it is not there (any more)."""
        waiter = self._waiters.pop(request_id)
        if waiter is not None:
            self._core.withdraw(request_id, self._clock())
            self._demand(waiter.request, -1)
            self._pump()

    def _demand(self, request: Request, by: int) -> None:
        now = self._clock()
        self._observers.demanded(request.pool, by, now)
        if by < 0:
            self._fewer.set()

    # -- told by SlotWatch: what an engine says of its slots -----------------------------------------------

    def slots_seen(
        self, life: SlotWatch, free: Sequence[tuple[Held, Outcome]], others: Sequence[SlotObservation]
    ) -> None:
        """Leases that are over by the engine's word, and a look at other slots."""
        for held, outcome in free:
            self._take_back(held, outcome)
        backend = self.fleet.living(life)
        if backend is not None:
            self._core.observe(backend.name, others, self._clock())
        self._pump()

    def slots_hidden(self, life: SlotWatch) -> None:
        """The backend has no ``/slots``."""
        backend = self.fleet.living(life)
        if backend is not None:
            self._core.unobserved(backend.name)

    def slots_unseen(self, life: SlotWatch, error: Exception) -> None:
        """The backend did not answer."""
        backend = self.fleet.living(life)
        if backend is not None:
            log.warning("%s; its /slots cannot be asked", error)
            self.fleet.suspect(backend.name)

    # -- told by Fleet: which backends serve ---------------------------------------------------------------

    def backend_up(
        self, backend: Backend, *, fresh: bool, restored: Sequence[Contents], host: HostMemory | None
    ) -> None:
        """A backend begins a life."""
        name, now = backend.name, self._clock()
        self._core.backend_up(
            *(name, backend.pool, backend.slots, backend.context, now),
            known_empty=fresh,
            host=host,
            unified=backend.unified,
        )
        for contents in restored:
            self._core.believe(name, contents, now)
        self._observers.backend_changed(
            name, up=True, slots=backend.slots, context=backend.context, reason=""
        )
        self.backend_admits(backend)

    def backend_lost(self, backend: Backend, life: SlotWatch, reason: str) -> None:
        """A life of it is over; leases whose answers nobody reads are over with it."""
        self._core.backend_down(backend.name, self._clock())
        for held in [held for held in life.held.values() if held.left is not None]:
            self._take_back(held, held.outcome)
        self._observers.backend_changed(backend.name, up=False, slots=0, context=0, reason=reason)
        self._pool_changed(backend.pool)

    def backend_admits(self, backend: Backend) -> None:
        """Give leases on it again, or no more, for a moment or for good."""
        self._core.backend_admit(backend.name, backend.admits, soon=backend.usable and not backend.draining)
        self._pool_changed(backend.pool)

    def _pool_changed(self, pool: str) -> None:
        self._waiters.pool_serves(pool, serves=self._stopping or self.fleet.serving(pool) is not None)
        self._pump()
