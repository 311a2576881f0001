"""The live page's data: what it shows, to whom, and what it costs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.router.live import COLUMNS, HOUR, WIDTH, History, Live
from warmslot.router.ui import MOST_VIEWERS, Feed

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import Service, chat, sample, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import httpx

PAGE = Path(__file__).parents[3] / "router/static/live.html"


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with FakeLlamaServer() as fake, serving([fake]) as running:
        yield running


@asynccontextmanager
async def snapshots(service: Service, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The stream of snapshots, decoded."""

    async def decoded(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])

    async with service.http.stream("GET", "/ui/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-accel-buffering"] == "no"
        async with aclosing(decoded(answer)) as stream:
            yield stream


async def until(
    stream: AsyncIterator[dict[str, Any]], predicate: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """The first snapshot for which the predicate holds."""
    async for snapshot in stream:
        if predicate(snapshot):
            return snapshot
    raise AssertionError("the stream ended")


async def test_the_page_is_self_contained_and_allows_only_its_own_script(service: Service) -> None:
    answer = await service.http.get("/ui")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    outside = set(re.findall(r"(?:https?:)?//[\w.-]+", answer.text)) - {"http://www.w3.org"}
    assert outside == set()
    markup = re.sub(r"<(script|style)>.*?</\1>", "", answer.text, flags=re.DOTALL)
    assert re.findall(r"<[^>]*\s(?:on\w+|style)\s*=", markup) == []


async def test_a_snapshot_agrees_with_metrics(service: Service) -> None:
    for turn in ("mark-a one", "mark-b two", "mark-a one"):
        assert (await service.chat(turn * 20)).status_code == 200
    async with snapshots(service) as stream:
        seen = await anext(stream)
    text = (await service.http.get("/metrics")).text
    (backend,) = seen["backends"]
    assert (backend["state"], backend["context"], backend["pool"]) == ("up", service.fake.context, "m")
    for slot in backend["slots"]:
        resident = sample(text, "warmslot_slot_resident_tokens", backend="b0", slot=str(slot["slot"]))
        assert slot["tokens"] == resident
    (pool,) = seen["pools"]
    for name, labels in (("cached", {"reuse": "cached"}), ("processed", {"reuse": "processed"})):
        assert sum(pool["history"][name]) == sample(text, "warmslot_prompt_tokens_total", **labels) > 0
        assert pool["hour"][name] == sum(pool["history"][name])
    assert pool["hour"]["requests"] == 3
    for reason in ("new", "evicted", "busy", "diverged", "restarted", "engine"):
        counted = sample(text, "warmslot_recomputed_tokens_total", reason=reason)
        assert sum(pool["history"][reason]) == counted
    assert sum(pool["history"]["predicted"]) == sample(text, "warmslot_predicted_reuse_tokens_total")
    for count, tokens in pool["by_slots"].items():
        assert tokens == sample(text, "warmslot_shadow_cached_tokens_total", slots=count)
    assert pool["by_slots"]["unbounded"] > 0
    assert pool["slots"] == service.fake.n_slots
    assert [one["status"] for one in seen["finished"]] == ["ok"] * 3


async def test_what_runs_and_what_waits_is_shown_as_it_changes(service: Service) -> None:
    fake = service.fake
    fake.token.hold()
    async with snapshots(service) as stream, asyncio.TaskGroup() as group:
        assert all(slot["running"] is None for slot in (await anext(stream))["backends"][0]["slots"])
        for number in range(fake.n_slots + 2):
            group.create_task(service.chat(f"mark-{number} hello", stream=True))
        seen = await until(stream, lambda one: one["pools"][0]["waiting"] == 2)
        assert len(seen["pools"][0]["queue"]) == 2
        assert {waiting["route"] for waiting in seen["pools"][0]["queue"]} == {"chat"}
        running = [slot["running"] for slot in seen["backends"][0]["slots"]]
        assert all(one["route"] == "chat" and one["phase"] in {"prefill", "decode"} for one in running)
        fake.token.release()
        await until(stream, lambda one: len(one["finished"]) == fake.n_slots + 2)


async def test_no_text_of_prompts_or_names_of_sessions_are_shown(service: Service) -> None:
    body = chat("mark-a my-secret-prompt " * 30)
    headers = {"X-Warmslot-Session": "my-secret-session"}
    for _ in range(2):
        answer = await service.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
    async with snapshots(service) as stream:
        seen = json.dumps(await anext(stream))
    assert '"conversation": "' in seen
    assert "secret" not in seen
    assert "mark-a" not in seen


async def test_slots_with_a_common_beginning_are_in_one_group(service: Service) -> None:
    for turn in ("", " and more of it" * 4):
        for mark in ("a", "b"):  # two conversations with one preamble are on two slots by their second turn
            await service.chat("the same long beginning " * 30 + f"mark-{mark} " * 30 + turn)
    await service.chat("mark-c something else " * 30)
    async with snapshots(service) as stream:
        (backend,) = (await anext(stream))["backends"]
    groups = [slot["group"] for slot in backend["slots"] if slot["shared"] > 0]
    assert len(groups) >= 2
    assert len(set(groups)) == 1
    assert isinstance(groups[0], int)


async def test_a_backend_that_goes_and_comes_back_is_told(service: Service) -> None:
    async with snapshots(service) as stream:
        await anext(stream)
        await service.router.dispatcher.fleet.backend_down("b0", "exited with status 1")
        down = await until(stream, lambda one: one["backends"][0]["state"] == "down")
        assert down["backends"][0]["slots"] == []
        assert down["events"][0]["reason"] == "exited with status 1"
        await service.router.dispatcher.fleet.backend_ready("b0", service.fake.base_url, 4, 2048, fresh=True)
        up = await until(stream, lambda one: one["backends"][0]["state"] == "up")
        assert up["backends"][0]["restarts"] == 1


async def test_data_asks_for_a_key_where_there_are_keys_and_the_page_does_not() -> None:
    keys = [{"name": "desk", "value": "s3cret"}]
    async with FakeLlamaServer() as fake, serving([fake], keys=keys) as service:
        assert (await service.http.get("/ui")).status_code == 200
        assert (await service.http.get("/ui/events")).status_code == 401
        async with snapshots(service, authorization="Bearer s3cret") as stream:
            assert (await anext(stream))["backends"][0]["name"] == "b0"
        before = len(fake.requests)
        for method in ("POST", "PUT", "DELETE"):
            await service.http.request(method, "/ui")
        assert len(fake.requests) == before  # a path without a key must never lead to an engine


async def test_it_can_be_switched_off() -> None:
    async with FakeLlamaServer() as fake, serving([fake], ui=False) as service:
        for path in ("/ui", "/ui/events"):
            answer = await service.http.get(path)
            assert answer.status_code == 404
            assert "setting ui" in answer.json()["error"]["message"]


async def test_streams_end_when_the_router_drains(service: Service) -> None:
    async with snapshots(service) as stream:
        await anext(stream)
        await service.router.dispatcher.drain()
        assert [one async for one in stream] == []


class Source:
    """Counts how often a snapshot is taken, and gives what it is told to."""

    def __init__(self) -> None:
        self.taken, self.value, self.over = 0, 0, False

    def take(self) -> int:
        self.taken += 1
        return self.value

    def feed(self) -> Feed:
        return Feed(self.take, lambda: self.over, interval=0.001)


async def data(viewer: AsyncIterator[bytes]) -> bytes:
    """The next event of a viewer that is no comment."""
    while (event := await anext(viewer)).startswith(b":"):
        pass
    return event


async def test_one_snapshot_serves_all_viewers_and_none_is_taken_for_nobody() -> None:
    source = Source()
    feed = source.feed()
    assert source.taken == 0
    viewers = [feed.events() for _ in range(20)]
    assert {await data(viewer) for viewer in viewers} == {b"data: 0\n\n"}
    before, source.value = source.taken, 1
    assert {await data(viewer) for viewer in viewers} == {b"data: 1\n\n"}
    assert source.taken - before < 20
    assert feed.viewers == 20
    for viewer in viewers:
        await viewer.aclose()
    assert feed.viewers == 0
    again = feed.events()
    source.value = 2
    assert await data(again) == b"data: 2\n\n"
    source.value = 3
    assert await data(again) == b"data: 3\n\n"
    await again.aclose()


async def test_a_slow_viewer_skips_snapshots_and_ends_with_the_latest() -> None:
    source = Source()
    feed = source.feed()
    slow, quick = feed.events(), feed.events()
    await data(slow)
    await data(quick)
    for source.value in range(1, 50):
        assert await data(quick) == b"data: %d\n\n" % source.value
    assert await data(slow) == b"data: 49\n\n"
    await slow.aclose()
    await quick.aclose()


async def test_a_quiet_stream_gets_a_comment() -> None:
    feed = Source().feed()
    viewer = feed.events()
    await anext(viewer)
    assert await anext(viewer) == b":\n\n"
    await viewer.aclose()


async def test_a_snapshot_that_fails_ends_the_streams() -> None:
    source = Source()
    feed = source.feed()
    viewer = feed.events()
    await anext(viewer)
    task = feed._task
    assert task is not None
    source.value = object()  # type: ignore[assignment]
    assert [one async for one in viewer if one != b":\n\n"] == []
    assert isinstance(task.exception(), TypeError)


async def test_viewers_are_bounded(service: Service) -> None:
    async with snapshots(service) as stream:
        await anext(stream)
        route = next(
            route for route in service.router.app.serving.routes if getattr(route, "path", "") == "/ui/events"
        )
        route.endpoint._feed._viewers += MOST_VIEWERS - 1  # type: ignore[attr-defined]
        assert (await service.http.get("/ui/events")).status_code == 503
        route.endpoint._feed._viewers -= MOST_VIEWERS - 1  # type: ignore[attr-defined]


def test_history_keeps_a_quarter_of_an_hour_and_no_more() -> None:
    history = History()
    for second in range(10_000):
        history.add(float(second), {"cached": 1})
    columns = history.columns(9_999.0)
    assert set(columns) == set(range(COLUMNS))
    assert all(column["cached"] == WIDTH for age, column in columns.items() if age)
    assert history.columns(9_999.0 + WIDTH * COLUMNS) == {}
    assert history.columns(9_999.0 + WIDTH * (COLUMNS - 1)).keys() == {COLUMNS - 1}


def test_the_last_hour_is_kept_by_minutes() -> None:
    hour = History(60.0, HOUR, ("cached",))
    for second in range(10_000):
        hour.add(float(second), {"cached": 1, "processed": 2})
    columns = hour.columns(9_999.0)
    assert set(columns) == set(range(60))
    assert 59 * 60 < sum(column["cached"] for column in columns.values()) <= 3600


def test_groups_keep_their_number_and_numbers_are_used_again() -> None:
    live = Live({"m": ["b"]})
    live._number_groups(["x", "", "y", "x"])
    assert live._groups == {"x": 0, "y": 1}
    live._number_groups(["y", "z"])
    assert live._groups == {"y": 1, "z": 0}
