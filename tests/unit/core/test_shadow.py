"""Imagined slots: what they say can be worked out by hand, and agrees with real slots of the same count."""

from __future__ import annotations

from collections import Counter

import pytest
from warmslot.router import shadow as module
from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.values import Outcome, Prompt, Report, Request, Status

TOKEN = 4


def _core(slots: int) -> RouterCore:
    core = RouterCore({"p": CoreSettings(in_flight="serialize", linger=0.0)})
    core.backend_up("a", "p", slots, 1 << 20, 0.0, known_empty=True)
    return core


def _serve(core: RouterCore, number: int, text: bytes) -> Report:
    """One request on an engine that reuses exactly what the core predicts."""
    request = Request(id=str(number), prompt=Prompt.of(text), pool="p", arrived=float(number))
    core.submit(request, float(number))
    (lease,) = core.grant(float(number))
    total = len(text) // TOKEN
    cached = min(lease.predicted_tokens, total - 1)
    outcome = Outcome(
        status=Status.OK,
        cached_tokens=cached,
        processed_tokens=total - cached,
        output_tokens=1,
        prefill_seconds=(total - cached) / 500,
        decode_seconds=0.1,
    )
    return core.finish(request.id, outcome, number + 0.5)


def _conversations(count: int, turns: int) -> list[bytes]:
    """Conversations of different lengths that take turns; each turn adds to what was."""
    return [
        bytes([65 + who]) * (4000 * (who + 1) + 400 * turn) for turn in range(turns) for who in range(count)
    ]


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_the_imagined_reuse_at_the_real_count_is_the_real_reuse(slots: int) -> None:
    core, real, imagined = _core(slots), 0, Counter[str]()
    for number, text in enumerate(_conversations(6, 12)):
        report = _serve(core, number, text)
        real += report.cached_tokens
        imagined.update(report.shadow)
    total = sum(len(text) // TOKEN for text in _conversations(6, 12))
    assert imagined[str(slots)] == pytest.approx(real, abs=0.02 * total)


def test_more_slots_never_reuse_less_here_and_unbounded_is_the_limit() -> None:
    core, imagined = _core(2), Counter[str]()
    texts = _conversations(6, 8)
    for number, text in enumerate(texts):
        imagined.update(_serve(core, number, text).shadow)
    by_count = [imagined[str(count)] for count in module.COUNTS]
    assert by_count == sorted(by_count)
    limit = sum((4000 * (who + 1) + 400 * (turn - 1)) // TOKEN for turn in range(1, 8) for who in range(6))
    assert imagined[module.UNBOUNDED] == limit
    assert imagined["8"] == limit
    assert by_count[0] < limit / 10


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CONTEXTS", 5)
    monkeypatch.setattr(module, "_MAX_TEXT", 100)
    core = _core(2)
    for number in range(60):
        _serve(core, number, number.to_bytes(4, "little") * 300)
    shadow = core._pools["p"].shadow
    assert len(shadow._recent) == len(shadow._all.contents) == 5
    assert len(shadow._store.contents) <= sum(module.COUNTS)
    assert all(content.context.data is None for content in shadow._store.contents.values())
    assert shadow._bytes == 5 * 1200


def test_with_its_last_engine_all_that_was_imagined_is_gone() -> None:
    core = _core(4)
    for number in range(4):
        _serve(core, number, b"a" * 4000 + b"b" * 400 * number)
    core.backend_down("a", 5)
    core.backend_up("a", "p", 4, 1 << 20, 6, known_empty=True)
    assert set(_serve(core, 7, b"a" * 8000).shadow.values()) == {0}
