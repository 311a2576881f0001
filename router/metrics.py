"""The router's own metrics; the only importer of ``prometheus_client``.

Every series of a known label set exists from the first scrape. Labels are bounded: names from the
configuration and enums; any other client is ``other``. ``none`` stands for a backend or pool that a request
never came to.
"""

from __future__ import annotations

import time
from collections import Counter as Counted
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)

from .auth import ANYONE
from .curves import BLOCK_NAMES, LEVEL_NAMES, DecodeLevels, DemandClock, PrefillCurve
from .exposition import Exposition, Family
from .values import Decision, Loss, Route, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .advice import Advised
    from .dispatcher import Dispatcher
    from .generation import Passage
    from .journal import Journal
    from .values import Lease, Outcome, Report, SlotRef

NONE = "none"
"""Label value of a request that came to no backend, or to no pool."""

REUSE = ("cached", "processed")
JOURNALED = ("written", "dropped")
SELECTIONS = ("id", "lcp", "lru")
RESTARTS = ("exited", "health", "replaced", "stopped")

_FIRST_TOKEN = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_DURATION = (*_FIRST_TOKEN, 300, 600)
_QUEUE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 300)
_PER_TOKEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_LENGTH = tuple(float(2**power) for power in range(8, 21))
_DECISION = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)


SHADOW_SLOTS = ("1", "2", "4", "8", "16", "32", "unbounded")
"""Slot counts that reuse is modelled for."""


class Definition(NamedTuple):
    """One metric of the catalogue."""

    name: str
    """Without the prefix ``warmslot_``; counters end in ``_total``."""
    kind: str
    """``counter``, ``gauge`` or ``histogram``."""
    labels: tuple[str, ...]
    text: str


def catalogue() -> list[Definition]:
    """Every metric that a router exports."""
    return [
        Definition(family.name.removeprefix("warmslot_"), family.kind, family.labels, family.text)
        for family in Metrics({}).families
    ]


