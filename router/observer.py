"""Who is told what happens to requests and backends: metrics, a journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .values import Lease, Outcome, Report


class Observer(Protocol):
    """Is told what happens, as it happens. Must not raise, wait or call back."""

    def demanded(self, pool: str, by: int, now: float) -> None:
        """So many more (or fewer) requests of a pool are queued or in flight."""

    def granted(self, lease: Lease, decision_seconds: float) -> None:
        """A lease was given out; the core took ``decision_seconds`` to find it."""

    def decoding(self, lease: Lease, now: float) -> None:
        """A leased request has its first token."""

    def finished(self, lease: Lease, report: Report, outcome: Outcome, now: float) -> None:
        """A lease was taken back."""

    def backend_changed(self, backend: str, *, up: bool, slots: int, context: int, reason: str) -> None:
        """A backend came up or went down."""

    def engine_selected(self, backend: str, by: str) -> None:
        """The engine's log told how it chose a slot (``id``, ``lcp``, ``lru``)."""
