"""Every alert on a running system with a real engine. The faults and the load are real, times are shortened.

Minutes of the rules are seconds here. What has to change besides is in :func:`shortened`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.dashboards.test_under_load import Address
from tests.support.router import serving
from tests.support.stack import stack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmslot.launcher.engine import Engine

    from tests.dashboards.conftest import Prometheus

pytestmark = pytest.mark.faults

RULES = Path(__file__).parents[2] / "configs/prometheus"
CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}}
rule_files: [{folder}/*.rules.yml]
scrape_configs:
  - job_name: warmslot
    static_configs: [{{targets: ["{target}"]}}]
  - job_name: warmslot-engine
    metrics_path: /backends/{backend}/metrics
    static_configs: [{{targets: ["{target}"], labels: {{backend: {backend}}}}}]
"""
FLAGS = (
    *("-np", "2", "-c", "4096", "--no-kv-unified", "--slots", "--metrics"),
    # Or what is evicted comes back from there.
    *("--no-cache-idle-slots", "--cache-ram", "0"),
)


def shortened(text: str, day: str) -> str:
    """Rules whose minutes are seconds, hours 20 seconds, and a day ``day``, with lower thresholds."""
    text = re.sub(r"\b1d\b", day, text)
    text = re.sub(r"\b1h\b", "20s", text)
    text = re.sub(r"\b(\d+)m\b", r"\1s", text)
    text = re.sub(r"> (5000|100000)\b", "> 50", text)
    return text.replace("[10s]))) > 15", "[10s]))) > 1")


class Watched(Protocol):
    """A router, whoever runs it."""

    @property
    def url(self) -> str:
        """Its address."""


Watch = Callable[..., Awaitable["Prometheus"]]


@pytest.fixture
def watch(prometheus: Callable[[str], Prometheus], tmp_path: Path) -> Watch:
    """Starts a Prometheus that scrapes a router and one engine, and evaluates the shortened rules."""

    async def start(service: Watched, *, backend: str = "b0", day: str = "120s") -> Prometheus:
        for file in RULES.glob("*.rules.yml"):
            text = shortened(file.read_text(encoding="utf-8"), day)
            (tmp_path / file.name).write_text(text, encoding="utf-8")
        target = service.url.removeprefix("http://")
        config = CONFIG.format(folder=tmp_path, target=target, backend=backend)
        running = await asyncio.to_thread(prometheus, config)
        # What happens before the first scrape is growth that nobody sees.
        await asyncio.to_thread(running.until, lambda one: one.query("warmslot_backend_up"))
        return running

    return start


def firing(prometheus: Prometheus) -> set[str]:
    """The names of alerts that fire now."""
    return {dict(labels)["alertname"] for labels in prometheus.query('ALERTS{alertstate="firing"}')}


async def until_firing(
    prometheus: Prometheus, name: str, meanwhile: Callable[[], Awaitable[object]] | None = None
) -> None:
    """Return once an alert fires; ``meanwhile`` is done before each look."""
    async with asyncio.timeout(100):
        if meanwhile is None:
            await asyncio.to_thread(prometheus.until, lambda one: name in firing(one))
            return
        while name not in await asyncio.to_thread(firing, prometheus):
            await meanwhile()


@asynccontextmanager
async def keeping_busy(work: Callable[[], Awaitable[object]], count: int) -> AsyncIterator[None]:
    """``work`` is done over and over, ``count`` times at once."""

    async def forever() -> None:
        while True:
            await work()

    workers = [asyncio.create_task(forever()) for _ in range(count)]
    yield
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


def kill_who_listens(url: str) -> None:
    """Kill our child process that listens on an address."""
    port = urlsplit(url).port
    for child in psutil.Process().children(recursive=True):
        if any(
            one.laddr and one.laddr.port == port for one in child.net_connections() if one.status == "LISTEN"
        ):
            child.kill()
            return
    raise AssertionError(f"nobody listens on {url}")


