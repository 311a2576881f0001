"""A summary from a running router's ``/metrics``: the same figures as from a journal, as far as counters go.

Sessions and exact quantiles are not in metrics; quantiles are read off histogram buckets.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import httpx

from .summary import Level, PrefillBlock, Spread, Summary, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SUFFIX: Final = {"k": 1024, "M": 1024 * 1024}

Labels = dict[str, str]
Samples = dict[str, list[tuple[Labels, float]]]


class LiveError(Exception):
    """The router cannot be asked; the message is one line."""


def fetch(url: str, key: str | None = None, path: str = "/metrics") -> str:
    """The text of a page of the router. Raises :class:`LiveError`."""
    base = url.rstrip("/").removesuffix("/metrics")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(timeout=10, trust_env=False) as client:
            answer = client.get(base + path, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LiveError(f"{base}: no answer ({error})") from error
    if answer.status_code != httpx.codes.OK:
        raise LiveError(f"{base}{path}: answered {answer.status_code}")
    return answer.text


def samples(text: str) -> Samples:
    """Prometheus text by metric name; what is no sample is passed over."""
    found: Samples = defaultdict(list)
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        found[name].append((dict(_LABEL.findall(labels or "")), number))
    return found


def summary(url: str, text: str) -> Summary:
    """The figures of a router since it started, from its metrics. Raises :class:`LiveError`."""
    found = samples(text)
    if "warmslot_requests_total" not in found:
        raise LiveError(f"{url}: its /metrics are not those of a warmslot router")
    total = _tokens(found, "warmslot_prompt_tokens_total", lambda _: "all").get("all", Tokens())
    for labels, value in found["warmslot_recomputed_tokens_total"]:
        if value:
            total.losses[labels["reason"]] = total.losses.get(labels["reason"], 0) + int(value)
    total.predicted = int(_sum(found, "warmslot_predicted_reuse_tokens_total"))
    total.output = int(_sum(found, "warmslot_output_tokens_total"))
    total.requests = int(_sum(found, "warmslot_requests_total"))
    backends = _tokens(found, "warmslot_prompt_tokens_total", lambda labels: labels["backend"])
    for labels, value in found["warmslot_recomputed_tokens_total"]:
        if value and labels["backend"] in backends:
            backends[labels["backend"]].losses[labels["reason"]] = int(value)
    return Summary(
        source=url,
        start=0.0,
        end=time.time(),
        total=total,
        statuses=_by(found, "warmslot_requests_total", "outcome"),
        decisions=_by(found, "warmslot_routing_decisions_total", "decision"),
        truth_missing=int(_sum(found, "warmslot_truth_missing_total")),
        guessed=0,
        sessions={},
        clients=_tokens(found, "warmslot_client_prompt_tokens_total", lambda labels: labels["client"]),
        routes=_tokens(found, "warmslot_prompt_tokens_total", lambda labels: labels["route"]),
        backends=backends,
        slots=_by(found, "warmslot_backend_slots", "backend"),
        context=_by(found, "warmslot_slot_context_tokens", "backend"),
        prefill_seconds=_sum(found, "warmslot_prefill_seconds_total"),
        decode_seconds=_sum(found, "warmslot_decode_seconds_total"),
        avoided_seconds=_sum(found, "warmslot_prefill_seconds_avoided_total"),
        prefill=list(_prefill(found)),
        decode=list(_decode(found)),
        demand=[
            Level(level, seconds)
            for level, seconds in _sums(found, "warmslot_demand_seconds_total", "level").items()
            if seconds > 0
        ],
        queue=_spread(found, "warmslot_queue_seconds"),
        first_token=_spread(found, "warmslot_time_to_first_token_seconds"),
        whole=_spread(found, "warmslot_request_duration_seconds"),
        buckets=[],
    )


def _sum(found: Samples, name: str) -> float:
    return sum(value for _, value in found.get(name, ()))


def _sums(found: Samples, name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for labels, value in found.get(name, ()):
        sums[labels[label]] = sums.get(labels[label], 0.0) + value
    return sums


def _by(found: Samples, name: str, label: str) -> dict[str, int]:
    return {key: int(value) for key, value in _sums(found, name, label).items() if value}


def _tokens(found: Samples, name: str, key: Callable[[Labels], str]) -> dict[str, Tokens]:
    groups: dict[str, Tokens] = {}
    for labels, value in found.get(name, ()):
        if not value:
            continue
        tokens = groups.setdefault(key(labels), Tokens())
        tokens.prompt += int(value)
        if labels["reuse"] == "cached":
            tokens.cached += int(value)
    return groups


def _prefill(found: Samples) -> Iterator[PrefillBlock]:
    """The router's blocks double in width; each is given as one block of that width."""
    tokens = _sums(found, "warmslot_prefill_position_tokens_total", "block")
    seconds = _sums(found, "warmslot_prefill_position_seconds_total", "block")
    start, whole = 0, 0.0
    for name, count in tokens.items():
        end = int(name[:-1]) * _SUFFIX[name[-1]]
        if count:
            whole += (end - start) * seconds.get(name, 0.0) / count
            yield PrefillBlock(start, end, count, seconds.get(name, 0.0), whole)
        start = end


def _decode(found: Samples) -> Iterator[Level]:
    tokens = _sums(found, "warmslot_decode_level_tokens_total", "busy")
    seconds = _sums(found, "warmslot_decode_level_seconds_total", "busy")
    for level, count in tokens.items():
        if count:
            yield Level(level, seconds.get(level, 0.0), count)


def _spread(found: Samples, name: str) -> Spread:
    counts: dict[float, float] = {}
    for labels, value in found.get(f"{name}_bucket", ()):
        bound = float(labels["le"])
        counts[bound] = counts.get(bound, 0.0) + value
    count = _sum(found, f"{name}_count")
    if not count:
        return Spread()
    bounds = sorted(counts)

    def at(share: float) -> float:
        below, low = 0.0, 0.0
        for bound in bounds:
            if counts[bound] >= share * count:
                if bound == float("inf"):
                    return low
                inside = counts[bound] - below
                return low + (bound - low) * ((share * count - below) / inside if inside else 1.0)
            below, low = counts[bound], bound
        return low

    return Spread(int(count), _sum(found, f"{name}_sum") / count, at(0.5), at(0.95), at(0.99), at(1.0))
