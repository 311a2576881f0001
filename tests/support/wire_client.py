"""A client that speaks HTTP/1.1 byte by byte, to leave, dribble or not read when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, ClassVar, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping


class WireClient:
    """One connection and one request on it."""

    _all: ClassVar[list[WireClient]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._all.append(self)

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Connect; nothing is sent yet."""
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port))

    @classmethod
    async def post(cls, url: str, path: str, body: Mapping[str, Any], *headers: str) -> Self:
        """Connect and send a whole request."""
        client = await cls.connect(url)
        raw = json.dumps(body).encode()
        await client.send(
            f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n".encode()
            + "".join(f"{header}\r\n" for header in headers).encode()
            + f"Content-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        return client

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers."""
        raw = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split(" ")[1]), headers

    async def read_until(self, mark: bytes) -> bytes:
        """Read up to and with ``mark``."""
        return await self._reader.readuntil(mark)

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        return await self._reader.read()

    def leave(self) -> None:
        """Close at once."""
        self._writer.transport.abort()

    @classmethod
    async def leave_all(cls) -> None:
        """Close every connection that any test has left open."""
        for client in cls._all:
            client.leave()
            with contextlib.suppress(ConnectionError):
                await client._writer.wait_closed()
        cls._all.clear()
