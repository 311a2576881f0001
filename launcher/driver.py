"""Serves a load for real: sends its calls to a server as its clients would, and notes what came of each."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

    from .load import Load
    from .shape import Shape

TIMEOUT: Final = 1800.0


class DriverError(Exception):
    """A server cannot be measured; the message is one line."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Times are seconds from sending; ``started`` counts from the load's beginning.

    Token counts are ``None`` where the server told none.
    """

    number: int
    started: float
    first_token: float
    total: float
    cached: int | None
    processed: int | None
    output: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """A whole load, served once."""

    calls: list[Call]
    seconds: float

    @property
    def failures(self) -> list[Call]:
        """Calls without a whole answer."""
        return [call for call in self.calls if call.error]

    @property
    def output(self) -> int:
        """Generated tokens."""
        return sum(call.output for call in self.calls)

    @property
    def prompt(self) -> int:
        """Prompt tokens of the calls whose server told them."""
        return sum((call.cached or 0) + (call.processed or 0) for call in self.calls)

    @property
    def reuse(self) -> float | None:
        """Share of the prompt tokens that were reused."""
        cached = sum(call.cached or 0 for call in self.calls)
        told = any(call.cached is not None for call in self.calls)
        return cached / self.prompt if told and self.prompt else None

    def first_tokens(self) -> list[float]:
        """Times to the first token, ascending."""
        return sorted(call.first_token for call in self.calls if not call.error)


async def serve(
    url: str,
    load: Load,
    shape: Shape,
    *,
    key: str | None = None,
    model: str | None = None,
    pace: float = 1.0,
    answered: Callable[[], None] = lambda: None,
) -> Served:
    """Serve a load on a server with ``/v1/completions``. ``pace`` scales all pauses; 0 leaves them out.

    Without ``model`` the first one is asked for that the server lists.
    """
    return await _Drive(url, load, shape, key=key, model=model, pace=pace, answered=answered).run()


class _Drive:
    def __init__(
        self,
        url: str,
        load: Load,
        shape: Shape,
        *,
        key: str | None,
        model: str | None,
        pace: float,
        answered: Callable[[], None],
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A fresh connection for each request: llama-server closes one that it has streamed on.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            limits=limits,
            timeout=TIMEOUT,
            trust_env=False,
        )
        self._load, self._shape, self._model, self._pace = load, shape, model, pace
        self._answered = answered
        self._calls: list[Call] = []
        self._began = 0.0

    async def run(self) -> Served:
        async with self._http, asyncio.TaskGroup() as tasks:
            self._model = self._model or await self._listed()
            self._began = time.perf_counter()
            for number, job in enumerate(self._load.jobs):
                if job.before < 0:
                    tasks.create_task(self._call(tasks, number, job.delay))
        return Served(self._calls, time.perf_counter() - self._began)

    async def _listed(self) -> str:
        """The first model that the server lists; a server that lists none is asked for any."""
        try:
            models = (await self._http.get("/v1/models")).json()["data"]
            return str(models[0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
            return "default"

    async def _call(self, tasks: asyncio.TaskGroup, number: int, delay: float) -> None:
        await asyncio.sleep(delay * self._pace)
        job = self._load.jobs[number]
        for follower in job.followers:
            if not self._load.jobs[follower].after_end:
                tasks.create_task(self._call(tasks, follower, self._load.jobs[follower].delay))
        body = {
            "model": self._model,
            "prompt": self._shape.prompt(number),
            "max_tokens": job.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        try:
            call, text = await self._stream(number, body, began)
        except (httpx.HTTPError, DriverError, orjson.JSONDecodeError) as error:
            seconds = time.perf_counter() - began
            reason = str(error) or type(error).__name__
            call, text = Call(number, began - self._began, seconds, seconds, None, None, 0, reason), ""
        self._calls.append(call)
        self._shape.answered(number, text)
        self._answered()
        for follower in job.followers:
            if self._load.jobs[follower].after_end:
                tasks.create_task(self._call(tasks, follower, self._load.jobs[follower].delay))

    async def _stream(self, number: int, body: dict[str, Any], began: float) -> tuple[Call, str]:
        first: float | None = None
        parts: list[str] = []
        timings: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:
                await answer.aread()
                raise DriverError(f"status {answer.status_code}: {answer.text[:200]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = orjson.loads(line[len("data: ") :])
                if "error" in chunk:
                    raise DriverError(str(chunk["error"]))
                timings = chunk.get("timings") or timings
                usage = chunk.get("usage") or usage
                text = "".join(choice.get("text") or "" for choice in chunk.get("choices", ()))
                if text and first is None:
                    first = time.perf_counter() - began
                parts.append(text)
        total = time.perf_counter() - began
        cached, processed, output = _counts(timings, usage)
        if output is None:
            raise DriverError("the answer ended without timings and without usage")
        call = Call(
            *(
                number,
                began - self._began,
                total if first is None else first,
                total,
                cached,
                processed,
                output,
            )
        )
        return call, "".join(parts)


def _counts(timings: dict[str, Any], usage: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Reused, computed and generated tokens, from llama-server's timings or anybody's usage."""
    if "prompt_n" in timings:
        return timings.get("cache_n", 0), timings["prompt_n"], timings.get("predicted_n", 0)
    prompt = usage.get("prompt_tokens")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    computed = prompt - cached if prompt is not None and cached is not None else prompt
    return cached, computed, usage.get("completion_tokens")
