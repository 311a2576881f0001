"""Byte for byte what the real engine answers, through the router: every route, streams event by event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from warmslot.launcher.engine import EngineKind

from tests.engine.conftest import CONTEXT, SLOTS, RunningEngine
from tests.support.likeness import CORPUS, POOLED, RANKED, REAL, ask, both
from tests.support.router import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from warmslot.launcher.engine import Engine

    from tests.support.router import Service

ALL = CORPUS | REAL


@dataclass
class Address:
    """A running engine as the router needs it."""

    base_url: str
    n_slots: int
    context: int


@pytest.fixture
async def service(engine: RunningEngine) -> AsyncIterator[Service]:
    async with serving([Address(engine.base_url, SLOTS, CONTEXT)], fresh=False) as running:
        yield running
        await running.watcher.until(lambda w: w.level.get("m", 0) == 0)
    await engine.settled()


@pytest.mark.parametrize("name", ALL)
async def test_like_the_engine(service: Service, engine: RunningEngine, name: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=100) as http:
        direct, routed = await both(http, engine.base_url, service.url, ALL[name])
    assert routed == direct


COLD = [
    "chat",
    "chat-stream",
    "completion",
    "completions-stream",
    "responses-stream",
    "messages",
    "messages-stream",
]


@pytest.mark.parametrize("name", COLD)
async def test_like_the_engine_when_nothing_is_computed_yet(engine: RunningEngine, name: str) -> None:
    """Token counts of a prompt that is new, too: steering is not to be seen in them."""
    async with httpx.AsyncClient(trust_env=False, timeout=100) as http:
        await fill(http, engine)
        direct = await ask(http, engine.base_url, ALL[name])
        await fill(http, engine)
        async with serving([Address(engine.base_url, SLOTS, CONTEXT)]) as service:
            routed = await ask(http, service.url, ALL[name])
            await service.watcher.until(lambda w: w.level.get("m", 0) == 0)
    await engine.settled()
    assert routed == direct


async def fill(http: httpx.AsyncClient, engine: RunningEngine) -> None:
    """Let every slot hold what no prompt of the corpus begins with."""
    for slot in range(SLOTS):
        body = {"prompt": f"{slot} zebras", "n_predict": 0, "id_slot": slot, "cache_prompt": False}
        assert (await http.post(f"{engine.base_url}/completion", json=body)).is_success
    await engine.settled()


async def test_slots_are_the_engines_own_with_the_names_of_backend_and_pool(
    service: Service, engine: RunningEngine
) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=100) as http:
        direct = (await http.get(f"{engine.base_url}/slots")).json()
        routed = (await http.get(f"{service.url}/slots")).json()
    assert routed == [{"backend": "b0", "pool": "m", **slot} for slot in direct]


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_told_in_the_engines_own_words(
    service: Service, engine: RunningEngine, path: str
) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=100) as http:
        direct, routed = await http.get(engine.base_url + path), await http.get(service.url + path)
    assert (routed.status_code, routed.content) == (direct.status_code, direct.content)
    assert routed.headers["content-type"] == direct.headers["content-type"]


async def test_models_have_the_shape_of_the_engines_own(service: Service, engine: RunningEngine) -> None:
    """The router's list is of pools: names are the operator's, the context is what a slot really has."""
    async with httpx.AsyncClient(trust_env=False, timeout=100) as http:
        for path in ("/v1/models", "/models"):
            direct = (await http.get(engine.base_url + path)).json()
            routed = (await http.get(service.url + path)).json()
            assert routed["object"] == direct["object"]
            own, its = routed["data"][0], direct["data"][0]
            assert {key: type(own[key]) for key in ("id", "object", "created", "owned_by")} == {
                key: type(its[key]) for key in ("id", "object", "created", "owned_by")
            }
            assert (own["object"], own["owned_by"]) == (its["object"], its["owned_by"])
            assert own["meta"]["n_ctx"] == CONTEXT


@pytest.mark.parametrize(
    ("flags", "corpus"), [(("--embeddings", "--pooling", "last"), POOLED), (("--reranking",), RANKED)]
)
async def test_embeddings_and_ranks_are_the_engines_own(
    installed_engine: Engine,
    start_engine: Callable[..., Awaitable[str]],
    flags: tuple[str, ...],
    corpus: dict[str, Any],
) -> None:
    if installed_engine.kind is EngineKind.EMBEDDED:
        pytest.skip("the embedded engine has no such option")
    url = await start_engine("-np", "2", "-c", "1024", "--no-kv-unified", "--cache-ram", "0", *flags)
    async with (
        serving([Address(url, 2, 512)]) as service,
        httpx.AsyncClient(trust_env=False, timeout=100) as http,
    ):
        for name, request in corpus.items():
            direct, routed = await both(http, url, service.url, request)
            assert routed == direct, name
        await service.watcher.until(lambda w: w.level["m"] == 0)
        assert not service.router.dispatcher.held()
