"""Backends that are restarted on request, with old or new settings."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest
from warmslot.launcher.restarts import RestartPolicy
from warmslot.launcher.supervisor import Launch, Manners, ReshapeError, Supervisor

from tests.support.launcher import PATIENCE, Recorder, gone, stub_launch

if TYPE_CHECKING:
    from pathlib import Path

GENTLE = Manners(
    RestartPolicy(first=0.01, ceiling=0.02, budget=2), drain_timeout=PATIENCE, stop_timeout=PATIENCE
)


def supervise(recorder: Recorder, launch: Launch, manners: Manners = GENTLE) -> Supervisor:
    return Supervisor([launch], recorder, recorder, manners=manners)


def told(recorder: Recorder) -> list[str]:
    """What happened to the backend, from its first being ready on."""
    shown = [call[2] if call[0] == "state" else call[0] for call in recorder.calls if call[0] != "loading"]
    return shown[shown.index("ready") :]


async def test_a_restart_drains_first_and_starts_anew(tmp_path: Path) -> None:
    recorder = Recorder()
    async with supervise(recorder, stub_launch(tmp_path, "serve")) as supervisor:
        await recorder.until_state("stub", "ready")
        pid = supervisor.status()[0].pid
        recorder.idle.clear()
        restarting = asyncio.create_task(supervisor.restart("stub"))
        await recorder.until("draining")
        assert supervisor.status()[0].pid == pid
        recorder.idle.set()
        status = await restarting
        assert (status.state, status.restarts) == ("ready", 0)
        assert status.pid != pid
        assert pid is not None
        assert gone(pid)
        assert told(recorder) == [
            *("ready", "ready", "draining", "draining", "stopping", "down", "stopped"),
            *("starting", "loading", "ready", "ready"),
        ]


async def test_a_drain_has_an_end_and_nothing_is_let_in_after_it(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.idle.clear()
    async with supervise(recorder, stub_launch(tmp_path, "serve"), replace(GENTLE, drain_timeout=0.1)) as it:
        await recorder.until_state("stub", "ready")
        status = await it.restart("stub")
        assert status.state == "ready"
    calls = [call[0] for call in recorder.calls]
    assert calls.index("down") < calls.index("resumed")


async def test_a_stop_ends_a_drain(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.idle.clear()
    async with supervise(recorder, stub_launch(tmp_path, "serve")) as supervisor:
        await recorder.until_state("stub", "ready")
        restarting = asyncio.create_task(supervisor.restart("stub"))
        await recorder.until("draining")
    assert (await restarting).state == "stopped"
    assert recorder.states("stub")[-3:] == ["draining", "stopping", "stopped"]


async def test_a_backend_that_dies_in_its_drain_is_started_at_once(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.idle.clear()
    async with supervise(recorder, stub_launch(tmp_path, "dies")) as supervisor:
        _, url, *_ = await recorder.until("ready")
        restarting = asyncio.create_task(supervisor.restart("stub"))
        await recorder.until("draining")
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(f"{url}/die")
        assert (await restarting).state == "ready"
    assert recorder.of("down")[0] == ("stub", "exit status 3")
    assert recorder.states("stub")[3:8] == ["draining", "crashed", "backing-off", "starting", "loading"]


async def test_a_restart_while_loading_starts_anew(tmp_path: Path) -> None:
    recorder = Recorder()
    launch = stub_launch(tmp_path, "never")
    async with supervise(recorder, launch) as supervisor:
        await recorder.until_state("stub", "loading")
        serving = launch.backend.model_copy(update={"args": ("--mode", "serve")})
        assert (await supervisor.restart("stub", serving)).state == "ready"
    assert recorder.of("draining") == []


async def test_a_restart_ends_the_wait_after_a_crash(tmp_path: Path) -> None:
    recorder = Recorder()
    launch = stub_launch(tmp_path, "exits")
    patient = replace(GENTLE, policy=RestartPolicy(first=3600, ceiling=3600))
    async with supervise(recorder, launch, patient) as supervisor:
        await recorder.until_state("stub", "backing-off")
        serving = launch.backend.model_copy(update={"args": ("--mode", "serve")})
        assert (await supervisor.restart("stub", serving)).state == "ready"


async def test_a_failed_backend_can_be_tried_again(tmp_path: Path) -> None:
    recorder = Recorder()
    launch = stub_launch(tmp_path, "exits")
    async with supervise(recorder, launch) as supervisor:
        await recorder.until_state("stub", "failed")
        await supervisor.wait()
        assert (await supervisor.restart("stub")).state == "failed"
        serving = launch.backend.model_copy(update={"args": ("--mode", "serve")})
        assert (await supervisor.restart("stub", serving)).state == "ready"
    assert recorder.states("stub")[-1] == "stopped"


async def test_slots_and_context_can_be_changed(tmp_path: Path) -> None:
    recorder = Recorder()
    launch = stub_launch(tmp_path, "serve", slots=2, context=512)
    async with supervise(recorder, launch) as supervisor:
        await recorder.until("ready")
        await supervisor.restart("stub", launch.backend.model_copy(update={"slots": 6, "context": 1024}))
    assert [call[2:4] for call in recorder.of("ready")] == [(2, 512), (6, 1024)]


async def test_settings_that_do_not_work_are_taken_back(tmp_path: Path) -> None:
    recorder = Recorder()
    launch = stub_launch(tmp_path, "serve")
    async with supervise(recorder, launch) as supervisor:
        await recorder.until_state("stub", "ready")
        wrong = launch.backend.model_copy(update={"args": ("--mode", "refuses")})
        with pytest.raises(
            ReshapeError, match=r"stub does not start with the new settings: .*key-value pairs"
        ):
            await supervisor.restart("stub", wrong)
        assert supervisor.status()[0].state == "ready"
        assert (await supervisor.restart("stub")).state == "ready"


async def test_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    async with supervise(Recorder(), stub_launch(tmp_path, "serve")) as supervisor:
        with pytest.raises(KeyError):
            await supervisor.restart("other")
