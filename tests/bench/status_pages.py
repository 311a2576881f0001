"""What looking costs: ``/metrics`` with eight backends of 32 slots, and twenty viewers of the live page.

``python -m tests.bench.status_pages``; results go to ``tests/bench/results/status_pages.json``. The router
runs in a process of its own with warm slots; one request a second ends, so that each snapshot differs.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import uvicorn
from rich.console import Console
from warmslot.router.app import create_router, server_config
from warmslot.router.config import Config
from warmslot.router.values import Outcome, Prompt, Request, Status

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from warmslot.router.app import Router

BACKENDS, SLOTS, CONTEXT = 8, 32, 32768
SCRAPES, VIEWERS, SECONDS = 40, 20, 20.0
RESULT = Path(__file__).parent / "results/status_pages.json"


def _serve(pipe: Connection) -> None:
    asyncio.run(_router(pipe))


async def _router(pipe: Connection) -> None:
    backends = [{"name": f"gpu{number}", "model": "demo", "slots": SLOTS} for number in range(BACKENDS)]
    config = Config.model_validate(
        {"pools": [{"name": "bench", "backends": backends}], "listen": {"port": 0}}
    )
    router = create_router(config)
    for backend in backends:
        await router.dispatcher.fleet.backend_ready(
            backend["name"], "http://127.0.0.1:9", SLOTS, CONTEXT, fresh=True
        )
    for number in range(BACKENDS * SLOTS):
        await _request(router, number)
    listening = socket.create_server(("127.0.0.1", 0))
    gaps = [0.0]
    tasks = [asyncio.create_task(_tick(gaps)), asyncio.create_task(_go_on(router))]
    server = uvicorn.Server(server_config(router.app, config))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    pipe.send(listening.getsockname()[1])
    loop = asyncio.get_running_loop()
    while (asked := await loop.run_in_executor(None, pipe.recv)) is not None:
        pipe.send(max(gaps))
        if asked == "reset":
            gaps[:] = [0.0]
    server.should_exit = True
    for task in tasks:
        task.cancel()
    await serving


async def _request(router: Router, number: int) -> None:
    data = f"system {number % 5} " * 60 + f"conversation {number} " * 200
    request = Request(str(number), Prompt.of(data.encode()), "bench", arrived=time.monotonic())
    lease = await router.dispatcher.acquire(request)
    router.dispatcher.sending(lease.request.id)
    router.dispatcher.first_token(lease.request.id)
    outcome = Outcome(Status.OK, 700, 300, 20, 0.2, 0.4, ttft_seconds=0.3)
    router.dispatcher.finish(lease.request.id, outcome)


async def _go_on(router: Router) -> None:
    number = BACKENDS * SLOTS
    while True:
        await asyncio.sleep(1)
        await _request(router, number)
        number += 1


async def _tick(gaps: list[float]) -> None:
    """Notes how long the event loop did not come round."""
    before = time.perf_counter()
    while True:
        await asyncio.sleep(0.001)
        after = time.perf_counter()
        gaps[0] = max(gaps[0], after - before - 0.001)
        before = after


async def _scrapes(http: httpx.AsyncClient) -> dict[str, float]:
    times, size = [], 0
    for _ in range(SCRAPES):
        began = time.perf_counter()
        size = len((await http.get("/metrics")).content)
        times.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)
    return {
        "bytes": size,
        "median_ms": round(1000 * statistics.median(times), 2),
        "p95_ms": round(1000 * statistics.quantiles(times, n=20)[-1], 2),
    }


async def _viewer(http: httpx.AsyncClient) -> int:
    size = 0
    async with http.stream("GET", "/ui/events") as answer:
        async for piece in answer.aiter_bytes():
            size += len(piece)
    return size


async def _viewers(http: httpx.AsyncClient, router: psutil.Process) -> dict[str, float]:
    async def cpu() -> float:
        began = router.cpu_times()
        await asyncio.sleep(SECONDS)
        ended = router.cpu_times()
        return 100 * (ended.user + ended.system - began.user - began.system) / SECONDS

    idle = await cpu()
    viewers = [asyncio.create_task(_viewer(http)) for _ in range(VIEWERS)]
    await asyncio.sleep(1)
    watched = await cpu()
    for viewer in viewers:
        viewer.cancel()
    await asyncio.gather(*viewers, return_exceptions=True)
    return {
        "viewers": VIEWERS,
        "percent_of_a_core": round(watched - idle, 2),
        "without_viewers": round(idle, 2),
    }


async def _measure(port: int, pid: int, pipe: Connection) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=VIEWERS + 2)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as http:
        await http.get("/metrics")
        pipe.send("reset")
        pipe.recv()
        scrapes = await _scrapes(http)
        pipe.send("read")
        scrapes["longest_gap_of_the_loop_ms"] = round(1000 * pipe.recv(), 2)
        viewers = await _viewers(http, psutil.Process(pid))
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "load": round(os.getloadavg()[0], 1),
        "backends": BACKENDS,
        "slots": SLOTS,
        "metrics": scrapes,
        "live_page": viewers,
    }


def main() -> None:
    """Measure, print, write."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    child.start()
    try:
        result = asyncio.run(_measure(ours.recv(), child.pid or 0, ours))
        ours.send(None)
    finally:
        child.join(10)
        child.kill()
    text = json.dumps(result, indent=2)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text + "\n", encoding="utf-8")
    Console().print_json(text)


if __name__ == "__main__":
    main()
