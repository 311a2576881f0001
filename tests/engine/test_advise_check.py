"""``warmslot check`` on real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from warmslot.launcher.check import check_engine

if TYPE_CHECKING:
    from pathlib import Path

    from warmslot.launcher.engine import Engine


@pytest.mark.timeout(400)
async def test_answers_at_once_equal_those_in_turn_with_and_without_drafts(
    installed_engine: Engine, demo_model: Path
) -> None:
    said: list[str] = []
    result = await check_engine(
        installed_engine, demo_model, ["-t", "2"], at_once=2, tokens=12, drafts=True, say=said.append
    )
    assert result.good
    assert all(one.tokens == 24 for one in result.findings)
    alone, together, *drafted = result.findings  # both kinds of engine draft without a second model
    assert alone.busy_slots == 1.0
    assert together.busy_slots is not None
    assert together.busy_slots > 1.5
    assert alone.drafted == 0
    assert [one.setting for one in drafted] == ["in turn, drafts", "at once, drafts"]
    assert drafted[0].drafted > 0
