"""Grafana's dashboard JSON from short descriptions: panels, queries, variables, layout.

Queries name metrics of the router's catalogue; which labels a metric can be filtered by is read from the
code that exports it, so a misspelt metric or a filter on a label that it lacks is an error here, not an empty
panel later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from warmslot.router.metrics import catalogue

Json = dict[str, Any]

PROMETHEUS: Json = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Columns of Grafana's grid."""

RANGE = "$__range"
"""Window of queries that sum up the whole time that is looked at."""

_LABELS = {f"warmslot_{metric.name}": frozenset(metric.labels) for metric in catalogue()}
_SUFFIXES = ("_bucket", "_sum", "_count")
_POOL_OF_BACKEND = (
    "warmslot_prompt_tokens_total"
    '{job=~"$job", instance=~"$instance", pool=~"$pool", route="chat", reuse="cached"}'
)
"""One series for each backend of the chosen pools; it filters metrics that only know their backend."""


def labels_of(name: str) -> frozenset[str]:
    """The labels of a metric of the catalogue. Raises KeyError for any other name."""
    full = f"warmslot_{name}"
    for suffix in _SUFFIXES:
        if full not in _LABELS and full.endswith(suffix):
            return _LABELS[full.removesuffix(suffix)] | {"le"}
    return _LABELS[full]


def select(name: str, *matchers: str) -> str:
    """A selector that follows the dashboard's variables, as far as the metric has their labels."""
    labels = labels_of(name)
    followed = ["job", "instance", *(label for label in ("pool", "backend") if label in labels)]
    for matcher in matchers:
        label = re.match(r"\w*", matcher)
        if label is None or label[0] not in labels:
            raise ValueError(f"{name} cannot be filtered by {matcher}")
    parts = [f'{label}=~"${label}"' for label in followed] + list(matchers)
    return f"warmslot_{name}{{{', '.join(parts)}}}"


def _in_pool(name: str, vector: str) -> str:
    labels = labels_of(name)
    if "backend" in labels and "pool" not in labels:
        return f"({vector} and on (job, instance, backend) {_POOL_OF_BACKEND})"
    return vector


def now(name: str, *matchers: str) -> str:
    """A gauge as it is."""
    return _in_pool(name, select(name, *matchers))


def rate(name: str, *matchers: str) -> str:
    """A counter's growth per second."""
    return _in_pool(name, f"rate({select(name, *matchers)}[$__rate_interval])")


def increase(name: str, *matchers: str, over: str = RANGE) -> str:
    """A counter's growth over a window, by default all of the time that is looked at."""
    return _in_pool(name, f"increase({select(name, *matchers)}[{over}])")


def total(vector: str, *by: str) -> str:
    """A sum, over everything or by labels."""
    return f"sum by ({', '.join(by)}) ({vector})" if by else f"sum({vector})"


