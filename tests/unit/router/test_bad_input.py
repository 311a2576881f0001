"""What is wrong with a request is said in one clear sentence, in the shape that clients parse."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import chat, serving, text_of
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    import httpx

    from tests.support.router import Service

CHAT = "/v1/chat/completions"


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer, checked for its shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "pydantic" not in error["message"]
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("raw", "needle"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b"[" * 100_000, "JSON"),
        (b'{"messages": 7}', "messages"),
        (b'{"messages": [], "stream": "yes"}', "stream"),
        (b'{"messages": [], "max_tokens": "many"}', "max_tokens"),
        (b'{"messages": [], "n": 0}', "'n'"),
        (b'{"messages": [], "n": true}', "'n'"),
        (b'{"messages": [], "cache_prompt": 1}', "cache_prompt"),
        (b'{"messages": [], "lora": "x"}', "lora"),
        (b'{"messages": [], "model": ["m"]}', "model"),
    ],
)
async def test_a_body_of_the_wrong_kind(service: Service, raw: bytes, needle: str) -> None:
    answer = await service.http.post(CHAT, content=raw)
    error = error_of(answer, 400)
    assert needle in error["message"]
    assert error["type"] == "invalid_request_error"
    assert service.fake.generations() == []


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/embeddings", "/tokenize", "/lora-adapters"])
async def test_a_compressed_body(service: Service, path: str) -> None:
    raw = gzip.compress(json.dumps(chat("hi")).encode())
    answer = await service.http.post(path, content=raw, headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert "Content-Encoding" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "identity"
    assert service.fake.generations() == []


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_body_with_a_byte_order_mark(service: Service, path: str) -> None:
    raw = codecs.BOM_UTF8 + json.dumps(chat("mark-a hi", max_tokens=4)).encode()
    answer = await service.http.post(path, content=raw, headers={"content-encoding": "identity"})
    assert answer.status_code == 200
    assert "mark-a" in answer.text
    assert service.fake.generations()[-1].json["messages"]


async def test_a_byte_order_mark_hides_no_model(service: Service) -> None:
    raw = codecs.BOM_UTF8 + json.dumps({"content": "hi", "model": "gpt-9"}).encode()
    assert error_of(await service.http.post("/tokenize", content=raw), 404)["code"] == "model_not_found"


async def test_what_only_the_engine_can_judge_is_the_engines_error(service: Service) -> None:
    answer = await service.http.post(CHAT, json={"messages": [{"role": "user"}]})
    assert answer.status_code == 400
    assert "content" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
async def test_a_missing_prompt(service: Service, path: str) -> None:
    assert error_of(await service.http.post(path, json={}), 400)["param"] == "prompt"


async def test_an_unknown_model_names_those_that_exist(service: Service) -> None:
    error = error_of(await service.chat("hi", model="gpt-9"), 404)
    assert error["code"] == "model_not_found"
    assert "m, alias" in error["message"]
    assert "gpt-9" not in error["message"]


async def test_an_unknown_priority_names_those_that_exist(service: Service) -> None:
    answer = await service.http.post(CHAT, json=chat("hi"), headers={"x-warmslot-priority": "now"})
    assert "interactive, batch" in error_of(answer, 400)["message"]


async def test_an_unknown_route_is_the_engines_404(service: Service) -> None:
    answer = await service.http.post("/v1/nothing", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert service.router.dispatcher.held() == {}


async def test_a_body_of_fifty_megabytes(service: Service) -> None:
    error = error_of(await service.http.post(CHAT, content=b"x" * 50_000_000), 413)
    assert str(32 * 2**20) in error["message"]


async def test_a_body_without_a_length_is_counted() -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 1000

    async with FakeLlamaServer() as fake, serving([fake], limits={"max_body": 10_000}) as service:
        error_of(await service.http.post(CHAT, content=pieces()), 413)


async def test_a_body_that_dribbles_is_cut_off() -> None:
    async with FakeLlamaServer() as fake, serving([fake], limits={"body_timeout": 0.05}) as service:
        client = await WireClient.connect(service.url)
        await client.send(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{{".encode())
        status, headers = await client.head()
        assert status == 408
        assert headers["connection"] == "close"
        assert b"limits.body_timeout" in await client.rest()
        assert (await service.chat("mark-a hi", max_tokens=6)).status_code == 200


async def test_leaving_in_the_middle_of_the_body(service: Service) -> None:
    client = await WireClient.connect(service.url)
    await client.send(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{{".encode())
    client.leave()
    assert (await service.chat("mark-a hi", max_tokens=6)).status_code == 200


async def test_a_client_that_does_not_read_stalls_nobody_and_frees_its_slot(service: Service) -> None:
    """Spoken to the application itself: a socket's buffers would hide the client's deafness."""
    heard: list[Any] = []
    hearing, asked = asyncio.Event(), asyncio.Event()

    async def receive() -> Any:
        if asked.is_set():
            await asyncio.Event().wait()
        asked.set()
        body = chat("mark-s hi", stream=True, max_tokens=900, ignore_eos=True)
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        if heard:
            await hearing.wait()
        heard.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "headers": []}
    deaf = asyncio.create_task(service.router.app({**scope, "query_string": b""}, receive, send))
    await service.watcher.until(lambda w: w.reports)
    assert service.watcher.reports[0].output_tokens == 900
    assert len(heard) == 1
    assert (await service.chat("mark-a hi", max_tokens=6)).status_code == 200
    hearing.set()
    await deaf
    whole = b"".join(message.get("body", b"") for message in heard)
    assert whole.count(b"data: ") > 900
    assert whole.endswith(b"data: [DONE]\n\n")


async def test_a_full_queue_is_a_429_with_a_time_to_come_back() -> None:
    scheduling = {"in_flight": "slots", "queue": "fifo", "max_queue": 1}
    async with FakeLlamaServer(slots=1) as fake, serving([fake], scheduling=scheduling) as service:
        fake.token.hold()
        tasks = [asyncio.create_task(service.chat("mark-a hi", max_tokens=6))]
        await fake.until(lambda f: f.busy == 1)
        tasks.append(asyncio.create_task(service.chat("mark-b hi", max_tokens=6)))
        await service.watcher.until(lambda w: w.level["m"] == 2)
        answer = await service.chat("mark-c hi")
        assert error_of(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        fake.token.release()
        assert [a.status_code for a in await asyncio.gather(*tasks)] == [200, 200]
        assert await service.metric("warmslot_requests_total", outcome="rejected", pool="m") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_does_not_outlive_its_bound(stream: bool) -> None:
    async with FakeLlamaServer() as fake, serving([fake], limits={"request_timeout": 0.2}) as service:
        fake.token.hold()
        if stream:
            fake.token.release(1)
        answer = await service.chat("mark-a hi", stream=stream)
        assert answer.status_code == (200 if stream else 504)
        assert '"code":"timeout"' in answer.text
        await service.watcher.until(lambda w: w.reports)
        assert fake.busy == 0


async def test_a_silent_stream_gets_comments_and_then_its_answer() -> None:
    async with FakeLlamaServer() as fake, serving([fake], limits={"ping_interval": 0.02}) as service:
        fake.token.hold()
        client = await WireClient.post(service.url, CHAT, chat("mark-a hi", stream=True, max_tokens=6))
        status, headers = await client.head()
        assert status == 200
        assert headers["content-type"] == "text/event-stream"
        assert headers["x-accel-buffering"] == "no"
        await client.read_until(b":\n\n")
        fake.token.release()
        await client.read_until(b"data: [DONE]\n\n")


async def test_a_stream_that_is_queued_hears_comments_however_long_it_waits() -> None:
    """Its headers at once, though the engine does not know of it yet."""
    async with (
        FakeLlamaServer(slots=1) as fake,
        serving([fake], limits={"ping_interval": 0.01}) as service,
    ):
        fake.token.hold()
        running = asyncio.create_task(service.chat("mark-a hi", max_tokens=6))
        await fake.until(lambda f: f.busy == 1)
        client = await WireClient.post(service.url, CHAT, chat("mark-b hi", stream=True, max_tokens=6))
        status, headers = await client.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        for _ in range(3):
            await client.read_until(b":\n\n")
        assert len(fake.generations()) == 1
        assert service.router.dispatcher.queued("m") == 1
        fake.token.release()
        assert "mark-b" in text_of((await client.read_until(b"data: [DONE]\n\n")).decode())
        assert (await running).status_code == 200


async def test_an_error_after_a_comment_is_an_event() -> None:
    async with FakeLlamaServer() as fake, serving([fake], limits={"ping_interval": 0.02}) as service:
        fake.answering.hold()
        body = chat("too long " * 3000, stream=True)
        client = await WireClient.post(service.url, CHAT, body, "Connection: close")
        await client.head()
        await client.read_until(b":\n\n")
        fake.answering.release()
        text = await client.rest()
        assert b"exceed_context_size_error" in text
        assert b"data: {" in text
