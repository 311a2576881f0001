"""The client of one engine, against a fake one over real sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from warmslot.router.backend import (
    EngineBroke,
    EngineClient,
    EngineError,
    EngineResponse,
    EngineUnreachable,
    Health,
)
from warmslot.router.values import SlotObservation

if TYPE_CHECKING:
    from tests.fakes.llama_server import FakeLlamaServer

JSON = [(b"Content-Type", b"application/json")]


def body(**fields: Any) -> bytes:
    return orjson.dumps({"prompt": "say mark-a1", "n_predict": 4, **fields})


async def collect(response: EngineResponse) -> bytes:
    return b"".join([chunk async for chunk in response.chunks()])


async def test_health_follows_the_engine(fake: FakeLlamaServer, client: EngineClient) -> None:
    assert await client.health() is Health.OK
    fake.loading = True
    assert await client.health() is Health.LOADING
    await fake.crash()
    assert await client.health() is Health.DOWN


async def test_props_and_slots(fake: FakeLlamaServer, client: EngineClient) -> None:
    props = await client.props()
    assert (props.total_slots, props.context, props.model) == (4, 2048, "fake.gguf")
    assert props.modalities == frozenset()
    assert await client.slots() == [SlotObservation(n, processing=False) for n in range(4)]
    async with client.open("POST", "/completion", JSON, body(id_slot=1)) as response:
        await collect(response)
    slots = await client.slots()
    assert slots is not None
    assert slots[1].resident_tokens == len(fake.model.slots[1].tokens)
    assert slots[1].task == 1


@pytest.mark.parametrize("field", ["total_slots", "model_alias", "default_generation_settings", "modalities"])
async def test_props_without_a_field(fake: FakeLlamaServer, client: EngineClient, field: str) -> None:
    fake.missing.add(field)
    fake.unknown_fields = True
    props = await client.props()
    assert props.total_slots == (None if field == "total_slots" else 4)
    assert props.context == (None if field == "default_generation_settings" else 2048)
    assert props.model == ("/models/fake.gguf" if field == "model_alias" else "fake.gguf")


@pytest.mark.parametrize("field", ["id", "is_processing", "n_prompt_tokens", "id_task"])
async def test_slots_without_a_field(fake: FakeLlamaServer, client: EngineClient, field: str) -> None:
    fake.missing.add(field)
    fake.unknown_fields = True
    found = await client.slots()
    assert found is not None
    assert [one.slot for one in found] == [0, 1, 2, 3]
    assert not any(one.processing for one in found)


async def test_of_slots_that_say_nothing_beside_others_that_do_each_is_empty(
    fake: FakeLlamaServer, client: EngineClient
) -> None:
    """Where no slot tells how much it holds, that may be the build's way: then nothing is known of any."""
    assert {one.resident_tokens for one in await client.slots() or ()} == {None}
    async with client.open("POST", "/completion", JSON, body(id_slot=1)) as response:
        await collect(response)
    found = await client.slots()
    assert found is not None
    assert [one.resident_tokens for one in found if one.slot != 1] == [0, 0, 0]
    fake.missing.add("n_prompt_tokens")
    assert {one.resident_tokens for one in await client.slots() or ()} == {None}


async def test_an_engine_without_slots_endpoint(fake: FakeLlamaServer, client: EngineClient) -> None:
    fake.missing.add("slots")
    assert await client.slots() is None


async def test_apply_template_and_its_refusal(client: EngineClient) -> None:
    text = await client.apply_template({"messages": [{"role": "user", "content": "hi"}]})
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(EngineError) as refusal:
        await client.apply_template({"messages": "hi-secret"})
    assert refusal.value.status == 400
    assert orjson.loads(refusal.value.body)["error"]["message"] == "Expected 'messages' to be an array"
    assert "secret" not in str(refusal.value)


async def test_metrics(client: EngineClient) -> None:
    assert "llamacpp:requests_deferred 0" in await client.metrics()


async def test_a_whole_answer(client: EngineClient) -> None:
    async with client.open("POST", "/completion", JSON, body()) as response:
        assert response.status == 200
        assert (b"Content-Type", b"application/json; charset=utf-8") in response.headers
        assert orjson.loads(await response.read())["content"].startswith("echo mark")


