"""What reuse would be with another number of slots, kept up beside the real one. Pure and bounded.

For each slot count a set of imagined slots serves the same requests in the same order. They choose by the
costs that real ones have, so that the imagined reuse at the real count can be held against the observed one.
Contents are shared between the sets: each is kept once, as hashes with its text only while it is short.
``unbounded`` forgets no more than its limits make it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import placement
from .placement import Ask, Offer, SlotFacts
from .trie import PrefixTrie
from .values import SlotRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from .rates import Rates
    from .residency import Context
    from .values import Prompt

COUNTS = (1, 2, 4, 8, 16, 32)
UNBOUNDED = "unbounded"

_MAX_TEXT = 64 << 10
"""Contents up to this size keep their text, to find the exact end of a match; in longer ones a block of 64
bytes matters little."""
_MAX_CONTEXTS = 512
_MAX_BYTES = 64 << 20
"""Limits of ``unbounded``: contexts, and the text that they stand for."""


@dataclass(frozen=True, slots=True)
class Served:
    """One finished request, as the imagined slots need it."""

    prompt: Prompt
    prompt_tokens: int
    context: Context
    """What its slot holds after it."""
    session: str
    reach: float
    """Share of a match that the engine can use where it has to cut a slot back (1 = all of it)."""


@dataclass(slots=True)
class _Content:
    """A context that at least one imagined slot holds."""

    key: int
    context: Context
    session: str
    users: int = 0
    match_tokens: int = 0
    """With the request at hand."""


@dataclass(slots=True)
class _Slot:
    content: _Content | None = None
    last_used: int = -1


class _Store:
    """Contents under dense keys, with the trie over them."""

    def __init__(self) -> None:
        self.contents: dict[int, _Content] = {}
        self._trie = PrefixTrie()
        self._free: list[int] = []

    def add(self, context: Context, session: str) -> _Content:
        key = self._free.pop() if self._free else len(self.contents)
        content = _Content(key, context, session)
        self.contents[key] = content
        self._trie.put(key, context.chain)
        return content

    def remove(self, content: _Content) -> None:
        del self.contents[content.key]
        self._trie.drop(content.key)
        self._free.append(content.key)

    def match(self, served: Served) -> None:
        """Note with every content how many tokens of the prompt it would save."""
        blocks = self._trie.match(served.prompt.chain)
        for key, content in self.contents.items():
            content.match_tokens = _reusable(content.context, served, blocks.get(key, 0))

    def best(self, served: Served) -> tuple[int, list[_Content]]:
        """The most tokens that any content would save, and the contents that the prompt covers wholly."""
        blocks = self._trie.match(served.prompt.chain)
        most = max(blocks.values(), default=0)
        contents = self.contents
        if not most:  # a few bytes in common are found the long way
            return max((_reusable(c.context, served, 0) for c in contents.values()), default=0), []
        longest = [contents[key].context for key, shared in blocks.items() if shared == most]
        best = max(_reusable(context, served, most) for context in longest)
        covered = [contents[key] for key, n in blocks.items() if n >= len(contents[key].context.chain)]
        return best, [content for content in covered if content.context.length <= served.prompt.length]


def _reusable(context: Context, served: Served, blocks: int) -> int:
    shared = context.refine(served.prompt, blocks)
    tokens = min(context.tokens_at(shared), max(0, served.prompt_tokens - 1))
    return int(tokens * served.reach) if shared < context.length else tokens


class Shadow:
    """Imagined slots of one pool. All counts are tokens."""

    def __init__(self) -> None:
        self._sets = {count: [_Slot() for _ in range(count)] for count in COUNTS}
        self._store = _Store()
        self._all = _Store()
        self._recent: OrderedDict[int, _Content] = OrderedDict()
        self._bytes = 0
        self._turn = 0

    def serve(self, served: Served, rates: Rates, ask: Ask, chance: Callable[[str], float]) -> dict[str, int]:
        """Prompt tokens that would have been reused, by slot count (``"1"`` to ``"32"``, ``"unbounded"``).

        ``ask``: what placement knows of the request. ``chance(session)``: that a conversation goes on.
        """
        self._turn += 1
        context = served.context if served.context.length <= _MAX_TEXT else served.context.without_text()
        self._store.match(served)
        costs = self._costs(rates, ask, chance)
        empty = rates.prefill_seconds(0, served.prompt_tokens)
        content = self._store.add(context, served.session)
        reused = {}
        for count, slots in self._sets.items():
            slot = _choose(slots, costs, empty)
            reused[str(count)] = slot.content.match_tokens if slot.content is not None else 0
            self._let_go(slot.content)
            slot.content, slot.last_used = content, self._turn
            content.users += 1
        reused[UNBOUNDED] = self._serve_unbounded(served, context)
        return reused

    def forget(self) -> None:
        """The engines were started anew: nothing is resident anywhere."""
        for slots in self._sets.values():
            for slot in slots:
                self._let_go(slot.content)
                slot.content = None
        for content in list(self._recent.values()):
            self._drop(content)

    def _costs(self, rates: Rates, ask: Ask, chance: Callable[[str], float]) -> dict[int, float]:
        """What serving the request on a slot with each content costs, in seconds."""
        costs = {}
        for key, content in self._store.contents.items():
            facts = SlotFacts(
                ref=SlotRef("", key),
                session=content.session,
                asked_tokens=content.context.asked_tokens,
                shared_tokens=0,
                return_chance=chance(content.session),
                last_used=0.0,
                rates=rates,
            )
            costs[key] = placement.price(Offer(facts, content.match_tokens, idle=True), ask).cost
        return costs

    def _let_go(self, content: _Content | None) -> None:
        if content is not None:
            content.users -= 1
            if not content.users:
                self._store.remove(content)

    def _serve_unbounded(self, served: Served, context: Context) -> int:
        best, covered = self._all.best(served)
        for content in covered:
            self._drop(content)
        if context.length > _MAX_BYTES:
            return best
        while len(self._recent) >= _MAX_CONTEXTS or self._bytes + context.length > _MAX_BYTES:
            self._drop(next(iter(self._recent.values())))
        content = self._all.add(context, served.session)
        self._recent[content.key] = content
        self._bytes += context.length
        return best

    def _drop(self, content: _Content) -> None:
        self._all.remove(content)
        del self._recent[content.key]
        self._bytes -= content.context.length


def _choose(slots: list[_Slot], costs: dict[int, float], empty: float) -> _Slot:
    """The cheapest slot; ties go to the one left longest ago."""
    return min(
        slots,
        key=lambda slot: (empty if slot.content is None else costs[slot.content.key], slot.last_used),
    )
