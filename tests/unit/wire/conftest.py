"""A fake engine and a client of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from warmslot.router.backend import EngineClient

from tests.fakes.llama_server import FakeLlamaServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def fake() -> AsyncIterator[FakeLlamaServer]:
    async with FakeLlamaServer() as server:
        yield server


@pytest.fixture
async def client(fake: FakeLlamaServer) -> AsyncIterator[EngineClient]:
    engine = EngineClient("a", fake.base_url)
    yield engine
    await engine.aclose()
