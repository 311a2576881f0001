"""A small HTTP/1.1 server that writes every byte itself, to behave as badly as a test asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
_COMMON = b"Server: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
_LIMIT = 256 * 1024 * 1024


@dataclass
class Received:
    """One request as it came; the handler notes what became of it."""

    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    slots: list[int] = field(default_factory=list)
    outcome: str = ""
    """``ok``, ``error``, ``cancelled``, ``dropped`` or ``died``; empty while it runs."""

    @property
    def json(self) -> Any:
        """The decoded body."""
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """The value of a header, in whatever case it came."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)


class Connection:
    """The writing side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.close_announced = False
        self.streamed = False
        self.gone = asyncio.Event()
        """Set once the peer has closed."""

    async def receive(self) -> Received | None:
        """The next request, ``None`` when there is none."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            first, *lines = head[:-4].split(b"\r\n")
            method, target, _ = first.decode("latin-1").split(" ", 2)
            headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
            lowered = {name.lower(): value for name, value in headers}
            body = await self._reader.readexactly(int(lowered.get(b"content-length", b"0")))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        self.close_announced = lowered.get(b"connection", b"").lower() == b"close"
        path, _, query = target.partition("?")
        return Received(method, path, query, headers, body)

    async def watch(self) -> None:
        """Notice that the peer closes."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(4096):
                pass
        self.gone.set()

    def answer(self, status: int, body: bytes, kind: str = "application/json; charset=utf-8") -> None:
        """Write a whole answer, with the engine's own headers."""
        if status >= 400:
            self.close_announced = True
        head = b"HTTP/1.1 %d %s\r\n" % (status, _REASONS[status].encode())
        length = b"Content-Type: %s\r\nContent-Length: %d\r\n" % (kind.encode(), len(body))
        self._writer.write(head + _COMMON + length + self._persistence() + b"\r\n" + body)

    def start_stream(self) -> None:
        """Write the head of a stream of events."""
        self.streamed = True
        kind = b"X-Accel-Buffering: no\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
        self._writer.write(b"HTTP/1.1 200 OK\r\n" + _COMMON + kind + self._persistence() + b"\r\n")

    def chunk(self, data: bytes) -> None:
        """Write one chunk; the empty one ends the body."""
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def drain(self) -> None:
        """Wait until the peer has taken enough."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def abort(self) -> None:
        """Break the connection off as a dying process does."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """End the connection in order."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def _persistence(self) -> bytes:
        # As the engine has it: a stream is announced as lasting, and closed all the same.
        return b"Connection: close\r\n" if self.close_announced else b"Keep-Alive: timeout=5, max=100\r\n"


class HttpServer:
    """Listens on a free port and hands each request to ``handle``."""

    def __init__(
        self,
        handle: Callable[[Connection, Received], Awaitable[None]],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._handle = handle
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], Connection] = {}
        self.port = 0

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Start to accept; the port is kept over :meth:`refuse` and another ``listen``."""
        self._server = await asyncio.start_server(
            self._serve, host, port or self.port, limit=_LIMIT, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Stop to accept; open connections go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def abort(self) -> None:
        """Stop to accept and break off all connections."""
        self.refuse()
        tasks = list(self._open)
        for connection in self._open.values():
            connection.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = self._open[task] = Connection(reader, writer)
        try:
            while (request := await connection.receive()) is not None:
                await self._handle(connection, request)
                await connection.drain()
                if connection.close_announced or connection.streamed:
                    break
            await connection.close()
        except asyncio.CancelledError:
            connection.abort()
        finally:
            del self._open[task]
