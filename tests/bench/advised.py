"""Whether advice holds on a real engine: three journals are recorded, and all candidates measured.

``python -m tests.bench.advised`` serves three small loads through warmslot on a real engine, asks for advice
on the journal of each, and then serves each load again on every slot count of ``--slots``, each with the best
way to run it, on a fresh engine. It prints what was foretold beside what was measured, and judges:

- the advised slot count is the fastest, or takes at most 5 % longer than the fastest;
- foretold reuse is within 3 points, the foretold makespan within 15 % of what was measured, of every setup.

Measure on a machine with nothing else to do: times are compared with times that were taken minutes before.
It ends with status 1 where a limit is missed. ``--scale`` makes prompts and answers longer, for faster ones.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from warmslot.launcher import advise_measure, advise_show
from warmslot.launcher.advise import advise
from warmslot.launcher.bench import engine_setting, machine, routed
from warmslot.launcher.driver import serve
from warmslot.launcher.engine import find_engine
from warmslot.launcher.model import find_model
from warmslot.launcher.shape import Shape, described

if TYPE_CHECKING:
    from warmslot.launcher.advise import Advice
    from warmslot.launcher.advise_measure import Measured
    from warmslot.launcher.engine import Engine
    from warmslot.launcher.load import Load

REGRET, REUSE, TIME = 0.05, 0.03, 0.15
"""Limits: makespan over the fastest, reuse as a share of the prompt tokens, makespan against the measured."""

KV_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A load and the slots that it is recorded on."""

    name: str
    agents: int
    slots: int


CASES = (
    Case("fewer conversations than slots", agents=3, slots=4),
    Case("more conversations than slots", agents=6, slots=4),
    Case("one conversation after the other", agents=1, slots=4),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all cases share."""

    engine: Engine
    model: Path
    flags: tuple[str, ...]
    slots: tuple[int, ...]
    scale: float

    def load(self, case: Case) -> Load:
        """Six conversations of six calls."""
        return described(
            agents=case.agents,
            conversations=6,
            turns=6,
            first=round(240 * self.scale),
            growth=round(60 * self.scale),
            output=round(12 * self.scale),
        )

    @property
    def context(self) -> int:
        """Tokens of a slot that hold the longest conversation."""
        return -(-round(1100 * self.scale) // 256) * 256


async def record(setup: Setup, case: Case, path: Path) -> None:
    """Serve the load through warmslot, which writes the journal. Raises RuntimeError if a call failed."""
    backend = {
        "name": "b",
        "model": str(setup.model),
        "slots": case.slots,
        "context": setup.context,
        "args": list(setup.flags),
    }
    pool = {"name": "m", "scheduling": {"in_flight": "slots"}, "backends": [backend]}
    config = {
        "engine": engine_setting(setup.engine),
        "journal": {"path": str(path)},
        "advice": {"every": 0},  # its process would be measured as well
        "pools": [pool],
    }
    load = setup.load(case)
    async with routed(config) as url:
        served = await serve(url, load, Shape(load), model="m")
    if served.failures:
        raise RuntimeError(f"{case.name}: {len(served.failures)} calls failed: {served.failures[0].error}")


def judge(measured: list[Measured]) -> list[str]:
    """Which limits are missed, in words."""
    missed = []
    if (more := advise_measure.regret(measured)) > REGRET:
        missed.append(f"the advised setup took {more:.0%} longer than the fastest (limit {REGRET:.0%})")
    for one in measured:
        name = f"{one.forecast.setup.slots} slots, {one.forecast.setup.in_flight}"
        if abs(one.reuse_off) > REUSE:
            missed.append(
                f"{name}: reuse is off by {100 * one.reuse_off:+.1f} points (limit {100 * REUSE:.0f})"
            )
        if abs(one.time_off) > TIME:
            missed.append(f"{name}: makespan is off by {one.time_off:+.0%} (limit {TIME:.0%})")
    return missed


def journal_of(folder: Path, case: Case) -> Path:
    """Where its journal goes; one that is there is removed, since a router would append to it."""
    path = folder.resolve() / f"{case.name.replace(' ', '-')}.jsonl"
    path.unlink(missing_ok=True)
    return path


async def run(setup: Setup, case: Case, journal: Path, console: Console) -> tuple[Advice, list[Measured]]:
    """Record, advise and measure one case."""
    await record(setup, case, journal)

    def quiet(what: str, done: int, total: int) -> None:
        if not done and what.startswith("measuring"):
            console.print(f"  {what} ({total} calls)", style="dim")

    advice, _ = advise(journal, kv_tokens=KV_TOKENS, slots=setup.slots, progress=quiet)
    measured = await advise_measure.measure(
        advice,
        advise_measure.contenders(advice, len(setup.slots)),
        engine=setup.engine,
        model=setup.model,
        args=setup.flags,
        progress=quiet,
    )
    return advice, measured


def main(  # noqa: PLR0917  # one parameter for each option of the command
    cases: Annotated[str, typer.Option(help="Which of the three, by number.")] = "1,2,3",
    slots: Annotated[str, typer.Option(help="Slot counts to choose from and to measure.")] = "1,2,4,8",
    scale: Annotated[float, typer.Option(min=0.5, help="Length of prompts and answers.")] = 1.0,
    model: Annotated[str, typer.Option(help="A GGUF file, or demo.")] = "demo",
    engine: Annotated[str | None, typer.Option(help="Path of a llama-server, or embedded.")] = None,
    flags: Annotated[str, typer.Option(help="Further flags of the engine, as one string.")] = "-t 2",
    journals: Annotated[Path | None, typer.Option(help="Keep the journals in this folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Record, advise, measure, judge."""
    counts = tuple(int(one) for one in slots.split(","))
    setup = Setup(find_engine(engine), find_model(model), tuple(flags.split()), counts, scale)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(f"{setup.engine.describe()}; {machine()}")
    results: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="warmslot-advised-") as folder:
        for number in cases.split(","):
            case = CASES[int(number) - 1]
            began = time.perf_counter()
            console.rule(case.name)
            advice, measured = asyncio.run(
                run(setup, case, journal_of(journals or Path(folder), case), console)
            )
            missed = judge(measured)
            advise_show.show(console, advice)
            advise_measure.show(console, measured)
            for line in missed:
                console.print(f"MISSED: {line}", style="red")
            seconds = time.perf_counter() - began
            console.print(f"{'FAIL' if missed else 'PASS'}: {case.name} ({seconds:.0f} s)", style="bold")
            results.append(
                {
                    "journal": case.name,
                    "recorded_slots": case.slots,
                    "advised": advise_show.as_json(advice)["advice"],
                    "regret": advise_measure.regret(measured),
                    "measured": advise_measure.as_json(measured),
                    "missed": missed,
                }
            )
    if json_file is not None:
        document = {
            "machine": machine(),
            "engine": setup.engine.describe(),
            "model": setup.model.name,
            "scale": scale,
            "limits": {"regret": REGRET, "reuse": REUSE, "time": TIME},
            "journals": results,
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if any(one["missed"] for one in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
