"""Mutated requests: none makes an error of ours, none leaves a lease behind, none costs memory for good.

``make fuzz`` sends 100,000; by itself the test sends a few hundred (``WARMSLOT_FUZZ`` says how many).
"""

from __future__ import annotations

import asyncio
import gc
import os

import httpx
import psutil
import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.fuzz.mutations import request_of
from tests.support.router import serving

COUNT = int(os.environ.get("WARMSLOT_FUZZ", "400"))
AT_ONCE = 8
GROWTH = 64 * 2**20
"""Bytes by which the process may grow over the second half of a long run."""

pytestmark = pytest.mark.timeout(120 + COUNT // 10)


async def test_nothing_that_is_sent_is_an_error_of_ours() -> None:
    wrong: list[tuple[int, int, bytes]] = []
    sizes: list[int] = []
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
    settings = {"endpoint": {"slot_actions": True, "client_slots": True}}
    async with (
        FakeLlamaServer(answer_tokens=3) as fake,
        serving([fake], **settings) as service,
        httpx.AsyncClient(base_url=service.url, limits=limits, timeout=60, trust_env=False) as http,
    ):

        async def send(number: int) -> None:
            method, path, body, headers = request_of(number)
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            answer = await http.request(method, path, content=body, headers=raw)
            if answer.status_code >= 500 and b'"internal"' in answer.content:
                wrong.append((number, answer.status_code, answer.content))

        numbers = iter(range(COUNT))

        async def worker() -> None:
            for number in numbers:
                await send(number)
                if number % 200 == 0:
                    fake.requests.clear()
                    service.watcher.reports.clear()
                    service.watcher.outcomes.clear()
                    service.watcher.granted_leases.clear()
                if number % max(1, COUNT // 2) == 0:
                    gc.collect()
                    sizes.append(psutil.Process().memory_info().rss)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        await service.watcher.until(lambda watcher: watcher.level.get("m", 0) == 0)
        gc.collect()
        sizes.append(psutil.Process().memory_info().rss)
        assert wrong == []
        assert service.router.dispatcher.held() == {}
        assert service.router.dispatcher.queued("m") == 0
        assert fake.busy == 0
        assert fake.violations == []
        assert (await service.chat("mark-z still here")).status_code == 200
        assert sizes[-1] - sizes[-2] < GROWTH
