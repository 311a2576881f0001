"""A stop that cuts requests off is meant: it prints what it does, and no traceback."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.up import Running


@pytest.mark.parametrize(
    ("drain_timeout", "last", "code"),
    [(60, "stopping now\n", 128 + signal.SIGINT), (0.1, "stopped\n", 0)],
    ids=["a second signal", "no end in time"],
)
async def test_a_stop_that_cuts_requests_off_prints_no_traceback(
    up: Callable[..., Awaitable[Running]], drain_timeout: float, last: str, code: int
) -> None:
    body = {"messages": [{"role": "user", "content": "A long story"}], "max_tokens": 4, "stream": True}
    async with FakeLlamaServer() as fake:
        fake.token.hold()
        limits = {"drain_timeout": drain_timeout, "ping_interval": 0.1}  # a ping brings the head
        pools = [{"name": "m", "backends": [{"name": "far", "url": fake.base_url}]}]
        running = await up(yaml.safe_dump({"pools": pools, "limits": limits}))
        async with (
            httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json=body),
        ):
            running.process.send_signal(signal.SIGINT)
            await running.until("stopping: 1 running request")
            if code:
                running.process.send_signal(signal.SIGINT)
            assert await running.end() == (code, "")
    assert "Traceback" not in "".join(running.lines)
    assert running.lines[-1] == last
