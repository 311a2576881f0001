"""The core over an engine with a prompt cache in host memory: what it predicts, counts and forgets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.values import (
    HostMemory,
    Lease,
    Loss,
    Outcome,
    Prompt,
    Report,
    Request,
    Route,
    SlotObservation,
    Status,
)

ALPHA, BETA = b"alpha " * 200, b"beta " * 240


def make(slots: int = 1, host: HostMemory | None = None) -> RouterCore:
    core = RouterCore({"p": CoreSettings(in_flight="serialize", queue="fifo")})
    host = host or HostMemory(limit=1e12, token_bytes=1.0)
    core.backend_up("a", "p", slots, 65536, 0.0, known_empty=True, host=host)
    return core


def serve(
    core: RouterCore, name: str, text: bytes, cached: int | None = None, **more: object
) -> tuple[Lease, Report]:
    now = float(name)
    prompt = Prompt.of(text, tokens=len(text) // 4)
    core.submit(Request(id=name, prompt=prompt, pool="p", arrived=now, **more), now)  # type: ignore[arg-type]
    (lease,) = core.grant(now)
    total = len(text) // 4
    cached = min(lease.predicted_tokens if cached is None else cached, total - 1)
    outcome = Outcome(Status.OK, cached, total - cached, output_tokens=1, prefill_seconds=0.1)
    return lease, core.finish(name, outcome, now + 0.5)


def test_what_was_overwritten_is_predicted_to_come_back_and_counted_apart() -> None:
    core = make()
    serve(core, "1", ALPHA)
    _, report = serve(core, "2", BETA)
    assert report.host_tokens == 0
    lease, report = serve(core, "3", ALPHA + b"and on")
    assert lease.predicted_tokens == report.cached_tokens == report.host_tokens == len(ALPHA) // 4
    lease, report = serve(core, "4", ALPHA + b"and on and on")
    assert report.cached_tokens > 0
    assert report.host_tokens == 0  # the slot held it


def test_what_did_not_come_back_counts_as_evicted_and_is_not_hoped_for_again() -> None:
    core = make(host=HostMemory(limit=1e12))
    for name, text in (("1", ALPHA), ("2", BETA), ("3", b"gamma " * 200)):
        serve(core, name, text)
    lease, report = serve(core, "4", BETA + b"and on", cached=0)
    assert lease.predicted_tokens > 0
    assert report.host_tokens == 0
    assert report.losses[Loss.EVICTED] >= len(BETA) // 4 - 1
    assert sum(report.losses.values()) == report.processed_tokens
    lease, _ = serve(core, "5", ALPHA + b"and on")  # older than what has gone
    assert lease.predicted_tokens == 0


def test_an_empty_slot_gets_nothing_from_it() -> None:
    core = make(slots=2)
    serve(core, "1", ALPHA)
    lease, _ = serve(core, "2", BETA)
    assert lease.slot.slot == 1
    assert lease.predicted_tokens == 0


@pytest.mark.parametrize("how", ["restart", "sleep", "foreign", "unpinned"])
def test_it_is_forgotten(how: str) -> None:
    core = make()
    serve(core, "1", ALPHA)
    serve(core, "2", BETA)
    if how == "restart":
        host = HostMemory(limit=1e12, token_bytes=1.0)
        core.backend_up("a", "p", 1, 65536, 3.0, known_empty=True, host=host)
    elif how == "sleep":
        core.observe("a", [SlotObservation(0, processing=False, resident_tokens=0)], 3.0)
    elif how == "foreign":
        core.observe("a", [SlotObservation(0, processing=True)], 3.0)
        core.observe("a", [SlotObservation(0, processing=False, resident_tokens=5)], 3.5)
    else:
        serve(core, "3", b"gamma " * 100, cached=0, pinned=False)
    lease, _ = serve(core, "4", ALPHA + b"and on")
    assert lease.predicted_tokens == 0


def test_embeddings_leave_it_alone() -> None:
    core = make()
    serve(core, "1", ALPHA)
    serve(core, "2", BETA)
    serve(core, "3", b"gamma " * 100, cached=0, route=Route.INFILL)
    lease, _ = serve(core, "4", ALPHA + b"and on")
    assert lease.predicted_tokens == len(ALPHA) // 4


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_losses_add_up_and_parts_stay_within_the_whole(data: st.DataObject) -> None:
    core = make(slots=2, host=HostMemory(limit=1500.0, token_bytes=1.0))
    letters = st.sampled_from([b"a" * 256, b"b" * 256, b"c" * 256])
    for number in range(1, data.draw(st.integers(2, 20))):
        text = b"".join(data.draw(st.lists(letters, min_size=1, max_size=8)))
        told = data.draw(st.none() | st.integers(0, len(text) // 4))
        _, report = serve(core, str(number), text, cached=told)
        assert sum(report.losses.values()) == report.processed_tokens
        assert 0 <= report.host_tokens <= report.cached_tokens
