"""Requests that the journal is told of as the dispatcher tells them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.router.config import Journal as JournalConfig
from warmslot.router.journal import Journal, read
from warmslot.router.records import Record
from warmslot.router.values import (
    Candidate,
    Decision,
    Lease,
    Loss,
    Outcome,
    Prompt,
    Report,
    Request,
    SlotRef,
    Status,
)

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Scribe:
    """A journal on a clock that stands still until it is moved."""

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    now: float = 100.0
    count: int = 0

    def __post_init__(self) -> None:
        config = JournalConfig(path=str(self.path), **self.settings)
        self.journal = Journal(config, {"m": ["b"]}, clock=lambda: self.now, wall=lambda: 1_000.0 + self.now)
        self.journal.open()

    def serve(
        self, data: bytes, generated: bytes = b"", body: dict[str, Any] | None = None, **more: Any
    ) -> str:
        """One request from its lease to its report; gives its id."""
        self.count += 1
        request = Request(
            f"r{self.count}", Prompt.of(data), "m", arrived=self.now, session=more.get("session")
        )
        slot = SlotRef("b", more.get("slot", 0))
        cached = more.get("cached", 0)
        processed = max(1, len(data) // 4) - cached
        candidates = (Candidate(slot, True, cached, 0.5, 0.25),)
        lease = Lease(request, slot, Decision.AFFINITY, cached, cached + processed, self.now, (), candidates)
        self.journal.granted(lease, 0.0)
        self.journal.describe(request.id, body or {"messages": [{"role": "user", "content": data.decode()}]})
        self.now += 1.0
        outcome = Outcome(
            Status.OK,
            cached,
            processed,
            output_tokens=len(generated) // 4,
            prefill_seconds=0.25,
            decode_seconds=0.5,
            ttft_seconds=0.3,
            generated=generated,
        )
        report = Report(
            *(request, slot, Decision.AFFINITY, Status.OK, cached, cached, processed),
            output_tokens=outcome.output_tokens,
            queue_seconds=0.0,
            losses=more.get("losses", {Loss.NEW: processed}),
            session=request.session or "",
        )
        self.journal.finished(lease, report, outcome, self.now)
        return request.id

    def records(self) -> list[Record]:
        """Close the journal and read what it holds."""
        self.journal.close()
        return [entry for entry in read(self.path) if isinstance(entry, Record)]


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing gives up on what is not written in time, which a busy machine can make happen."""
    monkeypatch.setattr("warmslot.router.journal.CLOSE_SECONDS", 300.0)


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    return Scribe(tmp_path / "journal.jsonl")
