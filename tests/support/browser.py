"""A real browser for the live page: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.router import Service

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


def missing(what: str) -> None:
    """Skip, or fail where a browser has to be there."""
    if os.environ.get("WARMSLOT_REQUIRE_BROWSER"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    """A fresh Chromium with an empty profile."""
    chromium = shutil.which("chromium")
    if chromium is None:
        missing("Chromium is not installed (Debian: apt-get install chromium)")
    try:
        from playwright.async_api import async_playwright  # noqa: PLC0415
    except ImportError:
        missing("playwright is not installed (pip install -e '.[browser]')")
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        yield running
        await running.close()


@asynccontextmanager
async def page_of(browser: Any, service: Service, **screen: Any) -> AsyncIterator[Any]:
    """The live page with a first snapshot on it. Nothing may be asked of anybody else, nothing may fail."""
    context = await browser.new_context(**screen)
    page = await context.new_page()
    faults: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(f"{service.url}/ui")
    await page.wait_for_selector("#state[data-is=live]")
    await page.wait_for_selector("ol.slots li")
    yield page
    await context.close()
    assert faults == []
    assert {url.split("/ui")[0] for url in asked if not url.startswith("data:")} == {service.url}


async def figures(page: Any) -> dict[str, str]:
    """The key figures by their names."""
    names, values = (
        await page.locator("dt").all_inner_texts(),
        await page.locator("dd.value").all_inner_texts(),
    )
    return dict(zip(names, values, strict=True))


async def until(page: Any, condition: str) -> None:
    """Return once an expression holds in the page (which its policy keeps from evaluating text itself)."""
    look = f"() => ({condition}) ? done() : requestAnimationFrame(look)"
    await page.evaluate(f"new Promise((done) => {{ const look = {look}; look(); }})")


def number(text: str) -> float:
    """The number in a text, whatever stands around it."""
    return float(re.sub(r"[^\d.]", "", text))
