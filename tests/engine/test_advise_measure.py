"""``warmslot advise --measure`` from end to end: a journal, advice, and the candidates on a real engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner
from warmslot.launcher.bench import engine_setting
from warmslot.launcher.cli import app
from warmslot.launcher.forecast import Setup
from warmslot.launcher.shape import described

from tests.support import agents
from tests.support.journals import write

if TYPE_CHECKING:
    from pathlib import Path

    from warmslot.launcher.engine import Engine


@pytest.mark.timeout(400)
def test_candidates_are_served_and_their_reuse_is_what_was_foretold(
    installed_engine: Engine, demo_model: Path, tmp_path: Path
) -> None:
    load = described(agents=2, conversations=6, turns=6, first=160, growth=40, output=4)
    journal = write(
        tmp_path / "journal.jsonl", agents.journal(load, agents.speeds(), Setup(2, 1024, "slots"))
    )
    result = CliRunner().invoke(
        app,
        [
            *("advise", str(journal), "--slots", "1,2", "--copy", "50000", "--json"),
            *("--measure", "2", "--model", str(demo_model), "--flags", "-t 2"),
            *("--engine", str(engine_setting(installed_engine))),
        ],
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {one["cache_ram_mib"] for one in found["candidates"]} == {0, 8192}
    measured = found["measured"]
    assert measured[0]["slots"] == found["advice"]["slots"]
    assert {one["slots"] for one in measured} == {1, 2}
    for one in measured:
        assert one["reuse_measured"] == pytest.approx(one["reuse_foretold"], abs=0.03)
        assert one["seconds_measured"] > 0
