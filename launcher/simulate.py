"""``warmslot simulate``: what reuse, time and waiting a trace would see, by policy, slots and live sessions.

The policies ``reuse`` and ``fifo`` are the router's own code. ``engine`` is llama-server's own choice of slot
in arrival order, ``clairvoyant`` the same order with knowledge of every session's next call, ``infinite`` a
cache that forgets nothing.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path  # noqa: TC003  # the command line is built from annotations at run time
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.values import HostMemory

from .modelled import BACKEND, POOL, Engine
from .replay import Arrival, Clients, Served, Speed, replay
from .rivals import ArrivalOrder, Clairvoyant, EngineSelection, Unbounded
from .traces import Order, Trace, TraceError, load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmslot.router.scheduler import InFlight

    from .modelled import Policy

PolicyName = Literal["engine", "fifo", "reuse", "clairvoyant", "infinite"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
_ENDLESS_CONTEXT = 1 << 30
_SPEED = Speed()
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """One run of the simulator. Times are seconds; ``max_wait`` ``None`` lets the router adapt it.

    ``host``: the engine runs with a prompt cache in host memory of this size.
    """

    policy: PolicyName
    slots: int
    live: int
    arrival: Arrival = "closed"
    in_flight: InFlight = "serialize"
    max_wait: float | None = None
    linger: float | None = None
    think: float = 0.0
    rate: float = 1.0
    speed: Speed = _SPEED
    host: HostMemory | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. Shares are of all prompt tokens; times are seconds of virtual time."""

    trace: str
    arrival: str
    live: int
    slots: int
    policy: str
    max_wait: str
    reuse: float
    of_limit: float
    prefill_s: float
    makespan_s: float
    longest_wait_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    ttft_max_s: float
    predicted: float
    """Reuse that the router predicted when it placed the requests; the rivals predict nothing."""
    from_host: float = 0.0
    """Of the reuse, what the engine's prompt cache in host memory added."""


def simulate_one(trace: Trace, setup: Setup, progress: Callable[[int], None] | None = None) -> list[Served]:
    """Replay one trace under one setup."""
    unbounded = setup.policy == "infinite"
    policy = _policy(trace, setup)
    clients = Clients(trace, setup.live, setup.arrival, rate=setup.rate, think=setup.think)
    host = None if unbounded else setup.host
    engine = Engine(setup.slots, unbounded=unbounded, host=host, pinned=setup.policy != "engine")
    expect = policy.expect if isinstance(policy, ArrivalOrder) else None
    return replay(clients, policy, engine, setup.speed, on_arrival=expect, progress=progress)


def _policy(trace: Trace, setup: Setup) -> Policy:
    limit = {"serialize": 1, "pair": 2, "slots": setup.slots, "auto": 1}[setup.in_flight]
    limit = min(limit, setup.slots)
    if setup.policy == "engine":
        return EngineSelection(setup.slots, limit)
    if setup.policy == "clairvoyant":
        return Clairvoyant(setup.slots, limit, trace, setup.speed)
    if setup.policy == "infinite":
        return Unbounded(setup.slots, limit)
    settings = CoreSettings(
        in_flight=setup.in_flight,
        queue=setup.policy,
        max_wait=setup.max_wait,
        linger=setup.linger,
        max_queue=max(1, trace.calls),
    )
    core = RouterCore({POOL: settings})
    core.backend_up(BACKEND, POOL, setup.slots, _ENDLESS_CONTEXT, 0.0, known_empty=True, host=setup.host)
    return core


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarise(trace: Trace, setup: Setup, served: Sequence[Served], limit: float) -> Row:
    """One row from a replay. ``limit``: reuse of the infinite cache on the same trace."""
    prompt = sum(s.prompt_tokens for s in served)
    cached = sum(s.cached_tokens for s in served)
    ttft = sorted(s.first_token - s.arrived for s in served)
    reuse = cached / prompt
    return Row(
        trace=trace.name,
        arrival=setup.arrival,
        live=setup.live,
        slots=setup.slots,
        policy=setup.policy,
        max_wait="auto" if setup.max_wait is None else f"{setup.max_wait:g}",
        reuse=reuse,
        of_limit=reuse / limit if limit else 1.0,
        prefill_s=sum(setup.speed.prefill_seconds(s.cached_tokens, s.prompt_tokens) for s in served),
        makespan_s=max(s.finished for s in served),
        longest_wait_s=max(s.granted - s.arrived for s in served),
        ttft_mean_s=sum(ttft) / len(ttft),
        ttft_p50_s=_quantile(ttft, 0.50),
        ttft_p95_s=_quantile(ttft, 0.95),
        ttft_p99_s=_quantile(ttft, 0.99),
        ttft_max_s=ttft[-1],
        predicted=sum(s.predicted_tokens for s in served) / prompt,
        from_host=sum(s.host_tokens for s in served) / prompt,
    )


