"""Advice beside a running router: when it is renewed, what is published, and the process that finds it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from typer.testing import CliRunner
from warmslot.launcher.advise import LEAST_REQUESTS
from warmslot.launcher.advisor import COMMAND, Advisor, Schedule
from warmslot.launcher.advisor_child import MEMORY, answer, question, read_answer
from warmslot.launcher.cli import app
from warmslot.launcher.forecast import Setup
from warmslot.router.advice import Advised
from warmslot.router.config import Config
from warmslot.router.journal import Journal
from warmslot.router.records import BackendChange, Record

from tests.fakes.llama_server import FakeLlamaServer
from tests.support import agents
from tests.support.journals import write
from tests.support.launcher import PATIENCE, gone
from tests.support.router import config_for, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from warmslot.router.config import Backend


def recorded(workers: int, conversations: int, backend: str = "b0") -> Iterator[object]:
    """A journal's entries of a backend with four slots."""
    load = agents.load(workers, conversations, turns=6, first=400, growth=80)
    for entry in agents.journal(load, agents.speeds(), Setup(4, 2048, "slots")):
        yield replace(entry, backend=backend) if isinstance(entry, Record | BackendChange) else entry


def config_with(journal: Path, **advice: Any) -> Config:
    return config_for(1, journal={"path": str(journal)}, advice=advice)


def backends_of(config: Config) -> list[Backend]:
    return [backend for pool in config.pools for backend in pool.backends]


class Published:
    """What an advisor has published, to wait for."""

    def __init__(self) -> None:
        self.all: list[Mapping[str, Advised]] = []
        self.more = asyncio.Event()

    def __call__(self, found: Mapping[str, Advised]) -> None:
        self.all.append(found)
        self.more.set()


def advisor(
    config: Config, published: Published, command: Sequence[str] = COMMAND, **more: Any
) -> tuple[Advisor, Journal]:
    journal = Journal(config.journal)
    return (
        Advisor(config, journal, lambda: backends_of(config), published, command=command, **more),
        journal,
    )


# -- when --------------------------------------------------------------------------------------------------


def test_it_is_renewed_when_time_has_passed_and_enough_is_new() -> None:
    schedule = Schedule(every=900.0)
    assert not schedule.due(5.0, LEAST_REQUESTS - 1)
    assert schedule.due(5.0, LEAST_REQUESTS)
    schedule.asked(10.0, 40, soon=False)
    assert not schedule.due(909.0, 1000)
    assert not schedule.due(2000.0, 69)
    assert schedule.due(910.0, 70)


def test_where_there_was_too_little_it_is_asked_again_before_long() -> None:
    schedule = Schedule(every=900.0)
    schedule.asked(10.0, 40, soon=True)
    assert not schedule.due(69.0, 70)
    assert not schedule.due(70.0, 69)
    assert schedule.due(70.0, 70)
    short = Schedule(every=2.0)
    short.asked(10.0, 40, soon=True)
    assert short.due(12.0, 70)


def test_what_earlier_runs_left_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    fresh, _ = advisor(config_with(path), Published())
    assert not fresh._schedule.due(0.0, 0)
    write(path, recorded(2, 4))
    again, _ = advisor(config_with(path), Published())
    assert again._schedule.due(0.0, 0)


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", recorded(2, 4))
    published = Published()
    off, _ = advisor(config_with(path, every=0), published)
    await off.run()
    assert published.all == []


# -- what --------------------------------------------------------------------------------------------------


def as_the_command_says(journal: Path, *more: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["advise", str(journal), "--json", *more])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


