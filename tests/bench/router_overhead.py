"""What the router adds to a request, measured from outside against a bare engine that costs nothing.

Run ``python -m tests.bench.router_overhead [--out FILE]``. Three processes: an engine that answers with
ready-made events, the router as it is served in production, and this one as the client. Measured are the
time to the first token directly and through the router (prompts of 8 and 100 kB, template call included, the
two ways taking turns), and the events relayed over 8 streams at once, per second and per second of the
router's CPU time: as fast as they come, and paced so that each arrives alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import uvicorn
import uvloop
from rich.console import Console
from rich.table import Table
from warmslot.router.app import create_router, server_config
from warmslot.router.config import Config

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

STREAMS = 8
EVENTS = 4000
ROUNDS = 100
PACE = 0.004
SIZES = {"8 kB": 8_000, "100 kB": 100_000}
LIMITS_MS = {"8 kB": 3.0, "100 kB": 25.0}
LIMIT_EVENTS = 5000
"""What the router is held to: medians in milliseconds, events per second on one core."""

_FRAME = {"created": 1, "id": "chatcmpl-x", "model": "m", "object": "chat.completion.chunk"}
_TIMINGS = {"cache_n": 1, "prompt_n": 1, "prompt_ms": 1.0, "predicted_n": EVENTS, "predicted_ms": 1.0}


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(delta: dict[str, str], **more: Any) -> bytes:
    choice = {"finish_reason": None if delta else "stop", "index": 0, "delta": delta}
    text = json.dumps({"choices": [choice], **_FRAME, **more}, separators=(",", ":"))
    return _chunk(b"data: " + text.encode() + b"\n\n")


# -- the engine --------------------------------------------------------------------------------------------


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    word, last = _event({"content": " word"}), _event({}, timings=_TIMINGS)
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            if b"/apply-template" in head.split(b"\r\n")[0]:
                text = json.dumps({"prompt": "".join(one["content"] for one in body["messages"])}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                continue
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for _ in range(body["max_tokens"]):
                writer.write(word)
                await writer.drain()
                if body["pace"]:
                    await asyncio.sleep(body["pace"])
            writer.write(last + _chunk(b"data: [DONE]\n\n") + _chunk(b""))
            await writer.drain()
            break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    writer.close()


def _engine(pipe: Connection) -> None:
    async def run() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0, limit=1 << 24)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


# -- the router --------------------------------------------------------------------------------------------


def _router(pipe: Connection, engine_port: int) -> None:
    async def run() -> None:
        config = Config.model_validate(
            {
                "listen": {"port": 0},
                "pools": [
                    {
                        "name": "m",
                        "scheduling": {"in_flight": "slots", "linger": 0},
                        "backends": [{"name": "b0", "model": "demo"}],
                    }
                ],
            }
        )
        router = create_router(config)
        server = uvicorn.Server(server_config(router.app, config))
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        url = f"http://127.0.0.1:{engine_port}"
        await router.dispatcher.fleet.backend_ready("b0", url, STREAMS, 1_000_000, fresh=True)
        pipe.send(listening.getsockname()[1])
        await serving

    uvloop.run(run())


# -- the client --------------------------------------------------------------------------------------------


def _request(size: int, tokens: int, salt: int, pace: float) -> bytes:
    messages = [{"role": "user", "content": f"{salt} " + "lorem ipsum " * (size // 12)}]
    fields = {"messages": messages, "max_tokens": tokens, "stream": True, "pace": pace}
    body = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _exchange(port: int, request: bytes) -> tuple[float, int]:
    """Milliseconds to the first event, and how many events came."""
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(request)
    await reader.readuntil(b"data: ")
    first = (time.perf_counter() - begun) * 1000
    events, tail = 1, b""
    while not tail.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError("the answer was cut off")
        events += (tail[-5:] + data).count(b"data: ")
        tail = (tail + data)[-16:]
    writer.close()
    return first, events


async def _first_token(engine: int, router: int, process: psutil.Process, size: int) -> dict[str, float]:
    direct, through = [], []
    before = process.cpu_times()
    for number in range(ROUNDS):
        request = _request(size, 1, number, 0)
        direct.append((await _exchange(engine, request))[0])
        through.append((await _exchange(router, request))[0])
    after = process.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    added = statistics.median(through) - statistics.median(direct)
    return {
        "direct_ms": round(statistics.median(direct), 2),
        "router_ms": round(statistics.median(through), 2),
        "router_p95_ms": round(sorted(through)[-ROUNDS // 20], 2),
        "added_ms": round(added, 2),
        "router_cpu_ms": round(cpu * 1000 / ROUNDS, 2),
    }


async def _relay(port: int, process: psutil.Process, events: int, pace: float) -> dict[str, float]:
    before, begun = process.cpu_times(), time.perf_counter()
    requests = [_request(100, events, number, pace) for number in range(STREAMS)]
    counts = [count for _, count in await asyncio.gather(*(_exchange(port, one) for one in requests))]
    wall, after = time.perf_counter() - begun, process.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    expected = STREAMS * (events + 2)
    if sum(counts) != expected:
        raise RuntimeError(f"{sum(counts)} events came, {expected} were sent")
    return {"events_per_second": round(sum(counts) / wall), "events_per_cpu_second": round(sum(counts) / cpu)}


async def _measure(engine: int, router: int, pid: int) -> dict[str, Any]:
    process = psutil.Process(pid)
    await _relay(router, process, 200, 0)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "first_token": {
            name: await _first_token(engine, router, process, size) for name, size in SIZES.items()
        },
        "relay": {
            "as fast as they come": await _relay(router, process, EVENTS, 0),
            "each alone": await _relay(router, process, EVENTS // 4, PACE),
        },
    }


def _show(result: dict[str, Any]) -> None:
    table = Table(title=f"router overhead ({result['machine']})")
    for column in ("what", "direct", "router", "added", "limit"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, row in result["first_token"].items():
        table.add_row(
            f"first token, {name}, median",
            f"{row['direct_ms']} ms",
            f"{row['router_ms']} ms",
            f"{row['added_ms']} ms ({row['router_cpu_ms']} of CPU)",
            f"{LIMITS_MS[name]} ms",
        )
    for name, row in result["relay"].items():
        table.add_row(
            f"{STREAMS} streams, {name}",
            "",
            f"{row['events_per_second']} events/s",
            f"{row['events_per_cpu_second']} per CPU s",
            f"{LIMIT_EVENTS} per CPU s",
        )
    Console(width=110).print(table)


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "router_overhead.json"
    )
    out = parser.parse_args().out
    spawn = multiprocessing.get_context("spawn")
    engine_pipe, engine_end = spawn.Pipe()
    router_pipe, router_end = spawn.Pipe()
    engine = spawn.Process(target=_engine, args=(engine_end,), daemon=True)
    engine.start()
    engine_port = engine_pipe.recv()
    router = spawn.Process(target=_router, args=(router_end, engine_port), daemon=True)
    router.start()
    try:
        result = uvloop.run(_measure(engine_port, router_pipe.recv(), router.pid or 0))
    finally:
        for process in (router, engine):
            process.kill()
            process.join()
    _show(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(f"written to {out}\n")


if __name__ == "__main__":
    main()
