"""``warmslot advise --measure``: the best candidates for real, beside what was foretold of them.

Each is a warmslot of its own on a free port, which serves the journal's load with texts of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from .bench import BenchError, engine_setting, routed
from .bench_replay import Target, replay
from .forecast import forecast
from .host_memory import cache_ram
from .memory import CACHE_TYPES
from .plan import need

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from .advise import Advice
    from .driver import Served
    from .engine import Engine
    from .forecast import Forecast, Setup
    from .load import Load
    from .memory import Model


_DRAFTS: Final = frozenset({"-md", "--model-draft"})


class MeasureError(Exception):
    """A candidate cannot be measured; the message is one line."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One candidate: foretold and served."""

    forecast: Forecast
    served: Served
    reuse: float
    """Measured, of the calls that count in the forecast too."""

    @classmethod
    def of(cls, forecast: Forecast, load: Load, served: Served) -> Measured:
        """From a load as it was served."""
        calls = [call for call in served.calls if load.jobs[call.number].counted]
        cached = sum(call.cached or 0 for call in calls)
        prompt = cached + sum(call.processed or 0 for call in calls)
        return cls(forecast, served, cached / prompt if prompt else 0.0)

    @property
    def reuse_off(self) -> float:
        """Foretold less measured reuse, as a share of the prompt tokens."""
        return self.forecast.reuse - self.reuse

    @property
    def time_off(self) -> float:
        """How much longer (or less long) was foretold, as a share of what was measured."""
        return self.forecast.makespan / self.served.seconds - 1 if self.served.seconds else 0.0


def regret(measured: Sequence[Measured]) -> float:
    """How much longer the first one, the advised, took than the fastest, as a share of that."""
    return measured[0].served.seconds / min(one.served.seconds for one in measured) - 1


def memory_of(model: Model, args: Sequence[str]) -> Callable[[Setup], int]:
    """Bytes of weights, KV cache and state of a setup, with the cache types that the engine's flags name."""
    given = dict(pairwise(args))
    key, value = (
        next((given[name] for name in names if given.get(name) in CACHE_TYPES), "f16")
        for names in (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v"))
    )
    return lambda setup: need(model, setup.slots, setup.context, (key, value))


def way(setup: Setup) -> str:
    """How a setup serves, beside its slots."""
    return setup.in_flight if setup.host is None else f"{setup.in_flight}, RAM cache"


def contenders(advice: Advice, count: int) -> list[Forecast]:
    """The candidates to measure: the advised one, then the best of each other slot count, drafts alike."""
    best: dict[int, Forecast] = {}
    alike = [one for one in advice.candidates if one.setup.drafts is advice.best.setup.drafts]
    for one in sorted(alike, key=lambda one: (one.makespan, one.mean_seconds)):
        best.setdefault(one.setup.slots, one)
    others = [one for slots, one in best.items() if slots != advice.best.setup.slots]
    return [advice.best, *others][:count]


async def measure(
    advice: Advice,
    candidates: Sequence[Forecast],
    *,
    engine: Engine,
    model: Path,
    args: Sequence[str],
    progress: Callable[[str, int, int], None],
) -> list[Measured]:
    """Serve the load on each candidate. Raises :class:`MeasureError`."""
    found = []
    drafts = any(arg.startswith("--spec-") or arg in _DRAFTS for arg in args)
    if drafts is not advice.best.setup.drafts:
        raise MeasureError(
            "the advised candidate drafts: give the flags of drafts, as --flags '--spec-type ngram-simple'"
            if advice.best.setup.drafts
            else "--flags turn drafts on, which the journal never saw: the advised candidate is without"
        )
    load = advice.load.told()
    for one in candidates:
        setup = one.setup
        # The texts are served with the lengths of their answers told, so that is what is foretold, too.
        foretold = one if load.jobs == advice.load.jobs else forecast(load, advice.rates(setup), setup)
        backend: dict[str, Any] = {
            "name": "candidate",
            "model": str(model),
            "slots": setup.slots,
            "context": setup.context
            + 256,  # the texts are as long in tokens as they can be made, not exactly
            "cache_ram": cache_ram(setup.host),
            "args": list(args),
        }
        pool = {"name": "m", "scheduling": {"in_flight": setup.in_flight}, "backends": [backend]}
        config = {"engine": engine_setting(engine), "pools": [pool]}
        name = f"{setup.slots} slots, {way(setup)}"
        try:
            async with routed(config) as url:
                (side,) = await replay(
                    load,
                    {},
                    [Target(f"measuring {name}", url)],
                    rounds=1,
                    pace=1.0,
                    model="m",
                    progress=progress,
                )
        except BenchError as error:
            raise MeasureError(f"{name}: {error}") from error
        (served,) = side.rounds
        if served.failures:
            raise MeasureError(f"{name}: {len(served.failures)} calls failed: {served.failures[0].error}")
        found.append(Measured.of(foretold, load, served))
    return found


def show(console: Console, measured: Sequence[Measured]) -> None:
    """Print foretold beside measured."""
    table = Table(title="Measured", title_justify="left", header_style="bold")
    table.add_column("slots", justify="right")
    table.add_column("at once")
    for name in ("reuse foretold", "measured", "off by", "makespan foretold", "measured", "off by"):
        table.add_column(name, justify="right")
    for one in measured:
        table.add_row(
            *(str(one.forecast.setup.slots), way(one.forecast.setup)),
            *(f"{one.forecast.reuse:.1%}", f"{one.reuse:.1%}", f"{100 * one.reuse_off:+.1f} points"),
            *(f"{one.forecast.makespan:.1f} s", f"{one.served.seconds:.1f} s", f"{one.time_off:+.0%}"),
        )
    console.print(table)
    best = min(measured, key=lambda one: one.served.seconds)
    advised = measured[0]
    if best is advised:
        text = "The advised setup was the fastest of those measured."
    else:
        text = (
            f"{best.forecast.setup.slots} slots were faster: the advised setup took "
            f"{regret(measured):.0%} longer."
        )
    console.print(text, highlight=False)


def as_json(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Everything as plain values."""
    return [
        {
            "slots": one.forecast.setup.slots,
            "in_flight": one.forecast.setup.in_flight,
            "cache_ram_mib": cache_ram(one.forecast.setup.host),
            "reuse_foretold": one.forecast.reuse,
            "reuse_measured": one.reuse,
            "seconds_foretold": one.forecast.makespan,
            "seconds_measured": one.served.seconds,
        }
        for one in measured
    ]
