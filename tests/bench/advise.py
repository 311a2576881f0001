"""How long ``warmslot advise`` takes on a journal of 100,000 requests, and how much memory: run as a script.

``python tests/bench/advise.py [REQUESTS]`` writes the journal into a temporary folder, advises in a process
of its own on one core where that can be chosen, and prints seconds and the most memory in MB.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

from warmslot.launcher.forecast import Setup
from warmslot.router.records import Record

from tests.support import agents
from tests.support.journals import START, write

if TYPE_CHECKING:
    from collections.abc import Iterator

_BLOCK = 10
"""Distinct blocks of work; a longer journal repeats them with other hashes, later."""


def entries(requests: int) -> Iterator[object]:
    """A journal of so many requests: 12 agents on 8 slots without a router."""
    rates, setup = agents.speeds(), Setup(8, 8192, "slots", "engine")
    blocks = [list(agents.journal(agents.load(12, 40, seed=seed), rates, setup)) for seed in range(_BLOCK)]
    yield from blocks[0][:2]
    count, at = 0, START
    while True:
        mask = (count * 0x9E3779B97F4A7C15) & (2**64 - 1)
        records = [one for one in blocks[count % _BLOCK] if isinstance(one, Record)]
        for one in records:
            shifted = replace(
                one,
                id=f"r{count}",
                session=f"{mask:x}-{one.session}",
                time=one.time - START + at,
                chain=type(one.chain)("Q", (value ^ mask for value in one.chain)),
                after=type(one.after)("Q", (value ^ mask for value in one.after)),
            )
            yield shifted
            count += 1
            if count == requests:
                return
        at += max(one.time + one.ended for one in records) - START


def main() -> None:
    """Write, advise, print."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "journal.jsonl", entries(requests))
        sys.stdout.write(f"{requests:,} requests, {path.stat().st_size / 1e6:.0f} MB\n")
        command = [
            sys.executable,
            "-m",
            "warmslot.launcher",
            "advise",
            str(path),
            "--kv-tokens",
            "262144",
            "--json",
        ]
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        began = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        seconds = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        advice = json.loads(done.stdout)
        sys.stdout.write(
            f"{seconds:.0f} s ({used.ru_utime + used.ru_stime:.0f} s of one core), "
            f"{used.ru_maxrss / 1000:.0f} MB; "
            f"advice: {advice['advice']['slots']} slots, {advice['advice']['in_flight']}, "
            f"confidence {advice['confidence']}\n"
        )


if __name__ == "__main__":
    main()
