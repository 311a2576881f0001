"""Prefills prompts worth having after a start while nobody wants anything, and stops when somebody does.

A prompt is a request body as clients send it (system text, tools). It goes the way of every request, through
the router, so that it lands where its continuations will look for it; with nothing to generate.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from warmslot.router.prompt import text_of
from warmslot.router.values import ROOT

from .preambles import Preambles
from .prompt_file import WarmUpError, read_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmslot.router.config import Config
    from warmslot.router.values import Lease, Outcome, Report

log = logging.getLogger("warmslot.launcher")

_TIMEOUT = 600.0
_QUIET = 1.0
"""Seconds without any request before a prompt is prefilled."""


class WarmUp:
    """One router's warm-up. It observes the router: its own request is the only one while it works.

    ``prompts`` are the files of each pool, ``learned`` how many prefixes learned from its requests come after
    them.
    """

    def __init__(
        self, prompts: Mapping[str, Sequence[str]], learned: Mapping[str, int] | None = None
    ) -> None:
        self._preambles: dict[str, Preambles] = {}
        self.configure(prompts, learned or {})
        self._demand = 0
        self._changed = asyncio.Event()
        self._wanted: asyncio.Queue[str] = asyncio.Queue()

    def configure(self, prompts: Mapping[str, Sequence[str]], learned: Mapping[str, int]) -> None:
        """Warm up by other settings from now on; what was learned is kept where it still counts."""
        self._prompts = {pool: tuple(map(Path, files)) for pool, files in prompts.items() if files}
        self._learned = {pool: count for pool, count in learned.items() if count}
        self._preambles = {pool: self._preambles.get(pool, Preambles()) for pool in self._learned}

    def check(self) -> None:
        """Raise :class:`WarmUpError` for the first file that holds no prompt."""
        for files in self._prompts.values():
            for file in files:
                read_prompt(file)

    def cold(self, pool: str) -> None:
        """A backend of the pool was started anew."""
        if pool in self._prompts or pool in self._learned:
            self._wanted.put_nowait(pool)

    async def run(self, address: str, key: Callable[[], str | None] = lambda: None) -> None:
        """Prefill what is wanted, for ever. ``address`` is the router's own, ``key`` one of its keys."""
        async with httpx.AsyncClient(base_url=address, timeout=_TIMEOUT, trust_env=False) as client:
            while True:
                pool = await self._wanted.get()
                client.headers = {"X-Warmslot-Priority": "batch"}
                if secret := key():
                    client.headers["Authorization"] = f"Bearer {secret}"
                for file in self._prompts.get(pool, ()):
                    await self._prefill(client, pool, str(file), functools.partial(read_prompt, file))
                if pool in self._learned:
                    for text in self._preambles[pool].best(self._learned[pool]):
                        what = f"a learned prefix of {len(text)} characters"
                        await self._prefill(client, pool, what, functools.partial(dict, prompt=text))

    async def _prefill(
        self, client: httpx.AsyncClient, pool: str, what: str, read: Callable[[], dict[str, Any]]
    ) -> None:
        while True:
            await self._quiet()
            try:
                body = read()
            except WarmUpError as error:
                log.warning("%s", error)
                return
            path = "/v1/chat/completions" if "messages" in body else "/completion"
            body |= {"model": pool, "stream": True, "return_progress": True, "n_predict": 0, "max_tokens": 0}
            sending = asyncio.create_task(_send(client, path, body))
            busy = asyncio.create_task(self._until(lambda: self._demand > 1))
            try:
                await asyncio.wait({sending, busy}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                finished = sending.done()
                for task in (sending, busy):
                    task.cancel()
                await asyncio.wait({sending, busy})
            if finished:
                with contextlib.suppress(asyncio.CancelledError):
                    if status := sending.result():
                        log.warning("%s: not prefilled: %s", what, status)
                    else:
                        log.info("%s: prefilled for pool %s", what, pool)
                return

    async def _quiet(self) -> None:
        """Wait until nobody has wanted anything for a moment."""
        while True:
            await self._until(lambda: self._demand == 0)
            try:
                async with asyncio.timeout(_QUIET):
                    await self._until(lambda: self._demand > 0)
            except TimeoutError:
                return

    async def _until(self, condition: Any) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # -- what the router tells -----------------------------------------------------------------------------

    def demanded(self, pool: str, by: int, now: float) -> None:
        """So many more (or fewer) requests are there."""
        del pool, now
        self._demand += by
        self._changed.set()

    def granted(self, lease: Lease, decision_seconds: float) -> None:
        """Nothing to do."""

    def decoding(self, lease: Lease, now: float) -> None:
        """Nothing to do."""

    def finished(self, lease: Lease, report: Report, outcome: Outcome, now: float) -> None:
        """Learn from what was served, where the engine's own text of it is known and is anyone's to share."""
        del outcome, now
        request = lease.request
        preambles = self._preambles.get(request.pool)
        if preambles is None or report.truth_missing:
            return
        ours = request.max_output_tokens == 0
        if not ours and request.prompt.root == ROOT and (text := text_of(request.prompt)) is not None:
            preambles.saw(text, request.session)

    def backend_changed(self, backend: str, *, up: bool, slots: int, context: int, reason: str) -> None:
        """Nothing to do."""

    def engine_selected(self, backend: str, by: str) -> None:
        """Nothing to do."""


def prompts_of(config: Config) -> dict[str, tuple[str, ...]]:
    """The files of each pool that are prefilled."""
    return {pool.name: pool.warm_up for pool in config.pools}


def learned_of(config: Config) -> dict[str, int]:
    """How many prefixes each pool learns.

    None where text is masked, which the engine evaluates all the same, or where prefixes are nobody else's.
    """
    if config.endpoint.isolation:
        return {}
    return {pool.name: pool.warm_up_learned for pool in config.pools if not pool.masks}


async def _send(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    """Send one; empty where it went well. Never raises."""
    try:
        async with client.stream("POST", path, json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass
            return "" if answer.is_success else f"status {answer.status_code}"
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
