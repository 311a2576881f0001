"""Routes whose requests the engine places itself (``/v1/messages``): seen ahead, steered, and looked after.

The engine takes the idle slot that shares the longest start with the prompt, the lowest of equals, and only
if that is more than a tenth of the prompt; else the one unused for longest. So a request lands in the slot of
its lease when that one clearly holds most of the prompt already (``FORESEEN``), or once the rendered prompt
has been computed there by a pinned call that generates nothing (``STEERED``). Where neither can be relied on,
because another slot may hold the whole prompt too or what it holds is not known, the request runs while
nothing else does (``ALONE``). Where it really ran is told by the engine's counts, or by the ids of its tasks.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson

from .backend import EngineBroke, EngineError, EngineUnreachable
from .generation import Attempt, Generation, Work
from .isolation import may_hold
from .stream import BODY_LIMIT, TruthReader
from .trie import common_blocks
from .usage import Correction, corrected
from .values import BLOCK, Outcome, Route, SlotObservation, SlotRef, Status

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from .backend import EngineClient
    from .client import Headers
    from .dispatcher import Dispatcher
    from .generation import Shop
    from .isolation import Visit
    from .values import Lease, Request

_CLEAR = 0.2
"""Share of a prompt above which its slot is taken for its content; the engine's own bound is 0.1."""

_MARGIN = 32
"""Tokens by which estimates of what slots share may be wrong."""

_TOO_LONG = "exceed_context_size_error"
"""The engine's name for a prompt that no slot can hold: it will not run the request itself either."""

_WHOLE = 8
"""A slot that lacks no more tokens than this of a prompt may hold all of it."""


class Way(StrEnum):
    """How a request comes to land in the slot of its lease."""

    FORESEEN = "foreseen"
    STEERED = "steered"
    ALONE = "alone"


def way_of(lease: Lease, *, exact: bool, known: bool, others: Iterable[tuple[int, int]]) -> Way:
    """How to serve a lease.

    ``exact``: the prompt is the engine's own text. ``known``: so is what all other slots of the backend hold.
    ``others``: index and tokens shared with the prompt of each other slot, counting what runs there now.
    """
    if not exact or not known:
        return Way.ALONE
    own, total = lease.predicted_tokens, lease.prompt_tokens
    longest = 0
    for slot, shared in others:
        longest = max(longest, shared)
        if shared >= total - _WHOLE and slot < lease.slot.slot:
            return Way.ALONE
    if own > longest + _MARGIN and own >= _CLEAR * total:
        return Way.FORESEEN
    return Way.STEERED


def _others(dispatcher: Dispatcher, lease: Lease) -> Iterable[tuple[int, int]]:
    backend, slot = lease.slot
    for candidate in lease.candidates:
        if candidate.slot.backend == backend and candidate.slot.slot != slot:
            yield candidate.slot.slot, candidate.match_tokens
    wanted = lease.request.prompt
    for held in dispatcher.held().values():
        other = held.lease
        if other is not lease and other.slot.backend == backend:
            same = common_blocks(other.request.prompt.chain, wanted.chain) * BLOCK
            share = min(1.0, (same + BLOCK - 1) / wanted.length) if same and wanted.length else 0.0
            yield other.slot.slot, round(share * lease.prompt_tokens)


def _all_known(dispatcher: Dispatcher, lease: Lease) -> bool:
    return all(
        view.known or view.busy
        for view in dispatcher.slots()
        if view.ref.backend == lease.slot.backend and view.ref != lease.slot
    )


