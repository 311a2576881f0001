"""Who is told what happens to requests and backends: metrics, a journal."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .values import Lease, Outcome, Report

log = logging.getLogger("warmslot.router")


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


class Audience:
    """Several observers as one. Of one that raises it is only logged: nothing else depends on it."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def demanded(self, pool: str, by: int, now: float) -> None:
        """See :class:`Observer`; so for all others."""
        self._tell(lambda one: one.demanded(pool, by, now))

    def granted(self, lease: Lease, decision_seconds: float) -> None:
        """Tell all."""
        self._tell(lambda one: one.granted(lease, decision_seconds))

    def decoding(self, lease: Lease, now: float) -> None:
        """Tell all."""
        self._tell(lambda one: one.decoding(lease, now))

    def finished(self, lease: Lease, report: Report, outcome: Outcome, now: float) -> None:
        """Tell all."""
        self._tell(lambda one: one.finished(lease, report, outcome, now))

    def backend_changed(self, backend: str, *, up: bool, slots: int, context: int, reason: str) -> None:
        """Tell all."""
        self._tell(
            lambda one: one.backend_changed(backend, up=up, slots=slots, context=context, reason=reason)
        )

    def engine_selected(self, backend: str, by: str) -> None:
        """Tell all."""
        self._tell(lambda one: one.engine_selected(backend, by))

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                what(observer)
            except Exception:
                log.exception("%s failed over what it was told", type(observer).__name__)
