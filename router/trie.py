"""A prefix trie over the contexts that slots hold (or held): who shares how much with a prompt, in one walk.

The trie's steps are every ``STRIDE``-th hash of a prompt's chain, so one step stands for 4 KiB of text. Each
node keeps, as a bit mask, the set of contexts that pass through it; a walk therefore yields the match of
*every* context: where a bit disappears from the mask, that context diverges. What is left inside the last
step is found by bisection on the chains themselves, which agree up to a point and differ ever after.

Pure; lengths are in blocks of :data:`~.values.BLOCK` bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygtrie import Trie

from .values import BLOCK

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

STRIDE = 64
"""Blocks per step of the trie."""


def common_blocks(a: array[int], b: array[int], low: int = 0, high: int | None = None) -> int:
    """How many blocks two chains share from the start, known to lie in ``[low, high]``."""
    end = min(len(a), len(b))
    high = end if high is None else min(high, end)
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def common_bytes(a: bytes, b: bytes, start: int = 0) -> int:
    """How many bytes two texts share from the start, of which the first ``start`` are known to agree."""
    end = min(len(a), len(b))
    step = 4 * BLOCK
    while start < end:
        stop = min(start + step, end)
        if a[start:stop] != b[start:stop]:
            while stop - start > 1:
                middle = (start + stop) // 2
                if a[start:middle] == b[start:middle]:
                    start = middle
                else:
                    stop = middle
            return start
        start = stop
    return end


class PrefixTrie:
    """Contexts under small integer keys. Keys are reused, so keep them dense: a mask has one bit for each."""

    def __init__(self) -> None:
        self._trie: Trie[tuple[int, ...], int, int] = Trie()
        self._chains: dict[int, array[int]] = {}
        self._first: dict[int, int] = {}
        """For the hash of a first block: the mask of the contexts that begin with it."""

    def __len__(self) -> int:
        return len(self._chains)

    def __contains__(self, key: int) -> bool:
        return key in self._chains

    def put(self, key: int, chain: array[int]) -> None:
        """Make ``key`` stand for ``chain``. The chain is kept by reference and must not change."""
        old = self._chains.get(key)
        kept = 0
        if old is not None:
            kept = common_blocks(old, chain) // STRIDE
            self._prune(key, old, kept)
        if old is not None and (not chain or old[:1] != chain[:1]):
            self._unmark(key, old)
        self._chains[key] = chain
        if chain:
            self._first[chain[0]] = self._first.get(chain[0], 0) | 1 << key
        path = tuple(chain[STRIDE - 1 :: STRIDE])
        if len(path) > kept:
            bit = 1 << key
            self._trie.setdefault(path, 0)
            for depth, step in enumerate(self._trie.walk_towards(path)):
                if depth > kept:
                    step.value = step.get(0) | bit

    def drop(self, key: int) -> None:
        """Forget ``key``; unknown keys are ignored."""
        old = self._chains.pop(key, None)
        if old is not None:
            self._unmark(key, old)
            self._prune(key, old, 0)

    def _unmark(self, key: int, chain: array[int]) -> None:
        if chain:
            left = self._first[chain[0]] & ~(1 << key)
            if left:
                self._first[chain[0]] = left
            else:
                del self._first[chain[0]]

    def _prune(self, key: int, chain: array[int], kept: int) -> None:
        path = tuple(chain[STRIDE - 1 :: STRIDE])
        if len(path) <= kept:
            return
        bit = 1 << key
        for depth, step in enumerate(self._trie.walk_towards(path)):
            if depth <= kept:
                continue
            left = step.get(0) & ~bit
            step.value = left
            if not left:
                # Nobody passes here any more, so nobody passes below either.
                del self._trie[path[:depth] :]
                return

    def match(self, chain: array[int]) -> dict[int, int]:
        """Blocks that each context shares with ``chain`` (where it shares any)."""
        found: dict[int, int] = {}
        live = self._first.get(chain[0], 0) if chain else 0
        depth = 0
        for depth, mask in enumerate(self._masks(chain), start=1):  # the last depth is used
            gone = live & ~mask
            if gone:
                self._refine(gone, chain, depth - 1, found)
                live = mask
        self._refine(live, chain, depth, found)
        return found

    def shared(self, key: int) -> tuple[int, int | None]:
        """The most blocks that ``key`` shares with any one other context, and which context that is."""
        best, other = 0, None
        for candidate, blocks in self.match(self._chains[key]).items():
            if candidate != key and blocks > best:
                best, other = blocks, candidate
        return best, other

    def _masks(self, chain: array[int]) -> Iterator[int]:
        walk = self._trie.walk_towards(tuple(chain[STRIDE - 1 :: STRIDE]))
        try:
            for depth, step in enumerate(walk):
                if depth:
                    yield step.get(0)
        except KeyError:  # where the known path ends
            return

    def _refine(self, mask: int, chain: array[int], steps: int, found: dict[int, int]) -> None:
        low = steps * STRIDE
        last = 0
        while mask:
            bit = mask & -mask
            mask ^= bit
            key = bit.bit_length() - 1
            other = self._chains[key]
            if len(other) > low and len(chain) > low and other[low] == chain[low]:
                if (
                    not last < len(other)
                    or not low < last < len(chain)
                    or other[last] == chain[last]
                    or (other[last - 1] != chain[last - 1])
                ):  # most part from the chain where the one before did, at the end of a common preamble
                    last = common_blocks(other, chain, low + 1, low + STRIDE)
                found[key] = last
            elif low:
                found[key] = low
