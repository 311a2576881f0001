"""A launcher that is killed at any moment, and what the next one finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from warmslot.launcher.orphans import MARK, OwnedError, StateFolder
from warmslot.launcher.supervisor import Launch, Manners, Supervisor

from tests.support.launcher import PATIENCE, STUB, Recorder, gone, stub_launch

if TYPE_CHECKING:
    from collections.abc import Iterator

OUTLIVE = Manners(drain_timeout=PATIENCE, stop_timeout=PATIENCE, outlive=True)

PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.support.launcher import Recorder, stub_launch
from warmslot.launcher.orphans import StateFolder
from warmslot.launcher.supervisor import Manners, Supervisor

async def main(folder, mode, outlive, until):
    recorder = Recorder()
    state = StateFolder(folder / "state")
    state.acquire()
    launch = stub_launch(folder, mode)
    manners = Manners(outlive=outlive == "outlive")
    async with Supervisor([launch], recorder, recorder, manners=manners, folder=state) as supervisor:
        await recorder.until_state("stub", until)
        print(supervisor.status()[0].pid, flush=True)
        await supervisor.wait()

asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
"""


def killed_launcher(folder: Path, mode: str, manner: str, until: str) -> int:
    """Run a launcher until its backend is in a state and kill it; the engine's process id."""
    command = [sys.executable, "-c", PROGRAM, str(folder), mode, manner, until]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
    return pid


