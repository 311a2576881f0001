"""Faults on real engines: after each it serves again, nothing leaks, no request is lost or answered twice.

Each fault meets one living stack ``WARMSLOT_FAULTS`` times, one after the other (default 1; ``make faults``
takes 20), so that what one leaves behind would show in the next. Processes are only ever ended by the id
under which the supervisor started them. The launcher's own end is in ``tests/e2e/test_faults.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from warmslot.launcher.logs import Launched
from warmslot.launcher.progress import ProgressWatch

from tests.support.launcher import PATIENCE, gone
from tests.support.stack import Stack, stack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    import httpx
    from warmslot.launcher.engine import Engine

    Fault = Callable[["Case"], Awaitable[None]]

pytestmark = pytest.mark.faults

TIMES = int(os.environ.get("WARMSLOT_FAULTS", "1"))
CHECKED = 10
"""Requests after a fault of which the prediction must be what was observed."""
BOUND = 30.0
"""Seconds from a fault's end until it serves again."""


class Case:
    """One fault and what it met."""

    def __init__(self, running: Stack, model: Path, folder: Path) -> None:
        self.running = running
        self.model = model
        self.folder = folder
        self.pids = [running.pid]
        self._seen = 0

    def round(self) -> None:
        """From here on the recorder's calls are those of the next fault."""
        self._seen = len(self.running.recorder.calls)

    async def until_said(self, *words: str) -> None:
        """Wait for a call of this round that says all of this."""
        await self.running.recorder.until_true(
            lambda: any(all(word in str(call) for word in words) for call in self._calls())
        )

    def _calls(self) -> list[tuple[Any, ...]]:
        return self.running.recorder.calls[self._seen :]

    def kill(self) -> None:
        """End the engine that runs now, unless the fault has ended it a moment ago."""
        pid = self.running.pid
        assert pid > 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    async def during(self, prompt: str, moment: Callable[[], Awaitable[None]], **fields: Any) -> None:
        """A request that the fault meets; it gets one answer, whatever that is."""
        request = asyncio.create_task(self.running.complete(prompt, **fields))
        await moment()
        answer = await request
        assert answer.status_code in {200, 500, 502, 503}, answer.text


def text(number: int, turns: int) -> str:
    return "".join(
        f"In story {number}, chapter {turn}, they met at {turn * 7}.\n" for turn in range(3 + turns)
    )


async def idle(case: Case) -> None:
    case.kill()


async def loading(case: Case) -> None:
    restart = asyncio.create_task(case.running.supervisor.restart("one"))
    await case.until_said("'state', 'one', 'loading'")
    case.kill()
    await restart


async def prefilling(case: Case) -> None:
    async def moment() -> None:
        seen = len(case.running.recorder.events)
        await case.running.recorder.until_true(
            lambda: any(isinstance(event, Launched) for event in case.running.recorder.events[seen:])
        )
        case.kill()

    await case.during(text(9, 40), moment)


async def decoding(case: Case) -> None:
    body = {"prompt": text(8, 1), "n_predict": 500, "ignore_eos": True, "stream": True}
    async with case.running.http.stream("POST", "/completion", json=body) as answer:
        lines = [line async for line in first_then(answer, case.kill)]
    assert any("error" in line for line in lines)


async def first_then(answer: httpx.Response, act: Callable[[], None]) -> Any:
    """The lines of a stream; ``act`` is called at the first with data."""
    acted = False
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and not acted:
            acted = True
            act()
        yield line


async def saving(case: Case) -> None:
    """The engine is stopped in its tracks, asked to save, and dies with the question unanswered."""
    os.kill(case.running.pid, signal.SIGSTOP)
    save = asyncio.create_task(case.running.warmth.save("one"))
    half = case.folder / "kv" / "one.0123456789abcdef.kv"
    await asyncio.to_thread(half.write_bytes, b"half of a file")
    case.kill()
    assert await save == 0


async def stopped(case: Case) -> None:
    """SIGSTOP: the engine is there, and deaf."""
    running = case.running
    watch = ProgressWatch("one", running.supervisor, running.router.dispatcher, 2.0)
    watching = asyncio.create_task(watch.run())
    try:

        async def moment() -> None:
            os.kill(running.pid, signal.SIGSTOP)
            await case.until_said("'crashed', 'wedged: the engine does not answer for 2 s")

        await case.during(text(7, 1), moment)
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def no_room_to_save(case: Case) -> None:
    """The engine may write a few bytes and no more: its files stay short, or the signal for that kills it."""
    psutil.Process(case.running.pid).rlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    assert await case.running.warmth.save("one") == 0
    if case.running.supervisor.status_of("one").pid is not None:  # else the signal has ended it already
        case.kill()


