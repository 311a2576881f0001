"""A recorded trace on a real engine: the engine alone, and the router over it, side by side in one run.

``python -m tests.bench.live_traces FOLDER`` replays text sessions (``{timestamp, input, output}``, one call a
line) in a closed loop: ``--live`` sessions are open at once, a session's next call is sent when its last has
been answered, and when one ends the next begins. Every case starts a fresh engine:

- ``defaults``: the engine as it starts by itself (four slots, unified KV, its own RAM cache);
- ``plain``: ``--slots`` explicit slots, no RAM cache; ``plain-ram``: the same with it;
- ``router``: warmslot over the flags of ``plain``; ``router-ram``: with the engine's RAM cache on.

Reuse is what the engine says (``timings``); times are the client's. Results go to ``--json``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from warmslot.launcher.bare import bare_engine
from warmslot.launcher.bench import engine_setting, machine, routed
from warmslot.launcher.engine import find_engine
from warmslot.launcher.model import find_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from warmslot.launcher.engine import Engine

RAM_MIB = 8192


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded request: the whole prompt, and how many tokens to answer."""

    prompt: str
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Setup:
    """What all cases share. ``context`` is tokens per slot."""

    engine: Engine
    model: Path
    slots: int
    context: int
    live: int
    in_flight: str
    max_wait: str
    flags: tuple[str, ...]
    journal: Path | None

    def explicit(self, ram: int) -> tuple[str, ...]:
        """Flags of an engine with a slot count of its operator's choice."""
        count, total = str(self.slots), str(self.slots * self.context)
        apart = ("--no-kv-unified", "--no-cache-idle-slots", "--cache-ram", str(ram))
        return ("-np", count, "-c", total, *apart, *self.flags)


@dataclass(slots=True)
class Result:
    """One case. Counts are tokens, times seconds."""

    case: str
    makespan: float = 0.0
    cached: int = 0
    processed: int = 0
    output: int = 0
    ttft: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    prefill: float = 0.0
    decode: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def reuse(self) -> float:
        """Share of the prompt tokens that the engine had cached."""
        return self.cached / max(1, self.cached + self.processed)

    def percentile(self, share: float) -> float:
        """Of the time to first token."""
        times = sorted(self.ttft)
        return times[min(len(times) - 1, int(share * len(times)))] if times else 0.0

    def summary(self) -> dict[str, Any]:
        """The figures, as they are written down."""
        return {
            "case": self.case,
            "requests": len(self.ttft),
            "failures": self.failures,
            "reuse": round(self.reuse, 4),
            "prompt_tokens": self.cached + self.processed,
            "output_tokens": self.output,
            "makespan_seconds": round(self.makespan, 2),
            "prefill_seconds": round(self.prefill, 2),
            "decode_seconds": round(self.decode, 2),
            "ttft_seconds": {
                "mean": round(sum(self.ttft) / max(1, len(self.ttft)), 3),
                **{f"p{int(100 * p)}": round(self.percentile(p), 3) for p in (0.5, 0.95, 0.99)},
                "max": round(self.percentile(1.0), 3),
            },
        }


