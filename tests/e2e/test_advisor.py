"""Advice of a running ``warmslot up`` on real engines: what the command says of the same journal."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import httpx

from tests.support.router import sample
from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.support.up import Running

    StartUp = Callable[..., Awaitable[Running]]
    Command = Callable[..., Awaitable[tuple[int, str, str]]]


async def converse(client: httpx.AsyncClient, topic: str) -> None:
    """Ten turns of one conversation."""
    messages = [{"role": "system", "content": f"Talk about {topic} and nothing else."}]
    for turn in range(10):
        messages.append({"role": "user", "content": f"Say {turn} on {topic}."})
        body = {"messages": messages, "max_tokens": 3, "temperature": 0}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        messages.append({"role": "assistant", "content": f"{topic} {turn}"})


async def advised(client: httpx.AsyncClient) -> dict[str, Any]:
    """What the live page says of the only backend, as soon as it says something."""
    async with asyncio.timeout(PATIENCE), client.stream("GET", "/ui/events") as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (backend,) = json.loads(line.removeprefix("data: "))["backends"]
                if backend["advised"]:
                    found: dict[str, Any] = backend["advised"]
                    return found
    raise AssertionError("the stream ended")


async def test_the_gauge_is_what_the_command_says_of_the_journal(
    up: StartUp, warmslot: Command, demo: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"
    running = await up(f"journal: {{path: {journal}}}\nadvice: {{every: 100ms}}\n{demo}")
    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as client:
        # Just as many requests as are needed, so that it is asked once, with all of them in the journal.
        await asyncio.gather(*(converse(client, topic) for topic in ("tea", "rain", "chess")))
        shown = await advised(client)
        gauge = sample((await client.get("/metrics")).text, "warmslot_advised_slots", backend="one")
    code, out, err = await warmslot("advise", str(journal), "--backend", "one", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["requests"] == 30
    assert gauge == shown["slots"] == told["advice"]["slots"] > 0
    assert (shown["reason"], shown["confidence"]) == (told["reason"], told["confidence"])
    (backend,) = json.loads((await warmslot("status", "--json"))[1])["backends"]
    assert backend["advised"] == shown
    running.process.send_signal(signal.SIGTERM)
    assert await running.end() == (0, "")


async def test_without_a_journal_there_is_no_advice(up: StartUp, warmslot: Command, demo: str) -> None:
    running = await up(demo)
    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as client:
        assert sample((await client.get("/metrics")).text, "warmslot_advised_slots", backend="one") == 0
    (backend,) = json.loads((await warmslot("status", "--json"))[1])["backends"]
    assert backend["advised"] is None
