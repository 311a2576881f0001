"""Prompts that differ in a clock near the top."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from warmslot.router.clocks import ENDING, Timeless, TimelessIndex
from warmslot.router.values import Prompt

TAIL = b"You help with the barn and its roof, and with nothing else. " * 4


def of(text: bytes) -> Timeless:
    found = Timeless.of(Prompt.of(text))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2026-05-01T10:11:12.345Z", "2026-05-01T10:11:13.001Z"),
        ("2026-05-01 10:11:12+02:00", "2026-12-31 23:59:59+01:00"),
        ("Friday, May 1st, 2026, 9:59 AM", "Saturday, May 2nd, 2026, 10:01 PM"),
        ("Fri, 01 May 2026 10:11:12 GMT", "Sat, 02 May 2026 01:01:01 GMT"),
        ("1777629600", "1777629733"),
        ("1777629600123", "1777629733456"),
    ],
)
def test_two_times_make_no_difference(one: str, other: str) -> None:
    assert of(f"Now: {one}\n".encode() + TAIL) == of(f"Now: {other}\n".encode() + TAIL)


def test_without_a_clock_or_a_text_there_is_nothing_to_leave_out() -> None:
    assert Timeless.of(Prompt.of(TAIL)) is None
    assert Timeless.of(Prompt.of(TAIL * 40 + b"2026-05-01 10:11:12 " + TAIL)) is None  # far down
    assert Timeless.of(Prompt.of(b"10:11 " + TAIL, tokens=9)) is None  # packed token ids
    assert Timeless.of(Prompt.of(b"10:11")) is None
    assert Timeless.of(Prompt.of(b"\xff\xfe 10:11:12 " + TAIL)) is not None


def test_only_what_goes_on_with_a_prompt_is_found_the_longest_first() -> None:
    index = TimelessIndex()
    head = b"At {}: " + TAIL

    def at(clock: bytes, more: bytes) -> Timeless:
        return of(head.replace(b"{}", clock) + more)

    index.put("short", at(b"10:11:12", b"x" * 100))
    index.put("long", at(b"10:11:13", b"x" * 300))
    index.put("other", at(b"10:11:14", b"y" * 300))
    assert index.find(at(b"11:00:00", b"x" * 400)) == ["long", "short"]
    assert index.find(at(b"11:00:00", b"x" * 200 + b"y" * 200)) == ["short"]
    index.put("short", None)
    index.drop("unknown")
    assert index.find(at(b"11:00:00", b"x" * 200 + b"y" * 200)) == []
    index.drop("long")
    index.drop("other")
    assert not index.__dict__["_heads"]


@given(st.lists(st.binary(min_size=100, max_size=400), min_size=1, max_size=12), st.binary(max_size=500))
def test_it_finds_what_comparing_one_by_one_finds(texts: list[bytes], more: bytes) -> None:
    index = TimelessIndex()
    for at, text in enumerate(texts):
        index.put(str(at), Timeless(text))
    prompt = texts[0] + more
    expected = {str(at) for at, text in enumerate(texts) if prompt.startswith(text[: len(text) - ENDING])}
    assert set(index.find(Timeless(prompt))) == expected
