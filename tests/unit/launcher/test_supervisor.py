"""What the supervisor does with children that behave well, badly and not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from warmslot.launcher.command import parse_cpus
from warmslot.launcher.engine import Engine, EngineKind, parse_help
from warmslot.launcher.restarts import RestartPolicy
from warmslot.launcher.supervisor import Launch, Manners, Supervisor

from tests.support.launcher import PATIENCE, STUB_HELP, Recorder, gone, stub_launch

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLD_TO_REPORT = ["--slots", "--metrics", "--log-jsonl"]
GIVEN_UP = "; given up after 2 restarts within 600 s"
QUICK = RestartPolicy(first=0.01, ceiling=0.02, budget=2)
GENTLE = Manners(QUICK, drain_timeout=PATIENCE, stop_timeout=PATIENCE)


def supervise(recorder: Recorder, *launches: Launch, stop_timeout: float = PATIENCE) -> Supervisor:
    return Supervisor(launches, recorder, recorder, manners=replace(GENTLE, stop_timeout=stop_timeout))


async def kill_backend(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.HTTPError):
            await client.get(f"{url}/die")


async def test_a_whole_life(tmp_path: Path) -> None:
    recorder = Recorder()
    async with supervise(recorder, stub_launch(tmp_path, "serve", slots=3)) as supervisor:
        name, url, *rest = await recorder.until("ready")
        [status] = await supervisor.wait_settled()
        assert (name, rest) == ("stub", [3, 512, True])
        assert (status.state, status.url, status.slots, status.context) == ("ready", url, 3, 512)
        pid = status.pid
        assert pid is not None
    assert gone(pid)
    assert recorder.states("stub") == ["starting", "loading", "ready", "stopping", "stopped"]
    assert recorder.of("down") == [("stub", "stopped")]
    assert recorder.of("left_out") == [
        ("stub", ["--no-kv-unified", "--no-cache-idle-slots", "--cache-ram 0", *TOLD_TO_REPORT])
    ]
    assert [stage for _, stage in recorder.of("loading")] == ["reading the model", "model loaded"]


async def test_a_crash_is_followed_by_a_new_start(tmp_path: Path) -> None:
    recorder = Recorder()
    async with supervise(recorder, stub_launch(tmp_path, "dies")) as supervisor:
        _, url, *_ = await recorder.until("ready")
        await kill_backend(url)
        await recorder.until("ready", 2)
        assert recorder.of("down") == [("stub", "exit status 3")]
        assert supervisor.status()[0].restarts == 1
    assert recorder.states("stub") == [
        *("starting", "loading", "ready", "crashed", "backing-off"),
        *("starting", "loading", "ready", "stopping", "stopped"),
    ]
    order = [call[0] if call[0] != "state" else call[2] for call in recorder.calls]
    assert order.index("ready") < order.index("down") < order.index("crashed")


async def test_too_many_crashes_end_in_failure(tmp_path: Path) -> None:
    recorder = Recorder()
    async with supervise(recorder, stub_launch(tmp_path, "exits")) as supervisor:
        [status] = await supervisor.wait_settled()
        await supervisor.wait()
    assert (status.state, status.reason) == ("failed", f"exit status 7{GIVEN_UP}")
    life = ["starting", "loading", "crashed"]
    assert recorder.states("stub") == [*life, "backing-off", *life, "backing-off", *life, "failed"]
    assert recorder.of("ready") == recorder.of("down") == []


async def test_what_cannot_work_fails_at_once_with_the_engines_own_reason(tmp_path: Path) -> None:
    recorder = Recorder()
    async with supervise(recorder, stub_launch(tmp_path, "refuses")) as supervisor:
        [status] = await supervisor.wait_settled()
    assert status.reason == "gguf_init_from_reader: failed to read key-value pairs (exit status 1)"
    assert status.tail[-1] == "srv  llama_server: exiting due to model loading error"
    assert recorder.states("stub") == ["starting", "loading", "crashed", "failed"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "there is no model file "), (b"not a model", "is not a GGUF file (it begins with b'not ')")],
)
async def test_a_missing_or_wrong_model_fails_before_a_process_is_made(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    recorder = Recorder()
    launch = stub_launch(tmp_path, "serve")
    model = replaced(launch, content)
    async with supervise(recorder, launch) as supervisor:
        [status] = await supervisor.wait_settled()
    assert str(model) in status.reason
    assert reason in status.reason
    assert recorder.states("stub") == ["starting", "crashed", "failed"]


def replaced(launch: Launch, content: bytes | None) -> Path:
    model = Path(launch.backend.model or "")
    model.unlink()
    if content is not None:
        model.write_bytes(content)
    return model


async def test_an_engine_that_vanished_fails_with_its_path(tmp_path: Path) -> None:
    recorder = Recorder()
    launch = stub_launch(tmp_path, "serve")
    engine = Engine(EngineKind.STOCK, ("/nonexistent/llama-server",), "test", parse_help(STUB_HELP))
    async with supervise(recorder, Launch(launch.backend, engine)) as supervisor:
        [status] = await supervisor.wait_settled()
    assert status.reason == "the engine /nonexistent/llama-server does not start: No such file or directory"
    assert status.state == "failed"


async def test_loading_is_bounded(tmp_path: Path) -> None:
    recorder = Recorder()
    async with supervise(recorder, stub_launch(tmp_path, "never", start_timeout=0.3)) as supervisor:
        [status] = await supervisor.wait_settled()
    assert status.state == "failed"
    assert status.reason.startswith("not ready within 0.3 s (start_timeout)")
    assert recorder.of("ready") == []


async def test_a_stranger_on_the_port_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    recorder = Recorder()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        launch = stub_launch(tmp_path, "serve")
        port = stranger.getsockname()[1]
        async with supervise(recorder, Launch(launch.backend, launch.engine, port=port)) as supervisor:
            [status] = await supervisor.wait_settled()
    assert status.state == "failed"
    assert (
        status.reason
        == f"srv start: couldn't bind HTTP server socket, port: {port} (exit status 1){GIVEN_UP}"
    )
    assert recorder.of("ready") == []


@pytest.mark.parametrize("mode", ["stubborn", "silent", "never", "wrapper", "deaf-wrapper"])
async def test_no_child_survives_a_stop(tmp_path: Path, mode: str) -> None:
    recorder = Recorder()
    async with supervise(recorder, stub_launch(tmp_path, mode), stop_timeout=0.1) as supervisor:
        await recorder.until_state("stub", "loading")
        if mode in {"stubborn", "wrapper", "deaf-wrapper"}:
            await recorder.until("ready")
        pid = supervisor.status()[0].pid
        assert pid is not None
    assert gone(pid)
    assert recorder.states("stub")[-2:] == ["stopping", "stopped"]
    assert members_of_session(pid) == []


def members_of_session(session: int) -> list[str]:
    shown = subprocess.run(["ps", "-eo", "sess=,pid=,stat="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in shown.stdout.splitlines()]
    return [pid for sess, pid, stat in rows if sess == str(session) and not stat.startswith("Z")]


async def test_no_child_survives_an_exception_in_the_block(tmp_path: Path) -> None:
    recorder = Recorder()
    pids = []

    async def block() -> None:
        async with supervise(recorder, stub_launch(tmp_path, "serve")) as supervisor:
            await recorder.until("ready")
            pids.append(supervisor.status()[0].pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()
    [pid] = pids
    assert pid is not None
    assert gone(pid)


class FaultyListener(Recorder):
    """A router that breaks."""

    async def backend_ready(self, name: str, url: str, slots: int, context: int, *, fresh: bool) -> None:
        await super().backend_ready(name, url, slots, context, fresh=fresh)
        raise ZeroDivisionError


async def test_no_child_survives_an_exception_in_the_listener(tmp_path: Path) -> None:
    listener, watcher = FaultyListener(), Recorder()
    launches = [stub_launch(tmp_path, "serve"), stub_launch(tmp_path, "never", name="other")]
    supervisor = Supervisor(launches, listener, watcher, manners=GENTLE)
    supervisor.start()
    await watcher.until_state("other", "loading")
    pids = [status.pid for status in supervisor.status()]
    with pytest.raises(ZeroDivisionError):
        await supervisor.wait()
    with pytest.raises(ZeroDivisionError):
        await supervisor.stop()
    assert all(pid is not None and gone(pid) for pid in pids)


async def test_a_second_wish_to_stop_kills(tmp_path: Path) -> None:
    recorder = Recorder()
    supervisor = supervise(recorder, stub_launch(tmp_path, "stubborn"))
    supervisor.start()
    await recorder.until("ready")
    pid = supervisor.status()[0].pid
    stopping = asyncio.create_task(supervisor.stop())
    await recorder.until_state("stub", "stopping")
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert pid is not None
    assert gone(pid)


async def test_a_stop_ends_the_wait_for_a_restart(tmp_path: Path) -> None:
    recorder = Recorder()
    policy = RestartPolicy(first=3600, ceiling=3600)
    launches = [stub_launch(tmp_path, "exits")]
    async with Supervisor(launches, recorder, recorder, manners=Manners(policy)):
        reason = await recorder.until_state("stub", "backing-off")
    assert reason.startswith("exit status 7; starting again in ")
    assert recorder.states("stub")[-2:] == ["backing-off", "stopped"]


async def test_one_that_fails_leaves_the_others_serving(tmp_path: Path) -> None:
    recorder = Recorder()
    launches = [stub_launch(tmp_path, "serve", name="good"), stub_launch(tmp_path, "refuses", name="bad")]
    async with supervise(recorder, *launches) as supervisor:
        good, bad = await supervisor.wait_settled()
        assert (good.state, bad.state) == ("ready", "failed")
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{good.url}/health")).status_code == 200


PROGRAM = """
import asyncio, signal, sys
from dataclasses import replace
from pathlib import Path
from tests.support.launcher import Recorder, stub_launch
from warmslot.launcher.supervisor import Supervisor

