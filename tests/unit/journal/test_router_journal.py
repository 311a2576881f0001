"""A router with a journal: what clients asked and what the engine said stands in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from warmslot.router.app import create_router
from warmslot.router.journal import JournalError, read
from warmslot.router.records import BackendChange, Opening, Record

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import config_for, serving

if TYPE_CHECKING:
    from pathlib import Path


async def test_requests_that_went_through_a_router_are_in_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    async with FakeLlamaServer() as fake, serving([fake], journal={"path": str(path)}) as service:
        first = {"role": "user", "content": "hello there, this is secretword and some more words"}
        answer = await service.http.post(
            "/v1/chat/completions", json={"messages": [first]}, headers={"X-Warmslot-Session": "talk"}
        )
        message = answer.json()["choices"][0]["message"]
        again = {"messages": [first, message, {"role": "user", "content": "go on"}]}
        reply = await service.http.post(
            "/v1/chat/completions", json=again, headers={"X-Warmslot-Session": "talk"}
        )
        timings = reply.json()["timings"]
        assert await service.metric("warmslot_journal_records_total", outcome="dropped") == 0
    opening, up, one, two = read(path)
    assert isinstance(opening, Opening)
    assert opening.pools == {"m": ["b0"]}
    assert isinstance(up, BackendChange)
    assert (up.up, up.slots, up.context) == (True, 4, 2048)
    assert isinstance(one, Record)
    assert isinstance(two, Record)
    assert (one.session, two.session) == ("talk", "talk")
    assert (two.cached_tokens, two.processed_tokens) == (timings["cache_n"], timings["prompt_n"])
    assert sum(two.losses.values()) == two.processed_tokens
    assert [part.role for part in two.outline.messages] == ["user", "assistant", "user"]
    assert two.outline.messages[0] == one.outline.messages[0]
    assert one.reply is not None
    assert one.reply.fields[0].exact == two.outline.messages[1].fields[0].exact
    assert b"secretword" not in path.read_bytes()


def test_a_router_whose_journal_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="No such file or directory"):
        create_router(config_for(1, journal={"path": str(tmp_path / "no" / "journal.jsonl")}))


async def test_no_number_that_a_client_sends_ends_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    async with FakeLlamaServer() as fake, serving([fake], journal={"path": str(path)}) as service:
        for bound in ("123456789012345678901234567890123456789", "1e300", "4"):
            body = b'{"messages":[{"role":"user","content":"hello"}],"max_tokens":%s}' % bound.encode()
            await service.http.post("/v1/chat/completions", content=body)
        assert await service.metric("warmslot_journal_records_total", outcome="dropped") == 0
    records = [entry for entry in read(path) if isinstance(entry, Record)]
    assert [record.max_output_tokens for record in records] == [2**31 - 1, 2**31 - 1, 4]