async def truncated_save(case: Case) -> None:
    assert await case.running.warmth.save("one") == 3
    for file in (case.folder / "kv").glob("*.kv"):
        os.truncate(file, file.stat().st_size // 2)
    case.kill()


async def corrupt_save(case: Case) -> None:
    """The content is damaged, and our own note of it tells nothing of that."""
    assert await case.running.warmth.save("one") == 3
    for file in (case.folder / "kv").glob("*.kv"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        file.write_bytes(data)
    case.kill()


async def model_removed(case: Case) -> None:
    away = case.model.with_suffix(".away")
    case.model.rename(away)
    case.kill()
    await case.until_said("there is no model file")
    away.rename(case.model)


async def out_of_memory(case: Case) -> None:
    """Not a page more than it has: a large request meets that, in an error or in the engine's end."""
    process = psutil.Process(case.running.pid)
    process.rlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
    answer = await case.running.complete("word " * 1_000_000)
    assert "bad_alloc" in answer.text or answer.status_code == 502, answer.text
    case.kill()


FAULTS: list[Fault] = [
    *(idle, loading, prefilling, decoding, saving, stopped),
    *(no_room_to_save, truncated_save, corrupt_save, model_removed, out_of_memory),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_it_serves_again(
    installed_engine: Engine, demo_model: Path, tmp_path: Path, fault: Fault
) -> None:
    model = tmp_path / "model.gguf"
    os.link(demo_model, model) if same_disk(demo_model, tmp_path) else model.symlink_to(demo_model)
    async with stack(installed_engine, model, tmp_path, threads=2) as running:
        case = Case(running, model, tmp_path)
        await converse(running)
        for _ in range(TIMES):
            before = running.pid
            case.round()
            await fault(case)
            await ready_again(running, before)
            case.pids.append(running.pid)
            await true_again(running)
        statuses = [answer.status_code for answer in running.answers]
        assert len(statuses) == running.sent
    assert all(gone(pid) for pid in case.pids)
    assert leftovers(tmp_path) == []


def same_disk(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev


def is_ready_again(running: Stack, before: int) -> bool:
    status = running.supervisor.status_of("one")
    return status.state == "ready" and status.pid not in {None, before}


async def ready_again(running: Stack, before: int) -> None:
    """Another engine serves, within the bound, and the one from before is gone."""
    async with asyncio.timeout(BOUND):
        await running.recorder.until_true(lambda: is_ready_again(running, before))
    assert gone(before)


async def converse(running: Stack) -> None:
    """Three conversations of a few turns each, all of which are answered."""
    for number in range(CHECKED):
        answer = await running.complete(text(number % 3, 2 + number // 3))
        assert answer.status_code == 200, answer.text


async def true_again(running: Stack) -> None:
    """The next requests reuse what was predicted, no more and no less."""
    done = len(running.reports())
    await converse(running)
    for report in running.reports()[done:]:
        assert abs(report.predicted_tokens - report.cached_tokens) <= 16, report
    assert [report.cached_tokens > 0 for report in running.reports()[-6:]] == [True] * 6


def leftovers(folder: Path) -> list[str]:
    """Processes that were started with this folder's model."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


async def test_a_stolen_port_is_waited_for(
    installed_engine: Engine, demo_model: Path, tmp_path: Path
) -> None:
    """With a fixed port: a stranger takes it while the engine is down, and gives it back."""
    free = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = free.sockets[0].getsockname()[1]
    free.close()
    await free.wait_closed()
    async with stack(installed_engine, demo_model, tmp_path, port=port, threads=2) as running:
        case = Case(running, demo_model, tmp_path)
        await converse(running)
        for _ in range(TIMES):
            before = running.pid
            case.round()
            case.kill()
            stranger = await steal(port)
            await case.until_said("couldn't bind")
            stranger.close()
            await stranger.wait_closed()
            await ready_again(running, before)
            await true_again(running)
        assert all(answer.status_code == 200 for answer in running.answers)


async def steal(port: int) -> asyncio.Server:
    """The port, as soon as its owner has let go of it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await asyncio.start_server(lambda *_: None, "127.0.0.1", port, reuse_address=True)
            except OSError:
                await asyncio.to_thread(os.sched_yield)