async def test_chunks_come_one_by_one_as_the_engine_sends_them(
    fake: FakeLlamaServer, client: EngineClient
) -> None:
    fake.token.hold()
    async with asyncio.timeout(30):
        opening = client.open("POST", "/completion", JSON, body(stream=True))
        entering = asyncio.create_task(opening.__aenter__())
        await fake.token.arrived()
        assert not entering.done()
        fake.token.release(1)
        response = await entering
        chunks = response.chunks()
        seen = [await anext(chunks)]
        for _ in range(3):
            await fake.token.arrived()
            fake.token.release(1)
            seen.append(await anext(chunks))
        assert [orjson.loads(one[6:].split(b"\n")[0])["tokens_predicted"] for one in seen] == [1, 2, 3, 4]
        await opening.__aexit__(None, None, None)


async def test_hop_by_hop_headers_stay_behind(fake: FakeLlamaServer, client: EngineClient) -> None:
    headers = [
        *JSON,
        (b"Host", b"elsewhere"),
        (b"Connection", b"keep-alive, X-Hop"),
        (b"X-Hop", b"1"),
        (b"X-Conversation-Id", b"7"),
        (b"Accept-Encoding", b"gzip"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Content-Length", b"3"),
        (b"X-Kept", b"yes"),
        (b"Authorization", b"Bearer client"),
    ]
    async with client.open("POST", "/completion?a=1", headers, body()) as response:
        await response.read()
        assert not {name.lower() for name, _ in response.headers} & {b"connection", b"keep-alive"}
    got = fake.requests[-1]
    assert got.query == "a=1"
    assert got.header("x-kept") == "yes"
    assert got.header("host") == f"127.0.0.1:{fake.port}"
    assert got.header("connection") == "close"
    assert got.header("accept-encoding") == "identity"
    assert got.header("authorization") == "Bearer client"
    for name in ("x-hop", "x-conversation-id", "transfer-encoding"):
        assert got.header(name) is None


async def test_the_engines_key_replaces_the_clients(fake: FakeLlamaServer) -> None:
    client = EngineClient("a", fake.base_url, api_key="k")
    async with client.open("POST", "/completion", [(b"authorization", b"Bearer mine")], body()) as response:
        await response.read()
    await client.health()
    await client.aclose()
    assert [one.header("authorization") for one in fake.requests] == ["Bearer k", "Bearer k"]


async def test_header_injection_is_refused(client: EngineClient) -> None:
    with pytest.raises(ValueError, match="control character"):
        async with client.open("POST", "/completion", [(b"X-A", b"1\r\nX-B: 2")], body()):
            pass
    with pytest.raises(ValueError, match="space"):
        async with client.open("GET", "/a b", [], None):
            pass


async def test_an_engines_error_passes_with_its_status(client: EngineClient) -> None:
    async with client.open("POST", "/completion", JSON, body(prompt="word " * 3000)) as response:
        assert response.status == 400
        assert orjson.loads(await response.read())["error"]["type"] == "exceed_context_size_error"


async def test_nobody_listens(fake: FakeLlamaServer, client: EngineClient) -> None:
    fake.refuse()
    with pytest.raises(EngineUnreachable) as failure:
        async with client.open("POST", "/completion", JSON, body()):
            pass
    assert failure.value.sent is False
    with pytest.raises(EngineUnreachable) as failure:
        await client.props()
    assert failure.value.sent is False


async def test_the_connection_is_dropped_before_an_answer(
    fake: FakeLlamaServer, client: EngineClient
) -> None:
    fake.drop_next = 1
    with pytest.raises(EngineUnreachable) as failure:
        async with client.open("POST", "/completion", JSON, body()):
            pass
    assert failure.value.sent is True


async def test_a_truncated_stream_is_an_error(fake: FakeLlamaServer, client: EngineClient) -> None:
    fake.die_after = 2
    seen = []
    async with client.open("POST", "/completion", JSON, body(stream=True)) as response:
        chunks = response.chunks()
        with pytest.raises(EngineBroke):  # noqa: PT012 - what came before the break counts
            while True:
                seen.append(await anext(chunks))
    assert b"".join(seen).count(b"\n\n") == 2


async def test_a_crash_ends_all_streams_with_an_error(fake: FakeLlamaServer, client: EngineClient) -> None:
    fake.token.hold()

    async def one() -> None:
        async with client.open("POST", "/completion", JSON, body(stream=True)) as response:
            await response.read()

    tasks = [asyncio.create_task(one()) for _ in range(3)]
    await fake.token.arrived(3)
    fake.token.release(3)
    await fake.token.arrived(3)
    await fake.crash()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineBroke | EngineUnreachable) for result in results)


