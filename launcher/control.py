"""The socket by which ``warmslot status``, ``set`` and the like speak to a running ``warmslot up``.

A Unix socket in the state folder, for its owner alone: one JSON object on a line asks, one answers:
``{"do": "set", "name": "a", "slots": 6}`` -> ``{"result": {...}}`` or ``{"error": "one line"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson

from .state import known_folders

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from pathlib import Path

log = logging.getLogger("warmslot.launcher")

SOCKET = "control"
_LONGEST_PATH = 100
"""Bytes of a socket's path that every system takes."""
_MAX_REQUEST = 64 * 1024
_ASK_TIMEOUT = 5.0


class ControlError(Exception):
    """What was asked for cannot be done; one line."""


class NotRunningError(Exception):
    """No warmslot can be asked; one line."""


class Control:
    """The listening side. ``actions`` maps each verb to what does it; they raise :class:`ControlError`."""

    def __init__(
        self, folder: Path, actions: Mapping[str, Callable[[Mapping[str, Any]], Awaitable[Any]]]
    ) -> None:
        self._path = folder / SOCKET
        self._actions = actions
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. The folder is locked by us, so a socket that is there is a dead one's. Raises OSError."""
        self._path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(self._path) as path:
                listening.bind(path)
            self._path.chmod(0o600)
            listening.listen(16)
            self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=_MAX_REQUEST)
        except BaseException:
            listening.close()
            raise

    def close(self) -> None:
        """Stop listening; questions that are being answered are cut off."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(await reader.readline())
            writer.write(orjson.dumps(answer) + b"\n")
            await writer.drain()
        except (OSError, ValueError):  # the asker has gone, or asked without an end
            pass
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            asked = orjson.loads(line)
            action = self._actions[asked["do"]]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return {"error": f"found no known request, allowed: {', '.join(self._actions)}"}
        try:
            return {"result": await action(asked)}
        except ControlError as error:
            return {"error": str(error)}
        except Exception:
            log.exception("the request %s failed", asked["do"])
            return {"error": f"{asked['do']} failed; the reason is in the log of warmslot up"}


def ask(folder: Path, do: str, **fields: Any) -> Any:
    """Ask the warmslot whose state folder this is; waits as long as what is asked for takes.

    Raises :class:`NotRunningError`, and :class:`ControlError` with its refusal.
    """
    with contextlib.closing(_connect(folder)) as connection:
        try:
            connection.sendall(orjson.dumps({"do": do, **fields}) + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
        except OSError as error:
            raise NotRunningError(f"warmslot ended while it was asked ({error.strerror})") from None
    if not line:
        raise NotRunningError("warmslot ended while it was asked")
    answer = orjson.loads(line)
    if "error" in answer:
        raise ControlError(answer["error"])
    return answer["result"]


def running_folders() -> list[Path]:
    """The known state folders whose warmslot runs."""
    return [folder for folder in known_folders() if is_running(folder)]


def is_running(folder: Path) -> bool:
    """Whether the warmslot whose state folder this is can be asked."""
    try:
        _connect(folder).close()
    except NotRunningError:
        return False
    return True


def _connect(folder: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ASK_TIMEOUT)
    try:
        with _short(folder / SOCKET) as path:
            connection.connect(path)
    except OSError:
        connection.close()
        raise NotRunningError(f"no warmslot runs with the state in {folder}") from None
    connection.settimeout(None)
    return connection


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of a socket that is short enough: through an open descriptor of its folder where need be."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
