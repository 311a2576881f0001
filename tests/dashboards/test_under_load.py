"""Every panel over the live ``/metrics`` of a router with a real engine, scraped by a real Prometheus."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from warmslot.router.advice import Advised
from warmslot.router.journal import read
from warmslot.router.records import BackendChange, Record

from tests.dashboards.ledger import WINDOW, Notes, Run
from tests.dashboards.panels import PANELS, show
from tests.support.stack import stack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from warmslot.launcher.engine import Engine

    from tests.dashboards.conftest import Prometheus
    from tests.support.router import Service
    from tests.support.stack import Stack

SLOTS, CONTEXT = 2, 2048
FLAGS = ("-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "--no-kv-unified", "--slots", "--metrics")
CLIENTS = ("anna", "ben")
ADVISED = 3
"""Slots that an advisor is taken to have found."""

SCRAPE = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
scrape_configs:
  - job_name: warmslot
    authorization: {{credentials: anna-key}}
    static_configs: [{{targets: ["{target}"]}}]
"""

SELECTED = re.compile(r"selected slot by (id|LCP|LRU)")


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


def key_of(number: int) -> dict[str, str]:
    """The header of one client or the other."""
    return {"Authorization": f"Bearer {CLIENTS[number % 2]}-key"}


async def talk(running: Stack, number: int) -> None:
    """A conversation of three turns, every other one streamed."""
    messages = [{"role": "system", "content": "You are terse. " * 12}]
    for turn in range(3):
        messages.append({"role": "user", "content": f"conversation {number} turn {turn} " * 6})
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, "stream": turn % 2 == 0}
        answer = await running.http.post("/v1/chat/completions", json=body, headers=key_of(number))
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": f"answer {number} {turn}"})


async def load(running: Stack) -> int:
    """Conversations by turns, other requests, and an engine that dies at work. How many were refused."""

    async def some(first: int) -> None:
        for number in range(first, 9, 3):
            await talk(running, number)

    await asyncio.gather(*map(some, range(3)))
    for number in range(2):
        body = {"prompt": "Once upon a time " * 20, "n_predict": 2 + number}
        assert (await running.http.post("/completion", json=body, headers=key_of(0))).status_code == 200
    refused = await running.http.post("/v1/chat/completions", json={"messages": 1}, headers=key_of(0))
    assert refused.status_code == 400

    recorder, begun = running.recorder, sum("processing task" in line for line in running.recorder.lines)
    body = {"prompt": "This one will not end well.", "n_predict": 1000, "ignore_eos": True}
    last = asyncio.create_task(running.http.post("/completion", json=body, headers=key_of(0)))
    await recorder.until_true(lambda: sum("processing task" in line for line in recorder.lines) > begun)
    os.kill(running.pid, signal.SIGKILL)
    assert (await last).status_code >= 500
    await running.ready(2)
    await asyncio.gather(*(talk(running, number) for number in range(3)))
    return 1


async def held(running: Stack) -> int:
    """Tokens in all slots, as the engine says."""
    backend = running.router.dispatcher.fleet.backend("one")
    assert backend is not None
    assert backend.client is not None
    slots = await backend.client.slots()
    assert slots is not None
    assert not any(slot.processing for slot in slots)
    return sum(slot.resident_tokens or 0 for slot in slots)


def agree(panel: str, shown: dict[str, float], expected: dict[str, tuple[float, float]]) -> None:
    """All series of a panel are as expected; what the run had nothing of is missing, or 0."""
    assert expected, panel
    assert {name for name, value in shown.items() if value} <= set(expected), panel
    for name, (low, high) in expected.items():
        value = shown.get(name, 0.0)
        assert low - 1e-9 * abs(low) <= value <= high + 1e-9 * abs(high), (panel, name, low, value, high)


def accepted_by_promtool(text: str) -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.timeout(280)
async def test_panels_show_what_happened(
    installed_engine: Engine,
    demo_model: Path,
    tmp_path: Path,
    prometheus: Callable[[str], Prometheus],
) -> None:
    journal, notes = tmp_path / "journal.jsonl", Notes()
    sections = {
        "journal": {"path": str(journal)},
        "keys": [{"name": name, "value": f"{name}-key"} for name in CLIENTS],
    }
    settings = {"slots": SLOTS, "context": CONTEXT, "threads": 2, "cache_ram": 64}
    scheduling = {"in_flight": "slots"}
    engine = installed_engine, demo_model, tmp_path
    async with stack(
        *engine, sections=sections, observers=[notes], scheduling=scheduling, **settings
    ) as running:
        scraping = await asyncio.to_thread(
            prometheus, SCRAPE.format(target=running.url.removeprefix("http://"))
        )
        begun = await asyncio.to_thread(
            scraping.until,
            lambda one: one.query("min_over_time(timestamp(warmslot_backend_up == 1)[1m:250ms])"),
        )
        refused = await load(running)
        running.router.advise({"one": Advised(ADVISED, "made up", time.time())})
        over = time.time()
        last = "max(timestamp(warmslot_backend_up))"

        def scraped_after(one: Prometheus) -> float | None:
            at = one.query(last)[()]
            return at if at > over else None

        # At the moment of a scrape nothing has to be extrapolated: a counter's growth is exact.
        at = await asyncio.to_thread(scraping.until, scraped_after)
        assert at - min(begun.values()) < WINDOW
        text = (await running.http.get("/metrics", headers=key_of(0))).text
        asked = {
            key: await asyncio.to_thread(show, scraping, panel, at=at, window="5m", whole="5m")
            for key, panel in PANELS.items()
        }
        resident = await held(running)
        lines = running.recorder.lines
    entries = list(read(journal))
    run = Run(
        records=[one for one in entries if isinstance(one, Record)],
        changes=[one for one in entries if isinstance(one, BackendChange)],
        notes=notes,
        selections=Counter(found[1].lower() for found in map(SELECTED.search, lines) if found),
        resident=resident,
        refused=refused,
        seconds=at - min(begun.values()),
        advised=ADVISED,
    )
    for (dashboard, title), shown in asked.items():
        agree(f"{dashboard}: {title}", shown, run.expected(dashboard, title))
    assert all(sum(shown.values()) > 0 for (_, title), shown in asked.items() if title != "Waiting")
    await asyncio.to_thread(accepted_by_promtool, text)
