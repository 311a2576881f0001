"""``warmslot bench demo`` at its smallest: both sides really run, and the figures are the engine's."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import orjson
import pytest
from warmslot.launcher.engine import EngineKind

if TYPE_CHECKING:
    from pathlib import Path

    from warmslot.launcher.engine import Engine


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("demo_model")
async def test_both_sides_answer_and_reuse(installed_engine: Engine, tmp_path: Path) -> None:
    kind = installed_engine.kind
    setting = kind.value if kind is EngineKind.EMBEDDED else installed_engine.path
    figures = tmp_path / "figures.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "warmslot.launcher", "bench", "demo"),
        *("--agents", "1", "--turns", "2", "--slots", "2", "--engine", setting, "--json", figures),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    document = orjson.loads(figures.read_bytes())
    assert [side["name"] for side in document["sides"]] == [
        "llama-server, default flags",
        "warmslot, 2 slots",
    ]
    for side in document["sides"]:
        assert (side["requests"], side["failures"]) == (3, [])
        assert f"{side['prefilled_tokens']:,} of {side['prompt_tokens']:,}" in out.decode()
        first, second = sorted(
            (sample for sample in side["samples"] if sample["kind"] == "turn"),
            key=lambda sample: sample["cached"] + sample["processed"],
        )
        assert second["cached"] >= first["processed"]
