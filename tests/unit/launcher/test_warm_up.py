"""Prefilling when idle: it waits for quiet, goes through the router, and gives way at once."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from warmslot.launcher import warm_up
from warmslot.launcher.prompt_file import WarmUpError
from warmslot.launcher.warm_up import WarmUp
from warmslot.router.values import Status

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import serving

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = {"messages": [{"role": "system", "content": "You are careful. " * 20}]}


@pytest.fixture
def prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(warm_up, "_QUIET", 0.01)
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(PROMPT))
    return file


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not JSON"), ("[]", "found no messages"), ('{"model": "m"}', "found no messages")],
)
def test_files_without_a_prompt_are_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(WarmUpError, match=said):
        WarmUp({"m": [str(file)]}).check()
    with pytest.raises(WarmUpError, match="No such file"):
        WarmUp({"m": [str(tmp_path / "none.json")]}).check()


async def test_a_prompt_is_prefilled_and_reused(prompt: Path) -> None:
    warm = WarmUp({"m": [str(prompt)]})
    async with FakeLlamaServer() as fake, serving([fake], observers=[warm]) as service:
        running = asyncio.create_task(warm.run(service.url, None))
        warm.cold("m")
        await service.watcher.until(lambda watcher: len(watcher.reports) == 1)
        running.cancel()
        await asyncio.wait({running})
        body = {"messages": [*PROMPT["messages"], {"role": "user", "content": "Hi"}]}
        assert (await service.http.post("/v1/chat/completions", json=body)).status_code == 200
        first, second = service.watcher.reports
        assert first.cached_tokens == 0
        assert second.cached_tokens > first.processed_tokens // 2


async def test_it_gives_way_to_a_request_and_is_done_later(prompt: Path) -> None:
    warm = WarmUp({"m": [str(prompt)]})
    async with FakeLlamaServer() as fake, serving([fake], observers=[warm]) as service:
        fake.prefill.hold()
        running = asyncio.create_task(warm.run(service.url, None))
        warm.cold("m")
        await fake.prefill.arrived()
        asking = asyncio.create_task(service.chat("Something else"))
        await service.watcher.until(
            lambda watcher: any(outcome.status is Status.CANCELLED for outcome in watcher.outcomes)
        )
        fake.prefill.release()
        assert (await asking).status_code == 200
        await service.watcher.until(lambda watcher: len(watcher.reports) == 3)
        running.cancel()
        await asyncio.wait({running})
        assert [report.status for report in service.watcher.reports].count(Status.OK) == 2