async def main():
    recorder = Recorder()
    async with Supervisor([stub_launch(Path(sys.argv[1]), sys.argv[2])], recorder, recorder) as supervisor:
        await recorder.until_state("stub", "loading")
        print(supervisor.status()[0].pid, flush=True)
        await supervisor.wait()

# What a shell starts in the background is given SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
asyncio.run(main())
"""


def run_launcher(arguments: Sequence[str]) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, cwd=root
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
@pytest.mark.parametrize("mode", ["serve", "stubborn", "silent"])
def test_no_child_survives_a_launcher_that_is_killed(tmp_path: Path, mode: str) -> None:
    with run_launcher([str(tmp_path), mode]) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        os.kill(pid, 0)
        launcher.send_signal(signal.SIGKILL)
        assert gone(pid)


def test_no_child_survives_an_interrupted_launcher(tmp_path: Path) -> None:
    with run_launcher([str(tmp_path), "serve"]) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.send_signal(signal.SIGINT)
        assert gone(pid)
        assert launcher.wait(PATIENCE) != 0


async def test_engines_take_turns_in_loading(tmp_path: Path) -> None:
    recorder = Recorder()
    launches = [
        stub_launch(tmp_path, mode, name=name)
        for name, mode in (("a", "serve"), ("b", "exits"), ("c", "serve"))
    ]
    manners = Manners(RestartPolicy(first=0.01, ceiling=0.02, budget=1))
    async with Supervisor(launches, recorder, recorder, manners=manners, load_at_once=1) as supervisor:
        states = [str(status.state) for status in await supervisor.wait_settled()]
    assert states == ["ready", "failed", "ready"]
    steps = [(name, state) for kind, name, state, *_ in recorder.calls if kind == "state"]
    loading: set[str] = set()
    for name, state in steps:
        if state in {"starting", "loading"}:
            loading.add(name)
        else:
            loading.discard(name)
        assert len(loading) <= 1, steps


async def test_a_stop_reaches_who_waits_for_its_turn(tmp_path: Path) -> None:
    recorder = Recorder()
    launches = [stub_launch(tmp_path, "never", name="a"), stub_launch(tmp_path, "serve", name="b")]
    async with Supervisor(launches, recorder, recorder, load_at_once=1):
        await recorder.until_state("a", "loading")
    assert recorder.states("b") == ["stopped"]


async def test_a_condemned_engine_is_started_again_for_the_reason_given(tmp_path: Path) -> None:
    recorder = Recorder()
    manners = Manners(RestartPolicy(first=0.01, ceiling=0.02))
    async with Supervisor(
        [stub_launch(tmp_path, "serve")], recorder, recorder, manners=manners
    ) as supervisor:
        await recorder.until_state("stub", "ready")
        supervisor.condemn("stub", "wedged: told so")
        assert await recorder.until_state("stub", "crashed") == "wedged: told so"
        await recorder.until_state("stub", "ready", 2)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPU affinity here")
async def test_an_engine_is_kept_to_its_cpus(tmp_path: Path) -> None:
    recorder = Recorder()
    (cpu, *_) = sorted(os.sched_getaffinity(0))
    launches = [stub_launch(tmp_path, "serve", cpus=str(cpu))]
    async with Supervisor(launches, recorder, recorder) as supervisor:
        await recorder.until_state("stub", "ready")
        pid = supervisor.status()[0].pid
        assert pid is not None
        assert os.sched_getaffinity(pid) == {cpu}


def test_cpu_lists() -> None:
    assert parse_cpus("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}
