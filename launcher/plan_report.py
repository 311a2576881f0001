"""What ``warmslot plan`` prints."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .host_memory import MIB
from .plan import need

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .memory import Model
    from .plan import Advice, Cell

_GIB = 1 << 30


def show(
    model: Model, rows: Sequence[Sequence[Cell]], memory: int, where: str, advice: Advice | None
) -> None:
    """Print the model, the table and the advice."""
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, emoji=False)
    console.print(Text(f"{model.name} ({model.architecture}): weights {_size(model.weights)}"))
    kinds = [f"{model.token_bytes():,.0f} bytes of KV cache per token (f16)"]
    if model.window:
        windowed = sum(layer.window for layer in model.layers)
        kinds.append(f"{windowed} of {len(model.layers)} layers see a window of {model.window} tokens")
    if model.recurrent:
        kinds.append(f"{_size(model.state_bytes())} of recurrent state per slot")
    console.print(Text("; ".join(kinds)))
    console.print(Text(f"memory: {_size(memory)} ({where})\n"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("slots", justify="right")
    for cell in rows[0]:
        table.add_column(f"context {cell.context:,}", justify="right")
    for row in rows:
        sizes = [Text(f"{_size(cell.bytes)} {'fits' if cell.fits else '–   '}") for cell in row]
        table.add_row(str(row[0].slots), *sizes)
    console.print(table)
    console.print()
    if advice is None:
        console.print(Text("The model does not fit into this memory."))
        return
    for line in _advice_lines(model, advice):
        console.print(Text(line))


def _advice_lines(model: Model, advice: Advice) -> list[str]:
    lines = [f"Not recommended, because the engine failed with it: {one}" for one in advice.refused]
    tried = advice.tried
    if tried is None:
        lines.append("Not tried: no engine was found.")
    elif tried.failure:
        lines.append(f"The engine does not run with these settings: {tried.failure}")
    else:
        planned = (need(model, advice.slots, advice.context, advice.types) - model.weights) / MIB
        parts = ", ".join(f"{kind} {size:,.0f}" for kind, size in tried.allocated.sizes.items())
        lines.append(
            f"Tried on this engine: KV cache and state {tried.allocated.cache:,.1f} MiB "
            f"(planned {planned:,.1f}); MiB by buffer: {parts}."
        )
    args = (
        ""
        if advice.types == ("f16", "f16")
        else f"\n  args: [-ctk, {advice.types[0]}, -ctv, {advice.types[1]}]"
    )
    lines.append(
        f"Recommended:\n  slots: {advice.slots}\n  context: {advice.context}"
        f"\n  cache_ram: {advice.cache_ram}{args}"
    )
    return lines


def as_json(
    model: Model, rows: Sequence[Sequence[Cell]], memory: int, advice: Advice | None
) -> dict[str, Any]:
    """The same as plain data; sizes in bytes, but for what says MiB."""
    return {
        "model": model.name,
        "architecture": model.architecture,
        "weights": model.weights,
        "bytes_per_token": model.token_bytes(),
        "state_per_slot": model.state_bytes(),
        "memory": memory,
        "table": [
            {"slots": cell.slots, "context": cell.context, "bytes": cell.bytes, "fits": cell.fits}
            for row in rows
            for cell in row
        ],
        "advice": None
        if advice is None
        else {
            "slots": advice.slots,
            "context": advice.context,
            "cache_type_k": advice.types[0],
            "cache_type_v": advice.types[1],
            "cache_ram": advice.cache_ram,
            "refused": list(advice.refused),
            "tried_mib": None if advice.tried is None else advice.tried.allocated.sizes,
            "failure": None if advice.tried is None else advice.tried.failure,
        },
    }


def _size(count: int) -> str:
    return f"{count / _GIB:,.1f} GiB" if count >= _GIB else f"{count / MIB:,.1f} MiB"
