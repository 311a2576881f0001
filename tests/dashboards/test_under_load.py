"""Every panel over the live ``/metrics`` of a router with a real engine, scraped by a real Prometheus."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from warmslot.router.values import Decision, Loss, Status

from tests.dashboards.panels import PANELS, Shown, show
from tests.support.router import serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from warmslot.router.values import Report

    from tests.dashboards.conftest import Prometheus
    from tests.support.router import Service

SLOTS, CONTEXT = 2, 2048
FLAGS = ("-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "--no-kv-unified", "--slots", "--metrics")
WINDOW = 300.0
"""Seconds that every rate looks back: all that happens here, from the first scrape on, when all was 0."""

SCRAPE = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
scrape_configs:
  - job_name: warmslot
    static_configs: [{{targets: ["{target}"]}}]
"""


@dataclass(frozen=True)
class Address:
    """Where an engine serves, and what it was started with."""

    base_url: str
    n_slots: int = SLOTS
    context: int = CONTEXT


async def converse(service: Service, number: int) -> None:
    """A conversation of two turns; three of them have more to keep than there are slots."""
    messages = [{"role": "system", "content": "You are terse. " * 12}]
    for turn in range(2):
        words = f"conversation {number} turn {turn} " * 6
        messages.append({"role": "user", "content": words})
        body = {"messages": messages, "max_tokens": 3, "temperature": 0, "stream": turn % 2 == 1}
        answer = await service.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": f"answer {number} {turn}"})


def from_reports(reports: list[Report]) -> dict[str, Shown]:
    """What panels must show, by their titles, from the ledger of each request."""
    cached = sum(one.cached_tokens for one in reports)
    processed = sum(one.processed_tokens for one in reports)
    predicted = sum(one.predicted_tokens for one in reports)
    generated = sum(one.output_tokens for one in reports)
    reuse = cached / (cached + processed)
    mended = sum(
        tokens for one in reports for why, tokens in one.losses.items() if why in {"evicted", "busy"}
    )
    return {
        "Reuse": {"reuse": reuse},
        "Reuse by backend": {"b0": reuse},
        "Reuse by route": {"chat": reuse},
        "Reuse by client": {"other": reuse},
        "Reuse by slot count over time": {"observed": reuse},
        "Prompt tokens: cached and processed": {"cached": cached / WINDOW, "processed": processed / WINDOW},
        "Reuse: predicted and observed": {"predicted": predicted / WINDOW, "observed": cached / WINDOW},
        "Why prompt tokens were computed": {
            why: sum(one.losses.get(why, 0) for one in reports) / WINDOW for why in Loss
        },
        "Routing decisions": {why: sum(one.decision is why for one in reports) / WINDOW for why in Decision},
        "Requests by how they ended": {
            how: sum(one.status is how for one in reports) / WINDOW for how in Status
        },
        "Lost for want of slots": {"evicted + busy": mended / (cached + processed)},
        "Losses that more slots would mend, and others": {
            "more slots would mend": mended / WINDOW,
            "they would not": (processed - mended) / WINDOW,
        },
        "Prompt tokens per generated token": {"b0": (cached + processed) / generated},
        "Waiting": {"waiting": 0},
        "Backends up": {"up": 1, "configured": 1},
        "KV memory: reserved and in use": {"b0 reserved": SLOTS * CONTEXT},
    }


def accepted_by_promtool(text: str) -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.timeout(280)
async def test_panels_show_what_happened(
    start_engine: Callable[..., Awaitable[str]], prometheus: Callable[[str], Prometheus]
) -> None:
    async with serving([Address(await start_engine(*FLAGS))]) as service:
        scraping = await asyncio.to_thread(
            prometheus, SCRAPE.format(target=service.url.removeprefix("http://"))
        )
        await asyncio.to_thread(scraping.until, lambda one: one.query("warmslot_backend_up == 1"))
        await asyncio.gather(*(converse(service, number) for number in range(3)))
        over = time.time()
        last = "max(timestamp(warmslot_backend_up))"

        def scraped_after(one: Prometheus) -> float | None:
            at = one.query(last)[()]
            return at if at > over else None

        # At the moment of a scrape nothing has to be extrapolated: a counter's growth is exact.
        at = await asyncio.to_thread(scraping.until, scraped_after)
        text = (await service.http.get("/metrics")).text
        asked = {
            key: await asyncio.to_thread(show, scraping, panel, at=at, window="5m", whole="5m")
            for key, panel in PANELS.items()
        }
    assert [key for key, shown in asked.items() if not shown] == []
    assert sum(one.cached_tokens for one in service.watcher.reports) > 0
    known = from_reports(service.watcher.reports)
    for title, expected in known.items():
        shown = asked["overview", title] if ("overview", title) in asked else asked["parallel", title]
        assert {name: shown[name] for name in expected} == pytest.approx(expected, rel=1e-9), title
    await asyncio.to_thread(accepted_by_promtool, text)
