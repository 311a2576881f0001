"""``warmslot bench replay``: one load on several servers, in turn and again, with confidence intervals.

The load is a journal's, a recorded trace's, or a described one. Servers are measured one after the other in
each round, and the order turns with the rounds, so that a machine that gets slower hurts all of them alike.
Each round has texts of its own, so nothing is left in a cache from the one before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from warmslot.router.journal import read
from warmslot.router.records import Record

from . import traces
from .driver import Served, serve
from .load import Load, load_of
from .shape import WORDS, Shape, described, of_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

_STUDENT: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Factors of the two-sided 95 % interval, by degrees of freedom from 1; 2 beyond."""

_DESCRIBED: Final = re.compile(r"agents(?:=(\d+))?((?:,[a-z]+=\d+)*)")
_DESCRIBED_KEYS: Final = ("turns", "first", "growth", "output", "conversations", "seed")

_SALTS: Final = tuple(word for word in WORDS if len(word) == len("word"))


class ReplayError(Exception):
    """The load or a server is not usable; the message is one line."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server under the name that the table shows."""

    name: str
    url: str
    key: str | None = None


@dataclass(slots=True)
class Side:
    """All rounds of one server."""

    target: Target
    rounds: list[Served] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over rounds and half the width of its 95 % interval (``None`` with one round)."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """Of one value for each round; ``None`` of none."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], None)
        degrees = len(values) - 1
        factor = _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else 2.0
        return cls(mean(values), factor * stdev(values) / sqrt(len(values)))

    def text(self, form: str) -> str:
        """For people; ``form`` formats a number."""
        if self.half is None:
            return form.format(self.mean)
        return f"{form.format(self.mean)} ± {form.format(self.half)}"


def target(text: str) -> Target:
    """``URL`` or ``NAME=URL``. Raises :class:`ReplayError`."""
    name, mark, url = text.partition("=")
    if not mark or "/" in name:
        name, url = text.split("://", 1)[-1].rstrip("/"), text
    if not url.startswith(("http://", "https://")):
        raise ReplayError(f"{text!r}: expected an address such as http://127.0.0.1:8080, or NAME=ADDRESS")
    return Target(name, url)


def source(text: str, *, live: int, calls: int | None) -> tuple[Load, dict[int, bytes]]:
    """The load of a journal, of a trace, or of a description. Raises :class:`ReplayError`, JournalError.

    A description is ``agents=12,turns=8,first=1500,growth=250,output=60,conversations=36,seed=1``.
    """
    if found := _DESCRIBED.fullmatch(text):
        values = {"turns": 6, "first": 1000, "growth": 200, "output": 40}
        for pair in found[2].split(",")[1:]:
            key, value = pair.split("=")
            if key not in _DESCRIBED_KEYS:
                raise ReplayError(f"{text!r}: {key!r} is not known, allowed: {', '.join(_DESCRIBED_KEYS)}")
            values[key] = int(value)
        load = described(agents=max(1, int(found[1] or live)), **values)
        return (load if calls is None else _first(load, calls)), {}
    path = Path(text)
    if path.is_file() and _is_journal(path):
        records = []
        for entry in read(path):
            if isinstance(entry, Record):
                records.append(entry)
                if calls is not None and len(records) >= calls:
                    break
        load = load_of(records)
        if not load.jobs:
            raise ReplayError(f"{path}: no finished request in it")
        return load, {}
    try:
        return of_trace(traces.load(path), live, calls)
    except traces.TraceError as error:
        raise ReplayError(str(error)) from None


def _first(load: Load, calls: int) -> Load:
    jobs = load.jobs[:calls]
    for job in jobs:
        job.followers = [follower for follower in job.followers if follower < calls]
    return Load(jobs, len({job.session for job in jobs}), 0, 0.0)


