"""The state of one pool: its backends, its queue, what its slots hold and held, and whose it is. Pure.

:mod:`.core` changes it in the course of requests; here it is turned into the facts that placement and
scheduling decide on. Matches of queued requests are kept and only looked up again for slots that changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from . import scheduler
from .history import History
from .host_tier import NOTHING, Exchange, Seen
from .placement import Ask, Demand
from .rates import Rates, passes_of, usual_passes
from .residency import Residency
from .samples import Samples
from .scheduler import Capacity, CoreSettings, Pick, Waiting, in_flight_limit
from .sessions import Sessions
from .shadow import Served, Shadow
from .values import BLOCK, Loss, SlotRef
from .view import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .host_tier import HostTier
    from .residency import Context
    from .values import Lease, Outcome, Request

_Changed: TypeAlias = "tuple[SlotRef, Sequence[int], int]"
"""A slot that changed, the chain of what it holds now, and how long that is in blocks."""

_ROLLBACK_MEMORY = 0.7
_CARRIED_MEMORY = 0.3
_CUT_BYTES = 64
"""Less than this at the end of a slot is not counted as cutting it back."""
_OUTPUT_PRIOR = 128.0
_OVERRUN_PRIOR = 2 * _OUTPUT_PRIOR
_OUTPUT_MEMORY = 0.98


@dataclass(slots=True)
class Backend:
    """One engine that is up."""

    name: str
    pool: str
    slots: int
    context: int
    host: HostTier | None = None
    """What its prompt cache in host memory holds, where it has one."""
    unified: bool = False
    """Its slots share one context of ``context`` tokens: one more request may not fit beside the others."""
    admit: bool = True
    """Whether leases may be given on it now."""
    awaited: bool = True
    """Whether it is worth waiting for one of its slots: they are given out now, or will be in a moment."""
    rates: Rates = field(default_factory=Rates)
    active: dict[str, Active] = field(default_factory=dict)
    """Changed by :meth:`begin` and :meth:`end` alone."""
    running: frozenset[int] = frozenset()
    """The slots that they run on, and in how many ``passes`` a step of all of these is computed."""
    passes: int = 0
    rollback: float = 1.0
    """Of the tokens that match where a slot must be cut back, the share that the engine reuses: near 0 for
    models whose cache cannot be cut (sliding window, recurrent)."""
    crowd: float = 0.0
    """Integral over time of how many requests decode; ``parts``: of the passes of a step of theirs."""
    parts: float = 0.0
    stalled: float = 0.0
    """Seconds so far in which a prompt was computed while others may have decoded."""
    _ticked: float = 0.0

    def gain(self, busy: float) -> float:
        """Tokens per second with ``busy`` answers on slots anywhere, in units of what one has alone."""
        return self.rates.gain(busy, usual_passes(busy, self.slots))

    def tick(self, now: float) -> None:
        """Bring ``crowd`` and ``passes`` up to date, before who decodes changes."""
        decoding = [active.lease for active in self.active.values() if active.decoding_since is not None]
        self.crowd += len(decoding) * (now - self._ticked)
        self.parts += passes_of(_slots(decoding)) * (now - self._ticked)
        self._ticked = now

    def begin(self, request_id: str, active: Active) -> None:
        """A lease is given out."""
        self.active[request_id] = active
        self._recount()

    def end(self, request_id: str) -> None:
        """It is over."""
        del self.active[request_id]
        self._recount()

    def _recount(self) -> None:
        self.running = frozenset(_slots(active.lease for active in self.active.values()))
        self.passes = passes_of(self.running)


def _slots(leases: Iterable[Lease]) -> Iterator[int]:
    return (ref.slot for lease in leases for ref in (lease.slot, *lease.extra_slots))


@dataclass(frozen=True, slots=True)
class Contents:
    """What a slot holds, to be put back into one after its engine was started anew."""

    slot: int
    context: Context
    session: str = ""
    chance: float = 1.0
    """That it is asked for again at all."""

    @property
    def tokens(self) -> int:
        """Its length as the engine counts it."""
        return self.context.tokens + self.context.unread_tokens


@dataclass(slots=True)
class Active:
    """A lease that is out."""

    lease: Lease
    backend: Backend
    waiting: Waiting
    before: Context | None
    """What the slot held when the lease was given; ``before_known``: and whether that was known."""
    before_known: bool
    before_unverified: bool
    before_session: str
    held_tokens: int
    """Prompt tokens that the chosen slot held, whatever the engine can make of them."""
    best_tokens: int
    """The most prompt tokens that any slot held when the lease was given."""
    gone_tokens: int
    gone_reason: Loss
    rolls_back: bool
    prefill_seconds: float
    exchange: Exchange = NOTHING
    """What the engine's prompt cache in host memory is to save and load for it."""
    beside: bool = False
    """Another prompt was computed between its grant and its first token."""
    decoding_since: float | None = None
    crowd: float = 0.0
    parts: float = 0.0
    stalled: float = 0.0
    """The backend's ``crowd``, ``parts`` and ``stalled`` when the decoding began."""
    carried_tokens: int = 0
    """``held_tokens`` of a slot that was put back from a file and not used since."""
    wiped: bool = False
    """The engine lost what its slots held while this ran."""


