"""A client that dribbles: the head of a request has a time and a size, whatever came before it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from warmslot.router.connection import LARGEST_HEAD, Connection, connection

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.router import chat, serving
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from collections.abc import Callable

GET = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"


class Clock:
    """The running loop, but for its timers: they wait for :meth:`advance`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._loop = asyncio.get_running_loop()
        self._timers: list[tuple[float, Callable[[], object], asyncio.Event]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay: float, call: Callable[[], object]) -> Any:
        cancelled = asyncio.Event()
        self._timers.append((self.now + delay, call, cancelled))

        class Handle:
            cancel = staticmethod(cancelled.set)

        return Handle()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self._timers if timer[0] <= self.now]
        self._timers = [timer for timer in self._timers if timer[0] > self.now]
        for _, call, cancelled in due:
            if not cancelled.is_set():
                call()


class Wire(asyncio.Transport):
    """What the server writes to one client."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        del name
        return default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Served:
    """One connection to an application that answers when it is told to, without reading."""

    def __init__(self) -> None:
        self.clock, self.wire, self.state = Clock(), Wire(), ServerState()
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        config = uvicorn.Config(self._app, interface="asgi3", log_config=None, timeout_keep_alive=75)
        self.protocol: Connection = connection(10.0)(config, self.state, {}, self.clock)  # type: ignore[arg-type]
        self.protocol.connection_made(self.wire)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        self.begun.set()
        await self.go.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def answer(self) -> None:
        """Let the application answer what it has been asked."""
        self.go.set()
        await asyncio.gather(*self.state.tasks)


async def test_a_head_that_dribbles() -> None:
    served = Served()
    for byte in GET[:9]:
        served.protocol.data_received(bytes([byte]))
        served.clock.advance(1)
    assert not served.wire.closed
    served.protocol.data_received(GET[9:10])
    served.clock.advance(1)
    assert served.wire.closed
    assert served.wire.written.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close" in served.wire.written
    assert b"limits.header_timeout" in served.wire.written


async def test_a_client_that_says_nothing() -> None:
    served = Served()
    served.clock.advance(9)
    assert not served.wire.closed
    served.clock.advance(1)
    assert (served.wire.closed, served.wire.written) == (True, b"")


@pytest.mark.parametrize("between", [b"\r\n", b"G"])
async def test_the_same_between_two_requests(between: bytes) -> None:
    """Blank lines are no request, and end the time for which an idle connection is kept."""
    served = Served()
    served.protocol.data_received(GET)
    served.clock.advance(1000)  # that is the application's time
    await served.answer()
    served.clock.advance(70)
    assert not served.wire.closed
    for _ in range(9):
        served.protocol.data_received(between)
        between = b"\r\n" if between == b"\r\n" else b"E"
        served.clock.advance(1)
        if served.wire.closed:  # "GE" goes on to be no method
            return
    served.clock.advance(1)
    assert served.wire.closed


async def test_a_body_that_goes_on_after_its_answer() -> None:
    served = Served()
    served.protocol.data_received(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 1000\r\n\r\n{")
    await served.answer()
    for _ in range(9):
        served.protocol.data_received(b" ")
        served.clock.advance(1)
    assert not served.wire.closed
    served.protocol.data_received(b" ")
    served.clock.advance(1)
    assert served.wire.closed


async def test_a_next_head_that_dribbles_cuts_no_answer_off() -> None:
    served = Served()
    served.protocol.data_received(GET + GET[:5])
    await served.begun.wait()
    served.clock.advance(10)
    assert not served.wire.closed
    await served.answer()
    assert served.wire.written.startswith(b"HTTP/1.1 204")
    assert served.wire.closed


@pytest.mark.parametrize("piece", [b"x", b"x: y\r\n" * 100])
async def test_a_head_without_end(piece: bytes) -> None:
    served = Served()
    served.protocol.data_received(GET[:-2])
    sent = 0
    while not served.wire.closed:
        served.protocol.data_received(piece)
        sent += len(piece)
    assert sent < LARGEST_HEAD + len(piece)
    assert served.wire.written.startswith(b"HTTP/1.1 431 ")


def head_of(size: int) -> bytes:
    """A whole head of so many bytes."""
    start = GET[:-2] + b"x: "
    return start + b"y" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("piece", [1000, 1 << 20])
@pytest.mark.parametrize(("size", "served"), [(LARGEST_HEAD, True), (LARGEST_HEAD + 1, False)])
async def test_the_longest_head_however_it_comes(piece: int, size: int, served: bool) -> None:
    connection, head = Served(), head_of(size)
    for at in range(0, size, piece):
        connection.protocol.data_received(head[at : at + piece])
    await connection.answer()
    assert connection.wire.written.startswith(b"HTTP/1.1 204 " if served else b"HTTP/1.1 431 ")
    assert connection.wire.closed is not served


async def test_a_head_that_is_too_long_waits_for_the_answer_before_it() -> None:
    served = Served()
    served.protocol.data_received(GET + head_of(70_000))
    await served.begun.wait()
    assert served.wire.written == b""
    await served.answer()
    await served.answer()
    assert served.wire.written.startswith(b"HTTP/1.1 204 ")
    assert b"HTTP/1.1 431 " in served.wire.written
    assert b"x-request-id: " in served.wire.written
    assert served.wire.closed


async def test_what_came_before_a_head_in_one_piece_is_not_of_it() -> None:
    served = Served()
    served.protocol.data_received(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 100000\r\n\r\n")
    await served.answer()
    served.protocol.data_received(b" " * 100_000 + GET[:-2])
    assert not served.wire.closed
    served.protocol.data_received(b"\r\n")
    await served.answer()
    assert served.wire.written.count(b"HTTP/1.1 204 ") == 2


async def test_timers_end_with_the_connection() -> None:
    served = Served()
    served.protocol.data_received(GET[:5])
    served.protocol.connection_lost(None)
    served.clock.advance(100)
    assert served.wire.written == b""


async def test_a_long_head_through_a_socket() -> None:
    async with FakeLlamaServer() as fake, serving([fake]) as service:
        for size, status in ((LARGEST_HEAD, 200), (70_000, 431)):
            client = await WireClient.connect(service.url)
            await client.send(head_of(size))
            assert (await client.head())[0] == status
            client.leave()


@pytest.mark.parametrize("raw", [b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"])
async def test_what_is_no_http_is_answered_without_an_id(raw: bytes) -> None:
    """As docs/http.md says: there is no request that an id could be of."""
    async with FakeLlamaServer() as fake, serving([fake]) as service:
        client = await WireClient.connect(service.url)
        await client.send(raw)
        status, headers = await client.head()
        assert (status, headers["content-type"]) == (400, "text/plain; charset=utf-8")
        assert "x-request-id" not in headers
        await client.rest()
        assert fake.requests == []


async def test_through_a_socket() -> None:
    async with FakeLlamaServer() as fake, serving([fake], limits={"header_timeout": 0.05}) as service:
        silent, dribbling = [await WireClient.connect(service.url) for _ in range(2)]
        await dribbling.send(b"POST /v1/chat/completions HTTP/1.1\r\nHo")
        assert await silent.rest() == b""
        assert (await dribbling.head())[0] == 408
        assert b"limits.header_timeout" in await dribbling.rest()
        fake.token.hold()
        running = asyncio.create_task(service.chat("mark-a hi", max_tokens=6))
        await fake.until(lambda f: f.busy == 1)
        late = await WireClient.connect(service.url)
        assert await late.rest() == b""  # much later, by the clock of the one that runs
        fake.token.release()
        assert "mark-a" in (await running).text
        assert (await service.http.post("/v1/chat/completions", json=chat("mark-b hi"))).status_code == 200
