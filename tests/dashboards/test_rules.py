"""The recording and alerting rules: accepted by promtool, each alert shown to fire and not to fire."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

TOP = Path(__file__).parents[2]
RULES = TOP / "configs/prometheus"
ALERTS = {
    *("BackendDown", "BackendFlapping", "ErrorRatioHigh", "TTFTHigh", "QueueSaturated", "ReuseCollapsed"),
    *("PictureDrift", "UnderParallel", "OverParallel", "EngineQueueUsed", "TruthMissing"),
}


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return found


def run(*command: str | Path) -> None:
    done = subprocess.run([*command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_config_and_rules_are_valid(promtool: str) -> None:
    run(promtool, "check", "config", RULES / "prometheus.yml")
    run(promtool, "check", "rules", RULES / "recording.rules.yml", RULES / "alerts.rules.yml")


def test_alerts_fire_and_do_not(promtool: str) -> None:
    run(promtool, "test", "rules", RULES / "tests/alerts.test.yml")


def test_each_alert_has_a_case_that_fires_and_something_beside_it_that_does_not() -> None:
    tests = yaml.safe_load((RULES / "tests/alerts.test.yml").read_text(encoding="utf-8"))["tests"]
    fires: dict[str, int] = {}
    quiet: dict[str, int] = {}
    for test in tests:
        series = {
            re.sub(r".*(?:backend|pool)=\"(\w+)\".*", r"\1", one["series"]) for one in test["input_series"]
        }
        for case in test.get("alert_rule_test", ()):
            name, expected = case["alertname"], len(case["exp_alerts"])
            fires[name] = max(fires.get(name, 0), expected)
            beside = not expected or len(series) > expected
            quiet[name] = quiet.get(name, 0) + beside
    assert {rule["alert"] for rule in rules("alerts.rules.yml")} == ALERTS
    assert {name for name, count in fires.items() if count} == ALERTS
    assert {name for name, count in quiet.items() if count} == ALERTS


def test_each_alert_says_how_bad_it_is_and_what_to_look_at() -> None:
    for rule in rules("alerts.rules.yml"):
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert len(rule["annotations"]["description"]) > 40


def test_every_query_of_the_dashboards_is_promql(promtool: str, tmp_path: Path) -> None:
    queries = []
    for file in sorted((TOP / "dashboards").glob("*.json")):
        dashboard = json.loads(file.read_text(encoding="utf-8"))
        queries += [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
        queries += [one["expr"] for one in dashboard["annotations"]["list"] if "expr" in one]
    filled = [re.sub(r"\$__(range|rate_interval)", "5m", query) for query in queries]
    made = [{"record": f"panel:query:{number}", "expr": query} for number, query in enumerate(filled)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": made}]}), encoding="utf-8")
    assert len(made) > 40
    run(promtool, "check", "rules", file)
