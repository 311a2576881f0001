"""What slots hold is carried over a restart: offered to requests, but claimed only once it was reused."""

from __future__ import annotations

import pytest
from warmslot.router.core import Contents, CoreSettings, QueueFullError, RouterCore
from warmslot.router.values import Loss, Outcome, Prompt, Report, Request, SlotRef, Status

FIRST = b"The first conversation, about one thing. " * 40
SECOND = b"A second one that shares nothing with it. " * 30


def ask(core: RouterCore, name: str, text: bytes, now: float) -> tuple[SlotRef, int]:
    core.submit(Request(id=name, prompt=Prompt.of(text), pool="p", arrived=now), now)
    (lease,) = core.grant(now)
    return lease.slot, lease.predicted_tokens


def finish(core: RouterCore, name: str, text: bytes, cached: int, now: float) -> Report:
    total = len(text) // 4
    outcome = Outcome(Status.OK, cached_tokens=cached, processed_tokens=total - cached, output_tokens=1)
    return core.finish(name, outcome, now)


def restarted(slots: int) -> tuple[RouterCore, list[Contents]]:
    """A core whose backend held two conversations, and was started anew with other slots."""
    core = RouterCore({"p": CoreSettings(in_flight="serialize")})
    core.backend_up("a", "p", 4, 4096, 0.0, known_empty=True)
    for number, text in enumerate((FIRST, SECOND)):
        ask(core, text[:8].decode(), text, float(number))
        finish(core, text[:8].decode(), text, 0, float(number))
    kept = core.contents("a")
    core.backend_down("a", 2.0)
    core.backend_up("a", "p", slots, 4096, 3.0, known_empty=True)
    return core, kept


def test_contents_tell_what_idle_slots_hold() -> None:
    core = RouterCore({"p": CoreSettings(in_flight="serialize")})
    assert core.contents("a") == []
    core.backend_up("a", "p", 2, 4096, 0.0, known_empty=True)
    assert core.contents("a") == []
    slot, _ = ask(core, "r", FIRST, 0.0)
    assert core.contents("a") == []
    finish(core, "r", FIRST, 0, 1.0)
    (held,) = core.contents("a")
    assert (held.slot, held.tokens) == (slot.slot, len(FIRST) // 4)
    assert 0 < held.chance <= 1


def test_what_is_believed_leads_requests_there_and_is_claimed_once_reused() -> None:
    core, kept = restarted(2)
    for number, contents in enumerate(kept):
        core.believe("a", Contents(number, contents.context, contents.session), 3.0)
    assert [(view.resident_tokens, view.known) for view in core.slots()] == [(0, False), (0, False)]
    longer = SECOND + b"and more"
    slot, predicted = ask(core, "again", longer, 4.0)
    assert (slot, predicted) == (SlotRef("a", 1), len(SECOND) // 4)
    report = finish(core, "again", longer, predicted, 5.0)
    assert sum(report.losses.values()) == 2
    assert not {Loss.RESTARTED, Loss.ENGINE} & report.losses.keys()
    assert [view.resident_tokens for view in core.slots()] == [0, len(longer) // 4]
    assert core.slots()[1].session == kept[1].session


def test_what_turns_out_not_to_be_there_was_lost_by_the_restart() -> None:
    core, kept = restarted(1)
    core.believe("a", Contents(0, kept[0].context, kept[0].session), 3.0)
    ask(core, "again", FIRST, 4.0)
    report = finish(core, "again", FIRST, 0, 5.0)
    assert report.losses[Loss.RESTARTED] >= len(FIRST) // 4 - 1
    assert Loss.ENGINE not in report.losses


def test_an_interrupted_request_confirms_nothing() -> None:
    core, kept = restarted(1)
    core.believe("a", Contents(0, kept[0].context, kept[0].session), 3.0)
    ask(core, "again", FIRST, 4.0)
    core.finish("again", Outcome(Status.CANCELLED), 5.0)
    assert core.slots()[0].resident_tokens == 0
    assert ask(core, "once more", FIRST, 6.0)[1] > 0


def test_requests_that_wait_survive_a_change_to_fewer_slots() -> None:
    core = RouterCore({"p": CoreSettings(in_flight="serialize", linger=0.0)})
    core.backend_up("a", "p", 4, 4096, 0.0, known_empty=True)
    preamble = b"What all of them begin with. " * 20
    texts = [preamble + bytes(f"Story {number} is its own. " * 30, "ascii") for number in range(4)]
    for number, text in enumerate(texts):
        ask(core, f"first {number}", text, float(number))
        finish(core, f"first {number}", text, 0, float(number))
    core.backend_admit("a", admit=False)
    for number, text in enumerate(texts):
        core.submit(Request(id=f"next {number}", prompt=Prompt.of(text + b"more"), pool="p"), 5.0)
        core.submit(Request(id=f"new {number}", prompt=Prompt.of(preamble + text[-40:]), pool="p"), 5.0)
        core.submit(Request(id=f"brief {number}", prompt=Prompt.of(b"Wh" + text[-40:]), pool="p"), 5.0)
    kept = core.contents("a")
    core.backend_down("a", 6.0)
    core.submit(Request(id="late", prompt=Prompt.of(texts[3] + b"late"), pool="p"), 6.5)
    core.backend_up("a", "p", 2, 4096, 7.0, known_empty=True)
    for slot, contents in enumerate(kept[:2]):
        core.believe("a", Contents(slot, contents.context, contents.session), 7.0)
    served = 0
    while leases := core.grant(8.0 + served):
        for lease in leases:
            finish(
                core, lease.request.id, lease.request.prompt.data or b"", lease.predicted_tokens, 8.0 + served
            )
            served += 1
    assert served == 13


def test_an_engine_that_cannot_use_what_was_put_back_is_not_believed_twice() -> None:
    """As with sliding windows where checkpoints are not saved: the next restored slot is counted on less."""
    core, kept = restarted(2)
    for number, contents in enumerate(kept):
        core.believe("a", Contents(number, contents.context, contents.session), 3.0)
    _, predicted = ask(core, "first", FIRST + b"and more", 4.0)
    assert predicted == len(FIRST) // 4
    assert Loss.RESTARTED in finish(core, "first", FIRST + b"and more", 0, 5.0).losses
    slot, predicted = ask(core, "second", SECOND + b"and more", 6.0)
    assert slot == SlotRef("a", 1)
    assert 0 < predicted < len(SECOND) // 4 // 3 + 1
    finish(core, "second", SECOND + b"and more", len(SECOND) // 4, 7.0)
    # What has been reused since is believed in full, and one that works restores the trust.
    _, predicted = ask(core, "third", SECOND + b"and more and more", 8.0)
    assert predicted >= len(SECOND) // 4


def test_another_policy_holds_at_once_and_leaves_leases_alone() -> None:
    core, _ = restarted(2)
    ask(core, "runs", FIRST, 4.0)
    for number in range(2):
        core.submit(Request(id=f"w{number}", prompt=Prompt.of(SECOND), pool="p", arrived=5.0), 5.0)
    assert core.grant(5.0) == []  # one at a time
    core.reschedule("p", CoreSettings(in_flight="slots", max_queue=1))
    assert [lease.request.id for lease in core.grant(6.0)][:1] == ["w1"]
    with pytest.raises(QueueFullError):
        core.submit(Request(id="more", prompt=Prompt.of(SECOND), pool="p", arrived=7.0), 7.0)
    finish(core, "runs", FIRST, 0, 8.0)
