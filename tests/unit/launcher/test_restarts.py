"""How soon and how often a backend that dies is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from warmslot.launcher.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(first=1.0, ceiling=10.0, jitter=0.5, budget=4, window=100.0, forgive=1000.0)


def middle() -> float:
    return 0.5


def test_waits_double_up_to_the_ceiling() -> None:
    restarts = Restarts(RestartPolicy(first=1.0, ceiling=5.0, budget=6), middle)
    assert [restarts.crashed(0.0) for _ in range(6)] == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def test_the_budget_is_per_window() -> None:
    restarts = Restarts(POLICY, middle)
    assert [restarts.crashed(now) for now in (0.0, 1.0, 2.0, 3.0)] == [1.0, 2.0, 4.0, 8.0]
    assert restarts.crashed(99.9) is None
    assert restarts.crashed(100.0) == 10.0


def test_a_long_stable_life_forgives() -> None:
    restarts = Restarts(POLICY, middle)
    for now in range(4):
        restarts.crashed(float(now))
    assert restarts.crashed(4.0, ready_for=999.0) is None
    assert restarts.crashed(4.0, ready_for=1000.0) == 1.0


@given(
    gaps=st.lists(st.floats(0, 300), max_size=60),
    chances=st.lists(st.floats(0, 1, exclude_max=True), min_size=1),
)
def test_never_more_than_the_budget_in_any_window_and_waits_stay_in_bounds(
    gaps: list[float], chances: list[float]
) -> None:
    position = 0

    def chance() -> float:
        nonlocal position
        position += 1
        return chances[position % len(chances)]

    restarts = Restarts(POLICY, chance)
    now, allowed = 0.0, []
    for gap in gaps:
        now += gap
        wait = restarts.crashed(now)
        if wait is None:
            assert sum(now - POLICY.window < at for at in allowed) == POLICY.budget
            continue
        assert 0.5 * POLICY.first <= wait <= 1.5 * POLICY.ceiling
        allowed.append(now)
        assert sum(now - POLICY.window < at <= now for at in allowed) <= POLICY.budget
