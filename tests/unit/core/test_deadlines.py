"""Whether serving somebody first leaves every bound possible: the same as playing the queue through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from warmslot.router.core import CoreSettings
from warmslot.router.scheduler import Deadlines, Waiting, bound, due
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


def _played(queue: list[Waiting], limit: float, longest: float | None, first: Waiting, capacity: int) -> bool:
    at = NOW + first.seconds / capacity
    for item in sorted(queue, key=lambda w: (due(w, limit, longest), w.order)):
        if item is first:
            continue
        if at > due(item, limit, longest):
            return False
        at += item.seconds / capacity
    return True


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 300), st.none() | st.integers(1, 400)),
        min_size=1,
        max_size=12,
    ),
    longest=st.none() | st.integers(1, 400),
    capacity=st.sampled_from([1, 2, 4]),
)
def test_a_bound_is_foreseen_as_if_the_queue_were_played_through(
    shapes: list[tuple[int, int, int | None]], longest: int | None, capacity: int
) -> None:
    queue = [_waiting(order, *shape) for order, shape in enumerate(shapes)]
    settings = CoreSettings(max_wait=longest)
    deadlines = Deadlines(queue, settings, NOW, capacity)
    limit = bound(queue, settings, capacity)
    for first in queue:
        expected = _played(queue, limit, longest, first, capacity)
        assert deadlines.allow(first, first.prefill_seconds) == expected