def table(rows: Sequence[Row]) -> Table:
    """The rows for people."""
    out = Table(title=None, header_style="bold")
    for name in ("trace", "live", "slots", "policy", "max wait"):
        out.add_column(name)
    for name in ("reuse", "from host", "of limit", "prefill", "makespan", "longest wait"):
        out.add_column(name, justify="right")
    for name in ("mean", "p50", "p95", "p99", "max"):
        out.add_column(f"TTFT {name}", justify="right")
    for row in rows:
        times = (row.ttft_mean_s, row.ttft_p50_s, row.ttft_p95_s, row.ttft_p99_s, row.ttft_max_s)
        out.add_row(
            row.trace,
            str(row.live),
            str(row.slots),
            row.policy,
            row.max_wait if row.policy == "reuse" else "",
            f"{row.reuse:.3f}",
            f"{row.from_host:.3f}" if row.from_host else "",
            f"{row.of_limit:.3f}",
            f"{row.prefill_s:,.0f} s",
            f"{row.makespan_s:,.0f} s",
            f"{row.longest_wait_s:,.1f} s",
            *(f"{seconds:,.2f}" for seconds in times),
        )
    return out


def _numbers(value: str, what: str) -> list[int]:
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(
            f"{value!r}: expected whole numbers from 1, separated by commas", param_hint=what
        )
    return numbers


def _waits(value: str) -> list[float | None]:
    try:
        return [None if part == "auto" else float(part) for part in value.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{value!r}: expected seconds or 'auto', separated by commas", param_hint="--max-wait"
        ) from None


def _choices(value: str, allowed: Sequence[str], what: str) -> list[str]:
    parts = value.split(",")
    for part in parts:
        if part not in allowed:
            raise typer.BadParameter(f"{part!r}: allowed are {', '.join(allowed)}", param_hint=what)
    return parts