class Steered(Generation):
    """ASGI endpoint of a generating route that the engine does not pin."""

    _needs_text = True

    async def _acquire(self, request: Request, work: Work) -> Lease:
        dispatcher = self._shop.dispatcher
        if not self._shop.isolate and work.text is not None:
            # (Isolated prompts that are equal to others' cannot be told by their keys.)
            lease = await dispatcher.acquire(request)
            if self._way(lease, work) is not Way.ALONE:
                return lease
            # Nothing was sent yet: the slot goes back as it was.
            dispatcher.abandon(request.id, Outcome(Status.CANCELLED, untouched=True))
        return await dispatcher.acquire(replace(request, id=f"{request.id}-alone", pinned=False))

    def _wish(self, body: dict[str, Any]) -> int | None:  # noqa: ARG002 - the engine hears no such wish here
        return None

    def _way(self, lease: Lease, work: Work) -> Way:
        dispatcher = self._shop.dispatcher
        exact, known = work.text is not None, _all_known(dispatcher, lease)
        way = way_of(lease, exact=exact, known=known, others=_others(dispatcher, lease))
        # What a mask hides from the key, the engine sees: its own choice cannot be foreseen.
        return Way.STEERED if way is Way.FORESEEN and work.masked else way

    def _attempt(self, lease: Lease, work: Work) -> Attempt:
        return SteeredAttempt(self._shop, lease, work, self._way(lease, work))


