"""What the live page shows: every slot, what runs and waits now, and the last minutes. No text of prompts.

:class:`Live` is told what happens, as any observer, and keeps sums of the last quarter of an hour, and of the
last hour by minutes. A snapshot is plain data for JSON. Its times are seconds since the epoch, so that it is
the same while nothing happens.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .shadow import COUNTS, UNBOUNDED
from .values import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .advice import Advised
    from .backends import Backend
    from .dispatcher import Dispatcher
    from .settling import Held
    from .values import HostMemoryView, Lease, Outcome, Report, Request, SlotView

WIDTH = 15.0
"""Seconds that one column of the page's history covers."""

COLUMNS = 60
"""Columns that are kept."""

HOUR = 60
"""Minutes that are kept for the sums of the last hour."""

FINISHED = 12
"""Finished requests, and events of backends, that are kept."""

WAITING = 50
"""Waiting requests of a pool that are listed; the others are counted."""

SHADOW = (*map(str, COUNTS), UNBOUNDED)
"""Slot counts that reuse is modelled for."""

_SUMS = ("requests", "cached", "processed", "predicted", *(loss.value for loss in Loss))
_ALL_SUMS = (*_SUMS, *(f"slots {count}" for count in SHADOW))
_HOUR_SUMS = ("requests", "cached", "processed")
_GROUPS = 256