def read(folder: Path, answer_tokens: int, sessions: int, calls: int) -> list[list[Call]]:
    """Sessions by the time of their first call; ``0`` means all of them, and answers as long as recorded."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
        records.sort(key=lambda record: record["timestamp"])
        if records:
            found.append((records[0]["timestamp"], records))
    found.sort(key=lambda pair: pair[0])
    if not found:
        raise typer.BadParameter(f"{folder}: holds no text sessions (*.jsonl)")
    return [
        [
            Call(record["input"] or " ", answer_tokens or max(1, len(record["output"]) // 4))
            for record in records[: calls or None]
        ]
        for _, records in found[: sessions or None]
    ]


async def replay(
    case: str, url: str, sessions: list[list[Call]], live: int, answered: Callable[[], None]
) -> Result:
    """Send everything and wait for the last answer."""
    result = Result(case)
    begun = iter(sessions)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    # No timeout: how long a request waits is what is measured.
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:  # noqa: S113

        async def agent() -> None:
            for session in begun:
                for call in session:
                    try:
                        await _ask(client, call, result)
                    except (httpx.HTTPError, RuntimeError) as error:
                        result.failures.append(f"{type(error).__name__}: {error}"[:200])
                    answered()

        began = time.perf_counter()
        await asyncio.gather(*(agent() for _ in range(live)))
        result.makespan = time.perf_counter() - began
    return result


async def _ask(client: httpx.AsyncClient, call: Call, result: Result) -> None:
    body = {
        "prompt": call.prompt,
        "n_predict": call.answer_tokens,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": True,
    }
    began, first, timings = time.perf_counter(), None, None
    async with client.stream("POST", "/completion", json=body) as answer:
        if not answer.is_success:
            raise RuntimeError(f"status {answer.status_code}: {(await answer.aread())[:160]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if first is None and '"content"' in line:
                first = time.perf_counter() - began
            if '"timings"' in line:
                timings = json.loads(line[len("data: ") :])["timings"]
    if timings is None or first is None:
        raise RuntimeError("the answer ended without timings")
    result.cached += timings["cache_n"]
    result.processed += timings["prompt_n"]
    result.output += timings["predicted_n"]
    result.prefill += timings["prompt_ms"] / 1000
    result.decode += timings["predicted_ms"] / 1000
    result.ttft.append(first)
    result.total.append(time.perf_counter() - began)


def over(setup: Setup, ram: int) -> AbstractAsyncContextManager[str]:
    """The router over ``setup``'s engine, with ``ram`` MiB of the engine's own cache."""
    backend: dict[str, Any] = {
        "name": "bench",
        "model": str(setup.model),
        "slots": setup.slots,
        "context": setup.context,
        "cache_ram": ram,
        "args": list(setup.flags),
    }
    scheduling = {"in_flight": setup.in_flight, "max_wait": setup.max_wait}
    pool = {"name": "bench", "default": True, "scheduling": scheduling, "backends": [backend]}
    config: dict[str, Any] = {"engine": engine_setting(setup.engine), "pools": [pool]}
    if setup.journal is not None:
        config["journal"] = {"path": str(setup.journal.resolve())}
        config["advice"] = {"every": 0}  # its process would be measured as well
    return routed(config)


async def run(cases: list[str], setup: Setup, sessions: list[list[Call]], console: Console) -> list[Result]:
    """All cases, one after the other."""
    results = []
    total = sum(len(session) for session in sessions)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for case in cases:
            bar = progress.add_task(case, total=total)
            match case:
                case "defaults":
                    start = bare_engine(setup.engine, setup.model, *setup.flags)
                case "plain" | "plain-ram":
                    ram = RAM_MIB if case == "plain-ram" else 0
                    start = bare_engine(setup.engine, setup.model, *setup.explicit(ram))
                case "router" | "router-ram":
                    start = over(setup, RAM_MIB if case == "router-ram" else 0)
                case _:
                    raise typer.BadParameter(
                        f"case {case!r}: allowed are defaults, plain, plain-ram, router, router-ram"
                    )
            async with start as url:
                results.append(
                    await replay(case, url, sessions, setup.live, lambda bar=bar: progress.advance(bar))
                )
    return results


def main(  # noqa: PLR0917 - typer passes them by name
    traces: Annotated[Path, typer.Argument(help="Folder of text sessions.")],
    cases: Annotated[str, typer.Option(help="Cases, in this order.")] = "defaults,plain,router,router-ram",
    model: Annotated[str, typer.Option(help="A GGUF file, or demo.")] = "demo",
    engine: Annotated[str | None, typer.Option(help="Path of a llama-server, or embedded.")] = None,
    slots: Annotated[int, typer.Option(min=1)] = 4,
    context: Annotated[int, typer.Option(help="Tokens per slot.")] = 2048,
    live: Annotated[int, typer.Option(help="Sessions open at once.")] = 12,
    answer: Annotated[int, typer.Option(help="Tokens of each answer; 0 = as recorded.")] = 8,
    sessions: Annotated[int, typer.Option(help="Sessions to replay; 0 = all.")] = 0,
    calls: Annotated[int, typer.Option(help="Calls of each session; 0 = all.")] = 0,
    in_flight: Annotated[str, typer.Option(help="Policy of the router.")] = "auto",
    max_wait: Annotated[str, typer.Option(help="Bound on waiting in the router.")] = "auto",
    flags: Annotated[str, typer.Option(help="Further flags of the engine, as one string.")] = "-t 2",
    journal: Annotated[Path | None, typer.Option(help="Where the router writes its journal.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the results go.")] = None,
) -> None:
    """Replay a trace on a real engine, alone and through the router."""
    setup = Setup(
        engine=find_engine(engine),
        model=find_model(model),
        slots=slots,
        context=context,
        live=live,
        in_flight=in_flight,
        max_wait=max_wait,
        flags=tuple(flags.split()),
        journal=journal,
    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    replayed = read(traces, answer, sessions, calls)
    console.print(
        f"{traces.name}: {len(replayed)} sessions, {live} live; {setup.engine.describe()}; {machine()}"
    )
    results = asyncio.run(run(cases.split(","), setup, replayed, console))
    table = Table("", *("reuse", "makespan", "TTFT mean", "p50", "p95", "p99", "max", "failed"))
    for result in results:
        figures = result.summary()["ttft_seconds"]
        table.add_row(
            result.case,
            f"{result.reuse:.3f}",
            f"{result.makespan:.1f} s",
            *(f"{figures[name]:.2f} s" for name in ("mean", "p50", "p95", "p99", "max")),
            str(len(result.failures)),
        )
    console.print(table)
    if json_file is not None:
        document = {
            "trace": traces.name,
            "machine": machine(),
            "engine": setup.engine.describe(),
            "slots": slots,
            "live": live,
            "in_flight": in_flight,
            "results": [result.summary() for result in results],
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if any(result.failures for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
