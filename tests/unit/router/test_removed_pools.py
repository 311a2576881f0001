"""A request that meets the removal of its pool gets what one that comes after it gets, on every route."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.router.config import Config

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import sample, serving, text_of
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import httpx

    from tests.support.router import Service

CHAT = {"messages": [{"role": "user", "content": "mark-x Hello"}], "max_tokens": 4}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "pinned": ("/v1/chat/completions", CHAT),
    "steered": ("/v1/messages", CHAT),
    "with a slot": ("/v1/embeddings", {"input": "Hello"}),
    "without a slot": ("/tokenize", {"content": "Hello"}),
    "adapters": ("/lora-adapters?model=old", {}),
}
CATCHES_ALL = [False, True]


@asynccontextmanager
async def two_pools(
    *, catches_all: bool = False, sort_tools: bool = False, **more: Any
) -> AsyncIterator[tuple[Service, Callable[[], Awaitable[None]]]]:
    """A router over two pools of one backend each, and what removes ``old`` as a reload does."""
    staying = {"name": "m", "default": catches_all, "backends": [{"name": "b0", "model": "demo"}]}
    old = {"name": "old", "aliases": ["older"], "sort_tools": sort_tools}
    old["backends"] = [{"name": "b1", "model": "demo"}]
    async with (
        FakeLlamaServer() as kept,
        FakeLlamaServer(slots=1) as gone,
        serving([kept, gone], pools=[staying, old], **more) as service,
    ):

        async def remove() -> None:
            service.router.reconfigure(Config.model_validate({"pools": [staying], "listen": {"port": 0}}))
            await service.router.remove_backend("b1")
            await service.router.remove_pool("old")

        yield service, remove


def going(service: Service) -> FakeLlamaServer:
    """The engine of the pool that goes."""
    fake = service.engines[1]
    assert isinstance(fake, FakeLlamaServer)
    return fake


async def check(service: Service, answer: httpx.Response, path: str, body: Any, *, served: bool) -> None:
    """It is the answer to the same request now; and that is a 404, or the default pool's."""
    again = await service.http.post(path, json=body)
    assert answer.status_code == again.status_code
    assert answer.headers.get("x-warmslot-backend") == again.headers.get("x-warmslot-backend")
    if not served:
        assert answer.status_code == 404
        assert answer.content == again.content
        assert "not served here, allowed: m" in answer.text
    else:
        assert again.headers["x-warmslot-backend"] == "b0"


def watch_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a request waits for a backend of a pool that has none."""
    waits, dispatcher = asyncio.Event(), service.router.dispatcher
    engine = dispatcher.engine

    async def asked(pool: str) -> Any:
        waits.set()
        return await engine(pool)

    monkeypatch.setattr(dispatcher, "engine", asked)
    return waits


@pytest.mark.parametrize("catches_all", CATCHES_ALL)
@pytest.mark.parametrize("route", sorted(ROUTES))
async def test_it_waits_for_a_backend_that_is_down(
    route: str, catches_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = ROUTES[route]
    body = body if route == "adapters" else {**body, "model": "old"}
    async with two_pools(catches_all=catches_all) as (service, remove):
        await service.router.dispatcher.fleet.backend_down("b1", "for the test")
        waits = watch_for(service, monkeypatch)
        asking = asyncio.create_task(service.http.post(path, json=body))
        if route == "with a slot":
            await service.watcher.until(lambda seen: seen.level.get("old") == 1)
        else:
            await waits.wait()
        await remove()
        await check(service, await asking, path, body, served=catches_all)
        assert service.router.dispatcher.held() == {}


@pytest.mark.parametrize("catches_all", CATCHES_ALL)
@pytest.mark.parametrize("route", ["pinned", "steered", "with a slot"])
async def test_it_waits_in_the_queue(route: str, catches_all: bool) -> None:
    path, body = ROUTES[route]
    body = {**body, "model": "older"}
    async with two_pools(catches_all=catches_all) as (service, remove):
        going(service).token.hold()
        running = asyncio.create_task(service.chat("mark-r Hello", model="old"))
        await going(service).until(lambda fake: fake.busy == 1)
        asking = asyncio.create_task(service.http.post(path, json=body))
        await service.watcher.until(lambda seen: seen.level.get("old") == 2)
        await remove()
        await check(service, await asking, path, body, served=catches_all)
        assert (await running).status_code == 502  # it was cut off: a reload waits for it to end
        assert await service.metric("warmslot_queue_requests") == 0


@pytest.mark.parametrize("catches_all", CATCHES_ALL)
@pytest.mark.parametrize("route", ["pinned", "steered"])
async def test_it_is_being_rendered(route: str, catches_all: bool) -> None:
    path, body = ROUTES[route]
    body = {**body, "model": "old"}
    async with two_pools(catches_all=catches_all) as (service, remove):
        going(service).answering.hold()
        asking = asyncio.create_task(service.http.post(path, json=body))
        await going(service).answering.arrived()
        await remove()
        going(service).answering.release()
        await check(service, await asking, path, body, served=catches_all)
        assert going(service).generations() == []


async def test_its_body_is_still_coming() -> None:
    async with two_pools() as (service, remove):
        body = b'{"model": "old", "messages": [{"role": "user", "content": "Hello"}]}'
        client = await WireClient.connect(service.url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
        await client.send(head.encode() + body[:10])
        await remove()
        await client.send(body[10:])
        assert (await client.head())[0] == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_stream_that_has_begun_hears_it_as_an_event(path: str) -> None:
    async with two_pools(limits={"ping_interval": 0.01}) as (service, remove):
        await service.router.dispatcher.fleet.backend_down("b1", "for the test")
        body = {**CHAT, "model": "old", "stream": True}
        async with service.http.stream("POST", path, json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ":"
            await remove()
            rest = [line async for line in lines if line.strip(":")]
        assert answer.status_code == 200
        assert rest[-1].startswith("data: ")
        assert "not served here, allowed: m" in rest[-1]


async def test_a_stream_that_has_begun_goes_on_in_the_default_pool() -> None:
    async with two_pools(catches_all=True, limits={"ping_interval": 0.01}) as (service, remove):
        await service.router.dispatcher.fleet.backend_down("b1", "for the test")
        body = {**CHAT, "model": "old", "stream": True}
        async with service.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ":"
            await remove()
            rest = [line async for line in lines]
        assert "mark-x" in text_of("\n".join(rest))
        assert "data: [DONE]" in rest[-2:]
        text = (await service.http.get("/metrics")).text
        assert sample(text, "warmslot_requests_total", backend="b0", outcome="ok") == 1
        assert sample(text, "warmslot_requests_total", pool="old") == 0


async def test_tools_are_in_the_order_that_the_pool_wants_which_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_pools(catches_all=True, sort_tools=True) as (service, remove):
        await service.router.dispatcher.fleet.backend_down("b1", "for the test")
        waits = watch_for(service, monkeypatch)
        tools = [{"type": "function", "function": {"name": name}} for name in ("b", "a")]
        body = {**CHAT, "model": "old", "tools": tools}
        asking = asyncio.create_task(service.http.post("/v1/chat/completions", json=body))
        await waits.wait()
        await remove()
        assert (await asking).status_code == 200
        assert service.fake.generations()[0].json["tools"] == tools
