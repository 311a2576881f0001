"""The live page in a real browser while real engines work: it shows what ``/metrics`` says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.dashboards.test_under_load import FLAGS, SLOTS, Address, converse
from tests.support.browser import figures, number, page_of, until
from tests.support.router import sample, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@pytest.mark.timeout(280)
async def test_it_shows_what_metrics_say(start_engine: Callable[..., Awaitable[str]], browser: Any) -> None:
    async with serving([Address(await start_engine(*FLAGS))]) as service, page_of(browser, service) as page:
        load = asyncio.gather(*(converse(service, one) for one in range(3)))
        await until(page, f"snapshot.backends[0].slots.filter((slot) => slot.running).length === {SLOTS}")
        await until(page, "document.getElementById('f-running').textContent !== '0'")
        await load
        ended = len(service.watcher.reports)
        await until(page, f"snapshot.pools[0].history.requests.reduce((a, b) => a + b) === {ended}")
        await until(page, "document.getElementById('f-running').textContent === '0'")
        shown, text = await figures(page), (await service.http.get("/metrics")).text
        cached = sample(text, "warmslot_prompt_tokens_total", reuse="cached")
        processed = sample(text, "warmslot_prompt_tokens_total", reuse="processed")
        assert cached > 0
        assert number(shown["Reuse"]) == pytest.approx(100 * cached / (cached + processed), abs=0.06)
        assert number(shown["Waiting now"]) == sample(text, "warmslot_queue_requests") == 0
        for slot in range(SLOTS):
            holds = await page.locator("ol.slots li").nth(slot).locator(".holds span").last.inner_text()
            resident = sample(text, "warmslot_slot_resident_tokens", slot=str(slot))
            assert number(holds.split("/")[0]) == resident > 0
