"""A real browser for the live page: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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
