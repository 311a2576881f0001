"""Differences between answers, told apart as near-ties and faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from warmslot.launcher.check import (
    Answer,
    Asker,
    CheckError,
    Difference,
    Finding,
    Result,
    as_json,
    check_url,
    conclusions,
    first_difference,
    measure,
    prompts,
)

from tests.fakes.llama_server import FakeLlamaServer

if TYPE_CHECKING:
    from collections.abc import Sequence


class Scripted(Asker):
    """An engine that says what it is told to say, and counts steps."""

    def __init__(self, alone: list[list[int]], together: list[list[int]], likely: dict[int, float]) -> None:
        self._scripts = {False: alone, True: together}
        self._likely = likely
        self.together = False
        self._steps = 10.0
        self._busy = 25.0

    async def answer(self, prompt: str, slot: int) -> Answer:
        del prompt
        tokens = self._scripts[self.together][slot]
        self._steps += len(tokens) / (len(self._scripts[True]) if self.together else 1)
        self._busy += len(tokens)
        return Answer(tuple(tokens), 0.1 * len(tokens) * (1.5 if self.together else 1.0))

    async def probabilities(
        self, prompt: str, before: Sequence[int], of: Sequence[int]
    ) -> list[float | None]:
        del prompt, before
        return [self._likely.get(token) for token in of]

    async def steps(self) -> tuple[float, float] | None:
        return self._steps, self._busy


async def compared(together: list[list[int]], likely: dict[int, float] | None = None) -> Result:
    asker = Scripted([[1, 2, 3, 4], [5, 6, 7, 8]], together, likely or {})
    result = Result(2)
    first, reference = await measure(asker, "in turn", ["a", "b"], None, together=False)
    asker.together = True
    second, _ = await measure(asker, "at once", ["a", "b"], reference, together=True)
    result.findings.extend([first, second])
    return result


async def test_equal_answers_over_shared_steps_are_good() -> None:
    result = await compared([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert result.good
    assert result.shared
    assert [one.busy_slots for one in result.findings] == [1.0, 2.0]
    assert "All answers are equal, token for token." in conclusions(result)
    assert "2 at once give 1.33 times the tokens per second" in conclusions(result)[1]


async def test_a_near_tie_is_shown_and_is_no_fault() -> None:
    result = await compared([[1, 2, 3, 4], [5, 6, 9, 9]], {7: 0.41, 9: 0.40})
    (difference,) = result.findings[1].differences
    assert difference == Difference(1, 2, 7, 9, 0.41, 0.40)
    assert (result.findings[1].faults, result.good) == (0, True)
    assert "near-ties only" in conclusions(result)[0]


@pytest.mark.parametrize("likely", [{7: 0.9, 9: 0.01}, {7: 0.9, 9: 0.0}, {}])
async def test_a_token_that_was_unlikely_or_of_which_nothing_is_known_is_a_fault(
    likely: dict[int, float],
) -> None:
    result = await compared([[1, 2, 3, 4], [5, 6, 9, 9]], likely)
    assert result.findings[1].faults == 1
    assert not result.good
    assert "do not run this engine" in conclusions(result)[0]


def test_steps_that_were_not_shared_are_a_failure() -> None:
    alone = Finding("in turn", 4, 40, [], 1.0, 4.0, 0.1)
    apart = Finding("at once", 4, 40, [], 1.2, 4.0, 0.1)
    result = Result(4, [alone, apart])
    assert (result.shared, result.good) == (False, False)
    assert any("NOT shared" in line for line in conclusions(result))
    assert Result(4, [alone, Finding("at once", 4, 40, [], None, 4.0, 0.1)]).good


def test_the_first_difference_is_found_as_far_as_both_go() -> None:
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) is None


def test_prompts_differ_from_their_first_words_on() -> None:
    found = prompts(16)
    assert len({text[:20] for text in found}) == 16


async def test_an_engine_without_what_is_needed_is_one_clear_line() -> None:
    said: list[str] = []
    with pytest.raises(CheckError, match="gave no answer"):
        await check_url("http://127.0.0.1:9", 2, 4, said.append)
    async with FakeLlamaServer(slots=2) as fake:
        with pytest.raises(CheckError, match="gives no tokens"):
            await check_url(fake.base_url, 2, 4, said.append)


def test_json_has_every_figure() -> None:
    data: dict[str, Any] = as_json(
        Result(2, [Finding("at once", 2, 8, [Difference(0, 1, 2, 3, 0.5, 0.4)], 1.9, 1.0, 0.2, 5, 4)])
    )
    assert data["findings"][0]["differences"][0]["near_tie"] is False
    assert (data["findings"][0]["drafted"], data["findings"][0]["accepted"]) == (5, 4)
