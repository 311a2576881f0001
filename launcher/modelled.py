"""The modelled engine that traces are replayed on and loads are forecast on, in virtual time. Pure.

Its rules are llama-server's: a slot holds prompt and answer, the longest common prefix is reused, at least
one prompt token is computed, prompts are computed one after the other in slot order, and while one is
computed the requests that decode get one token for each batch. What decides is the code that really routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from warmslot.router.host_tier import NOTHING, Exchange, HostTier
from warmslot.router.residency import Context
from warmslot.router.trie import PrefixTrie

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from warmslot.router.values import HostMemory, Lease, Outcome, Prompt, Report, Request

POOL: Final = "pool"
BACKEND: Final = "backend"
EPSILON: Final = 1e-7


class Policy(Protocol):
    """What is needed of a core; :class:`~warmslot.router.core.RouterCore` has it all."""

    def submit(self, request: Request, now: float) -> None:
        """Queue a request."""

    def grant(self, now: float) -> list[Lease]:
        """Leases that start now."""

    def next_wake(self, now: float) -> float | None:
        """When to ask again though nothing happened."""

    def first_token(self, request_id: str, now: float) -> None:
        """A prefill is over."""

    def finish(self, request_id: str, outcome: Outcome, now: float) -> Report | None:
        """A lease is over."""


def content(prompt: Prompt, after: Prompt, prompt_tokens: int, output_tokens: int) -> Context:
    """What a slot holds after a call: ``after``, which is the prompt and its answer."""
    anchors = [(0, 0), (prompt.length, prompt_tokens)]
    if after.length > prompt.length:
        anchors.append((after.length, prompt_tokens + max(0, output_tokens - 1)))
    return Context(chain=after.chain, length=after.length, data=after.data, anchors=tuple(anchors))


class Engine:
    """Slots of one modelled llama-server. ``unbounded`` keeps every context for ever.

    ``host``: with a prompt cache in host memory (``--cache-ram``). ``pinned``: requests name their slots.
    """

    def __init__(
        self, slots: int, *, unbounded: bool = False, host: HostMemory | None = None, pinned: bool = True
    ) -> None:
        self._host = HostTier(host) if host is not None else None
        self._pinned = pinned
        self._most = 0
        self.held: list[Context | None] = [None] * slots
        self._everything = PrefixTrie() if unbounded else None
        self._kept: list[Context] = []

    def cached(self, slot: int, prompt: Prompt) -> int:
        """Prompt tokens that a slot's content covers (the engine computes the last one all the same)."""
        if self._everything is None:
            held = self.held[slot]
            return held.tokens_at(held.common(prompt)) if held is not None else 0
        blocks = self._everything.match(prompt.chain)
        # Without a whole block in common, the few shared bytes are found the long way.
        found = [(self._kept[key], n) for key, n in blocks.items()] or [(kept, 0) for kept in self._kept]
        return max((context.tokens_at(context.refine(prompt, n)) for context, n in found), default=0)

    def take(self, slot: int, prompt: Prompt, prompt_tokens: int) -> Exchange:
        """A request is given a slot: what is saved to host memory and loaded from it first."""
        if self._host is None:
            return NOTHING
        exchange = self._host.exchange(self.held[slot], prompt, prompt_tokens, pinned=self._pinned)
        self._most = max(self._most, self._host.tokens)
        if exchange.loaded is not None:
            self.held[slot] = exchange.loaded.context
        return exchange

    @property
    def host_tokens(self) -> int:
        """The most tokens that host memory kept at once."""
        return self._most

    def serve(self, slot: int, context: Context) -> None:
        """The slot holds prompt and answer from now on."""
        self.held[slot] = context
        if self._everything is not None:
            self._everything.put(len(self._kept), context.chain)
            self._kept.append(context)


@dataclass(slots=True)
class Work:
    """What is left of a running request."""

    slot: int
    prefill: float
    """Seconds until its first token, once it is its turn."""
    decode: float
    """Output tokens."""
    step: float
    """Seconds of one batch while its prompt is computed; the answers beside it get a token for each."""
    setup: float = 0.0
    """Seconds before the engine sees it."""


class Running:
    """What goes on at once on a modelled engine. ``decode_rate(n)``: tokens per second of ``n`` together."""

    def __init__(self, decode_rate: Callable[[int], float]) -> None:
        self._decode_rate = decode_rate
        self.work: dict[str, Work] = {}

    def until_next(self) -> float | None:
        """Seconds until one of them gets to its next stage; ``None`` where nothing runs."""
        return min(self._lefts(*self._pace()), default=None)

    def advance(self, seconds: float) -> tuple[list[str], list[str]]:
        """Let so much time pass, no more than :meth:`until_next`: who has a first token now, who is over."""
        filling, rate = self._pace()
        first, over = [], []
        for name, work in self.work.items():
            if work.setup > 0:
                work.setup = _less(work.setup, seconds)
                continue
            if work is filling:
                work.prefill = _less(work.prefill, seconds)
                if not work.prefill:
                    first.append(name)
            elif work.prefill <= 0:
                work.decode = _less(work.decode, seconds * rate)
            if work.prefill <= 0 and work.decode <= EPSILON:
                over.append(name)
        return first, over

    def _pace(self) -> tuple[Work | None, float]:
        """Whose prompt is being computed, and how many tokens a second each answer gets."""
        ready = [work for work in self.work.values() if work.setup <= 0]
        filling = [work for work in ready if work.prefill > 0]
        if filling:
            first = min(filling, key=lambda work: work.slot)
            return first, 1.0 / max(first.step, EPSILON)
        decoding = max(1, len(ready))
        return None, self._decode_rate(decoding) / decoding

    def _lefts(self, filling: Work | None, rate: float) -> Iterator[float]:
        for work in self.work.values():
            if work.setup > 0:
                yield work.setup
            elif work is filling:
                yield work.prefill
            elif work.prefill <= 0:
                yield work.decode / rate


def _less(left: float, done: float) -> float:
    return left - done if left - done > EPSILON else 0.0
