"""Volatile text left out of keys, tools in order: only where the operator says so; told to the journal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner
from warmslot.launcher.cli import app as cli
from warmslot.router.config import Config
from warmslot.router.journal import read
from warmslot.router.masks import Treatment
from warmslot.router.records import Record
from warmslot.router.values import Prompt

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import chat, serving

if TYPE_CHECKING:
    from pathlib import Path

TAIL = "and then the rest of it all " * 20
TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in "abc"]


def test_a_mask_makes_one_key_of_texts_that_differ_in_it() -> None:
    treatment = Treatment([r"^x-nonce: \w+\n", r"\d\d:\d\d"])
    one, left = treatment.keyed(Prompt.of(f"x-nonce: abc\nIt is 10:31. {TAIL}".encode()))
    two, _ = treatment.keyed(Prompt.of(f"x-nonce: 77\nIt is 23:59. {TAIL}".encode()))
    assert one == two
    assert left == len("x-nonce: abc\n10:31")
    plain = Prompt.of(TAIL.encode())
    assert treatment.keyed(plain) == (plain, 0)


def test_tools_are_sorted_only_if_asked_and_only_if_they_need_it() -> None:
    body = {"tools": TOOLS[::-1], "messages": []}
    assert Treatment().in_order(body) is None
    sorting = Treatment(sort_tools=True)
    assert sorting.in_order(body) == {"tools": TOOLS, "messages": []}
    assert sorting.in_order({"tools": TOOLS}) is None
    assert sorting.in_order({"tools": [{"name": "b"}, 3, {"name": "a"}]}) == {
        "tools": [3, {"name": "a"}, {"name": "b"}]
    }


@pytest.mark.parametrize("masks", [["("], [".*"]])
def test_wrong_masks(masks: list[str]) -> None:
    pool = {"name": "m", "masks": masks, "backends": [{"name": "b", "model": "demo"}]}
    with pytest.raises(ValidationError, match="found a pattern"):
        Config.model_validate({"pools": [pool]})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_nonce_in_front(path: str, masked: bool) -> None:
    masks = [r"nonce \w+ "] if masked else []
    async with FakeLlamaServer() as fake, serving([fake], pool={"masks": masks}) as service:
        slots = set()
        for nonce in ("ann", "bob", "cid"):
            answer = await service.http.post(path, json=chat(f"nonce {nonce} mark-n {TAIL}", max_tokens=2))
            assert answer.status_code == 200
            slots.add(answer.headers["x-warmslot-slot"])
            assert fake.generations()[-1].slots == [int(answer.headers["x-warmslot-slot"])]
        assert (len(slots) == 1) is masked
        assert fake.violations == []


async def test_what_was_done_stands_in_the_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    settings: dict[str, Any] = {
        "pool": {"masks": [r"nonce \w+ "], "sort_tools": True},
        "journal": {"path": str(journal)},
    }
    async with FakeLlamaServer() as fake, serving([fake], **settings) as service:
        await service.chat(f"nonce abc {TAIL}", tools=TOOLS[::-1])
        await service.chat(TAIL, tools=TOOLS)
        assert [request.json["tools"] for request in fake.generations()] == [TOOLS, TOOLS]
    records = [entry for entry in read(journal) if isinstance(entry, Record)]
    assert [(record.masked, record.sorted_tools) for record in records] == [
        (len("nonce abc "), True),
        (0, False),
    ]
    said = CliRunner().invoke(cli, ["explain", str(journal), records[0].id]).output
    assert "Masks of its pool left 10 bytes of its prompt out of the comparison." in said
    assert "Its tools were sorted by name before it was sent." in said
    for record, masked in zip(records, (10, 0), strict=True):
        data = json.loads(CliRunner().invoke(cli, ["explain", str(journal), record.id, "--json"]).output)
        assert (data["masked_bytes"], data["sorted_tools"]) == (masked, masked > 0)
