"""Sums over positions and time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from warmslot.router.curves import (
    BLOCK_NAMES,
    LEVEL_NAMES,
    POSITION_BLOCKS,
    DecodeLevels,
    DemandClock,
    PrefillCurve,
    blocks,
    level_name,
)


def test_blocks_are_named_by_their_upper_bound() -> None:
    assert BLOCK_NAMES[:3] == ("4k", "8k", "16k")
    assert BLOCK_NAMES[-1] == "1M"
    assert LEVEL_NAMES[0] == "0"
    assert level_name(32) == "32"
    assert level_name(33) == level_name(900) == "more"


@given(st.integers(0, 3_000_000), st.integers(0, 3_000_000))
def test_blocks_cover_every_position_once(one: int, other: int) -> None:
    begin, end = sorted((one, other))
    parts = list(blocks(begin, end))
    assert sum(tokens for _, tokens in parts) == end - begin
    assert [index for index, _ in parts] == sorted({index for index, _ in parts})
    for index, tokens in parts:
        low = POSITION_BLOCKS[index - 1] if index else 0
        assert tokens <= max(POSITION_BLOCKS[index], end) - low


@given(st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 50_000), st.floats(0, 100))))
def test_what_is_learned_is_shared_out_without_loss(prefills: list[tuple[int, int, float]]) -> None:
    curve = PrefillCurve()
    for begin, count, seconds in prefills:
        parts = curve.learn(begin, begin + count, seconds)
        assert sum(tokens for _, tokens, _ in parts) == count
        assert sum(share for _, _, share in parts) == pytest.approx(seconds)


def test_cost_follows_the_position() -> None:
    curve = PrefillCurve()
    assert curve.cost(0, 1000) == 0
    curve.learn(0, 4096, 4.096)
    assert curve.cost(0, 1000) == pytest.approx(1.0)
    assert curve.cost(8192, 9192) == pytest.approx(1.0), "the nearest known block stands in"
    curve.learn(8192, 16384, 2 * 8.192)
    assert curve.cost(8192, 9192) == pytest.approx(2.0)
    assert curve.cost(0, 1000) == pytest.approx(1.0)


def test_demand_counts_the_time_at_each_level() -> None:
    clock = DemandClock(10.0)
    clock.change(1, 12.0)
    clock.change(1, 15.0)
    clock.change(-2, 16.0)
    clock.settle(20.0)
    assert clock.seconds[:3] == [6.0, 3.0, 1.0]
    clock.change(40, 20.0)
    clock.settle(21.0)
    assert clock.seconds[-1] == 1.0


def test_decoded_tokens_are_shared_out_by_the_company_they_had() -> None:
    levels = DecodeLevels(0.0)
    levels.begin("a", 0.0)
    levels.begin("b", 3.0)
    levels.end("a", 40, 4.0)
    levels.end("b", 20, 7.0)
    levels.end("unknown", 5, 7.0)
    assert levels.seconds[:3] == [0.0, 6.0, 1.0]
    assert levels.tokens[1:3] == [pytest.approx(30 + 15), pytest.approx(10 + 5)]
