"""A router in front of one fake engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import serving
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.router import Service


@pytest.fixture(autouse=True)
async def _connections_are_closed() -> AsyncIterator[None]:
    yield
    await WireClient.leave_all()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with FakeLlamaServer() as fake, serving([fake]) as running:
        yield running
