"""What ``warmslot engine`` shows: the program, its devices, and what of our launch profile it takes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

from .engine import EngineKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .engine import Engine

PROFILE = {
    "-np": "a fixed number of slots (essential)",
    "-c": "context (essential)",
    "--port": "a port of its own (essential)",
    "--no-kv-unified": "each slot keeps its own part of the KV cache",
    "--no-cache-idle-slots": "idle slots are not cleared",
    "--cache-ram": "the engine's own prompt cache can be sized",
    "--slots": "the router sees what the slots hold",
    "--metrics": "the engine's counters",
    "--log-jsonl": "a log for programs",
    "--slot-save-path": "slots can be saved and restored",
    "-ctk": "types of the KV cache",
    "-fa": "flash attention",
    "--fit": "fitting itself into memory",
}
"""Options that matter to warmslot, and what for."""

_TIMEOUT = 60.0


def report(engine: Engine) -> dict[str, Any]:
    """Everything as plain data. Blocks: it runs the engine to ask for its version and devices."""
    return {
        "kind": str(engine.kind),
        "command": list(engine.command),
        "found_by": engine.origin,
        "version": engine.build or _said(engine, "--version"),
        "devices": _devices(engine),
        "options": len(set(engine.options.values())),
        "takes": {name: engine.knows(name) for name in PROFILE},
    }


def text(facts: Mapping[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"engine: {' '.join(facts['command'])} ({facts['found_by']})",
        f"version: {facts['version'] or 'not told'}",
        f"devices: {', '.join(facts['devices']) or 'none but the CPU'}",
        f"options: {facts['options']}; of those that warmslot uses:",
    ]
    for name, takes in facts["takes"].items():
        lines.append(f"  {'yes' if takes else 'no ':<4}{name:<24}{PROFILE[name]}")
    return "\n".join(lines)


def _devices(engine: Engine) -> list[str]:
    """Devices as the engine names them; none where it cannot be asked."""
    if engine.kind is EngineKind.EMBEDDED or not engine.knows("--list-devices"):
        return []
    lines = _said(engine, "--list-devices").splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("Available devices")), None)
    named = [] if start is None else [line.strip() for line in lines[start + 1 :]]
    return [line for line in named if line and line != "(none)"]


def _said(engine: Engine, option: str) -> str:
    if not engine.knows(option):
        return ""
    try:
        run = subprocess.run(  # noqa: S603 - the program is the operator's own choice
            [*engine.command, option],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if option == "--version":
        return next(
            (line for line in run.stdout.splitlines() if line.startswith("version")), ""
        ).removeprefix("version: ")
    return run.stdout
