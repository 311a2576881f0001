"""The report's figures, its sentences and its forms: tables, JSON, one page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner
from warmslot.launcher.cli import app
from warmslot.launcher.findings import findings
from warmslot.launcher.live import LiveError, samples, summary
from warmslot.launcher.report import load
from warmslot.launcher.report_html import page
from warmslot.launcher.summary import BLOCK_TOKENS, Gatherer, PrefillCurve

from tests.fakes.llama_server import FakeLlamaServer
from tests.support import field_note
from tests.support.journals import Agent, Maker, words, write
from tests.unit.router.conftest import serving

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_field_notes_windows_give_its_figures_and_the_diagnosis_that_it_missed(tmp_path: Path) -> None:
    four, _ = load(str(write(tmp_path / "four.jsonl", field_note.four_slots().entries)))
    one, _ = load(str(write(tmp_path / "one.jsonl", field_note.one_slot().entries)))
    for window in (four, one):
        assert window.total.requests == 66
        assert window.total.prompt == 384_119
        assert window.prompt_per_output == pytest.approx(18, abs=0.1)
    assert four.total.reuse == pytest.approx(0.012, abs=0.0005)
    assert one.total.reuse == pytest.approx(0.867, abs=0.0005)
    assert four.decode[0].rate == pytest.approx(22.5, abs=0.05)
    assert one.decode[0].rate == pytest.approx(23.8, abs=0.05)
    # What the note could not see: the prompts had not changed, their slots had been overwritten.
    lost = four.total.losses
    assert sum(lost.values()) == four.total.processed
    assert lost["evicted"] / four.total.processed > 0.8
    assert set(lost) == {"evicted", "new"}
    assert lost["new"] == pytest.approx(one.total.losses["new"], rel=0.02)
    text = " ".join(findings(four))
    assert "evicted: a slot had held them and was overwritten" in text
    assert "the prompts are not at fault" in text
    assert "diverged" not in text


def test_the_field_notes_four_at_once_against_one_by_one(tmp_path: Path) -> None:
    together, apart = (
        load(str(write(tmp_path / f"{index}.jsonl", maker.entries)))[0]
        for index, maker in enumerate(field_note.several())
    )
    assert (together.seconds, apart.seconds) == (pytest.approx(118), pytest.approx(123))
    assert [level.level for level in together.decode] == ["4"]
    assert together.decode[0].rate / apart.decode[0].rate == pytest.approx(123 / 118)


def test_why_is_worked_out_from_the_chains_where_the_journal_does_not_say(tmp_path: Path) -> None:
    maker = Maker(slots=2)
    first, second = (Agent(name, words(name, 1000)) for name in ("a", "b"))
    maker.serve(first, 0, 0, 10, 1.0, 1.0)
    first.append(100)
    maker.serve(first, 0, 1009, 10, 0.1, 1.0)  # appended to what its slot holds
    maker.serve(second, 0, 0, 10, 1.0, 1.0)  # overwrites it
    first.append(100)
    maker.serve(first, 1, 0, 10, 1.0, 1.0)  # comes back
    first.text = first.text[:2000] + b"edited here" + first.text[2011:]
    maker.serve(first, 1, 500, 10, 1.0, 1.0)
    start = maker.now
    maker.serve(second, 1, 0, 10, 1.0, 5.0, at=start)  # its slot is idle, another one was chosen
    table = load(str(write(tmp_path / "j.jsonl", maker.entries)))[0]
    lost = table.total.losses
    assert sum(lost.values()) == table.total.processed
    assert lost["evicted"] == pytest.approx(1115, abs=20)
    assert lost["diverged"] == pytest.approx(720, abs=20)
    assert lost["engine"] == pytest.approx(1000, abs=20)
    assert set(lost) == {"new", "evicted", "diverged", "engine"}


def test_a_prefill_curve_is_found_from_prefills_that_cover_several_blocks() -> None:
    costs = [1 / 500, 1 / 400, 1 / 250]

    def seconds(start: int, end: int) -> float:
        return sum(
            costs[block] * max(0, min(end, (block + 1) * BLOCK_TOKENS) - max(start, block * BLOCK_TOKENS))
            for block in range(3)
        )

    spans = [(0, 4096), (0, 8192), (4000, 9000), (8192, 12000), (100, 12288), (6000, 11000)]
    curve = PrefillCurve([(start, end, seconds(start, end)) for start, end in spans])
    rates = [block.marginal_rate for block in curve.blocks()]
    assert rates == [pytest.approx(500, rel=0.03), pytest.approx(400, rel=0.05), pytest.approx(250, rel=0.03)]
    assert curve.seconds(0, 12288) == pytest.approx(seconds(0, 12288), rel=0.02)


def test_decode_rates_are_told_apart_by_how_many_decode_at_once() -> None:
    gatherer = Gatherer("x")
    maker = Maker()
    start = maker.now
    maker.serve(Agent("a", words("a", 50)), 0, 0, 100, 0.0, 10.0, at=start)
    maker.serve(Agent("b", words("b", 50)), 1, 0, 100, 0.0, 10.0, at=start)
    maker.serve(Agent("c", words("c", 50)), 0, 0, 100, 0.0, 5.0)
    for entry in maker.entries:
        gatherer.add(entry)
    levels = {level.level: level for level in gatherer.summary().decode}
    assert levels["1"].rate == pytest.approx(20)
    assert levels["2"].rate == pytest.approx(20)
    assert levels["2"].seconds == pytest.approx(10)


def test_what_was_computed_together_is_not_counted_twice() -> None:
    gatherer = Gatherer("x")
    maker = Maker()
    start = maker.now
    # Both timings hold the work of both prompts, as an engine's do; both decode, and a third is computed.
    maker.serve(Agent("a", words("a", 300)), 0, 0, 50, 4.0, 5.0, at=start)
    maker.serve(Agent("b", words("b", 100)), 1, 0, 50, 4.0, 5.0, at=start)
    maker.serve(Agent("c", words("c", 100)), 2, 0, 10, 2.5, 1.0, at=start + 6.5)
    for entry in maker.entries:
        gatherer.add(entry)
    summary = gatherer.summary()
    assert summary.prefill_seconds == pytest.approx(6.5)
    assert summary.prefill[0].seconds == pytest.approx(6.5)
    assert [level.level for level in summary.decode] == ["1", "2"]
    assert summary.decode[1].seconds == pytest.approx(2.5)
    assert summary.decode[1].rate == pytest.approx(100 / 2.5)


def test_a_window_bounds_what_is_counted_and_not_what_is_known(tmp_path: Path) -> None:
    path = write(tmp_path / "four.jsonl", field_note.four_slots().entries)
    whole, _ = load(str(path))
    later, _ = load(str(path), since=whole.start + whole.seconds / 2)
    assert 0 < later.total.requests < whole.total.requests
    assert later.total.losses["evicted"] / later.total.processed > 0.9


def test_the_command_prints_tables_json_and_one_page(tmp_path: Path) -> None:
    path = write(tmp_path / "four.jsonl", field_note.four_slots().entries)
    out = run("report", str(path))
    for text in (
        "384,119",
        "1.2%",
        "18.0 : 1",
        "evicted",
        "overwritten; more slots mend it",
        "What this says",
    ):
        assert text in out
    data = json.loads(run("report", str(path), "--json"))
    assert data["total"]["reuse"] == pytest.approx(0.012, abs=0.0005)
    assert data["prefill_curve"][0]["marginal_tokens_per_second"] == pytest.approx(480, abs=0.01)
    html = tmp_path / "report.html"
    run("report", str(path), "--html", str(html))
    text = html.read_text()
    assert "evicted" in text
    assert text.count("<svg") >= 4


def test_the_page_needs_nothing_from_elsewhere_and_escapes_what_clients_named(tmp_path: Path) -> None:
    maker = Maker()
    for number in range(6):
        agent = Agent(f"<script>alert({number})</script>", words("x", 5000))
        maker.serve(agent, 0, 100, 10, 1.0, 1.0, session=agent.name)
    text = page(load(str(write(tmp_path / "j.jsonl", maker.entries)))[0])
    assert "<script" not in text
    assert re.findall(r"""(?:src|href)=|url\(|@import""", text) == []

    class Balance(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            del attrs
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == []


def test_an_empty_window_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "j.jsonl", Maker().entries)
    assert "No requests in this window" in run("report", str(path))


def test_a_file_that_is_no_journal_is_one_line_and_exit_1(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("hello\n")
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 1
    assert "no line of it is readable" in result.output


def test_a_text_with_empty_lines_is_no_journal(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("# A title\n\nAnd text.\n")
    result = CliRunner().invoke(app, ["report", str(file)])
    assert result.exit_code == 1
    assert f"{file} is not a journal: {file}:1: no valid JSON" in result.output.replace("\n", " ")


@pytest.mark.parametrize("command", [["explain", "--last"], ["advise"]])
def test_a_router_is_no_journal(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "http://127.0.0.1:8080"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "found an address" in result.output
    assert "allowed: a journal's path" in result.output
    assert "Traceback" not in result.output


def test_a_wrong_time_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--since", "yesterday"])
    assert result.exit_code == 2
    assert "an age such as 90m" in result.output


async def test_a_running_router_gives_the_same_figures_as_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    async with FakeLlamaServer() as fake, serving([fake], journal={"path": str(path)}) as service:
        for text in ("one two three four five six", "one two three four five six seven", "nothing alike"):
            await service.chat(text)
        live = summary(service.url, (await service.http.get("/metrics")).text)
    journal, _ = load(str(path))
    assert live.total == journal.total
    assert live.prefill_seconds == pytest.approx(journal.prefill_seconds, abs=0.001)
    assert live.decisions == journal.decisions
    assert live.slots == journal.slots == {"b0": 4}
    assert live.statuses == {"ok": 3}


def test_metrics_of_somebody_else_are_refused() -> None:
    with pytest.raises(LiveError, match="not those of a warmslot router"):
        summary("http://x", 'llamacpp:prompt_tokens_total{a="b"} 3\n')
    assert samples('a{b="c,d"} 1.5e3\n# HELP x\nbad line here\n') == {"a": [({"b": "c,d"}, 1500.0)]}
