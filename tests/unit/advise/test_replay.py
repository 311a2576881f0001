"""Loads served for real, on fake engines: same shape, same tokens, fair comparison."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner
from warmslot.launcher.bench_replay import (
    Estimate,
    ReplayError,
    Side,
    Target,
    as_json,
    complaints,
    replay,
    source,
    target,
)
from warmslot.launcher.cli import app
from warmslot.launcher.driver import Call, Served, serve
from warmslot.launcher.shape import Shape, described

from tests.fakes.llama_server import FakeLlamaServer
from tests.support import agents
from tests.support.journals import write

if TYPE_CHECKING:
    from pathlib import Path


def quiet(what: str, done: int, total: int) -> None:
    del what, done, total


def shared(a: str, b: str) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_prompts_share_what_the_recorded_ones_shared() -> None:
    load = described(agents=2, turns=3, first=400, growth=100, output=20, conversations=2)
    shape = Shape(load, "salt ")
    first = shape.prompt(0)
    shape.answered(0, " an answer that was really given")
    second = shape.prompt(1)
    assert second.startswith(first)
    assert " an answer that was really given" in second
    other = shape.prompt(3)
    # A quarter of the beginning is common to all conversations, and nothing more.
    assert 0.2 < shared(first, other) / len(first) < 0.3
    assert not shared(first, Shape(load, "sugar ").prompt(0)) > len("s")


def test_prompts_are_about_as_long_in_tokens_as_they_were() -> None:
    load = described(agents=1, turns=2, first=1000, growth=100, output=20, conversations=1)
    words = len(Shape(load).prompt(0).split())
    assert words == pytest.approx(load.jobs[0].prompt_tokens, rel=0.05)


async def test_a_load_is_served_in_its_order_with_as_many_tokens_as_recorded() -> None:
    load = described(agents=2, turns=3, first=60, growth=10, output=5)
    async with FakeLlamaServer(slots=4, context=4096) as fake:
        served = await serve(fake.base_url, load, Shape(load), pace=0)
    assert served.failures == []
    assert served.output == 5 * len(load.jobs)
    assert sorted(call.number for call in served.calls) == list(range(len(load.jobs)))
    ends = {call.number: call.started + call.total for call in served.calls}
    for call in served.calls:
        before = load.jobs[call.number].before
        assert before < 0 or ends[before] <= call.started
    assert served.reuse is not None
    assert served.reuse > 0.5


async def test_every_side_and_round_has_as_much_to_read_and_nothing_in_common() -> None:
    load = described(agents=1, turns=1, first=60, growth=10, output=3, conversations=1)
    async with FakeLlamaServer() as fake:
        targets = [Target(f"server {number}", fake.base_url) for number in range(12)]
        sides = await replay(load, {}, targets, rounds=2, pace=0, model="m", progress=quiet)
    prompts = [one.prompt for side in sides for one in side.rounds]
    assert prompts == prompts[:1] * 24
    assert complaints(sides) == []


async def test_sides_take_turns_and_each_round_begins_cold() -> None:
    load = described(agents=1, turns=1, first=60, growth=10, output=3, conversations=1)
    said: list[str] = []
    async with FakeLlamaServer() as one, FakeLlamaServer() as two:
        targets = [Target("one", one.base_url), Target("two", two.base_url)]
        sides = await replay(
            load,
            {},
            targets,
            rounds=2,
            pace=0,
            model="m",
            progress=lambda what, done, _: said.append(what) if not done else None,
        )
    assert said == ["one, round 1", "two, round 1", "two, round 2", "one, round 2"]
    assert [[call.cached for call in one.calls] for side in sides for one in side.rounds] == [[0]] * 4
    assert complaints(sides) == []
    assert as_json(load, sides)["sides"][1]["figures"]["seconds"]["half_interval"] is not None


def test_an_interval_needs_two_rounds() -> None:
    assert Estimate.of([3.0]) == Estimate(3.0, None)
    found = Estimate.of([1.0, 2.0, 3.0])
    assert found is not None
    assert found.half == pytest.approx(4.303 / 3**0.5)
    assert found.text("{:.1f}") == "2.0 ± 2.5"
    assert Estimate.of([]) is None


def test_unequal_work_and_failures_are_complained_of() -> None:
    def side(name: str, output: int, error: str = "") -> Side:
        call = Call(0, 0.0, 0.1, 0.2, 10, 90, output, error)
        return Side(Target(name, "http://x"), [Served([call], 1.0)])

    assert complaints([side("a", 5), side("b", 5)]) == []
    assert "a 5, b 4" in complaints([side("a", 5), side("b", 4)])[0]
    assert "1 calls failed, the first: boom" in complaints([side("a", 5), side("b", 5, "boom")])[0]


async def test_a_server_that_fails_is_a_failure_of_the_call() -> None:
    load = described(agents=1, turns=2, first=60, growth=10, output=3, conversations=1)
    served = await serve("http://127.0.0.1:9", load, Shape(load), pace=0)
    assert len(served.failures) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [("localhost:8080", "expected an address"), ("name=ftp://x", "expected an address")],
)
def test_what_is_no_address_is_refused(text: str, why: str) -> None:
    with pytest.raises(ReplayError, match=why):
        target(text)


def test_addresses_may_have_names() -> None:
    assert target("a=http://h:1") == Target("a", "http://h:1")
    assert target("http://h:1/v1?x=y") == Target("h:1/v1?x=y", "http://h:1/v1?x=y")


def test_loads_come_from_journals_traces_and_descriptions(tmp_path: Path) -> None:
    journal = write(
        tmp_path / "j.jsonl",
        agents.journal(agents.load(2, 4, turns=3), agents.speeds(), agents.Setup(2, 8192, "slots")),
    )
    load, texts = source(str(journal), live=3, calls=None)
    assert (load.sessions, texts) == (4, {})
    load, _ = source("agents=3,turns=2,conversations=5", live=1, calls=None)
    assert (len(load.jobs), load.sessions) == (10, 5)
    trace = tmp_path / "t.jsonl"
    lines: list[dict[str, Any]] = [
        {"timestamp": n, "input": "hello " * 30 * (n + 1), "output": "yes", "session_id": "s"}
        for n in range(3)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    load, texts = source(str(trace), live=3, calls=None)
    assert len(load.jobs) == 3
    assert Shape(load, "", texts).prompt(0) == "hello " * 30
    with pytest.raises(ReplayError, match="'speed' is not known"):
        source("agents=3,speed=2", live=1, calls=None)
    with pytest.raises(ReplayError, match="no such file"):
        source(str(tmp_path / "none"), live=1, calls=None)


def test_the_command_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "replay", str(tmp_path / "none"), "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "no such file" in result.output
