"""Writes the Grafana dashboards beside this file; ``--check`` only says which are out of date."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana import render
from overview import OVERVIEW
from parallel import PARALLEL

HERE = Path(__file__).resolve().parent
DASHBOARDS = {"overview.json": OVERVIEW, "parallel.json": PARALLEL}


def main() -> int:
    """Write, or check."""
    check = "--check" in sys.argv[1:]
    stale = 0
    for name, dashboard in DASHBOARDS.items():
        file = HERE / name
        text = json.dumps(render(dashboard), indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if check:
            sys.stderr.write(f"dashboards/{name} is out of date: run scripts/docs\n")
        else:
            file.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote dashboards/{name}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
