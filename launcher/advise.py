"""``warmslot advise``: how many slots, and how many at once, from what a journal has measured.

Every candidate serves the journal's load once more on a modelled engine with the backend's own rates, through
the code that really routes. How far that is to be trusted is tested on the journal itself: the setup that it
was recorded under is forecast too, and compared with what was observed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from warmslot.router.values import HostMemory

from .advise_stretch import Stretch, stretch
from .forecast import Forecast, Setup, forecast
from .load import Load, load_of
from .speeds import Speeds, copy_of, speeds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from warmslot.router.journal import Reading
    from warmslot.router.scheduler import InFlight

LEAST_REQUESTS: Final = 30
"""Finished requests below which there is no advice."""

LEAST_RETURNS: Final = 10
"""Calls that came back to a conversation: reuse is about these."""

SLOTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

WORK: Final = 12_000
"""Requests that are served in all forecasts together; of a longer journal the busiest stretch is taken."""

_FORECASTS: Final = 20
_EQUAL: Final = 0.02
"""Results that differ by less are taken for equal; then the smaller setup wins."""

ENGINES_OWN: Final = HostMemory(8192 * (1 << 20))
"""What ``--cache-ram`` is where nobody sets it; how much a token takes in it is not known."""

_GRAIN: Final = 256
"""Contexts are rounded up to this many tokens."""

_REUSE_WITHIN, _TIME_WITHIN = 0.03, 0.15
_MANY_REQUESTS, _MANY_SESSIONS = 200, 10
_REFINED: Final = 3

Confidence = Literal["high", "medium", "low"]


class AdviceError(Exception):
    """There is nothing to advise on; the message says what is missing and how much is needed."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The setup that the journal was recorded under: observed, and forecast."""

    forecast: Forecast
    reuse: float
    seconds: float

    @property
    def good(self) -> bool:
        """Whether the forecast agrees with what was observed."""
        return (
            abs(self.forecast.reuse - self.reuse) <= _REUSE_WITHIN
            and abs(self.forecast.makespan - self.seconds) <= _TIME_WITHIN * self.seconds
        )


@dataclass(slots=True)
class Advice:
    """The recommendation with all that it rests on."""

    stretch: Stretch
    load: Load
    speeds: Speeds
    best: Forecast
    candidates: list[Forecast]
    recorded: Recorded | None
    alone: Forecast
    """The engine by itself at its best slot count."""
    confidence: Confidence
    doubts: list[str] = field(default_factory=list)
    """Why the confidence is not higher."""
    changes: list[str] = field(default_factory=list)
    """What would change the recommendation."""
    unfit: list[int] = field(default_factory=list)
    """Slot counts that the budget of KV tokens rules out."""
    unmeasured: list[str] = field(default_factory=list)
    """Candidates of which the journal tells too little to foretell them."""
    otherwise: Speeds | None = None
    """Rates with drafts where the journal's are without, and the other way round; as far as known."""

    def rates(self, setup: Setup) -> Speeds:
        """The backend's rates under a setup."""
        same = setup.drafts is self.stretch.drafts
        return self.speeds if same or self.otherwise is None else self.otherwise


