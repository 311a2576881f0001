"""Nobody reads what ``warmslot up`` prints: it serves all the same, and ends when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.up import PATIENCE, WARMSLOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def named_pipe(tmp_path: Path) -> Iterator[tuple[Path, int, int]]:
    """With its reading and its writing end."""
    path = tmp_path / "output"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else it would wait for a writer
    os.set_blocking(reading, True)
    writing = os.open(path, os.O_WRONLY)
    yield path, reading, writing
    os.close(reading)
    os.close(writing)


def fill(pipe: Path) -> None:
    """Write into a pipe until it takes no more, by an end of its own: others' go on waiting for room."""
    end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, b"." * 512)
    os.close(end)


async def test_it_serves_and_ends_though_its_output_is_stuck(
    tmp_path: Path, named_pipe: tuple[Path, int, int]
) -> None:
    pipe, reading, writing = named_pipe
    file = tmp_path / "up.yaml"
    async with FakeLlamaServer() as fake, asyncio.timeout(PATIENCE):
        file.write_text(
            yaml.safe_dump({"pools": [{"name": "m", "backends": [{"name": "far", "url": fake.base_url}]}]})
        )
        process = await asyncio.create_subprocess_exec(
            *(WARMSLOT, "up", file, "--port", "0"),
            stdout=writing,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        )
        try:
            printed = ""
            while not (found := re.search(r"Serving at (\S+)/v1", printed)):
                printed += (await asyncio.to_thread(os.read, reading, 4096)).decode()
            fill(pipe)
            async with httpx.AsyncClient(base_url=found[1], timeout=PATIENCE, trust_env=False) as client:
                for _ in range(20):
                    process.send_signal(signal.SIGHUP)  # it says what a reload brought
                    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
                    answer = await client.post("/v1/chat/completions", json=body)
                    assert answer.status_code == 200
            process.send_signal(signal.SIGTERM)
            _, errors = await process.communicate()
            assert (process.returncode, errors) == (0, b"")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
