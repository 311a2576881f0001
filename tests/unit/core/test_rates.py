"""Speeds learned while serving, and how many may run at once by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from warmslot.router.rates import DECODE_PRIOR, Rates
from warmslot.router.scheduler import best_level, in_flight_limit


def test_a_step_that_was_never_seen_follows_from_those_that_were() -> None:
    rates = Rates()
    for _ in range(20):
        for busy in (1, 2, 4):
            rates.saw_decode(500, 500 * (0.010 + 0.002 * (busy - 1)), busy)
    assert rates.step_seconds(1) == pytest.approx(0.010, rel=0.02)
    assert rates.step_seconds(8) == pytest.approx(0.024, rel=0.03)
    assert rates.gain(8) == pytest.approx(8 * 0.010 / 0.024, rel=0.05)


def test_before_anything_was_seen_sharing_is_taken_to_help_but_not_to_be_free() -> None:
    rates = Rates()
    assert rates.decode_seconds(24) == pytest.approx(24 * DECODE_PRIOR)
    assert 1.0 < rates.gain(2) < rates.gain(4) < 4.0


@given(
    st.lists(
        st.tuples(st.integers(1, 4000), st.floats(1e-4, 1.0), st.floats(1.0, 32.0)), min_size=1, max_size=30
    )
)
def test_whatever_was_seen_a_crowd_is_never_faster_for_one_nor_slower_in_all(
    seen: list[tuple[int, float, float]],
) -> None:
    rates = Rates()
    for tokens, per_token, busy in seen:
        rates.saw_decode(tokens, tokens * per_token, busy)
    assert rates.step_seconds(1) > 0
    for busy in range(1, 32):
        assert rates.step_seconds(busy + 1) >= rates.step_seconds(busy) * (1 - 1e-9)
        assert rates.gain(busy + 1) >= rates.gain(busy) * (1 - 1e-9)


def test_long_answers_to_short_prompts_share_and_short_answers_to_long_prompts_do_not() -> None:
    def gain(busy: float) -> float:
        return busy * 0.010 / (0.010 + 0.002 * (busy - 1))

    assert best_level(8, 10.0, 0.1, gain) == 8
    assert best_level(8, 0.1, 60.0, gain) == 1
    assert 1 < best_level(8, 1.4, 0.55, gain) <= 8
    assert best_level(1, 1.0, 1.0, gain) == 1


def test_where_sharing_wins_nothing_one_runs_at_a_time() -> None:
    assert best_level(4, 5.0, 1.0, lambda _: 1.0) == 1


@pytest.mark.parametrize(("policy", "limit"), [("serialize", 1), ("pair", 2), ("slots", 4), ("auto", 4)])
def test_limits(policy: str, limit: int) -> None:
    assert in_flight_limit(policy, 4) == limit  # type: ignore[arg-type]
