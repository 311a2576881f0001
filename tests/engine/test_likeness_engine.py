"""Byte for byte what the real engine answers, through the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.engine.conftest import CONTEXT, SLOTS, RunningEngine
from tests.support.likeness import CORPUS, REAL, both
from tests.support.router import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.router import Service

ALL = CORPUS | REAL


@dataclass
class Address:
    """A running engine as the router needs it."""

    base_url: str
    n_slots: int
    context: int


@pytest.fixture
async def service(engine: RunningEngine) -> AsyncIterator[Service]:
    async with serving([Address(engine.base_url, SLOTS, CONTEXT)], fresh=False) as running:
        yield running
        await running.watcher.until(lambda w: w.level.get("m", 0) == 0)
    await engine.settled()


@pytest.mark.parametrize("name", ALL)
async def test_like_the_engine(service: Service, engine: RunningEngine, name: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=100) as http:
        direct, routed = await both(http, engine.base_url, service.url, ALL[name])
    assert routed == direct