@pytest.fixture(autouse=True)
def only_stubs_are_ever_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in what is tested here must not reach a process that these tests did not start."""

    def guarded(method: Any) -> Any:
        def call(process: psutil.Process, *arguments: Any) -> Any:
            words = process.cmdline()
            strange = str(STUB) not in words and process.status() != psutil.STATUS_ZOMBIE
            assert not strange, f"about to signal a stranger: {process.pid} {words[:3]}"
            return method(process, *arguments)

        return call

    for name in ("kill", "terminate", "send_signal", "suspend"):
        monkeypatch.setattr(psutil.Process, name, guarded(getattr(psutil.Process, name)))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateFolder]:
    folder = StateFolder(tmp_path / "state")
    yield folder
    folder.release()


async def life(
    state: StateFolder, launch: Launch, manners: Manners = OUTLIVE
) -> tuple[Recorder, int, str | None]:
    """A launcher's life until its backend serves: what it told, the engine's process, its address."""
    recorder = Recorder()
    state.acquire()
    async with Supervisor([launch], recorder, recorder, manners=manners, folder=state) as supervisor:
        [status] = await supervisor.wait_settled()
        assert status.state == "ready", status.reason
        pid, url = status.pid, status.url
        assert pid is not None
    assert gone(pid)
    assert list(state.path.glob("*.json")) == []
    return recorder, pid, url


async def test_a_healthy_engine_is_taken_over(tmp_path: Path, state: StateFolder) -> None:
    left = killed_launcher(tmp_path, "serve", "outlive", "ready")
    os.kill(left, 0)
    recorder, pid, _ = await life(state, stub_launch(tmp_path, "serve"))
    assert pid == left
    assert recorder.states("stub") == ["ready", "stopping", "stopped"]
    [(_, _, slots, context, fresh)] = recorder.of("ready")
    assert (slots, context, fresh) == (2, 512, False)


async def test_an_adopted_engine_that_dies_is_replaced(tmp_path: Path, state: StateFolder) -> None:
    left = killed_launcher(tmp_path, "serve", "outlive", "ready")
    recorder = Recorder()
    state.acquire()
    launch = stub_launch(tmp_path, "serve")
    async with Supervisor([launch], recorder, recorder, manners=OUTLIVE, folder=state):
        await recorder.until("ready")
        os.kill(left, signal.SIGKILL)
        await recorder.until("ready", 2)
    assert recorder.of("down")[0] == ("stub", "it ended")
    assert [call[-1] for call in recorder.of("ready")] == [False, True]


@pytest.mark.parametrize(
    ("mode", "until"),
    [
        ("serve", "loading"),
        ("never", "loading"),
        ("silent", "loading"),
        ("stubborn", "ready"),
        ("wrapper", "ready"),
    ],
)
async def test_what_cannot_be_taken_over_is_ended_before_a_new_start(
    tmp_path: Path, state: StateFolder, mode: str, until: str
) -> None:
    left = killed_launcher(tmp_path, mode, "outlive", until)
    recorder, pid, _ = await life(state, stub_launch(tmp_path, "serve"))
    assert pid != left
    assert gone(left)
    assert marked_processes() == []
    assert [call[-1] for call in recorder.of("ready")] == [True]


async def test_other_settings_are_a_reason_for_a_new_start(tmp_path: Path, state: StateFolder) -> None:
    left = killed_launcher(tmp_path, "serve", "outlive", "ready")
    _, pid, _ = await life(state, stub_launch(tmp_path, "serve", slots=3))
    assert pid != left
    assert gone(left)


async def test_without_the_wish_to_take_over_it_is_ended(tmp_path: Path, state: StateFolder) -> None:
    left = killed_launcher(tmp_path, "serve", "outlive", "ready")
    _, pid, _ = await life(state, stub_launch(tmp_path, "serve"), replace(OUTLIVE, outlive=False))
    assert pid != left
    assert gone(left)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
async def test_an_engine_behind_a_wrapper_that_died_with_its_launcher_is_ended(
    tmp_path: Path, state: StateFolder
) -> None:
    wrapper = killed_launcher(tmp_path, "wrapper", "die", "ready")
    assert gone(wrapper)
    assert len(marked_processes()) == 1  # the signal at the parent's death does not reach grandchildren
    await life(state, stub_launch(tmp_path, "serve"))
    assert marked_processes() == []


def marked_processes() -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK, "")
        except psutil.Error:
            continue
        if mark.startswith("stub-") and process.pid != os.getpid() and process.status() != "zombie":
            found.append(process.pid)
    return found


GOOD = {"mark": "stub-" + "a" * 16, "announced": 1.0, "fingerprint": "x", "pid": 2**22 + 1, "started": 1.0}
DAMAGED = [
    *("", "[]", "{", "null", "{}", '{"pid": 1, "started": 0.0}'),
    *(
        json.dumps({**GOOD, field: wrong})
        for field in ("mark", "announced")
        for wrong in (None, "", 0, [], {}, "stub-", "other-" + "a" * 16, True)
    ),
    *(
        json.dumps({key: value for key, value in GOOD.items() if key != missing})
        for missing in ("mark", "announced")
    ),
]


@pytest.mark.parametrize("record", DAMAGED)
def test_of_a_damaged_record_nothing_is_believed(state: StateFolder, record: str) -> None:
    state.acquire()
    (state.path / "stub.json").write_text(record)
    assert state.leftover("stub") is None


@given(
    st.dictionaries(
        st.sampled_from(sorted(GOOD)),
        st.none()
        | st.booleans()
        | st.integers(0, 2**22)
        | st.floats(0, 2e9)
        | st.text()
        | st.just(GOOD["mark"]),
    )
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_record_whatever_names_an_unmarked_process(state: StateFolder, record: dict[str, Any]) -> None:
    state.path.mkdir(exist_ok=True)
    state._write("stub", record)
    assert state.leftover("stub") is None


def test_a_record_with_this_very_process_in_it_is_not_believed(state: StateFolder) -> None:
    state.acquire()
    state.announce("stub", "x")
    state.started("stub", os.getpid())
    assert state.leftover("stub") is None


def test_a_process_id_that_was_given_to_a_stranger_is_left_alone(state: StateFolder) -> None:
    state.acquire()
    mark = state.announce("stub", "x")
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        state.started("stub", process.pid)
        found = state.leftover("stub")
        assert found is not None
        assert [one.pid for one in found.processes] == [process.pid]
        assert found.alive
        # The same id, but it began at another time and for another backend: somebody else's.
        record = state._read("stub")
        assert record is not None
        state._write("stub", {**record, "started": record["started"] - 60, "mark": "stub-" + "b" * 16})
        assert state.leftover("stub") is None
        state._write("stub", {**record, "mark": "stub-" + "b" * 16})
        assert state.leftover("stub") is None
        process.communicate(b"\n")


def test_only_one_launcher_may_hold_the_state(state: StateFolder) -> None:
    state.acquire()
    with pytest.raises(OwnedError, match=rf"another warmslot \(process {os.getpid()}\) uses the state in "):
        StateFolder(state.path).acquire()
    state.release()
    second = StateFolder(state.path)
    second.acquire()
    second.release()


def test_a_killed_launcher_holds_no_lock(tmp_path: Path, state: StateFolder) -> None:
    pid = killed_launcher(tmp_path, "serve", "outlive", "ready")
    try:
        state.acquire()
    finally:
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)


async def test_a_folder_that_cannot_be_written_does_not_keep_from_serving(
    tmp_path: Path, state: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    state.acquire()
    (state.path / "stub.new").mkdir()
    state.release()
    recorder = Recorder()
    state.acquire()
    async with Supervisor(
        [stub_launch(tmp_path, "serve")], recorder, recorder, manners=OUTLIVE, folder=state
    ) as it:
        assert (await it.wait_settled())[0].state == "ready"
    assert "what runs there cannot be noted: Is a directory" in caplog.text
