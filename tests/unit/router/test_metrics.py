"""The exposition: complete from the first scrape, bounded, and equal to what happened."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
from warmslot.router.advice import Advised
from warmslot.router.metrics import Metrics
from warmslot.router.values import (
    Decision,
    Lease,
    Loss,
    Outcome,
    Prompt,
    Report,
    Request,
    Route,
    SlotRef,
    Status,
)

from tests.support.router import sample

if TYPE_CHECKING:
    from tests.support.router import Service

LINE = re.compile(r'[a-z_]+(\{([a-z_]+="[^"]*",?)*\})? [0-9.e+-]+(Inf)?')


def ended(client: str = "other", **more: object) -> tuple[Lease, Report, Outcome]:
    """A finished request, as the dispatcher tells of it."""
    request = Request("r", Prompt.of(b"hello"), "m", client=client)
    lease = Lease(request, SlotRef("b", 1), Decision.AFFINITY, 70, 100, granted=10.0)
    report = Report(
        request=request,
        slot=SlotRef("b", 1),
        decision=Decision.AFFINITY,
        status=Status.OK,
        predicted_tokens=70,
        cached_tokens=72,
        processed_tokens=28,
        output_tokens=10,
        queue_seconds=0.5,
        losses={Loss.NEW: 20, Loss.EVICTED: 8},
        **more,  # type: ignore[arg-type]
    )
    outcome = Outcome(Status.OK, 72, 28, 10, prefill_seconds=0.28, decode_seconds=1.0)
    return lease, report, outcome


def test_every_known_series_exists_before_anything_happened() -> None:
    text = Metrics({"m": ["b"]}, slots={"b": 2}, clients=["anna"]).text().decode()
    for wanted in (
        'warmslot_requests_total{backend="b",outcome="cancelled",pool="m",route="chat"} 0.0',
        'warmslot_requests_total{backend="none",outcome="rejected",pool="none",route="other"} 0.0',
        'warmslot_prompt_tokens_total{backend="b",pool="m",reuse="cached",route="embeddings"} 0.0',
        'warmslot_client_prompt_tokens_total{client="anna",reuse="processed"} 0.0',
        'warmslot_slot_prompt_tokens_total{backend="b",reuse="cached",slot="1"} 0.0',
        'warmslot_recomputed_tokens_total{backend="b",reason="diverged"} 0.0',
        'warmslot_routing_decisions_total{backend="b",decision="wait"} 0.0',
        'warmslot_engine_slot_selections_total{backend="b",by="lru"} 0.0',
        'warmslot_demand_seconds_total{level="more",pool="m"} 0.0',
        'warmslot_decode_level_tokens_total{backend="b",busy="32"} 0.0',
        'warmslot_time_to_first_token_seconds_bucket{backend="b",le="0.025",route="chat"} 0.0',
        'warmslot_request_duration_seconds_bucket{backend="b",le="600.0",route="chat"} 0.0',
        'warmslot_queue_seconds_bucket{le="0.005",pool="m",route="chat"} 0.0',
        'warmslot_backend_up{backend="b"} 0.0',
        'warmslot_backend_restarts_total{backend="b",reason="exited"} 0.0',
        'warmslot_label_overflow_total{label="client"} 0.0',
    ):
        assert wanted in text
    assert "_created" not in text
    for line in text.splitlines():
        assert line.startswith("#") or LINE.fullmatch(line), line


def test_advised_slots_are_what_an_advisor_says() -> None:
    metrics = Metrics({"m": ["b", "c"]})
    assert sample(metrics.text().decode(), "warmslot_advised_slots") == 0
    metrics.advise({"b": Advised(4, "why", 1.0), "nobody": Advised(9, "why", 1.0)})
    text = metrics.text().decode()
    assert [sample(text, "warmslot_advised_slots", backend=name) for name in ("b", "c")] == [4, 0]
    assert "nobody" not in text
    metrics.advise({"b": Advised(0, "too little data", 2.0)})
    assert sample(metrics.text().decode(), "warmslot_advised_slots", backend="b") == 0
    metrics.follow({"m": ["c"]})
    assert 'advised_slots{backend="b"}' not in metrics.text().decode()


def test_two_routers_do_not_share_their_numbers() -> None:
    one, two = Metrics({"m": ["b"]}), Metrics({"m": ["b"]})
    one.engine_selected("b", "id")
    name = "warmslot_engine_slot_selections_total"
    assert sample(one.text().decode(), name) == 1
    assert sample(two.text().decode(), name) == 0


def test_a_finished_request_is_counted_once_in_every_sum() -> None:
    metrics = Metrics({"m": ["b"]}, slots={"b": 2})
    lease, report, outcome = ended()
    metrics.granted(lease, 0.0002)
    metrics.finished(lease, report, outcome, now=12.5)
    text = metrics.text().decode()
    for name, labels, value in (
        ("prompt_tokens_total", {"reuse": "cached"}, 72),
        ("prompt_tokens_total", {"reuse": "processed"}, 28),
        ("slot_prompt_tokens_total", {"slot": "1", "reuse": "cached"}, 72),
        ("predicted_reuse_tokens_total", {}, 70),
        ("reused_tokens_total", {"source": "slot"}, 72),
        ("reused_tokens_total", {"source": "host_ram"}, 0),
        ("recomputed_tokens_total", {"reason": "evicted"}, 8),
        ("recomputed_tokens_total", {}, 28),
        ("output_tokens_total", {"route": "chat"}, 10),
        ("routing_decisions_total", {"decision": "affinity"}, 1),
        ("prefill_seconds_total", {}, 0.28),
        ("prefill_position_tokens_total", {"block": "4k"}, 28),
        ("prefill_position_seconds_total", {"block": "4k"}, 0.28),
        ("decode_seconds_total", {}, 1.0),
        ("slot_busy_seconds_total", {"slot": "1"}, 2.5),
        ("time_per_output_token_seconds_sum", {}, 0.1),
    ):
        assert abs(sample(text, f"warmslot_{name}", **labels) - value) < 1e-9, name
    assert abs(sample(text, "warmslot_prefill_seconds_avoided_total") - 0.72) < 1e-9


def test_an_unknown_client_is_folded_into_other() -> None:
    metrics = Metrics({"m": ["b"]}, clients=["anna"])
    for client in ("anna", "mallory-1", "mallory-2"):
        metrics.finished(*ended(client), now=1.0)
    text = metrics.text().decode()
    assert "mallory" not in text
    assert sample(text, "warmslot_client_prompt_tokens_total", client="anna") == 100
    assert sample(text, "warmslot_client_prompt_tokens_total", client="other") == 200
    assert sample(text, "warmslot_label_overflow_total", label="client") == 2


def test_answers_without_truth_are_told_apart() -> None:
    metrics = Metrics({"m": ["b"]})
    metrics.finished(*ended(truth_missing=True), now=1.0)
    text = metrics.text().decode()
    assert sample(text, "warmslot_truth_missing_total", backend="b") == 1
    assert sample(text, "warmslot_prompt_tokens_total") == 0
    assert sample(text, "warmslot_predicted_reuse_tokens_total") == 0


def test_restarts_are_counted_when_it_comes_back_by_why_it_had_gone() -> None:
    metrics = Metrics({"m": ["b"]})

    def change(up: bool, reason: str = "") -> None:
        metrics.backend_changed("b", up=up, slots=2 * up, context=100 * up, reason=reason)

    change(True)
    for reason in ("it exited with status 1", "/health failed 3 times in a row", "replaced"):
        change(False, reason)
        change(True)
    text = metrics.text().decode()
    for reason in ("exited", "health", "replaced"):
        assert sample(text, "warmslot_backend_restarts_total", reason=reason) == 1
    assert sample(text, "warmslot_backend_slots", backend="b") == 2


async def test_a_scrape_shows_what_runs_now(service: Service) -> None:
    fake = service.fake
    text = (await service.http.get("/metrics")).text
    assert sample(text, "warmslot_backend_up", backend="b0") == 1
    assert sample(text, "warmslot_slot_context_tokens", backend="b0") == fake.context
    await service.chat("mark-a hello", max_tokens=6, stream=True)
    text = (await service.http.get("/metrics")).text
    assert sample(text, "warmslot_slot_resident_tokens", backend="b0") == sum(
        len(slot.tokens) for slot in fake.model.slots
    )
    assert sample(text, "warmslot_time_to_first_token_seconds_count", route=Route.CHAT) == 1
    assert sample(text, "warmslot_queue_seconds_count", pool="m") == 1
    assert sample(text, "warmslot_inflight_requests") == 0
    assert sample(text, "warmslot_demand_seconds_total", level="1") > 0
    assert sample(text, "warmslot_decode_level_tokens_total", busy="1") == 6
    assert "hello" not in text


@pytest.mark.parametrize("token_ms", [0.001, 10.0, 1e9])
async def test_the_first_token_of_a_whole_answer_comes_after_it_was_sent_and_before_it_ends(
    service: Service, token_ms: float
) -> None:
    service.fake.token_ms = token_ms
    assert (await service.chat("hello", max_tokens=40)).status_code == 200
    over = time.monotonic()
    (lease,), (outcome,) = service.watcher.granted_leases, service.watcher.outcomes
    first, arrived = outcome.ttft_seconds, lease.request.arrived
    assert first is not None
    assert lease.granted <= arrived + first <= over
    assert await service.metric("warmslot_time_to_first_token_seconds_sum") == pytest.approx(first)


async def test_a_backend_that_is_down_holds_nothing(service: Service) -> None:
    await service.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}]})
    assert await service.metric("warmslot_slot_resident_tokens") > 0
    await service.router.dispatcher.fleet.backend_down("b0", "for the test")
    assert await service.metric("warmslot_slot_resident_tokens") == 0
