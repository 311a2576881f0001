"""Kill -9 of ``warmslot up`` at any moment: the next start serves, on one engine, and its picture is true.

Each moment is met ``WARMSLOT_FAULTS`` times, one after the other (default 1; ``make faults`` takes 20): who
serves again is the next to be killed. Only launchers that this test started are killed; engines end with
them, or live on and are taken over (``state.outlive``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import psutil
import pytest
from warmslot.launcher.engine import EngineKind

from tests.support.launcher import gone
from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from warmslot.launcher.engine import Engine

    from tests.support.up import Running

    StartUp = Callable[..., Awaitable[Running]]
    Moment = Callable[["Case"], Awaitable[None]]

pytestmark = pytest.mark.faults

TIMES = int(os.environ.get("WARMSLOT_FAULTS", "1"))
CHECKED = 10
"""Requests after a fault of which the prediction must be what was observed."""
BOUND = 30.0
"""Seconds within which the next start serves."""


class Case:
    """One configuration, and the launcher that runs it now."""

    def __init__(self, up: StartUp, text: str, folder: Path) -> None:
        self._up = up
        self._text = text
        self.folder = folder
        self.model = folder / "model.gguf"
        self.running: Running
        self._port = "0"

    async def start(self, *, serving: bool = True) -> None:
        """Start it, on the port that it had."""
        async with asyncio.timeout(BOUND):
            self.running = await self._up(self._text, "--port", self._port, serving=serving)
        if serving:
            self._port = self.running.url.rpartition(":")[2]

    async def kill(self) -> None:
        """Kill -9 of the launcher."""
        with contextlib.suppress(ProcessLookupError):
            self.running.process.kill()
        await self.running.end()

    def client(self) -> httpx.AsyncClient:
        """Of the router."""
        return httpx.AsyncClient(base_url=self.running.url, timeout=PATIENCE, trust_env=False)

    def engines(self) -> set[int]:
        """The processes that were started with this test's model."""
        return {
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if str(self.model) in (process.info["cmdline"] or ())
        }

    async def killed_at(self, prompt: str, is_it: Callable[[dict[str, Any]], bool]) -> None:
        """Kill the launcher at the first event of a stream that is the one."""
        body = {
            "prompt": prompt,
            "stream": True,
            "return_progress": True,
            "n_predict": 400,
            "ignore_eos": True,
        }
        killed = False
        with contextlib.suppress(httpx.TransportError):  # the answer that is cut off
            async with self.client() as client, client.stream("POST", "/completion", json=body) as answer:
                async for event in events(answer):
                    if not killed and is_it(event):
                        killed = True
                        await self.kill()
        assert killed


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """What a stream tells."""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield orjson.loads(line.removeprefix("data: "))


def text(number: int, turns: int) -> str:
    return "".join(
        f"In story {number}, chapter {turn}, they met at {turn * 7}.\n" for turn in range(3 + turns)
    )


async def idle(case: Case) -> None:
    await case.kill()


async def loading(case: Case) -> None:
    """The last one ended in peace, with its engine; the next is killed as soon as its own reads the model."""
    case.running.process.send_signal(signal.SIGTERM)
    assert await case.running.end() == (0, "")
    await case.start(serving=False)
    await case.running.until(r"^one: (reading|loading|model)")
    await case.kill()


async def prefilling(case: Case) -> None:
    await case.killed_at(text(9, 30), lambda event: "prompt_progress" in event)


async def decoding(case: Case) -> None:
    await case.killed_at(text(8, 1), lambda event: bool(event.get("content")))


async def saving(case: Case) -> None:
    """It is told to stop, and killed when the first of the files that it has saved is there."""
    folder = case.folder / "kv"
    before = {path.name for path in folder.glob("*.kv")}

    def until_there_is_one_more() -> None:
        while case.running.process.returncode is None:
            if {path.name for path in folder.glob("*.kv")} - before:
                return
            os.sched_yield()

    async with case.client() as client:
        await client.get("/health")
    case.running.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(until_there_is_one_more)
    await case.kill()


MOMENTS: list[Moment] = [idle, loading, prefilling, decoding, saving]


@pytest.mark.parametrize("outlive", [False, True], ids=["engine ends", "engine lives on"])
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
async def test_a_killed_launcher_is_followed_by_one_that_serves(  # noqa: PLR0917 - fixtures
    up: StartUp, installed_engine: Engine, demo_model: Path, tmp_path: Path, moment: Moment, outlive: bool
) -> None:
    kind = installed_engine.kind
    engine = kind.value if kind is EngineKind.EMBEDDED else installed_engine.path
    case = Case(up, "", tmp_path)
    case.model.symlink_to(demo_model)
    case = Case(
        up,
        f"""
engine: {engine}
state: {{outlive: {str(outlive).lower()}}}
limits: {{drain_timeout: 60s}}
pools:
  - name: demo
    scheduling: {{in_flight: pair}}
    backends:
      - {{name: one, model: {case.model}, slots: 4, context: 1024, threads: 2, args: [--no-warmup],
         slot_save_path: {tmp_path / "kv"}}}
""",
        tmp_path,
    )
    await case.start()
    for _ in range(TIMES):
        await converse(case, known=moment is loading)
        before = case.engines()
        await moment(case)
        if not outlive:
            assert all(gone(pid) for pid in before | case.engines())
        await case.start()
        [after] = case.engines()
        assert (after in before) == (outlive and moment is not loading)
        await converse(case, known=not outlive)
    before = case.engines()
    case.running.process.send_signal(signal.SIGTERM)
    assert await case.running.end() == (0, "")
    assert all(gone(pid) for pid in before | case.engines())


async def converse(case: Case, *, known: bool) -> None:
    """Three conversations take turns. What was predicted is reused, no more and no less.

    Not ``known``: what the slots held at first is not; so the first of each may find more than predicted.
    """
    async with case.client() as client:
        for number in range(CHECKED):
            body = {"prompt": text(number % 3, 2 + number // 3), "n_predict": 4, "ignore_eos": True}
            answer = await client.post("/completion", json=body)
            assert answer.status_code == 200, answer.text
            predicted = int(answer.headers["X-Warmslot-Predicted-Tokens"])
            reused = answer.json()["timings"]["cache_n"]
            assert predicted - reused <= 16, (number, predicted, reused)
            if known or number >= 3:
                assert reused - predicted <= 16, (number, predicted, reused)
                assert number < 3 or reused > 0
