"""The simulator: readers refuse what they do not know, small traces give answers that can be worked out."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner
from warmslot.launcher.replay import Speed
from warmslot.launcher.simulate import Setup, run_all, simulate, simulate_one
from warmslot.launcher.traces import TraceError, load
from warmslot.router.records import Encoder, Opening, Record
from warmslot.router.values import HostMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmslot.launcher.simulate import PolicyName
    from warmslot.launcher.traces import Trace


def _session(name: str, turns: int, start: float, letter: str) -> list[dict[str, object]]:
    """A conversation that grows by 400 characters a turn and is answered with 80."""
    return [
        {
            "timestamp": (start + turn) * 1e6,
            "input": letter * 400 * (turn + 1),
            "output": "o" * 80,
            "session_id": name,
        }
        for turn in range(turns)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, letter in enumerate("abcdef"):
        lines = _session(letter, 5, index / 10, letter)
        (tmp_path / f"{letter}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path


def test_text_sessions(folder: Path) -> None:
    trace = load(folder)
    assert len(trace.sessions) == 6
    assert trace.calls == 30
    assert [call.prompt.length for call in trace.sessions[0]] == [400, 800, 1200, 1600, 2000]


def test_hash_blocks_become_sessions_and_share_exactly_their_blocks(tmp_path: Path) -> None:
    file = tmp_path / "hashes.jsonl"
    records = [
        {"timestamp": 0, "input_length": 1500, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 10, "input_length": 700, "output_length": 7, "hash_ids": [9, 10]},
        {"timestamp": 2000, "input_length": 2000, "output_length": 7, "hash_ids": [1, 2, 3, 4]},
    ]
    file.write_text("\n".join(json.dumps(record) for record in records))
    trace = load(file)
    assert [len(session) for session in trace.sessions] == [2, 1]
    first, second = (call.prompt for call in trace.sessions[0])
    assert second.chain[: len(first.chain)] == first.chain
    assert trace.sessions[0][1].at == 2.0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no requests"),
        ("nonsense", "1: not JSON"),
        ("[1]", "1: expected an object, found list"),
        ('{"prompt": "x"}', "no 'input'"),
        ('{"input": "x", "timestamp": "now", "output": ""}', "'timestamp' is missing or of the wrong type"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(TraceError, match=says):
        load(file)
    with pytest.raises(TraceError, match="no such file"):
        load(tmp_path / "absent")


@pytest.mark.parametrize("policy", ["engine", "fifo", "reuse", "clairvoyant", "infinite"])
def test_one_session_at_a_time_reuses_all_that_can_be(folder: Path, policy: PolicyName) -> None:
    (served, best) = (simulate_one(load(folder), Setup(name, 2, 1)) for name in (policy, "infinite"))
    assert len(served) == 30
    assert sum(s.cached_tokens for s in served) == sum(s.cached_tokens for s in best)
    assert sum(s.cached_tokens for s in served) == 6 * (100 + 200 + 300 + 400)


def test_virtual_time_adds_up(folder: Path) -> None:
    served = simulate_one(load(folder), Setup("engine", 1, 6, speed=Speed(prefill=100, decode=10)))
    processed = sum(s.prompt_tokens - s.cached_tokens for s in served)
    assert max(s.finished for s in served) == pytest.approx(processed / 100 + 30 * 20 / 10)


@pytest.mark.parametrize("arrival", ["closed", "round-robin", "open"])
@pytest.mark.parametrize("in_flight", ["serialize", "pair", "slots"])
def test_every_request_is_answered(folder: Path, arrival: str, in_flight: str) -> None:
    for policy in ("engine", "fifo", "reuse", "clairvoyant"):
        setup = Setup(policy, 3, 4, arrival=arrival, in_flight=in_flight)  # type: ignore[arg-type]
        served = simulate_one(load(folder), setup)
        assert len(served) == 30
        assert all(s.arrived <= s.granted <= s.first_token <= s.finished for s in served)


def test_command_prints_a_table_and_writes_csv(folder: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(simulate)
    target = tmp_path / "rows.csv"
    result = CliRunner().invoke(app, [str(folder), "--slots", "2", "--live", "4", "--csv", str(target)])
    assert result.exit_code == 0, result.output
    assert "clairvoyant" in result.output
    assert len(target.read_text().splitlines()) == 6
    refused = CliRunner().invoke(app, [str(folder), "--policies", "magic"])
    assert refused.exit_code == 2
    assert "allowed are engine" in " ".join(refused.output.replace("│", " ").split())


def _as_journal(trace: Trace, path: Path) -> None:
    """Write a trace as the router would have, on an engine of 500 and 24 tokens/s that reused nothing."""
    encoder = Encoder()
    lines = [encoder.opening(Opening(0.0))]
    for number, (at, call) in enumerate(
        sorted(((c.at, c) for s in trace.sessions for c in s), key=lambda pair: pair[0])
    ):
        record = Record(
            id=str(number),
            time=1000.0 + at,
            pool="p",
            backend="b",
            slot=0,
            route="chat",
            status="ok",
            decision="fresh",
            chain=call.prompt.chain,
            length=call.prompt.length,
            after=call.after.chain,
            after_length=call.after.length,
            session=call.session,
            prompt_tokens=call.prompt_tokens,
            cached_tokens=0,
            output_tokens=call.output_tokens,
            prefill_seconds=call.prompt_tokens / 500,
            decode_seconds=call.output_tokens / 24,
        )
        lines.append(encoder.request(record))
    path.write_bytes(b"".join(lines))


def test_a_journal_replays_like_the_text_that_it_came_from(folder: Path, tmp_path: Path) -> None:
    trace = load(folder)
    _as_journal(trace, tmp_path / "journal")
    journal = load(tmp_path / "journal")
    assert journal.prefill == pytest.approx(500)
    assert journal.decode == pytest.approx(24, rel=0.001)
    assert [len(session) for session in journal.sessions] == [len(session) for session in trace.sessions]
    for policy in ("engine", "fifo", "reuse", "infinite"):
        reuse = []
        for source in (trace, journal):
            served = simulate_one(source, Setup(policy, 3, 5))  # type: ignore[arg-type]
            reuse.append(sum(s.cached_tokens for s in served) / sum(s.prompt_tokens for s in served))
        assert reuse[0] == pytest.approx(reuse[1], abs=0.03)


def test_host_memory_gives_back_what_slots_lost_at_the_price_of_copying(folder: Path) -> None:
    trace = load(folder)
    for policy in ("engine", "fifo", "reuse"):
        alone = Setup(policy, 2, 6, arrival="round-robin")  # type: ignore[arg-type]
        free = replace(alone, host=HostMemory(limit=math.inf))
        dear = replace(free, speed=Speed(copy=100))
        none = replace(free, host=HostMemory(limit=10, token_bytes=1))
        without, with_it, slow, too_small = run_all([trace], [alone, free, dear, none])
        assert without.from_host == too_small.from_host == 0.0
        assert too_small.reuse == without.reuse
        assert with_it.of_limit > 0.9 > without.of_limit
        assert with_it.from_host == pytest.approx(with_it.reuse - without.reuse, abs=0.1)
        assert with_it.makespan_s < without.makespan_s
        assert slow.reuse > without.reuse
        assert slow.makespan_s > with_it.makespan_s


@pytest.fixture
def public() -> Callable[[str], Path]:
    root = os.environ.get("WARMSLOT_TRACES")
    if root is None:
        pytest.skip("WARMSLOT_TRACES does not name a folder of recorded traces")

    def find(name: str) -> Path:
        path = Path(root) / name
        if not path.exists():
            pytest.skip(f"{path} is not there")
        return path

    return find


def test_known_results_on_a_public_trace(public: Callable[[str], Path]) -> None:
    """Figures found independently of this code; they show that the modelled engine is the right one."""
    trace = load(public("miniswe"))
    setups = [
        Setup(policy, slots, 12, arrival="round-robin")  # type: ignore[arg-type]
        for slots in (4, 8)
        for policy in ("engine", "clairvoyant", "infinite")
    ]
    reuse = [round(row.reuse, 2) for row in run_all([trace], setups)]
    assert reuse == [0.10, 0.61, 0.94, 0.10, 0.80, 0.94]
