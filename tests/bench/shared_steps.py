"""What a decoding step costs by which slots decode in it, on a real engine.

``python -m tests.bench.shared_steps`` lets one engine with a cache for each slot (``--no-kv-unified``) and
then one with a common cache (``--kv-unified``) write answers on several sets of slots, in a new order in each
round. The figure is milliseconds per token of an answer, the median over the rounds. ``--json`` keeps them.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from statistics import median
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table
from warmslot.launcher.bare import bare_engine
from warmslot.launcher.bench import machine
from warmslot.launcher.engine import Engine, find_engine
from warmslot.launcher.model import find_model
from warmslot.router.rates import passes_of

SLOTS = 8
SETS = (
    *((0,), (0, 1), (0, 4), (0, 1, 2, 3), (0, 1, 4, 5), (0, 2, 4, 6)),
    *((0, 1, 2, 3, 4, 5), (0, 1, 3, 4, 6, 7), tuple(range(SLOTS))),
)
LAYOUTS = ("--no-kv-unified", "--kv-unified")


async def measure(
    engine: Engine, model: Path, flags: tuple[str, ...], tokens: int, rounds: int
) -> dict[tuple[int, ...], float]:
    """Milliseconds per token on each set of slots."""
    sized = (
        "-np",
        str(SLOTS),
        "-c",
        str(SLOTS * (256 + tokens)),
        "--no-cache-idle-slots",
        "--cache-ram",
        "0",
    )
    found: dict[tuple[int, ...], list[float]] = {slots: [] for slots in SETS}
    turns = random.Random(1)  # noqa: S311  # an order, not a secret
    async with (
        bare_engine(engine, model, *sized, *flags) as url,
        httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client,  # noqa: S113
    ):
        await _answers(client, tuple(range(SLOTS)), tokens)
        for _ in range(rounds):
            for slots in turns.sample(SETS, len(SETS)):
                found[slots].append(await _answers(client, slots, tokens))
    return {slots: median(some) for slots, some in found.items()}


async def _answers(client: httpx.AsyncClient, slots: tuple[int, ...], tokens: int) -> float:
    async def one(slot: int) -> float:
        body = {
            "prompt": f"Story {slot} of the river and the town, told again:",
            "n_predict": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "id_slot": slot,
        }
        answer = await client.post("/completion", json=body)
        answer.raise_for_status()
        timings = answer.json()["timings"]
        return float(timings["predicted_ms"]) / int(timings["predicted_n"])

    each = await asyncio.gather(*map(one, slots))
    return sum(each) / len(each)


def main(  # noqa: PLR0917 - typer passes them by name
    model: Annotated[str, typer.Option(help="A GGUF file, or demo.")] = "demo",
    engine: Annotated[str | None, typer.Option(help="Path of a llama-server, or embedded.")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Length of each answer.")] = 96,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    flags: Annotated[str, typer.Option(help="Further flags of the engine, as one string.")] = "-t 2",
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the results go.")] = None,
) -> None:
    """Measure decoding steps by the slots that share them."""
    found, file = find_engine(engine), find_model(model)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"{found.describe()}; {file.name}; {machine()}")
    measured = [
        asyncio.run(measure(found, file, (layout, *flags.split()), tokens, rounds)) for layout in LAYOUTS
    ]
    table = Table("slots", "runs of slots", *(f"{layout}, ms/token" for layout in LAYOUTS))
    rows = []
    for slots in SETS:
        each = [some[slots] for some in measured]
        table.add_row(" ".join(map(str, slots)), str(passes_of(slots)), *(f"{value:.1f}" for value in each))
        rows.append(
            {"slots": slots, "runs": passes_of(slots)}
            | {layout: round(value, 2) for layout, value in zip(LAYOUTS, each, strict=True)}
        )
    console.print(table)
    if json_file is not None:
        document = {
            "machine": machine(),
            "engine": found.describe(),
            "model": file.name,
            "milliseconds_per_token": rows,
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
