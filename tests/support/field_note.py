"""The two windows of the field note that this project began with, rebuilt from its figures.

66 calls, 384,119 prompt tokens, 18 prompt tokens to each generated one. With four slots 1.2 % of the prompt
tokens were reused, with one slot 86.7 %; decoding ran at 22.5 and at 23.8 tokens/s; four at once took 118 s
against 123 s one by one. A hit rate does not say why, so its author blamed the prompts first: but each call
was its conversation's former one with a turn appended.
"""

from __future__ import annotations

from tests.support.journals import Agent, Maker, words

CALLS = 66
PROMPT_TOKENS = 384_119
OUTPUT_TOKENS = round(PROMPT_TOKENS / 18)
PREFILL_RATE = 480.0

_TURNS = (8, 8, 8, 8, 8, 8, 9, 9)
_ANSWER = OUTPUT_TOKENS // CALLS
_GROWTH = 460
_FIRST = 2500
_LAST = PROMPT_TOKENS - sum(
    turns * _FIRST + _GROWTH * turns * (turns + 1) // 2 + _ANSWER * turns * (turns - 1) // 2
    for turns in _TURNS
)
"""What the last call of all has more, so that the sum is the note's."""


class Calls:
    """The note's calls; whoever serves them decides in which order."""

    def __init__(self) -> None:
        self.agents = [
            Agent(f"agent-{number}", words(f"agent-{number} preamble", _FIRST))
            for number in range(len(_TURNS))
        ]

    def order(self, *, interleaved: bool) -> list[int]:
        """Which agent calls when: in turn, or one conversation after the other."""
        if not interleaved:
            return [number for number, turns in enumerate(_TURNS) for _ in range(turns)]
        rounds = [[n for n, turns in enumerate(_TURNS) if turns > turn] for turn in range(max(_TURNS))][::-1]
        return [number for one in rounds for number in one]

    def next(self, number: int) -> tuple[Agent, int]:
        """An agent with its next turn appended, and how long its prompt was before, in tokens."""
        agent = self.agents[number]
        before = len(agent.text) // 4 if agent.turns else 0
        last = number == len(_TURNS) - 1 and agent.turns == _TURNS[number] - 1
        agent.append(_GROWTH + (_LAST if last else 0))
        return agent, before


def four_slots() -> Maker:
    """Eight live conversations in turn over four slots: each is overwritten before it comes back."""
    maker, calls, reused = Maker(slots=4), Calls(), round(0.012 * PROMPT_TOKENS)
    for index, number in enumerate(calls.order(interleaved=True)):
        agent, _ = calls.next(number)
        tokens = len(agent.text) // 4
        cached = reused // CALLS + (index < reused % CALLS)
        prefill = (tokens - cached) / PREFILL_RATE
        maker.serve(agent, index % 4, cached, _ANSWER, prefill, _ANSWER / 22.5, session="")
    return maker


def one_slot() -> Maker:
    """The same calls, one conversation after the other, in one slot."""
    maker, calls = Maker(slots=1), Calls()
    for number in calls.order(interleaved=False):
        agent, before = calls.next(number)
        tokens, cached = len(agent.text) // 4, max(0, before - 1)
        prefill = (tokens - cached) / PREFILL_RATE
        maker.serve(agent, 0, cached, _ANSWER, prefill, _ANSWER / 23.8, session="")
    return maker


def several(count: int = 4, *, together_seconds: float = 118.0, apart_seconds: float = 123.0) -> list[Maker]:
    """The note's last test: ``count`` answers at once, and the same answers one by one."""
    together, apart = Maker(slots=count), Maker(slots=count)
    start = together.now
    for number in range(count):
        agent = Agent(f"asker-{number}", words(f"asker-{number}", 100))
        together.serve(agent, number, 0, 700, 0.0, together_seconds, at=start)
        agent = Agent(f"asker-{number}", words(f"asker-{number}", 100))
        apart.serve(agent, number, 0, 700, 0.0, apart_seconds / count)
    return [together, apart]
