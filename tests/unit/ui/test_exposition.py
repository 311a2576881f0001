"""What ``/metrics`` writes is what the library would write."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from warmslot.router.exposition import Exposition, Family
from warmslot.router.metrics import Metrics

if TYPE_CHECKING:
    import pytest

ODD = 'a "quoted" \\ and\na second line'


def bound(label: str, value: str) -> str:
    """A label's value; a bucket's bound as one number, however it is written."""
    return str(float(value)) if label == "le" else value


def samples(text: bytes) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """Every family with its kind, help and samples, as a scraper reads them."""
    return {
        f"{family.name} {family.type} {family.documentation}": [
            (sample.name, {name: bound(name, value) for name, value in sample.labels.items()}, sample.value)
            for sample in family.samples
        ]
        for family in text_string_to_metric_families(text.decode())
    }


def test_every_metric_of_a_router_is_written_as_the_library_writes_it() -> None:
    metrics = Metrics({"m": ["a", "b"]}, slots={"a": 3}, clients=["desk"])
    metrics.ttft.labels("a", "chat").observe(0.3)
    metrics.decision.observe(0.0002)
    metrics.prompt_tokens.labels("m", "a", "chat", "cached").inc(12_345_678.25)
    metrics.resident.labels("a", "1").set(4096)
    assert samples(metrics.text()) == samples(generate_latest(metrics.registry))
    metrics.ttft.labels("a", "chat").observe(0.4)
    metrics.resident.labels("a", "1").set(0)
    metrics.resident.labels("a", "9").set(1)  # a series that is new since the last time
    assert samples(metrics.text()) == samples(generate_latest(metrics.registry))


def test_odd_labels_texts_and_values_are_escaped() -> None:
    registry = CollectorRegistry()
    counter = Counter("odd_total", ODD, ["label"], registry=registry)
    gauge = Gauge("odd_gauge", ODD, [], registry=registry)
    histogram = Histogram("odd_seconds", ODD, ["label"], registry=registry, buckets=(0.5, 1, float("inf")))
    counter.labels(ODD).inc(1e300)
    gauge.set(float("inf"))
    histogram.labels(ODD).observe(2.0)
    families = [
        Family("odd_total", "counter", ("label",), ODD, counter),
        Family("odd_gauge", "gauge", (), ODD, gauge),
        Family("odd_seconds", "histogram", ("label",), ODD, histogram),
    ]
    assert samples(Exposition(families).text()) == samples(generate_latest(registry))


def test_series_may_appear_while_it_is_written() -> None:
    metrics = Metrics({"m": ["a"]})
    over = threading.Event()

    def grow() -> None:
        slot = 0
        while not over.is_set():
            metrics.resident.labels("a", str(slot)).set(slot)
            slot = (slot + 1) % 500

    grower = threading.Thread(target=grow)
    grower.start()
    try:
        for _ in range(20):
            assert metrics.text().endswith(b"\n")
    finally:
        over.set()
        grower.join()


def test_it_lets_the_event_loops_thread_in(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics({"m": ["a"]})
    pauses: list[float] = []
    monkeypatch.setattr("warmslot.router.exposition.time.sleep", pauses.append)
    metrics.text()
    assert pauses == [0] * len(metrics.families)
