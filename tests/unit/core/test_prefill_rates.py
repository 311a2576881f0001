"""Rates learned online: exact on clean data, unmoved by outliers, quick to follow a real change."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from warmslot.router.rates import BLOCK_TOKENS, DECODE_PRIOR, PREFILL_PRIOR, Rates


def _falling(start: int, end: int) -> float:
    """Seconds on an engine at 1,000 tokens/s that is half as fast from position 8192 on."""
    cheap = max(0, min(end, 2 * BLOCK_TOKENS) - start)
    return (cheap + 2 * (end - start - cheap)) / 1000


def _taught() -> Rates:
    rates = Rates()
    for _ in range(30):
        for start, end in ((0, 3000), (4096, 9000), (9000, 12000), (0, 16384)):
            rates.saw_prefill(start, end, _falling(start, end))
    return rates


def test_priors_hold_until_something_was_seen() -> None:
    rates = Rates()
    assert rates.prefill_seconds(0, 1000) == pytest.approx(1000 * PREFILL_PRIOR)
    assert rates.decode_seconds(10) == pytest.approx(10 * DECODE_PRIOR)
    assert rates.prefill_seconds(10, 10) == rates.prefill_seconds(20, 10) == 0


def test_the_curve_by_position_is_found() -> None:
    rates = _taught()
    for start, end in ((0, 2000), (5000, 8000), (10_000, 16_000), (0, 16_000)):
        assert rates.prefill_seconds(start, end) == pytest.approx(_falling(start, end), rel=0.1)


@given(cuts=st.lists(st.integers(0, 40_000), min_size=2, max_size=6))
def test_parts_add_up(cuts: list[int]) -> None:
    rates = _taught()
    cuts.sort()
    parts = sum(rates.prefill_seconds(a, b) for a, b in pairwise(cuts))
    assert parts == pytest.approx(rates.prefill_seconds(cuts[0], cuts[-1]))


def test_one_outlier_changes_little() -> None:
    rates = _taught()
    before = rates.prefill_seconds(0, 4000)
    rates.saw_prefill(0, 500, 3600.0)
    rates.saw_prefill(0, 500, 1e-9)
    assert rates.prefill_seconds(0, 4000) == pytest.approx(before, rel=0.2)


def test_a_real_change_is_followed() -> None:
    rates = _taught()
    for _ in range(40):
        rates.saw_prefill(0, 4000, 40.0)
    assert rates.prefill_seconds(0, 4000) == pytest.approx(40.0, rel=0.1)


def test_short_prefills_do_not_make_long_ones_look_slow() -> None:
    rates = _taught()
    before = rates.prefill_seconds(0, 4000)
    for _ in range(300):
        rates.saw_prefill(3000, 3020, 0.08)
    assert rates.prefill_seconds(0, 4000) == pytest.approx(before, rel=0.01)
    for _ in range(30):
        rates.saw_prefill(0, 2000, 2.0 + 0.06)
    assert rates.prefill_seconds(0, 2000) == pytest.approx(2.0, rel=0.03)


def test_decoding_by_how_many_share_it() -> None:
    rates = Rates()
    for _ in range(40):
        rates.saw_decode(100, 4.0, 1)
        rates.saw_decode(100, 5.0, 2)
        rates.saw_decode(100, 7.0, 4)
    for busy, seconds in ((1, 4.0), (2, 5.0), (3, 6.0), (4, 7.0)):
        assert rates.decode_seconds(100, busy) == pytest.approx(seconds, rel=0.1)
    rates.saw_decode(1, 500.0, 1)
    assert rates.decode_seconds(100, 1) == pytest.approx(4.0, rel=0.1)
