"""Scrubbed, exported and imported journals."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner
from warmslot.launcher.breaks import find_break
from warmslot.launcher.cli import app
from warmslot.launcher.journal_tools import Scrubber
from warmslot.launcher.report import load
from warmslot.launcher.traces import load as load_trace
from warmslot.router.journal import read
from warmslot.router.records import BackendChange, Record
from warmslot.router.trie import common_blocks

from tests.support import breaks, field_note
from tests.support.journals import write
from tests.unit.journal.conftest import Scribe

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["journal", *arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_a_scrubbed_journal_tells_the_same_story_and_nobodys_name(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal.jsonl", {"text": True})
    for case in breaks.cases(7, 7):
        scribe.serve(
            breaks.render(case.before), case.reply.encode(), case.before, session=f"secret {case.kind}"
        )
        scribe.serve(breaks.render(case.after), b"ok", case.after, session=f"secret {case.kind}")
    scribe.journal.close()
    target = tmp_path / "clean.jsonl"
    run("scrub", str(scribe.path), str(target))
    assert b"secret" not in target.read_bytes()
    assert b"engineer on call" in scribe.path.read_bytes()
    assert b"engineer on call" not in target.read_bytes()
    old, new = ([e for e in read(path) if isinstance(e, Record)] for path in (scribe.path, target))
    assert [find_break(a, b) for a, b in zip(old[::2], old[1::2], strict=True)] == [
        find_break(a, b) for a, b in zip(new[::2], new[1::2], strict=True)
    ]
    for a, b in zip(old, new, strict=True):
        assert (a.cached_tokens, a.losses, a.time, a.length) == (b.cached_tokens, b.losses, b.time, b.length)
        assert common_blocks(a.chain, b.chain) == 0
        assert common_blocks(old[0].after, a.chain) == common_blocks(new[0].after, b.chain)


def test_two_scrubbings_cannot_be_joined(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal.jsonl")
    scribe.serve(b"x" * 200)
    (record,) = scribe.records()
    first, second = (Scrubber().scrub(record) for _ in range(2))
    assert isinstance(first, Record)
    assert isinstance(second, Record)
    assert first.chain != second.chain
    assert first.outline != second.outline


def test_csv_has_a_row_for_each_request(tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", field_note.one_slot().entries)
    out = run("export", str(path), str(tmp_path / "one.csv"))
    assert "66 requests" in out
    rows = list(csv.DictReader((tmp_path / "one.csv").read_text().splitlines()))
    assert sum(int(row["prompt_tokens"]) for row in rows) == 384_119
    assert sum(int(row["cached_tokens"]) for row in rows) / 384_119 == pytest.approx(0.867, abs=0.001)


def test_a_trace_can_be_replayed(tmp_path: Path) -> None:
    path = write(tmp_path / "four.jsonl", field_note.four_slots().entries)
    run("export", str(path), str(tmp_path / "trace.jsonl"), "--format", "trace")
    trace = load_trace(tmp_path / "trace.jsonl")
    assert (len(trace.sessions), trace.calls) == (8, 66)


def test_a_file_is_not_written_over_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "four.jsonl", field_note.four_slots().entries)
    assert "must not be the file that is read" in run("scrub", str(path), str(path), code=2)


def stamp(seconds: float) -> str:
    return f"{int(seconds // 60)}.{int(seconds % 60):02d}.{int(seconds * 1000) % 1000:03d}.000 I "


class Log:
    """An engine's log as it would have been written."""

    def __init__(self, slots: int) -> None:
        self.now, self.task = 1.0, 0
        self.lines = [
            stamp(0.5)
            + f"srv    load_model: initializing, n_slots = {slots}, n_ctx_slot = 8192, kv_unified = 'false'"
        ]

    def say(self, text: str) -> None:
        self.lines.append(stamp(self.now) + text)

    def request(
        self, slot: int, computed: int, output: int, held: int, *, by: str = "LRU, t_last = 5"
    ) -> None:
        self.task += 1
        where = f"id  {slot} | task {self.task} | "
        self.say(f"slot get_availabl: id  {slot} | task -1 | selected slot by {by}")
        self.say(f"slot launch_slot_: {where}processing task, is_child = 0")
        self.now += computed / 500 + output / 20
        self.say(
            f"slot print_timing: {where}prompt eval time = {computed * 2:.2f} ms / {computed:5d} tokens "
            "(    2.00 ms per token,   500.00 tokens per second)"
        )
        self.say(
            f"slot print_timing: {where}       eval time = {output * 50:.2f} ms / {output:5d} tokens "
            "(   50.00 ms per token,    20.00 tokens per second)"
        )
        self.say(f"slot      release: {where}stop processing: n_tokens = {held}, truncated = 0")


