"""A backend's states, and the child process behind them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING

import pytest
from warmslot.launcher.command import Command
from warmslot.launcher.logs import Level, LogLine
from warmslot.launcher.process import (
    ALIVE,
    MAX_LINE,
    TRANSITIONS,
    Child,
    Event,
    IllegalTransitionError,
    State,
    explain_exit,
    transition,
)

from tests.support.launcher import PATIENCE, STUB, gone

if TYPE_CHECKING:
    from collections.abc import Callable

LEGAL = {
    State.ABSENT: {
        Event.START: State.STARTING,
        Event.ADOPT: State.READY,
        Event.STOP: State.STOPPED,
    },
    State.STARTING: {
        Event.SPAWNED: State.LOADING,
        Event.EXITED: State.CRASHED,
        Event.STOP: State.STOPPING,
    },
    State.LOADING: {
        Event.HEALTHY: State.READY,
        Event.EXITED: State.CRASHED,
        Event.DRAIN: State.STOPPING,
        Event.STOP: State.STOPPING,
    },
    State.READY: {Event.DRAIN: State.DRAINING, Event.STOP: State.STOPPING, Event.EXITED: State.CRASHED},
    State.DRAINING: {Event.RESUME: State.READY, Event.STOP: State.STOPPING, Event.EXITED: State.CRASHED},
    State.STOPPING: {Event.EXITED: State.STOPPED, Event.STOP: State.STOPPING},
    State.STOPPED: {Event.START: State.STARTING, Event.STOP: State.STOPPED},
    State.CRASHED: {
        Event.BACK_OFF: State.BACKING_OFF,
        Event.GIVE_UP: State.FAILED,
        Event.STOP: State.STOPPED,
    },
    State.BACKING_OFF: {Event.START: State.STARTING, Event.STOP: State.STOPPED},
    State.FAILED: {Event.START: State.STARTING, Event.STOP: State.STOPPED},
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_of_state_and_event(state: State, event: Event) -> None:
    if event in LEGAL[state]:
        assert transition(state, event) is LEGAL[state][event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"that is {state} cannot meet the event {event}"):
            transition(state, event)


def test_every_state_can_be_reached_and_can_be_stopped() -> None:
    reached = {State.ABSENT}
    while more := {new for (old, _), new in TRANSITIONS.items() if old in reached} - reached:
        reached |= more
    assert reached == set(State)
    assert all((state, Event.STOP) in TRANSITIONS for state in State)


def test_a_living_process_always_ends_by_an_exit() -> None:
    for state in ALIVE:
        assert transition(state, Event.EXITED) in {State.CRASHED, State.STOPPED}


class Output:
    """Lines of a child, to wait for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._new = asyncio.Event()

    def __call__(self, line: LogLine) -> None:
        self.lines.append(line.message)
        self._new.set()

    async def until(self, found: Callable[[str], bool]) -> str:
        async with asyncio.timeout(PATIENCE):
            while True:
                self._new.clear()
                for line in self.lines:
                    if found(line):
                        return line
                await self._new.wait()


def stub(mode: str) -> Command:
    arguments = ("-np", "1", "-c", "512", "--host", "127.0.0.1", "--port", "0", "--mode", mode)
    return Command((sys.executable, "-S", "-P", str(STUB), *arguments), dict(os.environ))


def listening(line: str) -> bool:
    return "listening on" in line


async def test_output_and_exit_status_are_reported() -> None:
    output = Output()
    child = Child.spawn(stub("refuses"), output)
    assert await child.exited == 1
    assert output.lines[0] == "gguf_init_from_reader: failed to read key-value pairs"
    assert [line.message for line in child.tail] == output.lines


async def test_a_polite_child_ends_on_request() -> None:
    output = Output()
    child = Child.spawn(stub("serve"), output)
    await output.until(listening)
    assert await child.stop(PATIENCE) == 0


async def test_a_stubborn_child_is_killed() -> None:
    output = Output()
    child = Child.spawn(stub("stubborn"), output)
    await output.until(listening)
    assert await child.stop(0.05) == -signal.SIGKILL


async def test_a_stopped_child_is_killed() -> None:
    output = Output()
    child = Child.spawn(stub("serve"), output)
    await output.until(listening)
    os.kill(child.pid, signal.SIGSTOP)
    assert await child.stop(0.05) == -signal.SIGKILL


async def test_a_cancelled_stop_still_ends_the_child() -> None:
    output = Output()
    child = Child.spawn(stub("stubborn"), output)
    await output.until(listening)
    stopping = asyncio.create_task(child.stop(PATIENCE))
    await asyncio.wait({stopping}, timeout=0)
    stopping.cancel()
    assert await child.exited == -signal.SIGKILL
    with pytest.raises(asyncio.CancelledError):
        await stopping