class History:
    """Sums of one backend over the last ``columns`` times ``width`` seconds."""

    def __init__(
        self, width: float = WIDTH, columns: int = COLUMNS, names: Sequence[str] = _ALL_SUMS
    ) -> None:
        self._width, self._most, self._names = width, columns, names
        self._columns: deque[tuple[int, dict[str, int]]] = deque(maxlen=columns)

    def add(self, now: float, sums: Mapping[str, int]) -> None:
        """Count at ``now``, which never falls."""
        column = int(now // self._width)
        if not self._columns or self._columns[-1][0] != column:
            self._columns.append((column, dict.fromkeys(self._names, 0)))
        kept = self._columns[-1][1]
        for name, value in sums.items():
            if name in kept:
                kept[name] += value

    def columns(self, now: float) -> dict[int, dict[str, int]]:
        """What is kept by its age in columns: 0 is the column of ``now``."""
        last = int(now // self._width)
        return {last - column: sums for column, sums in self._columns if last - column < self._most}


class Live:
    """Follows one dispatcher. Lives on its event loop; ``epoch`` gives the time of day."""

    def __init__(
        self,
        pools: Mapping[str, Sequence[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
        epoch: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._offset = epoch() - clock()
        self._started = clock()
        self._pools: dict[str, list[str]] = {}
        self._history: dict[str, History] = {}
        self._hour: dict[str, History] = {}
        self._finished: deque[dict[str, Any]] = deque(maxlen=FINISHED)
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=1000)
        self._events: deque[dict[str, Any]] = deque(maxlen=FINISHED)
        self._restarts: dict[str, int] = {}
        self._was_down: set[str] = set()
        self._groups: dict[str, int] = {}
        self._advised: dict[str, Advised] = {}
        self.follow(pools)

    def follow(self, pools: Mapping[str, Sequence[str]]) -> None:
        """From now on there are these pools with these backends."""
        self._pools = {pool: list(names) for pool, names in pools.items()}
        known = {name for names in pools.values() for name in names}
        self._advised = {name: found for name, found in self._advised.items() if name in known}
        for name in (name for names in pools.values() for name in names):
            self._history.setdefault(name, History())
            self._hour.setdefault(name, History(60.0, HOUR, _HOUR_SUMS))
            self._restarts.setdefault(name, 0)

    def advise(self, advised: Mapping[str, Advised]) -> None:
        """What an advisor found, by backend."""
        self._advised |= advised

    # -- told by the dispatcher ----------------------------------------------------------------------------

    def demanded(self, pool: str, by: int, now: float) -> None:
        """What waits is read when it is shown."""

    def granted(self, lease: Lease, decision_seconds: float) -> None:
        """What runs is read when it is shown."""

    def decoding(self, lease: Lease, now: float) -> None:
        """What runs is read when it is shown."""

    def finished(self, lease: Lease, report: Report, outcome: Outcome, now: float) -> None:
        """A lease was taken back."""
        losses = {loss.value: tokens for loss, tokens in report.losses.items() if tokens}
        if not report.truth_missing:
            sums = {
                "requests": 1,
                "cached": report.cached_tokens,
                "processed": report.processed_tokens,
                "predicted": report.predicted_tokens,
                **losses,
                **{f"slots {count}": tokens for count, tokens in report.shadow.items()},
            }
            self._history[report.slot.backend].add(now, sums)
            self._hour[report.slot.backend].add(now, sums)
        first_token = None if outcome.ttft_seconds is None else round(outcome.ttft_seconds, 3)
        if first_token is not None:
            self._first_tokens.append((now, first_token))
        self._finished.appendleft(
            {
                "at": self._time(now),
                "backend": report.slot.backend,
                "slot": report.slot.slot,
                "route": report.request.route,
                "client": report.request.client,
                "status": report.status,
                "decision": report.decision,
                "predicted": report.predicted_tokens,
                "cached": None if report.truth_missing else report.cached_tokens,
                "processed": None if report.truth_missing else report.processed_tokens,
                "output": report.output_tokens,
                "losses": losses,
                "queued": round(report.queue_seconds, 3),
                "first_token": first_token,
                "took": round(now - lease.request.arrived, 3),
            }
        )

    def backend_changed(self, backend: str, *, up: bool, slots: int, context: int, reason: str) -> None:
        """A backend came up or went down."""
        if not up:
            self._was_down.add(backend)
        elif backend in self._was_down:
            self._was_down.discard(backend)
            self._restarts[backend] += 1
        at = self._time(self._clock())
        event = {"at": at, "backend": backend, "up": up, "slots": slots, "context": context}
        self._events.appendleft({**event, "reason": reason[:200]})

    def engine_selected(self, backend: str, by: str) -> None:
        """Shown by metrics only."""

    # -- for the page --------------------------------------------------------------------------------------

    def snapshot(self, dispatcher: Dispatcher) -> dict[str, Any]:
        """Everything that the page shows, as it is now."""
        now = self._clock()
        slots: dict[str, list[SlotView]] = {}
        for view in dispatcher.slots():
            slots.setdefault(view.ref.backend, []).append(view)
        self._number_groups([view.shared_group for views in slots.values() for view in views])
        held = dispatcher.held()
        waiting: dict[str, list[Request]] = {pool: [] for pool in self._pools}
        for request in dispatcher.waiting():
            waiting[request.pool].append(request)
        return {
            "started": self._time(self._started),
            "column_seconds": WIDTH,
            "pools": [
                {
                    "name": pool,
                    "waiting": len(waiting[pool]),
                    "queue": [self._waiting(request) for request in waiting[pool][:WAITING]],
                    "history": self._pool_history(pool, now),
                    "slots": sum(len(slots.get(name, ())) for name in self._pools[pool]),
                    "hour": self._last_hour(pool, now),
                    "by_slots": self._by_slots(pool, now),
                }
                for pool in self._pools
            ],
            "backends": [
                {
                    "name": backend.name,
                    "pool": pool,
                    "state": _state(backend),
                    "context": backend.context if backend.up else 0,
                    "restarts": self._restarts[backend.name],
                    "slots": [self._slot(view, held) for view in slots.get(backend.name, ())],
                    "sums": self._sums(backend.name, now),
                    "host_memory": _host_memory(dispatcher.host_memory(backend.name)),
                    "advised": _advised(self._advised.get(backend.name)),
                }
                for pool, backends in dispatcher.fleet.pools.items()
                for backend in backends
            ],
            "first_token": self._first_token(now),
            "finished": list(self._finished),
            "events": list(self._events),
        }

    def _time(self, now: float) -> float:
        return round(now + self._offset, 1)

    def _waiting(self, request: Request) -> dict[str, Any]:
        return {
            "since": self._time(request.arrived),
            "route": request.route,
            "client": request.client,
            "priority": request.priority,
            "tokens": request.prompt.tokens,
            "bytes": request.prompt.length,
        }

    def _slot(self, view: SlotView, held: Mapping[str, Held]) -> dict[str, Any]:
        running = None if view.request is None else held.get(view.request)
        return {
            "slot": view.ref.slot,
            "tokens": view.resident_tokens,
            "shared": view.shared_tokens,
            "group": self._groups.get(view.shared_group),
            "known": view.known,
            "conversation": _tag(view.session),
            "used": self._time(view.last_used) if view.last_used else None,
            "running": None if running is None else self._running(running),
        }

    def _running(self, held: Held) -> dict[str, Any]:
        lease = held.lease
        phase = "left" if held.left is not None else "decode" if held.decoding else "prefill"
        return {
            "since": self._time(lease.granted),
            "phase": phase,
            "route": lease.request.route,
            "client": lease.request.client,
            "decision": lease.decision,
            "prompt": lease.prompt_tokens,
            "predicted": lease.predicted_tokens,
        }

    def _pool_history(self, pool: str, now: float) -> dict[str, list[int]]:
        """Sums by column, the oldest first."""
        sums = {name: [0] * COLUMNS for name in _SUMS}
        for backend in self._pools[pool]:
            for age, column in self._history[backend].columns(now).items():
                for name in _SUMS:
                    sums[name][COLUMNS - 1 - age] += column[name]
        return sums

    def _last_hour(self, pool: str, now: float) -> dict[str, int]:
        """Sums of the minute of ``now`` and the 59 before it."""
        columns = [column for name in self._pools[pool] for column in self._hour[name].columns(now).values()]
        return {name: sum(column[name] for column in columns) for name in _HOUR_SUMS}

    def _by_slots(self, pool: str, now: float) -> dict[str, int]:
        """Tokens that would have been reused with other slot counts in the pool."""
        columns = [
            column for backend in self._pools[pool] for column in self._history[backend].columns(now).values()
        ]
        return {count: sum(column[f"slots {count}"] for column in columns) for count in SHADOW}

    def _sums(self, backend: str, now: float) -> dict[str, int]:
        columns = self._history[backend].columns(now).values()
        return {
            name: sum(column[name] for column in columns) for name in ("cached", "processed", "predicted")
        }

    def _first_token(self, now: float) -> dict[str, float] | None:
        recent = [seconds for at, seconds in self._first_tokens if now - at < WIDTH * COLUMNS]
        if not recent:
            return None
        return {"median": round(statistics.median(recent), 3), "worst": max(recent)}

    def _number_groups(self, groups: list[str]) -> None:
        """Small numbers for groups of slots that share a prefix; a group keeps its number while it lasts."""
        present = {group for group in groups if group}
        self._groups = {group: number for group, number in self._groups.items() if group in present}
        free = iter(sorted(set(range(_GROUPS)) - set(self._groups.values())))
        for group in groups:
            if group and group not in self._groups:
                number = next(free, None)
                if number is None:
                    return
                self._groups[group] = number


def _state(backend: Backend) -> str:
    if not backend.up:
        return "down"
    return "draining" if backend.draining else "withheld" if backend.withheld else "up"


def _host_memory(seen: HostMemoryView | None) -> dict[str, Any] | None:
    return None if seen is None else {"contexts": seen.entries, "tokens": seen.tokens, "pays": seen.pays}


def _advised(found: Advised | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def _tag(session: str) -> str:
    """A short name for a conversation that tells nothing of what a client called it."""
    return hashlib.blake2b(session.encode(), digest_size=2).hexdigest() if session else ""
