"""Why prompt tokens were computed again, or for the first time. Pure."""

from __future__ import annotations

from .values import Loss


def split(
    processed: int,
    cached: int,
    *,
    predicted: int,
    resident: int,
    gone: int = 0,
    gone_reason: Loss = Loss.EVICTED,
    session: int = 0,
) -> dict[Loss, int]:
    """Divide ``processed`` tokens by reason; the parts add up to it exactly.

    All lengths are tokens from the start of the prompt. ``cached``: what the engine reused. ``predicted``:
    what the chosen slot held of it. ``resident``: the most that any slot held when the request was placed.
    ``gone``: the most that any slot held some time ago, and why it does not any more. ``session``: how long
    the session's own last context was, as far as this prompt reaches.
    """
    losses: dict[Loss, int] = {}
    at, end = cached, cached + processed
    if predicted and predicted >= end - 1:  # all that can be: the last is always computed
        predicted = end
    for reach, reason in (
        (predicted, Loss.ENGINE),
        (resident, Loss.BUSY),
        (gone, gone_reason),
        (session, Loss.DIVERGED),
        (end, Loss.NEW),
    ):
        stop = min(max(reach, at), end)
        if stop > at:
            losses[reason] = losses.get(reason, 0) + stop - at
        at = stop
    return losses