class Pool:
    """The backends that serve one model, and the requests that wait for them."""

    def __init__(self, name: str, settings: CoreSettings) -> None:
        self.name, self.settings = name, settings
        self.backends: dict[str, Backend] = {}
        self.residency = Residency()
        self.history = History()
        self.sessions = Sessions()
        self.shadow = Shadow()
        self.waiting: dict[str, Waiting] = {}
        self.wake: float | None = None
        """When to pick again though nothing happens, as of the last pick."""
        self._arrivals = 0
        self.mean_output = _OUTPUT_PRIOR
        self._outputs = Samples()
        """Tokens of the last answers."""
        self._prompt_tokens = 0.0
        self._served: dict[str, float] = {}
        self._carried: dict[str, float] = {}
        """Share of a slot that was put back which a backend really used, the last ones weighing most. It
        outlives the backend's restarts, because only after one is there anything to learn."""

    # The queue

    def enter(self, request: Request, now: float) -> None:
        """Queue a request: find what slots hold of it and which conversation it continues."""
        session, reach = self.sessions.arrive(request.prompt, request.session, now)
        waiting = Waiting(
            request=request,
            order=self._arrivals,
            since=now,
            session=session.id,
            reach=reach,
            epoch=self.residency.epoch,
        )
        if request.keeps_prefix:
            waiting.matches = self.residency.matches(request.prompt)
        waiting.prompt_tokens = self.residency.prompt_tokens(request.prompt, waiting.matches)
        for ref, shared in waiting.matches.items():
            waiting.tokens[ref] = self._reusable(waiting, ref, shared)
        self._arrivals += 1
        self._join(request.client)
        self.waiting[request.id] = waiting
        self._estimate(waiting)

    def leave(self, request_id: str, now: float) -> None:
        """Take a request out of the queue unserved; unknown ids are ignored."""
        waiting = self.waiting.pop(request_id, None)
        if waiting is not None:
            self.sessions.release(waiting.session, now)

    def _join(self, client: str) -> None:
        """A client that was away starts level with the least served one that is here."""
        here = {w.request.client for w in self.waiting.values()}
        here |= {a.lease.request.client for b in self.backends.values() for a in b.active.values()}
        if client not in here:
            least = min((self._served.get(name, 0.0) for name in here), default=0.0)
            self._served = {name: self._served.get(name, 0.0) for name in here}
            self._served[client] = max(self._served.get(client, 0.0), least)

    def learn_prompt(self, tokens: int) -> None:
        """A prompt was this long."""
        if not self._prompt_tokens:
            self._prompt_tokens = tokens
        self._prompt_tokens = _OUTPUT_MEMORY * self._prompt_tokens + (1 - _OUTPUT_MEMORY) * tokens

    def learn_output(self, client: str, tokens: int, seconds: float) -> None:
        """A request of a client is over: how much it wrote, and how long it was served."""
        self._outputs.add(tokens)
        self.mean_output = _OUTPUT_MEMORY * self.mean_output + (1 - _OUTPUT_MEMORY) * tokens
        self._served[client] = self._served.get(client, 0.0) + seconds

    # What is known of the waiting

    def refresh(self) -> None:
        """Bring what decides about every queued request up to date.

        A slot that changed matters to a request only if it was one of its two best, or is now. The others are
        looked at when the request is priced.
        """
        epoch = self.residency.epoch
        changed: dict[int, list[_Changed]] = {}
        hosts = [(name, backend.host) for name, backend in self.backends.items() if backend.host is not None]
        for waiting in self.waiting.values():
            if waiting.host:
                self._forget_hosts(waiting)
            for name, host in hosts:
                self._look_at_host(waiting, name, host)
            if waiting.epoch == epoch:
                continue
            if waiting.epoch not in changed:
                refs = self.residency.changed_since(waiting.epoch)
                changed[waiting.epoch] = [self._as_it_is(ref) for ref in refs]
            matter = _mattering(waiting, changed[waiting.epoch])
            waiting.epoch = epoch
            if matter:
                second = waiting.second_bytes
                self.resolve(waiting, matter)
                if waiting.second_bytes < second - BLOCK:  # what was no match for the two best may be one now
                    self.resolve(waiting, list(waiting.stale))

    def _forget_hosts(self, waiting: Waiting) -> None:
        """Hope for nothing from the host memory of backends that are gone, or have come back without."""
        gone = [
            name
            for name in waiting.host
            if (backend := self.backends.get(name)) is None or backend.host is None
        ]
        for name in gone:
            del waiting.host[name]
        if gone:
            self._estimate(waiting)

    def _look_at_host(self, waiting: Waiting, name: str, host: HostTier) -> None:
        """Find what a backend's host memory has of a queued request's prompt, if that may have changed."""
        prompt = waiting.request.prompt
        seen = waiting.host.get(name)
        if seen is not None and seen.tier is host:
            if seen.epoch == host.epoch:
                return
            if not host.changed(seen.epoch, prompt, seen.matches):
                waiting.host[name] = seen._replace(epoch=host.epoch)
                return
        matches = host.matches(prompt) if waiting.request.keeps_prefix else ()
        waiting.host[name] = Seen(host, host.epoch, matches)
        self._estimate(waiting)

    def _as_it_is(self, ref: SlotRef) -> _Changed:
        slot = self.residency.slots.get(ref)
        chain = slot.held.chain if slot is not None and slot.held is not None and slot.known else ()
        return ref, chain, len(chain)

    def resolve(self, waiting: Waiting, refs: Iterable[SlotRef]) -> None:
        """Look at some of the slots that changed since, and estimate anew if that makes a difference."""
        residency, request = self.residency, waiting.request
        touched = False
        for ref in refs:
            waiting.stale.discard(ref)
            known = ref in residency.slots and request.keeps_prefix
            shared = residency.match(request.prompt, ref) if known else 0
            if shared:
                waiting.matches[ref] = shared
                waiting.tokens[ref] = self._reusable(waiting, ref, shared)
            elif ref in waiting.matches:  # also where what it shared was less than a token
                del waiting.matches[ref], waiting.tokens[ref]
            now = waiting.tokens.get(ref, 0)
            touched = (
                touched or now > waiting.second_tokens or ref in {waiting.best_slot, waiting.second_slot}
            )
        if touched:
            self._estimate(waiting)

    def _estimate(self, waiting: Waiting) -> None:
        request, tokens = waiting.request, waiting.tokens
        waiting.prompt_tokens = self.residency.prompt_tokens(request.prompt, waiting.matches)
        best = second = None
        most = next_most = -1
        for ref, held in tokens.items():
            if held > most:
                second, next_most = best, most
                best, most = ref, held
            elif held > next_most:
                second, next_most = ref, held
        waiting.best_slot, waiting.second_slot = best, second
        waiting.best_tokens, waiting.second_tokens = max(0, most), max(0, next_most)
        waiting.second_bytes = waiting.matches[second] if second is not None else 0
        waiting.demand = Demand(request.id, waiting.best_tokens, waiting.second_tokens)
        name = best.backend if best is not None else next(iter(self.backends), None)
        if name is not None:
            rates = self.backends[name].rates
            waiting.prefill_seconds = rates.prefill_seconds(waiting.best_tokens, waiting.prompt_tokens)
            waiting.prefill_seconds = min(waiting.prefill_seconds, self._loaded_seconds(waiting))
            waiting.full_seconds = rates.prefill_seconds(0, waiting.prompt_tokens)
            waiting.waste = scheduler.waste(waiting.prefill_seconds, waiting.full_seconds)
            waiting.rank = scheduler.rank(waiting, waiting.waste)
            allowed = request.max_output_tokens
            output = self.mean_output if allowed is None else min(allowed, self.mean_output)
            waiting.decode_seconds = rates.decode_seconds(output)
            waiting.seconds = waiting.prefill_seconds + waiting.decode_seconds
            if allowed is not None:
                waiting.spread_seconds = rates.decode_seconds(allowed - output)

    def _loaded_seconds(self, waiting: Waiting) -> float:
        """What it takes at least to serve a request from a backend's host memory, copying included."""
        return min(
            (
                self.backends[name].rates.loaded_seconds(match.tokens, match.kept, waiting.prompt_tokens)
                for name, seen in waiting.host.items()
                for match in seen.matches
            ),
            default=math.inf,
        )

    def _reusable(self, waiting: Waiting, ref: SlotRef, shared: int) -> int:
        """Prompt tokens that the engine is expected to reuse on a slot that shares ``shared`` bytes."""
        prompt = waiting.request.prompt
        tokens = self.residency.reusable_tokens(prompt, ref, shared, waiting.prompt_tokens)
        if self.rolls_back(ref, shared):
            tokens = int(tokens * self.backends[ref.backend].rollback)
        if self.residency.slots[ref].unverified:
            tokens = int(tokens * self._carried.get(ref.backend, 1.0))
        return tokens

    def rolls_back(self, ref: SlotRef, shared: int) -> bool:
        """Whether the engine has to cut the slot back to reuse ``shared`` bytes of it."""
        held = self.residency.slots[ref].held
        return held is not None and 0 < shared < held.length - _CUT_BYTES

    def learn_rollback(self, backend: Backend, held_tokens: int, cached: int) -> None:
        """A slot that was to be cut back to ``held_tokens`` was reused for ``cached``."""
        if held_tokens > 0:
            ratio = min(1.0, cached / held_tokens)
            backend.rollback = _ROLLBACK_MEMORY * backend.rollback + (1 - _ROLLBACK_MEMORY) * ratio

    def carried_tokens(self, waiting: Waiting, prompt_tokens: int) -> int:
        """The most tokens of a prompt that a slot which was put back holds, counted on or not."""
        slots, prompt = self.residency.slots, waiting.request.prompt
        return max(
            (
                self.residency.reusable_tokens(prompt, ref, shared, prompt_tokens)
                for ref, shared in waiting.matches.items()
                if ref in slots and slots[ref].unverified
            ),
            default=0,
        )

    def learn_carried(self, backend: Backend, held_tokens: int, cached: int) -> None:
        """Of ``held_tokens`` on a slot that was put back, ``cached`` were reused.

        Sliding-window and recurrent models need checkpoints to go back even a token, which not every engine
        saves: then such a slot is worth little, and the next one should not be counted on.
        """
        if held_tokens > 0:
            ratio = min(1.0, cached / held_tokens)
            before = self._carried.get(backend.name, 1.0)
            self._carried[backend.name] = _CARRIED_MEMORY * before + (1 - _CARRIED_MEMORY) * ratio

    # Who goes next

    def pick(self, now: float) -> Pick:
        """What to start now; the estimates must be fresh."""
        demands: dict[SlotRef, list[Demand]] = {}
        for waiting in self.waiting.values():
            if waiting.best_slot is not None and waiting.demand is not None:
                demands.setdefault(waiting.best_slot, []).append(waiting.demand)
        view = View(self, demands, now)
        return scheduler.pick(
            list(self.waiting.values()),
            self.settings,
            now,
            capacity=self._capacity(),
            served=self._served,
            overrun=self.overrun,
            idle=view.at_home,
            price=view.price,
            linger=view.linger,
        )

    def _capacity(self) -> Capacity:
        at_once = [(backend, self.limit(backend)) for backend in self.backends.values()]
        return Capacity(
            requests=max(1, sum(limit for _, limit in at_once)),
            prompts=max(1.0, len(at_once)),
            answers=max(1.0, sum(backend.gain(limit) for backend, limit in at_once)),
        )

    def overrun(self, most: float) -> float:
        """By how many seconds one of the last answers took longer than is expected of the next.

        It is the longest of those for which ``most`` would do: for the others nothing can be kept free.
        """
        step = max((backend.rates.decode_seconds(1) for backend in self.backends.values()), default=0.0)
        if not step or most <= 0:
            return 0.0
        if not self._outputs.ordered:
            return min(most, _OVERRUN_PRIOR * step)
        longest = self._outputs.most(self.mean_output + most / step)
        return 0.0 if longest is None else max(0.0, (longest - self.mean_output) * step)

    def limit(self, backend: Backend) -> int:
        """How many requests may run at once on a backend, as far as its rates are known."""
        most = in_flight_limit(self.settings.in_flight, backend.slots)
        if self.settings.in_flight != "auto" or most == 1:
            return most
        if len(self.waiting) + sum(len(other.active) for other in self.backends.values()) <= backend.slots:
            return most
        decode = backend.rates.decode_seconds(self.mean_output)
        reload = backend.rates.prefill_seconds(0, round(self._prompt_tokens))
        return scheduler.best_level(most, decode, reload, backend.gain)

    def has_room(self, backend: Backend) -> bool:
        """Whether a backend may take one more request at all."""
        if not backend.admit or len(backend.active) >= self.limit(backend):
            return False
        # The engine may put an unpinned request on any idle slot: until it is seen, none is known idle.
        return all(a.lease.request.pinned or a.decoding_since is not None for a in backend.active.values())

    def has_context(self, backend: Backend, waiting: Waiting) -> bool:
        """Whether a request fits beside those that run into a context that all slots of a backend share.

        Alone it is started in any case: an engine has its own words for what is too long.
        """
        if not (backend.unified and backend.context and backend.active):
            return True
        needed = self._needs(waiting.request, waiting.prompt_tokens)
        for active in backend.active.values():
            needed += self._needs(active.lease.request, active.lease.prompt_tokens)
        return needed <= backend.context

    def _needs(self, request: Request, prompt_tokens: int) -> float:
        """Tokens that a request may come to hold; several answers to one prompt share it."""
        most = request.max_output_tokens
        return prompt_tokens + request.slots * (self.mean_output if most is None else most)

    def idle_slots(self, backend: Backend) -> list[SlotRef]:
        """The backend's slots with nothing at work on them, lowest first."""
        refs = (SlotRef(backend.name, index) for index in range(backend.slots))
        return [ref for ref in refs if self.residency.slots[ref].idle]

    def decode_left(self, active: Active, now: float) -> float:
        """Seconds that a running request is expected to go on decoding."""
        output = self.mean_output
        most = active.lease.request.max_output_tokens
        if most is not None:
            output = min(output, most)
        backend = active.backend
        seconds = backend.rates.decode_seconds(output, len(backend.active), backend.passes)
        since = active.decoding_since
        return seconds if since is None else max(seconds / 4, seconds - (now - since))

    def prefill_left(self, active: Active, now: float) -> float:
        """Seconds that a running request is expected to go on computing its prompt."""
        if active.decoding_since is not None:
            return 0.0
        return max(0.0, active.lease.granted + active.prefill_seconds - now)

    def seconds_left(self, now: float) -> float:
        """Seconds of work that all running requests have before them."""
        return sum(
            self.prefill_left(active, now) + self.decode_left(active, now)
            for backend in self.backends.values()
            for active in backend.active.values()
        )

    # What is carried over a restart

    def contents(self, backend: Backend) -> list[Contents]:
        """What the backend's idle slots are known to hold."""
        wanted = {waiting.session for waiting in self.waiting.values()}
        found = []
        for ref in self.idle_slots(backend):
            slot = self.residency.slots[ref]
            if slot.known and slot.held is not None and not slot.at_most:
                chance = 1.0 if slot.session in wanted else self.sessions.chance(slot.session)
                found.append(Contents(ref.slot, slot.held, slot.session, chance))
        return found

    def believe(self, ref: SlotRef, contents: Contents, now: float) -> None:
        """An empty slot was filled again with this, as the engine says."""
        slot = self.residency.slots[ref]
        slot.session, slot.last_used = contents.session, now
        self.history.restored(contents.context)
        self.residency.hold(ref, contents.context, known=True, unverified=True)

    # What would be with other slot counts

    def imagine(self, active: Active, outcome: Outcome) -> dict[str, int]:
        """Let the imagined slots serve a request that a real slot has just served."""
        request, waiting = active.lease.request, active.waiting
        ref = outcome.slot or active.lease.slot
        context = self.residency.slots[ref].held if ref in self.residency.slots else None
        if context is None or request.slots > 1 or not request.keeps_prefix:
            return {}
        tokens = (outcome.cached_tokens or 0) + (outcome.processed_tokens or 0)
        ask = Ask(
            request=request.id,
            session=waiting.session,
            prompt_tokens=tokens,
            rollback_chance=self.sessions.tail_chance(waiting.session),
            turns=self.sessions.turns_ahead(),
        )
        served = Served(request.prompt, tokens, context, waiting.session, active.backend.rollback)
        return self.shadow.serve(served, active.backend.rates, ask, self.sessions.chance)

    # What was lost

    def lose(self, context: Context | None, reason: Loss, *, beyond: int = 0) -> None:
        """A context is gone from its slot, but for its first ``beyond`` bytes."""
        if context is not None and context.length > beyond + _CUT_BYTES:
            self.history.add(context, reason)

    def missed(self, context: Context | None, reason: Loss) -> None:
        """The same, where it may have been said before: looks at slots show it again and again."""
        if context is not None and context not in self.history:
            self.lose(context, reason)

    def gone(self, waiting: Waiting) -> tuple[int, Loss]:
        """The most tokens of a prompt that any slot held before, and why it does not any more."""
        if not waiting.request.keeps_prefix:
            return 0, Loss.EVICTED
        tokens, reason = self.history.recall(waiting.request.prompt)
        return tokens, reason or Loss.EVICTED


def _mattering(waiting: Waiting, changed: Sequence[_Changed]) -> list[SlotRef]:
    """Which of the slots that changed are among the two best of a request, or were.

    One that is not, but matches otherwise than before, is noted as stale. Runs for every queued request
    whenever a slot changes, so the common case comes first: it shares as much as before, often a preamble.
    """
    ours, matches, found = waiting.request.prompt.chain, waiting.matches, []
    mine = len(ours)
    for ref, theirs, length in changed:
        blocks = matches.get(ref, 0) // BLOCK
        if (
            0 < blocks < length
            and blocks < mine
            and theirs[blocks] != ours[blocks]
            and theirs[blocks - 1] == ours[blocks - 1]
        ):
            continue
        beyond = waiting.second_bytes // BLOCK
        waiting.stale.add(ref)
        if (
            (not length and ref in matches)  # gone altogether, maybe: nothing may be looked up in it any more
            or waiting.second_slot is None
            or ref in {waiting.best_slot, waiting.second_slot}
            # Up to the end of the prompt it is less than a block.
            or (ours[beyond] == theirs[beyond] if beyond < min(mine, length) else beyond == mine and length)
        ):
            found.append(ref)
    return found
