"""What every slot of a pool holds, as far as we know. The only writer of the trie. Pure.

A slot's content is *known* (told by an engine's numbers, or empty after a start that we saw) or *unknown*
(a restart elsewhere, foreign traffic, an engine error): what is unknown is never counted on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .trie import PrefixTrie, common_blocks, common_bytes
from .values import BLOCK, Prompt, SlotRef, extend_chain

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

_MAX_ANCHORS = 128
_BYTES_PER_TOKEN_PRIOR = 4.0
_BYTES_PER_TOKEN_MEMORY = 50_000.0


@dataclass(frozen=True, slots=True)
class Context:
    """The content of one slot: canonical bytes and where in them the engine's token counts are known."""

    chain: array[int]
    length: int
    data: bytes | None
    anchors: tuple[tuple[int, int], ...]
    """(byte offset, tokens up to there), ascending, from (0, 0) to (length, tokens)."""
    asked: int = -1
    """Bytes of it that somebody sent as a prompt; the rest is the answer. -1 = all."""
    unread_tokens: int = 0
    """Tokens that the slot holds beyond ``length``, the text of which is not known."""

    @property
    def asked_tokens(self) -> int:
        """Tokens of the part that was sent as a prompt."""
        return self.tokens if self.asked < 0 else self.tokens_at(self.asked)

    @property
    def tokens(self) -> int:
        """How many tokens the slot holds."""
        return self.anchors[-1][1]

    def tokens_at(self, offset: int) -> int:
        """Tokens that lie wholly before a byte offset: exact at anchors, interpolated between them."""
        at = bisect_right(self.anchors, offset, key=lambda anchor: anchor[0])
        low_byte, low_token = self.anchors[at - 1]
        if at == len(self.anchors):
            return low_token
        high_byte, high_token = self.anchors[at]
        return low_token + int((high_token - low_token) * (offset - low_byte) / (high_byte - low_byte))

    def common(self, prompt: Prompt) -> int:
        """Bytes that the context and a prompt share from the start."""
        return self.refine(prompt, common_blocks(self.chain, prompt.chain))

    def refine(self, prompt: Prompt, blocks: int) -> int:
        """Shared bytes, given the shared whole blocks: exact with both texts, else the likeliest figure."""
        shared = blocks * BLOCK
        if self.data is not None and prompt.data is not None:
            return common_bytes(self.data, prompt.data, shared)
        if blocks == len(self.chain) and blocks and prompt.length >= self.length:
            return self.length  # what goes on with all whole blocks of it goes on with their rest
        return min(shared + BLOCK // 2, self.length, prompt.length) if blocks else 0

    def without_text(self) -> Context:
        """The same, remembered by its hashes alone."""
        return replace(self, data=None)

    def cut(self, offset: int) -> Context | None:
        """The context's first ``offset`` bytes, or ``None`` when nothing is left."""
        if offset >= self.length:
            return self
        if offset <= 0:
            return None
        anchors = (*(a for a in self.anchors if a[0] < offset), (offset, self.tokens_at(offset)))
        return Context(
            chain=self.chain[: offset // BLOCK],
            length=offset,
            data=None if self.data is None else self.data[:offset],
            anchors=anchors,
            asked=-1 if self.asked < 0 else min(self.asked, offset),
        )

    def cut_tokens(self, tokens: int) -> Context | None:
        """The context's first ``tokens`` tokens, to the byte as well as that is known."""
        at = bisect_right(self.anchors, tokens, key=lambda anchor: anchor[1])
        if at == len(self.anchors):
            return self
        (low_byte, low_token), (high_byte, high_token) = self.anchors[at - 1], self.anchors[at]
        part = (tokens - low_token) / (high_token - low_token)
        return self.cut(low_byte + int((high_byte - low_byte) * part))


@dataclass(slots=True)
class SlotState:
    """One slot. ``held`` is what it holds, or while ``known`` is false what it was last believed to hold."""

    ref: SlotRef
    key: int
    held: Context | None = None
    known: bool = True
    request: str | None = None
    foreign: bool = False
    """Somebody else's request runs here: the engine is busy with it, and no lease of ours is out."""
    last_used: float = float("-inf")
    session: str = ""
    """The conversation that ran here last."""
    at_most: bool = False
    """The slot holds no more than ``held``, but possibly less: a request was interrupted."""
    unverified: bool = False
    """What it holds was put back from a file and the engine has not yet shown that it uses it: requests are
    led there, but nobody is told that it is resident."""

    @property
    def idle(self) -> bool:
        """Nothing runs here, as far as is known: neither a request of ours nor anybody else's."""
        return self.request is None and not self.foreign

    @property
    def resident_tokens(self) -> int:
        """Tokens that can be counted on."""
        return self.held.tokens if self.held is not None and self.known else 0


class Residency:
    """The slots of one pool."""

    def __init__(self) -> None:
        self.slots: dict[SlotRef, SlotState] = {}
        self._trie = PrefixTrie()
        self._by_key: dict[int, SlotState] = {}
        self._free_keys: list[int] = []
        self._shared: dict[int, dict[int, int]] = {}
        """For each slot: the blocks that it shares with each other slot, where any."""
        self._nearest: dict[int, int] = {}
        """Of those, the one it shares most with; as far as it was asked for since one of them changed."""
        self._changed: OrderedDict[SlotRef, int] = OrderedDict()
        self.epoch = 0
        """Counts the changes of what slots hold."""
        self._bytes_per_token = _BYTES_PER_TOKEN_PRIOR
        self._seen_tokens = 0.0

    def add(self, ref: SlotRef, *, known_empty: bool) -> None:
        """A slot exists now, empty or with unknown content."""
        key = self._free_keys.pop() if self._free_keys else len(self._by_key)
        state = SlotState(ref=ref, key=key, known=known_empty)
        self.slots[ref] = state
        self._by_key[key] = state

    def remove(self, ref: SlotRef) -> None:
        """A slot is gone with what it held."""
        self.hold(ref, None, known=False)
        state = self.slots.pop(ref)
        del self._by_key[state.key]
        self._free_keys.append(state.key)

    def matches(self, prompt: Prompt) -> dict[SlotRef, int]:
        """Bytes that each slot with known content shares with the prompt (where it shares any)."""
        blocks = self._trie.match(prompt.chain)
        found = {}
        for key, state in self._by_key.items():
            if state.known and state.held is not None:
                shared = state.held.refine(prompt, blocks.get(key, 0))
                if shared:
                    found[state.ref] = shared
        return found

    def match(self, prompt: Prompt, ref: SlotRef) -> int:
        """The same for one slot, without a walk."""
        state = self.slots[ref]
        return state.held.common(prompt) if state.known and state.held is not None else 0

    def shared_tokens(self, ref: SlotRef) -> tuple[int, SlotRef | None]:
        """Of a slot's content, how many tokens from the start another slot holds too, and which one."""
        state = self.slots[ref]
        shared = self._shared.get(state.key)
        if state.held is None or not shared:
            return 0, None
        other = self._nearest.get(state.key)
        if other is None:
            other = self._nearest[state.key] = max(shared, key=shared.__getitem__)
        return state.held.tokens_at(shared[other] * BLOCK), self._by_key[other].ref

    def prompt_tokens(self, prompt: Prompt, matches: dict[SlotRef, int]) -> int:
        """Length of a prompt in tokens: exact if told, else from the longest match."""
        if prompt.tokens is not None:
            return prompt.tokens
        if matches:
            ref = max(matches, key=lambda ref: matches[ref])
            held = self.slots[ref].held
            if held is not None:
                shared = matches[ref]
                return held.tokens_at(shared) + round((prompt.length - shared) / self._bytes_per_token)
        return max(1, round(prompt.length / self._bytes_per_token))

    def reusable_tokens(self, prompt: Prompt, ref: SlotRef, shared: int, prompt_tokens: int) -> int:
        """Prompt tokens that the engine will reuse on a slot which shares ``shared`` bytes with the prompt.

        It always evaluates at least the last prompt token.
        """
        held = self.slots[ref].held
        if held is None or shared <= 0:
            return 0
        tokens = held.tokens_at(shared)
        if shared >= prompt.length:
            return max(0, tokens - 1)
        return min(tokens, max(0, prompt_tokens - 1))

    def commit(
        self,
        ref: SlotRef,
        prompt: Prompt,
        generated: bytes,
        prompt_tokens: int,
        output_tokens: int,
        *,
        after: Prompt | None = None,
    ) -> None:
        """The engine served a prompt here: the slot holds it and what was generated, less a token.

        ``after``: both together, where only hashes of them are known.
        """
        state = self.slots[ref]
        anchors = self._anchors(state, prompt, prompt_tokens)
        self._learn(prompt.length - anchors[-1][0], prompt_tokens - anchors[-1][1])
        if prompt.length:
            anchors.append((prompt.length, prompt_tokens))
        data, chain, length = prompt.data, prompt.chain, prompt.length
        tokens = prompt_tokens + max(0, output_tokens - 1)
        if data is None and after is not None and after.length > length:
            chain, length = after.chain, after.length
            anchors.append((length, tokens))
        elif generated and data is not None:
            length += len(generated)
            anchors.append((length, tokens))
            data += generated
            chain = extend_chain(chain, data, root=prompt.root)
        if len(anchors) > _MAX_ANCHORS:
            anchors = [anchors[0], *anchors[-_MAX_ANCHORS + 1 :]]
        context = Context(
            chain=chain,
            length=length,
            data=data,
            anchors=tuple(anchors),
            asked=prompt.length,
            unread_tokens=tokens - anchors[-1][1],
        )
        self.hold(ref, context, known=True)

    def expect(self, ref: SlotRef, prompt: Prompt, prompt_tokens: int) -> None:
        """A request was sent here: while it runs, the slot is taken to hold its prompt."""
        state = self.slots[ref]
        anchors = self._anchors(state, prompt, prompt_tokens)
        if prompt.length:
            anchors.append((prompt.length, max(prompt_tokens, anchors[-1][1])))
        self.hold(ref, Context(prompt.chain, prompt.length, prompt.data, tuple(anchors)), known=True)

    @staticmethod
    def _anchors(state: SlotState, prompt: Prompt, prompt_tokens: int) -> list[tuple[int, int]]:
        """The known token counts of a slot's content that hold for a prompt as well."""
        old = state.held if state.known else None
        if old is None:
            return [(0, 0)]
        shared = min(old.common(prompt), prompt.length - 1)
        return [(0, 0)] + [a for a in old.anchors if 0 < a[0] <= shared and a[1] < prompt_tokens]

    def hold(
        self,
        ref: SlotRef,
        context: Context | None,
        *,
        known: bool,
        at_most: bool = False,
        unverified: bool = False,
    ) -> None:
        """Set what a slot holds. ``None`` and known means empty."""
        state = self.slots[ref]
        state.held, state.known, state.at_most, state.unverified = context, known, at_most, unverified
        self.epoch += 1
        self._changed[ref] = self.epoch
        self._changed.move_to_end(ref)
        key = state.key
        self._nearest.pop(key, None)
        for other in self._shared.pop(key, ()):
            self._shared[other].pop(key, None)
            self._nearest.pop(other, None)
        if not known or context is None:
            self._trie.drop(key)
            return
        self._trie.put(key, context.chain)
        mine = {other: blocks for other, blocks in self._trie.match(context.chain).items() if other != key}
        self._shared[key] = mine
        for other, blocks in mine.items():
            self._shared.setdefault(other, {})[key] = blocks
            self._nearest.pop(other, None)

    def changed_since(self, epoch: int) -> Iterator[SlotRef]:
        """Slots whose content changed after ``epoch`` (a former value of :attr:`epoch`), removed ones too."""
        for ref in reversed(self._changed):
            if self._changed[ref] <= epoch:
                return
            yield ref

    def doubt(self, ref: SlotRef) -> None:
        """What a slot holds is unknown from now on; the belief is kept to recognise it again."""
        self.hold(ref, self.slots[ref].held, known=False)

    def _learn(self, length: int, tokens: int) -> None:
        if length <= 0 or tokens <= 0:
            return
        keep = max(0.0, 1.0 - tokens / _BYTES_PER_TOKEN_MEMORY)
        seen = self._seen_tokens * keep
        self._bytes_per_token = (self._bytes_per_token * seen + length) / (seen + tokens)
        self._seen_tokens = seen + tokens
