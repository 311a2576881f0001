"""A few charts as SVG text: stacked columns, lines and bars. No scripts, no outside files. Pure.

Colours are CSS classes of the page (``s0`` … ``s7`` for series), so that a chart follows the page's theme.
Every mark carries its figures as a ``<title>``, which browsers show on hover.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NARROW: Final = 540
WIDE: Final = 1060
HEIGHT: Final = 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 26, 34
_TICKS = 4
_LABEL_WIDTH = 70
_COLUMN = 64.0


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one colour (``style`` is its CSS class), one for each place on the x axis."""

    name: str
    style: str
    values: Sequence[float]


def short(value: float) -> str:
    """A figure with at most three digits and a suffix."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _ceiling(highest: float) -> float:
    """A round number at or above ``highest``."""
    if highest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= highest * 0.999)


def _frame(
    title: str, top: float, labels: Sequence[str], *, unit: str, marks: Sequence[str], width: int
) -> str:
    high = HEIGHT - _TOP - _BOTTOM
    lines = [
        f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text class="unit" x="0" y="12">{escape(unit)}</text>',
    ]
    for tick in range(_TICKS + 1):
        y = _TOP + high * (1 - tick / _TICKS)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{short(top * tick / _TICKS)}</text>"
        )
    step = max(1, math.ceil(len(labels) * _LABEL_WIDTH / width))
    lines += [
        f'<text class="tick" x="{_middle(index, len(labels), width):.1f}" y="{HEIGHT - 12}" '
        'text-anchor="middle">' + escape(labels[index]) + "</text>"
        for index in range(0, len(labels), step)
    ]
    return "\n".join([*lines, *marks, "</svg>"])


def _middle(index: int, count: int, width: int) -> float:
    return _LEFT + (width - _LEFT - _RIGHT) * (index + 0.5) / max(1, count)


def columns(
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    unit: str = "",
    width: int = NARROW,
    tell: Callable[[float], str] = short,
) -> str:
    """Columns, the series stacked on each other from the bottom up."""
    heights = [sum(one.values[index] for one in series) for index in range(len(labels))]
    top = _ceiling(max(heights, default=0.0))
    place = (width - _LEFT - _RIGHT) / max(1, len(labels))
    high, wide = HEIGHT - _TOP - _BOTTOM, min(_COLUMN, place - min(2.0, place * 0.15))
    marks = []
    for index, label in enumerate(labels):
        base, left = float(HEIGHT - _BOTTOM), _middle(index, len(labels), width) - wide / 2
        for one in series:
            tall = high * one.values[index] / top
            if tall <= 0:
                continue
            base -= tall
            marks.append(
                f'<rect class="{one.style}" x="{left:.1f}" y="{base:.1f}" '
                f'width="{wide:.1f}" height="{tall:.1f}"><title>'
                f"{escape(label)}: {escape(one.name)} {tell(one.values[index])}</title></rect>"
            )
    return _frame(title, top, labels, unit=unit, marks=marks, width=width)


def lines(
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    unit: str = "",
    width: int = NARROW,
    tell: Callable[[float], str] = short,
) -> str:
    """Lines with a dot at each value."""
    top = _ceiling(max((value for one in series for value in one.values), default=0.0))
    high = HEIGHT - _TOP - _BOTTOM
    marks = []
    for one in series:
        points = [
            (_middle(index, len(labels), width), HEIGHT - _BOTTOM - high * value / top)
            for index, value in enumerate(one.values)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks.append(f'<polyline class="line {one.style}" points="{path}"/>')
        for (x, y), label, value in zip(points, labels, one.values, strict=True):
            marks.append(
                f'<circle class="{one.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escape(label)}: '
                f"{escape(one.name)} {tell(value)}</title></circle>"
            )
    return _frame(title, top, labels, unit=unit, marks=marks, width=width)


def stripe(title: str, parts: Sequence[tuple[str, str, float]]) -> str:
    """One bar cut by share: name, CSS class and value of each part."""
    whole = sum(value for _, _, value in parts) or 1.0
    at, marks = 0.0, []
    for name, style, value in parts:
        wide = WIDE * value / whole
        marks.append(
            f'<rect class="{style}" x="{at:.1f}" y="0" width="{max(0.0, wide - 1):.1f}" height="28"><title>'
            f"{escape(name)} {short(value)} ({value / whole:.1%})</title></rect>"
        )
        at += wide
    label = escape(title, quote=True)
    return "\n".join([f'<svg viewBox="0 0 {WIDE} 28" role="img" aria-label="{label}">', *marks, "</svg>"])


def legend(series: Sequence[tuple[str, str]]) -> str:
    """Names and CSS classes as a line of HTML."""
    items = "".join(f'<span><i class="{style}"></i>{escape(name)}</span>' for name, style in series)
    return f'<p class="legend">{items}</p>'
