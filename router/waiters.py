"""Who waits for a lease, and until when while a pool has no backend that serves.

The queue itself, and who goes next in it, is the core's. Here are those that await its answer, and the pools
of which no answer can come: since when, who hopes that one serves again, and for how much longer.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .backends import NoBackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .values import Lease, Request


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits, and what its taker awaits."""

    request: Request
    lease: asyncio.Future[Lease]
    since: float
    """When it came (clock time)."""


class Waiters:
    """The requests of all pools that wait for a lease, in the order of their arrival.

    ``withdraw`` takes a request out of the queue and out of here (:meth:`pop`); ``hold`` are the seconds that
    one waits for a pool without a backend, counted from its arrival or from when the last one was lost.
    """

    def __init__(self, withdraw: Callable[[str], None], hold: float, clock: Callable[[], float]) -> None:
        self._withdraw = withdraw
        self._hold = hold
        self._clock = clock
        self._waiting: dict[str, Waiter] = {}
        self._serves: dict[str, asyncio.Event] = {}
        """Of each pool, set while a backend of it serves."""
        self._down_since: dict[str, float] = {}
        """Of each pool without one, when the last was lost."""
        self._expiry: asyncio.TimerHandle | None = None

    # -- requests ------------------------------------------------------------------------------------------

    def enter(self, request: Request, now: float) -> Waiter:
        """A request that is in the queue now."""
        waiter = Waiter(request, asyncio.get_running_loop().create_future(), now)
        self._waiting[request.id] = waiter
        return waiter

    def pop(self, request_id: str) -> Waiter | None:
        """It has a lease, or left the queue: it does not wait any more. ``None`` if it did not wait."""
        return self._waiting.pop(request_id, None)

    def requests(self) -> list[Request]:
        """All that wait, in the order of their arrival."""
        return [waiter.request for waiter in self._waiting.values()]

    def any_of(self, pool: str) -> bool:
        """Whether a request of the pool waits."""
        return any(waiter.request.pool == pool for waiter in self._waiting.values())

    def refuse(self, error: Exception, pool: str | None = None) -> None:
        """Send away all that wait, or those of one pool, with this error."""
        for waiter in list(self._waiting.values()):
            if pool is None or waiter.request.pool == pool:
                self._fail(waiter, error)

    def _fail(self, waiter: Waiter, error: Exception) -> None:
        self._withdraw(waiter.request.id)
        if not waiter.lease.done():
            waiter.lease.set_exception(error)

    # -- pools without a backend ---------------------------------------------------------------------------

    def add_pool(self, pool: str) -> None:
        """A pool more, without backends so far."""
        self._serves[pool] = asyncio.Event()
        self._down_since[pool] = self._clock()

    def remove_pool(self, pool: str) -> None:
        """A pool less; whoever hopes that it serves looks again."""
        self._serves.pop(pool).set()
        self._down_since.pop(pool, None)

    def pool_serves(self, pool: str, *, serves: bool) -> None:
        """Whether a backend of the pool serves now; said again, it changes nothing."""
        if serves:
            self._serves[pool].set()
            self._down_since.pop(pool, None)
        else:
            self._serves[pool].clear()
            self._down_since.setdefault(pool, self._clock())
        self.arm()

    def look_again(self) -> None:
        """Whoever hopes that a pool serves (:meth:`serving`) should see what else has become of it."""
        for event in self._serves.values():
            event.set()

    async def serving(self, pool: str, since: float) -> None:
        """Wait until a backend of the pool serves, or it is worth looking again why none does.

        Raises :class:`NoBackendError` when it has taken as long as one waits that came at ``since``.
        """
        try:
            async with asyncio.timeout(since + self._hold - self._clock()):
                await self._serves[pool].wait()
        except TimeoutError:
            raise NoBackendError(pool, self._hold) from None

    def hold_for(self, seconds: float) -> None:
        """Another bound for what waits while its pool has no backend, from now on."""
        self._hold = seconds
        self.arm()

    def arm(self) -> None:
        """Set the one timer, for the next that will have waited long enough for a pool without a backend."""
        self.disarm()
        if not self._down_since:
            return
        due = min((self._expires(waiter) for waiter in self._waiting.values()), default=math.inf)
        if due < math.inf:
            delay = max(0.0, due - self._clock())
            self._expiry = asyncio.get_running_loop().call_later(delay, self._expire)

    def disarm(self) -> None:
        """No request is sent away by the clock any more."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expires(self, waiter: Waiter) -> float:
        down = self._down_since.get(waiter.request.pool)
        return math.inf if down is None else max(down, waiter.since) + self._hold

    def _expire(self) -> None:
        now = self._clock()
        for waiter in [one for one in self._waiting.values() if self._expires(one) <= now]:
            self._fail(waiter, NoBackendError(waiter.request.pool, self._hold))
        self.arm()
