"""The live view: what a running router says, as a terminal shows it."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner
from warmslot.launcher.cli import app
from warmslot.launcher.live import LiveError
from warmslot.launcher.top import BAR, bar, snapshots, view, watch

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import serving

if TYPE_CHECKING:
    from collections.abc import Mapping


def printed(url: str, **more: Any) -> str:
    out = io.StringIO()
    watch(Console(file=out, width=160), url, once=True, **more)
    return out.getvalue()


async def test_a_running_router_is_shown() -> None:
    async with FakeLlamaServer() as fake, serving([fake]) as service:
        for text in ("one two three four five six", "one two three four five six", "hush hush secretword"):
            await service.chat(text)
        out = await asyncio.to_thread(printed, service.url)
    assert "b0 (up), 2,048 tokens a slot" in out
    assert "reuse" in out
    assert "computed because: new" in out
    assert "Finished last" in out
    assert "secretword" not in out


async def test_who_runs_and_who_waits_is_shown() -> None:
    async with FakeLlamaServer(slots=1) as fake, serving([fake]) as service:
        fake.token.hold()
        first = asyncio.create_task(service.chat("first"))
        await fake.token.arrived()
        second = asyncio.create_task(service.chat("second"))
        await service.watcher.until(lambda seen: seen.level.get("m") == 2)
        out = await asyncio.to_thread(printed, service.url)
        fake.token.release()
        await asyncio.gather(first, second)
    assert "m: 1 waiting" in out
    assert "tokens warm (fresh)" in out


async def test_a_key_is_asked_for_and_said_so() -> None:
    keys = [{"name": "ops", "value": "letmein"}]
    async with FakeLlamaServer() as fake, serving([fake], keys=keys) as service:
        with pytest.raises(LiveError, match="asks for a key"):
            await asyncio.to_thread(printed, service.url)
        assert "b0 (up)" in await asyncio.to_thread(printed, service.url, key="letmein")


async def test_what_is_no_router_is_one_line() -> None:
    async with FakeLlamaServer() as fake:
        with pytest.raises(LiveError, match="shows no live view"):
            await asyncio.to_thread(printed, fake.base_url)
    result = CliRunner().invoke(app, ["top", "http://127.0.0.1:9", "--once"])
    assert result.exit_code == 1
    assert "Traceback" not in result.output


def streaming(body: bytes) -> httpx.Client:
    headers = {"content-type": "text/event-stream"}
    answer = httpx.MockTransport(lambda _: httpx.Response(200, content=body, headers=headers))
    return httpx.Client(transport=answer, base_url="http://router")


def test_the_stream_is_followed_to_its_end_past_its_comments() -> None:
    body = b'event: clock\ndata: 0.0\n\ndata: {"a": 1}\n\n:\n\ndata: {"a": 2}\n\n'
    with streaming(body) as client:
        found = list(snapshots(client))
    assert [data for _, data in found] == [{"a": 1}, {"a": 2}]
    assert all(skew < -1_000_000 for skew, _ in found)


def test_a_stream_of_something_else_is_refused() -> None:
    with (
        streaming(b"data: hello\n\n") as client,
        pytest.raises(LiveError, match="not the stream of a warmslot"),
    ):
        list(snapshots(client))


def slot(**more: Any) -> Mapping[str, Any]:
    whole = {"slot": 0, "tokens": 500, "shared": 250, "group": 1, "known": True, "conversation": "ab12"}
    return {**whole, "used": 5.0, "running": None, **more}


def test_a_bar_is_as_full_as_the_slot_and_shows_what_is_shared() -> None:
    text = bar(slot(), 1000)
    assert text.plain == "█" * (BAR // 2) + "·" * (BAR - BAR // 2)
    assert text.spans or text.style == "magenta"
    assert bar(slot(tokens=0, shared=0), 1000).plain == "·" * BAR
    assert bar(slot(tokens=5000), 1000).plain == "█" * BAR
    assert bar(slot(), 0).plain == "·" * BAR


def test_reuse_of_the_hour_is_shown_for_as_long_as_the_router_runs() -> None:
    pool = {
        "name": "m",
        "waiting": 0,
        "history": {name: [0] * 60 for name in ("requests", "cached", "processed")},
        "hour": {"requests": 30, "cached": 36_000, "processed": 12_000},
    }
    snapshot = {"started": 1000.0, "column_seconds": 15.0, "pools": [pool], "backends": [], "finished": []}
    for now, said in ((1000.0 + 7200, "10 tokens/s reused"), (1000.0 + 1800, "20 tokens/s reused")):
        out = io.StringIO()
        Console(file=out, width=160).print(view(snapshot, now))
        assert "reuse 75.0%" in out.getvalue()
        assert said in out.getvalue()


def test_advice_is_shown_beside_the_backend() -> None:
    backend = {"name": "b", "state": "up", "context": 100, "restarts": 0, "slots": []}
    found = {"slots": 8, "headline": "--parallel 8, one at a time", "confidence": "high"}
    out = io.StringIO()
    snapshot = {"started": 0.0, "column_seconds": 15.0, "pools": [], "finished": []}
    for advised in (found, {**found, "slots": 0}, None):
        shown = {**snapshot, "backends": [{**backend, "advised": advised}]}
        Console(file=out, width=160).print(view(shown, 10.0))
    assert out.getvalue().count("advised: ") == 1
    assert "advised: --parallel 8, one at a time (confidence high)" in out.getvalue()


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    snapshot = {
        "started": 0.0,
        "column_seconds": 15.0,
        "pools": [],
        "backends": [
            {"name": "[red]x", "state": "up", "context": 100, "restarts": 2, "slots": [slot(known=False)]}
        ],
        "first_token": {"median": 0.5, "worst": 2.0},
        "finished": [],
    }
    out = io.StringIO()
    Console(file=out, width=160).print(view(snapshot, 10.0))
    assert "[red]x (up), 100 tokens a slot, 2 restarts" in out.getvalue()
    assert "median 0.50 s, worst 2.00 s" in out.getvalue()