def ratio(part: str, whole: str) -> str:
    """A quotient that has no value while there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, name: str, *by: str) -> str:
    """A quantile of a histogram over the requests of the last moments; no value while there are none."""
    return f"histogram_quantile({q:g}, {total(rate(f'{name}_bucket'), *by, 'le')}) >= 0"


def padded(vector: str, label: str) -> str:
    """One-digit label values with a zero before them, so that they sort as numbers."""
    return f'label_replace({vector}, "{label}", "0$1", "{label}", "([0-9])")'


@dataclass(frozen=True)
class Query:
    """One expression and the name that its series get."""

    expr: str
    legend: str = ""
    instant: bool = False
    """One value for the whole time that is looked at, as a table, instead of a line."""


@dataclass(frozen=True)
class Panel:
    """One panel; its position is worked out from the order of panels."""

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    colours: dict[str, str] = field(default_factory=dict)
    """Fixed colours by series name."""
    stacked: bool = False
    top: float | None = None
    """Upper end of the axis."""
    steps: tuple[tuple[float | None, str], ...] = ((None, "blue"),)
    """Thresholds: from this value on, this colour."""
    options: Json = field(default_factory=dict)
    transformations: tuple[Json, ...] = ()
    decimals: int | None = None
    dashed: tuple[str, ...] = ()
    """Series that are drawn as thick dashes: what was observed, beside what is modelled."""


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A whole dashboard."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    links: tuple[tuple[str, str], ...]
    """Uid and title of the dashboards that it links to."""
    since: str = "now-6h"


def render(dashboard: Dashboard) -> Json:
    """The dashboard as Grafana imports it."""
    panels: list[Json] = []
    y = 0
    for row in dashboard.rows:
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        panels.append(
            {"collapsed": False, "gridPos": place, "id": len(panels) + 1, "panels": [], "title": row.title}
            | {"type": "row"}
        )
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return {
        "annotations": {"list": _annotations()},
        "description": dashboard.about,
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [_link(uid, title) for uid, title in dashboard.links],
        "panels": panels,
        "refresh": "30s",
        "schemaVersion": 39,
        "tags": ["warmslot", "llama.cpp"],
        "templating": {"list": _variables()},
        "time": {"from": dashboard.since, "to": "now"},
        "timepicker": {},
        "timezone": "",
        "title": dashboard.title,
        "uid": dashboard.uid,
        "version": 1,
        "weekStart": "",
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> Json:
    rendered: Json = {
        "datasource": PROMETHEUS,
        "description": panel.about,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "id": number,
        "options": {**_OPTIONS[panel.kind], **panel.options},
        "targets": [_target(panel, query, index) for index, query in enumerate(panel.queries)],
        "title": panel.title,
        "type": panel.kind,
    }
    if panel.transformations:
        rendered["transformations"] = list(panel.transformations)
    return rendered


def _target(panel: Panel, query: Query, index: int) -> Json:
    shape = "heatmap" if panel.kind == "heatmap" else "table" if query.instant else "time_series"
    if panel.kind == "stat":
        shape = "time_series"
    return {
        "datasource": PROMETHEUS,
        "editorMode": "code",
        "expr": query.expr,
        "format": shape,
        "instant": query.instant,
        "legendFormat": query.legend or "__auto",
        "range": not query.instant,
        "refId": chr(ord("A") + index),
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "mappings": [],
        "min": 0,
        "thresholds": {
            "mode": "absolute",
            "steps": [{"color": colour, "value": value} for value, colour in panel.steps],
        },
        "unit": panel.unit,
    }
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 60 if panel.stacked else 8,
            "lineInterpolation": "linear",
            "lineWidth": 1 if panel.stacked else 2,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        }
    elif panel.kind == "barchart":
        defaults["custom"] = {"fillOpacity": 80, "lineWidth": 1}
    return defaults


def _overrides(panel: Panel) -> list[Json]:
    overrides = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"fixedColor": colour, "mode": "fixed"}}],
        }
        for name, colour in panel.colours.items()
    ]
    overrides += [
        {
            "matcher": {"id": "byRegexp", "options": f"/{name}/"},
            "properties": [
                {"id": "custom.lineStyle", "value": {"dash": [10, 8], "fill": "dash"}},
                {"id": "custom.lineWidth", "value": 3},
                {"id": "custom.fillOpacity", "value": 0},
            ],
        }
        for name in panel.dashed
    ]
    return overrides


_LEGEND: Json = {"calcs": ["mean", "lastNotNull"], "displayMode": "table", "placement": "bottom"}
_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {**_LEGEND, "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "exponent": 0.5,
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": "Blues",
            "steps": 64,
        },
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "unit": "s"},
    },
    "barchart": {
        "barWidth": 0.8,
        "groupWidth": 0.8,
        "legend": {**_LEGEND, "calcs": [], "displayMode": "list", "showLegend": True},
        "orientation": "vertical",
        "showValue": "never",
        "stacking": "none",
        "tooltip": {"mode": "multi", "sort": "none"},
        "xTickLabelSpacing": 0,
    },
}


def table(label: str, names: dict[str, str]) -> tuple[Json, ...]:
    """Joins instant queries by a label: one row for each of its values, columns named by ``refId``."""
    renamed = {f"Value #{ref}": name for ref, name in names.items()}
    return (
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {"Time": True},
                "indexByName": {label: 0},
                "renameByName": renamed,
            },
        },
        {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": label}]}},
    )


def _variables() -> list[Json]:
    chosen = 'job=~"$job", instance=~"$instance"'
    return [
        {
            "current": {},
            "hide": 0,
            "includeAll": False,
            "label": "Data source",
            "multi": False,
            "name": "datasource",
            "options": [],
            "query": "prometheus",
            "refresh": 1,
            "regex": "",
            "type": "datasource",
        },
        _variable("job", "Job", "label_values(warmslot_backend_up, job)"),
        _variable("instance", "Instance", 'label_values(warmslot_backend_up{job=~"$job"}, instance)'),
        _variable("pool", "Pool", f"label_values(warmslot_queue_requests{{{chosen}}}, pool)"),
        _variable(
            "backend",
            "Backend",
            f'label_values(warmslot_prompt_tokens_total{{{chosen}, pool=~"$pool"}}, backend)',
        ),
    ]


def _variable(name: str, label: str, query: str) -> Json:
    return {
        "allValue": ".+",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": PROMETHEUS,
        "definition": query,
        "hide": 0,
        "includeAll": True,
        "label": label,
        "multi": True,
        "name": name,
        "options": [],
        "query": {"qryType": 1, "query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "type": "query",
    }


def _annotations() -> list[Json]:
    slots, context = now("backend_slots"), now("slot_context_tokens")
    changed = " or ".join(
        f"(max_over_time({gauge}[$__rate_interval:]) > min_over_time(({gauge} > 0)[$__rate_interval:]))"
        for gauge in (slots, context)
    )
    return [
        {
            "builtIn": 1,
            "datasource": {"type": "grafana", "uid": "-- Grafana --"},
            "enable": True,
            "hide": True,
            "iconColor": "rgba(0, 211, 255, 1)",
            "name": "Annotations & Alerts",
            "type": "dashboard",
        },
        {
            "datasource": PROMETHEUS,
            "enable": True,
            "expr": f"{increase('backend_restarts_total', over='$__rate_interval')} > 0",
            "iconColor": "red",
            "name": "Restarts",
            "step": "15s",
            "tagKeys": "backend,reason",
            "textFormat": "{{backend}}: {{reason}}",
            "titleFormat": "Backend restarted",
        },
        {
            "datasource": PROMETHEUS,
            "enable": True,
            "expr": changed,
            "iconColor": "purple",
            "name": "Config changes",
            "step": "15s",
            "tagKeys": "backend",
            "textFormat": "{{backend}} came up with other slots or context",
            "titleFormat": "Config changed",
        },
    ]


def _link(uid: str, title: str) -> Json:
    return {
        "asDropdown": False,
        "icon": "dashboard",
        "includeVars": True,
        "keepTime": True,
        "tags": [],
        "targetBlank": False,
        "title": title,
        "tooltip": "",
        "type": "link",
        "url": f"/d/{uid}",
    }
