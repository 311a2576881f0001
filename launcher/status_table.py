"""The table of ``warmslot status``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

_GOOD = {"ready": "green", "remote": "green", "failed": "red", "remote, down": "red"}
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def show(status: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what :meth:`~.operations.Operations.status` gave."""
    console = console or Console(width=None if sys.stdout.isatty() else 140, highlight=False, emoji=False)
    stopping = ", stopping" if status["stopping"] else ""
    console.print(
        Text(
            f"warmslot {status['version']} at {status['address']}, process {status['pid']}, "
            f"up {age(time.time() - status['since'])}{stopping}"
        )
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("backend", "pool", "state"):
        table.add_column(name, no_wrap=True)
    figures = ("slots", "advised", "busy", "warm", "tokens held", "context", "memory", "restarts", "process")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    for backend in status["backends"]:
        table.add_row(*_row(backend))
    console.print(table)
    for backend in status["backends"]:
        if backend.get("reason"):
            console.print(Text(f"{backend['name']}: {backend['reason']}"))
    for pool in status["pools"]:
        if pool["queued"]:
            console.print(Text(f"{pool['name']}: {pool['queued']} request(s) wait"))


def _row(backend: Mapping[str, Any]) -> list[Text | str]:
    state = backend["state"]
    memory = backend.get("memory")
    return [
        Text(backend["name"]),
        Text(backend["pool"]),
        Text(state, style=_GOOD.get(state, "yellow")),
        _number(backend["slots"]),
        _number(_advised(backend)),
        _number(backend["busy"]),
        _number(backend["warm"]),
        _number(backend["resident_tokens"]),
        _number(backend["context"]),
        "–" if memory is None else decimal(memory),
        _number(backend.get("restarts")),
        str(backend.get("pid") or "–"),
    ]


def _advised(backend: Mapping[str, Any]) -> int | None:
    """Slots; ``None`` while there is no advice."""
    found = backend["advised"]
    return None if found is None else found["slots"] or None


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def age(seconds: float) -> str:
    """A duration in two units at most."""
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"
