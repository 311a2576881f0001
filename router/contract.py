"""What the dispatcher and the simulator rely on of the core: each method, and what it promises. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .pool_state import Contents
    from .scheduler import CoreSettings
    from .values import (
        HostMemory,
        HostMemoryView,
        Lease,
        Loss,
        Outcome,
        Report,
        Request,
        SlotObservation,
        SlotView,
    )


class QueueFullError(Exception):
    """The pool's queue is at its limit; ``retry_after`` is a hint in seconds."""

    def __init__(self, pool: str, limit: int, retry_after: float) -> None:
        super().__init__(f"pool {pool!r}: {limit} requests are waiting already")
        self.pool, self.limit, self.retry_after = pool, limit, retry_after


class Core(Protocol):
    """What the dispatcher and the simulator rely on."""

    def backend_up(
        self,
        backend: str,
        pool: str,
        slots: int,
        context: int,
        now: float,
        *,
        known_empty: bool,
        host: HostMemory | None = None,
        unified: bool = False,
    ) -> None:
        """A backend serves now with ``slots`` slots of ``context`` tokens each.

        ``known_empty``: freshly started by us; otherwise what it holds is unknown until observed.
        ``host``: its prompt cache in host memory, where it has one and that is known.
        ``unified``: known to have one context of that many tokens, which all slots share.
        """

    def backend_down(self, backend: str, now: float) -> None:
        """A backend is gone with all that its slots held. Leases on it must still be finished."""

    def backend_admit(self, backend: str, admit: bool, *, soon: bool = False) -> None:
        """Stop or resume giving leases on a backend that stays up.

        ``soon``: they will be given again in a moment. Else nobody waits for its slots.
        """

    def reschedule(self, pool: str, settings: CoreSettings) -> None:
        """Order what waits, and all that comes, by another policy. Raises KeyError for an unknown pool."""

    def add_pool(self, pool: str, settings: CoreSettings) -> None:
        """A pool more, without backends."""

    def remove_pool(self, pool: str) -> None:
        """A pool less, of which no backend is up, nothing waits and no lease is out. Raises KeyError."""

    def contents(self, backend: str) -> list[Contents]:
        """What the idle slots of a backend are known to hold; nothing for one that is not up."""

    def believe(self, backend: str, contents: Contents, now: float) -> None:
        """A slot that was empty holds this again, unverified until a request has reused it."""

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises :class:`QueueFullError`."""

    def withdraw(self, request_id: str, now: float) -> None:
        """Take a request that has no lease out of the queue (the client left). Unknown ids are ignored."""

    def grant(self, now: float) -> list[Lease]:
        """All leases that may start now. Every lease names slots that are known to be idle."""

    def next_wake(self, now: float) -> float | None:
        """When ``grant`` could answer differently though nothing happens (a bound, a linger), or ``None``."""

    def first_token(self, request_id: str, now: float) -> None:
        """The prefill of a leased request is over, it decodes now."""

    def finish(self, request_id: str, outcome: Outcome, now: float) -> Report:
        """The engine says that the slot of this lease is free. Exactly once for each lease, else KeyError."""

    def observe(self, backend: str, slots: Sequence[SlotObservation], now: float) -> None:
        """Compare the picture with the engine's ``/slots``; foreign traffic makes a slot unknown.

        A slot that is at work without a lease of ours is given to nobody until it is seen idle.
        """

    def doubt(self, backend: str, slots: Iterable[int]) -> None:
        """What these slots hold is changed by something that is no request; leased ones are left alone."""

    def outdate(self, backend: str, reason: Loss, slots: Iterable[int]) -> None:
        """What these slots of a backend hold is of no use to any request to come."""

    def unobserved(self, backend: str) -> None:
        """The engine's ``/slots`` tells nothing any more: no slot is taken to be somebody else's."""

    def queued(self, pool: str) -> int:
        """Requests waiting for a lease."""

    def position(self, request_id: str, now: float) -> tuple[int, float] | None:
        """Place in the queue (0 = next) and an estimate of the wait in seconds; ``None`` if not queued."""

    def is_unified(self, backend: str) -> bool:
        """Whether its slots are known to share one context (told, or seen by what it ran out of)."""

    def slots(self) -> list[SlotView]:
        """Every slot of every backend, for status pages and metrics."""

    def host_memory(self, backend: str) -> HostMemoryView | None:
        """The engine's prompt cache in host memory; ``None`` if it has none or is not up."""
