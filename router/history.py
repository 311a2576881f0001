"""Contexts that slots held and hold no more: what was lost, and why. Bounded. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .trie import PrefixTrie

if TYPE_CHECKING:
    from .residency import Context
    from .values import Loss, Prompt

MAX_CONTEXTS = 256
MAX_BYTES = 64 << 20
"""Of text that the kept chains stand for (an eighth of that in memory)."""
MAX_TEXT = 8 << 20
"""Of text that is kept itself, of the newest contexts, to find the exact end of a match."""


@dataclass(slots=True)
class Ghost:
    """A context that was overwritten (``evicted``) or went with its engine (``restarted``)."""

    key: int
    context: Context
    reason: Loss


class History:
    """The most recently lost contexts of a pool."""

    def __init__(self) -> None:
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()
        self._trie = PrefixTrie()
        self._free = list(range(MAX_CONTEXTS - 1, -1, -1))
        self._bytes = 0
        self._text = 0

    def __len__(self) -> int:
        return len(self._ghosts)

    def __contains__(self, context: Context) -> bool:
        """Whether this very context is among them."""
        return any(ghost.context.chain is context.chain for ghost in self._ghosts.values())

    def add(self, context: Context, reason: Loss) -> None:
        """Remember a lost context; the oldest make room."""
        if context.length > MAX_BYTES:
            return
        while not self._free or self._bytes + context.length > MAX_BYTES:
            self.remove(next(iter(self._ghosts.values())))
        key = self._free.pop()
        ghost = Ghost(key, context, reason)
        self._ghosts[key] = ghost
        self._trie.put(key, context.chain)
        self._bytes += context.length
        self._text += context.length if context.data is not None else 0
        for old in self._ghosts.values():
            if self._text <= MAX_TEXT:
                break
            if old.context.data is not None:
                old.context = old.context.without_text()
                self._text -= old.context.length

    def remove(self, ghost: Ghost) -> None:
        """Forget one."""
        del self._ghosts[ghost.key]
        self._trie.drop(ghost.key)
        self._free.append(ghost.key)
        self._bytes -= ghost.context.length
        self._text -= ghost.context.length if ghost.context.data is not None else 0

    def restored(self, context: Context) -> None:
        """A context that was taken to be lost is still there."""
        for ghost in [g for g in self._ghosts.values() if g.context.chain is context.chain]:
            self.remove(ghost)

    def recall(self, prompt: Prompt) -> tuple[int, Loss | None]:
        """The most tokens of a prompt that were held and lost, and why; it is about to be resident again.

        Contexts that the prompt covers wholly are forgotten by that.
        """
        tokens, reason = 0, None
        matches = self._trie.match(prompt.chain)
        most = max(matches.values(), default=0)
        for key, blocks in matches.items():
            ghost = self._ghosts[key]
            if blocks == most:
                here = ghost.context.tokens_at(ghost.context.refine(prompt, blocks))
                if here > tokens:
                    tokens, reason = here, ghost.reason
            if blocks >= len(ghost.context.chain):
                self.remove(ghost)
        return tokens, reason
