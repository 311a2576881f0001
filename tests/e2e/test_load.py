"""Load on a real engine: every answer is its own prompt's, no lease is lost, counters equal the engine's.

``make soak`` loads it with 64 clients for five minutes; by itself the test takes a few requests.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.router import sample
from tests.support.router import text_of as said
from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.up import Running

    StartUp = Callable[..., Awaitable[Running]]

SECONDS = float(os.environ.get("WARMSLOT_SOAK", "0"))
CLIENTS = 64 if SECONDS else 4
TURNS = 2
CHAT = "/v1/chat/completions"

pytestmark = pytest.mark.timeout(600 + SECONDS * 2)


def body_of(mark: str, turn: int, *, stream: bool) -> dict[str, Any]:
    """A turn of a conversation; the grammar leaves one answer only."""
    messages: list[Any] = [{"role": "user", "content": f"Say {mark}. " + f"It is {mark}. " * 8}]
    for number in range(turn):
        messages += [{"role": "assistant", "content": mark}, {"role": "user", "content": f"Again, {number}."}]
    return {"messages": messages, "grammar": f'root ::= "{mark}"', "max_tokens": 24, "stream": stream}


class Clients:
    """Clients of one router, and what became of their requests."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.right = self.failed = self.left = 0

    async def ask(self, mark: str, turn: int, *, stream: bool, leaves: bool) -> None:
        """One request. A failure has to be a clear one: a status and an error, or an error event."""
        async with self.http.stream("POST", CHAT, json=body_of(mark, turn, stream=stream)) as answer:
            if leaves:
                self.left += 1
                return
            text = (await answer.aread()).decode()
        if answer.status_code == 200 and '"error"' not in text:
            assert mark in said(text)
            self.right += 1
            return
        assert answer.status_code in {200, 429, 502, 503}, text
        assert '"message"' in text
        self.failed += 1


async def numbers(http: httpx.AsyncClient) -> dict[str, float]:
    """The router's counters and the engine's own."""
    ours, engine = (await http.get("/metrics")).text, (await http.get("/backends/one/metrics")).text
    return {
        "processed": sample(ours, "warmslot_prompt_tokens_total", reuse="processed"),
        "cached": sample(ours, "warmslot_prompt_tokens_total", reuse="cached"),
        "in flight": sample(ours, "warmslot_inflight_requests"),
        "queued": sample(ours, "warmslot_queue_requests"),
        "engine processed": sample(engine, "llamacpp:prompt_tokens_total"),
        "engine cached": sample(engine, "llamacpp:prompt_tokens_cached_total"),
        "engine deferred": sample(engine, "llamacpp:requests_deferred"),
    }


async def test_counters_are_the_engines_and_leases_survive_leaving_and_a_kill(up: StartUp, demo: str) -> None:
    running = await up(demo)
    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE + SECONDS, trust_env=False) as http:
        clients = Clients(http)

        async def talk(number: int) -> None:
            for turn in range(TURNS):
                await clients.ask(f"m{number}x", turn, stream=bool((number + turn) % 2), leaves=False)

        await asyncio.gather(*(talk(number) for number in range(CLIENTS)))
        assert (clients.right, clients.failed) == (CLIENTS * TURNS, 0)
        seen = await numbers(http)
        # The engine prints what is above a million with three digits only.
        near = 0.01 if seen["engine processed"] > 1e6 else 0.0
        assert seen["processed"] == pytest.approx(seen["engine processed"], rel=near)
        assert seen["cached"] == pytest.approx(seen["engine cached"], rel=near)
        assert seen["cached"] > 0
        assert seen["engine deferred"] == seen["in flight"] == seen["queued"] == 0

        rng = random.Random(7)  # noqa: S311 - repeatable
        until = time.monotonic() + SECONDS
        engine = max(running.children, key=lambda child: child.memory_info().rss)

        async def storm(number: int) -> None:
            for turn in range(10**6 if SECONDS else TURNS):
                leaves, stream = rng.random() < 0.3, rng.random() < 0.5
                await clients.ask(f"s{number}x", turn % 6, stream=stream, leaves=leaves)
                if SECONDS and time.monotonic() > until:
                    return

        tasks = [asyncio.create_task(storm(number)) for number in range(CLIENTS)]
        await asyncio.wait(tasks, timeout=SECONDS / 2, return_when=asyncio.FIRST_COMPLETED)
        engine.kill()
        await asyncio.gather(*tasks)
        assert clients.left > 0
        # Every slot serves again, and all at once: none was lost to a client that had left or to the kill.
        for number in range(2):
            await clients.ask(f"z{number}x", 0, stream=False, leaves=False)
        await running_dry(http)
        seen = await numbers(http)
        assert seen["engine deferred"] == seen["in flight"] == seen["queued"] == 0
        assert clients.right > CLIENTS * TURNS


async def running_dry(http: httpx.AsyncClient) -> None:
    """Return once no lease is out: clients that left are noticed by the engine within moments."""
    async with asyncio.timeout(PATIENCE):
        while (await numbers(http))["in flight"]:
            # Each request is served, so this waits on the engine and not on a clock.
            await http.post(CHAT, json=body_of("w0x", 0, stream=False))