async def test_the_gauge_is_what_the_command_recommends(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", recorded(6, 30))
    published = Published()
    sections = {"journal": {"path": str(path)}, "advice": {"every": 0.01, "latest": 100}}
    async with FakeLlamaServer() as fake, serving([fake], **sections) as service:
        assert await service.metric("warmslot_advised_slots", backend="b0") == 0
        config = config_for(1, **sections)
        journal = service.router.journal
        assert journal is not None

        def publish(found: Mapping[str, Advised]) -> None:
            service.router.advise(found)
            published(found)

        running = asyncio.create_task(Advisor(config, journal, lambda: backends_of(config), publish).run())
        async with asyncio.timeout(PATIENCE):
            await published.more.wait()
        running.cancel()
        await asyncio.wait({running})
        gauge = await service.metric("warmslot_advised_slots", backend="b0")
        told = as_the_command_says(path, "--backend", "b0", "--latest", "100")
        assert gauge == told["advice"]["slots"] > 1
        assert told["requests_in_journal"] == 100
        found = service.router.advised["b0"]
        assert (found.slots, found.reason, found.confidence) == (
            *(told["advice"]["slots"], told["reason"]),
            told["confidence"],
        )
        assert service.router.live is not None
        (shown,) = service.router.live.snapshot(service.router.dispatcher)["backends"]
        assert shown["advised"]["headline"].startswith(f"--parallel {found.slots}, ")


def test_each_backend_is_advised_on_its_own_requests(tmp_path: Path) -> None:
    config = config_for(2, journal={"path": str(tmp_path / "journal.jsonl")})
    entries = sorted(
        [*recorded(1, 10, "b0"), *recorded(6, 12, "b1")],
        key=lambda one: one.time + one.ended if isinstance(one, Record) else 0.0,
    )
    path = write(tmp_path / "journal.jsonl", entries)
    found = answer(json.loads(question(str(path), 10_000, backends_of(config))))
    assert found["b0"].slots == 1
    assert found["b1"].slots > 1
    for name, one in found.items():
        assert as_the_command_says(path, "--backend", name)["advice"]["slots"] == one.slots


def test_with_too_little_data_there_is_no_advice_and_the_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", recorded(1, 2))
    found = answer(json.loads(question(str(path), 1000, backends_of(config_with(path)))))["b0"]
    assert found.slots == 0
    assert found.reason.startswith("too little data: ")
    assert found.confidence == ""


def test_a_question_holds_no_secrets() -> None:
    backends = [
        {"name": "far", "url": "http://10.0.0.1:1", "api_key": "hush"},
        {"name": "near", "model": "demo", "api_key": "hush", "env": {"TOKEN": "hush"}, "cache_ram": 512},
    ]
    config = Config.model_validate({"pools": [{"name": "m", "backends": backends}]})
    asked = question("j", 100, backends_of(config))
    assert b"hush" not in asked
    far, near = json.loads(asked)["backends"]
    assert far == {"name": "far", "url": "http://10.0.0.1:1"}
    assert near == {"name": "near", "model": "demo", "cache_ram": 512, "args": []}


# -- the process that finds it -----------------------------------------------------------------------------


async def test_the_process_answers_what_the_function_says(tmp_path: Path) -> None:
    path = write(tmp_path / "journal.jsonl", recorded(2, 8))
    config, published = config_with(path), Published()
    asking, _ = advisor(config, published)
    await asking.renew()
    (found,) = published.all
    expected = answer(json.loads(question(str(path), 20_000, backends_of(config))))
    assert {name: replace(one, time=0) for name, one in found.items()} == {
        name: replace(one, time=0) for name, one in expected.items()
    }
    assert found["b0"].slots > 0


def test_it_takes_what_nobody_else_wants() -> None:
    code = """
import os, resource
from warmslot.launcher.advisor_child import _stand_back
_stand_back()
print(os.nice(0), os.sched_getscheduler(0), resource.getrlimit(resource.RLIMIT_DATA)[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    nice, policy, memory = map(int, done.stdout.split())
    assert nice == 19
    assert policy in {os.SCHED_IDLE, os.SCHED_OTHER}  # some containers forbid the former
    assert memory == MEMORY


class Child:
    """A child that tells of itself through a pipe with a name, and then waits for ever."""

    def __init__(self, folder: Path) -> None:
        self.pipe = folder / "told"
        os.mkfifo(self.pipe)
        code = f"import os, signal; open({str(self.pipe)!r}, 'w').write(str(os.getpid())); signal.pause()"
        self.command = (sys.executable, "-c", code)

    async def started(self) -> int:
        """Its process, once it runs."""
        return int(await asyncio.to_thread(self.pipe.read_text))


async def test_it_is_killed_when_the_advisor_ends(tmp_path: Path) -> None:
    child, published = Child(tmp_path), Published()
    asking, _ = advisor(config_with(tmp_path / "journal.jsonl"), published, child.command)
    renewing = asyncio.create_task(asking.renew())
    pid = await child.started()
    assert psutil.pid_exists(pid)
    renewing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await renewing
    assert not psutil.pid_exists(pid)
    assert published.all == []


async def test_there_is_one_at_a_time(tmp_path: Path) -> None:
    child = Child(tmp_path)
    path = write(tmp_path / "journal.jsonl", recorded(1, 1))
    asking, _ = advisor(config_with(path, every=0.001), Published(), child.command)
    running = asyncio.create_task(asking.run())
    pid = await child.started()
    assert [one.pid for one in psutil.Process().children() if child.command[-1] in one.cmdline()] == [pid]
    running.cancel()
    await asyncio.wait({running})
    assert not psutil.pid_exists(pid)


FAILING = {
    "ends with an error": "import sys; sys.exit('journal: no such file')",
    "answers nonsense": "print('hello')",
    "answers something else": "print('[1]')",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "says nothing": "import signal; signal.pause()",
}
SAID = {
    "ends with an error": "journal: no such file (exit status 1)",
    "answers nonsense": "the answer cannot be understood",
    "answers something else": "the answer cannot be understood",
    "is killed": "exit status -9",
    "says nothing": "there was no answer in 0.2 s",
}


@pytest.mark.parametrize("how", FAILING)
async def test_a_failure_is_one_warning_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    published = Published()
    command = (sys.executable, "-S", "-c", FAILING[how])
    patience = 0.2 if how == "says nothing" else PATIENCE
    asking, _ = advisor(config_with(tmp_path / "journal.jsonl"), published, command, patience=patience)
    with caplog.at_level(logging.WARNING):
        await asking.renew()
        await asking.renew()
    assert [record.getMessage() for record in caplog.records] == [
        f"advice on the number of slots is not renewed: {SAID[how]}"
    ]
    assert published.all == []


async def test_what_cannot_be_started_is_a_failure_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asking, _ = advisor(config_with(tmp_path / "j.jsonl"), Published(), (str(tmp_path / "none"),))
    await asking.renew()
    assert "no process could be started: No such file or directory" in caplog.text


async def test_a_failure_after_a_success_is_told_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    published, marker = Published(), tmp_path / "works"
    told = json.dumps({"b0": {"slots": 4, "reason": "why", "time": 1.0}})
    code = f"import os, sys; os.path.exists({str(marker)!r}) or sys.exit('no'); print({told!r})"
    asking, _ = advisor(
        config_with(tmp_path / "journal.jsonl"), published, (sys.executable, "-S", "-c", code)
    )
    await asking.renew()
    marker.touch()
    await asking.renew()
    marker.unlink()
    await asking.renew()
    assert len(caplog.records) == 2
    assert published.all == [{"b0": Advised(4, "why", 1.0)}]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_it_does_not_outlive_a_parent_that_is_killed() -> None:
    question_end, held_open = os.pipe()  # so that no end of its input tells the child to end
    code = f"""
import os, signal, subprocess, sys
child = subprocess.Popen([*{COMMAND!r}, str(os.getpid())], stdin={question_end}, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
signal.pause()
"""
    with contextlib.closing(os.fdopen(held_open, "wb")):
        parent = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, pass_fds=[question_end]
        )
        os.close(question_end)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.communicate()
        assert gone(child)


def test_an_answer_that_is_something_else_is_refused() -> None:
    assert read_answer(b"{}") == {}
    for wrong in (b"", b"[]", b'{"b": 1}', b'{"b": {"slots": 1}}'):
        with pytest.raises((AttributeError, TypeError, ValueError)):
            read_answer(wrong)
