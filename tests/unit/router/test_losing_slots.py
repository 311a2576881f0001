"""Engines that lose what slots hold by themselves: they sleep, or slots share a context that is full."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.router.values import Loss

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import serving

if TYPE_CHECKING:
    import httpx

    from tests.support.router import Service


async def turn(service: Service, name: str, number: int) -> httpx.Response:
    """The next turn of a conversation."""
    messages = [{"role": "user", "content": f"mark-{name} {f'what {name} has to say ' * 30}"}]
    for _ in range(number):
        messages += [{"role": "assistant", "content": "aye"}, {"role": "user", "content": "go on"}]
    body = {"messages": messages, "max_tokens": 2}
    answer = await service.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    return answer


async def test_an_engine_that_slept_holds_nothing_and_nothing_was_erased_for_it(service: Service) -> None:
    fake = service.fake
    for name in ("a", "b"):
        await turn(service, name, 0)
    fake.sleep()
    seen = len(fake.requests)
    first = await turn(service, "a", 1)
    assert int(first.headers["x-warmslot-predicted-tokens"]) > 100
    assert first.json()["timings"]["cache_n"] == 0
    assert service.watcher.reports[-1].losses[Loss.ENGINE] > 100
    # That is a surprise, and the other slots are looked at.
    await fake.until(lambda f: any(r.path == "/slots" and r.outcome == "ok" for r in f.requests[seen:]))
    second = await turn(service, "b", 1)
    assert second.headers["x-warmslot-predicted-tokens"] == "0"
    report = service.watcher.reports[-1]
    assert report.losses[Loss.RESTARTED] > 100
    assert report.losses.get(Loss.DIVERGED, 0) < 5
    assert (await turn(service, "a", 2)).json()["timings"]["cache_n"] > 100
    assert not [r for r in fake.requests if r.path.startswith("/slots/")]
    assert {r.json["max_tokens"] for r in fake.generations()} == {2}


async def test_a_router_does_not_keep_an_engine_awake(service: Service) -> None:
    fake = service.fake
    await turn(service, "a", 0)
    fake.sleep()
    for path in ("/health", "/metrics", "/v1/models", "/ui"):
        assert (await service.http.get(path)).status_code == 200
    assert fake.sleeping


def long(name: str) -> dict[str, Any]:
    """A request of some 330 tokens, whose answer takes up to 60 more."""
    return {"messages": [{"role": "user", "content": f"mark-{name} " + f"{name} " * 300}], "max_tokens": 60}


async def both_at_once(service: Service, *, held_back: int) -> list[int]:
    """Two such requests, of which so many wait in the router; how both end."""
    fake = service.fake
    fake.token.hold()
    asking = [
        asyncio.create_task(service.http.post("/v1/chat/completions", json=long(name)))
        for name in ("won", "too")
    ]
    await service.watcher.until(lambda w: w.level.get("m") == 2)
    await fake.token.arrived(2 - held_back)
    assert (fake.busy, service.router.dispatcher.queued("m")) == (2 - held_back, held_back)
    fake.token.release()
    return [answer.status_code for answer in await asyncio.gather(*asking)]


async def test_of_what_does_not_fit_into_a_shared_context_one_is_held_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once the engine has failed for it; both were told so, and nothing is counted on in their slots."""
    async with FakeLlamaServer(slots=2, context=600) as fake, serving([fake]) as service:
        fake.unified = True
        assert await both_at_once(service, held_back=0) == [500, 500]
        assert [outcome.engine_error for outcome in service.watcher.outcomes] == [True, True]
        assert not any(slot.resident_tokens for slot in service.router.dispatcher.slots())
        for _ in range(3):
            assert await both_at_once(service, held_back=1) == [200, 200]
        assert fake.failures == 1
        assert fake.violations == []
    assert len([r for r in caplog.records if "its slots share one context" in r.getMessage()]) == 1


@pytest.mark.parametrize("launched", [False, True])
async def test_a_shared_context_that_was_told_is_never_overfilled(launched: bool) -> None:
    async with FakeLlamaServer(slots=2, context=600) as fake:
        fake.unified = True
        backend = {"name": "b0", "kv_unified": True} | (
            {"model": "demo"} if launched else {"url": fake.base_url}
        )
        async with serving([fake], ready=launched, pool={"backends": [backend]}) as service:
            await service.watcher.until(lambda w: w.changes == [("b0", True)])
            for _ in range(3):
                assert await both_at_once(service, held_back=1) == [200, 200]
        assert fake.failures == 0