def test_an_engines_log_becomes_a_journal(tmp_path: Path) -> None:
    log = Log(2)
    log.request(0, 1000, 50, 1049)
    log.request(0, 100, 50, 1198, by="LCP similarity, f_sim_best = 0.912 (> 0.100 thold), f_keep = 1.000")
    (tmp_path / "log.txt").write_text("\n".join([*log.lines, "something else", ""]))
    out = run("import", str(tmp_path / "log.txt"), str(tmp_path / "j.jsonl"), "--start", "2026-01-31T12:00")
    assert "2 requests; 0 of them" in out
    _, up, first, second = read(tmp_path / "j.jsonl")
    assert isinstance(up, BackendChange)
    assert (up.slots, up.context) == (2, 8192)
    assert isinstance(first, Record)
    assert isinstance(second, Record)
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (1000, 0, 50)
    assert (second.prompt_tokens, second.cached_tokens) == (1149, 1049)
    assert common_blocks(first.after, second.chain) == 1049 // 16
    assert first.session == second.session
    assert (first.prefill_seconds, first.decode_seconds) == (2.0, 2.5)
    assert second.time - first.time == pytest.approx(4.5)


def test_the_field_notes_four_slots_as_an_engines_log_are_diagnosed_as_overwritten(tmp_path: Path) -> None:
    log = Log(4)
    records = [one for one in field_note.four_slots().entries if isinstance(one, Record)]
    for record in records:
        held = record.prompt_tokens + record.output_tokens - 1
        log.request(
            record.slot, record.prompt_tokens - (record.cached_tokens or 0), record.output_tokens, held
        )
    (tmp_path / "log.txt").write_text("\n".join(log.lines))
    out = run("import", str(tmp_path / "log.txt"), str(tmp_path / "j.jsonl"))
    assert "66 requests" in out
    summary, _ = load(str(tmp_path / "j.jsonl"))
    assert summary.total.prompt == 384_119
    assert summary.total.reuse == pytest.approx(0.012, abs=0.0005)
    assert summary.guessed > 50
    assert summary.total.losses["evicted"] / summary.total.processed > 0.8
    run("import", str(tmp_path / "log.txt"), str(tmp_path / "j2.jsonl"), "--no-guess")
    plain, _ = load(str(tmp_path / "j2.jsonl"))
    assert plain.guessed == 0
    assert "evicted" not in plain.total.losses


def test_a_log_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("hello\n")
    assert "no finished request in it" in run(
        "import", str(tmp_path / "log.txt"), str(tmp_path / "j"), code=1
    )
    assert "No such file" in run("import", str(tmp_path / "none"), str(tmp_path / "j"), code=1)


def test_json_lines_of_a_log_have_their_own_times(tmp_path: Path) -> None:
    log = Log(1)
    log.request(0, 100, 10, 109)
    lines = [
        json.dumps(
            {"type": "log", "time": 1_700_000_000_000_000 + n, "level": "info", "msg": line[17:] + "\n"}
        )
        for n, line in enumerate(log.lines)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    run("import", str(tmp_path / "log.jsonl"), str(tmp_path / "j.jsonl"))
    record = next(one for one in read(tmp_path / "j.jsonl") if isinstance(one, Record))
    assert record.time == pytest.approx(1_700_000_000)
    assert replace(record, time=0).prompt_tokens == 100
