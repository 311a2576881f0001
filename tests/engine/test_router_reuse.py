"""The router on real engines: what it predicts, what is reused, and that no slot has two requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.router.settling import Timing

from tests.engine.conftest import CONTEXT, SLOTS, RunningEngine
from tests.support.router import chat, sample, serving, text_of
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from warmslot.launcher.engine import Engine

    from tests.support.router import Service

CHAT = "/v1/chat/completions"
LAUNCH = re.compile(r"slot\s+launch_slot_: id\s+(\d+)")
RELEASE = re.compile(r"slot\s+release: id\s+(\d+)")


@dataclass
class Address:
    """A running engine as the router needs it."""

    base_url: str
    n_slots: int
    context: int


@pytest.fixture(scope="module")
def two_slots(installed_engine: Engine, demo_model: Path) -> Iterator[RunningEngine]:
    """An engine of these tests' own, which may be filled and killed."""
    running = RunningEngine(installed_engine, demo_model, "-np", "2", "-c", str(2 * CONTEXT), "-t", "1")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def four_slots(installed_engine: Engine, demo_model: Path) -> Iterator[RunningEngine]:
    """The same with four slots."""
    running = RunningEngine(installed_engine, demo_model, "-t", "1")
    yield running
    running.stop()


@contextlib.asynccontextmanager
async def routed(engine: RunningEngine, slots: int, **more: Any) -> AsyncIterator[Service]:
    """A router in front of an engine that others have used before."""
    async with serving([Address(engine.base_url, slots, CONTEXT)], fresh=False, **more) as service:
        yield service
        await service.watcher.until(lambda w: w.level.get("m", 0) == 0)
    await WireClient.leave_all()


async def engine_metric(service: Service, name: str) -> float:
    """One of the engine's own metrics."""
    return sample((await service.http.get("/backends/b0/metrics")).text, f"llamacpp:{name}")


class Conversation:
    """A conversation whose every turn is checked against the engine's own numbers."""

    def __init__(self, service: Service, topic: str) -> None:
        self.service = service
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You know all about {topic}. " + f"Be brief on {topic}. " * 8},
        ]
        self.resident = 0
        self.slot = ""

    async def turn(self, text: str) -> tuple[int, int]:
        """Say something; predicted and observed tokens of reuse."""
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": 6, "temperature": 0}
        answer = await self.service.http.post(CHAT, json=body)
        assert answer.status_code == 200
        data = answer.json()
        timings = data["timings"]
        self.slot = answer.headers["x-warmslot-slot"]
        self.messages.append({"role": "assistant", "content": data["choices"][0]["message"]["content"]})
        self.resident = timings["cache_n"] + timings["prompt_n"] + timings["predicted_n"] - 1
        return int(answer.headers["x-warmslot-predicted-tokens"]), timings["cache_n"]


async def test_two_conversations_and_a_stranger_on_two_slots(two_slots: RunningEngine) -> None:
    async with routed(two_slots, 2) as service:
        one, two = Conversation(service, "rivers"), Conversation(service, "bridges")
        for conversation in (one, two):
            await conversation.turn("Begin.")
        assert one.slot != two.slot
        for number in range(3):
            for conversation in (one, two):
                before, slot = conversation.resident, conversation.slot
                predicted, cached = await conversation.turn(f"Say {number}.")
                assert conversation.slot == slot
                assert before - cached <= 2, "all but the new tokens are reused"
                assert abs(predicted - cached) <= 2
        stranger = Conversation(service, "an unrelated matter")
        await stranger.turn("Begin.")
        kept = one if stranger.slot == two.slot else two
        before = kept.resident
        _, cached = await kept.turn("And now?")
        assert before - cached <= 2, "the stranger took the other slot"


async def test_a_clock_near_the_top_takes_no_slot_of_another_conversation(two_slots: RunningEngine) -> None:
    async with routed(two_slots, 2) as service:
        kept, ticking = Conversation(service, "rivers"), Conversation(service, "a very long matter, " * 8)
        await kept.turn("Begin.")
        rest, slots = ticking.messages[0]["content"], set()
        for minute in range(5):
            ticking.messages[0]["content"] = f"It is 2026-05-01 10:{minute:02d}:00 UTC. {rest}"
            predicted, cached = await ticking.turn(f"Say {minute}.")
            assert abs(predicted - cached) <= 16
            assert cached < 40, "what follows the clock is computed"
            slots.add(ticking.slot)
        assert slots == {ticking.slot}
        before = kept.resident
        _, cached = await kept.turn("And now?")
        assert before - cached <= 2
        assert kept.slot != ticking.slot


async def test_predictions_hold_over_a_mixed_run(four_slots: RunningEngine) -> None:
    chance = random.Random(7)  # noqa: S311 - reproducible, not secret
    async with routed(four_slots, SLOTS) as service:
        conversations = [
            Conversation(service, topic) for topic in ("cats", "dogs", "owls", "bees", "ants", "elk")
        ]
        for number in range(20):
            conversation = chance.choice(conversations)
            predicted, cached = await conversation.turn(f"Tell me more, part {number}.")
            assert abs(predicted - cached) <= max(16, 0.02 * cached)
        text = (await service.http.get("/metrics")).text
        predicted_all = sample(text, "warmslot_predicted_reuse_tokens_total")
        cached_all = sample(text, "warmslot_prompt_tokens_total", reuse="cached")
        assert cached_all > 0
        assert abs(predicted_all - cached_all) <= 0.02 * cached_all
        assert sample(text, "warmslot_recomputed_tokens_total") == sample(
            text, "warmslot_prompt_tokens_total", reuse="processed"
        )


