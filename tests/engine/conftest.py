"""Real engines for tests: every kind that is installed, each started once for the whole session.

A test that takes ``engine`` (or ``engine_client``) runs once on each kind (``installed_engine``). All such
tests share the one process, so each must leave every slot idle and rely on none that it did not fill itself.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
from warmslot.router.backend import EngineClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from warmslot.launcher.engine import Engine

SLOTS = 4
CONTEXT = 2048
"""Tokens per slot."""

PROFILE = ("--no-kv-unified", "--no-cache-idle-slots", "--cache-ram", "0", "--slots", "--metrics", "-t", "2")
_LISTENING = re.compile(r"listening on (http://\S+)")
_LAUNCH = re.compile(r"slot\s+launch_slot_: id\s+(\d+)")
_RELEASE = re.compile(r"slot\s+release: id\s+(\d+)")
_START_TIMEOUT = 100.0


class RunningEngine:
    """One engine process, followed through its log: what it says there is an event to wait for."""

    def __init__(self, engine: Engine, model: Path, *flags: str) -> None:
        self.kind = engine.kind.value
        self.model = model
        self.lines: list[str] = []
        self.processing: set[int] = set()
        self._changed = threading.Condition()
        command = [*engine.command, "--model", str(model), "--host", "127.0.0.1", "--port", "0"]
        command += ["-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), *PROFILE, *flags]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()
        self.base_url = ""
        self.wait(lambda: self.base_url or self.process.poll() is not None, _START_TIMEOUT)
        assert self.base_url, "\n".join(self.lines[-20:])

    def _follow(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    if found := _LISTENING.search(line):
                        self.base_url = found[1]
                    elif found := _LAUNCH.search(line):
                        self.processing.add(int(found[1]))
                    elif found := _RELEASE.search(line):
                        self.processing.discard(int(found[1]))
                    self._changed.notify_all()

    def wait(self, predicate: Callable[[], object], timeout: float = 60.0) -> None:
        """Block until ``predicate`` holds; it is asked after every line of the log."""
        with self._changed:
            assert self._changed.wait_for(predicate, timeout), "\n".join(self.lines[-20:])

    async def until(self, predicate: Callable[[], object], timeout: float = 60.0) -> None:  # noqa: ASYNC109
        """:meth:`wait`, beside the event loop."""
        await asyncio.to_thread(self.wait, predicate, timeout)

    async def settled(self) -> None:
        """Return once the log says that every launched slot was released."""
        await self.until(lambda: not self.processing)

    def stop(self) -> None:
        """End the process and its reader."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)


@pytest.fixture(scope="session")
def engine(installed_engine: Engine, demo_model: Path) -> Iterator[RunningEngine]:
    running = RunningEngine(installed_engine, demo_model)
    yield running
    running.stop()


@pytest.fixture
async def engine_client(engine: RunningEngine) -> AsyncIterator[EngineClient]:
    client = EngineClient(engine.kind, engine.base_url)
    yield client
    await client.aclose()
    await engine.settled()
