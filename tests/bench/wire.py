"""What one generation costs on the way through the wire modules, against plain httpx.

Run ``python -m tests.bench.wire``. A bare server in a process of its own writes ready-made SSE chunks;
measured is this process: events relayed over 8 streams, per second and per second of its CPU time, as fast as
they come and paced so that each arrives alone; milliseconds of one template call; and milliseconds until the
head of an answer for prompts of 8 and 100 kB, template call included. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import platform
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
from warmslot.router import prompt
from warmslot.router.backend import EngineClient
from warmslot.router.stream import TruthReader
from warmslot.router.values import Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from multiprocessing.connection import Connection

STREAMS = 8
EVENTS = 5000
ROUNDS = 60
PACE = 0.002

_FRAME = {
    "created": 1,
    "id": "chatcmpl-x",
    "model": "m",
    "system_fingerprint": "b0",
    "object": "chat.completion.chunk",
}
_EVENT = {"choices": [{"finish_reason": None, "index": 0, "delta": {"content": " word"}}], **_FRAME}
_TIMINGS = {"cache_n": 1, "prompt_n": 1, "prompt_ms": 1.0, "predicted_n": EVENTS, "predicted_ms": 1.0}
_LAST = {"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}], **_FRAME, "timings": _TIMINGS}


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _sse(value: object) -> bytes:
    return _chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            if b"/apply-template" in head.split(b"\r\n")[0]:
                text = "".join(one["content"] for one in body["messages"])
                answer = json.dumps({"prompt": text}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
                continue
            kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind)
            event = _sse(_EVENT)
            for _ in range(body["max_tokens"]):
                writer.write(event)
                # Paced: one event a segment, as an engine sends them.
                await asyncio.sleep(body["pace"])
                await writer.drain()
            writer.write(_sse(_LAST) + _chunk(b"data: [DONE]\n\n") + _chunk(b""))
            await writer.drain()
            writer.close()
            return
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _server(pipe: Connection) -> None:
    async def run() -> None:
        server = await asyncio.start_server(_serve, "127.0.0.1", 0, limit=1 << 24)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def _body(size: int, tokens: int, salt: int, pace: float = 0.0) -> bytes:
    messages = [{"role": "user", "content": f"{salt} " + "lorem ipsum " * (size // 12)}]
    return json.dumps({"messages": messages, "max_tokens": tokens, "stream": True, "pace": pace}).encode()


async def _through_wire(client: EngineClient, raw: bytes) -> int:
    reader = TruthReader(Route.CHAT, streaming=True)
    async with client.open("POST", "/v1/chat/completions", [], raw) as response:
        async for chunk in response.chunks():
            reader.feed(chunk)
    assert reader.finished
    assert reader.cached_tokens == 1
    return reader.events


async def _through_httpx(url: str, raw: bytes) -> int:
    reader = TruthReader(Route.CHAT, streaming=True)
    async with (
        httpx.AsyncClient(timeout=None) as client,  # noqa: S113 - as a generation has it
        client.stream("POST", f"{url}/v1/chat/completions", content=raw) as response,
    ):
        async for chunk in response.aiter_raw():
            reader.feed(chunk)
    return reader.events


async def _throughput(relay: Callable[[bytes], Awaitable[int]], events: int, pace: float) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    counts = await asyncio.gather(*(relay(_body(100, events, number, pace)) for number in range(STREAMS)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"events_per_cpu_second": round(sum(counts) / cpu), "events_per_second": round(sum(counts) / wall)}


async def _head(client: EngineClient, size: int) -> dict[str, float]:
    """Milliseconds from the client's bytes to the answer's head: parse, render, chain, pin, send."""
    taken = []
    for number in range(ROUNDS):
        raw = _body(size, 1, number)
        begun = time.perf_counter()
        body = prompt.parse(raw)
        await prompt.render(client, Route.CHAT, body)
        async with client.open("POST", "/v1/chat/completions", [], prompt.pin(raw, 1)):
            taken.append((time.perf_counter() - begun) * 1000)
    return {"median_ms": round(statistics.median(taken), 2), "p95_ms": round(sorted(taken)[-ROUNDS // 20], 2)}


async def _milliseconds(call: Callable[[bytes], Awaitable[object]], size: int) -> float:
    taken = []
    for number in range(ROUNDS):
        raw = _body(size, 1, number)
        begun = time.perf_counter()
        await call(raw)
        taken.append((time.perf_counter() - begun) * 1000)
    return round(statistics.median(taken), 2)


async def _measure(port: int) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    client = EngineClient("bench", url)
    pool = httpx.AsyncClient(base_url=url)

    def wire(raw: bytes) -> Awaitable[int]:
        return _through_wire(client, raw)

    def plain(raw: bytes) -> Awaitable[int]:
        return _through_httpx(url, raw)

    async def pooled(raw: bytes) -> object:
        return (await pool.post("/apply-template", content=raw)).json()

    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "relay_wire": await _throughput(wire, EVENTS, 0),
        "relay_httpx": await _throughput(plain, EVENTS, 0),
        "relay_paced_wire": await _throughput(wire, EVENTS // 5, PACE),
        "relay_paced_httpx": await _throughput(plain, EVENTS // 5, PACE),
        "template_8kB_wire_ms": await _milliseconds(client.apply_template, 8_000),
        "template_8kB_httpx_ms": await _milliseconds(pooled, 8_000),
        "head_8kB": await _head(client, 8_000),
        "head_100kB": await _head(client, 100_000),
    }
    await client.aclose()
    await pool.aclose()
    return result


def main() -> None:
    """Measure and print."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_server, args=(there,), daemon=True)
    server.start()
    try:
        json.dump(asyncio.run(_measure(here.recv())), sys.stdout, indent=2)
        sys.stdout.write("\n")
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