def _is_journal(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.readline().startswith(b'{"kind":')


async def replay(
    load: Load,
    texts: dict[int, bytes],
    targets: Sequence[Target],
    *,
    rounds: int,
    pace: float,
    model: str | None,
    progress: Callable[[str, int, int], None],
) -> list[Side]:
    """Serve the load ``rounds`` times on each target."""
    sides = [Side(one) for one in targets]
    for number in range(rounds):
        for turn in range(len(sides)):
            side = sides[(turn + number) % len(sides)]
            done = 0
            name = f"{side.target.name}, round {number + 1}"

            def answered(name: str = name) -> None:
                nonlocal done
                done += 1
                progress(name, done, len(load.jobs))

            progress(name, 0, len(load.jobs))
            shape = Shape(load, _salt(number, side.target), texts)
            side.rounds.append(
                await serve(
                    side.target.url,
                    load,
                    shape,
                    key=side.target.key,
                    model=model,
                    pace=pace,
                    answered=answered,
                )
            )
    return sides


def _salt(number: int, server: Target) -> str:
    """A few words, other ones for each round and server, since two servers may share an engine.

    They are equally many and equally long everywhere, so that no server has more to read than another.
    """
    random = Random(f"{number} {server.name} {server.url}")  # noqa: S311  # text, not secrets
    return " ".join(random.choice(_SALTS) for _ in range(8))


# -- what came of it ---------------------------------------------------------------------------------------


def figures(side: Side) -> dict[str, Estimate | None]:
    """All figures of a side, by name; times in seconds."""
    rounds = side.rounds
    return {
        "reuse": Estimate.of([one.reuse for one in rounds if one.reuse is not None]),
        "seconds": Estimate.of([one.seconds for one in rounds]),
        "ttft_p50": Estimate.of([_quantile(one.first_tokens(), 0.5) for one in rounds if one.first_tokens()]),
        "ttft_p95": Estimate.of(
            [_quantile(one.first_tokens(), 0.95) for one in rounds if one.first_tokens()]
        ),
        "ttft_p99": Estimate.of(
            [_quantile(one.first_tokens(), 0.99) for one in rounds if one.first_tokens()]
        ),
        "output_per_second": Estimate.of([one.output / one.seconds for one in rounds if one.seconds]),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def complaints(sides: Sequence[Side]) -> list[str]:
    """What makes the comparison unfair: failures, or sides that did not do the same work."""
    found = []
    for side in sides:
        failures = [call for one in side.rounds for call in one.failures]
        if failures:
            found.append(f"{side.target.name}: {len(failures)} calls failed, the first: {failures[0].error}")
    outputs = {side.target.name: sum(one.output for one in side.rounds) for side in sides}
    if len(set(outputs.values())) > 1:
        told = ", ".join(f"{name} {count:,}" for name, count in outputs.items())
        found.append(f"not as many tokens were generated everywhere: {told}")
    prompts = {side.target.name: sum(one.prompt for one in side.rounds) for side in sides}
    known = [count for count in prompts.values() if count]
    if known and max(known) > 1.02 * min(known):
        told = ", ".join(f"{name} {count:,}" for name, count in prompts.items())
        found.append(f"prompts were not as long everywhere: {told} tokens")
    return found


def show(console: Console, load: Load, sides: Sequence[Side]) -> None:
    """Print the comparison."""
    rounds = len(sides[0].rounds)
    console.print(
        f"{len(load.jobs)} calls of {load.sessions} conversations, {rounds} round(s); "
        "± is half of a 95 % interval over the rounds.",
        soft_wrap=True,
        highlight=False,
    )
    table = Table()
    table.add_column("")
    for name in ("reuse", "wall", "TTFT p50", "TTFT p95", "TTFT p99", "tokens/s", "tokens"):
        table.add_column(name, justify="right")
    forms = {"reuse": "{:.1%}", "output_per_second": "{:.1f}"}
    for side in sides:
        cells = [
            "–" if estimate is None else estimate.text(forms.get(name, "{:.2f} s"))
            for name, estimate in figures(side).items()
        ]
        table.add_row(side.target.name, *cells, f"{sum(one.output for one in side.rounds):,}")
    console.print(table)
    for complaint in complaints(sides):
        console.print(f"NOT COMPARABLE: {complaint}", markup=False, soft_wrap=True, style="red")


def as_json(load: Load, sides: Sequence[Side]) -> dict[str, Any]:
    """Everything as plain values, each call included."""
    return {
        "calls": len(load.jobs),
        "conversations": load.sessions,
        "complaints": complaints(sides),
        "sides": [
            {
                "name": side.target.name,
                "url": side.target.url,
                "figures": {
                    name: None
                    if estimate is None
                    else {"mean": estimate.mean, "half_interval": estimate.half}
                    for name, estimate in figures(side).items()
                },
                "rounds": [
                    {
                        "seconds": one.seconds,
                        "output_tokens": one.output,
                        "prompt_tokens": one.prompt,
                        "reuse": one.reuse,
                        "calls": [
                            {name: getattr(call, name) for name in call.__slots__} for call in one.calls
                        ],
                    }
                    for one in side.rounds
                ],
            }
            for side in sides
        ],
    }