async def test_leaving_early_cancels_at_the_engine(fake: FakeLlamaServer, client: EngineClient) -> None:
    fake.token.hold()
    opening = client.open("POST", "/completion", JSON, body(stream=True))
    entering = asyncio.create_task(opening.__aenter__())
    await fake.token.arrived()
    fake.token.release(1)
    await entering
    assert fake.busy == 1
    await opening.__aexit__(None, None, None)
    await fake.until(lambda engine: not engine.busy)
    assert fake.generations()[-1].outcome == "cancelled"


async def test_cancelling_while_the_engine_is_silent_cancels_there(
    fake: FakeLlamaServer, client: EngineClient
) -> None:
    fake.prefill.hold()

    async def one() -> None:
        async with client.open("POST", "/completion", JSON, body()) as response:
            await response.read()

    task = asyncio.create_task(one())
    await fake.prefill.arrived()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await fake.until(lambda engine: engine.busy == 0)
    assert fake.generations()[-1].outcome == "cancelled"


async def test_each_generation_has_a_connection_of_its_own(
    fake: FakeLlamaServer, client: EngineClient
) -> None:
    for _ in range(20):
        async with client.open("POST", "/completion", JSON, body(stream=True)) as response:
            assert response.status == 200
            await response.read()
    assert [one.outcome for one in fake.generations()] == ["ok"] * 20


async def test_read_timeout_bounds_silence(fake: FakeLlamaServer) -> None:
    client = EngineClient("a", fake.base_url, read_timeout=0.05)
    fake.prefill.hold()
    with pytest.raises(EngineBroke, match=r"nothing came for 0\.05 s"):
        async with client.open("POST", "/completion", JSON, body()):
            pass
    await client.aclose()


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://x", "http://"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="backend 'a'"):
        EngineClient("a", url)


async def serve_once(answer: bytes) -> tuple[asyncio.Server, str]:
    """A server that reads one request, writes ``answer`` and closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok", EngineBroke),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", EngineBroke),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", EngineBroke),
        (b"garbage\r\n\r\n", EngineBroke),
        (b"HTTP/1.1 200 OK\r\nContent-", EngineUnreachable),
        (b"", EngineUnreachable),
    ],
)
async def test_framing(answer: bytes, expected: bytes | type[Exception]) -> None:
    server, url = await serve_once(answer)
    client = EngineClient("a", url)
    try:
        if isinstance(expected, bytes):
            async with client.open("GET", "/x") as response:
                assert await response.read() == expected
        else:
            with pytest.raises(expected):
                async with client.open("GET", "/x") as response:
                    await response.read()
    finally:
        await client.aclose()
        server.close()


async def test_head_has_no_body() -> None:
    server, url = await serve_once(b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n")
    client = EngineClient("a", url)
    async with client.open("HEAD", "/x") as response:
        assert await response.read() == b""
        assert response.header(b"content-length") == b"2000"
    await client.aclose()
    server.close()


async def test_a_slow_reader_stops_the_engine_and_gets_everything() -> None:
    size = 32 * 1024 * 1024
    written = 0
    stalled = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(b"x" * 65536)
            written += 65536
            if writer.transport.get_write_buffer_size() > 65536:
                stalled.set()
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = EngineClient("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with client.open("GET", "/x") as response:
        await stalled.wait()
        assert written < size
        got = 0
        async for chunk in response.chunks():
            got += len(chunk)
    assert got == size
    await client.aclose()
    server.close()
