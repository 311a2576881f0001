"""Advice for people and programs: the table, the reason, flags, the piece of configuration, JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .host_memory import MIB, cache_ram
from .report import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from .advise import Advice
    from .forecast import Forecast, Setup

    Memory = Callable[[Setup], int]


def show(console: Console, advice: Advice, memory: Memory | None = None) -> None:
    """Print everything. ``memory``: bytes of a setup where the model is known, else KV tokens."""
    part, load = advice.stretch, advice.load
    which = (
        f"the busiest {len(load.jobs)} of {part.whole}" if part.whole > len(part.records) else len(load.jobs)
    )
    console.print(
        f"{which} requests of {load.sessions} conversations on backend {part.backend}, "
        f"up to {load.live()} of them at once; the longest needs {load.longest:,} tokens.",
        soft_wrap=True,
        highlight=False,
    )
    console.print(_rates(advice), soft_wrap=True, highlight=False)
    console.print(_table(advice, memory))
    for line in advice.unmeasured:
        console.print(line[:1].upper() + line[1:], soft_wrap=True, highlight=False)
    console.print(f"[bold]Advice: {headline(advice)}[/bold]", soft_wrap=True, highlight=False)
    console.print(reason(advice), soft_wrap=True, highlight=False)
    doubts = f": {'; '.join(advice.doubts)}" if advice.doubts else ""
    console.print(f"Confidence: {advice.confidence}{doubts}.", soft_wrap=True, highlight=False)
    console.print(f"It would change with: {'; '.join(advice.changes)}.", soft_wrap=True, highlight=False)
    console.print(
        f"\nllama-server flags:\n  {flags(advice)}\nConfiguration:", soft_wrap=True, highlight=False
    )
    console.print(patch(advice), soft_wrap=True, highlight=False)


def headline(advice: Advice) -> str:
    """The recommendation in a few words."""
    setup = advice.best.setup
    text = f"--parallel {setup.slots}, {_way(advice.best)}, {setup.context:,} tokens of context in each slot"
    if setup.drafts or advice.otherwise is not None:
        text += ", with drafts" if setup.drafts else ", without drafts"
    return text if setup.host is None else f"{text}, {cache_ram(setup.host):,} MiB of RAM cache"


def _way(one: Forecast) -> str:
    words = {
        "serialize": "one at a time",
        "pair": "two at a time",
        "slots": f"all {one.setup.slots} at a time",
        "auto": "as many at a time as pays (auto)",
    }
    return words[one.setup.in_flight]


def _rates(advice: Advice) -> str:
    speeds = advice.speeds
    levels = ", ".join(f"{level} at once {speeds.decode[level]:.1f}" for level in sorted(speeds.seen)[:6])
    copies = f"; {1 / speeds.copy:,.0f} to host memory and back" if speeds.copy else ""
    split = f" ({speeds.split * 1000:.1f} ms for each further pass of a step)" if speeds.split else ""
    first = speeds.prefill_seconds(0, 1024)
    there = advice.load.longest
    late = speeds.prefill_seconds(max(0, there - 1024), there)
    return (
        f"Measured rates in tokens/s: prefill {1024 / first if first else 0:,.0f} at the beginning, "
        f"{1024 / late if late else 0:,.0f} at {there:,}; decode {levels}{split}{copies}; "
        f"{speeds.overhead * 1000:.0f} ms more a request, {speeds.start * 1000:.0f} ms a prefill."
        + _drafts(advice)
    )


def _drafts(advice: Advice) -> str:
    part = advice.stretch
    if not part.drafted:
        return ""
    return f" Of {part.drafted:,} drafted tokens {part.accepted / part.drafted:.0%} were kept."


def _table(advice: Advice, memory: Memory | None) -> Table:
    table = Table(title="The same load, foretold", title_justify="left", header_style="bold")
    table.add_column("slots", justify="right")
    table.add_column("at once")
    table.add_column("context", justify="right")
    drafting = any(one.setup.drafts for one in advice.candidates)
    caching = any(one.setup.host is not None for one in advice.candidates)
    if drafting:
        table.add_column("drafts")
    for name in (
        "reuse",
        "prefill",
        "decode",
        "makespan",
        "TTFT p50",
        "TTFT p95",
        "longest wait",
        "KV tokens" if memory is None else "memory",
        *(["RAM cache"] if caching else []),
    ):
        table.add_column(name, justify="right")
    table.add_column("")

    def row(one: Forecast, note: str) -> None:
        table.add_row(*_row(one, note, memory, drafting=drafting, caching=caching))

    for one in sorted(advice.candidates, key=lambda one: (one.setup.slots, one.makespan)):
        row(one, "advised" if one is advice.best else "")
    table.add_section()
    row(advice.alone, "the engine alone, at its best")
    if advice.recorded is not None:
        row(advice.recorded.forecast, "as recorded, foretold")
        seconds = f"{advice.recorded.seconds:,.1f} s"
        blank = ["", "", ""] + [""] * drafting
        table.add_row(
            *(
                *blank,
                f"{advice.recorded.reuse:.1%}",
                "",
                "",
                seconds,
                "",
                "",
                "",
                "",
                *([""] * caching),
                "as recorded, observed",
            )
        )
    return table


def _row(one: Forecast, note: str, memory: Memory | None, *, drafting: bool, caching: bool) -> list[str]:
    return [
        str(one.setup.slots),
        one.setup.in_flight,
        f"{one.setup.context:,}",
        *(["on" if one.setup.drafts else "off"] if drafting else []),
        f"{one.reuse:.1%}",
        *(f"{seconds:,.1f} s" for seconds in (one.prefill_seconds, one.decode_seconds, one.makespan)),
        *(f"{seconds:,.2f} s" for seconds in (one.ttft_p50, one.ttft_p95, one.longest_wait)),
        f"{one.setup.slots * one.setup.context:,}"
        if memory is None
        else f"{memory(one.setup) / MIB:,.0f} MiB",
        *([_kept(one)] if caching else []),
        note,
    ]


def _kept(one: Forecast) -> str:
    """The most that the cache in host memory keeps; in tokens where their size is not known."""
    host = one.setup.host
    if host is None:
        return "off"
    size = host.token_bytes
    return f"{one.host_tokens * size / MIB:,.0f} MiB" if size else f"{one.host_tokens:,} tokens"


def reason(advice: Advice) -> str:
    """Why, in one paragraph."""
    best, live = advice.best, advice.load.live()
    setup = best.setup
    if live == 1:
        text = (
            "One conversation at a time was under way, so one slot keeps all that can be kept: more slots "
            "would hold contexts that nobody comes back to."
        )
    elif setup.slots >= live:
        text = f"{live} conversations were under way at once, and {setup.slots} slots keep all of them warm."
    else:
        text = (
            f"{live} conversations were under way at once; {setup.slots} slots keep enough of them warm, "
            "since the order in which requests are served spares what is dear to compute again."
        )
    text += (
        f" {best.reuse:.1%} of the prompt tokens would be reused, which leaves "
        f"{duration(best.prefill_seconds)} of prefill, and the load would take {duration(best.makespan)}"
    )
    if best.from_host:
        text += f" ({best.from_host / best.prompt:.1%} of the prompt tokens come back from host memory)"
    others = [one for one in advice.candidates if one.setup.slots != setup.slots]
    if others:
        other = min(others, key=lambda one: one.makespan)
        text += (
            f"; the next best slot count, {other.setup.slots}, would take {duration(other.makespan)} "
            f"at {other.reuse:.1%}"
        )
    text += (
        f". The engine by itself would take {duration(advice.alone.makespan)} at its best "
        f"({advice.alone.setup.slots} slots, {advice.alone.reuse:.1%})."
    )
    same = [one for one in advice.candidates if one.setup.slots == setup.slots and one is not best]
    if setup.slots > 1 and same:
        worst = max(same, key=lambda one: one.makespan)
        text += (
            f" {_way(best).capitalize()} beats {_way(worst)} by {duration(worst.makespan - best.makespan)}."
        )
    return text


def flags(advice: Advice) -> str:
    """The flags of a llama-server that keeps to the advice."""
    setup = advice.best.setup
    size = f"-np {setup.slots} -c {setup.slots * setup.context}"
    return f"{size} --no-kv-unified --no-cache-idle-slots --cache-ram {cache_ram(setup.host)}"


def patch(advice: Advice) -> str:
    """The settings to change in a configuration file."""
    setup = advice.best.setup
    weighed = any(one.setup.host is not None for one in advice.candidates)
    cache = f"\n          cache_ram: {cache_ram(setup.host)}" if weighed else ""
    return (
        "  pools:\n"
        f"    - scheduling: {{in_flight: {setup.in_flight}}}\n"
        "      backends:\n"
        f"        - name: {advice.stretch.backend}\n"
        f"          slots: {setup.slots}\n"
        f"          context: {setup.context}{cache}"
    )


def as_json(advice: Advice, memory: Memory | None = None) -> dict[str, Any]:
    """Everything as plain values; ``memory`` as in :func:`show`."""
    return {
        "backend": advice.stretch.backend,
        "requests": len(advice.load.jobs),
        "requests_in_journal": advice.stretch.whole,
        "sessions": advice.load.sessions,
        "live": advice.load.live(),
        "longest_tokens": advice.load.longest,
        "advice": _forecast_json(advice.best, memory),
        "flags": flags(advice),
        "reason": reason(advice),
        "confidence": advice.confidence,
        "doubts": advice.doubts,
        "unmeasured": advice.unmeasured,
        "would_change": advice.changes,
        "candidates": [_forecast_json(one, memory) for one in advice.candidates],
        "engine_alone": _forecast_json(advice.alone),
        "recorded": None
        if advice.recorded is None
        else {
            "observed_reuse": advice.recorded.reuse,
            "observed_seconds": advice.recorded.seconds,
            "forecast": _forecast_json(advice.recorded.forecast),
            "agrees": advice.recorded.good,
        },
        "rates": {
            "decode_tokens_per_second": {str(n): advice.speeds.decode[n] for n in sorted(advice.speeds.seen)},
            "further_pass_seconds": advice.speeds.split,
            "overhead_seconds": advice.speeds.overhead,
            "prefill_start_seconds": advice.speeds.start,
            "copy_seconds_per_token": advice.speeds.copy or None,
        },
    }


def _forecast_json(one: Forecast, memory: Memory | None = None) -> dict[str, Any]:
    values = asdict(one)
    setup, host = values.pop("setup"), one.setup.host
    del setup["host"]
    return {
        **setup,
        "cache_ram_mib": cache_ram(host),
        "host_memory_bytes": one.host_tokens * host.token_bytes if host and host.token_bytes else None,
        **values,
        "reuse": one.reuse,
        "kv_tokens": one.setup.slots * one.setup.context,
        "memory_bytes": None if memory is None else memory(one.setup),
    }
