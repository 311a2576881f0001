"""The backends of all pools: which there are, which serve, and how each is reached.

Whoever launches engines tells of them here, and :meth:`Fleet.watch_remote` looks after one that runs
elsewhere. Nothing is decided here: what it means for slots, queue and leases, the owner of those is told, and
acts on it before anything else happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from .backend import EngineBroke, EngineClient
from .backends import Backend, NoBackendError
from .health import HealthWatch
from .settling import Owner as LeaseOwner
from .settling import SlotWatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from .core import Contents
    from .observer import Audience
    from .settling import Timing
    from .values import HostMemory, HostMemoryView

log = logging.getLogger("warmslot.router")

Connect = Callable[[str, str], EngineClient]
"""Makes the client of a backend from its name and address."""


class Owner(LeaseOwner, Protocol):
    """Who owns slots, queue and trie: the dispatcher. It acts on each word at once, without waiting."""

    def backend_up(
        self, backend: Backend, *, fresh: bool, restored: Sequence[Contents], host: HostMemory | None
    ) -> None:
        """It serves: a new life, on which nothing was given out yet."""

    def backend_lost(self, backend: Backend, life: SlotWatch, reason: str) -> None:
        """That life of it is over, with all that its slots held."""

    def backend_admits(self, backend: Backend) -> None:
        """Whether leases may be given on it (:attr:`~.backends.Backend.admits`) may have changed."""


class Guard(Protocol):
    """Who has a say in whether a backend that is up may be used."""

    def objection(self, backend: Backend) -> str:
        """Why not, in words; empty where nothing is against it. Asked whenever it would be used again.

        Who objects sees to it that the reason ends, and says so by :meth:`Fleet.readmit`.
        """

    async def tried(self, backend: Backend) -> None:
        """Wait until what was objected to is mended, or a first try to mend it has failed."""

    def mark(self, backend: Backend) -> str:
        """Of the LoRA scales that it should have."""

    def pool_removed(self, pool: str) -> None:
        """What is known of a pool is of no use any more."""

    async def aclose(self) -> None:
        """End what is under way."""


class Fleet:
    """The backends by pool. ``pools`` maps each pool to the names of its backends, all down at first.

    All methods belong to one event loop; where a name is unknown they raise KeyError, unless said otherwise.
    """

    def __init__(
        self,
        owner: Owner,
        pools: Mapping[str, Sequence[str]],
        *,
        connect: Connect,
        audience: Audience,
        timing: Timing,
        clock: Callable[[], float],
    ) -> None:
        self._owner = owner
        self._connect = connect
        self._audience = audience
        self._timing = timing
        self._clock = clock
        self._guard: Guard | None = None
        self._backends: dict[str, Backend] = {}
        self._pools: dict[str, list[Backend]] = {pool: [] for pool in pools}
        self._closing: set[asyncio.Task[None]] = set()
        for pool, names in pools.items():
            for name in names:
                self.add_backend(name, pool)

    # -- which there are -----------------------------------------------------------------------------------

    @property
    def pools(self) -> Mapping[str, Sequence[Backend]]:
        """Every pool with its backends. Read only."""
        return self._pools

    def backend(self, name: str) -> Backend | None:
        """One backend by name; ``None`` if there is none. Read only."""
        return self._backends.get(name)

    def life(self, name: str) -> SlotWatch | None:
        """A backend's life; ``None`` while it is down, and once it was removed."""
        backend = self._backends.get(name)
        return None if backend is None else backend.life

    def living(self, life: SlotWatch) -> Backend | None:
        """The backend whose life this is; ``None`` once that is over."""
        return next((backend for backend in self._backends.values() if backend.life is life), None)

    def serving(self, pool: str) -> EngineClient | None:
        """A backend of the pool that serves and is not suspected, if any; unknown pools have none."""
        backends = self._pools.get(pool, ())
        return next((one.client for one in backends if one.usable and one.client is not None), None)

    def add_pool(self, pool: str) -> None:
        """A pool more, without backends so far."""
        self._pools[pool] = []

    def remove_pool(self, pool: str) -> None:
        """A pool less, whose backends were removed."""
        del self._pools[pool]
        if self._guard is not None:
            self._guard.pool_removed(pool)

    def add_backend(self, name: str, pool: str) -> None:
        """A backend more, that is down until it is reported as ready."""
        backend = self._backends[name] = Backend(name, pool)
        self._pools[pool].append(backend)

    def shares_context(self, name: str) -> None:
        """Whenever it is up, all slots of a backend share one context."""
        self._backends[name].unified = True

    async def remove_backend(self, name: str) -> None:
        """A backend less. What it serves should have ended (:meth:`backend_draining`): it is cut off else."""
        backend = self._backends[name]
        self._take_down(backend, "removed")
        del self._backends[name]
        self._pools[backend.pool].remove(backend)
        if backend.watch is not None:
            await backend.watch.aclose()

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
        restored_with: str = "",
        host: HostMemory | None = None,
    ) -> None:
        """A backend serves at ``url``. ``fresh``: all of its slots are empty, but for those ``restored``.

        ``restored_with``: the mark of the LoRA scales with which those were computed (:meth:`mark_of`).
        ``host``: its prompt cache in host memory, where it has one.

        Returns when it may be used, or a first try to make that so has failed. A second report of the same
        service changes nothing.
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
        backend.life = SlotWatch(client, self._owner, self._timing, self._clock, slots)
        if not fresh:
            backend.life.want()
        backend.scales = "" if fresh else None
        backend.filled_with = restored_with if fresh else None
        guard = self._guard
        if guard is not None:
            backend.withheld = guard.objection(backend)
        self._owner.backend_up(backend, fresh=fresh, restored=restored, host=host)
        if guard is not None and backend.withheld:
            await guard.tried(backend)

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
        self._admit(backend)
        try:
            await life.idle.wait()
        except asyncio.CancelledError:
            if backend.life is life:
                backend.draining = False
                self._admit(backend)
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
        backend.alone = True
        self._admit(backend)
        try:
            await life.idle.wait()
            yield client
        finally:
            if backend.life is life:
                backend.alone = False
                self._admit(backend)

    def log_event(self, name: str, event: object) -> None:
        """A line of a launched engine's log, understood.

        Selections are counted, and betray those who use the engine past the router; releases hasten a look.
        Events are told apart by their fields: a selection has ``by``, a release ``slot`` and ``truncated``.
        """
        by = getattr(event, "by", None)
        if isinstance(by, str):
            self._audience.engine_selected(name, by)
        slot, life = getattr(event, "slot", None), self.life(name)
        if not isinstance(slot, int) or life is None:
            return
        if isinstance(by, str):
            life.selected(slot)
        elif hasattr(event, "truncated"):
            life.released(slot)

    # -- for whoever has a say in the use of backends ------------------------------------------------------

    def guarded_by(self, guard: Guard) -> None:
        """Ask this one from now on before a backend is used."""
        self._guard = guard

    def readmit(self, name: str) -> None:
        """Something that stood against using a backend may be over. Unknown ones are ignored."""
        backend = self._backends.get(name)
        if backend is not None:
            self._admit(backend)

    def mark_of(self, name: str) -> str:
        """The mark of the LoRA scales that a backend should have."""
        return "" if self._guard is None else self._guard.mark(self._backends[name])

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

    # -- for whoever uses a backend ------------------------------------------------------------------------

    def suspect(self, name: str) -> None:
        """A backend refused or broke a connection: no leases on it until its ``/health`` answers.

        Unknown names, and those of backends that are down or suspected already, are ignored.
        """
        backend = self._backends.get(name)
        if backend is None or not backend.up or backend.suspected or backend.client is None:
            return
        if backend.watch is None:
            backend.watch = HealthWatch(
                backend.client,
                self._timing.health,
                is_up=lambda: backend.up,
                trusted=lambda: self._trust(backend),
            )
        backend.watch.suspect()
        self._owner.backend_admits(backend)

    def found_unified(self, name: str) -> None:
        """A backend's slots share one context, as its engine's failure shows; said when it is news."""
        backend = self._backends[name]
        if not backend.unified:
            backend.unified = True
            log.warning(
                "backend %s had no room for all that ran there: its slots share one context. From now on "
                "what may not fit beside others waits (setting kv_unified; its --no-kv-unified mends it)",
                name,
            )

    def judge(self, name: str, seen: HostMemoryView | None) -> None:
        """Say whether an engine's cache in host memory saves time, once that is known and when it changes."""
        backend = self._backends[name]
        if seen is None or seen.pays is None or seen.copy_seconds is None or seen.pays is backend.copies_pay:
            return
        backend.copies_pay = seen.pays
        log.info(
            "backend %s: cache_ram %s: 1,000 tokens are saved and loaded in %.3f s and computed in %.3f s",
            *(backend.name, "pays" if seen.pays else "does not pay"),
            *(2000 * seen.copy_seconds, 1000 * seen.prefill_seconds),
        )

    async def aclose(self) -> None:
        """Look after no backend any more, and close every connection."""
        if self._guard is not None:
            await self._guard.aclose()
        for backend in self._backends.values():
            if backend.life is not None:
                backend.life.stop()
            if backend.watch is not None:
                await backend.watch.aclose()
            self._retire(backend)
        await asyncio.gather(*self._closing)

    # -- inside --------------------------------------------------------------------------------------------

    def _take_down(self, backend: Backend, reason: str) -> None:
        life = backend.life
        if life is None:
            return
        log.warning("backend %s is down: %s", backend.name, reason)
        life.stop()
        backend.life = None
        backend.draining = backend.alone = False
        backend.withheld, backend.scales, backend.filled_with = "", None, None
        if backend.watch is not None and not backend.watch.lasting:
            backend.watch.stop()
            backend.watch = None
        self._retire(backend)
        self._owner.backend_lost(backend, life, reason)

    def _trust(self, backend: Backend) -> None:
        """It answers again. It may have been started anew in between, so nothing of it is taken for known."""
        if backend.life is not None:
            backend.scales = None
            backend.life.want()
            self._admit(backend)

    def _admit(self, backend: Backend) -> None:
        """Have leases given on it from now on, or no more: as all that is known of it says."""
        if backend.life is not None:
            if self._guard is not None:
                backend.withheld = self._guard.objection(backend)
            self._owner.backend_admits(backend)

    def _retire(self, backend: Backend) -> None:
        client, backend.client = backend.client, None
        if client is not None:
            task = asyncio.get_running_loop().create_task(client.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
