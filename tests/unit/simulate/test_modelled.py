"""The steps of the modelled engine, as llama-server makes them."""

from __future__ import annotations

import pytest
from warmslot.launcher.modelled import Running, Work


def running(batch: int = 2048) -> Running:
    """Decodes 10 tokens/s alone, and 5 more with each further answer; a step takes its passes in turn."""
    return Running(lambda busy, passes: (10.0 + 5.0 * (busy - 1)) / passes, batch)


def prompt(slot: int, tokens: int, decode: float = 4.0, setup: float = 0.0) -> Work:
    """A prompt at 100 tokens/s."""
    return Work(slot, tokens / 100, tokens, decode, setup)


def events(engine: Running, upto: int) -> list[tuple[float, list[str], list[str]]]:
    """The next moments with a first token or an end: when, whose, and whose."""
    found: list[tuple[float, list[str], list[str]]] = []
    now = 0.0
    while len(found) < upto:
        left = engine.until_next()
        assert left is not None
        now += left
        first, over = engine.advance(left)
        for name in over:
            del engine.work[name]
        if first or over:
            found.append((pytest.approx(now), first, over))
    return found


def test_prompts_that_wait_together_are_computed_in_one_batch() -> None:
    engine = running()
    engine.work |= {"b": prompt(1, 300), "a": prompt(0, 100)}
    assert events(engine, 1) == [(4.0, ["b", "a"], [])]


def test_what_does_not_fit_into_a_batch_follows_in_the_next_in_slot_order() -> None:
    engine = running(batch=500)
    engine.work |= {"b": prompt(1, 300), "a": prompt(0, 400)}
    assert events(engine, 2) == [(5.0, ["a"], []), (7.0, ["b"], [])]


def test_what_comes_while_a_batch_is_computed_waits_for_the_next() -> None:
    engine = running()
    engine.work |= {"a": prompt(0, 300), "late": prompt(1, 100, setup=0.5)}
    assert events(engine, 2) == [(3.0, ["a"], []), (4.0, ["late"], [])]


def test_an_answer_gets_one_token_for_each_batch_beside_it() -> None:
    engine = running()
    engine.work |= {"a": prompt(0, 100, decode=4.0)}
    assert events(engine, 1) == [(1.0, ["a"], [])]
    engine.work |= {"b": prompt(1, 300, decode=1.0)}
    # One token by the batch, then both decode at 7.5 a second each; b has one to go, a three.
    assert events(engine, 3) == [
        (3.0, ["b"], []),
        (3.0 + 1 / 7.5, [], ["b"]),
        (3.0 + 1 / 7.5 + 0.2, [], ["a"]),
    ]


def test_a_token_that_was_begun_is_finished_before_a_prompt_is_computed() -> None:
    engine = running()
    engine.work |= {"a": prompt(0, 100, decode=2.0), "b": prompt(1, 100, decode=2.0)}
    assert events(engine, 1) == [(2.0, ["a", "b"], [])]
    engine.work |= {"late": prompt(2, 500, setup=0.15)}
    # Tokens come every 1/7.5 s: the second is under way when the late one comes, and ends both.
    assert events(engine, 2) == [(2 / 7.5, [], ["a", "b"]), (2 / 7.5 + 5.0, ["late"], [])]


@pytest.mark.parametrize(("slots", "seconds"), [((0, 1, 2), 0.6), ((0, 1, 3), 1.2), ((4, 0, 2), 1.8)])
def test_slots_that_do_not_follow_one_another_take_passes_of_their_own(
    slots: tuple[int, ...], seconds: float
) -> None:
    engine = running()
    engine.work |= {str(slot): Work(slot, 0.0, 0, 4.0) for slot in slots}
    assert engine.until_next() == pytest.approx(seconds)
