"""Speeds learned while serving, and how many may run at once by them."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from warmslot.router.rates import DECODE_PRIOR, Rates, passes_of, usual_passes
from warmslot.router.scheduler import best_level, in_flight_limit


def test_a_step_that_was_never_seen_follows_from_those_that_were() -> None:
    rates = Rates()
    for _ in range(20):
        for busy in (1, 2, 4):
            rates.saw_decode(500, 500 * (0.010 + 0.002 * (busy - 1)), busy)
    assert rates.step_seconds(1) == pytest.approx(0.010, rel=0.02)
    assert rates.step_seconds(8) == pytest.approx(0.024, rel=0.03)
    assert rates.gain(8) == pytest.approx(8 * 0.010 / 0.024, rel=0.05)


def test_a_step_takes_a_pass_for_each_run_of_slots() -> None:
    assert [passes_of(slots) for slots in ((), (3,), (2, 1, 3), (0, 2, 4), (0, 1, 4, 5))] == [0, 1, 1, 3, 2]


@given(st.integers(1, 10), st.data())
def test_usual_passes_are_the_mean_over_all_ways_to_lie(slots: int, data: st.DataObject) -> None:
    busy = data.draw(st.integers(1, slots))
    ways = [passes_of(some) for some in combinations(range(slots), busy)]
    assert usual_passes(busy, slots) == pytest.approx(sum(ways) / len(ways))


def test_what_a_further_pass_costs_is_told_from_what_a_further_answer_does() -> None:
    rates = Rates()
    assert rates.pass_seconds == 0
    for _ in range(20):
        for busy, passes in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (6, 3)):
            rates.saw_decode(500, 500 * (0.010 + 0.002 * (busy - 1) + 0.007 * (passes - 1)), busy, passes)
    # What is taken for granted before anything was seen keeps a little weight for ever.
    assert rates.pass_seconds == pytest.approx(0.007, rel=0.1)
    assert rates.step_seconds(1) == pytest.approx(0.010, rel=0.03)
    assert rates.step_seconds(8, 1) == pytest.approx(0.024, rel=0.1)
    assert rates.gain(4, 1) > rates.gain(4, 2)


def test_passes_cost_nothing_where_the_engine_computes_all_slots_in_one() -> None:
    rates = Rates()
    for _ in range(20):
        for busy, passes in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 3), (6, 3)):
            rates.saw_decode(500, 500 * (0.010 + 0.002 * (busy - 1)), busy, passes)
    assert rates.pass_seconds < 0.0002
    assert rates.step_seconds(6) == pytest.approx(0.020, rel=0.03)


def test_before_anything_was_seen_sharing_is_taken_to_help_but_not_to_be_free() -> None:
    rates = Rates()
    assert rates.decode_seconds(24) == pytest.approx(24 * DECODE_PRIOR)
    assert 1.0 < rates.gain(2) < rates.gain(4) < 4.0


@given(
    st.lists(
        st.tuples(st.integers(1, 4000), st.floats(1e-4, 1.0), st.floats(1.0, 32.0), st.floats(1.0, 16.0)),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_was_seen_a_crowd_is_never_faster_for_one_nor_slower_in_all(
    seen: list[tuple[int, float, float, float]],
) -> None:
    rates = Rates()
    for tokens, per_token, busy, passes in seen:
        rates.saw_decode(tokens, tokens * per_token, busy, min(busy, passes))
    assert rates.step_seconds(1) > 0
    assert rates.pass_seconds >= 0
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


def test_what_copying_costs_is_learned_beside_what_every_request_takes() -> None:
    rates = Rates()
    rates.saw_prefill(0, 1000, 2.0)
    assert rates.copies_pay is None
    assert 0 < rates.copy_seconds(1000) < rates.prefill_seconds(0, 1000)  # a guess, for a start
    for _ in range(20):
        rates.saw_copy(0, 0.01)
    for _ in range(20):
        rates.saw_copy(2000, 0.01 + 0.2)
    assert rates.copy_seconds(1000) == pytest.approx(0.1, rel=0.01)
    assert rates.copies_pay is True
    assert rates.loaded_seconds(1000, 900, 1000) == pytest.approx(0.1 + rates.prefill_seconds(900, 1000))
    assert rates.loaded_seconds(1000, 1000, 1000) > rates.copy_seconds(1000)  # the last token is computed


def test_a_verdict_on_copying_stands_until_it_is_clearly_wrong() -> None:
    rates = Rates()
    rates.saw_prefill(0, 10_000, 10.0)
    rates.saw_copy(10_000, 4.9)
    assert rates.copies_pay is True
    for _ in range(30):
        rates.saw_copy(10_000, 5.5)  # a little dearer than computing
    assert rates.copies_pay is True
    for _ in range(30):
        rates.saw_copy(10_000, 9.0)
    assert rates.copies_pay is False
    for _ in range(30):
        rates.saw_copy(10_000, 4.5)
    assert rates.copies_pay is False
