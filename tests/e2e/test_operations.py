"""What an operator does to a running ``warmslot up``, by its own commands."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from warmslot.launcher.engine import Engine, EngineKind

from tests.conftest import installed
from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.support.up import Running

    StartUp = Callable[..., Awaitable[Running]]
    Command = Callable[..., Awaitable[tuple[int, str, str]]]

pytestmark = pytest.mark.engine


@pytest.fixture
def quick(demo_model: Path) -> str:
    """A configuration of the demo model on whichever engine is here."""
    for kind in EngineKind:
        if isinstance(found := installed(kind), Engine):
            engine = kind.value if kind is EngineKind.EMBEDDED else found.path
            return f"""
engine: {engine}
pools:
  - name: demo
    backends:
      - {{name: one, model: {demo_model}, slots: 2, context: 1024, threads: 1}}
"""
    pytest.skip("no engine")


async def ends(running: Running) -> None:
    running.process.send_signal(signal.SIGTERM)
    code, err = await running.end()
    assert (code, err) == (0, "")


async def test_status_set_restart_and_logs(up: StartUp, quick: str, warmslot: Command) -> None:
    running = await up(quick)
    code, out, _ = await warmslot("status")
    assert code == 0
    assert f"at {running.url}" in out
    assert out.splitlines()[2].split()[:6] == ["one", "demo", "ready", "2", "–", "0"]

    before = json.loads((await warmslot("status", "--json"))[1])["backends"][0]
    assert (await warmslot("set", "one", "--slots", "3"))[:2] == (0, "one: ready, 3 slots of 1024 tokens\n")
    after = json.loads((await warmslot("status", "--json"))[1])["backends"][0]
    assert (after["slots"], after["context"]) == (3, 1024)
    assert after["pid"] != before["pid"]
    assert not psutil.pid_exists(before["pid"])
    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as client:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200

    assert (await warmslot("restart", "one"))[0] == 0
    code, out, _ = await warmslot("logs", "one", "-n", "1000")
    assert code == 0
    assert [line.split(" * ")[1] for line in out.splitlines() if " * " in line] == [
        *("starting", "loading", "ready", "draining", "stopping", "stopped"),
        *("starting", "loading", "ready", "draining", "stopping", "stopped"),
        *("starting", "loading", "ready"),
    ]
    await ends(running)
    assert (await warmslot("status"))[0] == 1
    assert "* stopped" in (await warmslot("logs", "one", "-n", "1"))[1]


async def test_what_cannot_be_is_refused_and_changes_nothing(
    up: StartUp, quick: str, warmslot: Command
) -> None:
    running = await up(quick)
    children = running.children
    assert await warmslot("set", "two", "--slots", "3") == (1, "", 'found backend "two", allowed: one\n')
    code, _, err = await warmslot("set", "one", "--slots", "0")
    assert (code, err.split(":")[0]) == (1, "slots")
    assert (await warmslot("set", "one"))[0] == 2
    assert [child.pid for child in running.children] == [child.pid for child in children]
    await ends(running)


@pytest.mark.parametrize("by", ["command", "signal"])
async def test_a_changed_file_is_applied(
    up: StartUp, quick: str, warmslot: Command, tmp_path: Path, by: str
) -> None:
    running = await up(quick)
    file = tmp_path / "up.yaml"
    file.write_text(quick.replace("slots: 2", "slots: none"))
    code, _, err = await warmslot("reload")
    assert code == 1
    assert "slots: found" in err
    changed = quick.replace("slots: 2", "slots: 1")
    changed = changed.replace(
        "  - name: demo\n", "  - name: demo\n    scheduling: {queue: fifo}\n    sort_tools: true\n"
    )
    file.write_text(changed + "ui: false\nlimits: {max_body: 1MiB}\n")
    if by == "command":
        code, out, _ = await warmslot("reload")
        assert code == 0
        assert out == (
            "one: runs with its new settings\n"
            "pool demo: schedules by its new settings\n"
            "in force: limits.max_body, pools.demo.sort_tools\n"
            "changed, but read only at a start: ui\n"
        )
    else:
        running.process.send_signal(signal.SIGHUP)
        await running.until("one: runs with its new settings")
    shown = json.loads((await warmslot("status", "--json"))[1])["backends"][0]
    assert (shown["slots"], shown["state"]) == (1, "ready")
    await ends(running)


async def test_backends_are_exchanged_under_load_and_no_request_is_lost(
    up: StartUp, quick: str, warmslot: Command, tmp_path: Path
) -> None:
    running = await up(quick)
    before, answers, over = running.children, [], asyncio.Event()
    seen = {"one": asyncio.Event(), "two": asyncio.Event()}

    async def client(http: httpx.AsyncClient, number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"Story {number}"}], "max_tokens": 8}
        while not over.is_set():
            answer = await http.post("/v1/chat/completions", json=body)
            answers.append(answer.status_code)
            if answer.is_success:
                seen[answer.headers["X-Warmslot-Backend"]].set()

    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as http:
        clients = [asyncio.create_task(client(http, number)) for number in range(4)]
        await seen["one"].wait()
        (tmp_path / "up.yaml").write_text(quick.replace("name: one", "name: two"))
        came = await warmslot("reload")
        await seen["two"].wait()
        over.set()
        await asyncio.gather(*clients)
    assert came == (0, "two: added\none: removed\n", "")
    assert set(answers) == {200}
    assert psutil.wait_procs(before, timeout=0)[1] == []
    await ends(running)


async def test_one_configuration_runs_once(up: StartUp, quick: str) -> None:
    running = await up(quick)
    second = await up(quick, serving=False)
    code, err = await second.end()
    assert code == 1
    assert err.startswith(f"another warmslot (process {running.process.pid}) uses the state in ")
    await ends(running)


async def test_a_killed_launchers_engine_is_taken_over(up: StartUp, quick: str, warmslot: Command) -> None:
    text = quick + "state: {outlive: true}\n"
    first = await up(text)
    children = first.children
    first.process.kill()
    await first.process.wait()
    second = await up(text)
    shown = json.loads((await warmslot("status", "--json"))[1])["backends"][0]
    assert shown["pid"] in {child.pid for child in children}
    assert shown["state"] == "ready"
    await ends(second)
    assert psutil.wait_procs(children, timeout=10)[1] == []
