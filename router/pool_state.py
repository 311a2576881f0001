"""The state of one pool: its backends, its queue, what its slots hold and held, and whose it is. Pure.

:mod:`.core` changes it in the course of requests; here it is turned into the facts that placement and
scheduling decide on. Matches of queued requests are kept and only looked up again for slots that changed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .history import Conversation, History
from .placement import SlotFacts
from .rates import Rates
from .residency import Residency
from .returns import Returns
from .scheduler import CoreSettings, Waiting, in_flight_limit
from .values import Loss, SlotRef

if TYPE_CHECKING:
    from .residency import Context, SlotState
    from .values import Lease, Prompt, Request

_EDGE = 64
"""A prompt may lack this much of the end of the last one (what opens an answer) and still continue it."""
_BEYOND = 256
"""A match that goes further than the shared preamble by this many bytes is of the conversation itself."""
_MAX_SESSIONS = 4096
_MAX_CHANGES = 10_000
_ROLLBACK_MEMORY = 0.7


@dataclass(slots=True)
class Backend:
    """One engine that is up."""

    name: str
    pool: str
    slots: int
    context: int
    admit: bool = True
    rates: Rates = field(default_factory=Rates)
    active: dict[str, Active] = field(default_factory=dict)
    rollback: float = 1.0
    """Of the tokens that match where a slot must be cut back, the share that the engine reuses: near 0 for
    models whose cache cannot be cut (sliding window, recurrent)."""


@dataclass(slots=True)
class Active:
    """A lease that is out."""

    lease: Lease
    backend: Backend
    entry: Entry
    held_tokens: int
    """Prompt tokens that the chosen slot held, whatever the engine can make of them."""
    best_tokens: int
    """The most prompt tokens that any slot held when the lease was given."""
    gone_tokens: int
    gone_reason: Loss
    rolls_back: bool
    decoding: bool = False
    wiped: bool = False
    """The engine lost what its slots held while this ran."""


@dataclass(slots=True)
class Entry:
    """A queued request with what was found out about it."""

    waiting: Waiting
    matches: dict[SlotRef, int]
    """Bytes that each slot shares with the prompt."""
    conversation: Conversation | None
    seen: int
    """Place in the residency's list of changes up to which ``matches`` holds."""


