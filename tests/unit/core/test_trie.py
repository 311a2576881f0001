"""The trie equals a brute-force longest common prefix, whatever happened to it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from warmslot.router.trie import STRIDE, PrefixTrie, common_blocks, common_bytes
from warmslot.router.values import BLOCK, Prompt

_PIECE = BLOCK * STRIDE // 2


def _text(parts: list[tuple[int, int]]) -> bytes:
    """Text of a few long pieces from a small alphabet, so that random texts share long beginnings."""
    return b"".join(bytes([65 + letter]) * length for letter, length in parts)


texts = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, BLOCK - 1, BLOCK, _PIECE, 3 * _PIECE + 7])), max_size=6
).map(_text)


def _brute(a: bytes, b: bytes) -> int:
    shared = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        shared += 1
    return shared


@given(a=texts, b=texts)
def test_common_bytes_is_the_longest_common_prefix(a: bytes, b: bytes) -> None:
    assert common_bytes(a, b) == _brute(a, b)
    assert common_blocks(Prompt.of(a).chain, Prompt.of(b).chain) == _brute(a, b) // BLOCK


class Histories(RuleBasedStateMachine):
    """Any order of puts, overwrites and drops of a few contexts."""

    @initialize()
    def start(self) -> None:
        self.trie = PrefixTrie()
        self.held: dict[int, bytes] = {}
        self.probe = b""

    @rule(key=st.integers(0, 70), text=texts)
    def put(self, key: int, text: bytes) -> None:
        self.trie.put(key, Prompt.of(text).chain)
        self.held[key] = text

    @rule(data=st.data(), more=texts)
    def append(self, data: st.DataObject, more: bytes) -> None:
        if self.held:
            key = data.draw(st.sampled_from(sorted(self.held)))
            self.put(key, self.held[key] + more)

    @rule(data=st.data(), to=st.integers(0, 70), more=texts)
    def branch(self, data: st.DataObject, to: int, more: bytes) -> None:
        if self.held:
            source = self.held[data.draw(st.sampled_from(sorted(self.held)))]
            self.put(to, source[: len(source) // 2] + more)

    @rule(key=st.integers(0, 70))
    def drop(self, key: int) -> None:
        self.trie.drop(key)
        self.held.pop(key, None)

    @rule()
    def reset(self) -> None:
        for key in list(self.held):
            self.drop(key)

    @rule(text=texts)
    def look(self, text: bytes) -> None:
        self.probe = text

    @invariant()
    def matches_equal_brute_force(self) -> None:
        for probe in (self.probe, *list(self.held.values())[:2]):
            want = {key: _brute(text, probe) // BLOCK for key, text in self.held.items()}
            assert self.trie.match(Prompt.of(probe).chain) == {k: n for k, n in want.items() if n}

    @invariant()
    def nothing_is_left_behind(self) -> None:
        assert len(self.trie) == len(self.held)
        if not any(len(text) >= BLOCK * STRIDE for text in self.held.values()):
            assert len(self.trie._trie) == 0


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase
