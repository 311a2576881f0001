"""``warmslot bench demo``: the demo workload on the engine as it starts by itself, then through the router.

Both sides run after each other, on the same engine, model and threads, each on a fresh process. What is said
of reuse is what the engine says of itself (``timings`` at the end of every answer).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
import time
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import psutil
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .bare import BareEngineError, bare_engine
from .engine import EngineError, EngineKind, find_engine
from .model import ModelError, find_model
from .workload import ANSWER_TOKENS, TITLE_TOKENS, demo_workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from .engine import Engine
    from .workload import Agent

_REQUEST_TIMEOUT = 600.0
_START_TIMEOUT = 120.0
_CACHE_RAM = 1024
"""MiB of the engine's own prompt cache on the routed side; by default it takes up to 8192."""
_WIDTH = 110
"""Columns of the output where it does not go to a terminal."""


class BenchError(Exception):
    """It cannot be measured; the message is one line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request. Times in seconds, from sending."""

    agent: str
    kind: str
    cached: int
    processed: int
    output: int
    ttft: float
    total: float


@dataclass(slots=True)
class Side:
    """What one way of serving did with the whole workload."""

    name: str
    wall: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens that were presented."""
        return sum(sample.cached + sample.processed for sample in self.samples)

    @property
    def prefilled(self) -> int:
        """Prompt tokens that the engine had to process."""
        return sum(sample.processed for sample in self.samples)

    @property
    def reuse(self) -> float:
        """Share of the prompt tokens that were cached."""
        return 1 - self.prefilled / self.prompt_tokens if self.prompt_tokens else 0.0

    def ttft(self, percentile: int) -> float:
        """A percentile of the time to first token, over all answered requests."""
        times = sorted(sample.ttft for sample in self.samples)
        if len(times) < 2:  # noqa: PLR2004 - quantiles need two points
            return times[0] if times else 0.0
        return quantiles(times, n=100, method="inclusive")[percentile - 1]

    def summary(self) -> dict[str, Any]:
        """The figures of the table, and every request behind them."""
        return {
            "name": self.name,
            "requests": len(self.samples),
            "failures": self.failures,
            "prompt_tokens": self.prompt_tokens,
            "prefilled_tokens": self.prefilled,
            "reuse": round(self.reuse, 4),
            "ttft_p50_seconds": round(self.ttft(50), 4),
            "ttft_p95_seconds": round(self.ttft(95), 4),
            "wall_seconds": round(self.wall, 3),
            "samples": [asdict(sample) for sample in self.samples],
        }


def bench_demo(*, agents: int, slots: int, turns: int, engine: str | None, json: Path | None) -> int:
    """Measure both sides, print the table and write ``json``; the exit code. Raises :class:`BenchError`."""
    try:
        found, model = find_engine(engine), find_model("demo")
    except (EngineError, ModelError) as error:
        raise BenchError(str(error)) from error
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(
        f"{agents} agents of {turns} turns and a title each, {slots} slots; {found.describe()}; {machine()}",
        highlight=False,
        soft_wrap=True,
    )
    workload = demo_workload(agents, turns)
    sides = asyncio.run(_both(found, model, workload, slots, console))
    console.print(table(sides))
    for side in sides:
        for failure in side.failures:
            console.print(f"{side.name}: {failure}", markup=False)
    if json is not None:
        document = {
            "engine": found.describe(),
            "machine": machine(),
            "model": model.name,
            "agents": agents,
            "turns": turns,
            "slots": slots,
            "sides": [side.summary() for side in sides],
        }
        json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    return 1 if any(side.failures for side in sides) else 0


def machine() -> str:
    """The machine in a few words: processor, cores, memory."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
        name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    memory = round(psutil.virtual_memory().total / 2**30)
    return f"{name}, {os.cpu_count()} cores, {memory} GiB"


def table(sides: Sequence[Side]) -> Table:
    """The comparison as people read it."""
    shown = Table()
    shown.add_column("")
    for heading in ("reuse", "tokens prefilled", "TTFT p50", "TTFT p95", "wall"):
        shown.add_column(heading, justify="right")
    for side in sides:
        shown.add_row(
            side.name,
            f"{side.reuse:.1%}",
            f"{side.prefilled:,} of {side.prompt_tokens:,}",
            f"{side.ttft(50):.2f} s",
            f"{side.ttft(95):.2f} s",
            f"{side.wall:.1f} s",
        )
    return shown


async def _both(
    engine: Engine, model: Path, workload: Sequence[Agent], slots: int, console: Console
) -> list[Side]:
    sides = []
    total = sum(len(agent.turns) + 1 for agent in workload)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name, start in (
            ("llama-server, default flags", bare_engine(engine, model)),
            (f"warmslot, {slots} slots", _routed(engine, slots)),
        ):
            bar = progress.add_task(name, total=total)
            try:
                async with start as url:
                    sides.append(await _measure(name, url, workload, partial(progress.advance, bar)))
            except BareEngineError as error:
                raise BenchError(str(error)) from error
    return sides


