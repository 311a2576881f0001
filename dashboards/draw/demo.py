"""Draws both dashboards from a few minutes of ``warmslot up`` with two demo engines under an agents' load.

    cd dashboards/draw && npm install && npm run build
    python dashboards/draw/demo.py docs/img --minutes 4

Needs Prometheus and Chromium (Debian's packages) beside what ``draw.py`` needs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HERE = Path(__file__).resolve().parent
WARMSLOT = Path(sys.executable).with_name("warmslot")
CLIENTS = ("desk", "ci")
AGENTS = 6
SCRAPED = "10s"
"""Window of rates; Grafana takes four scrape intervals at least."""

CONFIG = """
journal: {path: journal.jsonl}
advice: {every: 1m}
listen: {port: 0}
keys:
  - {name: desk, value: desk-key}
  - {name: ci, value: ci-key}
pools:
  - name: demo
    backends:
      - {name: gpu0, model: demo, slots: 2, context: 2048, threads: 1, cache_ram: 256}
      - {name: gpu1, model: demo, slots: 2, context: 2048, threads: 1, cache_ram: 256}
"""
PROMETHEUS = """
global: {{scrape_interval: 2s}}
scrape_configs:
  - job_name: warmslot
    authorization: {{credentials: desk-key}}
    static_configs: [{{targets: ["{target}"]}}]
"""


@asynccontextmanager
async def running(*command: str | Path, says: str, env: dict[str, str] | None = None) -> AsyncIterator[str]:
    """A child process; the value is what the first group of ``says`` matched in its output."""
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=env
    )
    output: asyncio.StreamReader = child.stdout  # type: ignore[assignment]  # it is a pipe
    lines: list[str] = []
    found = None
    while found is None and (line := (await output.readline()).decode()):
        lines.append(line)
        found = re.search(says, line)
    if found is None:
        raise SystemExit("".join(lines))
    reading = asyncio.create_task(output.read())
    try:
        yield found[1]
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
        await reading


async def agent(http: httpx.AsyncClient, number: int, over: float) -> None:
    """One conversation after the other, each of a few turns, with a system prompt that all share."""
    chance = random.Random(number)  # noqa: S311 - a load that is the same each time
    headers = {"Authorization": f"Bearer {CLIENTS[number % 2]}-key"}
    system = "You are a careful assistant who answers in few words and names his sources. " * 16
    conversation = 0
    while time.time() < over:
        conversation += 1
        messages = [{"role": "system", "content": system}]
        for turn in range(chance.randint(3, 6)):
            words = f"Agent {number}, task {conversation}, step {turn}: what comes next, and why? "
            messages.append({"role": "user", "content": words * chance.randint(2, 8)})
            body = {"messages": messages, "max_tokens": chance.randint(8, 32), "stream": turn % 3 > 0}
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            answer.raise_for_status()
            messages.append({"role": "assistant", "content": f"Step {turn} of task {conversation}."})
            await asyncio.sleep(chance.uniform(0, 3))
            if time.time() > over:
                return
        body = {"prompt": f"Summary of task {conversation}: " * 20, "max_tokens": 8}
        (await http.post("/v1/completions", json=body, headers=headers)).raise_for_status()


async def draw(folder: Path, out: Path, minutes: float) -> None:
    """Serve, load, scrape, draw."""
    (folder / "warmslot.yaml").write_text(CONFIG, encoding="utf-8")
    up = WARMSLOT, "up", folder / "warmslot.yaml"
    env = {**os.environ, "XDG_STATE_HOME": str(folder)}
    async with running(*up, says=r"Serving at (\S+)/v1", env=env) as url:
        config = PROMETHEUS.format(target=url.removeprefix("http://"))
        (folder / "prometheus.yml").write_text(config, encoding="utf-8")
        command = "prometheus", f"--config.file={folder / 'prometheus.yml'}"
        command += f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0"
        async with (
            running(*command, says=r'msg="Listening on" address=(\S+)') as address,
            httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http,
        ):
            over = time.time() + 60 * minutes
            await asyncio.gather(*(agent(http, number, over) for number in range(AGENTS)))
            options = "--minutes", str(minutes), "--rate-interval", SCRAPED, "--until", str(over)
            for name in ("overview", "parallel"):
                picture = out / f"{name}.png"
                place = name, f"http://{address}", picture
                drawing = await asyncio.create_subprocess_exec(
                    sys.executable, HERE / "draw.py", *place, *options
                )
                if await drawing.wait():
                    raise SystemExit(f"{picture} was not drawn")


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, help="folder of the pictures")
    parser.add_argument("--minutes", type=float, default=4, help="length of the load")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(draw(Path(folder), given.out, given.minutes))


if __name__ == "__main__":
    main()
