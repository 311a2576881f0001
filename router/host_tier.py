"""The engine's prompt cache in host memory (``--cache-ram``): what it keeps, and what comes back. Pure.

The engine looks at it when it gives a slot to a request, by rules that were read from its log:

- A slot is saved, and the cache searched, when less than half of what it holds would be kept; a prompt of
  which the slot covers a tenth or less counts as keeping nothing. An empty slot has nothing to save, and the
  cache is searched for it only where the engine chose it, not where the request is pinned to it.
- What is wholly contained in an entry is not saved once more; entries wholly contained in what is saved go,
  and so do the oldest until the new one fits. What is larger than the whole cache is not saved.
- From the oldest entry to the newest, one is the better choice if it keeps more of itself than the best so
  far (at first: the slot), at least a quarter, and covers more of the prompt. It replaces what the slot holds
  and is in the cache no longer.

Lengths are tokens as the engine counts them, sizes bytes.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from .trie import PrefixTrie
from .values import Prompt

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable

    from .residency import Context
    from .values import HostMemory

SAVE_BELOW: Final = 0.5
"""Share of a slot's content that must be kept, else it is saved and the cache searched."""
LEAST_SIMILAR: Final = 0.10
"""Share of a prompt (``--slot-prompt-similarity``) up to which a match counts as none for that."""
LEAST_KEPT: Final = 0.25
"""Share of itself that an entry must keep to be loaded."""

_PROBE = 0.1
"""An entry of which a prompt lacks even this part, in bytes, is taken not to keep :data:`LEAST_KEPT` of its
tokens."""
_MOST_ENTRIES: Final = 4096
"""Entries that are kept track of, whatever the limit."""
_CHANGES: Final = 64
"""Changes that are told one by one; who has not looked for longer looks at everything."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One saved context."""

    key: int
    serial: int
    """Entries are saved in the order of these."""
    context: Context
    tokens: int
    size: float


class Match(NamedTuple):
    """An entry as one prompt sees it."""

    key: int
    shared: int
    """Bytes in common from the start."""
    kept: int
    """Tokens in common."""
    tokens: int
    """Tokens of the whole entry, all of which are copied when it is loaded."""


class Held(NamedTuple):
    """What a slot holds, as one prompt sees it: ``kept`` of its ``tokens`` are shared with the prompt."""

    kept: int
    tokens: int


class Swap(NamedTuple):
    """What giving a slot to a prompt would move. Counts are tokens."""

    saves: bool
    """Whether what the slot holds is kept in host memory."""
    kept: int
    """What a loaded entry would share with the prompt; 0 = none is loaded."""
    moved: int
    """Whose KV is copied, in either direction."""


class Seen(NamedTuple):
    """What a queued request knows of a tier: the matches of its prompt at one epoch."""

    tier: HostTier
    epoch: int
    matches: tuple[Match, ...]


