"""Reads the engine's log: lines of text or JSON in, typed events out.

Pure. A line that means nothing to us costs one failed search and yields no event. Two formats carry the
same messages: text ``M.SS.mmm.uuu I message`` and, with ``--log-jsonl``, one JSON object per line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable


class Level(StrEnum):
    """Severity, as the engine's one-letter prefix says it."""

    DEBUG = "D"
    INFO = "I"
    WARNING = "W"
    ERROR = "E"


class Selection(StrEnum):
    """How the engine came to choose a slot."""

    ID = "id"
    LCP = "lcp"
    LRU = "lru"


class Stage(StrEnum):
    """How far loading has come, in this order."""

    STARTED = "starting"
    READING = "reading the model"
    ALLOCATING = "setting up slots"
    LOADED = "model loaded"


@dataclass(frozen=True, slots=True)
class Selected:
    """A slot was chosen for a task (``task`` is -1: it gets its number at the launch that follows)."""

    slot: int
    task: int
    by: Selection
    similarity: float | None = None
    """Only for LCP: the share of the prompt that was resident."""
    keep: float | None = None
    """Only for LCP: the share of the resident tokens that the prompt keeps."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A task began on a slot."""

    slot: int
    task: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """A long prompt is being processed: ``tokens`` so far."""

    slot: int
    task: int
    tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class PromptTiming:
    """A prompt was processed: ``tokens`` without the cached ones."""

    slot: int
    task: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeTiming:
    """An answer was generated."""

    slot: int
    task: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Released:
    """A slot is free and holds ``tokens`` now."""

    slot: int
    task: int
    tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A task was cancelled because its client left, or ended in an error."""

    task: int


@dataclass(frozen=True, slots=True)
class Purged:
    """The engine threw away what a slot held, to make room."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class KvFull:
    """No room was left in the KV cache for a batch."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Loading reached a stage."""

    stage: Stage
    slots: int | None = None
    """With :attr:`Stage.ALLOCATING`: the slot count, and the tokens that each may hold."""
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Listening:
    """The engine serves at this address (said after loading)."""

    url: str


LogEvent = (
    Selected
    | Launched
    | PromptProgress
    | PromptTiming
    | DecodeTiming
    | Released
    | Cancelled
    | Purged
    | KvFull
    | Loading
    | Listening
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line: its severity (``None`` when it has no prefix), the message without it, and what it tells."""

    level: Level | None
    message: str
    event: LogEvent | None = None
    seconds: float | None = None
    """Since the engine's start."""


_PREFIX = re.compile(r"(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) ([DIWE]) (.*)", re.DOTALL)
_SLOT = r"id\s+(\d+) \| task (-?\d+) \| "
_JSON_LEVELS = {"debug": Level.DEBUG, "info": Level.INFO, "warn": Level.WARNING, "error": Level.ERROR}


def _selected(found: re.Match[str]) -> Selected:
    slot, task = int(found[1]), int(found[2])
    if found[3] == "id":
        return Selected(slot, task, Selection.ID)
    if found[3] == "LRU":
        return Selected(slot, task, Selection.LRU)
    return Selected(
        slot,
        task,
        Selection.LCP,
        float(found[4]) if found[4] else None,
        float(found[5]) if found[5] else None,
    )


_RULES: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], LogEvent]], ...] = (
    (
        "selected slot by",
        re.compile(
            _SLOT + r"selected slot by (id|LRU|LCP)(?:[^,]*, f_sim_best = ([\d.]+)[^,]*, f_keep = ([\d.]+))?"
        ),
        _selected,
    ),
    ("processing task", re.compile(_SLOT + "processing task"), lambda m: Launched(int(m[1]), int(m[2]))),
    (
        "prompt processing, n_tokens",
        re.compile(_SLOT + r"prompt processing, n_tokens =\s*(\d+), progress = ([\d.]+)"),
        lambda m: PromptProgress(int(m[1]), int(m[2]), int(m[3]), float(m[4])),
    ),
    (
        "prompt eval time",
        re.compile(_SLOT + r"\s*prompt eval time =\s*([\d.]+) ms /\s*(\d+) tokens"),
        lambda m: PromptTiming(int(m[1]), int(m[2]), int(m[4]), float(m[3]) / 1000),
    ),
    (
        "eval time",
        re.compile(_SLOT + r"\s*eval time =\s*([\d.]+) ms /\s*(\d+) tokens"),
        lambda m: DecodeTiming(int(m[1]), int(m[2]), int(m[4]), float(m[3]) / 1000),
    ),
    (
        "stop processing",
        re.compile(_SLOT + r"stop processing: n_tokens = (\d+), truncated = (\d)"),
        lambda m: Released(int(m[1]), int(m[2]), int(m[3]), m[4] != "0"),
    ),
    ("cancel task", re.compile(r"cancel task, id_task = (\d+)"), lambda m: Cancelled(int(m[1]))),
    (
        "purging slot",
        re.compile(r"purging slot (\d+) with (\d+) tokens"),
        lambda m: Purged(int(m[1]), int(m[2])),
    ),
    (
        "failed to find free space",
        re.compile("failed to find free space in the KV cache"),
        lambda _: KvFull(),
    ),
    ("initializing ...", re.compile(r"initializing \.\.\."), lambda _: Loading(Stage.STARTED)),
    ("loading model '", re.compile("load_model: loading model '"), lambda _: Loading(Stage.READING)),
    (
        "initializing, n_slots",
        re.compile(r"initializing, n_slots = (\d+), n_ctx_slot = (\d+)"),
        lambda m: Loading(Stage.ALLOCATING, int(m[1]), int(m[2])),
    ),
    ("model loaded", re.compile(r": model loaded$"), lambda _: Loading(Stage.LOADED)),
    ("listening on", re.compile(r"listening on (https?://\S+)"), lambda m: Listening(m[1])),
)


def parse(line: str) -> LogLine:
    """Read one line of the engine's output, in either format. Never raises."""
    line = line.rstrip("\r\n")
    if line.startswith("{"):
        parsed = _parse_json(line)
        if parsed is not None:
            return parsed
    if found := _PREFIX.match(line):
        minutes, seconds, millis, micros = (int(found[n]) for n in range(1, 5))
        at = minutes * 60 + seconds + millis / 1e3 + micros / 1e6
        return LogLine(Level(found[5]), found[6], read_message(found[6]), at)
    return LogLine(None, line, read_message(line))


def _parse_json(line: str) -> LogLine | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    message = record.get("msg")
    if record.get("type") != "log" or not isinstance(message, str):
        return LogLine(None, line)
    message = message.rstrip("\n")
    time = record.get("time")
    level = _JSON_LEVELS.get(str(record.get("level")))
    return LogLine(level, message, read_message(message), time / 1e6 if isinstance(time, int) else None)


def read_message(message: str) -> LogEvent | None:
    """What a message tells, or ``None``."""
    for needle, pattern, build in _RULES:
        if needle in message and (found := pattern.search(message)):
            return build(found)
    return None