class Metrics:
    """Counts what the dispatcher and the handlers tell. Lives on the event loop; only :meth:`text` may not.

    ``pools`` maps each pool to its backends, ``slots`` a backend to its slot count where that is known before
    it starts, ``clients`` are the names that the ``client`` label may take beside ``other``.
    """

    def __init__(
        self,
        pools: Mapping[str, Sequence[str]],
        *,
        slots: Mapping[str, int] | None = None,
        clients: Iterable[str] = (),
        now: float | None = None,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._pools: dict[str, list[str]] = {}
        self._backends: set[str] = set()
        self._clients = {ANYONE}
        start = time.monotonic() if now is None else now
        self._curves: dict[str, PrefillCurve] = {}
        self._levels: dict[str, DecodeLevels] = {}
        self._demand: dict[str, DemandClock] = {}
        self._exported: dict[tuple[object, ...], float] = {}
        self._busy_since: dict[SlotRef, float] = {}
        self._went_down: dict[str, str] = {}
        self._resident_seen: set[SlotRef] = set()
        self._journal: Journal | None = None
        self._families: list[Family] = []
        self._define()
        self._exposition = Exposition(self._families)
        self.overflow.labels("client")
        for status in Status:
            self.requests.labels(NONE, NONE, Route.OTHER, status)
        self.admit({*clients, ANYONE})
        self.follow(pools, start)
        for name, count in (slots or {}).items():
            for slot in range(count):
                self._create_slot(name, slot)

    def admit(self, clients: Iterable[str]) -> None:
        """Names that the ``client`` label may take as well."""
        for client in sorted(clients):
            self._clients.add(client)
            for reuse in REUSE:
                self.client_tokens.labels(client, reuse)

    def follow(self, pools: Mapping[str, Sequence[str]], now: float | None = None) -> None:
        """From now on there are these pools with these backends; what was counted of others stays.

        Gauges of others vanish: they tell what is, and an alert on ``backend_up`` is not meant for them.
        """
        now = time.monotonic() if now is None else now
        for pool in self._pools.keys() - pools.keys():
            self.queued.remove(pool)
        self._pools = {pool: list(names) for pool, names in pools.items()}
        backends = {name: pool for pool, names in pools.items() for name in names}
        for pool in pools.keys() - self._demand.keys():
            self._demand[pool] = DemandClock(now)
            self._create_pool(pool)
        for name in backends.keys() - self._backends:
            self._curves.setdefault(name, PrefillCurve())
            self._levels.setdefault(name, DecodeLevels(now))
            self._create_backend(backends[name], name)
        for name in self._backends - backends.keys():
            self._went_down.pop(name, None)
            for gauge in (self.inflight, self.up, self.slots, self.context, self.advised):
                gauge.remove(name)
            self.resident.remove_by_labels({"backend": name})
            self._resident_seen = {ref for ref in self._resident_seen if ref.backend != name}
        self._backends = set(backends)

    def watch(self, journal: Journal) -> None:
        """Count what the journal writes and drops."""
        self._journal = journal

    def advise(self, advised: Mapping[str, Advised]) -> None:
        """What an advisor found, by backend. Backends that there are no more are passed over."""
        for name in advised.keys() & self._backends:
            self.advised.labels(name).set(advised[name].slots)

    @property
    def families(self) -> Sequence[Family]:
        """What is exported, in the order of its text."""
        return self._families

    def text(self) -> bytes:
        """The exposition in Prometheus' text format. May run in another thread."""
        return self._exposition.text()

    # -- definitions ---------------------------------------------------------------------------------------

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(f"warmslot_{name}", text, labels, registry=self.registry)
        self._families.append(Family(f"warmslot_{name}", "counter", labels, text, made))
        return made

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        made = Gauge(f"warmslot_{name}", text, labels, registry=self.registry)
        self._families.append(Family(f"warmslot_{name}", "gauge", labels, text, made))
        return made

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        made = Histogram(f"warmslot_{name}", text, labels, registry=self.registry, buckets=buckets)
        self._families.append(Family(f"warmslot_{name}", "histogram", labels, text, made))
        return made

    def _define(self) -> None:
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self.requests = counter(
            "requests_total", "Requests by how they ended.", "pool", "backend", "route", "outcome"
        )
        self.prompt_tokens = counter(
            "prompt_tokens_total",
            "Prompt tokens presented, by whether the engine reused or processed them.",
            *("pool", "backend", "route", "reuse"),
        )
        self.client_tokens = counter("client_prompt_tokens_total", "The same by client.", "client", "reuse")
        self.slot_tokens = counter(
            "slot_prompt_tokens_total", "The same by slot.", "backend", "slot", "reuse"
        )
        self.predicted = counter(
            "predicted_reuse_tokens_total", "Tokens that were expected to be reused when routed.", "backend"
        )
        self.reused = counter(
            "reused_tokens_total",
            "Reused prompt tokens, by where they were: in the slot, or in the engine's cache in host memory.",
            *("backend", "source"),
        )
        self.recomputed = counter(
            "recomputed_tokens_total", "Processed prompt tokens, by why.", "backend", "reason"
        )
        self.output = counter("output_tokens_total", "Generated tokens.", "backend", "route")
        self.decisions = counter(
            "routing_decisions_total", "Leases, by why their slot was chosen.", "backend", "decision"
        )
        self.selections = counter(
            "engine_slot_selections_total", "Slot selections told by the engine's own log.", "backend", "by"
        )
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _FIRST_TOKEN,
            *("backend", "route"),
        )
        self.duration = histogram(
            "request_duration_seconds",
            "From arrival to the end of the answer.",
            _DURATION,
            "backend",
            "route",
        )
        self.queue = histogram(
            "queue_seconds", "From arrival to the lease of a slot.", _QUEUE, "pool", "route"
        )
        self.per_token = histogram(
            "time_per_output_token_seconds", "Decode time per generated token.", _PER_TOKEN, "backend"
        )
        self.length = histogram(
            "prompt_length_tokens", "Length of prompts, reused part included.", _LENGTH, "backend"
        )
        self.decision = histogram("decision_seconds", "What finding a lease took.", _DECISION)
        self.prefill_seconds = counter(
            "prefill_seconds_total", "Time that engines spent on prompts.", "backend"
        )
        self.decode_seconds = counter(
            "decode_seconds_total", "Time that engines spent on generating.", "backend"
        )
        self.position_tokens = counter(
            "prefill_position_tokens_total",
            "Processed prompt tokens by their position: block is its upper bound.",
            *("backend", "block"),
        )
        self.position_seconds = counter(
            "prefill_position_seconds_total", "Prefill time by position.", "backend", "block"
        )
        self.avoided = counter(
            "prefill_seconds_avoided_total",
            "What the reused tokens would have cost at their positions.",
            "backend",
        )
        self.slot_busy = counter("slot_busy_seconds_total", "Time under lease.", "backend", "slot")
        self.demand = counter(
            "demand_seconds_total", "Time with so many requests in flight or queued.", "pool", "level"
        )
        self.level_tokens = counter(
            "decode_level_tokens_total",
            "Streamed tokens, by how many streams of the backend decoded at once.",
            "backend",
            "busy",
        )
        self.level_seconds = counter(
            "decode_level_seconds_total", "Time while so many streams decoded.", "backend", "busy"
        )
        self.shadow = counter(
            "shadow_cached_tokens_total",
            "Tokens that would have been reused if the pool had so many slots.",
            *("pool", "slots"),
        )
        self.advised = gauge(
            "advised_slots",
            "Slot count that `warmslot advise` finds best for the latest of the journal; "
            "0 while there is no advice.",
            "backend",
        )
        self.queued = gauge("queue_requests", "Requests that wait for a lease.", "pool")
        self.inflight = gauge("inflight_requests", "Leases that are out.", "backend")
        self.up = gauge("backend_up", "1 while the backend serves.", "backend")
        self.slots = gauge("backend_slots", "Slots of the backend; 0 while it is down.", "backend")
        self.context = gauge("slot_context_tokens", "Tokens that one slot can hold.", "backend")
        self.resident = gauge(
            "slot_resident_tokens", "Tokens known to be in the slot's cache.", "backend", "slot"
        )
        self.restarts = counter(
            "backend_restarts_total", "Times that it came back, by why it had gone.", "backend", "reason"
        )
        self.truth_missing = counter("truth_missing_total", "Answers without timings.", "backend")
        self.overflow = counter(
            "label_overflow_total", "Values of a label that were folded into 'other'.", "label"
        )
        self.journal = counter(
            "journal_records_total", "Finished requests, by whether the journal has them.", "outcome"
        )
        for outcome in JOURNALED:
            self.journal.labels(outcome)

    def _create_pool(self, pool: str) -> None:
        self.queued.labels(pool)
        for level in LEVEL_NAMES:
            self.demand.labels(pool, level)
        for slots in SHADOW_SLOTS:
            self.shadow.labels(pool, slots)
        for route in Route:
            self.queue.labels(pool, route)
            for status in Status:
                self.requests.labels(pool, NONE, route, status)

    def _create_backend(self, pool: str, name: str) -> None:
        for one in (
            *(self.predicted, self.per_token, self.prefill_seconds, self.decode_seconds, self.avoided),
            *(self.inflight, self.up, self.slots, self.context, self.truth_missing),
            *(self.advised, self.length),
        ):
            one.labels(name)
        for route in Route:
            for vector in (self.output, self.ttft, self.duration):
                vector.labels(name, route)
            for status in Status:
                self.requests.labels(pool, name, route, status)
            for reuse in REUSE:
                self.prompt_tokens.labels(pool, name, route, reuse)
        for counter, values in (
            (self.recomputed, tuple(Loss)),
            (self.reused, ("slot", "host_ram")),
            (self.decisions, tuple(Decision)),
            (self.selections, SELECTIONS),
            (self.position_tokens, BLOCK_NAMES),
            (self.position_seconds, BLOCK_NAMES),
            (self.level_tokens, LEVEL_NAMES[1:]),
            (self.level_seconds, LEVEL_NAMES[1:]),
            (self.restarts, RESTARTS),
        ):
            for value in values:
                counter.labels(name, value)

    def _create_slot(self, backend: str, slot: int) -> None:
        self.slot_busy.labels(backend, str(slot))
        self.resident.labels(backend, str(slot))
        for reuse in REUSE:
            self.slot_tokens.labels(backend, str(slot), reuse)

    # -- told by the handlers ------------------------------------------------------------------------------

    def request_ended(self, passage: Passage, now: float) -> None:
        """A client's request is over, however it ended."""
        self.requests.labels(passage.pool, passage.backend, passage.route, passage.status).inc()
        if passage.backend == NONE:
            return
        self.duration.labels(passage.backend, passage.route).observe(now - passage.began)
        if passage.first_token is not None:
            self.ttft.labels(passage.backend, passage.route).observe(passage.first_token - passage.began)

    # -- told by the dispatcher ----------------------------------------------------------------------------

    def demanded(self, pool: str, by: int, now: float) -> None:
        """So many more requests are in flight or queued."""
        self._demand[pool].change(by, now)

    def granted(self, lease: Lease, decision_seconds: float) -> None:
        """A lease was given out."""
        request = lease.request
        self.decision.observe(decision_seconds)
        self.decisions.labels(lease.slot.backend, lease.decision).inc()
        self.queue.labels(request.pool, request.route).observe(max(0.0, lease.granted - request.arrived))
        for ref in (lease.slot, *lease.extra_slots):
            self._busy_since[ref] = lease.granted

    def decoding(self, lease: Lease, now: float) -> None:
        """A leased request has its first token."""
        self._levels[lease.slot.backend].begin(lease.request.id, now)

    def finished(self, lease: Lease, report: Report, outcome: Outcome, now: float) -> None:
        """A lease was taken back."""
        backend, request = lease.slot.backend, report.request
        for ref in (lease.slot, *lease.extra_slots):
            self._count_busy(ref, now)
            self._busy_since.pop(ref, None)
        self._levels[backend].end(request.id, report.output_tokens, now)
        self.output.labels(backend, request.route).inc(report.output_tokens)
        if outcome.decode_seconds > 0:
            self.decode_seconds.labels(backend).inc(outcome.decode_seconds)
            if report.output_tokens:
                self.per_token.labels(backend).observe(outcome.decode_seconds / report.output_tokens)
        if not report.truth_missing:
            self._count_prompt(report, outcome)
        elif outcome.status is Status.OK and request.pinned:
            self.truth_missing.labels(backend).inc()

    def _count_prompt(self, report: Report, outcome: Outcome) -> None:
        request, backend = report.request, report.slot.backend
        client = request.client
        if client not in self._clients:
            self.overflow.labels("client").inc()
            client = ANYONE
        for reuse, tokens in zip(REUSE, (report.cached_tokens, report.processed_tokens), strict=True):
            self.prompt_tokens.labels(request.pool, backend, request.route, reuse).inc(tokens)
            self.client_tokens.labels(client, reuse).inc(tokens)
            self.slot_tokens.labels(backend, str(report.slot.slot), reuse).inc(tokens)
        self.predicted.labels(backend).inc(report.predicted_tokens)
        self.reused.labels(backend, "slot").inc(report.cached_tokens - report.host_tokens)
        self.reused.labels(backend, "host_ram").inc(report.host_tokens)
        self.length.labels(backend).observe(report.cached_tokens + report.processed_tokens)
        for reason, tokens in report.losses.items():
            self.recomputed.labels(backend, reason).inc(tokens)
        for slots, tokens in report.shadow.items():
            self.shadow.labels(request.pool, slots).inc(tokens)
        self.prefill_seconds.labels(backend).inc(outcome.prefill_seconds)
        curve, cached = self._curves[backend], report.cached_tokens
        if report.processed_tokens:
            end = cached + report.processed_tokens
            for index, tokens, seconds in curve.learn(cached, end, outcome.prefill_seconds):
                self.position_tokens.labels(backend, BLOCK_NAMES[index]).inc(tokens)
                self.position_seconds.labels(backend, BLOCK_NAMES[index]).inc(seconds)
        self.avoided.labels(backend).inc(curve.cost(0, cached))

    def backend_changed(self, backend: str, *, up: bool, slots: int, context: int, reason: str) -> None:
        """A backend came up or went down."""
        self.up.labels(backend).set(1 if up else 0)
        self.slots.labels(backend).set(slots)
        self.context.labels(backend).set(context)
        if up:
            for slot in range(slots):
                self._create_slot(backend, slot)
            if (went := self._went_down.pop(backend, None)) is not None:
                self.restarts.labels(backend, went).inc()
        else:
            self._went_down[backend] = _restart_reason(reason)
            for ref in [ref for ref in self._resident_seen if ref.backend == backend]:
                self.resident.labels(backend, str(ref.slot)).set(0)

    def engine_selected(self, backend: str, by: str) -> None:
        """The engine's log told how it chose a slot."""
        if by in SELECTIONS:
            self.selections.labels(backend, by).inc()

    # -- before a scrape -----------------------------------------------------------------------------------

    def refresh(self, dispatcher: Dispatcher, now: float | None = None) -> None:
        """Bring gauges, and counters of time that runs on, up to date."""
        now = time.monotonic() if now is None else now
        inflight = Counted(held.lease.slot.backend for held in dispatcher.held().values())
        for backend in self._backends:
            self.inflight.labels(backend).set(inflight[backend])
        for pool in self._pools:
            self.queued.labels(pool).set(dispatcher.queued(pool))
        for pool, clock in self._demand.items():
            clock.settle(now)
            self._catch_up(self.demand, (pool,), LEVEL_NAMES, clock.seconds)
        for backend, levels in self._levels.items():
            levels.settle(now)
            self._catch_up(self.level_seconds, (backend,), LEVEL_NAMES[1:], levels.seconds[1:])
            self._catch_up(self.level_tokens, (backend,), LEVEL_NAMES[1:], levels.tokens[1:])
        for ref in list(self._busy_since):
            self._count_busy(ref, now)
        if (journal := self._journal) is not None:
            self._catch_up(self.journal, (), JOURNALED, (journal.written, journal.dropped))
        seen = {view.ref: view.resident_tokens for view in dispatcher.slots()}
        for ref in self._resident_seen - seen.keys():
            self.resident.labels(ref.backend, str(ref.slot)).set(0)
        for ref, tokens in seen.items():
            self.resident.labels(ref.backend, str(ref.slot)).set(tokens)
        self._resident_seen = set(seen)

    def _count_busy(self, ref: SlotRef, now: float) -> None:
        since = self._busy_since.get(ref)
        if since is not None:
            self.slot_busy.labels(ref.backend, str(ref.slot)).inc(max(0.0, now - since))
            self._busy_since[ref] = now

    def _catch_up(
        self, counter: Counter, labels: tuple[str, ...], names: Sequence[str], sums: Sequence[float]
    ) -> None:
        for name, value in zip(names, sums, strict=True):
            key = (counter, *labels, name)
            gain = value - self._exported.get(key, 0.0)
            if gain > 0:
                counter.labels(*labels, name).inc(gain)
                self._exported[key] = value


def _restart_reason(reason: str) -> str:
    """One of :data:`RESTARTS` for the words with which a backend went down."""
    if reason.startswith(("/health", "no answer")):
        return "health"
    return reason if reason in {"replaced", "stopped"} else "exited"
