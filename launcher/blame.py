"""Why tokens were computed, worked out from a journal's chains where it does not say so itself. Pure.

Journals that were imported from an engine's log, or written by hand, know what was reused but not why the
rest was not. Their chains still tell: what a slot held, what was held and overwritten, what was never sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from warmslot.router import losses
from warmslot.router.records import BackendChange, Record
from warmslot.router.trie import common_blocks
from warmslot.router.values import BLOCK, Loss

if TYPE_CHECKING:
    from array import array

    from warmslot.router.records import Entry

_REMEMBERED: Final = 1024
"""Contexts with the same first block that are remembered as having been resident."""


@dataclass(frozen=True, slots=True)
class _Context:
    chain: array[int]
    since: float
    until: float
    """When the request that left it began to run, and when it ended."""
    pool: str


class Blame:
    """Fed a journal's entries in order; gives records their losses where they have none."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, int], list[_Context]] = {}
        self._ever: dict[int, deque[_Context]] = {}
        self._sessions: dict[str, _Context] = {}
        self._restarted: dict[str, float] = {}

    def explain(self, entry: Entry) -> Entry:
        """The entry, a request with its losses filled in. What it left in its slot is remembered."""
        if isinstance(entry, BackendChange):
            if not entry.up:
                self._restarted[entry.backend] = entry.time
                for key in [key for key in self._slots if key[0] == entry.backend]:
                    del self._slots[key]
            return entry
        if not isinstance(entry, Record):
            return entry
        found = entry
        if not entry.losses and entry.cached_tokens is not None and entry.processed_tokens and entry.chain:
            found = replace(entry, losses=self._losses(entry))
        self._remember(entry)
        return found

    def _losses(self, record: Record) -> dict[str, int]:
        begun = record.time + record.granted
        cached = record.cached_tokens or 0
        own = elsewhere = in_use = 0
        for (backend, slot), held in self._slots.items():
            if not any(context.pool == record.pool for context in held):
                continue
            before = [context for context in held if context.until <= begun + 1e-6]
            tokens = _shared(record, before[-1]) if before else 0
            if (backend, slot) == (record.backend, record.slot):
                own = tokens
            elif before and any(context.since < begun < context.until for context in held):
                in_use = max(in_use, tokens)
            else:
                elsewhere = max(elsewhere, tokens)
        gone, gone_until = 0, 0.0
        for context in self._ever.get(record.chain[0], ()):
            tokens = _shared(record, context) if context.pool == record.pool else 0
            if tokens >= gone:
                gone, gone_until = tokens, context.until
        reason = Loss.EVICTED
        if self._restarted.get(record.backend, float("-inf")) > gone_until:
            reason = Loss.RESTARTED
        session = self._sessions.get(record.session) if record.session else None
        told = losses.split(
            record.processed_tokens or 0,
            cached,
            predicted=max(own, elsewhere),
            resident=max(own, elsewhere, in_use),
            gone=gone,
            gone_reason=reason,
            session=_tokens(record, len(session.chain)) if session is not None else 0,
        )
        return {str(loss): tokens for loss, tokens in told.items()}

    def _remember(self, record: Record) -> None:
        end = record.time + record.ended
        context = _Context(record.after, record.time + record.granted, end, record.pool)
        slot = self._slots.setdefault((record.backend, record.slot), [])
        slot.append(context)
        del slot[:-2]
        if record.chain:
            self._ever.setdefault(record.chain[0], deque(maxlen=_REMEMBERED)).append(context)
        if record.session:
            self._sessions[record.session] = context


def _shared(record: Record, context: _Context) -> int:
    return _tokens(record, common_blocks(context.chain, record.chain))


def _tokens(record: Record, blocks: int) -> int:
    """Prompt tokens in the first ``blocks`` blocks of a record's prompt; a whole prompt is one less."""
    if not record.length:
        return 0
    if blocks >= len(record.chain):
        return max(0, record.prompt_tokens - 1)
    return int(record.prompt_tokens * blocks * BLOCK / record.length)
