"""``warmslot report``: the figures of a journal or of a running router as tables, a page or JSON."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from warmslot.router.journal import Reading, read
from warmslot.router.records import Record

from . import live
from .blame import Blame
from .findings import SHORT, findings, reasons
from .summary import Gatherer, Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console

    from .summary import Summary, Tokens

TOP = 12
"""Rows of tables that have one for each session or client."""

_STEP = 2_000
"""Lines between two calls of ``progress``."""


def load(
    source: str,
    *,
    key: str | None = None,
    since: float | None = None,
    until: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Summary, Reading]:
    """The figures of a journal's path or a router's address.

    ``since`` and ``until`` are Unix times and bound arrivals; a router cannot be asked for a window. Raises
    :class:`~warmslot.router.journal.JournalError`, :class:`~.live.LiveError`.
    """
    reading = Reading()
    if source.startswith(("http://", "https://")):
        return live.summary(source, live.fetch(source, key)), reading
    gatherer, blame = Gatherer(source), Blame()
    for number, entry in enumerate(read(Path(source), reading)):
        if not isinstance(entry, Record) or (
            (since is None or entry.time >= since) and (until is None or entry.time < until)
        ):
            gatherer.add(blame.explain(entry))
        else:
            blame.explain(entry)  # what it left in its slot counts
        if progress is not None and number % _STEP == 0:
            progress(number)
    return gatherer.summary(), reading


def show(console: Console, summary: Summary, reading: Reading | None = None) -> None:
    """Print all tables that have something to say, then what they mean."""
    console.print(f"[bold]{_heading(summary)}[/bold]")
    for table in tables(summary):
        console.print(table)
    console.print("[bold]What this says[/bold]")
    for finding in findings(summary):
        console.print(f"• {finding}", soft_wrap=True, highlight=False)
    if reading is not None and reading.skipped:
        console.print(
            f"{reading.skipped} of {reading.lines} lines were skipped, the first one: {reading.why}",
            style="yellow",
            soft_wrap=True,
        )


def _heading(summary: Summary) -> str:
    if not summary.start:
        return f"{summary.source}, since it started"
    begin, end = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) for moment in (summary.start, summary.end)
    )
    return f"{summary.source}: {begin} to {end} ({duration(summary.seconds)})"


def duration(seconds: float) -> str:
    """A time for people: ``0.12 s``, ``34 s``, ``12 min``, ``3.4 h``."""
    if seconds < 10:  # noqa: PLR2004
        return f"{seconds:.2f} s"
    if seconds < 600:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"  # noqa: PLR2004


def share(part: float, whole: float) -> str:
    """A percentage, or a dash."""
    return f"{part / whole:.1%}" if whole else "–"


def tables(summary: Summary) -> Iterator[Table]:
    """The tables that have rows."""
    yield _totals(summary)
    if summary.total.processed:
        yield _losses(summary)
    for title, groups in (
        ("By session", summary.sessions),
        ("By client", summary.clients),
        ("By backend", summary.backends),
    ):
        if len(groups) > 1 or (groups and title == "By backend"):
            yield _groups(title, groups)
    if summary.prefill:
        yield _prefill(summary)
    if summary.decode:
        yield _decode(summary)
    if summary.demand:
        yield _demand(summary)
    yield _waits(summary)


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", title_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right")
    return table


def _totals(summary: Summary) -> Table:
    total = summary.total
    table = _table("Totals", "", "")
    rows = [
        ("requests", f"{total.requests:,}"),
        ("ended as", ", ".join(f"{name} {count:,}" for name, count in sorted(summary.statuses.items()))),
        ("placed by", ", ".join(f"{name} {count:,}" for name, count in sorted(summary.decisions.items()))),
        ("prompt tokens", f"{total.prompt:,}"),
        ("of these reused", f"{total.cached:,} ({share(total.cached, total.prompt)})"),
        *([("from host memory", f"{total.host:,}")] if total.host else []),
        ("of these computed", f"{total.processed:,}"),
        (
            "predicted reuse",
            f"{total.predicted:,}"
            + (f" (observed / predicted {summary.calibration:.2f})" if summary.calibration else ""),
        ),
        ("generated tokens", f"{total.output:,}"),
        ("prompt : generated", f"{summary.prompt_per_output:.1f} : 1" if summary.prompt_per_output else "–"),
        ("prefill", duration(summary.prefill_seconds)),
        ("prefill avoided", duration(summary.avoided_seconds)),
        ("decode", duration(summary.decode_seconds)),
        ("slots", ", ".join(f"{name} {count}" for name, count in summary.slots.items()) or "not told"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _losses(summary: Summary) -> Table:
    table = _table("Why tokens were computed", "reason", "meaning", "tokens", "share", left=2)
    for reason, tokens in reasons(summary.total).items():
        table.add_row(reason, SHORT.get(reason, ""), f"{tokens:,}", share(tokens, summary.total.processed))
    return table


def _groups(title: str, groups: Mapping[str, Tokens]) -> Table:
    """The groups that computed most, what they lost first."""
    order = sorted(groups.items(), key=lambda item: -item[1].processed)
    if len(order) > TOP:
        title += f" (the {TOP} of {len(order)} that computed most)"
    table = _table(title, "name", "requests", "prompt tokens", "reused", "computed", "mostly because", left=1)
    for name, tokens in order[:TOP]:
        lost = [
            f"{reason} {share(count, tokens.processed)}"
            for reason, count in list(reasons(tokens).items())[:2]
            if tokens.losses
        ]
        table.add_row(
            *(name, f"{tokens.requests:,}", f"{tokens.prompt:,}", share(tokens.cached, tokens.prompt)),
            *(f"{tokens.processed:,}", ", ".join(lost) or "–"),
        )
    return table


def _prefill(summary: Summary) -> Table:
    table = _table(
        "Prefill by position", "prompt tokens", "computed", "seconds", "tokens/s here", "tokens/s up to here"
    )
    for block in summary.prefill:
        table.add_row(
            *(f"{block.start:,} – {block.end:,}", f"{block.tokens:,.0f}", f"{block.seconds:,.2f}"),
            *(f"{block.marginal_rate:,.1f}", f"{block.cumulative_rate:,.1f}"),
        )
    return table


def _decode(summary: Summary) -> Table:
    table = _table(
        "Decoding by how many do it at once",
        *("at once", "seconds", "tokens", "tokens/s together", "tokens/s each", "against one"),
    )
    alone = next((level.rate for level in summary.decode if level.level == "1"), 0.0)
    for level in summary.decode:
        each = level.rate / int(level.level) if level.level.isdigit() else 0.0
        table.add_row(
            *(level.level, f"{level.seconds:,.1f}", f"{level.tokens:,.0f}", f"{level.rate:,.1f}"),
            *(f"{each:,.1f}" if each else "–", f"× {level.rate / alone:.2f}" if alone else "–"),
        )
    return table


def _demand(summary: Summary) -> Table:
    table = _table("How many requests were there at once (queued or running)", "at once", "time", "share")
    whole = sum(level.seconds for level in summary.demand)
    for level in summary.demand:
        table.add_row(level.level, duration(level.seconds), share(level.seconds, whole))
    return table


def _waits(summary: Summary) -> Table:
    table = _table("Times in seconds", "", "count", "mean", "p50", "p95", "p99", "longest")
    for name, spread in (
        ("in the queue", summary.queue),
        ("to the first token", summary.first_token),
        ("to the end", summary.whole),
    ):
        if spread != Spread():
            times = (spread.mean, spread.p50, spread.p95, spread.p99, spread.highest)
            table.add_row(name, f"{spread.count:,}", *(f"{seconds:,.2f}" for seconds in times))
    return table
