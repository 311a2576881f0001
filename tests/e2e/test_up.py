"""``warmslot up`` as a real process on real engines: it serves, drains, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import shutil
import signal
import socket
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.support.up import Running

    StartUp = Callable[..., Awaitable[Running]]


@pytest.fixture
def broken_model(demo_model: Path, tmp_path: Path) -> Path:
    """The first part of a model."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(demo_model.read_bytes()[:100_000])
    return broken


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


async def test_it_answers_and_leaves_no_process(up: StartUp, demo: str) -> None:
    running = await up(demo)
    children = running.children
    assert children
    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as client:
        answer = await client.post("/v1/chat/completions", json=chat("Hello"))
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]
        assert answer.headers["X-Warmslot-Backend"] == "one"
        assert (await client.get("/health")).status_code == 200
        assert 'outcome="ok"' in (await client.get("/metrics")).text
    running.process.send_signal(signal.SIGTERM)
    code, err = await running.end()
    assert (code, err) == (0, "")
    assert running.lines[-1] == "stopped\n"
    assert psutil.wait_procs(children, timeout=0)[1] == []


async def test_the_curl_line_works_as_it_is_printed(up: StartUp, demo: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    running = await up(demo)
    line = (await running.until("^curl .*"))[0]
    curl = await asyncio.create_subprocess_exec(*shlex.split(line), "-s", stdout=asyncio.subprocess.PIPE)
    out, _ = await curl.communicate()
    events = [text for text in out.decode().split("\n\n") if text.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
    running.process.send_signal(signal.SIGINT)
    assert await running.end() == (0, "")


async def test_a_signal_lets_a_running_answer_end(up: StartUp, demo: str) -> None:
    running = await up(demo)
    async with (
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=chat("Count", stream=True, max_tokens=80, ignore_eos=True)
        ) as answer,
    ):
        lines = answer.aiter_lines()
        first = await anext(lines)
        running.process.send_signal(signal.SIGTERM)
        await running.until("stopping: 1 running request")
        refused = await client.post("/v1/chat/completions", json=chat("Too late"))
        rest = [line async for line in lines if line]
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert refused.status_code == 503
    assert await running.end() == (0, "")


async def test_a_second_signal_stops_at_once(up: StartUp, demo: str) -> None:
    running = await up(demo)
    children = running.children
    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as client:
        body = chat("Count", stream=True, max_tokens=900, ignore_eos=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            running.process.send_signal(signal.SIGTERM)
            await running.until("stopping: 1 running request")
            running.process.send_signal(signal.SIGTERM)
            code, _ = await running.end()
            rest: list[str] = []
            with contextlib.suppress(httpx.HTTPError):
                async for line in lines:
                    rest.append(line)  # noqa: PERF401 - kept when the connection breaks
    assert "data: [DONE]" not in rest
    assert code == 128 + signal.SIGTERM
    assert psutil.wait_procs(children, timeout=10)[1] == []


async def test_a_killed_launcher_takes_its_engine_along(up: StartUp, demo: str) -> None:
    running = await up(demo)
    children = running.children
    running.process.kill()
    await running.process.wait()
    assert psutil.wait_procs(children, timeout=10)[1] == []


async def test_an_engine_that_dies_is_started_again(up: StartUp, demo: str) -> None:
    running = await up(demo)
    for child in running.children:
        child.kill()
    await running.until("one: backing-off: killed by SIGKILL")
    await running.until("one: ready after")
    async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE, trust_env=False) as client:
        answer = await client.post("/v1/chat/completions", json=chat("Hello again"))
    assert answer.status_code == 200
    running.process.send_signal(signal.SIGTERM)
    assert (await running.end())[0] == 0


async def test_a_broken_model_is_a_reason_with_the_engines_own_lines(
    up: StartUp, demo: str, demo_model: Path, broken_model: Path
) -> None:
    running = await up(demo.replace(str(demo_model), str(broken_model)), serving=False)
    code, err = await running.end()
    assert code == 1
    reason, *engine_lines = err.splitlines()
    assert reason.startswith("one: ")
    assert engine_lines
    assert all(line.startswith("one | ") for line in engine_lines)


async def test_a_port_in_use_is_one_line(up: StartUp, demo: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        running = await up(demo, "--port", port, serving=False)
        code, err = await running.end()
    assert code == 1
    assert err == (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use "
        "(listen.port or --port takes another, 0 a free one)\n"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model: /nowhere/a.gguf", "one: there is no model file /nowhere/a.gguf"),
        (
            "model: demo, engine: /nowhere/llama-server",
            "one: setting engine: there is no file /nowhere/llama-server",
        ),
    ],
)
@pytest.mark.usefixtures("demo_model")
async def test_what_is_missing_is_one_line(up: StartUp, setting: str, message: str) -> None:
    text = f"pools:\n  - name: demo\n    backends:\n      - {{name: one, {setting}}}\n"
    running = await up(text, serving=False)
    assert await running.end() == (1, message + "\n")
