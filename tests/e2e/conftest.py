"""``warmslot up`` for tests: started on a configuration text, with its state in the test's own folder."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import yaml
from warmslot.launcher.engine import EngineKind

from tests.support.site import Site, engine_script
from tests.support.up import PATIENCE, WARMSLOT, Running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from warmslot.launcher.engine import Engine

    StartUp = Callable[..., Awaitable[Running]]
    Command = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Running]]]:
    """Starts ``warmslot up`` on a configuration text and a free port."""
    runs: list[Running] = []

    async def start(text: str, *options: str, serving: bool = True) -> Running:
        file = tmp_path / "up.yaml"
        file.write_text(text)
        process = await asyncio.create_subprocess_exec(
            *(WARMSLOT, "up", file, *(options or ("--port", "0"))),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        )
        running = Running(process)
        runs.append(running)
        if serving:
            running.url = (await running.until(r"Serving at (\S+)/v1"))[1]
        return running

    yield start
    for running in runs:
        if running.process.returncode is None:
            running.process.kill()
            await running.process.communicate()  # its end is seen only once all that it printed is read


@pytest.fixture
def warmslot(tmp_path: Path) -> Callable[..., Awaitable[tuple[int, str, str]]]:
    """Runs a command; exit code, output, errors."""

    async def run(*words: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(WARMSLOT, *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "COLUMNS": "200"},
        )
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    return run


@pytest.fixture
def demo(installed_engine: Engine, demo_model: Path) -> str:
    """A configuration of the demo model on one kind of engine."""
    kind = installed_engine.kind
    engine = kind.value if kind is EngineKind.EMBEDDED else installed_engine.path
    return f"""
engine: {engine}
limits: {{drain_timeout: 60s}}
pools:
  - name: demo
    backends:
      - {{name: one, model: {demo_model}, slots: 2, context: 1024, threads: 2}}
"""


@pytest.fixture
def backend(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Makes the settings of a backend whose engine is a fake."""
    engine, model = tmp_path / "fake-engine", tmp_path / "model.gguf"
    engine.write_text(engine_script())
    engine.chmod(0o755)
    model.write_bytes(b"GGUF and nothing else")

    def make(name: str, **settings: Any) -> dict[str, Any]:
        own = {"model": str(model), "engine": str(engine), "slots": 1, "context": 1024}
        return {"name": name, **own, **settings}

    return make


@pytest.fixture
def site(up: StartUp, warmslot: Command, tmp_path: Path) -> Callable[[dict[str, Any]], Any]:
    """Starts one on a configuration; at its end no process is left."""

    @asynccontextmanager
    async def start(config: dict[str, Any]) -> AsyncIterator[Site]:
        running = await up(yaml.safe_dump(config))
        children = running.children
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as http:
            yield Site(running, warmslot, tmp_path / "up.yaml", http)
        children += running.children
        running.process.send_signal(signal.SIGTERM)
        assert await running.end() == (0, "")
        assert psutil.wait_procs(children, timeout=0)[1] == []

    return start
