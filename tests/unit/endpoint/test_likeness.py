"""Through the router an answer is the engine's own, byte for byte, but for ids, times and added headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.likeness import CORPUS, both

if TYPE_CHECKING:
    from tests.support.router import Service


@pytest.mark.parametrize("name", CORPUS)
async def test_like_the_engine(service: Service, name: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        direct, routed = await both(http, service.fake.base_url, service.url, CORPUS[name])
    assert routed == direct
