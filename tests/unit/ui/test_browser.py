"""The live page in a real browser, in front of fake engines: what people see, on every kind of screen."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.browser import figures, number, page_of, until
from tests.support.router import Service, sample, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BEGINNINGS = ("You are an agent that works on code. " * 24, "You write titles. " * 20)
SCREENS = [
    pytest.param({"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"}, id="light"),
    pytest.param({"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"}, id="dark"),
    pytest.param({"viewport": {"width": 390, "height": 844}, "color_scheme": "light"}, id="phone"),
    pytest.param({"viewport": {"width": 320, "height": 640}, "color_scheme": "dark"}, id="small phone"),
]


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeLlamaServer]]:
    async with FakeLlamaServer(slots=3) as one, FakeLlamaServer(slots=3) as other:
        yield [one, other]


@pytest.fixture
async def busy(fakes: list[FakeLlamaServer]) -> AsyncIterator[Service]:
    """A router with two backends: conversations are warm, some requests run, and two wait."""
    async with serving(fakes) as service:
        for number in range(5):
            text = BEGINNINGS[number % 2] + f"mark-{number} " * 20
            for turn in range(2):
                assert (await service.chat(text + f"turn {turn} " * turn)).status_code == 200
        for fake in fakes:
            fake.token.hold()
        running = [
            asyncio.create_task(service.chat(BEGINNINGS[0] + f"mark-{number} {number} " * 9, stream=True))
            for number in range(8)
        ]
        await service.watcher.until(lambda watcher: len(watcher.granted_leases) == 10 + 6)
        yield service
        for fake in fakes:
            fake.token.release()
        await asyncio.gather(*running)


@pytest.mark.parametrize("screen", SCREENS)
async def test_it_has_no_accessibility_fault_and_fits_the_screen(
    browser: Any, busy: Service, screen: dict[str, Any]
) -> None:
    axe = pytest.importorskip("axe_playwright_python.async_playwright")
    async with page_of(browser, busy, **screen) as page:
        await page.locator("summary").click()
        found = await axe.Axe().run(page)
        faults = [
            (one["id"], one["help"], [n["html"] for n in one["nodes"]])
            for one in found.response["violations"]
        ]
        assert faults == []
        assert len(found.response["passes"]) > 20
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width <= screen["viewport"]["width"]


async def test_what_it_shows_equals_metrics(browser: Any, busy: Service) -> None:
    async with page_of(browser, busy) as page:
        shown = await figures(page)
        text = (await busy.http.get("/metrics")).text
        cached = sample(text, "warmslot_prompt_tokens_total", reuse="cached")
        processed = sample(text, "warmslot_prompt_tokens_total", reuse="processed")
        predicted = sample(text, "warmslot_predicted_reuse_tokens_total")
        assert cached > 0
        assert number(shown["Reuse"]) == pytest.approx(100 * cached / (cached + processed), abs=0.06)
        assert number(shown["Prediction met"]) == pytest.approx(100 * cached / predicted, abs=0.06)
        assert number(shown["Running now"]) == sample(text, "warmslot_inflight_requests") == 6
        assert number(shown["Waiting now"]) == sample(text, "warmslot_queue_requests") == 2
        for backend in ("b0", "b1"):
            slots = page.locator(f"ol[aria-label='Slots of {backend}'] li")
            assert await slots.count() == 3
            for slot in range(3):
                holds = await slots.nth(slot).locator(".holds span").last.inner_text()
                resident = sample(text, "warmslot_slot_resident_tokens", backend=backend, slot=str(slot))
                assert number(holds.split("/")[0]) == resident
        rows = await page.locator("#picture tr").all_inner_texts()
        assert sum(number(row.split("\t")[1]) for row in rows) == predicted


async def test_slots_that_share_a_beginning_have_one_colour_and_one_letter(
    browser: Any, busy: Service
) -> None:
    async with page_of(browser, busy) as page:
        looks: dict[str, set[str]] = {}
        for bar in await page.locator(".bar .shared").all():
            letter = await bar.text_content()
            if letter:
                colour = await bar.evaluate("(node) => getComputedStyle(node).backgroundColor")
                looks.setdefault(letter, set()).add(colour)
        assert looks
        assert all(len(colours) == 1 for colours in looks.values())
        assert len(set.union(*looks.values())) == len(looks)


async def test_it_follows_what_happens_and_can_be_paused(
    browser: Any, busy: Service, fakes: list[FakeLlamaServer]
) -> None:
    async with page_of(browser, busy) as page:
        await page.get_by_role("button", name="Pause").press("Enter")
        assert await page.locator("#state").inner_text() == "paused"
        for fake in fakes:
            fake.token.release()
        await busy.watcher.until(lambda watcher: len(watcher.reports) == 10 + 8)
        await until(page, "snapshot.finished.length && !snapshot.backends[0].slots[0].running")
        assert (await figures(page))["Running now"] == "6"
        await page.get_by_role("button", name="Pause").press("Enter")
        await until(page, "document.getElementById('f-running').textContent === '0'")
        assert await page.locator("#waiting-empty").is_visible()


async def test_it_asks_for_a_key_and_keeps_it_to_itself(browser: Any) -> None:
    keys = [{"name": "desk", "value": "s3cret"}]
    async with FakeLlamaServer() as fake, serving([fake], keys=keys) as service:
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(f"{service.url}/ui")
        await page.get_by_role("textbox", name="Key").fill("wrong")
        await page.get_by_role("textbox", name="Key").press("Enter")
        await until(page, "document.getElementById('ask-note').textContent.includes('not known')")
        await page.get_by_role("textbox", name="Key").fill("s3cret")
        await page.get_by_role("button", name="Show").click()
        await page.wait_for_selector("#state[data-is=live]")
        assert not await page.locator("#ask").is_visible()
        assert "s3cret" not in page.url
        await context.close()


async def test_it_comes_back_after_a_break(browser: Any, busy: Service) -> None:
    async with page_of(browser, busy) as page:
        await page.evaluate("leave()")
        await page.evaluate("snapshot = null; follow(); 0")
        await until(page, "snapshot !== null")


async def test_an_hour_of_updates_does_not_grow_it(browser: Any, busy: Service) -> None:
    async with page_of(browser, busy) as page:
        devtools = await page.context.new_cdp_session(page)

        async def size() -> tuple[int, int]:
            await devtools.send("HeapProfiler.collectGarbage")
            counts = await devtools.send("Memory.getDOMCounters")
            usage = await devtools.send("Runtime.getHeapUsage")
            return counts["nodes"], usage["usedSize"]

        update = """(count) => {
          leave();
          const text = JSON.stringify(snapshot);
          for (let i = 0; i < count; i++) {
            snapshot = JSON.parse(text);
            for (const backend of snapshot.backends)
              for (const slot of backend.slots) {
                slot.tokens = (slot.tokens + i) % 2048;
                if (i % 3) slot.running = null;
              }
            for (const one of snapshot.pools) {
              if (i % 2) one.queue = [];
              one.history.cached.push(i);
              one.history.cached.shift();
            }
            snapshot.finished = snapshot.finished.slice(i % 5);
            draw();
          }
        }"""
        await page.evaluate(update, 100)
        nodes, used = await size()
        await page.evaluate(update, 3600)
        nodes_later, used_later = await size()
        assert nodes_later <= nodes * 1.1 + 50
        assert used_later <= used * 1.2 + 500_000
