"""``warmslot top``: the live view in a terminal, fed by the router's own stream of snapshots.

No text of prompts is shown: the router sends none.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import httpx
import orjson
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .findings import SHORT
from .live import LiveError
from .report import duration, share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console, RenderableType

BAR: Final = 30
"""Characters of a slot's bar."""

HOUR: Final = 3600.0
_MINUTE: Final = 60.0
_COLOURS: Final = ("cyan", "magenta", "yellow", "green", "blue", "red")
_OWN: Final = "white"
_ROWS: Final = 8
_SILENCE: Final = 60.0
"""Seconds without a word (snapshots or comments) after which the router counts as gone."""


def snapshots(client: httpx.Client) -> Iterator[tuple[float, dict[str, Any]]]:
    """Pairs of the router's clock at the beginning, less ours, and a snapshot. Raises :class:`LiveError`."""
    skew = 0.0
    try:
        with client.stream("GET", "/ui/events") as answer:
            if not answer.is_success:
                raise LiveError(_refused(client, answer.status_code))
            event = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    event = line[len("event: ") :]
                elif line.startswith("data: "):
                    data = orjson.loads(line[len("data: ") :])
                    if event == "clock":
                        skew = float(data) - time.time()
                    else:
                        yield skew, data
                    event = ""
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LiveError(f"{client.base_url}: {error or type(error).__name__}") from error
    except (orjson.JSONDecodeError, TypeError, ValueError) as error:
        raise LiveError(f"{client.base_url}/ui/events: not the stream of a warmslot router") from error


def _refused(client: httpx.Client, status: int) -> str:
    words = {401: "asks for a key (--key)", 403: "refuses this key", 404: "shows no live view"}
    return f"{client.base_url}: {words.get(status, f'answered {status}')}"


