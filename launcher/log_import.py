"""A journal from an engine's log alone, for machines that have no router yet. Pure but for reading the file.

The log tells for each request its slot, how many prompt tokens were computed, what the slot held afterwards
and how long it took. It follows what was reused: the beginning of what the slot held. What a prompt shared
with contexts that had been overwritten is not in the log. It is guessed: a prompt that was computed from
scratch and is a little longer than an overwritten context is taken for that conversation's next call. Such
requests are marked ``guessed``.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from warmslot.router.records import BackendChange, Entry, Opening, Record
from warmslot.router.values import BLOCK

from .logs import (
    Cancelled,
    DecodeTiming,
    Launched,
    Loading,
    PromptTiming,
    Purged,
    Released,
    Stage,
    parse,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .logs import LogEvent

BYTES_PER_TOKEN: Final = 4
"""Prompts without text are laid out as so many bytes to a token."""

_BLOCK_TOKENS: Final = BLOCK // BYTES_PER_TOKEN
_UNIX: Final = 1e9
"""Seconds above which a log's time is Unix time and not the time since the engine's start."""

_SHARE: Final = 0.5
"""An overwritten context is a candidate if it makes at least this share of the prompt."""

_REMEMBERED: Final = 256

POOL: Final = "engine"


@dataclass(slots=True)
class _Context:
    chain: array[int]
    tokens: int
    session: str


@dataclass(slots=True)
class _Task:
    slot: int
    began: float
    in_flight: int
    prompt: PromptTiming | None = None
    decode: DecodeTiming | None = None
    cancelled: bool = False


@dataclass(slots=True)
class Import:
    """Turns log lines into entries. ``start``: Unix time of the log's first moment; ``guess``: as above."""

    backend: str
    start: float
    guess: bool = True
    requests: int = 0
    guessed: int = 0
    incomplete: int = 0
    """Requests whose timings the log does not hold (cancelled, failed, or cut off)."""
    _slots: dict[int, _Context] = field(default_factory=dict)
    _gone: list[_Context] = field(default_factory=list)
    _tasks: dict[int, _Task] = field(default_factory=dict)
    _hashes: int = 0
    _sessions: int = 0
    _last: float = 0.0

    def entries(self, lines: Iterable[str]) -> Iterator[Entry]:
        """All that the lines tell, in their order. Lines of no interest are passed over."""
        yield Opening(self.start, {POOL: [self.backend]})
        for line in lines:
            parsed = parse(line)
            if parsed.seconds is not None:
                self._last = parsed.seconds if parsed.seconds > _UNIX else self.start + parsed.seconds
            match parsed.event:
                case Loading(Stage.ALLOCATING, slots, context) if slots is not None:
                    self._slots.clear()
                    self._tasks.clear()
                    yield BackendChange(self._last, self.backend, up=True, slots=slots, context=context or 0)
                case Released(_, task, tokens) if task in self._tasks:
                    yield from self._released(task, tokens)
                case event:
                    self._note(event)

    def _note(self, event: LogEvent | None) -> None:
        match event:
            case Launched(slot, task):
                self._tasks[task] = _Task(slot, self._last, len(self._tasks) + 1)
            case PromptTiming(_, task) as timing if task in self._tasks:
                self._tasks[task].prompt = timing
            case DecodeTiming(_, task) as timing if task in self._tasks:
                self._tasks[task].decode = timing
            case Cancelled(task) if task in self._tasks:
                self._tasks[task].cancelled = True
            case Purged(slot):
                self._slots.pop(slot, None)
            case _:
                pass

    def _released(self, number: int, held: int) -> Iterator[Record]:
        task = self._tasks.pop(number)
        before = self._slots.pop(task.slot, None)
        if task.prompt is None:
            self.incomplete += 1
            if before is not None:
                self._forget(before)
            return
        output = task.decode.tokens if task.decode is not None else 1
        prompt_tokens = max(task.prompt.tokens, held - max(0, output - 1))
        cached = prompt_tokens - task.prompt.tokens
        origin, shared, guessed = self._origin(before, cached, prompt_tokens)
        chain = array("Q", origin.chain[: shared // _BLOCK_TOKENS]) if origin is not None else array("Q")
        self._extend(chain, prompt_tokens)
        after = array("Q", chain)
        self._extend(after, held)
        session = origin.session if origin is not None and shared * 2 > prompt_tokens else self._session()
        self._slots[task.slot] = _Context(after, held, session)
        if before is not None and (before is not origin or shared < _SHARE * before.tokens):
            self._forget(before)
        decode = task.decode.seconds if task.decode is not None else 0.0
        self.requests += 1
        self.guessed += guessed
        yield Record(
            id=f"{self.backend}-{number}",
            time=task.began,
            pool=POOL,
            backend=self.backend,
            slot=task.slot,
            route="other",
            status="cancelled" if task.cancelled else "ok",
            decision="unpinned",
            chain=chain,
            length=prompt_tokens * BYTES_PER_TOKEN,
            after=after,
            after_length=max(held, prompt_tokens) * BYTES_PER_TOKEN,
            session=session,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached,
            output_tokens=output,
            first_token=task.prompt.seconds,
            ended=max(self._last - task.began, task.prompt.seconds + decode),
            prefill_seconds=task.prompt.seconds,
            decode_seconds=decode,
            in_flight=task.in_flight,
            demand=task.in_flight,
            pinned=False,
            guessed=guessed,
        )

    def _origin(
        self, before: _Context | None, cached: int, prompt_tokens: int
    ) -> tuple[_Context | None, int, bool]:
        """The context that a prompt continues, how many tokens they share, and whether that is a guess."""
        best: _Context | None = None
        if self.guess and cached < _SHARE * prompt_tokens:
            for context in self._gone:
                fits = max(cached, _SHARE * prompt_tokens) <= context.tokens <= prompt_tokens
                if fits and (best is None or context.tokens >= best.tokens):
                    best = context
        if best is not None:
            self._gone = [context for context in self._gone if context is not best]
            return best, best.tokens, True
        return before, min(cached, before.tokens if before is not None else 0), False

    def _forget(self, context: _Context) -> None:
        self._gone.append(context)
        del self._gone[:-_REMEMBERED]

    def _extend(self, chain: array[int], tokens: int) -> None:
        """New blocks that no other context has."""
        while len(chain) < tokens // _BLOCK_TOKENS:
            self._hashes += 1
            chain.append(self._hashes)

    def _session(self) -> str:
        self._sessions += 1
        return f"{self.backend}-conversation-{self._sessions}"
