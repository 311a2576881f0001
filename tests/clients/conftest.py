"""Client libraries as they are, on a router before a real engine.

They are installed by the extra ``clients``; without it these tests are skipped, or fail where
``WARMSLOT_REQUIRE_CLIENTS`` is set.
"""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.conftest import CONTEXT, SLOTS, RunningEngine
from tests.support.router import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from warmslot.launcher.engine import Engine

    from tests.support.router import Service

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import waits for the network
os.environ["LANGCHAIN_TRACING_V2"] = "false"

TEMPLATE = Path(__file__).with_name("tools.jinja")
"""The demo model's own template leaves tools out."""


def library(name: str) -> Any:
    """A client library, its own warnings aside."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("WARMSLOT_REQUIRE_CLIENTS"):
            pytest.fail(f"$WARMSLOT_REQUIRE_CLIENTS is set: {error}", pytrace=False)
        pytest.skip(str(error))


@dataclass
class Address:
    """A running engine as the router needs it."""

    base_url: str
    n_slots: int
    context: int


@pytest.fixture(scope="module")
def clients_engine(installed_engine: Engine, demo_model: Path) -> Iterator[RunningEngine]:
    """An engine of these tests' own."""
    running = RunningEngine(installed_engine, demo_model, "--jinja", "--chat-template", TEMPLATE.read_text())
    yield running
    running.stop()


@pytest.fixture
async def service(clients_engine: RunningEngine) -> AsyncIterator[Service]:
    """A router that asks for a key and knows one model."""
    address = Address(clients_engine.base_url, SLOTS, CONTEXT)
    async with serving([address], fresh=False, keys=[{"name": "tester", "value": "sk-test"}]) as running:
        yield running
        await running.watcher.until(lambda w: w.level.get("m", 0) == 0)
        assert running.router.dispatcher.held() == {}
