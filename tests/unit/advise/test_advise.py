"""Advice from journals whose truth is known: they were made by serving a load on a backend of known rates."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner
from warmslot.launcher import advise_show
from warmslot.launcher.advise import AdviceError, advise, choose
from warmslot.launcher.advise_measure import MeasureError, contenders, measure, memory_of
from warmslot.launcher.cli import app
from warmslot.launcher.engine import Engine, EngineKind
from warmslot.launcher.forecast import Forecast, Setup, forecast
from warmslot.launcher.load import load_of
from warmslot.launcher.memory import Layer, Model
from warmslot.launcher.speeds import copy_of, speeds_of
from warmslot.router.records import Record
from warmslot.router.values import HostMemory

from tests.support import agents, field_note
from tests.support.journals import START, write

if TYPE_CHECKING:
    from pathlib import Path

    from warmslot.launcher.advise import Advice
    from warmslot.launcher.load import Load

RATES = agents.speeds()


def quiet(what: str, done: int, total: int) -> None:
    del what, done, total


def recorded(load: Load, setup: Setup) -> list[Record]:
    return [one for one in agents.journal(load, RATES, setup) if isinstance(one, Record)]


def advice(folder: Path, load: Load, setup: Setup, **more: Any) -> Advice:
    path = write(folder / "journal.jsonl", agents.journal(load, RATES, setup))
    return advise(path, kv_tokens=more.get("kv_tokens"), progress=quiet)[0]


@pytest.mark.parametrize(
    ("workers", "setup"),
    [(3, Setup(4, 8192, "slots")), (6, Setup(2, 8192, "slots", "engine")), (1, Setup(4, 8192, "serialize"))],
    ids=["fewer than slots", "more than slots", "one after the other"],
)
def test_the_advised_slots_are_best_on_the_backend_that_the_journal_is_of(
    tmp_path: Path, workers: int, setup: Setup
) -> None:
    load = agents.load(workers, workers * 2 + 8, turns=8, seed=workers)
    found = advice(tmp_path, load, setup, kv_tokens=1 << 20)
    truth = {
        (one.setup.slots, one.setup.in_flight): forecast(load, RATES, one.setup).makespan
        for one in found.candidates
    }
    best = truth[found.best.setup.slots, found.best.setup.in_flight]
    assert best <= min(truth.values()) * 1.05


def test_what_was_recorded_is_foretold(tmp_path: Path) -> None:
    found = advice(tmp_path, agents.load(6, 18), Setup(4, 8192, "slots", "engine"))
    assert found.recorded is not None
    assert found.recorded.forecast.reuse == pytest.approx(found.recorded.reuse, abs=0.03)
    assert found.recorded.forecast.makespan == pytest.approx(found.recorded.seconds, rel=0.15)
    assert found.recorded.good


def test_sequential_traffic_gets_one_slot_and_the_reason(tmp_path: Path) -> None:
    path = write(
        tmp_path / "j.jsonl",
        agents.journal(agents.load(1, 8, turns=8), RATES, Setup(4, 8192, "serialize", "engine")),
    )
    result = CliRunner().invoke(app, ["advise", str(path)])
    assert result.exit_code == 0, result.output
    assert "Advice: --parallel 1, one at a time" in result.output
    assert "One conversation at a time was under way" in result.output
    assert "-np 1 -c 8192 --no-kv-unified" in result.output
    assert "slots: 1" in result.output


def test_slots_that_do_not_fit_are_not_advised(tmp_path: Path) -> None:
    found = advice(tmp_path, agents.load(6, 12, turns=5), Setup(2, 4096, "slots", "engine"))
    assert found.unfit
    assert found.best.setup.slots * found.best.setup.context <= 2 * 4096
    assert any("do not fit" in change for change in found.changes)


def test_the_field_notes_one_slot_window_is_advised_one_slot(tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", field_note.one_slot().entries)
    found, _ = advise(path, kv_tokens=1 << 20, progress=quiet)
    assert found.best.setup.slots == 1
    assert found.best.reuse == pytest.approx(0.867, abs=0.01)


def test_the_field_notes_four_slot_window_is_advised_what_keeps_its_conversations(tmp_path: Path) -> None:
    path = write(tmp_path / "four.jsonl", field_note.four_slots().entries)
    found, _ = advise(path, kv_tokens=1 << 20, progress=quiet)
    assert found.load.sessions == 8
    assert found.best.reuse > 0.8
    assert found.best.setup.slots >= 4
    assert found.recorded is not None
    assert found.recorded.reuse == pytest.approx(0.012, abs=0.001)
    assert found.best.prefill_seconds < found.recorded.forecast.prefill_seconds / 2


def test_too_little_data_says_how_much_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "j.jsonl", agents.journal(agents.load(2, 2, turns=4), RATES, Setup(2, 8192)))
    result = CliRunner().invoke(app, ["advise", str(path)])
    assert result.exit_code == 1
    assert "too little data" in result.output
    assert "at least 30 and 10" in result.output
    entries = list(agents.journal(agents.load(1, 1), RATES, Setup(1, 8192)))[:2]
    with pytest.raises(AdviceError, match="0 finished requests"):
        advise(write(tmp_path / "empty.jsonl", entries), kv_tokens=None, progress=quiet)


def test_json_has_the_whole_advice(tmp_path: Path) -> None:
    path = write(
        tmp_path / "j.jsonl", agents.journal(agents.load(2, 8, turns=6), RATES, Setup(2, 8192, "slots"))
    )
    result = CliRunner().invoke(app, ["advise", str(path), "--json"])
    data = json.loads(result.stdout)
    assert data["advice"]["slots"] == 2
    assert data["flags"].startswith("-np 2 ")
    assert data["confidence"] in {"high", "medium", "low"}
    assert len(data["candidates"]) >= 3
    assert data["recorded"]["agrees"] is True


def test_memory_is_told_in_bytes_where_the_model_is_known() -> None:
    model = Model("m", "llama", 1000, 8192, 0, (Layer(keys=64, values=64),))
    setup = Setup(2, 8192)
    assert memory_of(model, [])(setup) == 1000 + 2 * 8192 * 256
    quantised = memory_of(model, ["-t", "2", "-ctk", "q8_0", "-ctv", "q8_0"])(setup)
    assert quantised == 1000 + 2 * 8192 * 136


def test_measuring_needs_a_model(tmp_path: Path) -> None:
    path = write(tmp_path / "j.jsonl", agents.journal(agents.load(2, 8), RATES, Setup(2, 8192, "slots")))
    result = CliRunner().invoke(app, ["advise", str(path), "--measure", "2"])
    assert result.exit_code == 2
    assert "--model" in result.output


@pytest.mark.parametrize(
    ("drafted", "args", "why"),
    [(0, ["--spec-type", "ngram-simple"], "never saw"), (40, ["-t", "2"], "give the flags of drafts")],
)
async def test_what_is_measured_drafts_as_what_was_foretold(
    tmp_path: Path, drafted: int, args: list[str], why: str
) -> None:
    entries = [
        replace(one, drafted_tokens=drafted) if isinstance(one, Record) else one
        for one in agents.journal(agents.load(2, 8, turns=6), RATES, Setup(2, 8192, "slots"))
    ]
    found, _ = advise(write(tmp_path / "j.jsonl", entries), kv_tokens=None, progress=quiet)
    engine = Engine(EngineKind.STOCK, ("/nonexistent",), "test", {})
    with pytest.raises(MeasureError, match=why):
        await measure(found, contenders(found, 1), engine=engine, model=tmp_path, args=args, progress=quiet)


def test_rates_are_found_in_spite_of_overlap() -> None:
    records = recorded(agents.load(4, 24), Setup(8, 8192, "slots"))
    found = speeds_of(records)
    assert found is not None
    assert found.prefill_seconds(0, 2000) == pytest.approx(4.0, rel=0.15)
    assert found.decode_rate(1) == pytest.approx(24, rel=0.1)
    assert found.decode_rate(4) == pytest.approx(24 * 3.1, rel=0.1)
    assert found.overhead < 0.5


def test_rates_beyond_what_was_seen_do_not_grow() -> None:
    found = speeds_of(recorded(agents.load(3, 12), Setup(4, 8192, "slots")))
    assert found is not None
    assert max(found.seen) == 3
    assert found.decode_rate(3) == found.decode_rate(16)


def test_prefills_that_were_computed_together_are_not_counted_twice() -> None:
    alone = recorded(agents.load(1, 3), Setup(1, 8192, "serialize"))
    first, second, *_ = alone
    # Both timings hold the work of both prompts, as an engine's do.
    together = first.prefill_seconds + second.prefill_seconds
    pair = [
        replace(
            one, time=first.time, granted=0.0, prefill_seconds=together, ended=together + one.decode_seconds
        )
        for one in (first, second)
    ]
    found = speeds_of(pair)
    assert found is not None
    assert found.prefill_seconds(0, 2000) == pytest.approx(4.0, rel=0.05)


def test_what_every_prefill_takes_is_told_from_what_its_tokens_take() -> None:
    records = [
        replace(one, prefill_seconds=one.prefill_seconds + 0.3, ended=one.ended + 0.3)
        for one in recorded(agents.load(1, 6), Setup(1, 8192, "serialize"))
    ]
    found = speeds_of(records)
    assert found is not None
    assert found.start == pytest.approx(0.3, abs=0.05)
    assert found.prefill.seconds(0, 2000) == pytest.approx(4.0, rel=0.05)


def test_speculation_is_a_candidate_where_the_journal_has_seen_both(tmp_path: Path) -> None:
    load = agents.load(3, 12)
    slow, fast = Setup(4, 8192, "slots"), agents.speeds(alone=48.0)
    without = list(agents.journal(load, RATES, slow))
    later = 10_000.0
    with_drafts = [
        replace(one, drafted_tokens=40, accepted_tokens=30) if isinstance(one, Record) else one
        for one in agents.journal(load, fast, slow, start=START + later)
    ]
    path = write(tmp_path / "both.jsonl", [*without, *with_drafts])
    found, _ = advise(path, kv_tokens=None, progress=quiet)
    assert {one.setup.drafts for one in found.candidates} == {False, True}
    assert found.best.setup.drafts
    assert not any("speculation" in one for one in found.unmeasured)
    path = write(tmp_path / "one.jsonl", with_drafts)
    found, _ = advise(path, kv_tokens=None, progress=quiet)
    assert {one.setup.drafts for one in found.candidates} == {True}
    assert "speculation off: not measured" in found.unmeasured[0]


def test_a_forecast_knows_of_an_answers_length_what_its_client_told() -> None:
    load = agents.load(8, 8)
    told = replace(load, jobs=[replace(job, max_output_tokens=job.output_tokens) for job in load.jobs])
    setup = Setup(4, 8192, "pair")
    assert forecast(told, RATES, setup).makespan != forecast(load, RATES, setup).makespan
    records = [
        replace(one, max_output_tokens=one.output_tokens) for one in recorded(load, Setup(8, 8192, "slots"))
    ]
    assert all(job.max_output_tokens == job.output_tokens for job in load_of(records).jobs)


HOST = HostMemory(1 << 30, token_bytes=40_000)


def with_host(load: Load, setup: Setup, copy: float) -> tuple[list[Any], float]:
    """The journal of a backend with a cache in host memory, and the reuse that it saw."""
    rates = replace(RATES, copy=copy)
    found = forecast(load, rates, setup)
    return list(agents.journal(load, rates, setup)), found.reuse


def test_host_memory_makes_up_for_slots_at_the_price_of_copying() -> None:
    load = agents.load(8, 24)
    few, host = Setup(2, 8192, "slots"), Setup(2, 8192, "slots", host=HOST)
    without = forecast(load, RATES, few)
    quick, slow = (forecast(load, replace(RATES, copy=copy), host) for copy in (1 / 20_000, 1 / 200))
    assert without.from_host == without.host_tokens == 0
    assert quick.reuse > without.reuse + 0.1
    assert quick.makespan < without.makespan
    assert quick.from_host > 0
    assert 0 < quick.host_tokens * HOST.token_bytes <= HOST.limit
    assert slow.makespan > quick.makespan


def test_how_long_copying_takes_is_told_by_what_came_back() -> None:
    load, setup = agents.load(8, 24), Setup(2, 8192, "serialize", host=HOST)
    entries, _ = with_host(load, setup, 1 / 5_000)
    records = [one for one in entries if isinstance(one, Record)]
    assert sum(one.host_tokens > 0 for one in records) >= 5
    assert copy_of(records, 2, HOST) == pytest.approx(1 / 5_000, rel=0.1)
    assert copy_of(recorded(load, Setup(2, 8192, "serialize")), 2, HOST) is None


def test_host_memory_is_a_candidate_where_copying_was_seen_or_is_given(tmp_path: Path) -> None:
    load = agents.load(8, 24)
    path = write(tmp_path / "without.jsonl", agents.journal(load, RATES, Setup(2, 8192, "slots")))
    found, _ = advise(path, kv_tokens=2 * 8192, slots=(1, 2), progress=quiet)
    assert all(one.setup.host is None for one in found.candidates)
    assert "not measured; serve with cache_ram for a while, or give --copy" in found.unmeasured[-1]
    found, _ = advise(path, kv_tokens=2 * 8192, slots=(1, 2), host=HOST, copy=1 / 20_000, progress=quiet)
    assert {one.setup.slots for one in found.candidates if one.setup.host is not None} == {1, 2}
    assert found.best.setup.host is HOST
    assert "--cache-ram 1024" in advise_show.flags(found)
    assert "cache_ram: 1024" in advise_show.patch(found)
    told = advise_show.as_json(found)["advice"]
    assert told["cache_ram_mib"] == 1024
    assert 0 < told["host_memory_bytes"] <= HOST.limit
    entries, reuse = with_host(load, Setup(2, 8192, "slots", host=HOST), 1 / 20_000)
    found, _ = advise(
        write(tmp_path / "with.jsonl", entries), kv_tokens=2 * 8192, slots=(1, 2), host=HOST, progress=quiet
    )
    assert found.unmeasured == []
    assert {one.setup.host for one in found.candidates} == {None, HOST}
    assert found.recorded is not None
    assert found.recorded.forecast.setup.host is HOST
    assert found.recorded.forecast.reuse == pytest.approx(reuse, abs=0.03)


def test_advice_with_host_memory_is_shown_with_what_it_takes(tmp_path: Path) -> None:
    load = agents.load(6, 18)
    path = write(tmp_path / "j.jsonl", agents.journal(load, RATES, Setup(2, 8192, "slots")))
    result = CliRunner().invoke(app, ["advise", str(path), "--slots", "2", "--copy", "20000"])
    assert result.exit_code == 0, result.output
    assert "8,192 MiB of RAM cache" in result.output
    assert "come back from host memory" in result.output
    assert "20,000 to host memory and back" in result.output
    assert "not known, so it was taken never to be full (--model)" in result.output


def test_advice_keeps_to_the_slot_counts_that_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "j.jsonl", agents.journal(agents.load(3, 12), RATES, Setup(4, 8192, "slots")))
    found, _ = advise(path, kv_tokens=None, slots=(1, 4), progress=quiet)
    assert {one.setup.slots for one in found.candidates} == {1, 4}
    assert {one.setup.context for one in found.candidates} == {8192, -(-found.load.longest // 256) * 256}
    refused = CliRunner().invoke(app, ["advise", str(path), "--slots", "1,x"])
    assert refused.exit_code == 2


def test_a_backend_that_gets_slower_by_sharing_gets_advice_all_the_same(tmp_path: Path) -> None:
    rates = agents.speeds(gain=-0.2)
    rates.decode = {level: max(1.0, rate) for level, rate in rates.decode.items()}
    path = write(tmp_path / "j.jsonl", agents.journal(agents.load(3, 12), rates, Setup(4, 8192, "slots")))
    found, _ = advise(path, kv_tokens=None, progress=quiet)
    assert found.best.setup.in_flight == "serialize"


def test_a_load_follows_its_conversations_and_its_workers() -> None:
    load = agents.load(3, 9, turns=4)
    found = load_of(recorded(load, Setup(4, 8192, "slots")))
    assert len(found.jobs) == len(load.jobs)
    assert (found.sessions, found.live()) == (9, 3)
    starts = [job for job in found.jobs if job.before < 0]
    assert len(starts) == 3
    assert all(job.after_end for job in found.jobs if job.before >= 0)


def test_conversations_without_a_name_are_told_apart_by_what_they_continue() -> None:
    maker = field_note.four_slots()
    assert load_of(one for one in maker.entries if isinstance(one, Record)).sessions == 8


def test_equal_results_go_to_the_smaller_setup() -> None:
    def one(slots: int, makespan: float, mean: float) -> Forecast:
        return Forecast(Setup(slots, 4096), makespan=makespan, mean_seconds=mean)

    assert choose([one(8, 100.0, 5.0), one(4, 101.0, 5.05), one(2, 130.0, 4.0)]).setup.slots == 4
    assert choose([one(8, 100.0, 5.0), one(4, 101.0, 9.0)]).setup.slots == 8


def test_only_the_latest_requests_are_looked_at_and_only_the_newest_files(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    entries = list(agents.journal(agents.load(4, 24), RATES, Setup(4, 8192, "slots")))
    head, rest = entries[:2], entries[2:]
    third = len(rest) // 3
    for number, name in ((0, "journal.jsonl.2"), (1, "journal.jsonl.1"), (2, "journal.jsonl")):
        write(tmp_path / name, [*head, *rest[number * third : (number + 1) * third]])
    (tmp_path / "journal.jsonl.2").write_bytes(b"not looked at")
    found, reading = advise(path, kv_tokens=None, progress=quiet, latest=third + 10)
    assert found.stretch.whole == third + 10
    assert found.stretch.records[0].id == rest[2 * third - 10].id
    assert found.stretch.earlier[-1].id == rest[2 * third - 11].id
    assert (found.stretch.slots, found.stretch.context) == (4, 8192)
    assert reading.skipped == 0
    assert advise(path, kv_tokens=None, progress=quiet)[1].skipped == 1


def test_a_journal_that_rotates_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    entries = list(agents.journal(agents.load(4, 24), RATES, Setup(4, 8192, "slots")))
    half = len(entries) // 2
    write(tmp_path / "journal.jsonl.1", entries[:half])
    write(path, [*entries[:2], *entries[half:]])
    expected = advise(path, kv_tokens=None, progress=quiet)[0].stretch.records
    rotated = False

    def rotate(what: str, done: int, total: int) -> None:
        nonlocal rotated
        del total
        if what == "reading again" and not done and not rotated:
            rotated = True
            path.with_name("journal.jsonl.1").replace(tmp_path / "journal.jsonl.2")
            path.replace(tmp_path / "journal.jsonl.1")
            write(path, entries[:2])

    found = advise(path, kv_tokens=None, progress=rotate)[0].stretch.records
    assert rotated
    assert [one.id for one in found] == [one.id for one in expected]
