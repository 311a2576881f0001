"""Ways to order the queue, compared on recorded traces: the router's own beside the two usual ones.

``python -m tests.bench.queue_orders TRACES... [--slots 4,8] [--max-wait auto,120,255,360]``. Placement and
linger are the router's in all of them; only who goes next differs. Whoever has waited for ``max_wait`` goes
first in the usual ones, oldest first, as engines and gateways do it:

- ``shortest``: the fewest seconds of prefill on the best slot that is idle;
- ``hrrn``: the highest response ratio, waiting plus service over service;
- ``arrival``: in order of arrival, the placement alone;
- ``warmslot``: ``reuse``, as it is served.

The usual ones take ``auto`` for no bound at all. All run the simulator of ``warmslot simulate``.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, TypeAlias
from unittest.mock import patch

import typer
from rich.console import Console
from rich.table import Table
from warmslot.launcher.simulate import Setup, simulate_one, summarise
from warmslot.launcher.traces import load
from warmslot.router import scheduler
from warmslot.router.scheduler import CoreSettings, Pick, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from warmslot.router.placement import Choice

    Order: TypeAlias = Callable[[Waiting, Choice, float], float]


def shortest(item: Waiting, choice: Choice, now: float) -> float:
    """Seconds of prefill."""
    del item, now
    return choice.prefill_seconds


def hrrn(item: Waiting, choice: Choice, now: float) -> float:
    """The response ratio, negated: the highest goes first."""
    service = choice.prefill_seconds + item.decode_seconds
    return -(now - item.since + service) / max(service, 1e-9)


@contextmanager
def ordered_by(order: Order) -> Iterator[None]:
    """The router with another order of its queue."""

    def pick(
        waiting: Sequence[Waiting],
        settings: CoreSettings,
        now: float,
        *,
        price: Callable[[Waiting, bool], Choice | None],
        linger: Callable[[Waiting, Choice], float],
        **_: object,
    ) -> Pick:
        bound = math.inf if settings.max_wait is None else settings.max_wait
        late = sorted((w for w in waiting if now - w.since >= bound), key=lambda w: w.order)
        for item in late:
            item.choice = price(item, False)
            if item.choice is not None:
                return Pick(start=item)
        wakes = [w.since + bound for w in waiting if now < w.since + bound < math.inf]
        able = []
        for item in waiting:
            item.choice = price(item, True)
            if item.choice is not None and not item.choice.hold:
                able.append((order(item, item.choice, now), item.order, item, item.choice))
        for _, _, item, choice in sorted(able, key=lambda one: one[:2]):
            wait = linger(item, choice)
            if wait <= 0:
                return Pick(start=item)
            wakes.append(now + wait)
        return Pick(wake=min(wakes, default=None))

    with patch.object(scheduler, "pick", pick):
        yield


ORDERS: dict[str, Order | None] = {"arrival": None, "shortest": shortest, "hrrn": hrrn, "warmslot": None}


def main(
    traces: Annotated[list[Path], typer.Argument(help="Trace files, or folders of text sessions.")],
    slots: Annotated[str, typer.Option(help="Slot counts, separated by commas.")] = "4,8",
    max_wait: Annotated[str, typer.Option(help="Bounds in seconds, or auto.")] = "auto,120,255,360",
    live: Annotated[int, typer.Option(help="Sessions open at once.")] = 12,
) -> None:
    """Compare the orders in which a queue can be served, one in flight, at 500 and 24 tokens/s."""
    table = Table(
        "trace", "slots", "order", "bound", "reuse", "makespan", "longest wait", "mean", "p50", "p99"
    )
    for trace in [load(path, "time") for path in traces]:
        for count in map(int, slots.split(",")):
            for name, order in ORDERS.items():
                for text in max_wait.split(",") if name != "arrival" else ["auto"]:
                    bound = None if text == "auto" else float(text)
                    policy = "fifo" if name == "arrival" else "reuse"
                    setup = Setup(policy, count, live, max_wait=bound)
                    if order is None:
                        served = simulate_one(trace, setup)
                    else:
                        with ordered_by(order):
                            served = simulate_one(trace, setup)
                    row = summarise(trace, setup, served, 1.0)
                    unbounded = bound is None and name != "warmslot"
                    table.add_row(
                        *(row.trace, str(count), name, "none" if unbounded else text),
                        *(f"{row.reuse:.3f}", f"{row.makespan_s:,.0f} s", f"{row.longest_wait_s:,.0f} s"),
                        *(f"{row.ttft_mean_s:.1f} s", f"{row.ttft_p50_s:.1f} s", f"{row.ttft_p99_s:.1f} s"),
                    )
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
