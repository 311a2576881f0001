"""The pure core: everything that is decided, and nothing that waits.

One object owns slots, queue and trie. Every method is synchronous and deterministic given its arguments;
time comes in as ``now`` (monotonic seconds). The dispatcher drives it with real engines, the simulator with
modelled ones: the same code routes in both.

The life of a request: ``submit`` -> (``withdraw`` | a ``Lease`` from ``grant``) -> ``first_token`` ->
``finish``.
After any call, ask ``grant`` for what may start now and ``next_wake`` for when to ask again unprompted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .values import Lease, Outcome, Report, Request, SlotObservation, SlotView


class QueueFullError(Exception):
    """The pool's queue is at its limit; ``retry_after`` is a hint in seconds."""

    def __init__(self, pool: str, limit: int, retry_after: float) -> None:
        super().__init__(f"pool {pool!r}: {limit} requests are waiting already")
        self.pool, self.limit, self.retry_after = pool, limit, retry_after


class Core(Protocol):
    """What the dispatcher and the simulator rely on."""

    def backend_up(
        self, backend: str, pool: str, slots: int, context: int, now: float, *, known_empty: bool
    ) -> None:
        """A backend serves now with ``slots`` slots of ``context`` tokens each.

        ``known_empty``: freshly started by us; otherwise what it holds is unknown until observed.
        """

    def backend_down(self, backend: str, now: float) -> None:
        """A backend is gone with all that its slots held. Leases on it must still be finished."""

    def backend_admit(self, backend: str, admit: bool) -> None:
        """Stop (drain) or resume giving leases on a backend that stays up."""

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
        """The engine says that the slot of this lease is free. Once for each lease; KeyError else."""

    def observe(self, backend: str, slots: Sequence[SlotObservation], now: float) -> None:
        """Compare the picture with the engine's ``/slots``; foreign traffic makes a slot unknown."""

    def queued(self, pool: str) -> int:
        """Requests waiting for a lease."""

    def position(self, request_id: str) -> tuple[int, float] | None:
        """Place in the queue (0 = next) and an estimate of the wait in seconds; ``None`` if not queued."""

    def slots(self) -> list[SlotView]:
        """Every slot of every backend, for status pages and metrics."""
