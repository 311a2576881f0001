"""Journals made of figures: records whose prompts share beginnings as told, on a clock that only we move."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warmslot.router.records import BackendChange, Encoder, Opening, Record
from warmslot.router.values import Prompt, extend_chain

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

BYTES_PER_TOKEN = 4
START = 1_700_000_000.0


def words(name: str, tokens: int) -> bytes:
    """Text of exactly ``tokens`` tokens (four bytes each); it differs from that of any other name at once."""
    seed = f"{name} "
    unit = seed + "".join(f"{(number * 7919) % 9973:04d} " for number in range(64))
    return (unit * (tokens * BYTES_PER_TOKEN // len(unit) + 1)).encode()[: tokens * BYTES_PER_TOKEN]


@dataclass
class Agent:
    """A conversation that grows."""

    name: str
    text: bytes
    turns: int = 0

    def append(self, tokens: int) -> None:
        """The next turn's own part of the prompt."""
        self.turns += 1
        self.text += words(f"{self.name} turn {self.turns}", tokens)


@dataclass
class Maker:
    """Writes requests one after the other, or at once where ``at`` is given."""

    slots: int = 4
    context: int = 32768
    now: float = START
    entries: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entries += [
            Opening(self.now, {"m": ["b"]}),
            BackendChange(self.now, "b", up=True, slots=self.slots, context=self.context),
        ]

    def serve(  # noqa: PLR0917  # read as a table: agent, slot, reused, generated, two times
        self, agent: Agent, slot: int, cached: int, output: int, prefill: float, decode: float, **more: Any
    ) -> Record:
        """One request of the agent as its text is now; the answer becomes part of it."""
        answer = words(f"{agent.name} answer {agent.turns}", output)
        prompt = Prompt.of(agent.text)
        wait = more.pop("queued", 0.0)
        record = Record(
            id=f"r{len(self.entries)}",
            time=more.pop("at", self.now),
            pool="m",
            backend="b",
            slot=slot,
            route="chat",
            status="ok",
            decision=more.pop("decision", "affinity"),
            chain=prompt.chain,
            length=prompt.length,
            after=extend_chain(prompt.chain, agent.text + answer),
            after_length=prompt.length + len(answer),
            session=more.pop("session", agent.name),
            prompt_tokens=len(agent.text) // BYTES_PER_TOKEN,
            cached_tokens=cached,
            predicted_tokens=more.pop("predicted", cached),
            output_tokens=output,
            granted=wait,
            queued=wait,
            first_token=wait + prefill,
            ended=wait + prefill + decode,
            prefill_seconds=prefill,
            decode_seconds=decode,
            **more,
        )
        agent.text += answer
        self.now = max(self.now, record.time + record.ended)
        self.entries.append(record)
        return record


def write(path: Path, entries: Iterable[Any]) -> Path:
    """A journal of these entries."""
    encoder = Encoder()
    with path.open("wb") as stream:
        for entry in entries:
            if isinstance(entry, Opening):
                stream.write(encoder.opening(entry))
            elif isinstance(entry, BackendChange):
                stream.write(encoder.change(entry))
            else:
                stream.write(encoder.request(entry))
    return path
