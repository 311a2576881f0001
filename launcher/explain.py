"""``warmslot explain``: one request's placement, what came of it, and where its prompt stopped matching.

Pure but for reading the journal. Text is shown only where the journal keeps it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.markup import escape
from rich.table import Table
from warmslot.router.journal import read
from warmslot.router.outline import ARGUMENTS, REASONING
from warmslot.router.records import Record
from warmslot.router.values import BLOCK, Loss

from .blame import Blame
from .breaks import ADVICE, Break, find_break, reference
from .findings import SHORT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console

_EARLIER: Final = 1024
"""Requests before the one in question among which its predecessor is looked for."""

_FIELDS: Final = {
    REASONING: ("reasoning_content", "reasoning", "thinking", "content"),
    ARGUMENTS: ("tool_calls", "function_call", "arguments"),
}
"""Where clients put what an outline calls by one name."""

_AROUND: Final = 40
"""Characters of text shown on each side of a difference."""


class NotFoundError(Exception):
    """The journal has no such request; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that is known of one request."""

    record: Record
    before: Record | None
    """The request that it was compared with."""
    broke: Break | None
    texts: tuple[str, str] | None
    """What stood there before and what stands there now, where the journal keeps text."""
    character: int | None
    """The exact first character that differs, where the journal keeps text."""


def explain(
    path: Path, *, request: str | None = None, session: str | None = None, last: bool = False
) -> Explanation:
    """One request by its id (or the beginning of it), a session's last one, or the last of all.

    Raises :class:`NotFoundError`, :class:`~warmslot.router.journal.JournalError`.
    """
    blame = Blame()
    earlier: deque[Record] = deque(maxlen=_EARLIER)
    kept: tuple[Record, list[Record]] | None = None
    for entry in read(path):
        entry = blame.explain(entry)  # noqa: PLW2901  # the same entry, with its losses
        if not isinstance(entry, Record):
            continue
        if (
            last
            or (request is not None and entry.id.startswith(request))
            or (session is not None and entry.session == session)
        ):
            kept = entry, list(earlier)
            if request is not None and entry.id == request:
                break
        earlier.append(entry)
    if kept is None:
        what = f"no request {request!r}" if request is not None else f"no request of session {session!r}"
        raise NotFoundError(f"{path}: {'no request at all' if last else what}")
    record, before_it = kept
    return of(record, [one for one in before_it if one.time + one.ended <= record.time + record.ended])


def of(record: Record, earlier: list[Record]) -> Explanation:
    """The explanation of a record, given those that ended before it."""
    before = reference(record, earlier)
    broke = find_break(before, record) if before is not None else None
    texts, character = None, None
    if before is not None and broke is not None and before.text and record.text:
        old, new = (_text_at(one.text or {}, broke) for one in (before, record))
        if old is not None and new is not None:
            character = next(
                (at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
                min(len(old), len(new)),
            )
            texts = _around(old, character), _around(new, character)
    return Explanation(record, before, broke, texts, character)


def _text_at(text: Mapping[str, Any], broke: Break) -> str | None:
    """The text of the field in which a break stands."""
    if broke.where == "tools":
        parts: list[Any] = list(text.get("tools") or text.get("functions") or [])
    else:
        messages = text.get("messages", text.get("input"))
        parts = [text[name] for name in ("system", "instructions") if text.get(name)]
        parts += messages if isinstance(messages, list) else [text.get("prompt", messages)]
        parts.append(text.get("reply"))
    part = parts[broke.index] if 0 <= broke.index < len(parts) else None
    if isinstance(part, dict) and broke.where != "tools":
        names = _FIELDS.get(broke.field, ("content", "text"))
        return next((_plain(part[name]) for name in names if part.get(name)), "")
    return None if part is None else _plain(part)


def _plain(value: object) -> str:
    import orjson  # noqa: PLC0415  # only where text is kept

    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _around(text: str, at: int) -> str:
    start = max(0, at - _AROUND)
    return ("…" if start else "") + text[start : at + _AROUND] + ("…" if at + _AROUND < len(text) else "")


# -- in words ----------------------------------------------------------------------------------------------


def place(found: Break, character: int | None = None) -> str:
    """Where a break is, for people."""
    if found.where == "tools":
        return f"tool definition {found.index}"
    text = f"message {found.index} ({found.role}), field {found.field}"
    if character is not None:
        return f"{text}, character {character}"
    if found.first is not None:
        return f"{text}, between characters {found.first} and {found.last}"
    return text


def show(console: Console, it: Explanation) -> None:
    """Print an explanation."""
    record = it.record
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
    who = f"session {record.session}, " if record.session else ""
    console.print(
        f"[bold]Request {escape(record.id)}[/bold] ({escape(who)}client {escape(record.client)}, "
        f"route {record.route}, {when}, {record.status})",
        soft_wrap=True,
    )
    for line in _facts(it):
        console.print(escape(line), soft_wrap=True, highlight=False)
    if record.candidates:
        console.print(_candidates(record))
    for line in _comparison(it):
        console.print(line, soft_wrap=True, highlight=False)


def _facts(it: Explanation) -> list[str]:
    record = it.record
    beside = f"{record.in_flight} in flight there and {record.demand} queued or running in the pool"
    lines = [
        f"Chosen: {record.backend}/{record.slot} ({record.decision}), with {beside}.",
        f"Predicted: {record.predicted_tokens:,} of {record.prompt_tokens:,} prompt tokens reused.",
    ]
    if record.cached_tokens is None:
        lines.append("Observed: the engine told no numbers.")
    else:
        why = ", ".join(
            f"{tokens:,} {reason} ({SHORT.get(reason, '')})" for reason, tokens in record.losses.items()
        )
        lines.append(
            f"Observed: {record.cached_tokens:,} reused, {record.processed_tokens:,} computed"
            + (f": {why}." if why else ".")
        )
    if record.masked:
        lines.append(f"Masks of its pool left {record.masked:,} bytes of its prompt out of the comparison.")
    if record.sorted_tools:
        lines.append("Its tools were sorted by name before it was sent.")
    first = "–" if record.first_token is None else f"{record.first_token:.2f} s"
    lines.append(
        f"Times: {record.queued:.2f} s in the queue, {record.prefill_seconds:.2f} s prefill, {first} to the "
        f"first token, {record.decode_seconds:.2f} s decode for {record.output_tokens:,} tokens."
    )
    return lines


def _candidates(record: Record) -> Table:
    table = Table(title="What each slot would have cost (seconds)", title_justify="left", header_style="bold")
    for name in ("slot", ""):
        table.add_column(name)
    for name in ("matching tokens", "prefill", "loss", "wait", "cost"):
        table.add_column(name, justify="right")
    for one in sorted(record.candidates, key=lambda one: (not one.idle, one.cost)):
        chosen = (one.slot.backend, one.slot.slot) == (record.backend, record.slot)
        table.add_row(
            f"{one.slot.backend}/{one.slot.slot}",
            "chosen" if chosen else "" if one.idle else "busy",
            f"{one.match_tokens:,}",
            *(f"{s:.3f}" for s in (one.prefill_seconds, one.loss_seconds, one.wait_seconds, one.cost)),
        )
    return table


def _comparison(it: Explanation) -> list[str]:
    before, broke = it.before, it.broke
    if before is None:
        return ["Nothing like it was sent before: there is nothing to compare it with."]
    same = before.session and before.session == it.record.session
    which = "its session's request before" if same else "the most similar request before"
    lines = [f"Compared with {which}, {escape(before.id)}:"]
    if broke is None:
        lines.append("[green]the prompt only adds to what that request left in its slot.[/green]")
        lost = {r: n for r, n in it.record.losses.items() if r in {Loss.EVICTED, Loss.BUSY, Loss.RESTARTED}}
        if lost:
            lines.append("What was computed again was lost with its slot, not by the prompt.")
        return lines
    at = broke.blocks * BLOCK
    lines.append(
        f"[bold]it stops matching in {escape(place(broke, it.character))}: {broke.kind}"
        + (f" ({broke.detail})" if broke.detail else "")
        + f"[/bold] (byte {at:,} to {at + BLOCK:,} of the rendered prompt)."
    )
    if it.texts is not None:
        old, new = (escape(repr(text)) for text in it.texts)
        lines += [f"  before: {old}", f"  now:    {new}"]
    lines.append(ADVICE[broke.kind])
    return lines


def as_json(it: Explanation) -> dict[str, Any]:
    """Everything as plain values."""
    record, broke = it.record, it.broke
    return {
        "id": record.id,
        "session": record.session,
        "time": record.time,
        "backend": record.backend,
        "slot": record.slot,
        "decision": record.decision,
        "prompt_tokens": record.prompt_tokens,
        "predicted_tokens": record.predicted_tokens,
        "cached_tokens": record.cached_tokens,
        "processed_tokens": record.processed_tokens,
        "losses": record.losses,
        "masked_bytes": record.masked,
        "sorted_tools": record.sorted_tools,
        "candidates": [
            {
                "backend": one.slot.backend,
                "slot": one.slot.slot,
                "idle": one.idle,
                "match_tokens": one.match_tokens,
                "prefill_seconds": one.prefill_seconds,
                "loss_seconds": one.loss_seconds,
                "wait_seconds": one.wait_seconds,
                "cost_seconds": one.cost,
            }
            for one in record.candidates
        ],
        "compared_with": None if it.before is None else it.before.id,
        "break": None
        if broke is None
        else {
            "kind": str(broke.kind),
            "where": broke.where,
            "index": broke.index,
            "role": broke.role,
            "field": broke.field,
            "first_character": broke.first if it.character is None else it.character,
            "last_character": broke.last if it.character is None else it.character,
            "shared_bytes": broke.blocks * BLOCK,
            "detail": broke.detail,
            "advice": ADVICE[broke.kind],
            "before": None if it.texts is None else it.texts[0],
            "now": None if it.texts is None else it.texts[1],
        },
    }
