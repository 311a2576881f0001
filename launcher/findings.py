"""What the figures of a window mean, in sentences. Pure.

A hit rate does not say why tokens were computed; the reasons do. So a finding names a reason only where the
journal has it, and says what would mend it and what would not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from warmslot.router.values import Loss

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .summary import Summary, Tokens

WORTH_SAYING: Final = 0.05
"""Share of the computed tokens from which on a reason is worth a sentence."""

_MEANING: Final[dict[Loss, str]] = {
    Loss.NEW: "nobody had sent them before: no cache could have helped",
    Loss.EVICTED: (
        "a slot had held them and was overwritten before they were asked for again: more slots (or fewer "
        "live conversations) mend this; the prompts are not at fault"
    ),
    Loss.BUSY: (
        "they were in a slot that was at work, or kept for its own conversation: computed once in a second "
        "slot they are there as well; the prompts are not at fault"
    ),
    Loss.DIVERGED: (
        "the conversation's own earlier part had changed: no number of slots mends this, the client does; "
        "'warmslot explain --session' names the message and the kind of change"
    ),
    Loss.RESTARTED: "the backend had restarted and lost what it held",
    Loss.ENGINE: (
        "they were in the slot, yet the engine computed them again, as it does for models with sliding "
        "windows or recurrent layers when a prompt changes before its end"
    ),
}

SHORT: Final[dict[str, str]] = {
    "new": "never sent before",
    "evicted": "overwritten; more slots mend it",
    "busy": "in a slot at work, or kept for its conversation",
    "diverged": "the conversation's past changed; the client mends it",
    "restarted": "lost with a restart",
    "engine": "held, but not reused by the engine",
    "untold": "the source does not tell why",
}


def reasons(tokens: Tokens) -> dict[str, int]:
    """Losses by reason, largest first, and as ``untold`` what no reason is known for."""
    known = dict(sorted(tokens.losses.items(), key=lambda item: -item[1]))
    untold = tokens.processed - sum(known.values())
    return {**known, "untold": untold} if untold > 0 else known


def findings(summary: Summary) -> list[str]:
    """What to take from the figures, most important first."""
    if not summary.total.requests:
        return ["No requests in this window."]
    return [*_reuse(summary), *_why(summary), *_speed(summary), *_trust(summary)]


def _reuse(summary: Summary) -> Iterator[str]:
    total = summary.total
    if total.reuse is None:
        yield "No answer told how many prompt tokens were reused."
        return
    text = f"{total.reuse:.1%} of {total.prompt:,} prompt tokens were reused"
    if summary.avoided_seconds:
        text += f", which avoided {summary.avoided_seconds:,.1f} s of prefill"
    if summary.prompt_per_output:
        text += f"; {summary.prompt_per_output:.1f} prompt tokens to each generated one"
    yield text + "."


def _why(summary: Summary) -> Iterator[str]:
    total = summary.total
    if not total.processed:
        return
    for reason, tokens in reasons(total).items():
        share = tokens / total.processed
        if share < WORTH_SAYING:
            continue
        if reason == "untold":
            yield (
                f"For {share:.0%} of the computed tokens nobody told why: an engine's log alone cannot. "
                "Do not blame the prompts for them; route through warmslot to know."
            )
        elif reason in set(Loss):
            yield f"{share:.0%} of the computed tokens are {reason}: {_MEANING[Loss(reason)]}."


def _speed(summary: Summary) -> Iterator[str]:
    work = summary.prefill_seconds + summary.decode_seconds
    if work:
        yield (
            f"Engines spent {summary.prefill_seconds:,.1f} s on prompts and {summary.decode_seconds:,.1f} s "
            f"on answers ({summary.prefill_seconds / work:.0%} prefill)."
        )
    alone = next((level for level in summary.decode if level.level == "1"), None)
    best = max(summary.decode, key=lambda level: level.rate, default=None)
    if alone and best and best is not alone and alone.rate:
        ratio = best.rate / alone.rate
        yield (
            f"{best.level} decoding at once give {best.rate:.1f} tokens/s together, "
            f"one alone {alone.rate:.1f}: "
            + (f"sharing gains {ratio - 1:.0%}." if ratio > 1.0 else "sharing gains nothing.")
        )


def _trust(summary: Summary) -> Iterator[str]:
    if summary.calibration is not None and not 0.8 <= summary.calibration <= 1.25:  # noqa: PLR2004
        yield (
            f"Observed reuse is {summary.calibration:.2f} of the predicted: the router's picture of the "
            "slots is off, as when others use the engine too."
        )
    if summary.guessed:
        yield (
            f"Of {summary.guessed} requests the conversation that they continue was guessed from lengths: an "
            "engine's log does not show it. Take their reasons as likely, not as known."
        )
    if summary.truth_missing:
        yield f"{summary.truth_missing} answers told no timings; nothing is counted for them."
