"""Journals of many agents, served by the modelled engine: what a backend with known rates had written."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from warmslot.launcher.forecast import Setup, serve
from warmslot.launcher.load import Job, Load
from warmslot.launcher.speeds import Speeds
from warmslot.launcher.summary import PrefillCurve
from warmslot.router.records import BackendChange, Opening, Record
from warmslot.router.values import Prompt, extend_chain

from tests.support.journals import BYTES_PER_TOKEN, START, words

if TYPE_CHECKING:
    from collections.abc import Iterator


def speeds(
    *, prefill: float = 500.0, alone: float = 24.0, gain: float = 0.7, overhead: float = 0.02
) -> Speeds:
    """A backend of these rates in tokens per second."""
    rates = {level: alone * (1 + gain * (level - 1)) for level in range(1, 65)}
    return Speeds(PrefillCurve([(0, 65536, 65536 / prefill)]), rates, overhead, {1, 2, 3, 4})


def load(
    workers: int, conversations: int, *, turns: int = 8, first: int = 1500, growth: int = 250, seed: int = 1
) -> Load:
    """``workers`` agents who take up one conversation after the other."""
    random = Random(f"agents {seed}")  # noqa: S311  # a seeded workload
    jobs: list[Job] = []
    last = [-1] * workers
    for number in range(conversations):
        worker = number % workers
        text = words("shared preamble", 200) + words(
            f"task {seed} {number}", random.randint(first // 2, first)
        )
        for turn in range(random.randint(max(1, turns // 2), turns)):
            output = random.randint(20, 120)
            text += words(f"turn {seed} {number} {turn}", random.randint(growth // 2, growth))
            prompt = Prompt.of(text)
            answer = words(f"answer {seed} {number} {turn}", output)
            job = Job(
                session=f"s{number}",
                chain=prompt.chain,
                length=prompt.length,
                after=extend_chain(prompt.chain, text + answer),
                after_length=len(text) + len(answer),
                root=prompt.root,
                prompt_tokens=len(text) // BYTES_PER_TOKEN,
                output_tokens=output,
                keeps_prefix=True,
                recorded_cached=0,
                counted=True,
                delay=random.uniform(0.05, 0.4) if last[worker] >= 0 else 0.05 * worker,
                after_end=last[worker] >= 0,
                before=last[worker],
            )
            if last[worker] >= 0:
                jobs[last[worker]].followers.append(len(jobs))
            last[worker] = len(jobs)
            jobs.append(job)
            text += answer
    sessions = len({job.session for job in jobs})
    return Load(jobs, sessions, len(jobs) - sessions, 0.0)


def journal(work: Load, rates: Speeds, setup: Setup, *, start: float = START) -> Iterator[object]:
    """What a router would have written of serving ``work``."""
    yield Opening(start, {"m": ["b"]})
    yield BackendChange(start, "b", up=True, slots=setup.slots, context=setup.context)
    for number, one in enumerate(serve(work, rates, setup)):
        job = one.job
        yield Record(
            id=f"r{number}",
            time=start + one.arrived,
            pool="m",
            backend="b",
            slot=one.slot,
            route="chat",
            status="ok",
            decision="unpinned" if setup.queue == "engine" else "affinity",
            chain=job.chain,
            length=job.length,
            after=job.after,
            after_length=job.after_length,
            session=job.session,
            prompt_tokens=job.prompt_tokens,
            cached_tokens=one.cached,
            host_tokens=one.host,
            predicted_tokens=one.cached,
            output_tokens=job.output_tokens,
            granted=one.granted - one.arrived,
            queued=one.granted - one.arrived,
            first_token=one.first_token - one.arrived,
            ended=one.ended - one.arrived,
            prefill_seconds=one.prefill,
            decode_seconds=one.ended - one.first_token,
            in_flight=one.in_flight,
        )