async def _measure(name: str, url: str, workload: Sequence[Agent], answered: Callable[[], None]) -> Side:
    side = Side(name)
    # A fresh connection for each request: the engine closes one that it has streamed on.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=url, timeout=_REQUEST_TIMEOUT, limits=limits, trust_env=False
    ) as client:
        began = time.perf_counter()
        await asyncio.gather(*(_Live(agent, client, side, answered).run() for agent in workload))
        side.wall = time.perf_counter() - began
    return side


class _Live:
    """One agent at work: a closed loop of requests, each with the whole conversation so far."""

    def __init__(
        self, agent: Agent, client: httpx.AsyncClient, side: Side, answered: Callable[[], None]
    ) -> None:
        self._agent = agent
        self._client = client
        self._side = side
        self._answered = answered

    async def run(self) -> None:
        messages: list[dict[str, str]] = [{"role": "system", "content": self._agent.system}]
        title: asyncio.Task[str] | None = None
        for number, turn in enumerate(self._agent.turns):
            await asyncio.sleep(turn.pause)
            messages.append({"role": turn.role, "content": turn.text})
            answer = await self._ask("turn", messages, ANSWER_TOKENS)
            messages.append({"role": "assistant", "content": answer})
            if number == 0:
                question = [{"role": "user", "content": self._agent.title_request}]
                title = asyncio.create_task(self._ask("title", question, TITLE_TOKENS))
        if title is not None:
            await title

    async def _ask(self, kind: str, messages: list[dict[str, str]], max_tokens: int) -> str:
        body = {
            "model": "demo",
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        try:
            sample, answer = await self._stream(kind, body)
            self._side.samples.append(sample)
        except (httpx.HTTPError, BenchError) as error:
            self._side.failures.append(f"{self._agent.name}: {kind}: {error or type(error).__name__}")
            answer = ""
        self._answered()
        return answer

    async def _stream(self, kind: str, body: dict[str, Any]) -> tuple[Sample, str]:
        began = time.perf_counter()
        ttft: float | None = None
        parts: list[str] = []
        timings: dict[str, Any] = {}
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if not answer.is_success:
                raise BenchError(f"status {answer.status_code}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = orjson.loads(line[len("data: ") :])
                if "error" in chunk:
                    raise BenchError(str(chunk["error"].get("message")))
                timings = chunk.get("timings") or timings
                text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if text and ttft is None:
                    ttft = time.perf_counter() - began
                parts.append(text)
        total = time.perf_counter() - began
        if "prompt_n" not in timings:
            raise BenchError("the answer ended without timings")
        return Sample(
            agent=self._agent.name,
            kind=kind,
            cached=timings["cache_n"],
            processed=timings["prompt_n"],
            output=timings["predicted_n"],
            ttft=total if ttft is None else ttft,
            total=total,
        ), "".join(parts)


def _routed(engine: Engine, slots: int) -> AbstractAsyncContextManager[str]:
    backend = {"name": "demo", "model": "demo", "slots": slots, "cache_ram": _CACHE_RAM}
    return routed({"engine": engine_setting(engine), "pools": [{"name": "demo", "backends": [backend]}]})


def engine_setting(engine: Engine) -> str | None:
    """The ``engine`` setting that finds this engine."""
    return EngineKind.EMBEDDED.value if engine.kind is EngineKind.EMBEDDED else engine.path


@asynccontextmanager
async def routed(config: dict[str, Any]) -> AsyncIterator[str]:
    """``warmslot up`` on a configuration, as a process of its own; the value is its address.

    Raises :class:`BenchError` if it does not start.
    """
    with TemporaryDirectory(prefix="warmslot-bench-") as folder:
        file = f"{folder}/bench.yaml"
        with open(file, "w", encoding="utf-8") as text:  # noqa: ASYNC230, PTH123 - a few bytes
            yaml.safe_dump(config, text)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "warmslot.launcher", "up", file, "--port", "0", "--quiet"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "STATE_DIRECTORY": f"{folder}/state"},  # gone with the folder
        )
        reader: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                url = await _address(process)
            reader = asyncio.create_task(_drain(process))
            yield url
        finally:
            if process.returncode is None:
                process.terminate()
            await asyncio.gather(process.wait(), *([reader] if reader else []))


async def _address(process: asyncio.subprocess.Process) -> str:
    said = []
    if process.stdout is not None:
        while line := (await process.stdout.readline()).decode(errors="replace"):
            if line.startswith("Serving at "):
                return line.split()[2].removesuffix("/v1")
            said.append(line.strip())
    raise BenchError("warmslot up did not start: " + " / ".join(said[-5:]))


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Keep reading, so that it is never held up by a full pipe."""
    if process.stdout is not None:
        while await process.stdout.read(65536):
            pass
