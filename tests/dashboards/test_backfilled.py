"""Every panel's query on a real Prometheus over data of which every rate is known."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.dashboards.conftest import Prometheus
from tests.dashboards.panels import PANELS, TOP, Shown, show
from tests.dashboards.series import END, Expected, fleet, openmetrics

if TYPE_CHECKING:
    from collections.abc import Iterator

CHOICES = [(".+", ".+"), ("p", ".+"), (".+", "c"), ("p", "b")]
RANGE = 3600.0


@pytest.fixture(scope="module")
def filled(has_prometheus: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:  # noqa: ARG001
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "samples.txt").write_text(openmetrics(fleet()), encoding="utf-8")
    command = [
        "promtool",
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        folder / "samples.txt",
        folder / "data",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    running = Prometheus(folder)
    yield running
    running.stop()


def expected(title: str, known: Expected) -> Shown:  # noqa: C901, PLR0911, PLR0912, PLR0915 - a table of panels
    """What a panel must show, worked out from the growth of each series."""

    def share(part: dict[str, float], whole: dict[str, float]) -> Shown:
        return {key: value / whole[key] for key, value in part.items()}

    cached = known.sum("prompt_tokens_total", reuse="cached")
    presented = known.sum("prompt_tokens_total")
    slots = known.sum("backend_slots")
    match title:
        case "Reuse":
            return {"reuse": cached / presented}
        case "Prefill avoided":
            return {"avoided": known.sum("prefill_seconds_avoided_total")}
        case "TTFT p95":
            return {"p95": known.quantile(0.95, "time_to_first_token_seconds")}
        case "Error ratio":
            errors = known.sum("requests_total", outcome="error")
            return {"errors": errors / (known.sum("requests_total", outcome="ok|error|rejected"))}
        case "Waiting":
            return {"waiting": known.sum("queue_requests")}
        case "Backends up":
            up = len(known.by("backend", "backend_up"))
            return {"up": up, "configured": up}
        case "Prompt tokens: cached and processed":
            return known.by("reuse", "prompt_tokens_total")
        case "Where reused tokens were":
            return known.by("source", "reused_tokens_total")
        case "Why prompt tokens were computed":
            return known.by("reason", "recomputed_tokens_total")
        case "Reuse by backend" | "Reuse by route":
            label = title.rpartition(" ")[2]
            whole = known.by(label, "prompt_tokens_total")
            return share(known.by(label, "prompt_tokens_total", reuse="cached"), whole)
        case "Reuse by client":
            whole = known.by("client", "client_prompt_tokens_total")
            return share(known.by("client", "client_prompt_tokens_total", reuse="cached"), whole)
        case "Reuse: predicted and observed":
            return {"predicted": known.sum("predicted_reuse_tokens_total"), "observed": cached}
        case "Routing decisions":
            return known.by("decision", "routing_decisions_total")
        case "The engine's own slot selections":
            return {f"by {by}": n for by, n in known.by("by", "engine_slot_selections_total").items()}
        case "Time to first token":
            return known.by("le", "time_to_first_token_seconds_bucket")
        case "Time in the queue, p95":
            pools = known.by("pool", "queue_requests")
            return {pool: known.quantile(0.95, "queue_seconds", pool=pool) for pool in pools}
        case "Requests by how they ended":
            return known.by("outcome", "requests_total")
        case "Slot occupancy":
            return {
                f"{backend} slot {slot}": known.sum("slot_busy_seconds_total", backend=backend, slot=slot)
                for backend in known.by("backend", "backend_up")
                for slot in "0123"
            }
        case "Restarts per hour":
            return {
                f"{backend} {reason}": 3600 * value
                for backend in known.by("backend", "backend_up")
                for reason, value in known.by("reason", "backend_restarts_total", backend=backend).items()
            }
        case "Slots: advised and current":
            advised = known.by("backend", "advised_slots")
            current = known.by("backend", "backend_slots")
            return {f"{b} advised": n for b, n in advised.items()} | {
                f"{b} current": n for b, n in current.items()
            }
        case "Lost for want of slots":
            return {"evicted + busy": known.sum("recomputed_tokens_total", reason="evicted|busy") / presented}
        case "Reuse by slot count" | "Reuse by slot count over time":
            table = title == "Reuse by slot count"
            by_slots = known.by("slots", "shadow_cached_tokens_total")
            prefix = "A " if table else "N = "
            shown = {f"{prefix}{n.zfill(2)}": value / presented for n, value in by_slots.items()}
            return shown | {f"B {slots:02.0f}" if table else "observed": cached / presented}
        case "Losses that more slots would mend, and others":
            mended = known.sum("recomputed_tokens_total", reason="evicted|busy")
            return {
                "more slots would mend": mended,
                "they would not": known.sum("recomputed_tokens_total") - mended,
            }
        case "Time by demand":
            levels = {
                level.zfill(2): RANGE * n for level, n in known.by("level", "demand_seconds_total").items()
            }
            now = f"{slots:02.0f}"
            return {f"A {level}": n for level, n in levels.items()} | (
                {f"B {now}": levels[now]} if now in levels else {}
            )
        case "Decode throughput by busy slots":
            tokens = known.by("busy", "decode_level_tokens_total")
            rates = share(tokens, known.by("busy", "decode_level_seconds_total"))
            return {f"{busy} busy": value for busy, value in rates.items()}
        case "Context of a slot and length of prompts":
            shown = {}
            for backend, context in known.by("backend", "slot_context_tokens").items():
                shown[f"{backend} context"] = context
                shown[f"{backend} prompt p99"] = known.quantile(0.99, "prompt_length_tokens", backend=backend)
            return shown
        case "Prompt tokens per generated token":
            whole = known.by("backend", "output_tokens_total")
            return share(known.by("backend", "prompt_tokens_total"), whole)
        case "Cost of prefill by position":
            return {
                f"{backend} to {block}": 1000
                * known.sum("prefill_position_seconds_total", backend=backend, block=block)
                / known.sum("prefill_position_tokens_total", backend=backend, block=block)
                for backend in known.by("backend", "backend_up")
                for block in ("4k", "8k")
            }
        case "KV memory: reserved and in use":
            shown = {}
            for backend, count in known.by("backend", "backend_slots").items():
                shown[f"{backend} reserved"] = count * known.sum("slot_context_tokens", backend=backend)
                shown[f"{backend} in use"] = known.sum("slot_resident_tokens", backend=backend)
            return shown
    raise AssertionError(f"nothing is known of the panel {title!r}")


@pytest.mark.parametrize(("pool", "backend"), CHOICES)
@pytest.mark.parametrize(("dashboard", "title"), PANELS)
def test_a_panel_shows_what_was_filled_in(
    filled: Prometheus, dashboard: str, title: str, pool: str, backend: str
) -> None:
    shown = show(
        filled,
        PANELS[dashboard, title],
        at=END,
        window="2m",
        whole="1h",
        pool=pool,
        backend=backend,
        span=300,
    )
    if (dashboard, title) == ("parallel", "Reuse"):
        known = {"observed": expected("Reuse", Expected(fleet(), pool, backend))["reuse"]}
    else:
        known = expected(title, Expected(fleet(), pool, backend))
    assert known
    assert shown == pytest.approx(known, rel=1e-6)


def test_variables_offer_what_is_there(filled: Prometheus) -> None:
    dashboard = json.loads((TOP / "dashboards/overview.json").read_text(encoding="utf-8"))
    offered = {}
    for variable in dashboard["templating"]["list"][1:]:
        query = re.sub(r'"\$(\w+)"', '".+"', variable["query"]["query"])
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert found is not None
        moment = {"match[]": found[1], "start": END - 60, "end": END}
        offered[variable["name"]] = filled.ask(f"/label/{found[2]}/values", **moment)
    assert offered == {"job": ["w"], "instance": ["i"], "pool": ["p", "q"], "backend": ["a", "b", "c"]}
