"""The live page ``/ui`` and the stream of snapshots that feeds it.

One snapshot a second is taken and encoded for all viewers together, only while there are any, and sent only
when something changed. A viewer that reads slowly skips snapshots; nothing is kept for it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from importlib.resources import files
from typing import TYPE_CHECKING

import orjson

from . import errors
from .client import Client, ClientGoneError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.types import Receive, Scope, Send

MOST_VIEWERS = 100
"""Viewers at once; the next one is answered with 503."""

_PING = b":\n\n"
_QUIET_TICKS = 15
_STREAM = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Feed:
    """Takes snapshots while somebody looks: ``take`` gives data for JSON, ``over`` says when to end."""

    def __init__(self, take: Callable[[], object], over: Callable[[], bool], interval: float = 1.0) -> None:
        self._take = take
        self._over = over
        self._interval = interval
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._latest = b""
        self._changed = asyncio.Event()

    @property
    def viewers(self) -> int:
        """How many look now."""
        return self._viewers

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events for one viewer: the latest snapshot at once, then each that differs."""
        self._viewers += 1
        try:
            task = self._task
            if task is None or task.done():
                self._look()
                task = self._task = asyncio.get_running_loop().create_task(self._run())
                task.add_done_callback(self._wake)
            sent = self._latest
            changed = self._changed
            yield sent
            while not task.done() and not self._over():
                await changed.wait()
                changed = self._changed
                if self._latest is sent:
                    yield _PING
                else:
                    sent = self._latest
                    yield sent
        finally:
            self._viewers -= 1
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        quiet = 0
        while not self._over():
            await asyncio.sleep(self._interval)
            quiet = 0 if self._look() else quiet + 1
            if quiet >= _QUIET_TICKS:
                quiet = 0
                self._wake()

    def _look(self) -> bool:
        event = b"data: " + orjson.dumps(self._take()) + b"\n\n"
        if event == self._latest:
            return False
        self._latest = event
        self._wake()
        return True

    def _wake(self, _: object = None) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LiveEvents:
    """``GET /ui/events``: the stream; asks for the same keys as ``/metrics``."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one viewer until it leaves or the router stops."""
        client = Client(scope, receive, send)
        if scope["method"] == "HEAD":
            await client.answer(200, b"", _STREAM)
            return
        if self._feed.viewers >= MOST_VIEWERS:
            await client.refuse(errors.unavailable(f"{MOST_VIEWERS} viewers look at the live page already"))
            return
        try:
            await client.body(0, 10.0)
            await client.unless_gone(self._serve(client))
        except errors.RequestError as error:
            await client.refuse(error)
        except ClientGoneError:
            pass

    async def _serve(self, client: Client) -> None:
        await client.start(200, _STREAM, streams=True)
        await client.write(b"event: clock\ndata: %.3f\n\n" % time.time())
        events = self._feed.events()
        try:
            async for event in events:
                await client.write(event)
        finally:
            await events.aclose()
        await client.end()


class LivePage:
    """``GET /ui``: the page itself. It holds no data, so it needs no key; it asks for one where it must."""

    def __init__(self) -> None:
        self._body = files(__package__).joinpath("static/live.html").read_bytes()
        self._headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", policy(self._body)),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cache-control", b"no-cache"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the page."""
        await Client(scope, receive, send).answer(200, self._body, self._headers)


class SwitchedOff:
    """The page and its stream where ``ui`` is off: 404, whatever an engine would say."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse."""
        error = errors.RequestError(
            404, "invalid_request_error", "the live page is switched off (setting ui)", code="not_found"
        )
        await Client(scope, receive, send).refuse(error)


def policy(page: bytes) -> bytes:
    """A content security policy: only the page's own style and script, and only this router to talk to."""

    def hashes(tag: bytes) -> str:
        found = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found
        )

    return (
        f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ).encode()
