"""``warmslot explain`` in words and in JSON, with and without text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner
from warmslot.launcher.cli import app
from warmslot.router.values import Loss

from tests.support import breaks, field_note
from tests.support.journals import write
from tests.unit.journal.conftest import Scribe

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def clock_case() -> breaks.Case:
    body = breaks.conversation(breaks.Random("clock"))
    body["messages"][0]["content"] += "\nIt is 10:41:07 now, be quick.\nAnd polite."
    after = breaks.appended(body, "Yes.", breaks.Random("more"))
    content = after["messages"][0]["content"]
    after["messages"][0]["content"] = content.replace("10:41:07", "10:43:09")
    return breaks.Case("clock", 0, body, "Yes.", after, "")


def journal(folder: Path, *, text: bool) -> Path:
    case = clock_case()
    scribe = Scribe(folder / "journal.jsonl", {"text": text})
    scribe.serve(breaks.render(case.before), b"Yes.", case.before, session="talk")
    scribe.serve(b"something else entirely", b"ok", session="other")
    lost = {Loss.DIVERGED: 40, Loss.NEW: len(breaks.render(case.after)) // 4 - 60}
    scribe.serve(breaks.render(case.after), b"ok", case.after, session="talk", cached=20, losses=lost)
    scribe.journal.close()
    return scribe.path


def test_a_break_is_explained_without_text(tmp_path: Path) -> None:
    out = run(str(journal(tmp_path, text=False)), "--session", "talk")
    assert "Request r3 (session talk" in out
    assert "Compared with its session's request before, r1:" in out
    assert "stops matching in message 0 (system), field content, between characters" in out
    assert ": clock" in out
    assert "40 diverged" in out
    assert "Leave dates and times out of the prompt" in out
    assert "10:4" not in out


def test_with_text_the_character_and_both_sides_are_shown(tmp_path: Path) -> None:
    path = journal(tmp_path, text=True)
    wanted = clock_case().before["messages"][0]["content"].index("1:07 now")
    out = run(str(path), "r3")
    assert f"field content, character {wanted}: clock" in out
    assert "It is 10:41:07 now" in out
    assert "It is 10:43:09 now" in out
    data = json.loads(run(str(path), "--last", "--json"))
    assert data["break"]["first_character"] == wanted
    assert (data["break"]["kind"], data["break"]["index"]) == ("clock", 0)
    assert data["compared_with"] == "r1"
    assert data["candidates"][0]["cost_seconds"] == 0.75


@pytest.mark.parametrize("text", [False, True])
def test_a_header_line_in_the_system_text_that_always_changes_is_named(tmp_path: Path, text: bool) -> None:
    scribe = Scribe(tmp_path / "journal.jsonl", {"text": text})
    body = breaks.conversation(breaks.Random("nonce"))
    rules = body["messages"][0]["content"]
    for nonce in ("1f0c9d2e-77aa-4b1e-9c55-0d3f6a8b2e41", "c4e81b30-0d6f-4f29-8a7e-51b2c9d07f66"):
        body["messages"][0]["content"] = f"x-request-id: {nonce}\n{rules}"
        lost = {Loss.DIVERGED: 40, Loss.NEW: len(breaks.render(body)) // 4 - 60}
        scribe.serve(breaks.render(body), b"Yes.", body, session="talk", cached=20, losses=lost)
        body = breaks.appended(body, "Yes.", breaks.Random("more"))
    scribe.journal.close()
    out = run(str(scribe.path), "--last")
    assert "stops matching in message 0 (system), field content" in out
    assert ": nonce" in out
    assert "Leave ids, counters and request headers out of the prompt" in out
    assert ("x-request-id: c4e81b30" in out) is text


def test_a_turn_without_the_reasoning_before_it_is_told_with_the_flag_that_keeps_it(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal.jsonl")
    body = breaks.conversation(breaks.Random("think"))
    body["messages"][2]["reasoning_content"] = "hm " * 50
    scribe.serve(breaks.render(body), b"Yes.", body, session="talk")
    after = breaks.appended(body, "Yes.", breaks.Random("more"))
    after["messages"][2].pop("reasoning_content")
    lost = {Loss.DIVERGED: 40, Loss.NEW: len(breaks.render(after)) // 4 - 60}
    scribe.serve(breaks.render(after), b"ok", after, session="talk", cached=20, losses=lost)
    scribe.journal.close()
    out = run(str(scribe.path), "--last")
    assert "stops matching in message 2 (assistant)" in out
    assert ": dropped reasoning" in out
    assert "--reasoning-preserve" in out


def test_what_each_slot_would_have_cost_is_a_table(tmp_path: Path) -> None:
    out = run(str(journal(tmp_path, text=False)), "--last")
    assert "What each slot would have cost" in out
    assert "b/0" in out
    assert "chosen" in out


def test_an_overwritten_slot_is_not_blamed_on_the_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "four.jsonl", field_note.four_slots().entries)
    out = run(str(path), "--last")
    assert "evicted (overwritten; more slots mend it)" in out
    assert "the prompt only adds to what that request left in its slot" in out
    assert "lost with its slot, not by the prompt" in out


def test_text_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal.jsonl", {"text": True})
    for stamp in ("2026-01-01", "2026-01-02"):
        text = f"[bold]x[/bold] {'pad ' * 30} {stamp} [/red] end"
        scribe.serve(text.encode(), b"", {"messages": [{"role": "user", "content": text}]}, session="[s]")
    scribe.journal.close()
    out = run(str(scribe.path), "--session", "[s]")
    assert "[/red] end" in out
    assert "session [s]" in out


def test_the_first_request_has_nothing_to_compare_with(tmp_path: Path) -> None:
    assert "Nothing like it was sent before" in run(str(journal(tmp_path, text=False)), "r1")


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["nope"], 1, "no request 'nope'"),
        (["--session", "nope"], 1, "no request of session 'nope'"),
        ([], 2, "give one of"),
        (["r1", "--last"], 2, "give one of"),
    ],
)
def test_what_is_not_there_or_not_clear_is_said(
    tmp_path: Path, arguments: list[str], code: int, why: str
) -> None:
    assert why in run(str(journal(tmp_path, text=False)), *arguments, code=code)
