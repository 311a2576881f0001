"""Learns what conversations begin with in common: the prefixes that are worth having warm before they come.

Only the beginnings of the last conversations are kept, in memory; nothing of them is written anywhere.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import NamedTuple

from warmslot.router.clocks import ENDING

MOST = 32
"""Conversations whose last prompts are kept."""
LONGEST = 1 << 18
"""Characters that are kept of each."""
LEAST = 256
"""Characters below which a prefix is not worth a request."""


class _Conversation(NamedTuple):
    text: str
    """What its last prompt began with."""
    name: str | None

    def is_same(self, other: _Conversation) -> bool:
        """Whether both are one conversation: called the same, or else one contains the other but for its end.

        The router's own idea of a conversation is no help here: until it knows a preamble, it takes whoever
        begins with it for the same one.
        """
        if self.name is not None or other.name is not None:
            return self.name == other.name
        shorter = min(len(self.text), len(other.text)) - ENDING
        return self.text.startswith(other.text[:shorter])


class Preambles:
    """Of one pool."""

    def __init__(self) -> None:
        self._seen: deque[_Conversation] = deque(maxlen=MOST)

    def saw(self, text: str, name: str | None = None) -> None:
        """A conversation, perhaps one that the client has a name for, was served this prompt."""
        if len(text) >= LEAST:
            new = _Conversation(text[:LONGEST], name)
            # Those that it does not replace, in the same order.
            self._seen = deque((one for one in self._seen if not one.is_same(new)), MOST)
            self._seen.append(new)

    def best(self, count: int) -> list[str]:
        """At most so many prefixes that several conversations share, none a part of another, best first.

        What a prefix is worth: its length × the conversations that begin with it. Neighbours in the order of
        the texts share the longest ones, so that no other pairs have to be looked at.
        """
        texts = sorted(one.text for one in self._seen)
        shared = {_at_a_boundary(one[: _in_common(one, other)]) for one, other in pairwise(texts)}
        worth = {
            prefix: len(prefix) * sum(text.startswith(prefix) for text in texts)
            for prefix in shared
            if len(prefix) >= LEAST
        }
        chosen: list[str] = []
        for prefix in sorted(worth, key=lambda prefix: (-worth[prefix], prefix)):
            if len(chosen) == count:
                break
            if not any(prefix.startswith(other) or other.startswith(prefix) for other in chosen):
                chosen.append(prefix)
        return chosen


def _in_common(one: str, other: str) -> int:
    """Characters from the start that two texts share, found by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _at_a_boundary(text: str) -> str:
    """Cut where a token is likely to end: after a line, or before a space, if that costs little.

    The last token of a prefix has to be the one that its continuations have there: some models cannot take
    back a single one.
    """
    for end in (text.rfind("\n") + 1, text.rfind(" ")):
        if end >= len(text) * 3 // 4:
            return text[:end]
    return text