@pytest.mark.timeout(400)
async def test_a_nonce_a_full_queue_and_a_killed_engine_are_noticed(
    start_engine: Callable[..., Awaitable[str]], watch: Watch
) -> None:
    engine = await start_engine(*FLAGS)
    scheduling = {"in_flight": "serialize", "queue": "fifo", "max_queue": 2}
    async with serving([Address(engine)], ready=False, scheduling=scheduling) as service:
        service.router.dispatcher.fleet.watch_remote("b0", engine)
        prometheus = await watch(service)
        numbers = itertools.count()
        story = "The same long story is told again and again. " * 12

        async def same() -> None:
            assert (await service.chat(story, max_tokens=1)).status_code == 200

        async def nonce() -> None:
            answer = await service.chat(
                f"{next(numbers):08d} is the number of this request. {story}", max_tokens=1
            )
            assert answer.status_code == 200

        reused = "pool:warmslot_reuse:ratio_rate5m > 0.8"
        while not await asyncio.to_thread(prometheus.query, reused):
            await same()
        assert firing(prometheus) == set()
        await until_firing(prometheus, "ReuseCollapsed", nonce)

        async def long() -> None:
            assert (await service.chat(story, max_tokens=64, ignore_eos=True)).status_code == 200

        async with keeping_busy(long, 3):
            await service.watcher.until(lambda watcher: watcher.level["m"] == 3)
            refused = []

            async def one_too_many() -> None:
                refused.append((await service.chat(story, max_tokens=1)).status_code)

            await until_firing(prometheus, "QueueSaturated", one_too_many)
            assert 429 in refused

        assert "BackendDown" not in firing(prometheus)
        kill_who_listens(engine)
        await until_firing(prometheus, "BackendDown")


@pytest.mark.timeout(400)
async def test_what_engines_and_their_other_clients_do_is_noticed(
    start_engine: Callable[..., Awaitable[str]], watch: Watch
) -> None:
    engine = await start_engine(*FLAGS)
    story, other = "The same long story is told again and again. " * 12, "Something else it is. " * 30
    scheduling = {"in_flight": "serialize", "queue": "fifo"}
    async with (
        serving([Address(engine)], scheduling=scheduling) as service,
        httpx.AsyncClient(base_url=engine, timeout=100, trust_env=False) as foreign,
    ):
        prometheus = await watch(service)

        async def told(text: str = story, tokens: int = 1) -> None:
            answer = await service.chat(text, max_tokens=tokens, ignore_eos=True)
            assert answer.status_code == 200, answer.text

        # Two slots for three conversations that take turns, each evicting the next one's.
        turns = itertools.cycle("abc")
        await until_firing(prometheus, "UnderParallel", lambda: told(next(turns) * 3 + story))

        async def overwritten() -> None:
            await told()
            for slot in range(2):
                body = {"prompt": other, "id_slot": slot, "n_predict": 1}
                assert (await foreign.post("/completion", json=body)).status_code == 200

        await until_firing(prometheus, "PictureDrift", overwritten)

        async def without_timings() -> None:
            body = {"prompt": story, "n_predict": 1, "response_fields": ["content"]}
            answer = await service.http.post("/completion", json=body)
            assert set(answer.json()) == {"content"}

        await until_firing(prometheus, "TruthMissing", without_timings)

        async def long() -> None:
            body = {"prompt": other, "n_predict": 200, "ignore_eos": True}
            assert (await foreign.post("/completion", json=body)).status_code == 200

        async with keeping_busy(long, 4):
            await until_firing(prometheus, "EngineQueueUsed")

        # One at a time and sixteen who want to be next.
        async with keeping_busy(lambda: told(tokens=16), 16):
            await until_firing(prometheus, "TTFTHigh")


@pytest.mark.timeout(400)
async def test_an_engine_that_dies_at_work_again_and_again_is_noticed(
    installed_engine: Engine, demo_model: Path, tmp_path: Path, watch: Watch
) -> None:
    scheduling = {"in_flight": "slots"}
    settings = {"slots": 4, "context": 2048, "threads": 2, "scheduling": scheduling}
    async with stack(installed_engine, demo_model, tmp_path, **settings) as running:
        prometheus = await watch(running, backend="one")
        recorder, dead = running.recorder, itertools.count(2)

        def working() -> int:
            return sum("processing task" in line for line in recorder.lines)

        async def dies_at_work() -> None:
            begun = working()
            async with asyncio.TaskGroup() as group:
                long = [group.create_task(running.complete(f"{n} {n}", n_predict=2000)) for n in range(4)]
                await recorder.until_true(lambda: working() >= begun + 4)
                os.kill(running.pid, signal.SIGKILL)
            assert all(one.result().status_code >= 500 for one in long)
            await running.ready(next(dead))

        async with keeping_busy(dies_at_work, 1):
            await until_firing(prometheus, "ErrorRatioHigh")
            await until_firing(prometheus, "BackendFlapping")


@pytest.mark.timeout(400)
async def test_slots_that_nobody_needs_are_noticed(
    start_engine: Callable[..., Awaitable[str]], watch: Watch
) -> None:
    async with serving([Address(await start_engine(*FLAGS))]) as service:
        prometheus = await watch(service, day="20s")

        async def told() -> None:
            answer = await service.chat("The same long story is told again and again. " * 12, max_tokens=1)
            assert answer.status_code == 200, answer.text

        await until_firing(prometheus, "OverParallel", told)
