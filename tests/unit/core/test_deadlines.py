"""Whether serving somebody first leaves every bound possible: the same as playing the queue through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.rates import DECODE_PRIOR
from warmslot.router.scheduler import Capacity, Deadlines, Waiting, bound, due
from warmslot.router.values import Prompt, Request

NOW = 1000.0


def _waiting(order: int, seconds: int, waited: int, own: int | None) -> Waiting:
    request = Request(id=str(order), prompt=Prompt.of(b"p"), pool="p", arrived=NOW - waited, max_wait=own)
    return Waiting(
        request=request,
        order=order,
        since=NOW - waited,
        session=str(order),
        prefill_seconds=seconds / 2,
        decode_seconds=seconds / 2,
        seconds=float(seconds),
    )


def _played(
    queue: list[Waiting], limit: float, longest: float | None, first: float, capacity: Capacity
) -> bool:
    at = NOW + first
    for item in sorted(queue, key=lambda w: (due(w, limit, longest), w.order)):
        if at > due(item, limit, longest):
            return False
        at += capacity.seconds(item.prefill_seconds, item.decode_seconds)
    return True


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 300), st.none() | st.integers(1, 400)),
        min_size=1,
        max_size=12,
    ),
    longest=st.none() | st.integers(1, 400),
    capacity=st.sampled_from([Capacity(), Capacity(4, 1.0, 2.0), Capacity(16, 2.0, 8.0)]),
    longer=st.integers(0, 60),
)
def test_a_bound_is_foreseen_as_if_the_queue_were_played_through(
    shapes: list[tuple[int, int, int | None]], longest: int | None, capacity: Capacity, longer: int
) -> None:
    queue = [_waiting(order, *shape) for order, shape in enumerate(shapes)]
    settings = CoreSettings(max_wait=longest)
    deadlines = Deadlines(queue, settings, NOW, capacity, lambda most: max(0.0, min(longer, most)))
    limit = bound(queue, settings, capacity)
    work = sum(capacity.seconds(item.prefill_seconds, item.decode_seconds) for item in queue)
    reserved = max(0.0, (limit - work) * capacity.answers / 2)
    for first in queue:
        others = [item for item in queue if item is not first]
        delay = capacity.seconds(first.prefill_seconds, first.decode_seconds + min(longer, reserved))
        expected = _played(others, limit, longest, delay, capacity)
        assert deadlines.allow(first, first.prefill_seconds) == expected


def test_time_is_kept_free_for_the_longest_answer_of_late_that_there_is_time_for() -> None:
    core = RouterCore({"p": CoreSettings()})
    core.backend_up("a", "p", 4, 4096, 0.0, known_empty=True)
    pool, step = core._pools["p"], DECODE_PRIOR
    assert pool.overrun(5.0) == 5.0  # nothing is known of answers
    for tokens in [24] * 200 + [240, 4800]:
        pool.learn_output("somebody", tokens, 1.0)
    expected = pool.mean_output
    assert pool.overrun(1000.0) == pytest.approx((4800 - expected) * step)
    assert pool.overrun(60.0) == pytest.approx((240 - expected) * step)  # the other would have taken it all
    assert pool.overrun(1.0) == pool.overrun(0.0) == pool.overrun(-5.0) == 0.0


def test_an_engine_with_many_slots_computes_no_more_prompts_than_one_with_few() -> None:
    slots, backends = RouterCore({"p": CoreSettings(in_flight="slots")}), RouterCore({"p": CoreSettings()})
    slots.backend_up("a", "p", 4, 4096, 0.0, known_empty=True)
    for name in "ab":
        backends.backend_up(name, "p", 1, 4096, 0.0, known_empty=True)
    many, several = slots._pools["p"]._capacity(), backends._pools["p"]._capacity()
    assert (many.requests, many.prompts) == (4, 1.0)
    assert 1.0 < many.answers < 4.0  # a step takes longer with every answer that shares it
    assert several == Capacity(2, 2.0, 2.0)
