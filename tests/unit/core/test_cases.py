"""What people hit in front of an engine, as the core must handle it."""

from __future__ import annotations

import pytest
from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.sessions import Sessions
from warmslot.router.values import Lease, Loss, Outcome, Prompt, Report, Request, Status

PREAMBLE = b"You are a careful assistant with these tools: look, think, act. " * 100


def _core(slots: int) -> RouterCore:
    core = RouterCore({"p": CoreSettings(in_flight="serialize", linger=0.0)})
    core.backend_up("a", "p", slots, 1 << 20, 0.0, known_empty=True)
    return core


class Chat:
    """One conversation with an engine that reuses what a slot holds (or ``reuse`` of it)."""

    def __init__(self, core: RouterCore, name: str, first: bytes, *, reuse: float = 1.0) -> None:
        self.core, self.name, self.text, self.reuse = core, name, first, reuse
        self.turn = 0

    def ask(self, now: float, more: bytes = b"") -> tuple[Lease, Report]:
        """Send what was said so far and ``more``; the answer is part of what comes next."""
        self.text += more
        self.turn += 1
        name = f"{self.name}-{self.turn}"
        self.core.submit(Request(id=name, prompt=Prompt.of(self.text), pool="p", arrived=now), now)
        (lease,) = self.core.grant(now)
        total = len(self.text) // 4
        cached = int(min(lease.predicted_tokens, total - 1) * self.reuse)
        answer = f" answer {self.turn} of {self.name}.".encode()
        outcome = Outcome(
            status=Status.OK,
            cached_tokens=cached,
            processed_tokens=total - cached,
            output_tokens=len(answer) // 4 + 1,
            prefill_seconds=(total - cached) / 500,
            decode_seconds=0.5,
            generated=answer,
        )
        report = self.core.finish(name, outcome, now + 0.9)
        self.text += answer
        return lease, report


def test_two_agents_with_one_system_prompt_are_on_two_slots_by_turn_two() -> None:
    core = _core(2)
    one = Chat(core, "one", PREAMBLE + b"Mend the roof of the barn, please. " * 10)
    two = Chat(core, "two", PREAMBLE + b"Count the birds of the north shore. " * 10)
    slots = []
    for turn in range(8):
        for chat in (one, two):
            lease, report = chat.ask(2.0 * turn + (chat is two), b" And then? " * 4)
            slots.append(lease.slot)
            if turn >= 2:
                assert report.processed_tokens < 40
    assert slots[-1] != slots[-2]
    assert len(set(slots[4::2])) == len(set(slots[5::2])) == 1


def test_side_requests_do_not_displace_the_conversation() -> None:
    core = _core(2)
    main = Chat(core, "main", b"The long conversation that matters. " * 300)
    home, _ = main.ask(0.0)
    for turn in range(6):
        for side in range(3):
            now = 10.0 * turn + 2 * side + 2
            lease, _ = Chat(core, f"title-{turn}-{side}", f"Name this chat {turn} {side}. ".encode() * 5).ask(
                now
            )
            assert lease.slot != home.slot
        lease, report = main.ask(10.0 * turn + 9, b" Go on. " * 5)
        assert lease.slot == home.slot
        assert report.processed_tokens < 40


def test_the_same_prompt_again_goes_to_its_slot() -> None:
    core = _core(4)
    chat = Chat(core, "c", b"An impatient client resends this. " * 50)
    first, _ = chat.ask(0.0)
    text = chat.text
    Chat(core, "other", b"Something else entirely. " * 50).ask(1.0)
    retry = Chat(core, "retry", text[: len(b"An impatient client resends this. ") * 50])
    again, report = retry.ask(2.0)
    assert again.slot == first.slot
    assert report.processed_tokens == 1