class SteeredAttempt(Attempt):
    """One lease of a request that the engine places itself."""

    def __init__(self, shop: Shop, lease: Lease, work: Work, way: Way) -> None:
        super().__init__(shop, lease, work)
        self._way = way if lease.request.pinned else Way.ALONE
        self._before: TruthReader | None = None
        """What the engine said of the call that computed the prompt."""
        self._ran_on: SlotRef | None = None
        self._correction: Correction | None = None
        self._too_long = False

    async def _prepare(self, engine: EngineClient) -> None:
        """Compute the prompt in the slot of the lease, so that the engine takes this one.

        Where clients are isolated, no slot may be taken for what another client has in it.
        """
        if self._way is Way.FORESEEN:
            return
        headers, text, visit = self._shop.on_behalf(self._work.client), self._work.text, self._visit
        if text is not None and visit is None:
            await self._compute(engine, headers, text)
        elif text is not None and visit is not None:
            # In one batch of the engine's: how long it takes must not tell whether there was one to empty.
            await _all(
                self._compute(engine, headers, text),
                visit.empty(engine, headers, self._betraying(visit)),
            )
        if visit is not None and self._before is None and not self._too_long:
            # What the call above computed, if anything, would be told to the client as having been there.
            own = set() if text is None else {self._lease.slot.slot}
            self._dispatcher.sending(self._id)
            await visit.empty(engine, headers, own.union(visit.strangers()))
        # Of another error nothing is told here: the engine answers the request itself with it.
        self._dispatcher.sending(self._id)

    def _betraying(self, visit: Visit) -> list[int]:
        """The slots that would be taken in place of the one where the prompt is computed.

        Of slots that hold all of a prompt the engine takes the lowest.
        """
        slot, prompt = self._lease.slot, self._lease.request.prompt
        lower = [other for other in visit.strangers() if other < slot.slot]
        return may_hold(self._dispatcher, slot.backend, prompt, lower, visit.before)

    async def _compute(self, engine: EngineClient, headers: Headers, text: str) -> None:
        body = {
            "prompt": text,
            "n_predict": 0,
            "id_slot": self._lease.slot.slot,
            "cache_prompt": not self._fresh,
            "stream": True,
            "return_progress": True,  # an engine notices sooner that nobody waits any more
        }
        reader = TruthReader(Route.COMPLETION, streaming=True)
        async with engine.open("POST", "/completion", headers, orjson.dumps(body)) as response:
            if self._visit is None:  # else it says nothing of what else was sent
                self._dispatcher.started(self._id)
            async for chunk in response.chunks():
                reader.feed(chunk)
        self._too_long = (reader.error or {}).get("type") == _TOO_LONG
        if reader.error is None and reader.cached_tokens is not None:
            self._before = reader
            self._correction = Correction(*self._computed())

    @property
    def _fresh(self) -> bool:
        """Of the call that computes the prompt, which is pinned."""
        visit = self._visit
        owned = visit is None or visit.owns(self._lease.slot.slot)
        return visit is not None and not (owned and self._lease.predicted_tokens > 0)

    @property
    def _disturbed(self) -> bool:
        emptied = frozenset() if self._visit is None else self._visit.emptied
        return self._before is not None or self._lease.slot.slot in emptied

    def _claim(self, visit: Visit) -> None:
        filled = {self._lease.slot} if self._before is not None else set()
        if self._ran_on is not None:
            filled.add(self._ran_on)
        if self._ran_on is not None or self._refused:
            visit.filled_only({ref.slot for ref in filled})

    def _body(self) -> bytes:
        """The client's bytes. A build that honours a pin here is told the slot; the others ignore it."""
        return super()._body() if self._lease.request.pinned else self._work.raw

    def _shown(self, chunk: bytes) -> bytes:
        """With the counts that the client would have seen had its prompt not been computed just before."""
        return chunk if self._correction is None else self._correction.feed(chunk)

    def _shown_last(self) -> bytes:
        return b"" if self._correction is None else self._correction.rest()

    @property
    def _most_held(self) -> int:
        # Its counts stand at its end. What is longer than the reader keeps passes as the engine wrote it.
        return super()._most_held if self._before is None else BODY_LIMIT

    def _shown_whole(self, body: bytes) -> bytes:
        return body if self._before is None else corrected(body, *self._computed())

    def _computed(self) -> tuple[int, int]:
        """Tokens that the call before found, and all of the prompt; zeros without one."""
        before = self._before
        cached = 0 if before is None else before.cached_tokens or 0
        return cached, cached + (0 if before is None else before.processed_tokens or 0)

    @property
    def _settles_late(self) -> bool:
        return not self._landed()

    def _found(self) -> bool:
        """Whether the request found in its slot what was expected there."""
        cached = self._reader.cached_tokens
        expected = self._lease.predicted_tokens - _MARGIN
        if self._before is not None:
            expected = self._computed()[1] - 1
        return cached is not None and cached >= expected

    def _landed(self) -> bool:
        """Whether the engine's counts prove that the slot of the lease served the request."""
        return self._lease.request.pinned and self._found()

    async def _look_where(self) -> None:
        if self._landed():
            return
        backend = self._lease.slot.backend
        try:
            seen = await self._dispatcher.client(self._lease).slots()
        except (EngineError, EngineUnreachable, EngineBroke):
            return
        taken = {
            slot
            for held in self._dispatcher.held().values()
            if held.lease is not self._lease and held.lease.slot.backend == backend
            for slot in held.slots
        }
        # Ids grow: of the slots that no other lease names, the newest task is this request's.
        tasks = [(one.task, one.slot) for one in seen or () if one.task is not None and one.slot not in taken]
        if tasks:
            self._ran_on = SlotRef(backend, max(tasks)[1])

    def _finish(self, outcome: Outcome) -> None:
        super()._finish(outcome)
        if self._ran_on is not None and self._ran_on != self._lease.slot and self._before is not None:
            # The slot of the lease holds a prompt now that ran elsewhere.
            stale = SlotObservation(self._lease.slot.slot, processing=True)
            self._dispatcher.observed(self._lease.slot.backend, [stale])

    def _outcome(self, status: Status) -> Outcome:
        outcome = super()._outcome(status)
        cached, processed = outcome.cached_tokens, outcome.processed_tokens
        if cached is None or processed is None:
            return outcome
        if self._before is not None and self._found():
            # What the request found there had been computed for it a moment ago.
            total = cached + processed
            cached = min(self._before.cached_tokens or 0, total)
            outcome = replace(
                outcome,
                cached_tokens=cached,
                processed_tokens=total - cached,
                prefill_seconds=self._before.prefill_seconds,
            )
        if self._landed():
            return outcome
        if self._ran_on is None:
            # It ran somewhere: no slot is credited with it.
            return replace(outcome, cached_tokens=None, processed_tokens=None)
        return replace(outcome, slot=self._ran_on)


async def _all(*calls: Coroutine[Any, Any, None]) -> None:
    """Make calls at once and wait for all of them; raises what the first of them that failed raised."""
    for failure in await asyncio.gather(*calls, return_exceptions=True):
        if failure is not None:
            raise failure
