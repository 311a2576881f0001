"""A slow engine is left alone; one that is busy with nothing done, or deaf, is diagnosed and ended."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from warmslot.launcher.process import State
from warmslot.launcher.progress import ProgressWatch
from warmslot.launcher.supervisor import BackendStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TIMEOUT = 0.6
BUSY = {"id": 0, "id_task": 7, "is_processing": True, "n_prompt_tokens": 9000}


class Patient:
    """An engine as the watch sees it: what ``/slots`` says at each look, and whether it was ended."""

    def __init__(self, slots: Callable[[int], Any]) -> None:
        self._slots = slots
        self.looks = 0
        self.status = BackendStatus("one", State.READY, pid=os.getpid())
        self.condemned: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cancelled = 0
        self.slept = 0.0
        """Seconds that went by with everything standing still."""
        self._enough = asyncio.Event()

    def clock(self) -> float:
        """Time as the watch has it."""
        return time.monotonic() + self.slept

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One ``GET /slots``; ``None`` is never answered."""
        await reader.readuntil(b"\r\n\r\n")
        self.looks += 1
        if self.looks >= 12:
            self._enough.set()
        slots = self._slots(self.looks)
        if slots is not None:
            body = orjson.dumps(slots)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        else:
            await reader.read()
        writer.close()

    async def looked_at_often(self) -> None:
        """Wait for as many looks as three timeouts have."""
        await self._enough.wait()

    # what the watch takes for supervisor and dispatcher

    def status_of(self, _: str) -> BackendStatus:
        return self.status

    def launch(self, _: str) -> Any:
        return SimpleNamespace(backend=SimpleNamespace(api_key=None))

    def condemn(self, _: str, reason: str) -> None:
        self.condemned.set_result(reason)

    @property
    def fleet(self) -> Patient:
        return self

    def backend(self, _: str) -> Any:
        return SimpleNamespace(client=self)

    async def aclose(self) -> None:
        self.cancelled += 1


@asynccontextmanager
async def watched(slots: Callable[[int], Any]) -> AsyncIterator[Patient]:
    patient = Patient(slots)
    server = await asyncio.start_server(patient.answer, "127.0.0.1", 0)
    patient.status.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    watch = ProgressWatch("one", patient, patient, TIMEOUT, clock=patient.clock)  # type: ignore[arg-type]
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(60):
            yield patient
    finally:
        task.cancel()
        await asyncio.wait({task})
        server.close()
        await server.wait_closed()


async def test_a_slow_prefill_is_not_taken_for_a_wedge() -> None:
    """A batch takes half of the timeout, and the whole prompt many times that."""
    slow = lambda look: [BUSY | {"n_prompt_tokens_processed": 2048 * (look // 2)}]  # noqa: E731
    async with watched(slow) as patient:
        await patient.looked_at_often()
        assert (patient.condemned.done(), patient.cancelled) == (False, 0)


async def test_a_long_answer_and_an_idle_engine_are_left_alone() -> None:
    for slots in (
        lambda look: [BUSY | {"n_prompt_tokens_processed": 9, "next_token": [{"n_decoded": look // 2}]}],
        lambda _: [{"id": 0, "is_processing": False}],
    ):
        async with watched(slots) as patient:
            await patient.looked_at_often()
            assert (patient.condemned.done(), patient.cancelled) == (False, 0)


async def test_an_engine_that_is_busy_with_nothing_done_is_cancelled_then_ended() -> None:
    async with watched(lambda _: [BUSY | {"n_prompt_tokens_processed": 2048}]) as patient:
        reason = await patient.condemned
        assert patient.cancelled == 1
    assert reason.startswith("wedged: the engine is busy without progress for 0.6 s (process ")


async def test_one_that_its_cancelled_requests_set_free_goes_on() -> None:
    def stuck(_: int) -> list[dict[str, Any]]:
        return [] if patient.cancelled else [BUSY]

    async with watched(stuck) as patient:
        await patient.looked_at_often()
        assert (patient.condemned.done(), patient.cancelled) == (False, 1)


async def test_what_all_have_slept_through_is_no_silence() -> None:
    """The machine was suspended, or the container paused, with a request at work."""

    def stopped_once(look: int) -> list[dict[str, Any]]:
        if look == 3:
            patient.slept = 1000.0
        return [BUSY | {"n_prompt_tokens_processed": 2048 * (look - (look >= 3))}]

    async with watched(stopped_once) as patient:
        await patient.looked_at_often()
        assert (patient.condemned.done(), patient.cancelled) == (False, 0)


@pytest.mark.parametrize("told", [7, {"error": "none"}, ["no object"]])
async def test_an_engine_that_tells_of_its_slots_in_another_way_is_watched_on(told: Any) -> None:
    """It is not taken for wedged, and once it is deaf it is ended."""
    async with watched(lambda look: told if look < 12 else None) as patient:
        await patient.looked_at_often()
        assert (patient.condemned.done(), patient.cancelled) == (False, 0)
        assert "does not answer" in await patient.condemned


async def test_a_deaf_engine_is_ended() -> None:
    async with watched(lambda _: None) as patient:
        assert (await patient.condemned).startswith("wedged: the engine does not answer for 0.6 s")
