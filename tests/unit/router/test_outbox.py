"""The way to one client: bounded, in order, and never in another's way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from warmslot.router.client import Client
from warmslot.router.outbox import ClientStalledError, Outbox

from tests.support.scripted_engine import turns


class Reader:
    """A client that reads when the test lets it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.open = asyncio.Event()
        self.open.set()
        scope = {"type": "http", "headers": []}
        self.client = Client(scope, self._receive, self._send)

    async def _receive(self) -> Any:
        raise AssertionError("nothing is received here")

    async def _send(self, message: Any) -> None:
        await self.open.wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        """What has been read."""
        return b"".join(message.get("body", b"") for message in self.messages)


async def test_pieces_arrive_in_order_and_at_once() -> None:
    reader = Reader()
    async with Outbox(reader.client) as outbox:
        for number in range(5):
            assert outbox.put(b"%d" % number)
            await turns(2)
            assert reader.body.endswith(b"%d" % number)
        await outbox.flush()
    assert reader.body == b"01234"


async def test_what_a_slow_reader_missed_comes_joined() -> None:
    reader = Reader()
    async with Outbox(reader.client) as outbox:
        outbox.put(b"a")
        await turns(3)
        reader.open.clear()
        for piece in (b"b", b"c", b"d"):
            outbox.put(piece)
            await turns(2)
        reader.open.set()
        await outbox.flush()
    assert [message["body"] for message in reader.messages[1:]] == [b"a", b"b", b"cd"]


async def test_a_full_outbox_waits_for_room() -> None:
    reader = Reader()
    async with Outbox(reader.client, limit=10) as outbox:
        reader.open.clear()
        assert outbox.put(b"x" * 10)
        assert not outbox.put(b"x")
        waiting = asyncio.create_task(outbox.room())
        await turns(3)
        assert not waiting.done()
        reader.open.set()
        await waiting


async def test_a_reader_that_never_reads_is_given_up() -> None:
    reader = Reader()
    async with Outbox(reader.client, limit=10, stall=0.01) as outbox:
        reader.open.clear()
        outbox.put(b"x" * 11)
        with pytest.raises(ClientStalledError):
            await outbox.room()
        with pytest.raises(ClientStalledError):
            await outbox.flush()


async def test_comments_come_only_between_events() -> None:
    reader = Reader()
    async with Outbox(reader.client, ping=3600) as outbox:
        outbox._last = -7200.0
        outbox._tick()
        await turns(3)
        assert reader.body == b":\n\n"
        outbox.put(b'data: {"half')
        await turns(3)
        outbox._last = -7200.0
        outbox._tick()
        await turns(3)
        await outbox.flush(broken=True)
    assert reader.body == b':\n\ndata: {"half\n\n'
    assert reader.messages[0]["status"] == 200
