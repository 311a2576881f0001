"""What changed between two calls of a conversation is named from hashes alone, at the right message."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.launcher.breaks import Kind, find_break, reference

from tests.support import breaks
from tests.unit.journal.conftest import Scribe

if TYPE_CHECKING:
    from pathlib import Path

    from warmslot.launcher.breaks import Break


def tell(folder: Path, case: breaks.Case, *, session: str | None, text: bool = False) -> Break | None:
    """What a journal tells of a case whose two calls have strangers between them."""
    scribe = Scribe(folder / "journal.jsonl", {"text": text})
    scribe.serve(breaks.render(case.before), case.reply.encode(), case.before, session=session)
    for number in range(3):
        other = breaks.case("clock", breaks.Random(f"stranger {number}")).before
        scribe.serve(breaks.render(other), b"fine", other, session=f"stranger-{number}")
    wanted = scribe.serve(breaks.render(case.after), b"done", case.after, session=session)
    records = scribe.records()
    after = records[-1]
    assert after.id == wanted
    before = reference(after, records[:-1])
    assert before is not None
    return find_break(before, after)


def place(found: Break | None) -> int | None:
    if found is None:
        return None
    return -1 if found.where == "tools" else found.index


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("session", ["the-session", None], ids=["named session", "no session"])
def test_fifty_seeded_breaks(tmp_path: Path, seed: int, session: str | None) -> None:
    cases = breaks.cases(seed)
    assert len(cases) == 50
    wrong_kind, wrong_place = [], []
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = tell(folder, case, session=session)
        if found is None or found.kind != case.kind:
            wrong_kind.append((number, case.kind, case.note, found and found.kind))
        if place(found) != case.index:
            wrong_place.append((number, case.kind, case.note, case.index, place(found)))
    assert wrong_place == []
    assert len(wrong_kind) <= 5, wrong_kind


def test_there_are_at_least_five_of_each_kind() -> None:
    kinds = [case.kind for case in breaks.cases(0)]
    assert min(kinds.count(kind) for kind in breaks.KINDS) >= 5


@pytest.mark.parametrize("seed", range(12))
def test_what_only_appends_is_no_break(tmp_path: Path, seed: int) -> None:
    random = breaks.Random(f"append {seed}")
    body = breaks.conversation(random)
    reply = "I see. " + breaks.sentence(random)
    after = breaks.appended(body, reply, random)
    assert tell(tmp_path, breaks.Case("", 0, body, reply, after, ""), session="s") is None


def test_the_place_within_a_message_is_found_to_the_block(tmp_path: Path) -> None:
    body = breaks.conversation(breaks.Random("place"))
    body["messages"][0]["content"] = "a" * 700 + " Now 12:30 " + "b" * 300
    after = breaks.appended(body, "Yes.", breaks.Random("more"))
    after["messages"][0]["content"] = "a" * 700 + " Now 12:31 " + "b" * 300
    found = tell(tmp_path, breaks.Case("clock", 0, body, "Yes.", after, ""), session=None)
    assert found is not None
    assert found.kind is Kind.CLOCK
    assert found.first is not None
    assert found.last is not None
    assert found.first <= 709 < found.last
    assert found.last - found.first <= 64


def test_reasoning_that_the_template_drops_is_told_from_the_clients_doing(tmp_path: Path) -> None:
    body = breaks.conversation(breaks.Random("think"))
    body["messages"][2]["reasoning_content"] = "hm " * 50
    after = breaks.appended(body, "Yes.", breaks.Random("more"))
    scribe = Scribe(tmp_path / "journal.jsonl")
    scribe.serve(breaks.render(body), b"Yes.", body, session="s")
    shorter = copy.deepcopy(after)
    for message in shorter["messages"]:
        message.pop("reasoning_content", None)
    scribe.serve(breaks.render(shorter), b"ok", after, session="s")
    before, record = scribe.records()
    found = find_break(before, record)
    assert found is not None
    assert (found.kind, found.index, found.detail) == (Kind.REASONING_DROPPED, 2, "by the template")


def test_going_back_to_an_earlier_point_is_no_break(tmp_path: Path) -> None:
    body = breaks.conversation(breaks.Random("back"))
    earlier = {**body, "messages": body["messages"][:4]}
    assert tell(tmp_path, breaks.Case("", 0, body, "Yes.", earlier, ""), session="s") is None


def test_a_plain_prompt_that_changes_in_its_middle(tmp_path: Path) -> None:
    lines = [f"line {number} of a long instruction that never changes\n" for number in range(60)]

    def body(stamp: str, more: str) -> dict[str, Any]:
        return {"prompt": "".join([*lines[:20], f"Time: {stamp}\n", *lines[20:], more])}

    scribe = Scribe(tmp_path / "journal.jsonl")
    for stamp, more in (("2026-01-01 10:00", ""), ("2026-01-01 10:05", "and on")):
        one = body(stamp, more)
        scribe.serve(one["prompt"].encode(), b"", one)
    before, after = scribe.records()
    assert reference(after, [before]) is before
    found = find_break(before, after)
    assert found is not None
    assert (found.kind, found.role) == (Kind.CLOCK, "prompt")
    assert len(after.outline.messages) > 4
