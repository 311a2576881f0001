"""What requests took that a backend served at the same time. Pure.

The engine's timings of a request hold the work of all that were served beside it: a prefill the batches of
other prompts, an answer the time in which it stood still for them. Added up as they are, they come to more
than the time that passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from warmslot.router.rates import passes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmslot.router.records import Record


class Span(NamedTuple):
    """When a backend computed a request's prompt and when it decoded; Unix times."""

    backend: str
    prefill: float
    decoding: float
    end: float
    seconds: float
    """Of the prefill as the engine told; by its times it may be less, as it cannot begin before its grant."""
    slot: int

    @classmethod
    def of(cls, record: Record) -> Span:
        """As the record tells."""
        end = record.time + record.ended
        decoding = end - record.decode_seconds
        begin = min(decoding, max(decoding - record.prefill_seconds, record.time + record.granted))
        return cls(record.backend, begin, decoding, end, record.prefill_seconds, record.slot)


def prefill_seconds(spans: Sequence[Span], tokens: Sequence[int]) -> list[float]:
    """Seconds of each prefill of so many computed tokens, as if it had been computed alone.

    Those that overlap are taken together: the time from the first beginning to the last end is shared out by
    their tokens.
    """
    found = [0.0] * len(spans)
    for crowd in _crowds(spans):
        if len(crowd) == 1:
            found[crowd[0]] = spans[crowd[0]].seconds
            continue
        whole = sum(tokens[index] for index in crowd)
        seconds = max(spans[index].decoding for index in crowd) - min(spans[index].prefill for index in crowd)
        for index in crowd:
            found[index] = seconds * tokens[index] / whole if whole else 0.0
    return found


def _crowds(spans: Sequence[Span]) -> list[list[int]]:
    """Prefills that overlap on one backend, taken together; most are alone."""
    crowds: list[list[int]] = []
    where, until = "", 0.0
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        backend, begin, end, *_ = spans[index]
        if crowds and backend == where and begin < until:
            crowds[-1].append(index)
            until = max(until, end)
        else:
            crowds.append([index])
            where, until = backend, end
    return crowds


class Together(NamedTuple):
    """What a decoding step is made of: answers, and the passes that the engine computes it in."""

    answers: int
    passes: int


def undisturbed(spans: Sequence[Span]) -> list[dict[Together, float]]:
    """For each span, the seconds in which so many decoded on its backend and no prompt was computed."""
    spent: list[dict[Together, float]] = [{} for _ in spans]
    for backend in {span.backend for span in spans}:
        events: list[tuple[float, int, int]] = []
        for index, span in enumerate(spans):
            if span.backend == backend:
                # -1 - index: its prefill; index: its decoding. Ends come before beginnings.
                begin, decoding, end = span.prefill, span.decoding, span.end
                events += [(begin, 1, -1 - index), (decoding, 0, -1 - index)] * (decoding > begin)
                events += [(decoding, 1, index), (end, 0, index)] * (end > decoding)
        at, going = 0.0, set[int]()
        for now, begins, which in sorted(events):
            if now > at and going and min(going) >= 0:
                step = Together(len(going), passes_of(spans[one].slot for one in going))
                for one in going:
                    spent[one][step] = spent[one].get(step, 0.0) + now - at
            at = now
            if begins:
                going.add(which)
            else:
                going.discard(which)
    return spent
