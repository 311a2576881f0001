"""Mutated requests: none makes an error of ours, none leaves a lease behind, none costs memory for good.

Hypothesis draws them, the same ones each time, and makes what fails as small as it can. ``make fuzz`` sends
100,000; by itself the test sends a few hundred (``WARMSLOT_FUZZ`` says how many).
"""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fakes.llama_server import FakeLlamaServer
from tests.fuzz.mutations import requests
from tests.support.router import serving

if TYPE_CHECKING:
    from tests.support.router import Service

COUNT = int(os.environ.get("WARMSLOT_FUZZ", "400"))
AT_ONCE = 8
ROUND = 250
"""Examples after which Hypothesis begins anew: it remembers what it has drawn."""
GROWTH = 64 * 2**20
"""Bytes by which the process may grow over the second half of a long run."""

Sent = tuple[str, str, bytes, dict[str, str]]

pytestmark = pytest.mark.timeout(120 + COUNT // 10)


class Target:
    """A router on a fake engine that is sent several requests at once, again and again."""

    def __init__(self, service: Service, fake: FakeLlamaServer, http: httpx.AsyncClient) -> None:
        self.service, self.fake, self._http = service, fake, http
        self.sizes: list[int] = []
        self._sent = 0

    async def send(self, some: list[Sent]) -> None:
        """Send them at once. AssertionError where one is answered with an internal error."""
        answers = await asyncio.gather(*(self._one(request) for request in some))
        for request, answer in zip(some, answers, strict=True):
            assert not (answer.status_code >= 500 and b'"internal"' in answer.content), request
        before, self._sent = self._sent, self._sent + len(some)
        if before // 200 != self._sent // 200:
            self.fake.requests.clear()
            for told in (self.service.watcher.reports, self.service.watcher.outcomes):
                told.clear()
            self.service.watcher.granted_leases.clear()
        if before < COUNT // 2 <= self._sent:
            self.weigh()

    async def _one(self, request: Sent) -> httpx.Response:
        method, path, body, headers = request
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        return await self._http.request(method, path, content=body, headers=raw)

    async def rest(self) -> None:
        """Nothing is left of what was sent, and the next client is served."""
        await self.service.watcher.until(lambda watcher: watcher.level.get("m", 0) == 0)
        assert self.service.router.dispatcher.held() == {}
        assert self.service.router.dispatcher.queued("m") == 0
        assert self.fake.busy == 0
        assert self.fake.violations == []
        assert (await self.service.chat("mark-z still here")).status_code == 200

    def weigh(self) -> None:
        """Note how large the process is."""
        gc.collect()
        self.sizes.append(psutil.Process().memory_info().rss)


async def target(stack: AsyncExitStack) -> Target:
    fake = await stack.enter_async_context(FakeLlamaServer(answer_tokens=3))
    settings = {"endpoint": {"slot_actions": True, "client_slots": True}}
    service = await stack.enter_async_context(serving([fake], **settings))
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
    http = httpx.AsyncClient(base_url=service.url, limits=limits, timeout=60, trust_env=False)
    return Target(service, fake, await stack.enter_async_context(http))


def test_nothing_that_is_sent_is_an_error_of_ours() -> None:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        aim = runner.run(target(stack))
        try:
            left = -(-COUNT // AT_ONCE)
            number = 0
            while left > 0:
                quiet = settings(
                    max_examples=min(ROUND, left),
                    database=None,
                    deadline=None,
                    phases=(Phase.generate, Phase.shrink),
                    suppress_health_check=list(HealthCheck),
                )

                @seed(number)
                @quiet
                @given(st.lists(requests(), min_size=AT_ONCE, max_size=AT_ONCE))
                def one_round(some: list[Sent]) -> None:
                    runner.run(aim.send(some))

                one_round()
                left, number = left - ROUND, number + 1
            runner.run(aim.rest())
            aim.weigh()
        finally:
            runner.run(stack.aclose())
    assert aim.sizes[-1] - aim.sizes[-2] < GROWTH
