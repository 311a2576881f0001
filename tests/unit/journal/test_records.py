"""Lines hold what they were made from, exactly, however requests share their beginnings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warmslot.router.outline import Outliner
from warmslot.router.records import BackendChange, Decoder, Encoder, LineError, Opening, Record
from warmslot.router.values import Candidate, Prompt, SlotRef, extend_chain

TEXTS = st.text(alphabet="ab ", min_size=0, max_size=400)


def record(number: int, text: str, reply: str = "", **more: Any) -> Record:
    prompt = Prompt.of(text.encode())
    body = {"messages": [{"role": "user", "content": part} for part in text.split("  ")]}
    return Record(
        id=f"r{number}",
        time=1000.0 + number,
        pool="m",
        backend="b",
        slot=0,
        route="chat",
        status="ok",
        decision="affinity",
        chain=prompt.chain,
        length=prompt.length,
        after=extend_chain(prompt.chain, (text + reply).encode()),
        after_length=prompt.length + len(reply),
        outline=Outliner().outline(body, text.encode()),
        reply=Outliner().reply(reply.encode()) if reply else None,
        **more,
    )


def through(records: list[Record]) -> list[Record]:
    encoder, decoder = Encoder(), Decoder()
    assert decoder.feed(encoder.opening(Opening(5.0, {"m": ["b"]}))) == Opening(5.0, {"m": ["b"]})
    out = [decoder.feed(encoder.request(one)) for one in records]
    assert all(isinstance(one, Record) for one in out)
    return [one for one in out if isinstance(one, Record)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), TEXTS, TEXTS, st.sampled_from(["", "s1", "s2"])), min_size=1, max_size=12
    )
)
def test_every_record_comes_back_as_it_was(steps: list[tuple[int, str, str, str]]) -> None:
    texts = [""] * 4
    records = []
    for number, (which, more, reply, session) in enumerate(steps):
        texts[which] += more
        records.append(record(number, texts[which], reply, session=session))
    assert through(records) == records


def test_all_fields_come_back() -> None:
    full = record(
        1,
        "x" * 200,
        "y" * 100,
        session="s",
        client="ci",
        priority="batch",
        prompt_tokens=50,
        cached_tokens=10,
        predicted_tokens=12,
        output_tokens=25,
        max_output_tokens=64,
        losses={"new": 38, "engine": 2},
        granted=1.25,
        queued=1.0,
        first_token=2.5,
        ended=4.0,
        prefill_seconds=1.25,
        decode_seconds=1.5,
        in_flight=2,
        demand=5,
        slots=2,
        pinned=False,
        keeps_prefix=False,
        guessed=True,
        root=b"12345678",
        candidates=(Candidate(SlotRef("b", 1), False, 10, 1.5, 0.25, 2.0),),
    )
    full = replace(full, text={"messages": [{"role": "user", "content": "x"}], "reply": "y"})
    assert through([full]) == [full]


def test_a_longer_turn_costs_only_what_is_new() -> None:
    encoder = Encoder()
    encoder.opening(Opening(0.0))
    base = "".join(f"{number:06d} " for number in range(8000))
    first = encoder.request(record(1, base))
    second = encoder.request(record(2, base + "more " * 40))
    assert len(second) < 1200
    assert len(first) > 7000


def test_backend_changes_come_back() -> None:
    up = BackendChange(1.0, "b", up=True, slots=4, context=4096)
    down = BackendChange(2.0, "b", up=False, slots=0, context=0, reason="exited")
    assert [Decoder().feed(Encoder.change(change)) for change in (up, down)] == [up, down]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"kind":"request","n":1,"id"', "torn"),
        (b'{"timestamp": 1}', "no 'kind'"),
        (b"[1]", "no 'kind'"),
        (b'{"kind":"request","n":2,"id":"a","time":1}', "is missing"),
        (b'{"kind":"open","version":99,"time":1}', "newer warmslot"),
        (b'{"kind":"backend","time":"x","backend":"b","up":true}', "wrong value"),
    ],
)
def test_a_line_that_is_none_says_what_is_wrong(line: bytes, why: str) -> None:
    with pytest.raises(LineError, match=why):
        Decoder().feed(line)


def test_a_line_whose_parent_was_lost_is_not_guessed_at() -> None:
    encoder = Encoder()
    encoder.opening(Opening(0.0))
    encoder.request(record(1, "a" * 300))
    orphan = encoder.request(record(2, "a" * 400))
    with pytest.raises(LineError, match="lost"):
        Decoder().feed(orphan)


def test_kinds_of_later_versions_are_passed_over() -> None:
    assert Decoder().feed(b'{"kind":"weather","time":1}\n') is None
    assert Decoder().feed(b"\n") is None


def test_equal_requests_need_no_new_hashes() -> None:
    one = record(1, "abc " * 100)
    assert through([one, replace(one, id="r2")])[1].chain == one.chain
