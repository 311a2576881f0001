"""The core over an engine with a prompt cache in host memory: what it predicts, counts and forgets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.placement import Ask, Demand, SlotFacts, loss_seconds
from warmslot.router.rates import Rates
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
    SlotRef,
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


def timed(core: RouterCore, name: str, text: bytes, copying: float, *, slot: int | None = None) -> Lease:
    """Served as by an engine that copies for ``copying`` seconds before it computes at 1,000 tokens/s."""
    now, total = float(name), len(text) // 4
    core.submit(Request(id=name, prompt=Prompt.of(text, tokens=total), pool="p", arrived=now), now)
    (lease,) = core.grant(now)
    assert slot is None or lease.slot.slot == slot
    processed = max(1, total - lease.predicted_tokens)
    prefill = processed / 1000
    core.first_token(name, now + copying + prefill)
    outcome = Outcome(Status.OK, total - processed, processed, output_tokens=1, prefill_seconds=prefill)
    core.finish(name, outcome, now + copying + prefill)
    return lease


def test_it_says_whether_copying_pays_once_it_was_seen() -> None:
    for copying, pays in ((0.01, True), (2.0, False)):
        core = make()
        timed(core, "1", ALPHA, 0.0)
        view = core.host_memory("a")
        assert view is not None
        assert (view.entries, view.pays, view.copy_seconds) == (0, None, None)
        timed(core, "10", BETA, copying)
        timed(core, "20", ALPHA + b"and on", copying)
        view = core.host_memory("a")
        assert view is not None
        assert view.entries > 0
        assert view.pays is pays
    core.backend_down("a", 30.0)
    assert core.host_memory("a") is None
    assert RouterCore({}).host_memory("a") is None


def first_token_seconds(copying: float) -> float:
    """What a prompt that is in host memory is priced at, where copying takes so long."""
    core = make()
    for number, text in enumerate((ALPHA, BETA, ALPHA, BETA), 1):
        timed(core, str(10 * number), text, copying if number > 1 else 0.0)
    prompt = Prompt.of(ALPHA + b"more", tokens=len(ALPHA) // 4 + 1)
    core.submit(Request(id="x", prompt=prompt, pool="p", arrived=99.0), 99.0)
    (lease,) = core.grant(99.0)
    (only,) = lease.candidates
    return only.prefill_seconds


def test_what_is_in_host_memory_is_priced_by_copying_and_not_by_prefill() -> None:
    assert 0.02 < first_token_seconds(0.02) < 0.05  # 0.3 s, had it to be computed
    assert first_token_seconds(5.0) == pytest.approx(250 * first_token_seconds(0.02), rel=0.05)


def test_what_is_saved_when_it_is_overwritten_costs_no_more_than_loading_it_again() -> None:
    rates = Rates()
    rates.saw_prefill(0, 10_000, 10.0)
    slot = SlotFacts(SlotRef("a", 0), "other", 1000, 0, 1.0, 0.0, rates, restore_seconds=0.2)
    demand = Demand("waiting", match_tokens=1000, elsewhere_tokens=0)
    ask = Ask("x", "mine", 500, rollback_chance=0.0, turns=2.0)
    lost = loss_seconds(slot, 0, ask)
    assert lost == pytest.approx(2 * rates.prefill_seconds(1, 1000))
    assert loss_seconds(slot, 0, ask, saved=True) == pytest.approx(2 * 0.2)
    slot.demands, slot.return_chance = [demand], 0.0
    assert loss_seconds(slot, 0, ask) == pytest.approx(rates.prefill_seconds(0, 1000))
    assert loss_seconds(slot, 0, ask, saved=True) == pytest.approx(0.2)


def test_what_waits_hopes_for_nothing_of_an_engine_that_came_back_without_one() -> None:
    core = make()
    timed(core, "1", ALPHA, 0.01)
    timed(core, "2", BETA, 0.01)
    for name, text in (("b", BETA), ("x", ALPHA), ("y", b"gamma " * 200)):
        prompt = Prompt.of(text, tokens=len(text) // 4)
        asked = Request(id=name, prompt=prompt, pool="p", arrived=3.0, max_output_tokens=1)
        core.submit(asked, 3.0)
    (busy,) = core.grant(3.0)
    core.backend_up("a", "p", 1, 65536, 4.0, known_empty=True)
    core.finish(busy.request.id, Outcome(Status.ERROR, None, None, output_tokens=0), 4.0)
    waits = [core.position(name, 4.0) for name in ("x", "y")]
    (later,) = [wait for place, wait in filter(None, waits) if place == 1]
    assert later > Rates().prefill_seconds(0, len(ALPHA) // 4)  # whoever is first computes all of it


def test_what_waits_learns_of_a_new_life_of_its_engine() -> None:
    core = make()
    timed(core, "1", ALPHA, 0.01)
    timed(core, "2", BETA, 0.01)
    core.submit(Request(id="b", prompt=Prompt.of(BETA, tokens=len(BETA) // 4), pool="p", arrived=3.0), 3.0)
    (busy,) = core.grant(3.0)
    core.submit(Request(id="x", prompt=Prompt.of(ALPHA, tokens=len(ALPHA) // 4), pool="p", arrived=3.0), 3.0)
    assert core.grant(3.0) == []
    host = HostMemory(limit=1e12, token_bytes=1.0)
    core.backend_up("a", "p", 1, 65536, 4.0, known_empty=True, host=host)
    core.finish(busy.request.id, Outcome(Status.ERROR, None, None, output_tokens=0), 4.0)
    (lease,) = core.grant(4.0)
    assert lease.predicted_tokens == 0
    (only,) = lease.candidates
    assert only.prefill_seconds == pytest.approx(Rates().prefill_seconds(0, len(ALPHA) // 4))
