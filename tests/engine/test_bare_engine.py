"""The engine by itself, as benchmarks and tests run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from warmslot.launcher.bare import BareEngineError, bare_engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from warmslot.launcher.engine import Engine


async def slots(url: str) -> list[Any]:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer: list[Any] = (await client.get(f"{url}/slots")).json()
        return answer


async def test_it_serves_and_is_gone_afterwards(installed_engine: Engine, demo_model: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    async with bare_engine(installed_engine, demo_model, "-t", "2", "-np", "2", "-c", "1024") as url:
        started = set(psutil.Process().children(recursive=True)) - before
        assert started
        assert len(await slots(url)) == 2
    assert not any(child.is_running() for child in started)


async def test_flags_reach_it(start_engine: Callable[..., Awaitable[str]]) -> None:
    url = await start_engine("-np", "3", "-c", "768")
    assert len(await slots(url)) == 3


async def test_a_broken_model_is_an_error_in_one_line(installed_engine: Engine, tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(BareEngineError) as caught:
        async with bare_engine(installed_engine, model):
            pass
    assert "\n" not in str(caught.value)
