"""The dashboards keep Grafana's own rules, and show metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from warmslot.router.metrics import catalogue

TOP = Path(__file__).parents[2]
FILES = sorted((TOP / "dashboards").glob("*.json"))
DASHBOARDS = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in FILES}
PANELS = [
    pytest.param(panel, id=f"{name}-{panel['id']}-{panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
]
VARIABLES = ("job", "instance", "pool", "backend")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
KNOWN_UNITS = {"percentunit", "s", "short", "reqps"}
EXPORTED = {f"warmslot_{one.name}": one for one in catalogue()}


def exported(name: str) -> str:
    """The metric of the catalogue behind a series' name."""
    return name if name in EXPORTED else re.sub(r"_(bucket|sum|count)$", "", name)


def test_the_generator_writes_exactly_these_files() -> None:
    done = subprocess.run(
        [sys.executable, TOP / "dashboards/generate.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(DASHBOARDS) == {"overview.json", "parallel.json"}


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_a_dashboard_can_be_imported_anywhere(dashboard: dict[str, Any]) -> None:
    assert dashboard["id"] is None
    assert dashboard["schemaVersion"] == 39
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", dashboard["uid"])
    assert dashboard["title"]
    assert dashboard["description"]
    assert "__inputs" not in dashboard


def test_dashboards_are_told_apart_and_link_to_each_other() -> None:
    uids = [dashboard["uid"] for dashboard in DASHBOARDS.values()]
    assert len(set(uids)) == len(uids)
    for dashboard in DASHBOARDS.values():
        linked = {link["url"].removeprefix("/d/") for link in dashboard["links"]}
        assert linked == set(uids) - {dashboard["uid"]}
        assert all(link["includeVars"] and link["keepTime"] for link in dashboard["links"])


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_variables_choose_source_job_instance_pool_and_backend(dashboard: dict[str, Any]) -> None:
    source, *queried = dashboard["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert tuple(variable["name"] for variable in queried) == VARIABLES
    for variable in queried:
        assert variable["datasource"] == DATASOURCE
        assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".+")
        asked = re.fullmatch(r"label_values\((\w+)(?:\{(.*)\})?, (\w+)\)", variable["query"]["query"])
        assert asked is not None
        assert asked[3] in {*EXPORTED[asked[1]].labels, "job", "instance"}


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_restarts_and_config_changes_are_annotated(dashboard: dict[str, Any]) -> None:
    own = [one for one in dashboard["annotations"]["list"] if not one.get("builtIn")]
    assert [one["name"] for one in own] == ["Restarts", "Config changes"]
    assert all(one["datasource"] == DATASOURCE and one["enable"] for one in own)


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_panels_have_ids_and_places_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["y"] >= 0
        assert place["w"] > 0
        assert place["h"] > 0
        assert place["x"] + place["w"] <= 24
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_in_which_unit(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 20
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert unit in KNOWN_UNITS or re.fullmatch(r"(si|suffix): ?\S+", unit), unit


@pytest.mark.parametrize("panel", PANELS)
def test_a_panels_queries_follow_the_variables(panel: dict[str, Any]) -> None:
    assert panel["datasource"] == DATASOURCE
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs) > 0
    for target in panel["targets"]:
        assert target["datasource"] == DATASOURCE
        expr = target["expr"]
        windows = set(re.findall(r"\}\[([^\]]+)\]", expr))
        assert windows <= ({"$__range"} if target["instant"] else {"$__rate_interval"})
        assert target["instant"] != target["range"]
        for name, matchers in re.findall(r"(warmslot_\w+)(\{[^}]*\})?", expr):
            labels = {*EXPORTED[exported(name)].labels, "job", "instance"}
            followed = {label for label in VARIABLES if f'{label}=~"${label}"' in matchers}
            assert followed >= labels & {"job", "instance", "pool"}, name
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", matchers)) <= labels
            if "backend" in labels and "pool" not in labels:
                assert "and on (job, instance, backend)" in expr


@pytest.mark.parametrize("panel", PANELS)
def test_counters_are_rated_and_gauges_are_not(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        filtered = re.sub(r"and on \(job, instance, backend\) \w+\{[^}]*\}", "", target["expr"])
        for before, name in re.findall(r"(\w*)\(?(warmslot_\w+)", filtered):
            counts = EXPORTED[exported(name)].kind != "gauge"
            assert (before in {"rate", "increase"}) == counts, target["expr"]


def test_every_metric_of_the_catalogue_is_looked_at_or_has_its_reason() -> None:
    shown = {
        exported(name)
        for dashboard in DASHBOARDS.values()
        for name in re.findall(r"warmslot_\w+", json.dumps(dashboard))
    }
    rules = "".join(
        file.read_text(encoding="utf-8") for file in (TOP / "configs/prometheus").glob("*.rules.yml")
    )
    shown |= {exported(name) for name in re.findall(r"(?<![:\w])warmslot_\w+", rules)}
    for_queries_only = {
        "warmslot_decision_seconds",
        "warmslot_decode_seconds_total",
        "warmslot_inflight_requests",
        "warmslot_journal_records_total",
        "warmslot_label_overflow_total",
        "warmslot_prefill_seconds_total",
        "warmslot_request_duration_seconds",
        "warmslot_slot_prompt_tokens_total",
        "warmslot_time_per_output_token_seconds",
    }
    assert shown - set(EXPORTED) == set()
    assert set(EXPORTED) - shown == for_queries_only


def test_provisioning_and_compose_fit_together() -> None:
    grafana = TOP / "configs/grafana"
    compose = yaml.safe_load((grafana / "compose.yaml").read_text(encoding="utf-8"))
    mounts = {}
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                assert (grafana / source).resolve().is_dir(), source
                mounts[target] = (grafana / source).resolve()
    (provider,) = yaml.safe_load((grafana / "provisioning/dashboards/warmslot.yaml").read_text())["providers"]
    assert mounts[provider["options"]["path"]] == TOP / "dashboards"
    assert (mounts["/etc/prometheus"] / "prometheus.yml").is_file()
    (source,) = yaml.safe_load((grafana / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    scrape = yaml.safe_load((TOP / "configs/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    assert source["url"].removeprefix("http://") in " ".join(compose["services"]["prometheus"]["command"])
