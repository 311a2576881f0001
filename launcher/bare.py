"""Runs an engine on given flags and nothing else: no launch profile, no supervision, no restart.

The benchmarks compare with the engine as it starts by itself, and the tests want one for a moment.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx

from .command import Command
from .process import Child, explain_exit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from .engine import Engine
    from .logs import LogLine

_POLL = 0.05
_STOP_PATIENCE = 10.0


class BareEngineError(Exception):
    """The engine did not come up; the message is one line."""


@asynccontextmanager
async def bare_engine(
    engine: Engine,
    model: Path,
    *flags: str,
    start_timeout: float = 120.0,
    on_line: Callable[[LogLine], None] | None = None,
) -> AsyncIterator[str]:
    """Start ``engine`` on a free port of 127.0.0.1; the value is its address, once it is healthy.

    ``on_line`` gets its log. It has ended when the block is left. Raises :class:`BareEngineError`.
    """
    argv = (*engine.command, "-m", str(model), "--host", "127.0.0.1", "--port", "0", *flags)
    try:
        child = Child.spawn(Command(argv, os.environ), on_line or _ignore)
    except OSError as error:
        raise BareEngineError(
            f"the engine {engine.path} does not start: {error.strerror or error}"
        ) from error
    try:
        async with asyncio.timeout(start_timeout):
            url = await _healthy(child)
    except TimeoutError:
        await child.stop(0)
        raise BareEngineError(f"the engine {engine.path} was not ready within {start_timeout:g} s") from None
    except BaseException:
        await child.stop(0)
        raise
    try:
        yield url
    finally:
        await child.stop(_STOP_PATIENCE)


async def _healthy(child: Child) -> str:
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        while True:
            if child.exited.done():
                reason, _ = explain_exit(child.exited.result(), child.tail)
                raise BareEngineError(reason)
            url = await asyncio.to_thread(child.address)
            if url is not None:
                try:
                    if (await client.get(f"{url}/health")).is_success:
                        return url
                except httpx.HTTPError:
                    pass  # it binds before it answers
            await asyncio.sleep(_POLL)


def _ignore(_: LogLine) -> None:
    pass