def simulate(  # noqa: PLR0917  # one parameter for each option of the command
    traces: Annotated[list[Path], typer.Argument(help="Trace files, or folders of text sessions.")],
    slots: Annotated[str, typer.Option(help="Slot counts, separated by commas.")] = "4,8",
    live: Annotated[str, typer.Option(help="Sessions open at once, separated by commas.")] = "12",
    policies: Annotated[str, typer.Option(help=f"Of {', '.join(POLICIES)}.")] = ",".join(POLICIES),
    max_wait: Annotated[str, typer.Option(help="Bounds on waiting for 'reuse': seconds or auto.")] = "auto",
    arrival: Annotated[
        str, typer.Option(help="closed, round-robin (placement alone) or open (as recorded).")
    ] = "closed",
    in_flight: Annotated[str, typer.Option(help="serialize, pair, slots or auto.")] = "serialize",
    order: Annotated[str, typer.Option(help="In which order sessions begin: time or name.")] = "time",
    tokens: Annotated[str, typer.Option(help="How text becomes tokens: chars/4.")] = "chars/4",
    prefill: Annotated[
        float | None, typer.Option(help="Prefill, tokens/s; else the trace's own, or 500.")
    ] = None,
    decode: Annotated[
        float | None, typer.Option(help="Decoding of one request alone, tokens/s; else the trace's, or 24.")
    ] = None,
    gain: Annotated[
        float, typer.Option(help="What each further decoding request adds to the total rate.")
    ] = 0.7,
    split: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="What each further pass of a decoding step costs, as a share of a step of one request: "
            "without --kv-unified, slots whose numbers do not follow one another take one each. 0 = nothing.",
        ),
    ] = 0.0,
    halving: Annotated[
        float, typer.Option(help="Position in tokens at which prefill is half as fast; 0 = never.")
    ] = 0.0,
    think: Annotated[
        float, typer.Option(help="Seconds between an answer and the session's next call.")
    ] = 0.0,
    rate: Annotated[float, typer.Option(help="Speeds up the recorded times of open arrival.")] = 1.0,
    cache_ram: Annotated[
        int, typer.Option(help="MiB of the engine's prompt cache in host memory (--cache-ram); 0 = none.")
    ] = 0,
    token_bytes: Annotated[
        int, typer.Option(help="Bytes of one token of context in it, as `warmslot plan` tells; 0 = no limit.")
    ] = 0,
    copy: Annotated[
        float, typer.Option(help="Tokens/s that are saved to it or loaded from it; 0 = in no time.")
    ] = 0.0,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", help="Write the rows to this file as well.")
    ] = None,
) -> None:
    """Replay recorded traces on a modelled engine and compare policies, slot counts and live sessions."""
    _choices(tokens, ("chars/4",), "--tokens")
    (arrives,) = _choices(arrival, get_args(Arrival), "--arrival")[:1]
    (flight,) = _choices(in_flight, ("serialize", "pair", "slots", "auto"), "--in-flight")[:1]
    (begins,) = _choices(order, get_args(Order), "--order")[:1]
    names = _choices(policies, POLICIES, "--policies")
    speed = Speed(gain=gain, halving=halving, copy=copy, split=split)
    host = HostMemory(cache_ram * _MIB, token_bytes) if cache_ram else None
    try:
        loaded = [load(path, cast("Order", begins)) for path in traces]
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="TRACES") from None
    waits = _waits(max_wait)
    setups = [
        Setup(
            cast("PolicyName", name),
            count,
            sessions,
            arrival=cast("Arrival", arrives),
            in_flight=cast("InFlight", flight),
            max_wait=wait,
            think=think,
            rate=rate,
            speed=speed,
            host=host,
        )
        for sessions in _numbers(live, "--live")
        for count in _numbers(slots, "--slots")
        for name in names
        for wait in (waits if name == "reuse" else waits[:1])
    ]
    rows = [
        row
        for trace in loaded
        for row in run_all([trace], [_at_speed(setup, trace, prefill, decode) for setup in setups])
    ]
    Console(width=None if sys.stdout.isatty() else 200).print(table(rows))
    if csv_path is not None:
        write_csv(csv_path, rows)


def _at_speed(setup: Setup, trace: Trace, prefill: float | None, decode: float | None) -> Setup:
    """The rates asked for, else those of the recording, else the defaults."""
    speed = replace(
        setup.speed,
        prefill=prefill or trace.prefill or setup.speed.prefill,
        decode=decode or trace.decode or setup.speed.decode,
    )
    return replace(setup, speed=speed)


def run_all(traces: Sequence[Trace], setups: Sequence[Setup]) -> list[Row]:
    """Every setup on every trace, with a progress bar on a terminal's standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        for trace in traces:
            limits: dict[tuple[int, str], float] = {}
            for setup in setups:
                limit_key = (setup.live, setup.arrival)
                if limit_key not in limits:
                    endless = Setup(
                        "infinite", 1, setup.live, arrival=setup.arrival, speed=setup.speed, rate=setup.rate
                    )
                    served = simulate_one(trace, endless)
                    total = sum(s.prompt_tokens for s in served)
                    limits[limit_key] = sum(s.cached_tokens for s in served) / total
                task = bar.add_task(f"{trace.name} {setup.policy}, {setup.slots} slots", total=trace.calls)
                served = simulate_one(trace, setup, partial(_show, bar, task))
                rows.append(summarise(trace, setup, served, limits[limit_key]))
                bar.remove_task(task)
    return rows


def _show(bar: Progress, task: TaskID, done: int) -> None:
    bar.update(task, completed=done)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """The rows for programs: one header line, then one line for each row."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    typer.run(simulate)
