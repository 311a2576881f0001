"""Clients kept apart: whose text each slot may hold, and what is done where the engine chooses the slot.

A prediction is no proof: a client that left before the engine began on its request left the slot as it was,
with the text of somebody else. So a slot is a client's own only if it was nobody's before, or once the engine
has answered a request of that client there whole, and nobody else's may have touched it since. In any other
slot all is computed anew; where the engine chooses the slot, those that may hold others' text are emptied.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
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
    from .values import Lease, Prompt

_NOBODYS = "."
"""The prompt that takes the place of somebody's text: it shares next to nothing with any other."""

NOBODY: Final = ""
"""The owner of a slot that holds no client's text."""


@dataclass(slots=True)
class _Life:
    """What is certain of the slots of one backend between its start and its end."""

    owners: dict[int, str] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    """Slots of which no picture is believed any more: a request may have left something there."""


class Tenants:
    """Whose text each slot holds, where that is certain; forgotten with the life of a backend."""

    def __init__(self) -> None:
        self._lives: WeakKeyDictionary[SlotWatch, _Life] = WeakKeyDictionary()

    def owns(self, client: str, life: SlotWatch, slot: int) -> bool:
        """Whether nothing but text of this client is in the slot."""
        return self._of(life).owners.get(slot) == client

    def doubt(
        self,
        life: SlotWatch,
        slots: Collection[int] | None = None,
        *,
        by: str | None = None,
        blank: Collection[int] = (),
    ) -> dict[int, str]:
        """A request of ``by`` may touch these slots, or any: no longer is certain what others hold there.

        A slot of nobody's holds at most what ``by`` puts there, so it is this client's from now on. Nobody's
        are also slots in ``blank``, which are empty as far as is known, if no request was there before.

        Returns what was, for :meth:`know` in case that they turn out to be untouched.
        """
        known = self._of(life)
        doubted = {}
        for slot in range(life.count) if slots is None else slots:
            owner = known.owners.get(slot)
            if owner is None and slot in blank and slot not in known.touched:
                owner = NOBODY
            known.touched.add(slot)
            if owner is None or owner == by:
                continue
            doubted[slot] = owner
            if owner == NOBODY and by is not None:
                known.owners[slot] = by
            else:
                known.owners.pop(slot, None)
        return doubted

    def know(self, life: SlotWatch, owners: Mapping[int, str]) -> None:
        """These slots hold nothing but the text of these clients, or of :data:`NOBODY`."""
        self._of(life).owners.update(owners)

    def _of(self, life: SlotWatch) -> _Life:
        return self._lives.setdefault(life, _Life())


def known_empty(dispatcher: Dispatcher, backend: str) -> set[int]:
    """The slots of a backend that hold nothing, as far as the picture goes."""
    return {
        view.ref.slot
        for view in dispatcher.slots()
        if view.ref.backend == backend and view.known and not view.resident_tokens
    }


def may_hold(
    dispatcher: Dispatcher, backend: str, prompt: Prompt, slots: Collection[int], certain: Collection[int]
) -> list[int]:
    """Those of some slots of which nobody can say that they do not hold the whole of a client's prompt.

    ``certain`` are those whose owner is known: what the picture says of their content is true.
    """
    wanted = (prompt.data or b"")[len(prompt.root) :]
    told = {contents.slot: contents.context for contents in dispatcher.contents(backend)}
    return [
        slot
        for slot in slots
        if slot not in certain or (context := told.get(slot)) is None or _may_begin(context, wanted)
    ]


def _may_begin(context: Context, wanted: bytes) -> bool:
    if context.data is None:
        return True
    known = context.data[len(ROOT) :]  # each client's begins with a root of its own
    return known.startswith(wanted) or (context.unread_tokens > 0 and wanted.startswith(known))


class Visit:
    """One client's request on a backend, where clients are kept apart: whose text it may touch and leave.

    Begun before anything is sent. Until more is known nothing is certain of ``slots``, or of any, but that
    text of this client alone stays so.
    """

    def __init__(
        self, tenants: Tenants, dispatcher: Dispatcher, lease: Lease, slots: Collection[int] | None = None
    ) -> None:
        self._tenants, self._dispatcher = tenants, dispatcher
        self._client = lease.request.client
        self._life = dispatcher.held()[lease.request.id].life
        blank = known_empty(dispatcher, lease.slot.backend)
        self.before = tenants.doubt(self._life, slots, by=self._client, blank=blank)
        """Owners of those slots as they were."""
        self.emptied: frozenset[int] = frozenset()
        """Slots that were filled with nobody's text since."""

    def owns(self, slot: int) -> bool:
        """Whether nothing but text of this client is in the slot."""
        return self._tenants.owns(self._client, self._life, slot)

    def strangers(self) -> list[int]:
        """The slots of the backend that may hold text of others."""
        return [slot for slot in range(self._life.count) if not self.owns(slot)]

    async def empty(self, engine: EngineClient, headers: Headers, slots: Collection[int]) -> None:
        """Leave nobody's text in these slots, so that this request finds none of others there.

        Nothing of others runs on the backend. Raises what :func:`empty` raises.
        """
        if slots:
            await empty(self._dispatcher, engine, headers, slots)
            self.emptied |= frozenset(slots)
            self._tenants.know(self._life, dict.fromkeys(slots, self._client))

    def filled(self, slot: int) -> None:
        """The engine has answered it whole, in this slot."""
        self._tenants.know(self._life, {slot: self._client})

    def filled_only(self, slots: Collection[int]) -> None:
        """It is over, and it has touched no slots but these and those that were emptied for it."""
        rest = self.before | dict.fromkeys(self.emptied, NOBODY)
        self._tenants.know(self._life, rest | dict.fromkeys(slots, self._client))


async def empty(
    dispatcher: Dispatcher, engine: EngineClient, headers: Headers, slots: Collection[int]
) -> None:
    """Leave nobody's text in these slots, on which nothing runs.

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