def test_a_cache_that_cannot_be_cut_is_found_out_and_blamed() -> None:
    """A sliding-window model: appending reuses all, going back nothing, though the tokens match."""
    core = _core(1)
    text = b"A long history that will be edited in its middle. " * 100
    for turn in range(6):
        Chat(core, f"whole-{turn}", text).ask(4.0 * turn)
        edited = Chat(core, f"edited-{turn}", text[:3000] + b"Edited. " * (100 + turn), reuse=0.0)
        lease, report = edited.ask(4.0 * turn + 2)
        assert report.losses.get(Loss.ENGINE, 0) >= 700
        assert sum(report.losses.values()) == report.processed_tokens
        assert report.losses.get(Loss.NEW, 0) < report.losses[Loss.ENGINE]
    assert lease.predicted_tokens < 200
    chat = Chat(core, "append", b"Appending still works as it ever did. " * 60)
    chat.ask(50.0)
    lease, report = chat.ask(52.0, b" Go on.")
    assert lease.predicted_tokens > 500
    assert report.processed_tokens < 20


def test_reasons_of_losses() -> None:
    core = _core(1)
    first = Chat(core, "first", b"The first conversation in this slot. " * 60)
    _, report = first.ask(0.0)
    assert set(report.losses) == {Loss.NEW}
    Chat(core, "second", b"Another one that takes the only slot. " * 60).ask(2.0)
    _, report = first.ask(4.0, b" Do you remember?")
    assert report.losses[Loss.EVICTED] > 500
    assert report.losses[Loss.NEW] < 20
    core.backend_down("a", 6.0)
    core.backend_up("a", "p", 1, 1 << 20, 7.0, known_empty=True)
    _, report = first.ask(8.0, b" And now?")
    assert report.losses[Loss.RESTARTED] > 500


def test_busy_is_the_reason_when_the_best_slot_is_in_use() -> None:
    core = RouterCore({"p": CoreSettings(in_flight="slots", linger=0.0, queue="fifo")})
    core.backend_up("a", "p", 2, 1 << 20, 0.0, known_empty=True)
    text = b"One prompt that two ask for at the same time. " * 40
    Chat(core, "first", text).ask(0.0)
    for name in ("x", "y"):
        core.submit(Request(id=name, prompt=Prompt.of(text + name.encode() * 400), pool="p"), 2.0)
    leases = core.grant(2.0)
    assert len({lease.slot for lease in leases}) == 2
    reports = []
    for lease in leases:
        total = lease.request.prompt.length // 4
        outcome = Outcome(
            status=Status.OK,
            cached_tokens=lease.predicted_tokens,
            processed_tokens=total - lease.predicted_tokens,
        )
        reports.append(core.finish(lease.request.id, outcome, 3.0))
    assert sum(report.losses.get(Loss.BUSY, 0) for report in reports) >= 400


