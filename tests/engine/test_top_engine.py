"""``warmslot top`` in front of real engines: what it prints is what the engine and the router say."""

from __future__ import annotations

import asyncio
import io
import re
from typing import TYPE_CHECKING, NamedTuple

import pytest
from rich.console import Console
from warmslot.launcher.top import BAR, watch
from warmslot.router.backend import EngineClient

from tests.engine.conftest import CONTEXT, RunningEngine
from tests.support.router import chat, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from warmslot.launcher.engine import Engine

    from tests.support.router import Service

SLOTS = 2
ROW = re.compile(r"^│ +(\d+) │ ([█·]+) │ +([\d,]+|\?) │ +([\d,]*) │ (\S*) +│ (.*?) *│$", re.MULTILINE)


class Row(NamedTuple):
    """A slot as it is printed."""

    full: int
    """Characters of its bar."""
    tokens: int
    conversation: str
    now: str


class Address:
    """The engine as the router needs it."""

    n_slots, context = SLOTS, CONTEXT

    def __init__(self, engine: RunningEngine) -> None:
        self.base_url = engine.base_url


@pytest.fixture
def own_engine(installed_engine: Engine, demo_model: Path) -> Iterator[RunningEngine]:
    """An engine whose slots are empty."""
    running = RunningEngine(installed_engine, demo_model, "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT))
    yield running
    running.stop()


async def printed(service: Service) -> tuple[str, dict[int, Row]]:
    """All of it, and its rows by slot."""
    out = io.StringIO()
    await asyncio.to_thread(watch, Console(file=out, width=200), service.url, once=True)
    rows = {
        int(slot): Row(bar.count("█"), int(tokens.replace(",", "")), conversation, now)
        for slot, bar, tokens, _, conversation, now in ROW.findall(out.getvalue())
    }
    return out.getvalue(), rows


async def agree(service: Service, rows: dict[int, Row]) -> None:
    """The rows are what the engine's ``/slots`` and the router's gauges say."""
    client = EngineClient("b0", service.engines[0].base_url)
    try:
        slots = await client.slots()
    finally:
        await client.aclose()
    assert slots is not None
    assert set(rows) == {slot.slot for slot in slots} == set(range(SLOTS))
    for slot in slots:
        row = rows[slot.slot]
        assert slot.processing is row.now.startswith(("prefill", "decode"))
        if not slot.processing:
            assert row.tokens == (slot.resident_tokens or 0)
        assert row.tokens == await service.metric("warmslot_slot_resident_tokens", slot=str(slot.slot))
        assert row.full == round(BAR * row.tokens / CONTEXT)


async def test_what_is_printed_is_what_slots_hold_and_who_is_in_them(own_engine: RunningEngine) -> None:
    async with serving([Address(own_engine)]) as service:
        answers = [
            await service.chat(f"All about {topic}. " * 20, max_tokens=4, temperature=0)
            for topic in ("tea", "rain", "tea")
        ]
        await own_engine.settled()
        text, rows = await printed(service)
        assert f"b0 (up), {CONTEXT:,} tokens a slot" in text
        await agree(service, rows)
        timings = [answer.json()["timings"] for answer in answers]
        cached = sum(one["cache_n"] for one in timings)
        whole = cached + sum(one["prompt_n"] for one in timings)
        assert cached > 0
        assert f"reuse {cached / whole:.1%}" in text
        assert len({row.conversation for row in rows.values()}) == SLOTS
        assert all(row.now.startswith("idle for") for row in rows.values())

        body = chat("All about tea. " * 20 + "And more.", stream=True, max_tokens=900, ignore_eos=True)
        async with service.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            async for line in lines:
                if '"content"' in line:
                    break
            text, rows = await printed(service)
            slot = int(answer.headers["x-warmslot-slot"])
            assert rows[slot].now.startswith("decode for ")
            assert "tokens warm (affinity)" in rows[slot].now
            assert rows[1 - slot].now.startswith("idle for")
        await own_engine.settled()
        await service.watcher.until(lambda seen: seen.level.get("m") == 0)
        assert all(row.now.startswith("idle for") for row in (await printed(service))[1].values())
