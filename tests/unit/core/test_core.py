"""The core's contract: leases are exclusive and exact, truth corrects belief."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warmslot.router.core import CoreSettings, QueueFullError, RouterCore
from warmslot.router.rates import Rates
from warmslot.router.values import (
    Decision,
    Lease,
    Loss,
    Outcome,
    Prompt,
    Report,
    Request,
    SlotObservation,
    SlotRef,
    Status,
)

SYSTEM = b"You are a careful assistant. " * 40


def make(slots: int = 4, in_flight: str = "serialize", **more: object) -> RouterCore:
    core = RouterCore({"p": CoreSettings(in_flight=in_flight, **more)})  # type: ignore[arg-type]
    core.backend_up("a", "p", slots, 4096, 0.0, known_empty=True)
    return core


def ask(core: RouterCore, name: str, text: bytes, now: float = 0.0, **more: object) -> None:
    core.submit(Request(id=name, prompt=Prompt.of(text), pool="p", arrived=now, **more), now)  # type: ignore[arg-type]


def answer(
    core: RouterCore, lease: Lease, now: float, *, cached: int | None = None, generated: bytes = b""
) -> Report:
    """Finish as an engine would that counts four bytes for a token."""
    total = max(1, lease.request.prompt.length // 4)
    cached = min(lease.predicted_tokens if cached is None else cached, total - 1)
    outcome = Outcome(
        status=Status.OK,
        cached_tokens=cached,
        processed_tokens=total - cached,
        output_tokens=len(generated) // 4 + 1,
        prefill_seconds=0.1,
        decode_seconds=0.1,
        generated=generated,
    )
    return core.finish(lease.request.id, outcome, now)


def serve(
    core: RouterCore, name: str, text: bytes, now: float, generated: bytes = b""
) -> tuple[Lease, Report]:
    ask(core, name, text, now)
    (lease,) = core.grant(now)
    return lease, answer(core, lease, now + 0.5, generated=generated)


def test_a_conversation_stays_on_its_slot_and_its_answer_counts() -> None:
    core = make()
    first, _ = serve(core, "1", SYSTEM + b"hello", 0, b" general kenobi.")
    other, _ = serve(core, "2", b"Something else entirely. " * 30, 1)
    turn = SYSTEM + b"hello general kenobi. And what is new to you this fine morning?"
    second, report = serve(core, "3", turn, 2)
    assert first.slot == second.slot != other.slot
    assert second.decision is Decision.AFFINITY
    assert second.predicted_tokens == len(SYSTEM + b"hello") // 4 + 4
    assert sum(report.losses.values()) == report.processed_tokens


def test_identical_prompt_leaves_one_token_to_evaluate() -> None:
    core = make()
    serve(core, "1", SYSTEM, 0)
    lease, _ = serve(core, "2", SYSTEM, 1)
    assert lease.predicted_tokens == len(SYSTEM) // 4 - 1


def test_a_stranger_takes_an_empty_slot_then_the_least_recently_used() -> None:
    core = make(slots=2)
    a, _ = serve(core, "1", b"alpha " * 100, 0)
    b, _ = serve(core, "2", b"beta  " * 100, 1)
    c, _ = serve(core, "3", b"gamma " * 100, 30)
    assert a.slot != b.slot
    assert c.slot == a.slot


@pytest.mark.parametrize(("policy", "most"), [("serialize", 1), ("pair", 2), ("slots", 4)])
def test_in_flight_is_limited(policy: str, most: int) -> None:
    core = make(in_flight=policy, linger=0.0)
    for i in range(6):
        ask(core, str(i), bytes([65 + i]) * 500)
    leases = core.grant(0)
    assert len(leases) == most
    assert core.queued("p") == 6 - most
    answer(core, leases[0], 1)
    assert len(core.grant(1)) == 1


def test_queue_limit_and_position() -> None:
    core = make(max_queue=2)
    ask(core, "1", b"x" * 400)
    ask(core, "2", b"y" * 400)
    with pytest.raises(QueueFullError) as full:
        ask(core, "3", b"z" * 400)
    assert full.value.limit == 2
    place = core.position("2", 0.0)
    assert place is not None
    assert place[0] == 1
    assert core.position("3", 0.0) is None


def test_the_wait_counts_what_runs_too() -> None:
    core = make()
    ask(core, "1", b"x" * 4000)
    (lease,) = core.grant(0.0)
    ask(core, "2", b"y" * 400)
    found = core.position("2", 0.0)
    assert found is not None
    assert found[0] == 0
    assert found[1] >= Rates().prefill_seconds(0, lease.prompt_tokens)
    later = core.position("2", 1.0)
    assert later is not None
    assert 0 < later[1] < found[1]


def test_a_prompt_that_is_sent_again_loses_its_last_token_to_the_engine() -> None:
    core = make()
    serve(core, "1", SYSTEM, 0)
    _, report = serve(core, "2", SYSTEM, 1)
    assert report.losses == {Loss.ENGINE: 1}


def test_an_empty_prompt_is_served_like_any_other() -> None:
    core = make(slots=2)
    for number, text in enumerate((b"", SYSTEM, b""), 1):
        core.submit(Request(id=str(number), prompt=Prompt.of(text), pool="p", arrived=0.0), 0.0)
        (lease,) = core.grant(0.0)
        outcome = Outcome(Status.OK, 0, len(text) // 4, output_tokens=2, generated=b"so it goes")
        report = core.finish(str(number), outcome, 1.0)
        assert all(tokens >= 0 for tokens in report.shadow.values())
        assert sum(report.losses.values()) == report.processed_tokens
        assert lease.predicted_tokens >= 0


def test_withdrawn_is_never_granted() -> None:
    core = make()
    ask(core, "1", b"x" * 400)
    core.withdraw("1", 0)
    core.withdraw("unknown", 0)
    assert core.grant(0) == []


def test_finish_is_exactly_once() -> None:
    core = make()
    ask(core, "1", b"x" * 400)
    (lease,) = core.grant(0)
    answer(core, lease, 1)
    with pytest.raises(KeyError):
        answer(core, lease, 2)


def test_an_engine_that_reuses_less_than_held_is_the_reason() -> None:
    core = make()
    serve(core, "1", SYSTEM, 0)
    ask(core, "2", SYSTEM + b"more" * 10, 1)
    (lease,) = core.grant(1)
    report = answer(core, lease, 2, cached=0)
    assert report.losses[Loss.ENGINE] == lease.predicted_tokens
    assert sum(report.losses.values()) == report.processed_tokens


def test_a_dead_backend_forgets_and_its_lease_can_be_finished() -> None:
    core = make()
    serve(core, "1", SYSTEM, 0)
    ask(core, "2", SYSTEM + b"x", 1)
    (lease,) = core.grant(1)
    core.backend_down("a", 2)
    assert core.slots() == []
    report = core.finish("2", Outcome(status=Status.ERROR, engine_error=True), 3)
    assert report.truth_missing
    core.backend_up("a", "p", 4, 4096, 4, known_empty=True)
    again, _ = serve(core, "3", SYSTEM + b"x", 5)
    assert lease.predicted_tokens > 0
    assert again.predicted_tokens == 0


def test_engine_error_empties_every_slot_that_was_processing() -> None:
    core = make(in_flight="pair")
    serve(core, "1", b"alpha " * 100, 0)
    serve(core, "2", b"beta  " * 100, 1)
    ask(core, "3", b"alpha " * 110, 2)
    ask(core, "4", b"beta  " * 110, 2)
    assert len(core.grant(2)) == 2
    core.finish("3", Outcome(status=Status.ERROR, engine_error=True), 3)
    core.finish("4", Outcome(status=Status.ERROR), 3)
    assert [slot.known for slot in core.slots()].count(False) == 2
    lease, _ = serve(core, "5", b"alpha " * 110, 4)
    assert lease.predicted_tokens == 0


def crowd(**more: object) -> RouterCore:
    """Four slots of 1,000 tokens and three requests: of 500 tokens with their answers, of 400 and of 300."""
    core = RouterCore({"p": CoreSettings(in_flight="slots", queue="fifo", linger=0.0)})
    core.backend_up("a", "p", 4, 1000, 0.0, known_empty=True, **more)  # type: ignore[arg-type]
    for name, tokens in (("500", 400), ("400", 300), ("300", 200)):
        ask(core, name, f"{name} ".encode() * tokens, max_output_tokens=100)
    return core


def test_where_slots_share_a_context_what_may_not_fit_beside_others_waits() -> None:
    assert [lease.request.id for lease in crowd().grant(0)] == ["500", "400", "300"]
    core = crowd(unified=True)
    assert [lease.request.id for lease in core.grant(0)] == ["500", "400"]
    core.finish("500", Outcome(status=Status.OK, cached_tokens=0, processed_tokens=400), 1)
    assert [lease.request.id for lease in core.grant(1)] == ["300"]


def test_what_fits_nowhere_is_the_engines_to_refuse() -> None:
    core = RouterCore({"p": CoreSettings(in_flight="slots", queue="fifo")})
    core.backend_up("a", "p", 4, 1000, 0.0, known_empty=True, unified=True)
    ask(core, "1", b"far too long " * 1000)
    assert len(core.grant(0)) == 1


def test_an_engine_without_room_for_all_that_ran_shares_one_context() -> None:
    core = crowd()
    core.grant(0)
    full = Outcome(status=Status.ERROR, engine_error=True, context_full=True)
    core.finish("500", full, 1)
    assert core.is_unified("a")
    core.finish("400", full, 1)
    core.finish("300", full, 1)
    assert not any(slot.known for slot in core.slots() if slot.ref.slot < 3)
    for name, tokens in (("6", 500), ("5", 450)):
        ask(core, name, f"{name}+++".encode() * tokens, 2, max_output_tokens=100)
    assert [lease.request.id for lease in core.grant(2)] == ["6"]


def test_one_that_failed_by_itself_says_nothing_of_what_others_share() -> None:
    core = make(slots=2)
    ask(core, "1", SYSTEM)
    core.grant(0)
    core.finish("1", Outcome(status=Status.ERROR, engine_error=True, context_full=True), 1)
    assert not core.is_unified("a")
    assert not core.is_unified("gone")


@pytest.mark.parametrize("unknown", [False, True])
def test_what_a_slot_lost_by_itself_is_not_blamed_on_the_prompt(unknown: bool) -> None:
    """The engine slept, or made room for another; it is told as lost by a restart."""
    core = make(slots=1)
    serve(core, "1", SYSTEM, 0)
    if unknown:
        core.doubt("a", [0])
    core.observe("a", [SlotObservation(0, processing=False, resident_tokens=0)], 1)
    _, report = serve(core, "2", SYSTEM + b"and the next turn", 2)
    assert report.predicted_tokens == 0
    assert report.losses[Loss.RESTARTED] > 200
    assert report.losses.get(Loss.DIVERGED, 0) < 5


def test_what_somebody_else_overwrote_is_not_blamed_on_the_prompt() -> None:
    core = make(slots=1)
    serve(core, "1", SYSTEM, 0)
    for now in (1, 2):
        core.observe("a", [SlotObservation(0, processing=False, resident_tokens=7)], now)
    _, report = serve(core, "2", SYSTEM + b"and the next turn", 3)
    assert report.losses[Loss.EVICTED] > 200
    assert report.losses.get(Loss.DIVERGED, 0) < 5


def test_a_refusal_leaves_the_slot_as_it_was() -> None:
    core = make(slots=1)
    serve(core, "1", SYSTEM, 0)
    ask(core, "2", b"far too long " * 1000, 1)
    core.grant(1)
    core.finish("2", Outcome(status=Status.ERROR, untouched=True), 2)
    lease, _ = serve(core, "3", SYSTEM + b"hi there, you", 3)
    assert lease.predicted_tokens == len(SYSTEM) // 4


def test_foreign_traffic_makes_a_slot_unknown_until_it_is_recognised() -> None:
    core = make(slots=1)
    serve(core, "1", SYSTEM, 0)
    tokens = core.slots()[0].resident_tokens
    core.observe("a", [SlotObservation(0, processing=False, resident_tokens=tokens + 7)], 1)
    assert not core.slots()[0].known
    core.observe("a", [SlotObservation(0, processing=False, resident_tokens=tokens)], 2)
    assert core.slots()[0].known
    core.observe("a", [SlotObservation(0, processing=False, resident_tokens=0)], 3)
    assert core.slots()[0].resident_tokens == 0
    core.observe("gone", [SlotObservation(0, processing=False)], 3)


def test_a_slot_at_work_for_somebody_else_is_not_given_out() -> None:
    core = make(slots=2, in_flight="slots")
    serve(core, "1", SYSTEM, 0)
    (used,) = [slot.ref for slot in core.slots() if slot.resident_tokens]
    core.observe("a", [SlotObservation(used.slot, processing=True, resident_tokens=9)], 1)
    ask(core, "2", SYSTEM + b"and the next turn", 2)
    (lease,) = core.grant(2)
    assert lease.slot != used
    ask(core, "3", b"another conversation altogether " * 9, 3)
    assert core.grant(3) == [], "the one slot left is somebody else's"
    core.observe("a", [SlotObservation(used.slot, processing=False, resident_tokens=9)], 4)
    (third,) = core.grant(4)
    assert third.slot == used


def test_a_doubted_slot_is_unknown_but_given_out() -> None:
    core = make(slots=1)
    serve(core, "1", SYSTEM, 0)
    core.doubt("a", [0, 7])
    core.doubt("gone", [0])
    assert not core.slots()[0].known
    ask(core, "2", SYSTEM, 1)
    (lease,) = core.grant(1)
    assert lease.predicted_tokens == 0
    core.doubt("a", [0])
    assert core.slots()[0].busy


def test_a_slot_of_which_nothing_more_is_heard_is_given_out_again() -> None:
    core = make(slots=1)
    core.observe("a", [SlotObservation(0, processing=True)], 0)
    ask(core, "1", SYSTEM, 1)
    assert core.grant(1) == []
    core.unobserved("a")
    assert len(core.grant(2)) == 1


@pytest.mark.parametrize("told", [True, False])
def test_a_cancelled_prefill_is_gone_on_with_where_it_stopped(told: bool) -> None:
    core = make(slots=2)
    text = SYSTEM[:600] + b"then something new " * 50
    serve(core, "1", SYSTEM, 0)
    ask(core, "2", text, 1)
    (first,) = core.grant(1)
    core.finish("2", Outcome(status=Status.CANCELLED, resident_tokens=250 if told else None), 2)
    if not told:
        core.observe("a", [SlotObservation(first.slot.slot, processing=False, resident_tokens=250)], 3)
    lease, _ = serve(core, "3", text, 4)
    assert lease.slot == first.slot
    assert abs(lease.predicted_tokens - 250) <= 1


def test_draining_takes_no_leases() -> None:
    core = make()
    core.backend_admit("a", admit=False)
    ask(core, "1", SYSTEM)
    assert core.grant(0) == []
    core.backend_admit("a", admit=True)
    assert len(core.grant(0)) == 1


def test_while_an_unpinned_request_is_somewhere_nothing_else_starts() -> None:
    core = make(in_flight="slots", queue="fifo")
    ask(core, "1", SYSTEM, pinned=False)
    ask(core, "2", SYSTEM)
    (lease,) = core.grant(0)
    assert lease.decision is Decision.UNPINNED
    core.first_token("1", 1)
    assert [lease.request.id for lease in core.grant(1)] == ["2"]
    core.finish("1", Outcome(status=Status.OK, cached_tokens=0, processed_tokens=5, slot=SlotRef("a", 3)), 2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_slot_ever_holds_two_leases(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(["serialize", "pair", "slots", "auto"]))
    core = make(slots=data.draw(st.integers(1, 4)), in_flight=policy)
    core.backend_up("b", "p", 2, 4096, 0.0, known_empty=False)
    held: dict[str, Lease] = {}
    waiting: set[str] = set()
    for step in range(data.draw(st.integers(1, 40))):
        now = float(step)
        action = data.draw(st.sampled_from(["ask", "ask", "finish", "withdraw", "restart", "token"]))
        if action == "ask":
            text = bytes(data.draw(st.lists(st.sampled_from(b"ab"), max_size=3))) * 200 + b"tail"
            many = data.draw(st.integers(1, 2))
            ask(core, str(step), text, now, slots=many, pinned=data.draw(st.booleans()))
            waiting.add(str(step))
        elif action == "finish" and held:
            lease = held.pop(data.draw(st.sampled_from(sorted(held))))
            report = answer(core, lease, now, cached=data.draw(st.integers(0, 3)))
            assert sum(report.losses.values()) == report.processed_tokens
        elif action == "withdraw" and waiting:
            name = data.draw(st.sampled_from(sorted(waiting)))
            core.withdraw(name, now)
            waiting.discard(name)
        elif action == "restart":
            core.backend_down("b", now)
            core.backend_up("b", "p", 2, 4096, now, known_empty=True)
            held_before = [lease for lease in held.values() if lease.slot.backend == "b"]
            for lease in held_before:
                core.finish(lease.request.id, Outcome(status=Status.ERROR), now)
                del held[lease.request.id]
        elif action == "token" and held:
            core.first_token(min(held), now)
        for lease in core.grant(now):
            taken = {ref for other in held.values() for ref in (other.slot, *other.extra_slots)}
            mine = {lease.slot, *lease.extra_slots}
            assert len(mine) == lease.request.slots
            assert not mine & taken
            held[lease.request.id] = lease
            waiting.discard(lease.request.id)
        assert sum(view.busy for view in core.slots()) == sum(lease.request.slots for lease in held.values())
        assert core.queued("p") == len(waiting)


def test_two_agents_with_one_preamble_part_by_turn_2_also_after_many_that_asked_once() -> None:
    core = make(slots=2)
    now = 0.0

    def turn(name: str, text: bytes) -> tuple[Lease, Report]:
        nonlocal now
        now += 1
        return serve(core, name, text, now, b" an answer")

    for number in range(25):
        turn(f"once{number}", b"%d " % number * 100)
    said = {name: SYSTEM[:500] + name.encode() * 250 for name in ("ab", "xy")}
    slots: dict[str, list[SlotRef]] = {name: [] for name in said}
    for step in range(4):
        for name, text in said.items():
            lease, _ = turn(f"{name}{step}", text)
            slots[name].append(lease.slot)
            said[name] += b" an answer and then step %d of what is to be done" % step
    assert slots["ab"][1:] == [slots["ab"][1]] * 3
    assert slots["xy"][1:] == [slots["xy"][1]] * 3
    assert slots["ab"][1] != slots["xy"][1]


def test_even_the_shortest_prompt_comes_back_to_its_slot() -> None:
    core = make()
    first, _ = serve(core, "1", b"One two three four", 0)
    second, _ = serve(core, "2", b"One two three four", 1)
    assert second.slot == first.slot
    assert second.predicted_tokens == 3
