"""A router before one fake engine of four slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.router import Service


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with FakeLlamaServer() as fake, serving([fake]) as running:
        yield running
