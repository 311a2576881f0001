"""Text in the shape of a load: prompts that share exactly what the recorded ones shared. Pure.

A journal has hashes instead of text. Each block of a prompt becomes a few common words that follow from its
hash, so equal blocks become equal text, and what has never been equal never is. Where a prompt continues an
answer, it continues the answer that was really given, as the client of a real conversation does.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from warmslot.router.trie import common_blocks
from warmslot.router.values import BLOCK, Prompt, extend_chain

from .load import Job, Load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .traces import Trace

_LISTED: Final = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name
"""
WORDS: Final = tuple(_LISTED.split())
"""Each is one token in the vocabularies of common models, with the space before it."""

_BYTES_PER_TOKEN: Final = 4.0


class Shape:
    """The texts of one serving of a load. ``salt`` makes those of two servings share nothing.

    ``texts`` has the real text of jobs, by their number, where there is any; blocks are cut from it.
    """

    def __init__(self, load: Load, salt: str = "", texts: Mapping[int, bytes] | None = None) -> None:
        self._load, self._salt, self._texts = load, salt, texts or {}
        length = sum(job.length for job in load.jobs)
        tokens = sum(job.prompt_tokens for job in load.jobs)
        per_token = length / tokens if length and tokens else _BYTES_PER_TOKEN
        self._words = max(1, round(BLOCK / per_token))
        self._words_per_byte = 1 / per_token
        self._after: dict[int, list[str]] = {}
        self._known: dict[int, str] = {}

    def prompt(self, number: int) -> str:
        """The prompt of a job, after those that it continues have been answered."""
        job = self._load.jobs[number]
        pieces = self._begun(job)
        data = self._texts.get(number)
        for index in range(len(pieces), len(job.chain)):
            pieces.append(
                self._block(job.chain[index])
                if data is None
                else data[index * BLOCK : (index + 1) * BLOCK].decode("latin-1")
            )
        self._after[number] = pieces
        tail = self._tail(job, number) if data is None else data[len(job.chain) * BLOCK :].decode("latin-1")
        return f"{self._salt}{''.join(pieces)}{tail}"

    def answered(self, number: int, text: str) -> None:
        """A job's answer; later prompts that continue it contain it."""
        job, pieces = self._load.jobs[number], self._after[number]
        data = self._texts.get(number)
        rest = (
            self._tail(job, number) if data is None else data[len(job.chain) * BLOCK :].decode("latin-1")
        ) + text
        blocks = len(job.after) - len(job.chain)
        if blocks <= 0:
            # Too short for a block of its own: it goes with the last one.
            if pieces:
                pieces[-1] += rest
            return
        step = -(-len(rest) // blocks)
        pieces += [rest[at * step : (at + 1) * step] for at in range(blocks)]

    def _begun(self, job: Job) -> list[str]:
        """The pieces that the job shares with the job that it follows, its answer included."""
        if job.before < 0 or job.before not in self._after:
            return []
        before = self._load.jobs[job.before]
        return self._after[job.before][: common_blocks(before.after, job.chain)]

    def _block(self, value: int) -> str:
        known = self._known.get(value)
        if known is None:
            random = Random(value)  # noqa: S311  # text, not secrets
            known = self._known[value] = "".join(f" {random.choice(WORDS)}" for _ in range(self._words))
        return known

    def _tail(self, job: Job, number: int) -> str:
        random = Random(f"tail {number}")  # noqa: S311  # text, not secrets
        words = max(1, round((job.length % BLOCK) * self._words_per_byte))
        return "".join(f" {random.choice(WORDS)}" for _ in range(words))


def described(
    *,
    agents: int,
    turns: int,
    first: int,
    growth: int,
    output: int,
    conversations: int | None = None,
    seed: int = 1,
) -> Load:
    """A load from a description: agents that each work through one conversation after the other.

    A conversation begins with ``first`` tokens, of which a quarter is shared by all; each of its ``turns``
    calls adds about ``growth`` tokens and is answered with ``output`` tokens.
    """
    random = Random(f"described {seed}")  # noqa: S311  # a seeded workload
    jobs: list[Job] = []
    last = [-1] * agents
    count = agents * 3 if conversations is None else conversations
    unit = int(_BYTES_PER_TOKEN)
    shared = random.randbytes(first // 4 * unit)
    for number in range(count):
        text = shared + random.randbytes((first - first // 4) * unit)
        for turn in range(turns):
            text += random.randbytes(
                random.randint(growth // 2, growth + growth // 2) * unit if turn else unit
            )
            prompt = Prompt.of(text)
            text += random.randbytes(output * unit)
            worker = number % agents
            job = Job(
                session=f"conversation {number}",
                chain=prompt.chain,
                length=prompt.length,
                after=extend_chain(prompt.chain, text),
                after_length=len(text),
                root=prompt.root,
                prompt_tokens=prompt.length // unit,
                output_tokens=output,
                keeps_prefix=True,
                recorded_cached=0,
                counted=True,
                delay=0.02 * worker if last[worker] < 0 else random.uniform(0.02, 0.2),
                after_end=last[worker] >= 0,
                before=last[worker],
            )
            if last[worker] >= 0:
                jobs[last[worker]].followers.append(len(jobs))
            last[worker] = len(jobs)
            jobs.append(job)
    return Load(jobs, count, len(jobs) - count, 0.0)


def of_trace(trace: Trace, live: int, calls: int | None = None) -> tuple[Load, dict[int, bytes]]:
    """A trace as a load of ``live`` conversations at once, and the texts of its prompts where it has them."""
    jobs: list[Job] = []
    texts: dict[int, bytes] = {}
    last = [-1] * live
    sessions: Sequence[int] = range(len(trace.sessions))
    for number in sessions:
        if calls is not None and len(jobs) >= calls:
            break
        worker = number % live
        for call in trace.sessions[number]:
            prompt = call.prompt
            after, after_length = prompt.chain, prompt.length
            if prompt.data is not None:
                texts[len(jobs)] = prompt.data
                after = extend_chain(prompt.chain, prompt.data + call.generated)
                after_length += len(call.generated)
            job = Job(
                session=call.session,
                chain=prompt.chain,
                length=prompt.length,
                after=after,
                after_length=after_length,
                root=prompt.root,
                prompt_tokens=max(1, prompt.length // int(_BYTES_PER_TOKEN)),
                output_tokens=max(1, call.output_tokens),
                keeps_prefix=True,
                recorded_cached=0,
                counted=True,
                delay=0.0,
                after_end=last[worker] >= 0,
                before=last[worker],
            )
            if last[worker] >= 0:
                jobs[last[worker]].followers.append(len(jobs))
            last[worker] = len(jobs)
            jobs.append(job)
    count = len({job.session for job in jobs})
    return Load(jobs, count, len(jobs) - count, 0.0), texts