async def test_two_hundred_at_once_each_get_their_own_answer(four_slots: RunningEngine) -> None:
    """Fifty conversations of four turns. A grammar makes each answer its conversation's own mark."""
    lines = len(four_slots.lines)
    async with routed(four_slots, SLOTS) as service:
        before = await engine_metric(service, "prompt_tokens_total")

        async def conversation(number: int) -> None:
            mark, text = f"m{number:03d}", f"Conversation {number}. "
            for turn in range(4):
                body = {
                    "prompt": text,
                    "n_predict": 8,
                    "temperature": 0,
                    "stream": (number + turn) % 2 == 0,
                    "grammar": f'root ::= "{mark}"',
                }
                answer = await service.http.post("/completion", json=body)
                assert answer.status_code == 200
                assert text_of(answer.text) == mark
                text += f"{mark} and "

        await asyncio.gather(*(conversation(number) for number in range(50)))
        assert service.router.dispatcher.held() == {}
        assert await engine_metric(service, "requests_deferred") == 0
        processed = await service.metric("warmslot_prompt_tokens_total", reuse="processed")
        assert await engine_metric(service, "prompt_tokens_total") - before == processed
        assert await service.metric("warmslot_prompt_tokens_total", reuse="cached") > 0
    await four_slots.settled()
    launched = 0
    busy: set[str] = set()
    for line in four_slots.lines[lines:]:
        if found := LAUNCH.search(line):
            assert found[1] not in busy, "two requests on one slot"
            busy.add(found[1])
            launched += 1
        elif found := RELEASE.search(line):
            busy.discard(found[1])
    assert launched == 200


@pytest.mark.parametrize("phase", ["before the first byte", "in mid-stream", "while queued"])
async def test_a_client_leaves_while_another_streams(two_slots: RunningEngine, phase: str) -> None:
    """With the dispatcher's real patience: how late the engine notices is the engine's own affair."""
    async with routed(two_slots, 2, timing=Timing()) as service:
        long = {"temperature": 0, "ignore_eos": True, "stream": True}
        other = await WireClient.post(service.url, CHAT, chat("Count to a thousand.", max_tokens=300, **long))
        await other.head()
        if phase == "while queued":
            third = await WireClient.post(service.url, CHAT, chat("Count, too.", max_tokens=200, **long))
            await third.head()
        text = "Say something. " * (100 if phase == "before the first byte" else 1)
        client = await WireClient.post(service.url, CHAT, chat(text, max_tokens=1000, **long))
        if phase == "in mid-stream":
            await client.read_until(b"data: ")
        elif phase == "before the first byte":
            await two_slots.until(lambda: len(two_slots.processing) == 2)
        else:
            await service.watcher.until(lambda w: w.level["m"] == 3)
        client.leave()
        if phase == "while queued":
            await service.watcher.until(lambda w: w.level["m"] == 2)
            third.leave()
        await service.watcher.until(lambda w: w.reports)
        assert service.watcher.reports[0].status == "cancelled"
        answer = await service.chat("And you?", max_tokens=4)
        assert answer.status_code == 200
        other.leave()
        await service.watcher.until(lambda w: w.level["m"] == 0)
        await two_slots.settled()
        assert service.router.dispatcher.held() == {}
        assert await engine_metric(service, "requests_deferred") == 0
        answers = await asyncio.gather(*(service.chat(f"Number {n}?", max_tokens=4) for n in range(2)))
        assert {answer.status_code for answer in answers} == {200}


async def test_an_engine_killed_in_mid_stream(installed_engine: Engine, demo_model: Path) -> None:
    flags = ("-np", "2", "-c", str(2 * CONTEXT), "-t", "1")
    first = RunningEngine(installed_engine, demo_model, *flags)
    try:
        async with serving([Address(first.base_url, 2, CONTEXT)]) as service:
            dispatcher = service.router.dispatcher
            body = chat("Count to a thousand.", max_tokens=1500, ignore_eos=True, stream=True)
            client = await WireClient.post(service.url, CHAT, body, "Connection: close")
            await client.read_until(b"data: ")
            first.process.kill()
            text = await client.rest()
            assert b'"code":"engine_failed"' in text
            assert b"[DONE]" not in text
            waiting = asyncio.create_task(service.chat("Still there?", max_tokens=4))
            await service.watcher.until(lambda w: w.level["m"] >= 1)
            await dispatcher.fleet.backend_down("b0", "it was killed")
            assert dispatcher.slots() == []
            second = RunningEngine(installed_engine, demo_model, *flags)
            try:
                await dispatcher.fleet.backend_ready("b0", second.base_url, 2, CONTEXT, fresh=True)
                answer = await waiting
                assert answer.status_code == 200
                assert answer.json()["timings"]["cache_n"] == 0
                assert answer.headers["x-warmslot-predicted-tokens"] == "0"
            finally:
                second.stop()
    finally:
        first.stop()
        await WireClient.leave_all()
