"""``warmslot report --html``: the report as one page that needs nothing else, light or dark. Pure."""

from __future__ import annotations

import time
from html import escape
from typing import TYPE_CHECKING, Final

from . import charts
from .charts import Series
from .findings import SHORT, findings, reasons
from .report import duration, share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .summary import Summary

_STYLES: Final = {
    "cached": "cached",
    "new": "new",
    "evicted": "evicted",
    "busy": "busy",
    "diverged": "diverged",
    "restarted": "restarted",
    "engine": "engine",
    "untold": "untold",
}

_CSS: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --paper: #fbfbfa; --card: #fff;
  --rule: #e3e5e8; --cached: #2f7d5b; --new: #9aa7b5; --evicted: #c8553d; --busy: #e0a458;
  --diverged: #7b5ea7; --restarted: #4a6fa5; --engine: #8c6d46; --untold: #cfd5dc; --accent: #2563a8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4b1; --paper: #14181d;
  --card: #1b2027; --rule: #2c333c; --cached: #4fae84; --new: #6b7785; --evicted: #e0705a; --busy: #e5b26c;
  --diverged: #a58bd0; --restarted: #7396cc; --engine: #b39163; --untold: #3b444f; --accent: #6ea8e6; } }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
main { max-width: 1100px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 16px; margin: 0 0 10px; }
.sub, .note { color: var(--soft); margin: 2px 0 18px; } .note { margin: 6px 0 0; font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile, section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 14px 16px; }
.tile b { display: block; font-size: 24px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px; }
section { margin-top: 14px; overflow-x: auto; } .grid2 section { margin-top: 0; } .grid2 { margin-top: 14px; }
ul { margin: 0; padding-left: 18px; } li { margin: 4px 0; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--rule); } .line { fill: none; stroke-width: 2; } .unit { font-size: 11px; }
.legend { margin: 8px 0 0; font-size: 13px; color: var(--soft); }
.legend span { margin-right: 14px; white-space: nowrap; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
td.words, th.words { text-align: left; white-space: normal; }
"""

_ROWS: Final = 40


def page(summary: Summary) -> str:
    """The whole document."""
    parts = [
        f"<h1>warmslot report</h1><p class='sub'>{escape(_window(summary))}</p>",
        _tiles(summary),
        _section("What this says", _list(findings(summary))),
        *_over_time(summary),
        *_losses(summary),
        "<div class='grid2'>",
        *_curves(summary),
        "</div>",
        *_sessions(summary),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>warmslot report</title><style>{_CSS}{_colours()}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _colours() -> str:
    names = [*_STYLES.values(), "accent"]
    return "\n".join(
        f"rect.{name}, circle.{name} {{ fill: var(--{name}); }} .line.{name} {{ stroke: var(--{name}); }} "
        f"i.{name} {{ background: var(--{name}); }}"
        for name in names
    )


def _window(summary: Summary) -> str:
    if not summary.start:
        return f"{summary.source}, since it started"
    begin, end = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) for moment in (summary.start, summary.end)
    )
    return f"{summary.source}: {begin} to {end} ({duration(summary.seconds)})"


def _tiles(summary: Summary) -> str:
    total = summary.total
    ratio = f"{summary.prompt_per_output:.1f} : 1" if summary.prompt_per_output else "–"
    tiles = [
        (share(total.cached, total.prompt), "of prompt tokens reused"),
        (duration(summary.avoided_seconds), "of prefill avoided"),
        (f"{total.requests:,}", "requests"),
        (ratio, "prompt to generated tokens"),
        (f"{summary.first_token.p95:.2f} s", "to the first token, p95"),
        (f"{summary.queue.p95:.2f} s", "in the queue, p95"),
    ]
    cells = "".join(f"<div class='tile'><b>{value}</b><span>{label}</span></div>" for value, label in tiles)
    return f"<div class='tiles'>{cells}</div>"


def _section(title: str, content: str, note: str = "") -> str:
    small = f"<p class='note'>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{content}{small}</section>"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _over_time(summary: Summary) -> Iterator[str]:
    buckets = summary.buckets
    if len(buckets) < 2:  # noqa: PLR2004
        return
    names = [name for name in _STYLES if name in {"cached", *reasons(summary.total)}]
    series = []
    for name in names:
        if name == "cached":
            values = [float(bucket.tokens.cached) for bucket in buckets]
        else:
            values = [float(reasons(bucket.tokens).get(name, 0)) for bucket in buckets]
        series.append(Series("reused" if name == "cached" else name, _STYLES[name], values))
    labels = [time.strftime("%H:%M", time.localtime(bucket.start)) for bucket in buckets]
    chart = charts.columns("Prompt tokens over time", labels, series, unit="tokens", width=charts.WIDE)
    yield _section(
        "Prompt tokens over time: reused, and why the rest was computed",
        chart + charts.legend([(one.name, one.style) for one in series]),
    )


def _losses(summary: Summary) -> Iterator[str]:
    lost = reasons(summary.total)
    if not lost:
        return
    stripe = charts.stripe("Why tokens were computed", [(name, _STYLES[name], n) for name, n in lost.items()])
    rows = [
        [name, SHORT.get(name, ""), f"{count:,}", share(count, summary.total.processed)]
        for name, count in lost.items()
    ]
    legend = charts.legend([(name, _STYLES[name]) for name in lost])
    yield _section(
        "Why tokens were computed",
        stripe + legend + _table(("reason", "meaning", "tokens", "share"), rows, words=(1,)),
    )


def _curves(summary: Summary) -> Iterator[str]:
    if summary.prefill:
        labels = [f"{block.end // 1024}k" for block in summary.prefill]
        series = [
            Series("here", "accent", [block.marginal_rate for block in summary.prefill]),
            Series("from the beginning", "busy", [block.cumulative_rate for block in summary.prefill]),
        ]
        yield _section(
            "Prefill rate by position",
            charts.lines("Prefill rate by position", labels, series, unit="tokens/s")
            + charts.legend([(one.name, one.style) for one in series]),
            "A block ends at the position shown. A token costs more further on: it attends to all before it.",
        )
    if summary.decode:
        labels = [level.level for level in summary.decode]
        rates = Series("together", "cached", [level.rate for level in summary.decode])
        yield _section(
            "Decode rate by how many decode at once",
            charts.columns("Decode rate", labels, [rates], unit="tokens/s"),
            "All of them together. Where the next column is no higher, sharing gains nothing.",
        )
    if summary.demand:
        labels = [level.level for level in summary.demand]
        seconds = Series("seconds", "restarted", [level.seconds for level in summary.demand])
        yield _section(
            "Time with so many requests at once",
            charts.columns("Time by demand", labels, [seconds], unit="seconds"),
            "Queued or running.",
        )


def _sessions(summary: Summary) -> Iterator[str]:
    for title, groups in (
        ("Sessions", summary.sessions),
        ("Clients", summary.clients),
        ("Backends", summary.backends),
    ):
        if not groups:
            continue
        order = sorted(groups.items(), key=lambda item: -item[1].processed)[:_ROWS]
        rows = [
            [
                *(name, f"{tokens.requests:,}", f"{tokens.prompt:,}", share(tokens.cached, tokens.prompt)),
                f"{tokens.processed:,}",
                ", ".join(f"{reason} {share(count, tokens.processed)}" for reason, count in lost[:3]),
            ]
            for name, tokens in order
            if (lost := list(reasons(tokens).items())) is not None
        ]
        more = f"The {_ROWS} of {len(groups)} that computed most." if len(groups) > _ROWS else ""
        heads = ("name", "requests", "prompt tokens", "reused", "computed", "because")
        yield _section(title, _table(heads, rows, words=(5,)), more)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: tuple[int, ...] = ()) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="words"' if index in words else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", index, text) for index, text in enumerate(heads))
    body = "".join(f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
