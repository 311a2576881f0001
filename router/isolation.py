"""Clients kept apart: whose text each slot may hold, and what is done where the engine chooses the slot.

A prediction is no proof: a client that left before the engine began on its request left the slot as it was,
with the text of somebody else. So a slot is a client's own only once the engine has answered a request of
that client there whole, and nobody else's may have touched it since. In any other slot all is computed anew.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import orjson

from . import errors
from .backend import EngineError
from .values import ROOT, Loss

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .backend import EngineClient
    from .client import Headers
    from .dispatcher import Dispatcher
    from .residency import Context
    from .settling import SlotWatch
    from .values import Prompt

_NOBODYS = "."
"""The prompt that takes the place of somebody's text: it shares next to nothing with any other."""


class Tenants:
    """Whose text each slot holds, where that is certain; forgotten with the life of a backend."""

    def __init__(self) -> None:
        self._owners: WeakKeyDictionary[SlotWatch, dict[int, str]] = WeakKeyDictionary()

    def owns(self, client: str, life: SlotWatch, slot: int) -> bool:
        """Whether nothing but text of this client is in the slot."""
        return self._owners.get(life, {}).get(slot) == client

    def certain(self, life: SlotWatch) -> set[int]:
        """The slots of which the owner is known."""
        return set(self._owners.get(life, ()))

    def doubt(self, life: SlotWatch, slots: Collection[int] | None = None, *, by: str = "") -> dict[int, str]:
        """A request of ``by`` may touch these slots, or any: no longer is certain what others hold there.

        Returns what was, for :meth:`know` in case that they turn out to be untouched.
        """
        owners = self._owners.setdefault(life, {})
        doubted = {
            slot: owner for slot, owner in owners.items() if owner != by and (slots is None or slot in slots)
        }
        for slot in doubted:
            del owners[slot]
        return doubted

    def know(self, life: SlotWatch, owners: Mapping[int, str]) -> None:
        """These slots hold nothing but the text of these clients."""
        self._owners.setdefault(life, {}).update(owners)


def may_hold(dispatcher: Dispatcher, backend: str, prompt: Prompt, certain: Collection[int]) -> list[int]:
    """The slots of a backend of which nobody can say that they do not hold the whole of a client's prompt.

    ``certain`` are those whose owner is known: what the picture says of their content is true.
    """
    wanted = (prompt.data or b"")[len(prompt.root) :]
    told = {contents.slot: contents.context for contents in dispatcher.contents(backend)}
    found = []
    for view in dispatcher.slots():
        slot, context = view.ref.slot, told.get(view.ref.slot)
        if view.ref.backend != backend or (view.known and not view.resident_tokens):
            continue
        if slot not in certain or context is None or context.data is None or _may_begin(context, wanted):
            found.append(slot)
    return found


def _may_begin(context: Context, wanted: bytes) -> bool:
    known = (context.data or b"")[len(ROOT) :]  # each client's begins with a root of its own
    return known.startswith(wanted) or (context.unread_tokens > 0 and wanted.startswith(known))


async def empty(
    dispatcher: Dispatcher, engine: EngineClient, headers: Headers, slots: Collection[int]
) -> None:
    """Leave nobody's text in these slots; nothing else runs on the backend.

    Raises a 501 where the engine does not do it, and what ``engine.open`` raises.
    """
    dispatcher.outdated(engine.name, Loss.EVICTED, slots)
    told = await asyncio.gather(*(_fill(engine, headers, slot) for slot in slots), return_exceptions=True)
    failures = [one for one in told if one is not None]
    if any(isinstance(one, EngineError) for one in failures):
        message = "with endpoint.isolation this cannot be served here: the engine would not clear its slots"
        raise errors.RequestError(501, "not_supported_error", message, code="isolation")
    if failures:
        raise failures[0]


async def _fill(engine: EngineClient, headers: Headers, slot: int) -> None:
    body: dict[str, Any] = {"prompt": _NOBODYS, "n_predict": 0, "id_slot": slot, "cache_prompt": False}
    async with engine.open("POST", "/completion", headers, orjson.dumps(body)) as response:
        answer = await response.read()
        if response.status >= 400:  # noqa: PLR2004 - status classes
            raise EngineError(response.status, answer, "/completion")
