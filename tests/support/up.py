"""``warmslot up`` as a real process, followed through what it prints."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import psutil

WARMSLOT = Path(sys.executable).with_name("warmslot")
PATIENCE = 100


class Running:
    """One ``warmslot up`` and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    async def until(self, pattern: str) -> re.Match[str]:
        """Read output until a line matches."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while line := (await self.process.stdout.readline()).decode():
                self.lines.append(line)
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"no line matches {pattern!r}:\n{''.join(self.lines)}")

    async def end(self) -> tuple[int, str]:
        """Wait for the end: exit code, and what was written to stderr."""
        async with asyncio.timeout(PATIENCE):
            out, err = await self.process.communicate()
        self.lines += out.decode().splitlines(keepends=True)
        assert self.process.returncode is not None
        return self.process.returncode, err.decode()
