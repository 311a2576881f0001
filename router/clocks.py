"""Dates and times in prompts: what they look like, and conversations that differ in nothing else. Pure.

A clock near the top of a system prompt makes every turn look like a new conversation. The engine has to
compute all that follows the clock, whatever the router does; but that the former turn is over can be known,
so that the next one takes its slot and not that of somebody who will come back.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from .values import Prompt

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t|tember)?"
    r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
CLOCK: Final = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}"
    r"|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}"
    r"|(?<=[T\s])?\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\.?)?"
    rf"|(?:{_DAY}\.?\s+(?:of\s+)?)?\b{_MONTH}\b(?:\s+{_DAY})?(?:,?\s+\d{{4}})?"
    r"|\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b,?"
    r"|\b\d{1,2}\s?[AaPp]\.?[Mm]\b\.?"
    r"|\b1[0-9]{9}(?:\.\d+)?\b|\b1[0-9]{12}\b"
    r"|\b(?:19|20)\d{2}\b"
    r"|\b\d+(?:\.\d+)?\s*(?:ms|s|sec|second|min|minute|hour|h|day|week)s?\s+ago\b"
    r"|(?<=[\d\s#])(?:UTC|GMT|CES?T|E[SD]T|P[SD]T|Z)(?:[+-]\d{1,2}(?::?\d{2})?)?\b|[+-]\d{2}:\d{2}\b"
)
"""A date or a time, or a part of one, as people and programs write them."""

_TOP: Final = 4096
"""Bytes from the start of a prompt in which clocks are looked for: further down they cost little."""
_HEAD: Final = 64
"""Bytes without clocks by which conversations that may be one are found."""
ENDING: Final = 24
"""Bytes at the end of a prompt that the next one may lack: what opens an answer, as reasoning tags do."""
_MOST: Final = 256


class Timeless(NamedTuple):
    """A prompt with the clocks near its top left out."""

    text: bytes

    @classmethod
    def of(cls, prompt: Prompt) -> Timeless | None:
        """``None`` where there is no clock near the top, or no text to look at."""
        if prompt.data is None or prompt.tokens is not None:
            return None
        top = prompt.data[:_TOP].decode("utf-8", "surrogateescape")
        rest, found = CLOCK.subn("", top)
        if not found:
            return None
        text = rest.encode("utf-8", "surrogateescape") + prompt.data[_TOP:]
        return cls(text) if len(text) >= _HEAD + ENDING else None


class _Known(NamedTuple):
    length: int
    digest: bytes


class TimelessIndex:
    """Which of the conversations with a clock near the top a prompt continues, but for the clock."""

    def __init__(self) -> None:
        self._heads: dict[bytes, OrderedDict[str, _Known]] = {}
        self._head_of: dict[str, bytes] = {}

    def put(self, session: str, prompt: Timeless | None) -> None:
        """The conversation's last prompt is this one now; ``None``: it has no clock any more."""
        self.drop(session)
        if prompt is None:
            return
        head, length = prompt.text[:_HEAD], len(prompt.text) - ENDING
        self._head_of[session] = head
        known = _Known(length, _hash(prompt.text[:length]).digest())
        self._heads.setdefault(head, OrderedDict())[session] = known

    def drop(self, session: str) -> None:
        """Forget a conversation, if it is known."""
        head = self._head_of.pop(session, None)
        if head is not None:
            same = self._heads[head]
            del same[session]
            if not same:
                del self._heads[head]

    def find(self, prompt: Timeless) -> list[str]:
        """The conversations whose last prompts this one contains from its start, the longest first.

        One pass over the text, however many there are.
        """
        same = self._heads.get(prompt.text[:_HEAD])
        if same is None:
            return []
        latest = [(known, session) for session, known in list(same.items())[-_MOST:]]
        found: list[str] = []
        so_far, at, view = _hash(b""), 0, memoryview(prompt.text)
        for known, session in sorted(latest, key=lambda pair: pair[0].length):
            if known.length > len(view):
                break
            so_far.update(view[at : known.length])
            at = known.length
            if so_far.digest() == known.digest:
                found.append(session)
        return found[::-1]


def _hash(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)
