"""The launcher with real engines: both of them give the same facts, in the same log lines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from warmslot.launcher.command import build_command
from warmslot.launcher.logs import (
    Cancelled,
    Launched,
    Listening,
    Loading,
    PromptTiming,
    Released,
    Selected,
    Selection,
    Stage,
    parse,
)
from warmslot.launcher.orphans import StateFolder
from warmslot.launcher.restarts import RestartPolicy
from warmslot.launcher.supervisor import Launch, Manners, Supervisor
from warmslot.router.config import Backend

from tests.support.launcher import PATIENCE, Recorder, gone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from warmslot.launcher.command import Command
    from warmslot.launcher.engine import Engine

QUICK = RestartPolicy(first=0.01, ceiling=0.02, budget=2)
GENTLE = Manners(QUICK, drain_timeout=PATIENCE, stop_timeout=PATIENCE)
SLOTS, CONTEXT = 2, 1024


def launch(engine: Engine, model: Path, **settings: Any) -> Launch:
    settings = {"slots": SLOTS, "context": CONTEXT, "threads": 1, "args": ("--no-warmup",), **settings}
    return Launch(Backend(name="real", model=str(model), **settings), engine)


class Running:
    """A supervised engine that is ready."""

    def __init__(self, recorder: Recorder, supervisor: Supervisor, client: httpx.AsyncClient) -> None:
        self.recorder = recorder
        self.supervisor = supervisor
        self.client = client

    async def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": True, **fields}
        answer = await self.client.post("/completion", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.recorder.events if isinstance(event, kind)]


@pytest.fixture
async def running(installed_engine: Engine, demo_model: Path, tmp_path: Path) -> AsyncIterator[Running]:
    recorder = Recorder()
    spec = launch(installed_engine, demo_model, slot_save_path=str(tmp_path))
    async with Supervisor([spec], recorder, recorder, manners=GENTLE) as supervisor:
        _, url, *_ = await recorder.until("ready")
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            yield Running(recorder, supervisor, client)


async def test_a_life_from_start_to_stop(installed_engine: Engine, demo_model: Path) -> None:
    recorder = Recorder()
    async with Supervisor(
        [launch(installed_engine, demo_model)], recorder, recorder, manners=GENTLE
    ) as supervisor:
        name, url, slots, context, fresh = await recorder.until("ready")
        pid = supervisor.status()[0].pid
    assert (name, slots, context, fresh) == ("real", SLOTS, CONTEXT, True)
    assert url.startswith("http://127.0.0.1:")
    assert pid is not None
    assert gone(pid)
    assert recorder.states("real") == ["starting", "loading", "ready", "stopping", "stopped"]
    stages = [event for event in recorder.events if isinstance(event, Loading)]
    assert [event.stage for event in stages] == list(Stage)[: len(stages)]
    assert Loading(Stage.ALLOCATING, SLOTS, CONTEXT) in stages
    assert any("cleaning up before exit" in line for line in recorder.lines)


async def test_both_engines_take_the_launch_profile(running: Running, installed_engine: Engine) -> None:
    lacking = [] if installed_engine.kind == "stock" else [("real", ["--log-jsonl"])]
    assert running.recorder.of("left_out") == lacking
    assert any("kv_unified = 'false'" in line for line in running.recorder.lines)


async def test_slots_share_one_context_where_that_is_set(installed_engine: Engine, demo_model: Path) -> None:
    recorder = Recorder()
    spec = launch(installed_engine, demo_model, kv_unified=True)
    async with Supervisor([spec], recorder, recorder, manners=GENTLE):
        _, url, slots, context, _ = await recorder.until("ready")
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            body = {"prompt": "word " * (CONTEXT + 100), "n_predict": 1, "id_slot": 0}
            answer = await client.post("/completion", json=body)
    assert (slots, context) == (SLOTS, SLOTS * CONTEXT)
    assert answer.is_success, answer.text
    assert any("kv_unified = 'true'" in line for line in recorder.lines)


async def test_what_the_router_builds_on_holds(running: Running) -> None:
    first = await running.complete("one two three four " * 20, id_slot=1)
    assert first["id_slot"] == 1
    assert first["timings"]["cache_n"] == 0
    again = await running.complete("one two three four " * 20, id_slot=1)
    assert again["timings"]["prompt_n"] == 1
    assert again["timings"]["cache_n"] == first["timings"]["prompt_n"] - 1

    slots = (await running.client.get("/slots")).json()
    assert [slot["id"] for slot in slots] == [0, 1]
    assert not any(slot["is_processing"] for slot in slots)
    # prompt and generated tokens, less the last one sampled
    assert slots[1]["n_prompt_tokens"] == first["timings"]["prompt_n"] + 4 - 1

    metrics = (await running.client.get("/metrics")).text
    assert "\nllamacpp:requests_deferred 0\n" in metrics
    assert "\nllamacpp:prompt_tokens_cached_total " in metrics

    chat = {"messages": [{"role": "user", "content": "hello"}]}
    rendered = (await running.client.post("/apply-template", json=chat)).json()["prompt"]
    assert rendered.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


async def test_the_log_tells_of_selections_timings_and_releases(running: Running) -> None:
    pinned = await running.complete("alpha beta gamma " * 20, id_slot=1)
    chosen = await running.complete("alpha beta gamma " * 21)
    other = await running.complete("something else entirely, nothing shared at all", cache_prompt=True)
    await running.recorder.until_true(lambda: len(running.events(Released)) == 3)
    assert [(event.slot, event.by) for event in running.events(Selected)] == [
        (1, Selection.ID),
        (1, Selection.LCP),
        (0, Selection.LRU),
    ]
    assert chosen["id_slot"] == 1
    assert other["id_slot"] == 0
    timings = [answer["timings"] for answer in (pinned, chosen, other)]
    assert [event.tokens for event in running.events(PromptTiming)] == [t["prompt_n"] for t in timings]
    assert [event.tokens for event in running.events(Released)] == [
        t["cache_n"] + t["prompt_n"] + t["predicted_n"] - 1 for t in timings
    ]
    launched = [event.task for event in running.events(Launched)]
    assert launched == [event.task for event in running.events(Released)]


async def test_the_log_tells_of_a_client_that_left(running: Running) -> None:
    body = {"prompt": "count", "n_predict": 900, "ignore_eos": True, "stream": True, "id_slot": 0}
    async with running.client.stream("POST", "/completion", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
    await running.recorder.until_true(lambda: running.events(Released))
    [launched] = running.events(Launched)
    assert running.events(Cancelled) == [Cancelled(launched.task)]
    assert running.events(Released)[0].tokens < 900


async def test_slots_are_saved_and_restored(running: Running, tmp_path: Path) -> None:
    prompt = "a b c d e f g h " * 10
    first = await running.complete(prompt, id_slot=0)
    saved = await running.client.post("/slots/0?action=save", json={"filename": "x.bin"})
    assert saved.status_code == 200, saved.text
    assert saved.json()["n_written"] == (await asyncio.to_thread((tmp_path / "x.bin").stat)).st_size
    restored = await running.client.post("/slots/1?action=restore", json={"filename": "x.bin"})
    assert restored.json()["n_restored"] == saved.json()["n_saved"]
    again = await running.complete(prompt, id_slot=1)
    assert again["timings"]["cache_n"] == first["timings"]["prompt_n"] - 1


@pytest.mark.parametrize("moment", ["loading", "ready"])
async def test_a_killed_engine_is_started_again(
    installed_engine: Engine, demo_model: Path, moment: str
) -> None:
    recorder = Recorder()
    supervisor = Supervisor([launch(installed_engine, demo_model)], recorder, recorder, manners=GENTLE)
    async with supervisor:
        await recorder.until_state("real", moment)
        pid = supervisor.status()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        reason = await recorder.until_state("real", "crashed")
        await recorder.until_state("real", "ready", 1 if moment == "loading" else 2)
        assert supervisor.status()[0].pid != pid
        assert gone(pid)
    assert reason == "killed by SIGKILL (out of memory?)"
    assert recorder.of("down")[:-1] == ([] if moment == "loading" else [("real", reason)])


async def test_a_stop_while_loading_leaves_nothing(installed_engine: Engine, demo_model: Path) -> None:
    recorder = Recorder()
    async with Supervisor(
        [launch(installed_engine, demo_model)], recorder, recorder, manners=GENTLE
    ) as supervisor:
        await recorder.until_true(lambda: Loading(Stage.READING) in recorder.events)
        pid = supervisor.status()[0].pid
    assert pid is not None
    assert gone(pid)
    assert recorder.states("real")[-2:] == ["stopping", "stopped"]


def shortened(model: Path, folder: Path, size: int) -> Path:
    path = folder / "short.gguf"
    with model.open("rb") as file:
        path.write_bytes(file.read(size))
    return path


@pytest.mark.parametrize(("size", "said"), [(100_000, "failed to read"), (4_000_000, "")])
async def test_a_truncated_model_fails_with_the_engines_reason(
    installed_engine: Engine, demo_model: Path, tmp_path: Path, size: int, said: str
) -> None:
    recorder = Recorder()
    launches = [launch(installed_engine, shortened(demo_model, tmp_path, size))]
    async with Supervisor(launches, recorder, recorder, manners=GENTLE) as supervisor:
        [status] = await supervisor.wait_settled()
    assert status.state == "failed"
    assert said in status.reason
    assert status.reason.endswith("(exit status 1)")
    assert "\n" not in status.reason
    assert recorder.states("real") == ["starting", "loading", "crashed", "failed"]
    assert any("exiting due to model loading error" in line for line in status.tail)


async def test_an_unknown_flag_fails_with_the_engines_reason(
    installed_engine: Engine, demo_model: Path
) -> None:
    recorder = Recorder()
    launches = [launch(installed_engine, demo_model, args=("--frobnicate",))]
    async with Supervisor(launches, recorder, recorder, manners=GENTLE) as supervisor:
        [status] = await supervisor.wait_settled()
    assert status.state == "failed"
    assert "--frobnicate" in status.reason
    assert recorder.states("real") == ["starting", "loading", "crashed", "failed"]


async def test_a_port_in_use_is_named(installed_engine: Engine, demo_model: Path) -> None:
    recorder = Recorder()
    stranger = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with stranger:
        port = stranger.sockets[0].getsockname()[1]
        spec = launch(installed_engine, demo_model)
        launches = [Launch(spec.backend, spec.engine, port=port)]
        async with Supervisor(launches, recorder, recorder, manners=GENTLE) as supervisor:
            [status] = await supervisor.wait_settled()
    assert status.state == "failed"
    assert f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}" in status.reason


def test_the_embedded_engine_has_upstreams_defaults(installed_engine: Engine, demo_model: Path) -> None:
    """Started bare, as the comparison in benchmarks does: the same slots, context and sharing as upstream."""
    argv = [
        *installed_engine.command,
        "-m",
        str(demo_model),
        "--port",
        "0",
        "-t",
        "1",
        "--no-warmup",
        "-c",
        "2048",
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        shape = url = ""
        for line in process.stdout:
            shape = line.partition("initializing, ")[2].strip() or shape
            url = line.partition("listening on ")[2].strip()
            if url:
                break
        props = httpx.get(f"{url}/props", trust_env=False).text
        process.terminate()
        process.stdout.read()
    assert shape == "n_slots = 4, n_ctx_slot = 2048, kv_unified = 'true'"
    assert json.loads(props)["total_slots"] == 4


async def test_an_engine_lives_on_without_its_launcher_and_is_taken_over(
    installed_engine: Engine, demo_model: Path, tmp_path: Path
) -> None:
    """Its log goes nowhere then, and it must not mind that."""
    spec = launch(installed_engine, demo_model)
    command = build_command(installed_engine, spec.backend, demo_model)
    state = StateFolder(tmp_path)
    state.acquire()
    process, url = abandoned(state, command)
    with process:
        recorder = Recorder()
        manners = replace(GENTLE, outlive=True)
        async with Supervisor([spec], recorder, recorder, manners=manners, folder=state) as supervisor:
            assert await recorder.until("ready") == ("real", url, SLOTS, CONTEXT, False)
            assert supervisor.status()[0].pid == process.pid
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as client:
                running = Running(recorder, supervisor, client)
                assert (await running.complete("still here", id_slot=0))["timings"]["predicted_n"] == 4
        assert process.wait(PATIENCE) in {0, -signal.SIGTERM}
    state.release()


def abandoned(state: StateFolder, command: Command) -> tuple[subprocess.Popen[str], str]:
    """An engine as a launcher starts it, whose output nobody reads any more; and its address."""
    mark = state.announce("real", command.fingerprint)
    process = subprocess.Popen(
        command.argv,
        env=dict(command.marked(mark).env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    state.started("real", process.pid)
    events = (parse(line).event for line in process.stdout)
    url = next(event.url for event in events if isinstance(event, Listening))
    state.serving("real", url)
    process.stdout.close()
    return process, url
