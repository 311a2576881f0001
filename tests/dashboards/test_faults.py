"""Alerts on a running system. The faults are real, the rules' times are shortened: minutes to seconds."""

from __future__ import annotations

import asyncio
import itertools
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.dashboards.test_under_load import Address
from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.dashboards.conftest import Prometheus
    from tests.support.router import Service

pytestmark = pytest.mark.faults

RULES = Path(__file__).parents[2] / "configs/prometheus"
CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}}
rule_files: [{folder}/*.rules.yml]
scrape_configs:
  - job_name: warmslot
    static_configs: [{{targets: ["{target}"]}}]
  - job_name: warmslot-engine
    metrics_path: /backends/b0/metrics
    static_configs: [{{targets: ["{target}"], labels: {{backend: b0}}}}]
"""
FLAGS = ("-np", "2", "-c", "4096", "--no-kv-unified", "--slots", "--metrics")


def shortened(text: str) -> str:
    """Rules whose minutes are seconds, hours 20 seconds, a day two minutes, with lower thresholds."""
    text = re.sub(r"\b1d\b", "120s", text)
    text = re.sub(r"\b1h\b", "20s", text)
    text = re.sub(r"\b(\d+)m\b", r"\1s", text)
    text = re.sub(r"> 5000\b", "> 50", text)
    return text.replace("[10s]))) > 15", "[10s]))) > 1")


@pytest.fixture
def watched(
    prometheus: Callable[[str], Prometheus], tmp_path: Path
) -> Callable[[Service], Awaitable[Prometheus]]:
    """Starts a Prometheus that scrapes a router and evaluates the shortened rules."""

    async def start(service: Service) -> Prometheus:
        for file in RULES.glob("*.rules.yml"):
            (tmp_path / file.name).write_text(shortened(file.read_text(encoding="utf-8")), encoding="utf-8")
        config = CONFIG.format(folder=tmp_path, target=service.url.removeprefix("http://"))
        return await asyncio.to_thread(prometheus, config)

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


def direct(fake: FakeLlamaServer) -> httpx.AsyncClient:
    """A client that goes round the router."""
    return httpx.AsyncClient(base_url=fake.base_url, timeout=100, trust_env=False)


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
    start_engine: Callable[..., Awaitable[str]], watched: Callable[[Service], Awaitable[Prometheus]]
) -> None:
    engine = await start_engine(*FLAGS)
    scheduling = {"in_flight": "serialize", "queue": "fifo", "max_queue": 2}
    async with serving([Address(engine)], ready=False, scheduling=scheduling) as service:
        service.router.dispatcher.watch_remote("b0", engine)
        prometheus = await watched(service)
        numbers = itertools.count()
        story = "The same long story is told again and again. " * 12

        async def same() -> None:
            assert (await service.chat(story, max_tokens=1)).status_code == 200

        async def nonce() -> None:
            answer = await service.chat(
                f"{next(numbers):08d} is the number of this request. {story}", max_tokens=1
            )
            assert answer.status_code == 200

        for _ in range(40):
            await same()
        await asyncio.to_thread(
            prometheus.until, lambda one: one.query("pool:warmslot_reuse:ratio_rate5m > 0.8")
        )
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
    watched: Callable[[Service], Awaitable[Prometheus]],
) -> None:
    async with FakeLlamaServer(slots=2) as fake, serving([fake]) as service, direct(fake) as foreign:
        prometheus = await watched(service)
        story, other = "The same long story is told again and again. " * 12, "Something else it is. " * 30

        async def told(text: str = story) -> None:
            assert (await service.chat(text, max_tokens=1)).status_code == 200

        # Two slots for three conversations that take turns, each evicting the next one's.
        turns = itertools.cycle("abc")
        await until_firing(prometheus, "UnderParallel", lambda: told(next(turns) * 3 + story))

        async def overwritten() -> None:
            await told()
            for slot in range(2):
                await foreign.post("/completion", json={"prompt": other, "id_slot": slot, "n_predict": 1})

        await until_firing(prometheus, "PictureDrift", overwritten)

        fake.missing = {"timings", "usage"}
        await until_firing(prometheus, "TruthMissing", told)
        fake.missing = set()

        fake.token.hold()
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(foreign.post("/completion", json={"prompt": other, "n_predict": 2}))
            await until_firing(prometheus, "EngineQueueUsed")
            fake.token.release()

        async def failing() -> None:
            fake.fail_after = 1
            assert (await service.chat(story, max_tokens=4)).status_code >= 500

        await until_firing(prometheus, "ErrorRatioHigh", failing)

        async def restarted() -> None:
            await service.router.dispatcher.backend_down("b0", "exited with status 1")
            address = fake.base_url, fake.n_slots, fake.context
            await service.router.dispatcher.backend_ready("b0", *address, fresh=False)

        await until_firing(prometheus, "BackendFlapping", restarted)

        fake.prefill.hold()
        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(told(f"{number} {story}"))
            waited = 'sum(increase(warmslot_demand_seconds_total{level="12"}[60s])) > 2'
            await asyncio.to_thread(prometheus.until, lambda one: one.query(waited))
            fake.prefill.release()
        await until_firing(prometheus, "TTFTHigh")
