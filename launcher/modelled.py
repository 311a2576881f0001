"""The modelled engine that traces are replayed on and loads are forecast on, in virtual time. Pure.

Its rules are llama-server's: a slot holds prompt and answer, the longest common prefix is reused, at least
one prompt token is computed. Each step computes a token for every answer, or a batch that is filled with
prompts in the order of their slots, and a token for every answer as well; what comes meanwhile waits for the
next step. A step of answers takes one pass for each run of slots whose numbers follow one another. What
decides is the code that really routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, Final, Protocol

from warmslot.router.host_tier import NOTHING, Exchange, HostTier
from warmslot.router.rates import passes_of
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
    """Seconds of computing the rest of its prompt, alone."""
    tokens: int
    """Prompt tokens that these are for, one at least."""
    decode: float
    """Output tokens."""
    setup: float = 0.0
    """Seconds before the engine sees it."""
    computing: float = 0.0
    """Seconds from the beginning of its first batch to the end of its last: what the engine tells."""


@dataclass(slots=True)
class _Step:
    """A batch that is being computed."""

    seconds: float
    left: float
    prompts: list[tuple[Work, int]]
    """Whose prompts are in it, and how many tokens of each."""
    answers: list[Work]
    """Who gets a token by it."""


class Running:
    """What goes on at once on a modelled engine.

    ``decode_rate(n, passes)``: tokens per second of ``n`` answers together, in so many passes a step.
    ``batch``: prompt tokens of one batch at most.
    """

    def __init__(self, decode_rate: Callable[[int, int], float], batch: int) -> None:
        self._decode_rate, self._batch = decode_rate, batch
        self._step: _Step | None = None
        self.work: dict[str, Work] = {}

    def until_next(self) -> float | None:
        """Seconds until one of them gets to its next stage; ``None`` where nothing runs."""
        self._begin()
        return min(self._lefts(), default=None)

    def advance(self, seconds: float) -> tuple[list[str], list[str]]:
        """Let so much time pass, no more than :meth:`until_next`: who has a first token now, who is over."""
        self._begin()
        rate = self._rate()
        done = self._passed(seconds)
        first, over = [], []
        for name, work in self.work.items():
            if work.setup > 0:
                work.setup = _less(work.setup, seconds)
                continue
            if done is not None and any(work is one for one, _ in done.prompts):
                if not work.tokens:
                    first.append(name)
            elif done is not None and any(work is one for one in done.answers):
                work.decode = _less(work.decode, 1.0)
            elif rate and not work.tokens:
                work.decode = _less(work.decode, seconds * rate)
            if not work.tokens and work.decode <= EPSILON:
                over.append(name)
        return first, over

    def _ready(self) -> tuple[list[Work], list[Work]]:
        """Whose prompts wait, and who decodes."""
        ready = [work for work in self.work.values() if work.setup <= 0]
        return [work for work in ready if work.tokens], [work for work in ready if not work.tokens]

    def _begin(self) -> None:
        """Put the prompts that wait into a batch, in the order of their slots, as soon as one may begin."""
        waiting, answers = self._ready()
        if self._step is not None or not waiting or _begun(answers) > 0:
            return
        waiting.sort(key=lambda work: work.slot)
        room, seconds, prompts = self._batch, 0.0, []
        for work in waiting:
            tokens = min(room, work.tokens)
            if not tokens:
                break
            seconds += work.prefill * tokens / work.tokens
            prompts.append((work, tokens))
            room -= tokens
        seconds = max(seconds, 2 * EPSILON)
        self._step = _Step(seconds, seconds, prompts, answers)

    def _passed(self, seconds: float) -> _Step | None:
        """The batch, if it is over."""
        step = self._step
        if step is None:
            return None
        step.left = _less(step.left, seconds)
        if step.left:
            return None
        self._step = None
        for work in self.work.values():
            work.computing += step.seconds if work.computing and work.tokens else 0.0
        for work, tokens in step.prompts:
            work.computing = work.computing or step.seconds
            work.prefill *= 1 - tokens / work.tokens
            work.tokens -= tokens
        return step

    def _rate(self) -> float:
        """Tokens a second that each answer gets while no prompt is computed."""
        if self._step is not None:
            return 0.0
        _, answers = self._ready()
        if not answers:
            return 0.0
        return self._decode_rate(len(answers), passes_of(work.slot for work in answers)) / len(answers)

    def _lefts(self) -> Iterator[float]:
        rate = self._rate()
        waiting, answers = self._ready()
        if self._step is not None:
            yield self._step.left
        elif waiting:
            yield _begun(answers) / rate
        for work in self.work.values():
            if work.setup > 0:
                yield work.setup
            elif rate and not work.tokens:
                yield work.decode / rate


def _begun(answers: list[Work]) -> float:
    """Of the token that is being generated, the part that is left; all answers get theirs at once."""
    part = max((work.decode - floor(work.decode + EPSILON) for work in answers), default=0.0)
    return part if part > EPSILON else 0.0


def _less(left: float, done: float) -> float:
    return left - done if left - done > EPSILON else 0.0
