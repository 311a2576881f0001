"""The engine's prompt cache in host memory: the rules, and the same by brute force."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warmslot.router.host_tier import NO_SWAP, Held, HostTier, length_of
from warmslot.router.residency import Context
from warmslot.router.values import BLOCK, HostMemory, Prompt

TOKEN = BLOCK
"""One token is one block of text here, so that both ways of counting agree."""


def text(tokens: str) -> bytes:
    return b"".join(letter.encode() * TOKEN for letter in tokens)


def prompt(tokens: str) -> Prompt:
    return Prompt.of(text(tokens))


def context(tokens: str, *, kept: bool = True) -> Context:
    whole = prompt(tokens)
    anchors = tuple((at * TOKEN, at) for at in range(len(tokens) + 1))
    return Context(whole.chain, whole.length, whole.data if kept else None, anchors)


def tier(tokens: float = math.inf) -> HostTier:
    return HostTier(HostMemory(limit=tokens * 10, token_bytes=10))


def held(cache: HostTier) -> list[int]:
    return [entry.tokens for entry in cache.entries]


def test_overwriting_saves_and_the_saved_comes_back_once() -> None:
    cache = tier()
    first = cache.exchange(context("abcd"), prompt("xyz"), 3)
    assert first.saved is not None
    assert first.loaded is None
    assert first.moved == 4
    second = cache.exchange(context("xyz"), prompt("abcde"), 5)
    assert second.loaded is not None
    assert (second.kept, second.moved) == (4, 7)
    assert held(cache) == [3]
    third = cache.exchange(context("qq"), prompt("abcde"), 5)
    assert third.loaded is None


def test_a_slot_of_which_half_is_kept_is_left_alone() -> None:
    cache = tier()
    assert cache.exchange(context("abcd"), prompt("abxy"), 4).moved == 0
    assert cache.exchange(context("abcd"), prompt("axyz"), 4).saved is not None


def test_a_tenth_of_the_prompt_counts_as_nothing_kept() -> None:
    cache = tier()
    assert cache.exchange(context("a"), prompt("a" + "x" * 9), 10).saved is not None
    assert tier().exchange(context("a"), prompt("a" + "x" * 8), 9).saved is None


def test_an_empty_slot_is_searched_for_only_when_the_engine_chose_it() -> None:
    cache = tier()
    cache.save(context("abcd"))
    assert cache.exchange(None, prompt("abcd"), 4).loaded is None
    assert cache.exchange(None, prompt("abcd"), 4, pinned=False).loaded is not None


def test_what_is_contained_is_kept_once() -> None:
    cache = tier()
    cache.save(context("abcd"))
    assert cache.save(context("abc")) is None
    cache.save(context("abcde"))
    cache.save(context("axcde"))
    assert held(cache) == [5, 5]


def test_the_oldest_make_room_and_what_is_too_large_is_not_saved() -> None:
    cache = tier(10)
    for tokens in ("aaaa", "bbbb", "ccccc"):
        cache.save(context(tokens))
    assert held(cache) == [4, 5]
    assert cache.save(context("d" * 11)) is None
    assert not cache.keeps(11)
    assert held(cache) == [4, 5]


def test_what_was_not_there_takes_the_older_with_it_and_bounds_an_unknown_size() -> None:
    cache = HostTier(HostMemory(limit=100))
    for tokens in ("aaaa", "bbbb", "cccc"):
        cache.save(context(tokens))
    exchange = cache.exchange(context("x"), prompt("bbbbb"), 5)
    assert exchange.newer == 5
    cache.missed(exchange)
    assert held(cache) == [4, 1]
    assert cache.keeps(8)
    assert not cache.keeps(9)


def test_a_change_is_told_to_those_whom_it_may_concern() -> None:
    cache = tier()
    ours = prompt("abcdefgh")
    cache.save(context("zzzz"))
    since, known = cache.epoch, cache.matches(ours)
    cache.save(context("yyyy"))
    assert not cache.changed(since, ours, known)
    entry = cache.save(context("abcd"))
    assert entry is not None
    assert cache.changed(since, ours, known)
    since, known = cache.epoch, cache.matches(ours)
    cache.forget()
    assert cache.changed(since, ours, known)


@dataclass
class Plain:
    """The rules word for word, on token sequences."""

    limit: float
    entries: list[str] = field(default_factory=list)

    def exchange(self, slot: str, new: str) -> tuple[bool, str | None]:
        kept = common(slot, new)
        if not slot:
            return False, None
        similar = kept / len(new)
        if (kept if similar > 0.1 else 0) / len(slot) >= 0.5:
            return False, None
        saved = self.save(slot)
        keep, most, best = kept / len(slot), similar, None
        for entry in self.entries:
            shared = common(entry, new)
            if shared / len(entry) >= 0.25 and shared / len(entry) > keep and shared / len(new) > most:
                keep, most, best = shared / len(entry), shared / len(new), entry
        if best is not None:
            self.entries.remove(best)
        return saved, best

    def save(self, slot: str) -> bool:
        if any(common(entry, slot) == len(slot) for entry in self.entries) or len(slot) > self.limit:
            return False
        self.entries = [entry for entry in self.entries if common(entry, slot) < len(entry)]
        while sum(map(len, self.entries)) + len(slot) > self.limit:
            del self.entries[0]
        self.entries.append(slot)
        return True


def common(one: str, other: str) -> int:
    shortest = min(len(one), len(other))
    return next((at for at in range(shortest) if one[at] != other[at]), shortest)


sequences = st.text("ab", min_size=1, max_size=12)
histories = st.lists(st.tuples(st.integers(0, 2), sequences, sequences), max_size=40)


@pytest.mark.parametrize("kept", [True, False], ids=["text", "hashes"])
@given(histories, st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_it_is_the_rules_word_for_word(kept: bool, history: list[tuple[int, str, str]], limit: int) -> None:
    cache, plain = tier(limit), Plain(limit)
    slots = ["", "", ""]
    for slot, new, answer in history:
        before = context(slots[slot], kept=kept) if slots[slot] else None
        asked = Prompt.of(text(new)) if kept else hashed(new)
        held_there = Held(common(slots[slot], new), len(slots[slot]))
        foreseen = cache.foresee(cache.matches(asked), held_there, len(new)) if before else NO_SWAP
        exchange = cache.exchange(before, asked, len(new))
        if foreseen.kept:
            assert exchange.loaded is not None, "what saving pushes out first is not foreseen"
            assert exchange.kept >= foreseen.kept
        saved, loaded = plain.exchange(slots[slot], new)
        assert (exchange.saved is not None) == saved
        found = exchange.loaded
        assert (found.tokens if found else None) == (len(loaded) if loaded is not None else None)
        if found is not None:
            assert found.context.chain == context(loaded or "").chain
            assert found not in cache.entries
        assert [entry.context.chain for entry in cache.entries] == [context(e).chain for e in plain.entries]
        assert cache.tokens == sum(length_of(entry.context) for entry in cache.entries) <= limit
        assert cache.size == pytest.approx(10 * cache.tokens)
        slots[slot] = new + answer


def hashed(tokens: str) -> Prompt:
    whole = prompt(tokens)
    return Prompt(whole.chain, whole.length)