def watch(console: Console, url: str, *, key: str | None = None, once: bool = False) -> None:
    """Show the router until it stops or the reader does. ``once`` prints one snapshot.

    Raises :class:`LiveError`.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(
        base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=_SILENCE, trust_env=False
    ) as client:
        stream = snapshots(client)
        skew, first = next(stream, (0.0, None))
        if first is None:
            raise LiveError(f"{url}: the stream ended before it began")
        if once:
            console.print(view(first, time.time() + skew))
            return
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as shown:
            latest: dict[str, Any] | None = first
            while latest is not None:
                shown.update(view(latest, time.time() + skew), refresh=True)
                skew, latest = next(stream, (skew, None))


# -- what is shown -----------------------------------------------------------------------------------------


def view(snapshot: Mapping[str, Any], now: float) -> RenderableType:
    """Everything, as it is at ``now`` (the router's clock)."""
    parts: list[RenderableType] = [_reuse(snapshot, now)]
    for backend in snapshot["backends"]:
        parts.append(_slots(backend, now))
        if (advised := backend.get("advised")) and advised["slots"]:
            parts.append(Text(f"advised: {advised['headline']} (confidence {advised['confidence']})"))
    parts += [_queue(pool, now) for pool in snapshot["pools"] if pool["waiting"]]
    if snapshot["finished"]:
        parts.append(_finished(snapshot["finished"], now))
    return Group(*parts)


def _sum(pools: Sequence[Mapping[str, Any]], name: str, columns: int | None = None) -> int:
    """Of all pools, over the last columns of their history."""
    return sum(sum(pool["history"].get(name, ())[-columns if columns else 0 :]) for pool in pools)


def _reuse(snapshot: Mapping[str, Any], now: float) -> RenderableType:
    pools, width = snapshot["pools"], float(snapshot["column_seconds"])
    minute = max(1, round(_MINUTE / width))
    span = width * max((len(pool["history"]["cached"]) for pool in pools), default=0)
    kinds = ("requests", "cached", "processed")
    hour = min(HOUR, max(_MINUTE, now - snapshot["started"]))
    table = Table.grid(padding=(0, 3))
    for _ in range(5):
        table.add_column()
    for name, seconds, sums in (
        ("last minute", _MINUTE, [_sum(pools, kind, minute) for kind in kinds]),
        (f"last {duration(span)}", span, [_sum(pools, kind) for kind in kinds]),
        (f"last {duration(hour)}", hour, [sum(pool["hour"][kind] for pool in pools) for kind in kinds]),
    ):
        requests, cached, processed = sums
        table.add_row(
            name,
            f"[bold]reuse {share(cached, cached + processed)}[/bold]",
            f"{cached / seconds:,.0f} tokens/s reused" if seconds else "",
            f"{processed / seconds:,.0f} tokens/s computed" if seconds else "",
            f"{requests * _MINUTE / seconds:,.1f} requests/min" if seconds else "",
        )
    lost = {reason: _sum(pools, reason) for reason in SHORT if reason != "untold"}
    whole = sum(lost.values())
    told = ", ".join(
        f"{reason} {share(tokens, whole)}"
        for reason, tokens in sorted(lost.items(), key=lambda item: -item[1])
        if tokens
    )
    first = snapshot.get("first_token")
    waits = f"first token: median {first['median']:.2f} s, worst {first['worst']:.2f} s" if first else ""
    return Group(table, Text(f"computed because: {told or '–'}    {waits}"))


def _slots(backend: Mapping[str, Any], now: float) -> Table:
    context = int(backend["context"])
    title = f"{escape(str(backend['name']))} ({backend['state']}), {context:,} tokens a slot"
    if backend["restarts"]:
        title += f", {backend['restarts']} restarts"
    table = Table(title=title, title_justify="left", header_style="bold", expand=False)
    table.add_column("slot", justify="right")
    table.add_column("resident")
    table.add_column("tokens", justify="right")
    table.add_column("shared", justify="right")
    table.add_column("conversation")
    table.add_column("now")
    for slot in backend["slots"]:
        table.add_row(
            str(slot["slot"]),
            bar(slot, context),
            f"{slot['tokens']:,}" if slot["known"] else "?",
            f"{slot['shared']:,}" if slot["shared"] else "",
            slot["conversation"] or "",
            _now(slot, now),
        )
    return table


def bar(slot: Mapping[str, Any], context: int) -> Text:
    """How full a slot is: what others hold too in the colour of its group, then what is its own."""
    full = round(BAR * min(1.0, slot["tokens"] / context)) if context else 0
    shared = min(full, round(BAR * slot["shared"] / context)) if context else 0
    group = slot["group"]
    colour = _OWN if group is None else _COLOURS[group % len(_COLOURS)]
    text = Text("█" * shared, style=colour)
    text.append("█" * (full - shared), style=_OWN if slot["known"] else "dim")
    text.append("·" * (BAR - full), style="dim")
    return text


def _now(slot: Mapping[str, Any], now: float) -> str:
    running = slot["running"]
    if running is None:
        return "" if slot["used"] is None else f"idle for {duration(max(0.0, now - slot['used']))}"
    since = duration(max(0.0, now - running["since"]))
    return (
        f"{running['phase']} for {since}: {escape(str(running['client']))}, "
        f"{running['predicted']:,} of {running['prompt']:,} tokens warm ({running['decision']})"
    )


def _queue(pool: Mapping[str, Any], now: float) -> Table:
    title = f"{escape(str(pool['name']))}: {pool['waiting']} waiting"
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("for", "client", "priority", "size"):
        table.add_column(name)
    for one in pool["queue"][:_ROWS]:
        size = f"{one['tokens']:,} tokens" if one["tokens"] is not None else f"{one['bytes']:,} bytes"
        waited = duration(max(0.0, now - one["since"]))
        table.add_row(waited, escape(str(one["client"])), str(one["priority"]), size)
    return table


def _finished(finished: Sequence[Mapping[str, Any]], now: float) -> Table:
    table = Table(title="Finished last", title_justify="left", header_style="bold")
    for name in ("ago", "slot", "client", "ended", "placed by"):
        table.add_column(name)
    for name in ("reused", "computed", "output", "first token", "took"):
        table.add_column(name, justify="right")
    table.add_column("mostly because")
    for one in finished[:_ROWS]:
        losses = one["losses"]
        counts = ["–" if one[name] is None else f"{one[name]:,}" for name in ("cached", "processed")]
        table.add_row(
            duration(max(0.0, now - one["at"])),
            f"{escape(str(one['backend']))}/{one['slot']}",
            *(escape(str(one["client"])), str(one["status"]), str(one["decision"])),
            *(*counts, f"{one['output']:,}"),
            "–" if one["first_token"] is None else f"{one['first_token']:.2f} s",
            f"{one['took']:.2f} s",
            max(losses, key=lambda reason: losses[reason]) if losses else "",
        )
    return table