NO_SWAP: Final = Swap(saves=False, kept=0, moved=0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a request does to the cache and its slot before its prefill. ``moved``: tokens copied."""

    saved: Entry | None = None
    loaded: Entry | None = None
    kept: int = 0
    """Tokens that the loaded entry shares with the prompt."""
    newer: int = 0
    """Tokens of all entries that were saved after the loaded one."""

    @property
    def moved(self) -> int:
        """Tokens whose KV is copied, in either direction."""
        return sum(entry.tokens for entry in (self.saved, self.loaded) if entry is not None)


NOTHING: Final = Exchange()


def searches(held: Held, prompt_tokens: int, *, pinned: bool = True) -> bool:
    """Whether the engine saves what a slot holds and searches the cache for something better."""
    if not held.tokens:
        return not pinned
    if held.kept <= LEAST_SIMILAR * prompt_tokens:
        return True
    return held.kept < SAVE_BELOW * held.tokens


def pick(matches: Iterable[Match], held: Held) -> Match | None:
    """The entry that the engine loads over a slot, of those in the order of their age."""
    best, found = (held.kept / held.tokens if held.tokens else -1.0), None
    most = held.kept
    for match in matches:
        keeps = match.kept / match.tokens
        if keeps >= LEAST_KEPT and keeps > best and match.kept > most:
            best, most, found = keeps, match.kept, match
    return found


class HostTier:
    """The entries of one engine, oldest first. Only :meth:`exchange` and what forgets change it."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._trie = PrefixTrie()
        self._free: list[int] = []
        self._most_tokens = math.inf
        """Where sizes are not known: more than this was seen not to be kept."""
        self._serial = 0
        self._size = 0.0
        self._tokens = 0
        self._changes: deque[tuple[int, array[int] | None]] = deque(maxlen=_CHANGES)
        """Keys that were added, with their chains, or removed, one for each of the last epochs."""
        self.epoch = 0
        """Counts the changes."""
        self._stacked: dict[int, tuple[float, int]] = {}
        """By entry: size and tokens of it and all newer ones together, as of an epoch."""
        self._stacked_at = -1

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, oldest first."""
        return tuple(self._entries.values())

    @property
    def tokens(self) -> int:
        """Of all entries together."""
        return self._tokens

    @property
    def size(self) -> float:
        """Bytes of all entries together, 0 where the size of a token is not known."""
        return self._size

    # What it would do

    def matches(self, prompt: Prompt) -> tuple[Match, ...]:
        """The entries that could be loaded for a prompt, oldest first.

        Left out are those that could not, whatever the slot holds: an older one is as good in both respects.
        """
        found: list[Match] = []
        blocks = self._trie.match(prompt.chain)
        for key in self._in_order(blocks):
            match = _match(self._entries[key], prompt, blocks[key])
            if match.kept >= LEAST_KEPT * match.tokens and not any(_as_good(one, match) for one in found):
                found.append(match)
        return tuple(found)

    def changed(self, since: int, prompt: Prompt, known: Iterable[Match]) -> bool:
        """Whether :meth:`matches` may differ by now from what it was at an earlier epoch, ``known``."""
        new = self.epoch - since
        if new > len(self._changes):
            return True
        keys = {match.key for match in known}
        for key, chain in itertools.islice(reversed(self._changes), new):
            if key in keys if chain is None else _may_match(chain, prompt.chain):
                return True
        return False

    def keeps(self, tokens: int) -> bool:
        """Whether a context of this length is kept when its slot is overwritten."""
        return tokens > 0 and self._size_of(tokens) <= self._limit and tokens <= self._most_tokens

    def foresee(self, matches: Iterable[Match], held: Held, prompt_tokens: int) -> Swap:
        """What :meth:`exchange` would move for a prompt with these ``matches`` on a slot.

        Saving comes first, and may push out just what would have been loaded.
        """
        if not searches(held, prompt_tokens):
            return NO_SWAP
        saves = self.keeps(held.tokens)
        if saves:
            matches = [match for match in matches if self._outlasts(match.key, held.tokens)]
        found = pick(matches, held)
        moved = (held.tokens if saves else 0) + (found.tokens if found is not None else 0)
        return Swap(saves, found.kept if found is not None else 0, moved)

    # What it does

    def exchange(
        self, context: Context | None, prompt: Prompt, prompt_tokens: int, *, pinned: bool = True
    ) -> Exchange:
        """Give a slot that holds ``context`` to a prompt, as the engine does, and say what that moves."""
        held = Held(0, 0)
        if context is not None:
            kept = min(context.tokens_at(context.common(prompt)), prompt_tokens)
            held = Held(kept, length_of(context))
        if not searches(held, prompt_tokens, pinned=pinned):
            return NOTHING
        saved = self.save(context) if context is not None and held.tokens else None
        found = pick(self.matches(prompt), held)
        if found is None:
            return Exchange(saved)
        loaded = self._entries[found.key]
        newer = sum(entry.tokens for entry in self._entries.values() if entry.serial > loaded.serial)
        self._remove(loaded)
        return Exchange(saved, loaded, found.kept, newer)

    def save(self, context: Context) -> Entry | None:
        """Add a context as the newest entry, if the rules let it in."""
        tokens = length_of(context)
        size = self._size_of(tokens)
        contained = []
        for key, blocks in self._trie.match(context.chain).items():
            other = self._entries[key]
            if _contains(other, context, tokens, blocks):
                return None
            if _covers(context, tokens, other, blocks):
                contained.append(other)
        if not self.keeps(tokens):
            return None
        for other in contained:
            self._remove(other)
        while self._entries and not self._fits(tokens, size):
            self._remove(next(iter(self._entries.values())))
        key = self._free.pop() if self._free else len(self._entries)
        self._serial += 1
        entry = Entry(key, self._serial, context, tokens, size)
        self._entries[key] = entry
        self._trie.put(key, context.chain)
        self._size += size
        self._tokens += tokens
        self._change(key, context.chain)
        return entry

    # What the engine's answers tell

    def missed(self, exchange: Exchange) -> None:
        """What was to be loaded was not there: then nothing older is, as the oldest go first.

        Where sizes are not known, this also tells how much the cache holds at most.
        """
        lost = exchange.loaded
        if lost is None:
            return
        for entry in [entry for entry in self._entries.values() if entry.serial < lost.serial]:
            self._remove(entry)
        if not self.memory.token_bytes:
            self._most_tokens = min(self._most_tokens, max(1, exchange.newer + lost.tokens - 1))

    def forget(self) -> None:
        """Nothing is known of what it holds any more."""
        for entry in list(self._entries.values()):
            self._remove(entry)

    # Inside

    @property
    def _limit(self) -> float:
        return self.memory.limit if self.memory.token_bytes else math.inf

    def _size_of(self, tokens: int) -> float:
        return self.memory.state_bytes + tokens * self.memory.token_bytes if self.memory.token_bytes else 0.0

    def _fits(self, tokens: int, size: float) -> bool:
        return (
            self._size + size <= self._limit
            and self._tokens + tokens <= self._most_tokens
            and len(self._entries) < _MOST_ENTRIES
        )

    def _outlasts(self, key: int, tokens: int) -> bool:
        """Whether an entry is still there once a context of this length was saved: the oldest go first."""
        if self._stacked_at != self.epoch:
            self._stacked_at, self._stacked = self.epoch, {}
            size, held = 0.0, 0
            for entry in reversed(self._entries.values()):
                size, held = size + entry.size, held + entry.tokens
                self._stacked[entry.key] = size, held
        size, held = self._stacked.get(key, (math.inf, 0))
        return size + self._size_of(tokens) <= self._limit and held + tokens <= self._most_tokens

    def _in_order(self, keys: Iterable[int]) -> list[int]:
        return sorted(keys, key=lambda key: self._entries[key].serial)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._trie.drop(entry.key)
        self._free.append(entry.key)
        self._tokens -= entry.tokens
        self._size = self._size - entry.size if self._entries else 0.0
        self._change(entry.key, None)

    def _change(self, key: int, chain: array[int] | None) -> None:
        self.epoch += 1
        self._changes.append((key, chain))


def length_of(context: Context) -> int:
    """Tokens of a slot's content as the engine counts them."""
    return context.tokens + context.unread_tokens


def _match(entry: Entry, prompt: Prompt, blocks: int) -> Match:
    shared = entry.context.refine(prompt, blocks)
    return Match(entry.key, shared, min(entry.context.tokens_at(shared), entry.tokens), entry.tokens)


def _as_good(one: Match, other: Match) -> bool:
    return one.kept >= other.kept and one.kept * other.tokens >= other.kept * one.tokens


def _contains(entry: Entry, context: Context, tokens: int, blocks: int) -> bool:
    """Whether an entry holds all of a context."""
    return tokens <= entry.tokens and context.refine(_text(entry.context), blocks) >= context.length


def _covers(context: Context, tokens: int, entry: Entry, blocks: int) -> bool:
    """Whether a context holds all of an entry."""
    return entry.tokens <= tokens and entry.context.refine(_text(context), blocks) >= entry.context.length


def _text(context: Context) -> Prompt:
    return Prompt(context.chain, context.length, context.data)


def _may_match(theirs: array[int], ours: array[int]) -> bool:
    """Whether a prompt can share enough of an entry for it to be loaded."""
    at = int(_PROBE * len(theirs))
    return at < min(len(ours), len(theirs)) and theirs[at] == ours[at]