def test_a_follower_waits_for_the_prefix_that_is_being_computed() -> None:
    core = RouterCore({"p": CoreSettings(in_flight="slots", linger=0.0)})
    core.backend_up("a", "p", 4, 1 << 20, 0.0, known_empty=True)
    shared = b"A very long document that both ask about. " * 2000
    core.submit(Request(id="leader", prompt=Prompt.of(shared + b"What is it?"), pool="p"), 0.0)
    (leader,) = core.grant(0.0)
    core.submit(Request(id="follower", prompt=Prompt.of(shared + b"Who wrote it?"), pool="p"), 0.1)
    assert core.grant(0.1) == []
    total = leader.request.prompt.length // 4
    outcome = Outcome(
        status=Status.OK,
        cached_tokens=0,
        processed_tokens=total,
        output_tokens=10,
        prefill_seconds=total / 500,
        decode_seconds=0.4,
    )
    core.finish("leader", outcome, 45.0)
    (follower,) = core.grant(45.0)
    assert follower.slot == leader.slot
    assert follower.predicted_tokens > 0.99 * (len(shared) // 4)


def test_nobody_waits_for_the_slot_of_another_conversation_while_there_are_free_ones() -> None:
    core = RouterCore({"p": CoreSettings(in_flight="slots")})
    core.backend_up("a", "p", 8, 1 << 20, 0.0, known_empty=True)
    leases = []
    for number in range(6):
        prompt = Prompt.of(PREAMBLE[:320] + f"The task of agent {number}. ".encode() * 50)
        request = Request(id=str(number), prompt=prompt, pool="p", max_output_tokens=4)
        core.submit(request, 0.01 * number)
        leases += core.grant(0.01 * number)
    assert len({lease.slot for lease in leases}) == 6


def test_a_conversation_that_ended_is_given_up_and_one_that_goes_on_is_not() -> None:
    sessions = Sessions()
    texts = {name: f"conversation {name} ".encode() * 40 for name in "abc"}
    ids: dict[str, str] = {}
    for turn in range(30):
        for name, text in texts.items():
            if name == "c" and turn > 10:
                continue
            texts[name] = text + f"turn {turn} ".encode() * 10
            session, _ = sessions.arrive(Prompt.of(texts[name]), None, float(turn))
            assert ids.setdefault(name, session.id) == session.id
            sessions.release(session.id, turn + 0.5)
    assert sessions.chance(ids["a"]) > 0.8
    assert sessions.chance(ids["c"]) < 0.1


def test_a_named_conversation_is_known_whatever_it_says() -> None:
    sessions = Sessions()
    first, _ = sessions.arrive(Prompt.of(b"now it is 10:41 " + b"text " * 100), "mine", 0.0)
    sessions.release(first.id, 1.0, tokens=130)
    second, reach = sessions.arrive(Prompt.of(b"now it is 10:42 " + b"text " * 120), "mine", 2.0)
    assert second.id == first.id
    assert reach == 130


@pytest.mark.parametrize("text", [b"", b"a"])
def test_tiny_prompts_are_served(text: bytes) -> None:
    core = _core(2)
    core.submit(Request(id="t", prompt=Prompt.of(text), pool="p"), 0.0)
    (lease,) = core.grant(0.0)
    report = core.finish("t", Outcome(status=Status.OK, cached_tokens=0, processed_tokens=1), 1.0)
    assert lease.prompt_tokens >= 1
    assert report.losses == {Loss.NEW: 1}


def test_a_common_preamble_does_not_herd_everybody_to_one_backend() -> None:
    core = RouterCore({"p": CoreSettings(in_flight="slots", linger=0.0)})
    for backend in ("a", "b"):
        core.backend_up(backend, "p", 8, 1 << 20, 0.0, known_empty=True)
    Chat(core, "first", PREAMBLE + b"I was here before.").ask(0.0)
    for at in range(10):
        text = PREAMBLE + f"Question {at} of another user. ".encode() * 20
        core.submit(Request(id=str(at), prompt=Prompt.of(text), pool="p"), 5.0)
    used = [lease.slot.backend for lease in core.grant(5.0)]
    assert abs(used.count("a") - used.count("b")) <= 1
    assert len(used) >= 2  # the rest wait for the preambles that these compute


def test_a_dead_backend_attracts_nothing() -> None:
    core = RouterCore({"p": CoreSettings(in_flight="serialize", linger=0.0)})
    for backend in ("a", "b"):
        core.backend_up(backend, "p", 2, 1 << 20, 0.0, known_empty=True)
    chat = Chat(core, "c", b"A conversation that lives on one of two backends. " * 50)
    lease, _ = chat.ask(0.0)
    core.backend_down(lease.slot.backend, 2.0)
    after, report = chat.ask(3.0, b" Still there?")
    assert after.slot.backend != lease.slot.backend
    assert report.losses[Loss.RESTARTED] > 500


def _two_backends() -> RouterCore:
    core = RouterCore({"p": CoreSettings(in_flight="serialize", linger=0.0)})
    for backend in ("a", "b"):
        core.backend_up(backend, "p", 2, 1 << 20, 0.0, known_empty=True)
    return core


@pytest.mark.parametrize("soon", [True, False])
def test_a_slot_that_is_not_given_out_is_waited_for_only_if_it_soon_will_be(soon: bool) -> None:
    core = _two_backends()
    chat = Chat(core, "c", b"A conversation that lives on one of two backends. " * 50)
    home = chat.ask(0.0)[0].slot
    core.backend_admit(home.backend, admit=False, soon=soon)
    core.submit(Request(id="next", prompt=Prompt.of(chat.text + b" And then?"), pool="p"), 2.0)
    leases = core.grant(2.0)
    if soon:
        assert leases == []
        core.backend_admit(home.backend, admit=True)
        assert [lease.slot for lease in core.grant(3.0)] == [home]
    else:
        assert leases[0].slot.backend != home.backend


@pytest.mark.parametrize(("length", "waits"), [(20, False), (2000, True)])
def test_a_backend_that_is_at_its_limit_is_waited_for_as_long_as_that_pays(length: int, waits: bool) -> None:
    core = _two_backends()
    chat = Chat(core, "c", b"A conversation that lives on one of two backends. " * length)
    home = chat.ask(0.0)[0].slot
    other = "b" if home.backend == "a" else "a"
    core.backend_admit(other, admit=False)
    core.submit(Request(id="long", prompt=Prompt.of(b"Tell me a long story, please."), pool="p"), 2.0)
    (long,) = core.grant(2.0)
    assert long.slot.backend == home.backend
    assert long.slot != home
    core.backend_admit(other, admit=True)
    core.submit(Request(id="next", prompt=Prompt.of(chat.text + b" And then?"), pool="p"), 2.1)
    assert [lease.slot.backend for lease in core.grant(2.1)] == ([] if waits else [other])


def _at(hour: int, minute: int) -> bytes:
    return f"You are careful. It is 2026-05-0{1 + hour % 9} {hour:02d}:{minute:02d}:07 UTC. ".encode()


def test_a_clock_near_the_top_leaves_a_conversation_on_its_slot() -> None:
    """What follows the clock is computed every time; nobody else's content goes for it."""
    core = _core(2)
    main = Chat(core, "main", b"The long conversation that matters. " * 300)
    home, _ = main.ask(0.0)
    said, slots = b"Mend the roof of the barn, please. " * 200, set()
    for turn in range(8):
        said += b" And then? " * 4
        ticking = Chat(core, f"ticking-{turn}", _at(10, turn) + PREAMBLE + said)
        lease, report = ticking.ask(10.0 * turn + 1)
        slots.add(lease.slot)
        assert report.losses.get(Loss.DIVERGED, 0) > 1000 or turn == 0
        if turn % 3 == 2:
            lease, report = main.ask(10.0 * turn + 5, b" Go on. " * 5)
            assert lease.slot == home.slot
            assert report.processed_tokens < 40
    assert len(slots) == 1
    assert home.slot not in slots


def test_two_conversations_that_tell_different_times_stay_two() -> None:
    core = _core(2)
    chats = [Chat(core, str(hour), _at(hour, 30) + PREAMBLE + b"Plan my trip. " * 40) for hour in (8, 17)]
    slots: list[list[object]] = [[], []]
    for turn in range(6):
        for at, chat in enumerate(chats):
            lease, report = chat.ask(10.0 * turn + 5 * at, b" And then? " * 4)
            slots[at].append(lease.slot)
            if turn >= 2:
                assert report.processed_tokens < 40
    assert len(set(slots[0][1:])) == len(set(slots[1][1:])) == 1
    assert slots[0][-1] != slots[1][-1]


def test_two_requests_at_once_that_tell_different_times_are_two_conversations() -> None:
    sessions = Sessions()
    rest = PREAMBLE + b"Plan my trip. " * 40
    one, _ = sessions.arrive(Prompt.of(_at(8, 1) + rest), None, 0.0)
    two, _ = sessions.arrive(Prompt.of(_at(8, 2) + rest), None, 0.0)
    assert one is not two
    sessions.release(one.id, 1.0)
    sessions.release(two.id, 1.0)
    again, _ = sessions.arrive(Prompt.of(_at(8, 3) + rest + b"And then?"), None, 2.0)
    assert again.id in {one.id, two.id}