def advise(
    path: Path,
    *,
    kv_tokens: int | None,
    progress: Callable[[str, int, int], None],
    slots: Sequence[int] = (),
    host: HostMemory = ENGINES_OWN,
    copy: float | None = None,
    backend: str = "",
    latest: int | None = None,
) -> tuple[Advice, Reading]:
    """Advice from a journal. ``kv_tokens``: what all slots together may hold; else what they hold now.

    ``slots``: the counts to choose from; else all that the load may need. ``host``: the prompt cache in host
    memory that is weighed; ``copy``: seconds to move a token's context there or back, where the journal
    cannot tell; ``backend`` and ``latest``: as for :func:`~.advise_stretch.stretch`. Raises
    :class:`AdviceError`, :class:`~warmslot.router.journal.JournalError`.
    """
    part, reading = stretch(path, WORK // _FORECASTS, progress, backend=backend, latest=latest)
    found = advise_on(part, kv_tokens=kv_tokens, slots=slots, host=host, copy=copy, progress=progress)
    return found, reading


def advise_on(
    part: Stretch,
    *,
    kv_tokens: int | None,
    progress: Callable[[str, int, int], None],
    slots: Sequence[int] = (),
    host: HostMemory = ENGINES_OWN,
    copy: float | None = None,
) -> Advice:
    """Advice from a stretch of a journal, as :func:`advise`. Raises :class:`AdviceError`."""
    load = load_of(part.records, part.earlier)
    _enough(part, load)
    speeds = speeds_of(part.records)
    if speeds is None:
        raise AdviceError("the journal has no timings of prefill and decode, so no time can be foretold")
    budget = kv_tokens or (part.slots * part.context)
    need = -(-load.longest // _GRAIN) * _GRAIN
    counts, unfit = _fitting(sorted(set(slots)) or _counts(load, part.slots), need, budget)
    if not counts:
        raise AdviceError(
            f"the longest request needs {need} tokens of context, more than all {budget} tokens of KV: "
            "give --kv-tokens"
        )
    measured = copy_of([*part.earlier, *part.records], part.slots, host) if part.host else None
    copy = measured if measured is not None else copy
    speeds.copy = copy or 0.0
    runs = _Runs(load, speeds, part, need, budget, None if copy is None and not part.host else host, progress)
    candidates = [runs.run(count, way) for count in counts for way in _ways(count, ("serialize", "slots"))]
    near = list(dict.fromkeys(one.setup.slots for one in sorted(candidates, key=_rank)))[:_REFINED]
    candidates += [runs.run(count, way) for count in near for way in _ways(count, ("pair", "auto"))]
    # A cache in host memory may make up for slots, so it is tried with each count of them.
    candidates += runs.cached({one.setup.slots: one for one in sorted(candidates, key=_rank, reverse=True)})
    for one in sorted(candidates, key=_rank)[:_REFINED]:
        candidates += runs.otherwise(one)
    candidates = list({one.setup: one for one in candidates}.values())
    best = choose(candidates)
    alone = min((runs.run(count, "slots", queue="engine") for count in counts), key=_rank)
    recorded = _recorded(part, runs)
    advice = Advice(part, load, speeds, best, candidates, recorded, alone, "high", unfit=unfit)
    advice.unmeasured, advice.otherwise = runs.unmeasured, runs.other
    advice.doubts = list(_doubts(advice))
    serious = sum(one.startswith("!") for one in advice.doubts)
    advice.confidence = "low" if serious else "medium" if advice.doubts else "high"
    advice.doubts = [one.removeprefix("!") for one in advice.doubts]
    advice.changes = _changes(advice, runs)
    return advice


def _enough(part: Stretch, load: Load) -> None:
    requests = len(load.jobs)
    if requests < LEAST_REQUESTS or load.returns < LEAST_RETURNS:
        raise AdviceError(
            f"too little data: {requests} finished requests with timings, of which {load.returns} came back "
            f"to a conversation; needed are at least {LEAST_REQUESTS} and {LEAST_RETURNS}. "
            f"({part.whole} requests in the journal can be used.)"
        )


def _counts(load: Load, recorded: int) -> list[int]:
    """Slot counts up to the most conversations at once, and the one that there is now."""
    live = load.live()
    most = next((count for count in SLOTS if count >= live), SLOTS[-1])
    return sorted({count for count in SLOTS if count <= most} | ({recorded} if recorded else set()))


def _fitting(counts: Sequence[int], need: int, budget: int) -> tuple[list[int], list[int]]:
    """Those of which all slots together fit the budget, and the others."""
    fit = [count for count in counts if not budget or count * need <= budget]
    return fit, [count for count in counts if count not in fit]


def _ways(count: int, names: Sequence[InFlight]) -> list[InFlight]:
    """Ways to run so many slots that differ from each other."""
    if count == 1:
        return ["serialize"] if "serialize" in names else []
    return [name for name in names if not (name == "pair" and count == 2)]  # noqa: PLR2004  # as "slots"


class _Runs:
    """Makes forecasts, each once, and says how far it is."""

    def __init__(  # noqa: PLR0917  # what all forecasts share
        self,
        load: Load,
        speeds: Speeds,
        part: Stretch,
        need: int,
        budget: int,
        host: HostMemory | None,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.load, self.speeds = load, speeds
        self._drafts = part.drafts
        self._host, self._had_host = host, part.host
        self._now, self._need, self._budget = part.context or need, need, budget
        self._progress = progress
        self._done: dict[Setup, Forecast] = {}
        self.unmeasured: list[str] = []
        self.other = self._other_speeds(part)
        if host is None:
            self.unmeasured.append(
                "the engine's prompt cache in host memory: not measured; serve with cache_ram for a while, "
                "or give --copy"
            )

    def _other_speeds(self, part: Stretch) -> Speeds | None:
        """The rates with drafts where the journal's are without, and the other way round; as far as known."""
        found = speeds_of(part.otherwise) if len(part.otherwise) >= LEAST_REQUESTS else None
        if found is not None or not (part.drafts or part.otherwise):
            return found
        self.unmeasured.append(
            f"speculation {'off' if part.drafts else 'on'}: not measured; the journal has "
            f"{len(part.otherwise)} requests of that kind, needed are {LEAST_REQUESTS}"
        )
        return None

    def context(self, slots: int) -> int:
        """Tokens of each of so many slots: as now, if they fit the budget, and never less than needed."""
        fits = self._budget // slots // _GRAIN * _GRAIN if self._budget else self._now
        return max(self._need, min(self._now, fits))

    def run(
        self,
        slots: int,
        in_flight: InFlight,
        *,
        queue: Literal["reuse", "engine"] = "reuse",
        speeds: Speeds | None = None,
    ) -> Forecast:
        """One forecast."""
        host = self._host if self._had_host else None
        setup = Setup(slots, self.context(slots), in_flight, queue, self._drafts, host)
        return self._forecast(setup, speeds)

    def otherwise(self, one: Forecast) -> list[Forecast]:
        """The same slots with no more context than is needed, and with or without drafts, as far as known."""
        setups = []
        if one.setup.context > self._need:
            setups.append(replace(one.setup, context=self._need))
        if self.other is not None:
            setups.append(replace(one.setup, drafts=not self._drafts))
        return [self._forecast(setup) for setup in setups]

    def cached(self, best: Mapping[int, Forecast]) -> list[Forecast]:
        """The best way of each slot count with the cache in host memory, or without; as far as known."""
        if self._host is None:
            return []
        host = None if self._had_host else self._host
        return [self._forecast(replace(one.setup, host=host)) for one in best.values()]

    def _forecast(self, setup: Setup, speeds: Speeds | None = None) -> Forecast:
        if speeds is None and setup in self._done:
            return self._done[setup]
        rates = speeds or (self.speeds if setup.drafts is self._drafts else self.other) or self.speeds
        name = f"{setup.slots} slots of {setup.context:,}, {setup.in_flight}"
        name += ", engine alone" if setup.queue == "engine" else ""
        if setup.drafts is not self._drafts:
            name += ", with drafts" if setup.drafts else ", without drafts"
        if (setup.host is not None) is not self._had_host:
            name += ", with RAM cache" if setup.host else ", without RAM cache"

        def tell(done: int) -> None:
            if done % 50 == 0:
                self._progress(name, done, len(self.load.jobs))

        made = forecast(self.load, rates, setup, tell)
        if speeds is None:
            self._done[setup] = made
        return made


def _rank(one: Forecast) -> tuple[float, float]:
    return one.makespan, one.mean_seconds


def choose(candidates: Sequence[Forecast]) -> Forecast:
    """The fastest; among as good as equal ones that with the quickest answers, then the smallest."""
    fastest = min(one.makespan for one in candidates)
    equal = [one for one in candidates if one.makespan <= fastest * (1 + _EQUAL)]
    quickest = min(one.mean_seconds for one in equal)
    good = [one for one in equal if one.mean_seconds <= quickest * (1 + _EQUAL)]
    order = {"serialize": 0, "pair": 1, "slots": 2, "auto": 3}
    return min(
        good,
        key=lambda one: (
            one.setup.slots,
            one.setup.host is not None,
            order[one.setup.in_flight],
            -one.setup.context,
        ),
    )


def _recorded(part: Stretch, runs: _Runs) -> Recorded | None:
    if not part.slots:
        return None
    records = part.records
    most = max(one.in_flight for one in records)
    way: InFlight = "serialize" if most == 1 else "pair" if most == 2 and part.slots > 2 else "slots"  # noqa: PLR2004
    unrouted = sum(one.decision == "unpinned" for one in records) * 2 > len(records)
    forecast_ = runs.run(part.slots, way, queue="engine" if unrouted else "reuse")
    counted = [job for job in runs.load.jobs if job.counted]
    prompt = sum(job.prompt_tokens for job in counted)
    cached = sum(job.recorded_cached for job in counted)
    return Recorded(forecast_, cached / max(1, prompt), runs.load.seconds)


def _doubts(advice: Advice) -> list[str]:
    """Reasons for less confidence; serious ones begin with ``!``."""
    load, best, doubts = advice.load, advice.best, []
    if len(load.jobs) < _MANY_REQUESTS or load.sessions < _MANY_SESSIONS:
        doubts.append(
            f"only {len(load.jobs)} requests of {load.sessions} conversations "
            f"({_MANY_REQUESTS} of {_MANY_SESSIONS} would do)"
        )
    if (
        best.setup.slots > 1
        and best.setup.in_flight != "serialize"
        and max(advice.speeds.seen, default=1) == 1
    ):
        doubts.append(
            "!the journal never saw two answers decode at once, so what sharing gains is assumed "
            "('warmslot check' measures it)"
        )
    if best.setup.host is not None and not advice.speeds.copy:
        doubts.append("!how long copying to host memory takes is not known and was left out (--copy)")
    if best.setup.host is not None and not best.setup.host.token_bytes:
        doubts.append(
            "how much a token takes in host memory is not known, so it was taken never to be full (--model)"
        )
    guessed = sum(one.guessed for one in advice.stretch.records)
    if guessed * 5 > len(load.jobs):
        doubts.append(f"!which conversation {guessed} requests continue was guessed from an engine's log")
    if advice.recorded is None:
        doubts.append(
            "the journal does not tell the slot count it was recorded with, so nothing checks the model"
        )
    elif not advice.recorded.good:
        one = advice.recorded
        doubts.append(
            f"!for the setup that was recorded the model foretells {one.forecast.reuse:.1%} reuse in "
            f"{one.forecast.makespan:,.0f} s, observed were {one.reuse:.1%} in {one.seconds:,.0f} s"
        )
    return doubts


def _changes(advice: Advice, runs: _Runs) -> list[str]:
    """What would lead to another recommendation, tried out where it can be."""
    best, load, speeds = advice.best, advice.load, advice.speeds
    live = load.live()
    changes = [f"more than {max(live, best.setup.slots)} conversations at once (there were {live})"]
    if advice.unfit:
        changes.append(
            f"more memory: {', '.join(map(str, advice.unfit))} slots of {runs.context(advice.unfit[0])} "
            "tokens do not fit the KV tokens that there are now (--kv-tokens says how many there may be)"
        )
    near = sorted({one.setup.slots for one in advice.candidates}, key=lambda n: abs(n - best.setup.slots))[:3]
    trials = (
        ("answers gained nothing from decoding together", _flat(speeds)),
        ("answers decoding together gained half as much again", _steeper(speeds)),
    )
    for words, other in trials:
        again = choose(
            [runs.run(n, way, speeds=other) for n in near for way in _ways(n, ("serialize", "slots"))]
        )
        if (again.setup.slots, again.setup.in_flight) != (best.setup.slots, best.setup.in_flight):
            changes.append(f"if {words}: {again.setup.slots} slots, {again.setup.in_flight}")
    return changes


def _flat(speeds: Speeds) -> Speeds:
    return replace(speeds, decode=dict.fromkeys(speeds.decode, speeds.decode[1]))


def _steeper(speeds: Speeds) -> Speeds:
    alone = speeds.decode[1]
    return replace(
        speeds, decode={n: rate + 0.5 * max(0.0, rate - alone) for n, rate in speeds.decode.items()}
    )
