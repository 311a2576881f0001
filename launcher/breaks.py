"""Where a prompt stopped matching an earlier one, and what kind of change that is. Pure.

Works on the outlines and chains that a journal keeps; text is not needed, and only makes the place exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from warmslot.router.outline import ARGUMENTS, CONTENT, PROMPT, REASONING, REST, Outline, Part
from warmslot.router.trie import common_blocks
from warmslot.router.values import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from warmslot.router.outline import Field
    from warmslot.router.records import Record

_TELLING = 8
"""Characters from which on an equal message says that two conversations are one."""


class Kind(StrEnum):
    """What changed."""

    CLOCK = "clock"
    NONCE = "nonce"
    TOOLS_REORDERED = "reordered tools"
    TOOLS_CHANGED = "changed tools"
    RESERIALISED = "reserialised arguments"
    REASONING_DROPPED = "dropped reasoning"
    EDITED = "edited history"
    NEW = "new conversation"
    TEMPLATE = "template"
    UNTOLD = "untold"


ADVICE: Final[dict[Kind, str]] = {
    Kind.CLOCK: "Leave dates and times out of the prompt, or put them into the last message.",
    Kind.NONCE: "Leave ids, counters and request headers out of the prompt, or put them at its end.",
    Kind.TOOLS_REORDERED: "Send the tools in one fixed order, for instance sorted by name.",
    Kind.TOOLS_CHANGED: "Keep the list of tools for the whole conversation; tools stand before all messages.",
    Kind.RESERIALISED: "Send earlier tool calls back byte for byte as they were received.",
    Kind.REASONING_DROPPED: (
        "Send the reasoning back with the assistant's message and have the template keep it "
        "(llama-server --reasoning-preserve, where the template can); or live with it: only what follows "
        "the dropped part is computed again."
    ),
    Kind.EDITED: "The client rewrote its history. Append instead, or compact rarely and all at once.",
    Kind.NEW: "Another conversation: only the shared beginning can be reused.",
    Kind.TEMPLATE: "The messages are the same: the chat template renders them differently as they grow.",
    Kind.UNTOLD: "The journal has no outline of one of the two requests.",
}


@dataclass(frozen=True, slots=True)
class Break:
    """Where and how a prompt left an earlier one.

    ``where`` is ``message`` or ``tools``; ``index`` counts from 0 within. ``first`` and ``last`` bound the
    first character that differs within the field, as far as hashes tell (``None``: they do not). ``blocks``
    is how many whole blocks of the canonical prompts agree.
    """

    kind: Kind
    where: str
    index: int
    role: str
    field: str
    blocks: int
    first: int | None = None
    last: int | None = None
    detail: str = ""


def find_break(before: Record, after: Record) -> Break | None:
    """How ``after`` left what ``before`` had put into its slot; ``None`` if it only appended to it."""
    blocks = common_blocks(before.after, after.chain)
    # A change in the last bytes, short of a whole block, shows in the outlines only.
    whole = blocks >= len(before.after) or blocks >= len(after.chain) > 0
    old, new = before.outline, after.outline
    if whole and (not old.messages or _first_change(old.messages, new.messages) is None):
        return None
    if not old.messages or not new.messages:
        return Break(Kind.UNTOLD, "message", -1, "", "", blocks)
    if found := _tools(old, new, blocks):
        return found
    index = _first_change(old.messages, new.messages)
    if index is None and len(new.messages) < len(old.messages):
        return None  # it went back to an earlier point
    if index is None:
        return _rendering(before, after, blocks)
    kind, field = _classify(old.messages[index], new.messages[index])
    detail = ""
    if kind is Kind.EDITED:
        kind, detail = _rewritten(old.messages, new.messages, index)
    return replace(_placed(kind, index, new.messages[index], field, blocks), detail=detail)


def _first_change(old: Sequence[Part], new: Sequence[Part]) -> int | None:
    """The first message that is not as it was, if any; the growing end of a plain prompt does not count."""
    for index, part in enumerate(old):
        if index >= len(new):
            return None
        if part.same(new[index]):
            continue
        if part.role == PROMPT and index == len(old) - 1:
            continue
        return index
    return None


def _tools(old: Outline, new: Outline, blocks: int) -> Break | None:
    for index, (first, second) in enumerate(zip(old.tools, new.tools, strict=False)):
        if first.same(second):
            continue
        if _hashes(old.tools, "exact") == _hashes(new.tools, "exact"):
            kind = Kind.TOOLS_REORDERED
        elif _hashes(old.tools, "shape") == _hashes(new.tools, "shape"):
            same_order = [_content(part).shape for part in old.tools] == [
                _content(part).shape for part in new.tools
            ]
            kind = Kind.RESERIALISED if same_order else Kind.TOOLS_REORDERED
        else:
            kind, _ = _classify(first, second)
            kind = kind if kind in {Kind.CLOCK, Kind.NONCE} else Kind.TOOLS_CHANGED
        return Break(kind, "tools", index, second.role, CONTENT, blocks)
    if len(old.tools) != len(new.tools):
        index = min(len(old.tools), len(new.tools))
        return Break(Kind.TOOLS_CHANGED, "tools", index, "tool definition", CONTENT, blocks)
    return None


def _hashes(parts: Iterable[Part], name: str) -> Counter[bytes]:
    return Counter(getattr(_content(part), name) for part in parts)


def _content(part: Part) -> Field:
    return part.field(CONTENT) or part.fields[0]


def _classify(old: Part, new: Part) -> tuple[Kind, str]:
    """What kind of change made one message of the other, and in which field (in rendering order)."""
    if old.role != new.role:
        return Kind.EDITED, CONTENT
    names = [*(REASONING, CONTENT, ARGUMENTS, REST), *(f.name for f in (*old.fields, *new.fields))]
    for name in dict.fromkeys(names):
        a, b = old.field(name), new.field(name)
        if a is None and b is None:
            continue
        if a is None or b is None:
            said, says = old.field(CONTENT), new.field(CONTENT)
            same_words = said is says or (said is not None and says is not None and said.shape == says.shape)
            dropped = name == REASONING and b is None and same_words
            return Kind.REASONING_DROPPED if dropped else Kind.EDITED, name
        if a.exact != b.exact:
            return _changed(a, b), name
    return Kind.EDITED, CONTENT


def _changed(a: Field, b: Field) -> Kind:
    if a.thinks and not b.thinks and a.shape == b.shape:
        return Kind.REASONING_DROPPED
    if a.name == ARGUMENTS and a.shape == b.shape:
        return Kind.RESERIALISED
    if a.clock == b.clock:
        return Kind.CLOCK
    if a.nonce == b.nonce:
        return Kind.NONCE
    return Kind.RESERIALISED if a.shape == b.shape else Kind.EDITED


def _rewritten(old: Sequence[Part], new: Sequence[Part], index: int) -> tuple[Kind, str]:
    """An edited conversation still has messages of the old one after the change; a new one has none."""
    kept = {_key(part) for part in old[index:]} & {_key(part) for part in new[index:]} - {None}
    users = sum(part.role in {"user", PROMPT} for part in old[:index])
    if not kept and not users:
        return Kind.NEW, ""
    if _key(new[index]) in {_key(part) for part in old[index + 1 :]} - {None}:
        return Kind.EDITED, "earlier messages were left out"
    return Kind.EDITED, ""


def _key(part: Part) -> tuple[bytes, ...] | None:
    """What two messages have in common if they are the same one; ``None`` where it is too short to tell."""
    if sum(field.length for field in part.fields) < _TELLING:
        return None
    return tuple(field.exact for field in part.fields)


def _rendering(before: Record, after: Record, blocks: int) -> Break | None:
    """All earlier messages are the same, yet the prompts part: in the answer, or by the template."""
    old, new = before.outline.messages, after.outline.messages
    if (blocks + 1) * BLOCK > before.length:
        return _answer(before, new, blocks)
    for index, part in enumerate(old):
        dropped = [f.name for f in part.fields if f.name == REASONING or f.thinks]
        if dropped and _ends_after(new, index, blocks):
            found = _placed(Kind.REASONING_DROPPED, index, new[index], dropped[0], blocks)
            return replace(found, detail="by the template")
    index = _at(new, blocks)
    return _placed(Kind.TEMPLATE, index, new[index], CONTENT, blocks)


def _answer(before: Record, new: Sequence[Part], blocks: int) -> Break | None:
    """How the answer that came back differs from what was generated, if that can be told."""
    index = len(before.outline.messages)
    if before.reply is None or index >= len(new):
        return None
    sent, reply = new[index], before.reply
    content, said = sent.field(CONTENT), reply.field(CONTENT)
    if reply.field(REASONING) is not None:
        kept = sent.field(REASONING) is not None or (content is not None and content.thinks)
        found = _placed(Kind.REASONING_DROPPED, index, sent, REASONING, blocks)
        return replace(found, detail="by the template" if kept else "of the last answer")
    if content is None or said is None or said.shape == content.shape or sent.field(ARGUMENTS) is not None:
        return None  # a tool call's raw text is not known, and white space at the end is the template's
    return replace(_placed(Kind.EDITED, index, sent, CONTENT, blocks), detail="the answer came back changed")


def _ends_after(parts: Sequence[Part], index: int, blocks: int) -> bool:
    """Whether a message may reach beyond the first ``blocks`` blocks."""
    following = next((part.at for part in parts[index + 1 :] if part.at >= 0), -1)
    return following < 0 or following >= blocks * BLOCK


def _at(parts: Sequence[Part], blocks: int) -> int:
    """The message in which the byte after ``blocks`` blocks stands."""
    found = 0
    for index, part in enumerate(parts):
        if 0 <= part.at <= blocks * BLOCK + BLOCK:
            found = index
    return found


def _placed(kind: Kind, index: int, part: Part, name: str, blocks: int) -> Break:
    first = last = None
    field = part.field(name)
    if field is not None and name == CONTENT and part.at >= 0:
        start = blocks * BLOCK - part.at
        if -BLOCK < start <= field.length:
            first, last = max(0, start), min(field.length, max(0, start) + BLOCK)
    return Break(kind, "message", index, part.role, name, blocks, first, last)


# -- which earlier request to compare with -----------------------------------------------------------------


def reference(record: Record, earlier: Sequence[Record]) -> Record | None:
    """The request that ``record`` most likely continues: its session's last, else the most alike.

    ``earlier`` in the order in which they ended.
    """
    earlier = [one for one in earlier if one.pool == record.pool and one.root == record.root]
    if record.session:
        own = [one for one in earlier if one.session == record.session]
        if own:
            return max(own, key=lambda one: one.time)
    best, most = None, (0, 0)
    for one in earlier:
        alike = _alike(one.outline.messages, record.outline.messages)
        score = (alike, common_blocks(one.after, record.chain))
        if score >= most and score != (0, 0):
            best, most = one, score
    return best


def _alike(old: Sequence[Part], new: Sequence[Part]) -> int:
    """Messages that stand in both, instructions aside: many conversations share those."""
    then = {key for part in old if part.role != "system" and (key := _key(part)) is not None}
    now = {key for part in new if part.role != "system" and (key := _key(part)) is not None}
    return len(then & now)
