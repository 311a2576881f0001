"""Prefilling when idle: it waits for quiet, goes through the router, and gives way at once."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from warmslot.launcher import warm_up
from warmslot.launcher.preambles import LEAST, LONGEST, MOST, Preambles
from warmslot.launcher.prompt_file import WarmUpError
from warmslot.launcher.warm_up import WarmUp
from warmslot.router.clocks import ENDING
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
        running = asyncio.create_task(warm.run(service.url))
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
        running = asyncio.create_task(warm.run(service.url))
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


async def test_what_conversations_share_is_learned_and_prefilled_after_a_restart(prompt: Path) -> None:
    del prompt
    warm = WarmUp({}, {"m": 1})
    shared = "You are one of many agents with the same rules.\n" * 12
    async with FakeLlamaServer() as fake, serving([fake], observers=[warm]) as service:
        running = asyncio.create_task(warm.run(service.url))
        for name in ("one", "two"):
            body = {"prompt": f"{shared}Agent {name} starts. " + name * 60, "n_predict": 1}
            assert (await service.http.post("/completion", json=body)).status_code == 200
        await fake.crash()
        await service.router.dispatcher.fleet.backend_down("b0", "a crash")
        await fake.restart()
        await service.router.dispatcher.fleet.backend_ready(
            "b0", fake.base_url, fake.n_slots, fake.context, fresh=True
        )
        warm.cold("m")
        await service.watcher.until(lambda watcher: len(watcher.reports) == 3)
        body = {"prompt": f"{shared}Agent three starts.", "n_predict": 1}
        assert (await service.http.post("/completion", json=body)).status_code == 200
        running.cancel()
        await asyncio.wait({running})
        *_, prefill, after = service.watcher.reports
        assert prefill.cached_tokens == 0
        assert after.cached_tokens >= prefill.processed_tokens - 1


def test_the_longest_and_most_shared_prefixes_win_and_are_no_parts_of_each_other() -> None:
    preambles = Preambles()
    small, large = "a rule of the small kind\n" * 20, "another rule, of the large kind\n" * 40
    for number in range(3):
        preambles.saw(small + f"{number}" * (ENDING + 1))
        preambles.saw(large + f"{number}" * (ENDING + 1))
    preambles.saw("nobody else begins so\n" * 50)
    assert preambles.best(3) == [large, small]
    assert preambles.best(1) == [large]
    assert preambles.best(0) == []


def test_a_conversation_counts_once_however_often_it_goes_on() -> None:
    preambles, shared = Preambles(), "the same beginning\n" * 20
    for text in ("a" * 100, "a" * 200, "a" * 150, "a" * 145 + "<think>"):
        preambles.saw(shared + text)
    assert preambles.best(1) == []
    preambles.saw(shared + "b" * 100)
    assert preambles.best(1) == [shared]


def test_a_name_tells_conversations_apart_and_together() -> None:
    preambles, shared = Preambles(), "the same beginning\n" * 20
    preambles.saw(shared, "one")
    preambles.saw(shared + "an edited beginning", "one")
    assert preambles.best(1) == []
    preambles.saw(shared, "two")
    assert preambles.best(1) == [shared]


def test_only_the_last_conversations_count() -> None:
    preambles, shared = Preambles(), "the same beginning\n" * 20
    preambles.saw(shared, "one")
    preambles.saw(shared, "two")
    for number in range(MOST - 1):
        preambles.saw(f"{number:02}" * LEAST)
    assert preambles.best(1) == []


@pytest.mark.parametrize(
    ("prefix", "kept"),
    [
        ("a line\n" * 50 + "half of a", "a line\n" * 50),
        ("head\n" + "one long line " * 40 + "wo", "head\n" + ("one long line " * 40)[:-1]),
        ("x" * 400, "x" * 400),
    ],
)
def test_a_prefix_ends_where_a_token_does(prefix: str, kept: str) -> None:
    preambles = Preambles()
    preambles.saw(prefix + "1" * (ENDING + 1))
    preambles.saw(prefix + "2" * (ENDING + 1))
    assert preambles.best(1) == [kept]


def test_of_a_huge_prompt_the_beginning_is_kept() -> None:
    preambles = Preambles()
    for name in ("one", "two"):
        preambles.saw("y" * (LONGEST * 2), name)
    assert [len(prefix) for prefix in preambles.best(1)] == [LONGEST]
