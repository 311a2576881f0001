"""The dashboards' panels, their queries asked as Grafana would ask them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.dashboards.conftest import Prometheus

TOP = Path(__file__).parents[2]
PANELS: dict[tuple[str, str], dict[str, Any]] = {
    (name, panel["title"]): panel
    for name in ("overview", "parallel")
    for panel in json.loads((TOP / f"dashboards/{name}.json").read_text(encoding="utf-8"))["panels"]
    if panel["type"] != "row"
}

Shown = dict[str, float]
"""What a panel shows by the name of the series; of a table by query and key."""


def show(
    prometheus: Prometheus,
    panel: dict[str, Any],
    *,
    at: float,
    window: str,
    whole: str,
    pool: str = ".+",
    backend: str = ".+",
    span: float = 0.0,
) -> Shown:
    """What a panel shows at ``at``: ``window`` is the rate interval, ``whole`` the range that is looked at.

    All values of the last ``span`` seconds must be finite.
    """
    shown: Shown = {}
    variables = {"job": ".+", "instance": ".+", "pool": pool, "backend": backend}
    for target in panel["targets"]:
        expr = re.sub(r'"\$(\w+)"', lambda found: f'"{variables[found[1]]}"', target["expr"])
        expr = expr.replace("$__rate_interval", window).replace("$__range", whole)
        assert "$" not in expr.replace("$1", "")
        if target["instant"] or not span:
            series = {labels: [value] for labels, value in prometheus.query(expr, at).items()}
        else:
            series = prometheus.range(expr, at - span, at, 15)
        for labels, values in series.items():
            assert all(map(math.isfinite, values)), (expr, labels)
            name = _name(target, dict(labels))
            assert name not in shown
            shown[name] = values[-1]
    return shown


def _name(target: dict[str, Any], labels: dict[str, str]) -> str:
    if target["legendFormat"] == "__auto":
        (key,) = labels.values()
        return f"{target['refId']} {key}"
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels[found[1]], target["legendFormat"])
