"""How long the core takes to decide when all is large: 64 slots of 128k tokens resident, 500 queued.

Run ``python -m tests.bench.decision_time [--out FILE]``. Each request is submitted, granted and finished in
virtual time; what is measured is the processor time of each call. Half of the queue continues what slots
hold (each prompt its own bytes), half is new and short. Memory is what the process gains while the core
takes it all in, less what the prompts of the queue hold anyway.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.table import Table
from warmslot.router.core import CoreSettings, RouterCore
from warmslot.router.values import Outcome, Prompt, Request, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmslot.router.values import Lease

SLOTS = 64
CONTEXT_TOKENS = 128_000
QUEUED = 500
CYCLES = 400
LIMIT_MS, LIMIT_MIB = 5.0, 200.0
"""What the core is held to: the 99th percentile of one decision, and its memory."""

_BYTES_PER_TOKEN = 4
_PREAMBLE = b"You are one of many agents that share this beginning. " * 40


def _finish(core: RouterCore, request: Request, cached: int, now: float) -> None:
    total = max(1, request.prompt.length // _BYTES_PER_TOKEN)
    cached = min(cached, total - 1)
    core.finish(
        request.id,
        Outcome(
            status=Status.OK,
            cached_tokens=cached,
            processed_tokens=total - cached,
            output_tokens=100,
            prefill_seconds=(total - cached) / 500,
            decode_seconds=4.0,
            generated=b"an answer " * 40,
        ),
        now,
    )


class Load:
    """The core under load. ``times``: processor time of every call in milliseconds, by name."""

    def __init__(self, seed: int) -> None:
        self.times: dict[str, list[float]] = {"submit": [], "grant": [], "finish": []}
        self.now = 0.0
        self._random = random.Random(seed)  # noqa: S311  # reproducible load, not a secret
        self.core = RouterCore({"p": CoreSettings(in_flight="slots", max_queue=QUEUED * 2)})
        self.core.backend_up("a", "p", SLOTS, CONTEXT_TOKENS, 0.0, known_empty=True)
        self._running: list[Lease] = []
        self._made = 0

    def text(self, length: int) -> bytes:
        """A long prompt that begins like all others."""
        return (_PREAMBLE + self._random.randbytes(length))[:length]

    def request(self, text: bytes) -> Request:
        """A request of its own."""
        self._made += 1
        return Request(id=str(self._made), prompt=Prompt.of(text), pool="p", arrived=self.now)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        start = time.process_time()
        self.core.submit(request, self.now)
        self.times["submit"].append((time.process_time() - start) * 1000)

    def grant(self) -> None:
        """Start what may start; the time is for each lease."""
        start = time.process_time()
        leases = self.core.grant(self.now)
        self.times["grant"].append((time.process_time() - start) * 1000 / max(1, len(leases)))
        self._running += leases

    def finish(self) -> None:
        """The oldest running request ends."""
        lease = self._running.pop(0)
        total = max(1, lease.request.prompt.length // _BYTES_PER_TOKEN)
        cached = min(lease.predicted_tokens, total - 1)
        outcome = Outcome(
            status=Status.OK,
            cached_tokens=cached,
            processed_tokens=total - cached,
            output_tokens=100,
            prefill_seconds=(total - cached) / 500,
            decode_seconds=4.0,
            generated=b"an answer " * 40,
        )
        self.now += 0.5
        start = time.process_time()
        self.core.finish(lease.request.id, outcome, self.now)
        self.times["finish"].append((time.process_time() - start) * 1000)


def _memory() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss) / (1 << 20)


def measure(seed: int = 1) -> dict[str, object]:
    """Fill the slots, fill the queue, then let requests come and go."""
    load = Load(seed)
    contexts = [load.text(CONTEXT_TOKENS * _BYTES_PER_TOKEN - 4096) for _ in range(SLOTS)]
    first = [load.request(text) for text in contexts]
    before = _memory()
    for request in first:
        load.submit(request)
    while load.core.queued("p"):
        load.grant()
        load.finish()
    while load.core.slots() and any(view.busy for view in load.core.slots()):
        load.finish()
    held = sum(request.prompt.length * 9 / 8 for request in first) / (1 << 20)
    queue = [
        load.request(contexts[at % SLOTS] + load.text(1200) if at % 2 else load.text(4000 + 40 * at))
        for at in range(QUEUED + CYCLES)
    ]
    del contexts, first
    filled = _memory()
    for request in queue[:QUEUED]:
        load.submit(request)
    load.grant()
    taken = _memory()
    load.times = {name: [] for name in load.times}
    for request in queue[QUEUED:]:
        load.finish()
        load.grant()
        load.submit(request)
    return {
        "decision_ms": {name: _quantiles(times) for name, times in load.times.items()},
        "memory_mib": round(taken - filled + max(0.0, held), 1),
        "memory_before_mib": round(before, 1),
    }


def _quantiles(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    at = {"p50": 0.50, "p99": 0.99}
    found = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}
    return {name: round(value, 3) for name, value in {**found, "max": ordered[-1]}.items()}


def main() -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "decision_time.json")
    arguments = parser.parse_args()
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        **measure(),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    title = f"{SLOTS} slots of 128k tokens, {QUEUED} queued"
    table = Table("call", "p50 ms", "p99 ms", "max ms", title=title)
    times = result["decision_ms"]
    for name, found in times.items():
        table.add_row(name, *(f"{found[key]:.2f}" for key in ("p50", "p99", "max")))
    Console().print(table)
    Console().print(f"memory of the core: {result['memory_mib']} MiB (limit {LIMIT_MIB:g})")
    worst = max(found["p99"] for found in times.values())
    sys.exit(0 if worst <= LIMIT_MS and result["memory_mib"] <= LIMIT_MIB else 1)


if __name__ == "__main__":
    main()
