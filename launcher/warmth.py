"""Keeps slots warm over a restart: between supervisor and router, it saves and restores at the right moment.

A slot is saved after the last request on its backend has ended and before the engine is told to, and
restored before the router hears that the backend serves. Whatever goes wrong on the way ends in a cold slot.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from warmslot.router.backends import NoBackendError

from .command import key_header
from .host_memory import cache_of
from .model import ModelError
from .saved_slots import DamagedError, Folder, assign, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmslot.router.core import Contents
    from warmslot.router.dispatcher import Dispatcher

    from .logs import LogEvent
    from .saved_slots import Saved
    from .supervisor import Launch

log = logging.getLogger("warmslot.launcher")

SAVE_TIMEOUT = 120.0
"""Seconds that all slots of a backend together may take to be saved; the rest is lost."""

RESTORE_TIMEOUT = 120.0
"""Seconds that all slots of a backend together may take to be restored; the rest stays cold."""

_LEAST = 64
"""Tokens below which a slot is not worth a file."""


class Warmth:
    """A :class:`~.runner.Listener` in front of the fleet. ``launch_of`` tells what runs as a backend.

    ``on_cold`` gets a pool's name when one of its backends was started anew.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        launch_of: Callable[[str], Launch],
        on_cold: Callable[[str], None] | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._launch_of = launch_of
        self._on_cold = on_cold
        self._folders: dict[str, Folder] = {}
        self._saved: dict[str, set[tuple[int, int]]] = {}
        """What of each backend's slots is in a file already (:func:`_identity`)."""
        self.log_event: Callable[[str, LogEvent], None] = dispatcher.fleet.log_event

    async def backend_ready(self, name: str, url: str, slots: int, context: int, *, fresh: bool) -> None:
        """A backend serves: what was saved of it is put back first, where it was started anew."""
        scales = self._dispatcher.fleet.mark_of(name)
        restored = await self._restore(name, url, slots, context, scales) if fresh else []
        host = await asyncio.to_thread(cache_of, self._launch_of(name).backend)
        await self._dispatcher.fleet.backend_ready(
            name, url, slots, context, fresh=fresh, restored=restored, restored_with=scales, host=host
        )
        backend = self._dispatcher.fleet.backend(name)
        if fresh and self._on_cold is not None and backend is not None:
            self._on_cold(backend.pool)

    async def backend_draining(self, name: str) -> None:
        """Let what runs end, then save what the slots hold."""
        await self._dispatcher.fleet.backend_draining(name)
        await self.save(name)

    async def backend_down(self, name: str, reason: str) -> None:
        """Pass it on."""
        await self._dispatcher.fleet.backend_down(name, reason)

    # -- saving --------------------------------------------------------------------------------------------

    async def keep_saved(self, name: str, seconds: float) -> None:
        """Save what is new in a backend's slots every so often, for ever, so that a crash has an offer."""
        while True:
            await asyncio.sleep(seconds)
            await self.save_in_idle(name)

    async def save_in_idle(self, name: str) -> int:
        """Save what is new, slot by slot, worth most first, as long as nobody wants the backend.

        A request that comes waits for the one slot that is being saved. Returns how many were saved.
        """
        saved = 0
        already = self._saved.setdefault(name, set())
        new = [one for one in self._dispatcher.contents(name) if _identity(one) not in already]
        for one in sorted(new, key=lambda one: one.tokens * one.chance, reverse=True):
            if self._is_wanted(name):
                break
            try:
                async with self._dispatcher.fleet.alone(name):
                    saved += await self.save(name, only=one.slot)
            except NoBackendError:
                break
        already.intersection_update(map(_identity, self._dispatcher.contents(name)))
        return saved

    def _is_wanted(self, name: str) -> bool:
        backend = self._dispatcher.fleet.backend(name)
        return (
            backend is None
            or self._dispatcher.queued(backend.pool) > 0
            or any(held.lease.slot.backend == name for held in self._dispatcher.held().values())
        )

    async def save(self, name: str, *, only: int | None = None) -> int:
        """Save what the idle slots of a backend (or one of them) hold, worth most first; how many were saved.

        Nothing may run on them meanwhile. Never raises; a file that fails is removed.
        """
        folder, backend = self._folder(name), self._dispatcher.fleet.backend(name)
        held = [
            one
            for one in self._dispatcher.contents(name)
            if one.tokens >= _LEAST and only in {None, one.slot}
        ]
        if folder is None or backend is None or backend.client is None or not held:
            return 0
        scales = backend.filled_with
        if scales is None:  # its engine was here before us, and may have been told anything
            if any("lora" in argument for argument in self._launch_of(name).backend.args):
                return 0
            scales = ""
        url, saved = backend.client.base_url, 0
        try:
            launch = self._launch_of(name)
            mark = await asyncio.to_thread(fingerprint, launch, scales)
            async with (
                asyncio.timeout(SAVE_TIMEOUT),
                httpx.AsyncClient(
                    base_url=url, headers=key_header(launch.backend), timeout=SAVE_TIMEOUT, trust_env=False
                ) as client,
            ):
                for one in sorted(held, key=lambda one: one.tokens * one.chance, reverse=True):
                    if await self._save_one(client, folder, one, mark, backend.slots):
                        saved += 1
                        self._saved.setdefault(name, set()).add(_identity(one))
            await asyncio.to_thread(folder.trim)
        except TimeoutError:
            log.warning("%s: saving slots took longer than %g s; the rest is lost", name, SAVE_TIMEOUT)
        except (OSError, ModelError) as error:
            log.warning("%s: slots cannot be saved: %s", name, error)
        if saved:
            log.info("%s: saved %d slot(s)", name, saved)
        return saved

    @staticmethod
    async def _save_one(
        client: httpx.AsyncClient, folder: Folder, contents: Contents, mark: str, slots: int
    ) -> bool:
        file = folder.new_name()
        done = False
        try:
            answer = await client.post(f"/slots/{contents.slot}?action=save", json={"filename": file})
            said = answer.json()
            if answer.is_success and said.get("n_saved") == contents.tokens:
                await asyncio.to_thread(folder.note, file, contents, mark, slots)
                done = True
            else:
                reason = (
                    _reason(said) or f"{said.get('n_saved')} tokens where {contents.tokens} were expected"
                )
                log.warning("slot %d was not saved: %s", contents.slot, reason)
        except (httpx.HTTPError, OSError, ValueError) as error:
            log.warning("slot %d was not saved: %s", contents.slot, error or type(error).__name__)
        finally:
            if not done:
                folder.drop(folder.path / file)
        return done

    # -- restoring -----------------------------------------------------------------------------------------

    async def _restore(self, name: str, url: str, slots: int, context: int, scales: str) -> list[Contents]:
        folder = self._folder(name)
        restored: list[Contents] = []
        if folder is None:
            return restored
        try:
            launch = self._launch_of(name)
            mark = await asyncio.to_thread(fingerprint, launch, scales)
            fit = await asyncio.to_thread(folder.fitting, mark, context)
            async with (
                asyncio.timeout(RESTORE_TIMEOUT),
                httpx.AsyncClient(
                    base_url=url, headers=key_header(launch.backend), timeout=RESTORE_TIMEOUT, trust_env=False
                ) as client,
            ):
                for slot, saved in assign(fit[:slots], slots).items():
                    if await self._restore_one(client, folder, saved, slot, slots):
                        restored.append(replace(saved.contents, slot=slot))
        except TimeoutError:
            log.warning(
                "%s: restoring slots took longer than %g s; the rest stays cold", name, RESTORE_TIMEOUT
            )
        except httpx.TransportError:
            log.warning("%s: the engine went away while slots were restored", name)
        except (OSError, ModelError) as error:
            log.warning("%s: slots cannot be restored: %s", name, error)
        if restored:
            tokens = sum(one.tokens for one in restored)
            log.info("%s: restored %d slot(s) with %d tokens, to be verified", name, len(restored), tokens)
        return restored

    @staticmethod
    async def _restore_one(
        client: httpx.AsyncClient, folder: Folder, saved: Saved, slot: int, slots: int
    ) -> bool:
        try:
            file = await asyncio.to_thread(folder.begin_try, saved, slots)
        except DamagedError as error:
            log.warning("%s is damaged and removed: %s", saved.path, error)
            folder.drop(saved.path)
            return False
        answer = await client.post(f"/slots/{slot}?action=restore", json={"filename": file.name})
        folder.end_try(saved)
        try:
            said = answer.json()
        except ValueError:
            said = {}
        if answer.is_success and said.get("n_restored") == saved.contents.tokens:
            return True
        log.warning("slot %d stays cold: %s", slot, _reason(said) or f"status {answer.status_code}")
        folder.drop(saved.path)
        await client.post(f"/slots/{slot}?action=erase")
        return False

    def _folder(self, name: str) -> Folder | None:
        backend = self._launch_of(name).backend
        if backend.slot_save_path is None:
            return None
        path = Path(backend.slot_save_path)
        folder = self._folders.get(name)
        if folder is None or folder.path != path:
            folder = self._folders[name] = Folder(path, name, backend.slot_save_size)
        folder.limit = backend.slot_save_size
        return folder


def _identity(contents: Contents) -> tuple[int, int]:
    """The same for the same text in any slot, as far as whole blocks tell."""
    chain = contents.context.chain
    return contents.context.length, chain[-1] if chain else 0


def _reason(said: object) -> str:
    """The engine's own words. They hold no prompt: these calls carry none."""
    error = said.get("error") if isinstance(said, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""