class Pool:
    """The backends that serve one model, and the requests that wait for them."""

    def __init__(self, name: str, settings: CoreSettings) -> None:
        self.name, self.settings = name, settings
        self.backends: dict[str, Backend] = {}
        self.residency = Residency()
        self.history = History()
        self.returns = Returns()
        self.entries: dict[str, Entry] = {}
        self.arrivals = 0
        self._named: OrderedDict[str, Conversation] = OrderedDict()
        self._begun = 0

    # Conversations

    def enter(self, request: Request, now: float) -> None:
        """Queue a request: find what slots hold of it and which conversation it continues."""
        matches = self.residency.matches(request.prompt) if request.keeps_prefix else {}
        conversation = self._continued(request, matches)
        if conversation is not None:
            gap = max(0.0, now - conversation.released)
            if conversation.silence is not None:
                self.returns.take_back(conversation.silence)
                conversation.silence = None
            self.returns.saw_return(conversation.turns, gap)
        entry = Entry(
            waiting=Waiting(request=request, order=self.arrivals, since=now),
            matches=matches,
            conversation=conversation,
            seen=len(self.residency.changes),
        )
        self.arrivals += 1
        self.entries[request.id] = entry

    def _continued(self, request: Request, matches: dict[SlotRef, int]) -> Conversation | None:
        if request.session is not None:
            return self._named.get(request.session)
        prompt = request.prompt
        best: Conversation | None = None
        best_shared = 0
        for ref, shared in matches.items():
            found = self.residency.slots[ref].conversation
            if found is not None and shared > best_shared and self._continues(prompt, shared, found, ref):
                best, best_shared = found, shared
        for ghost, shared in self.history.matches(prompt):
            found = ghost.conversation
            if shared > best_shared and self._continues(prompt, shared, found, None):
                best, best_shared = found, shared
        return best

    def _continues(self, prompt: Prompt, shared: int, found: Conversation, ref: SlotRef | None) -> bool:
        """Whether a prompt that shares ``shared`` bytes with a conversation is its next call.

        Either it covers the last prompt, or it was changed above, yet shares more than a preamble that other
        slots hold as well.
        """
        if shared >= found.prompt_length - min(_EDGE, found.prompt_length // 10):
            return True
        if ref is None or 2 * shared < found.prompt_length or prompt.length < found.prompt_length:
            return False
        elsewhere = self.residency.shared_bytes(ref)
        return elsewhere > 0 and shared > elsewhere + _BEYOND

    def begin(self, request: Request) -> Conversation:
        """A conversation that was not known before."""
        self._begun += 1
        name = request.session or f"{self.name}-{self._begun}"
        conversation = Conversation(id=name, turns=0, prompt_length=0, tokens=0, released=0.0)
        if request.session is not None:
            self._named[name] = conversation
            if len(self._named) > _MAX_SESSIONS:
                self._named.popitem(last=False)
        return conversation

    def lose(self, slot: SlotState, reason: Loss, now: float, *, beyond: int = 0) -> None:
        """What a slot holds is about to go; remember it if more than its first ``beyond`` bytes do."""
        conversation, held = slot.conversation, slot.held
        if conversation is None or held is None or not slot.known or held.length <= beyond:
            return
        self.history.add(held, reason, conversation)
        if conversation.silence is None and not self._is_wanted(conversation):
            idle = max(0.0, now - conversation.released)
            conversation.silence = self.returns.saw_silence(conversation.turns, idle)

    def _is_wanted(self, conversation: Conversation) -> bool:
        return any(entry.conversation is conversation for entry in self.entries.values())

    # Facts

    def has_room(self, backend: Backend) -> bool:
        """Whether a backend may take one more request at all."""
        limit = in_flight_limit(self.settings.in_flight, backend.slots)
        if not backend.admit or len(backend.active) >= limit:
            return False
        # The engine may put an unpinned request on any idle slot: until it is seen, none is known idle.
        return all(active.lease.request.pinned or active.decoding for active in backend.active.values())

    def refresh(self) -> None:
        """Bring every queued request's matches and estimates up to date."""
        changes = self.residency.changes
        free = {ref for ref, slot in self.residency.slots.items() if slot.request is None}
        end = len(changes)
        for entry in self.entries.values():
            if entry.seen < end:
                self._catch_up(entry, set(changes[entry.seen :]))
                entry.seen = end
            self._estimate(entry, free)
        if end > _MAX_CHANGES:
            changes.clear()
            for entry in self.entries.values():
                entry.seen = 0

    def _catch_up(self, entry: Entry, changed: set[SlotRef]) -> None:
        request = entry.waiting.request
        if not request.keeps_prefix:
            return
        for ref in changed:
            entry.matches.pop(ref, None)
            if ref in self.residency.slots:
                shared = self.residency.match(request.prompt, ref)
                if shared:
                    entry.matches[ref] = shared

    def _estimate(self, entry: Entry, free: set[SlotRef]) -> None:
        waiting, residency = entry.waiting, self.residency
        prompt = waiting.request.prompt
        waiting.prompt_tokens = residency.prompt_tokens(prompt, entry.matches)
        best = idle = 0
        best_ref = next(iter(residency.slots), None)
        for ref, shared in entry.matches.items():
            tokens = self.reusable(entry, ref, shared)
            best = max(best, tokens)
            if ref in free and tokens > idle:
                idle, best_ref = tokens, ref
        waiting.best_tokens, waiting.idle_tokens = best, idle
        if best_ref is not None:
            rates = self.backends[best_ref.backend].rates
            waiting.prefill_seconds = rates.prefill_seconds(idle, waiting.prompt_tokens)
            waiting.total_seconds = rates.prefill_seconds(0, waiting.prompt_tokens)

    def reusable(self, entry: Entry, ref: SlotRef, shared: int) -> int:
        """Prompt tokens that the engine is expected to reuse on a slot that shares ``shared`` bytes."""
        prompt = entry.waiting.request.prompt
        tokens = self.residency.reusable_tokens(prompt, ref, shared, entry.waiting.prompt_tokens)
        if self.rolls_back(ref, shared):
            tokens = int(tokens * self.backends[ref.backend].rollback)
        return tokens

    def rolls_back(self, ref: SlotRef, shared: int) -> bool:
        """Whether the engine has to cut the slot back to reuse ``shared`` bytes of it."""
        held = self.residency.slots[ref].held
        return held is not None and 0 < shared < held.length - _EDGE

    def learn_rollback(self, backend: Backend, held_tokens: int, cached: int) -> None:
        """A slot that was to be cut back to ``held_tokens`` was reused for ``cached``."""
        if held_tokens > 0:
            ratio = min(1.0, cached / held_tokens)
            backend.rollback = _ROLLBACK_MEMORY * backend.rollback + (1 - _ROLLBACK_MEMORY) * ratio

    def facts(self, entry: Entry, now: float) -> list[SlotFacts]:
        """The facts of every slot for one request."""
        request = entry.waiting.request
        room = {name: self._room_for(request, backend) for name, backend in self.backends.items()}
        wanted = {
            id(other.conversation)
            for other in self.entries.values()
            if other is not entry and other.conversation is not None
        }
        return [self._slot_facts(entry, slot, room, wanted, now) for slot in self.residency.slots.values()]

    def _room_for(self, request: Request, backend: Backend) -> bool:
        if not self.has_room(backend):
            return False
        if not request.pinned and backend.active:
            return False
        return request.slots == 1 or len(self.idle_slots(backend)) >= request.slots

    def _slot_facts(
        self, entry: Entry, slot: SlotState, room: dict[str, bool], wanted: set[int], now: float
    ) -> SlotFacts:
        ref, conversation = slot.ref, slot.conversation
        shared = entry.matches.get(ref, 0)
        resident = slot.resident_tokens
        chance, is_wanted = 0.0, False
        if conversation is not None and resident:
            is_wanted = id(conversation) in wanted
            idle = max(0.0, now - conversation.released)
            chance = 1.0 if is_wanted else self.returns.chance(conversation.turns, idle)
        match = self.reusable(entry, ref, shared) if shared else 0
        return SlotFacts(
            ref=ref,
            idle=slot.request is None and room[ref.backend],
            resident_tokens=resident,
            match_tokens=match,
            kept_tokens=min(resident, max(match, self.residency.shared_tokens(ref)[0])),
            same_session=conversation is not None and conversation is entry.conversation,
            wanted=is_wanted,
            held=now < slot.held_until,
            return_chance=chance,
            last_used=slot.last_used,
            rates=self.backends[ref.backend].rates,
        )

    def idle_slots(self, backend: Backend) -> list[SlotRef]:
        """The backend's slots without a lease, lowest first."""
        refs = (SlotRef(backend.name, index) for index in range(backend.slots))
        return [ref for ref in refs if self.residency.slots[ref].request is None]

    def gone(self, entry: Entry) -> tuple[int, Loss]:
        """The most tokens of a prompt that any slot held before, and why it does not any more."""
        request = entry.waiting.request
        best, reason = 0, Loss.EVICTED
        if request.keeps_prefix:
            for ghost, shared in self.history.matches(request.prompt):
                tokens = ghost.context.tokens_at(shared)
                if tokens > best:
                    best, reason = tokens, ghost.reason
        return best, reason

    def hold_for_return(self, slot: SlotState, now: float) -> None:
        """Decide how long a slot that was just released is kept for its own conversation."""
        conversation = slot.conversation
        if conversation is None or not slot.known or slot.held is None:
            return
        if self.settings.linger is not None:
            seconds = self.settings.linger
        else:
            tokens = slot.held.tokens
            kept = self.residency.shared_tokens(slot.ref)[0]
            worth = self.backends[slot.ref.backend].rates.prefill_seconds(kept, tokens)
            seconds = self.returns.linger(conversation.turns, worth)
        slot.held_until = now + seconds

    def remember(
        self, context: Context | None, slot: SlotState, conversation: Conversation, now: float
    ) -> None:
        """A conversation's newest context is in this slot now."""
        conversation.turns += 1
        conversation.released = now
        conversation.tokens = context.tokens if context is not None else 0
        slot.conversation = conversation
        self.history.forget(conversation)
