"""A real engine's log, made a journal, says what the engine's answers said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from warmslot.launcher.log_import import Import
from warmslot.router.records import BackendChange, Record
from warmslot.router.trie import common_blocks

if TYPE_CHECKING:
    from tests.engine.conftest import RunningEngine


async def test_requests_of_the_log_are_those_that_were_answered(engine: RunningEngine) -> None:
    # Released slots of other tests hold contexts that this log does not show being filled.
    begun = len(engine.lines)
    text = "".join(f"Line {number} of a note about imports, with some words.\n" for number in range(30))
    told = []
    async with httpx.AsyncClient(base_url=engine.base_url, timeout=120) as http:
        for prompt, slot in ((text, 0), (text + "And one more.", 0), (text, 1)):
            body = {"prompt": prompt, "n_predict": 4, "id_slot": slot, "cache_prompt": True}
            if not told:
                body["cache_prompt"] = False
            told.append((await http.post("/completion", json=body)).json()["timings"])
    await engine.settled()
    importing = Import("e", 0.0)
    entries = list(importing.entries(engine.lines[begun:]))
    records = [one for one in entries if isinstance(one, Record)]
    assert importing.incomplete == 0
    assert [(r.cached_tokens, r.processed_tokens, r.output_tokens) for r in records] == [
        (t["cache_n"], t["prompt_n"], t["predicted_n"]) for t in told
    ]
    assert [r.slot for r in records] == [0, 0, 1]
    assert common_blocks(records[0].after, records[1].chain) == told[1]["cache_n"] // 16
    for record, timings in zip(records, told, strict=True):
        assert abs(record.prefill_seconds - timings["prompt_ms"] / 1000) < 0.001
        assert abs(record.decode_seconds - timings["predicted_ms"] / 1000) < 0.001


def test_the_log_tells_slots_and_context(engine: RunningEngine) -> None:
    found = [one for one in Import("e", 0.0).entries(engine.lines) if isinstance(one, BackendChange)]
    assert [(one.slots, one.context) for one in found] == [(4, 2048)]
