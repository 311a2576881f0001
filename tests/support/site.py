"""A running ``warmslot up`` whose configuration changes, with fake engines as its processes."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml

from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.support.up import Running

    Command = Callable[..., Awaitable[tuple[int, str, str]]]

HELP = """\
-m,    --model FNAME
-np,   --parallel N
-c,    --ctx-size N
-t,    --threads N
--host HOST
--port PORT
--no-kv-unified
--no-cache-idle-slots
--cache-ram N
--slots
--metrics
--log-jsonl
--slot-save-path PATH
--api-key KEY
--lora FNAME
"""
"""What the fake says of itself."""

ROOT = Path(__file__).parents[2]


def engine_script(python: str = sys.executable, root: str = str(ROOT)) -> str:
    """A program for a shell: the fake engine, in the checkout ``root``."""
    command = shlex.join([python, "-m", "tests.fakes"])
    told = f"[ \"$1\" = --help ] && cat <<'EOF' && exit\n{HELP}EOF\n"
    return f'#!/bin/sh\ncd {shlex.quote(root)}\n{told}exec {command} "$@"\n'


class Site:
    """A running warmslot, its file, and its clients."""

    def __init__(self, running: Running, warmslot: Command, file: Path, http: httpx.AsyncClient) -> None:
        self.running = running
        self.warmslot = warmslot
        self.file = file
        self.http = http

    async def reload(self, config: dict[str, Any]) -> list[str]:
        """Write the file and have it read; what the command says."""
        code, out, err = await self.try_reload(config)
        assert (code, err) == (0, "")
        return out.splitlines()

    async def try_reload(self, config: dict[str, Any]) -> tuple[int, str, str]:
        """The same, and it may be refused."""
        self.file.write_text(yaml.safe_dump(config))
        return await self.warmslot("reload")

    async def status(self) -> dict[str, dict[str, Any]]:
        """The backends by name."""
        shown = json.loads((await self.warmslot("status", "--json"))[1])
        return {backend["name"]: backend for backend in shown["backends"]}

    async def operate(self, name: str, **command: Any) -> None:
        """Use a fake engine's remote control."""
        url = (await self.status())[name]["url"]
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
            assert (await client.post(f"{url}/fake", json=command)).status_code == 200

    async def ask(self, text: str = "Hello", model: str = "m", **headers: str) -> httpx.Response:
        """A chat."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def asked_of(self, text: str, model: str = "m") -> str:
        """A chat that is served; by which backend."""
        answer = await self.ask(text, model)
        assert answer.status_code == 200, answer.text
        return answer.headers["X-Warmslot-Backend"]


def config_of(*backends: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One pool."""
    pool = {"name": "m", "backends": list(backends), **more.pop("pool", {})}
    return {"pools": [pool], **more}


def states(shown: dict[str, Any]) -> list[str]:
    """Those of all backends on the live page."""
    return [backend["state"] for backend in shown["backends"]]


async def live(here: Site, is_meant: Callable[[dict[str, Any]], bool], **headers: str) -> dict[str, Any]:
    """What the live page shows, once it is what is meant."""
    async with here.http.stream("GET", "/ui/events", headers=headers) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and is_meant(shown := json.loads(line.removeprefix("data: "))):
                return shown  # type: ignore[no-any-return]
    raise AssertionError("it never showed that")


@asynccontextmanager
async def streaming(here: Site, name: str, **headers: str) -> AsyncIterator[None]:
    """A stream that runs on the first backend in the block, and of which all has come after it."""
    await here.operate(name, op="hold", gate="token")
    body = {"messages": [{"role": "user", "content": "A long story"}], "max_tokens": 4, "stream": True}
    async with here.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        await live(
            here, lambda shown: any(slot["running"] for slot in shown["backends"][0]["slots"]), **headers
        )
        yield
        await here.operate(name, op="release", gate="token")
        lines = [line async for line in answer.aiter_lines()]
    assert answer.status_code == 200
    assert "data: [DONE]" in lines
    assert sum('"content"' in line for line in lines) >= 4