@pytest.mark.parametrize("mode", ["wrapper", "deaf-wrapper"])
async def test_an_engine_behind_a_wrapper_does_not_outlive_it(mode: str) -> None:
    output = Output()
    child = Child.spawn(stub(mode), output)
    await output.until(listening)
    members = [int(pid) for pid in pids_of_group(child.pid)]
    assert len(members) == 2
    await child.stop(PATIENCE)
    assert all(gone(pid) for pid in members)


def pids_of_group(group: int) -> list[str]:
    shown = subprocess.run(["ps", "-eo", "pgid=,pid="], capture_output=True, text=True, check=True)
    return [line.split()[1] for line in shown.stdout.splitlines() if line.split()[0] == str(group)]


async def test_the_child_has_its_own_session() -> None:
    output = Output()
    child = Child.spawn(stub("serve"), output)
    await output.until(listening)
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    await child.stop(PATIENCE)


async def test_garbage_and_endless_lines_neither_block_the_child_nor_fill_memory() -> None:
    output = Output()
    child = Child.spawn(stub("garbage"), output)
    await output.until(listening)
    assert await child.stop(PATIENCE) == 0
    assert max(len(line) for line in output.lines) == MAX_LINE + 1
    assert any(line.endswith("x…") for line in output.lines)
    assert '{"type": 5}' in output.lines


async def test_no_line_of_a_flood_is_lost() -> None:
    output = Output()
    child = Child.spawn(stub("flood"), output)
    await output.until(listening)
    await child.stop(PATIENCE)
    assert [line for line in output.lines if line.startswith("line ")] == [f"line {n}" for n in range(20_000)]


async def test_the_address_is_known_before_the_engine_announces_it() -> None:
    output = Output()
    child = Child.spawn(stub("never"), output)
    await output.until(lambda line: "loading model" in line)
    address = child.address()
    assert address is not None
    assert address.startswith("http://127.0.0.1:")
    await child.stop(PATIENCE)
    assert child.address() is None


async def test_a_program_that_is_not_there_raises() -> None:
    with pytest.raises(FileNotFoundError):
        Child.spawn(Command(("/nonexistent/llama-server",), {}), Output())


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_killed_parent_takes_the_child_with_it() -> None:
    program = f"""
import asyncio, os, sys
from warmslot.launcher.command import Command
from warmslot.launcher.process import Child
async def main():
    command = Command({stub("stubborn").argv!r}, dict(os.environ))
    child = Child.spawn(command, lambda line: print(line.message, flush=True))
    print("child", child.pid, flush=True)
    await child.exited
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = None
        for line in parent.stdout:
            if line.startswith("child "):
                pid = int(line.split()[1])
            if pid is not None and listening(line):
                break
        assert pid is not None
        os.kill(pid, 0)
        parent.kill()
        assert gone(pid)


def lines(*texts: str) -> list[LogLine]:
    return [
        LogLine(Level(text[0]) if text[1:2] == " " else None, text.removeprefix(f"{text[0]} "))
        for text in texts
    ]


@pytest.mark.parametrize(
    ("status", "tail", "reason", "hopeless"),
    [
        (7, [], "exit status 7", False),
        (-9, [], "killed by SIGKILL (out of memory?)", False),
        (-6, ["E GGML_ASSERT(x) failed"], "GGML_ASSERT(x) failed (killed by SIGABRT)", False),
        (
            1,
            [
                "I srv    load_model: loading model 'nope.gguf'",
                "E gguf_init_from_file: failed to open GGUF file 'no' (No such file or directory)",
                "E llama_model_load: error loading model: llama_model_loader: failed to load model",
                "E srv  llama_server: exiting due to model loading error",
            ],
            "gguf_init_from_file: failed to open GGUF file 'no' (No such file or directory) (exit status 1)",
            True,
        ),
        (
            1,
            [
                "E srv  start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 38777",
                "E srv  llama_server: exiting due to HTTP server error",
            ],
            "srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 38777 (exit status 1)",
            False,
        ),
        (1, ["error: invalid argument: --frob"], "error: invalid argument: --frob (exit status 1)", True),
        (
            1,
            ["E common_init: failed to load model 'x'"],
            "common_init: failed to load model 'x' (exit status 1)",
            False,
        ),
    ],
)
def test_the_reason_of_an_exit_is_the_most_telling_line(
    status: int, tail: list[str], reason: str, hopeless: bool
) -> None:
    assert explain_exit(status, deque(lines(*tail))) == (reason, hopeless)
