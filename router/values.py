"""The vocabulary of the router: plain values that every other module speaks.

Nothing here does I/O or keeps state. Units: positions and lengths are **bytes** of the canonical
prompt, counts called ``*_tokens`` are engine tokens, times are seconds on a monotonic clock.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

BLOCK = 64
"""Bytes of canonical prompt that one hash of a :class:`Prompt` chain covers."""

ROOT = b"\0" * 8
"""Chain seed of prompts that anyone may share (no LoRA, no isolation)."""


class Route(StrEnum):
    """The kinds of request that are told apart in metrics and placement."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    COMPLETION = "completion"
    INFILL = "infill"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    OTHER = "other"


class Priority(StrEnum):
    """Queue classes, highest first (header ``X-Warmslot-Priority``)."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Decision(StrEnum):
    """Why a slot was chosen.

    ``affinity``: it held the longest match; ``fresh``: nothing matched anywhere; ``spill``: a better
    match existed but was not used (busy, or not worth what it would destroy); ``wait``: the request was
    held until the matching slot was free; ``unpinned``: the engine chose.
    """

    AFFINITY = "affinity"
    FRESH = "fresh"
    SPILL = "spill"
    WAIT = "wait"
    UNPINNED = "unpinned"


class Loss(StrEnum):
    """Why a prompt token was computed again (or for the first time)."""

    NEW = "new"
    EVICTED = "evicted"
    BUSY = "busy"
    DIVERGED = "diverged"
    RESTARTED = "restarted"
    ENGINE = "engine"


class Status(StrEnum):
    """How a request ended, seen from the client."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class SlotRef(NamedTuple):
    """One slot of one backend."""

    backend: str
    slot: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request will put into a slot's KV cache, as the router knows it.

    ``data`` is the canonical text (UTF-8 of what the engine's chat template renders, or packed token ids)
    and is ``None`` for prompts read back from a journal, which keeps hashes only. ``chain[i]`` is a 64-bit
    hash of ``root`` and bytes ``[0, (i+1)*BLOCK)``: two prompts share their first ``n`` blocks exactly when
    their chains agree at ``n-1``. ``tokens`` is the exact token count where it is known up front.
    """

    chain: array[int]
    length: int
    data: bytes | None = None
    tokens: int | None = None
    root: bytes = ROOT

    @classmethod
    def of(cls, data: bytes, *, root: bytes = ROOT, tokens: int | None = None) -> Prompt:
        """Build a prompt from canonical bytes (8 bytes of chain for each full block of ``BLOCK`` bytes)."""
        return cls(
            chain=extend_chain(array("Q"), data, root=root),
            length=len(data),
            data=data,
            tokens=tokens,
            root=root,
        )


def extend_chain(chain: array[int], data: bytes, *, root: bytes = ROOT) -> array[int]:
    """Return ``chain`` continued over the full blocks of ``data`` that it does not cover yet.

    ``chain`` must belong to a prefix of ``data`` with the same ``root``; it is not changed.
    """
    out = array("Q", chain)
    last = struct.pack("<Q", out[-1]) if out else root
    blake2b = hashlib.blake2b
    for start in range(len(out) * BLOCK, len(data) - BLOCK + 1, BLOCK):
        last = blake2b(last + data[start : start + BLOCK], digest_size=8).digest()
        out.append(int.from_bytes(last, "little"))
    return out


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the core sees it: what it needs, never how it is sent."""

    id: str
    prompt: Prompt
    pool: str
    route: Route = Route.CHAT
    client: str = "other"
    priority: Priority = Priority.INTERACTIVE
    arrived: float = 0.0
    max_output_tokens: int | None = None
    """The client's own bound on generated tokens, ``None`` when it gave none."""
    session: str | None = None
    """A client-given conversation id; ``None`` lets the core find the conversation by prefix."""
    slots: int = 1
    """Slots that it occupies at once (``n`` > 1 or several prompts in one body)."""
    pinned: bool = True
    """Whether the engine honours ``id_slot`` for it."""
    keeps_prefix: bool = True
    """False where the slot's former content is discarded whatever matches (``cache_prompt: false``,
    embeddings, rerank)."""
    max_wait: float | None = None
    """A tighter bound on queueing than the pool's, in seconds."""


class Candidate(NamedTuple):
    """What serving a request on one slot would have cost, in seconds (for ``explain``)."""

    slot: SlotRef
    idle: bool
    match_tokens: int
    prefill_seconds: float
    loss_seconds: float
    wait_seconds: float = 0.0

    @property
    def cost(self) -> float:
        """The figure that placement minimises."""
        return self.prefill_seconds + self.loss_seconds + self.wait_seconds


@dataclass(frozen=True, slots=True)
class Lease:
    """One request's right to one slot (to ``request.slots`` slots, the first of which is ``slot``)."""

    request: Request
    slot: SlotRef
    decision: Decision
    predicted_tokens: int
    """Prompt tokens that the engine is expected to reuse."""
    prompt_tokens: int
    """Estimated length of the prompt in tokens."""
    granted: float
    extra_slots: tuple[SlotRef, ...] = ()
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a lease, told by the engine.

    ``cached_tokens`` and ``processed_tokens`` are ``timings.cache_n`` and ``timings.prompt_n``; ``None``
    where the engine gave no number. ``generated`` is the text that now follows the prompt in the slot
    (canonical bytes, ``b""`` if unknown). ``slot`` is where it really ran, if that differs from the lease.
    ``resident_tokens`` is what ``/slots`` or the engine's log reported afterwards, where it did.
    """

    status: Status
    cached_tokens: int | None = None
    processed_tokens: int | None = None
    output_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Of the drafted ones (``timings.draft_n``), those that were kept (``draft_n_accepted``)."""
    ttft_seconds: float | None = None
    generated: bytes = b""
    after: Prompt | None = None
    """Prompt and answer as the slot holds them now, where they are known by their hashes alone (replays)."""
    slot: SlotRef | None = None
    resident_tokens: int | None = None
    engine_error: bool = False
    """A fatal engine error (5xx from decode): every slot that was processing is to be taken as empty."""
    context_full: bool = False
    """Of such an error: the engine found no room for one more token of all that ran."""
    untouched: bool = False
    """The engine refused before touching the slot (4xx): what it held is still there."""


@dataclass(frozen=True, slots=True)
class Report:
    """The ledger of one finished request. ``sum(losses.values()) == processed_tokens``, exactly."""

    request: Request
    slot: SlotRef
    decision: Decision
    status: Status
    predicted_tokens: int
    cached_tokens: int
    processed_tokens: int
    output_tokens: int
    queue_seconds: float
    losses: dict[Loss, int] = field(default_factory=dict)
    host_tokens: int = 0
    """Of the cached tokens, those that the engine's cache in host memory added to what the slot held."""
    truth_missing: bool = False
    session: str = ""
    shadow: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that would have been reused with other slot counts (see :mod:`.shadow`)."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The engine's prompt cache in host memory, as it was started: sizes in bytes.

    ``token_bytes`` is what one token of an entry takes and ``state_bytes`` what each entry takes beside that;
    0 where it is not known, then only what is observed limits what is counted on.
    """

    limit: float
    token_bytes: float = 0.0
    state_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class HostMemoryView:
    """What is in an engine's prompt cache in host memory, and whether that saves time. Seconds are per token.

    ``pays``: saving a context and loading it again takes less time than computing it. It and ``copy_seconds``
    are ``None`` until copies were seen; of prefill the fastest part counts, the start of a prompt.
    """

    entries: int
    tokens: int
    copy_seconds: float | None
    prefill_seconds: float
    pays: bool | None


@dataclass(frozen=True, slots=True)
class SlotObservation:
    """One element of the engine's ``/slots``; ``None`` where the field was absent."""

    slot: int
    processing: bool
    task: int | None = None
    resident_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot as shown to people and to metrics; holds no prompt text."""

    ref: SlotRef
    busy: bool
    resident_tokens: int
    shared_tokens: int
    """Of the resident tokens, how many from the start are also resident in another slot."""
    shared_group: str
    """Equal for slots that share that prefix; an opaque short id, empty when nothing is shared."""
    session: str
    known: bool
    """False while what the slot holds has to be learned again."""
    request: str | None
    last_used: float
