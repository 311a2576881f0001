"""A backend that is to be restarted: what runs on it ends, what comes goes elsewhere or waits."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import Service, serving


async def one_running(service: Service) -> asyncio.Task[int]:
    """A request that is being served by the first backend, held up there."""
    service.fake.prefill.hold()
    running = asyncio.create_task(status(service, "the first"))
    await service.fake.prefill.arrived()
    return running


async def status(service: Service, text: str) -> int:
    return (await service.chat(text, max_tokens=2)).status_code


async def test_a_drain_ends_with_the_last_lease_and_grants_nothing_new(service: Service) -> None:
    running = await one_running(service)
    draining = asyncio.create_task(service.router.dispatcher.fleet.backend_draining("b0"))
    waiting = asyncio.create_task(status(service, "something else"))
    await service.watcher.until(lambda seen: seen.level.get("m") == 2)
    assert not draining.done()
    service.fake.prefill.release()
    await draining
    assert await running == 200
    assert len(service.watcher.granted_leases) == 1
    assert service.router.dispatcher.queued("m") == 1
    # The restarted backend serves what had to wait.
    await service.router.dispatcher.fleet.backend_down("b0", "restart")
    await service.router.dispatcher.fleet.backend_ready("b0", service.fake.base_url, 4, 2048, fresh=True)
    assert await waiting == 200


async def test_meanwhile_others_serve() -> None:
    async with FakeLlamaServer() as first, FakeLlamaServer() as second, serving([first, second]) as service:
        await service.router.dispatcher.fleet.backend_draining("b0")
        assert [await status(service, f"conversation {n}") for n in range(4)] == [200] * 4
        assert {lease.slot.backend for lease in service.watcher.granted_leases} == {"b1"}


async def test_a_drain_that_is_called_off_serves_again(service: Service) -> None:
    running = await one_running(service)
    draining = asyncio.create_task(service.router.dispatcher.fleet.backend_draining("b0"))
    waiting = asyncio.create_task(status(service, "something else"))
    await service.watcher.until(lambda seen: seen.level.get("m") == 2)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    service.fake.prefill.release()
    assert await running == await waiting == 200


async def test_a_backend_that_dies_ends_its_drain(service: Service) -> None:
    running = await one_running(service)
    draining = asyncio.create_task(service.router.dispatcher.fleet.backend_draining("b0"))
    await service.fake.crash()
    await service.router.dispatcher.fleet.backend_down("b0", "exit status 3")
    assert await running >= 500
    await draining


async def test_a_backend_that_is_down_has_nothing_to_drain(service: Service) -> None:
    await service.router.dispatcher.fleet.backend_down("b0", "gone")
    await service.router.dispatcher.fleet.backend_draining("b0")
