"""Five hundred clients at once that dribble, stop half-way or never read: others are served, little grows."""

from __future__ import annotations

import asyncio
import gc

import psutil
import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import chat, serving, text_of
from tests.support.wire_client import WireClient

EACH = 166
BOUND = 200 * 2**20
"""Bytes that the process may grow by while all of them are connected: router, fake engine and clients."""

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"


@pytest.mark.timeout(240)
async def test_five_hundred_at_once() -> None:
    limits = {"body_timeout": 8}
    async with FakeLlamaServer(slots=4) as fake, serving([fake], limits=limits) as service:
        before = psutil.Process().memory_info().rss
        half_open = [await WireClient.connect(service.url) for _ in range(EACH)]
        for client in half_open[::2]:
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHo")
        dribbling = [await WireClient.connect(service.url) for _ in range(EACH)]
        for client in dribbling:
            await client.send(HALF)
            for byte in b'{"mess':
                await client.send(bytes([byte]))
        endless = chat("mark-e go on", stream=True, max_tokens=400, ignore_eos=True)
        unread = [await WireClient.post(service.url, "/v1/chat/completions", endless) for _ in range(EACH)]

        # Honest clients in between, in the same queue as those that never read.
        honest = [service.chat(f"mark-h{number} hello", max_tokens=6) for number in range(20)]
        answers = await asyncio.gather(*honest)
        for number, answer in enumerate(answers):
            assert answer.status_code == 200
            assert f"mark-h{number}" in text_of(answer.text)
        # Bodies that do not end are refused when their time is over.
        for client in dribbling:
            status, _ = await client.head()
            assert status == 408
        gc.collect()
        assert psutil.Process().memory_info().rss - before < BOUND
        await WireClient.leave_all()
        del half_open, dribbling, unread
        await service.watcher.until(lambda watcher: watcher.level.get("m", 0) == 0)
        assert service.router.dispatcher.held() == {}
        assert fake.busy == 0
        assert fake.violations == []
        assert (await service.chat("mark-z after all")).status_code == 200
