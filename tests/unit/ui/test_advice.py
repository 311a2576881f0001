"""What the live page says of the slot count, from made-up sums, in the browser that runs its words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.router.advice import Advised

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.browser import page_of
from tests.support.router import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def page(browser: Any) -> AsyncIterator[Any]:
    async with FakeLlamaServer() as fake, serving([fake]) as service, page_of(browser, service) as shown:
        yield shown


async def said(page: Any, slots: int, observed: int, shares: list[int], requests: int = 100) -> str:
    counts = dict(zip(("1", "2", "4", "8", "16", "32", "unbounded"), shares, strict=True))
    history = {"cached": [observed], "processed": [1000 - observed], "requests": [requests]}
    pool = {"name": "m", "slots": slots, "history": history, "by_slots": counts}
    text: str = await page.evaluate(f"advice({json.dumps(pool)})")
    return text


async def test_it_names_the_count_that_is_enough_and_says_whether_to_believe_it(page: Any) -> None:
    assert await said(page, 4, 500, [100, 300, 510, 800, 805, 805, 900]) == (
        "4 slots reused 50.0 %. The model says 51.0 % for 4. 8 slots would reuse 80.0 %; more gain nothing."
    )
    assert await said(page, 8, 800, [700, 795, 800, 800, 800, 800, 800]) == (
        "8 slots reused 80.0 %. The model says 80.0 % for 8. 2 would reuse as much; "
        "fewer slots leave memory for longer contexts."
    )
    assert await said(page, 4, 800, [100, 300, 800, 805, 805, 805, 805]) == (
        "4 slots reused 80.0 %. The model says 80.0 % for 4. More would gain nothing, fewer would lose."
    )
    assert await said(page, 4, 100, [100, 300, 800, 900, 900, 900, 900]) == (
        "4 slots reused 10.0 %. The model says 80.0 % for 4: they part, so do not trust it now. "
        "8 slots would reuse 90.0 %; more gain nothing."
    )
    assert await said(page, 6, 600, [100, 200, 300, 400, 500, 700, 900]) == (
        "6 slots reused 60.0 %. 32 slots would reuse 70.0 %; more are not modelled."
    )


async def test_it_says_what_an_advisor_found_and_why(page: Any) -> None:
    found = {
        "slots": 4,
        "headline": "--parallel 4, one at a time",
        "confidence": "low",
        "reason": "So.",
        "time": 0,
    }
    text = await page.evaluate(f"advised({json.dumps({'name': 'b', 'advised': found})})")
    assert text.startswith("b, ")
    assert text.endswith(" ago: --parallel 4, one at a time (confidence low). So.")
    found |= {"slots": 0, "reason": "too little data"}
    text = await page.evaluate(f"advised({json.dumps({'name': 'b', 'advised': found})})")
    assert text.endswith(" ago: no advice, too little data")


async def test_advice_stands_on_the_page_once_there_is_some(browser: Any) -> None:
    async with FakeLlamaServer() as fake, serving([fake]) as service, page_of(browser, service) as shown:
        advised = shown.locator("#counts ul.advised")
        assert await advised.is_hidden()
        service.router.advise({"b0": Advised(4, "So it is.", 1.0, "--parallel 4", "high")})
        await advised.get_by_text("--parallel 4 (confidence high). So it is.").wait_for()


async def test_it_says_when_there_is_too_little_to_say(page: Any) -> None:
    assert "too few to say" in await said(page, 4, 500, [100, 300, 510, 800, 805, 805, 900], requests=19)
    assert "too few to say" in await said(page, 4, 0, [0] * 7)
