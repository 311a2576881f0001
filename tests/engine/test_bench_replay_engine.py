"""``warmslot bench replay`` on real engines: its figures are the engine's own."""

from __future__ import annotations

import asyncio
import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner
from warmslot.launcher.bench_replay import source
from warmslot.launcher.cli import app

from tests.engine.conftest import CONTEXT, SLOTS
from tests.support.router import sample, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import RunningEngine
    from tests.support.router import Service

LOAD = "agents=2,turns=3,first=80,growth=20,output=3,conversations=2"
ROUNDS = 2


class Address:
    """The engine as the router needs it."""

    n_slots, context = SLOTS, CONTEXT

    def __init__(self, engine: RunningEngine) -> None:
        self.base_url = engine.base_url


async def counters(service: Service) -> dict[str, float]:
    """The engine's own sums."""
    text = (await service.http.get("/backends/b0/metrics")).text
    return {name: sample(text, f"llamacpp:{name}_total") for name in ("prompt_tokens", "tokens_predicted")}


def called(side: dict[str, Any], name: str) -> list[int]:
    """One figure of all calls of a side."""
    return [call[name] for one in side["rounds"] for call in one["calls"]]


@pytest.mark.timeout(300)
async def test_both_sides_do_the_same_work_and_the_engine_counts_it_alike(
    engine: RunningEngine, tmp_path: Path
) -> None:
    file = tmp_path / "replay.json"
    async with serving([Address(engine)], fresh=False) as service:
        before = await counters(service)
        words = ("bench", "replay", LOAD, f"router={service.url}", f"engine={engine.base_url}")
        options = ("--rounds", str(ROUNDS), "--pace", "0", "--json", str(file))
        result = await asyncio.to_thread(CliRunner().invoke, app, [*words, *options])
        await engine.settled()
        after = await counters(service)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    load, _ = source(LOAD, live=1, calls=None)
    assert (found["calls"], found["conversations"]) == (len(load.jobs), load.sessions) == (6, 2)
    assert found["complaints"] == []
    assert [side["name"] for side in found["sides"]] == ["router", "engine"]
    for side in found["sides"]:
        assert [len(one["calls"]) for one in side["rounds"]] == [6] * ROUNDS
        assert called(side, "error") == [""] * 6 * ROUNDS
        assert called(side, "output") == [3] * 6 * ROUNDS
        cached, processed = sum(called(side, "cached")), sum(called(side, "processed"))
        reuse = [one["reuse"] for one in side["rounds"]]
        assert side["figures"]["reuse"]["mean"] == pytest.approx(sum(reuse) / ROUNDS)
        assert sum(one["prompt_tokens"] for one in side["rounds"]) == cached + processed
        assert side["figures"]["seconds"]["mean"] > 0
    for name, counter in (("processed", "prompt_tokens"), ("output", "tokens_predicted")):
        counted = after[counter] - before[counter]
        assert counted == sum(sum(called(side, name)) for side in found["sides"])
    # Two conversations at once on four slots: through the router no turn computes its predecessor again.
    for one in found["sides"][0]["rounds"]:
        calls = {call["number"]: call for call in one["calls"]}
        for _, turns in groupby(range(6), key=lambda number: load.jobs[number].session):
            first, *later = (calls[number] for number in turns)
            for turn in later:
                assert turn["cached"] >= first["cached"] + first["processed"] - 2
                first = turn
