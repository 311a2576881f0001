"""The way of one generating request: parsed, rendered, leased, sent, relayed, and its truth written down."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from . import errors, prompt
from .auth import ANYONE, CLIENT
from .backend import EngineBroke, EngineUnreachable
from .backends import NoBackendError, StoppingError
from .client import Client, ClientGoneError
from .core import QueueFullError
from .isolation import Tenants, Visit
from .outbox import ClientStalledError, Outbox
from .quota import Quota
from .stream import TruthReader
from .values import Outcome, Priority, Request, Route, SlotRef, Status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from starlette.types import Receive, Scope, Send

    from .backend import EngineClient, EngineResponse
    from .client import Headers
    from .config import Limits
    from .dispatcher import Dispatcher
    from .errors import RequestError
    from .journal import Journal
    from .metrics import Metrics
    from .pools import Pools
    from .values import Lease, Prompt

log = logging.getLogger("warmslot.router")

ATTEMPTS = 5
"""How often a request of which no byte was sent looks for another lease."""

WHOLE = 8 * 1024 * 1024
"""Bytes of a non-streaming answer that are held back until it is complete, so that a break can be told."""

_SESSION_LENGTH = 256
_FATAL = ("compute error", "invalid input batch", "failed to decode")
"""The engine's words when decoding failed: it has let go of every slot that was processing."""

_FULL = "context size has been exceeded"
"""Its words when that was for lack of room (not those of a prompt that is too long for its slot)."""

_OURS = b"x-warmslot-"
_KEYS = (b"authorization", b"x-api-key")


@dataclass(slots=True)
class Passage:
    """What metrics want to know of one request at its end."""

    route: Route
    pool: str = "none"
    backend: str = "none"
    began: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    status: Status = Status.OK


@dataclass(frozen=True, slots=True)
class Shop:
    """What every handler needs."""

    dispatcher: Dispatcher
    pools: Pools
    limits: Limits
    metrics: Metrics
    keyed: bool = False
    """Keys are ours, so they are not sent on."""
    isolate: bool = False
    """Clients with different keys share no prefixes."""
    honours_slot: bool = False
    """A client's own ``id_slot`` is kept."""
    quota: Quota = field(default_factory=Quota)
    journal: Journal | None = None
    tenants: Tenants = field(default_factory=Tenants)
    """Whose text each slot holds, where clients are isolated."""

    async def attend(
        self, client: Client, passage: Passage, serve: Callable[[Client, Passage], Awaitable[None]]
    ) -> None:
        """Run one request to its end: every failure is told to the client and counted."""
        limit = self.limits.request_timeout
        try:
            async with asyncio.timeout(limit or None):
                await serve(client, passage)
        except (ClientGoneError, ClientStalledError):
            passage.status = Status.CANCELLED
        except TimeoutError:
            await self._tell(client, passage, errors.expired(limit))
        except asyncio.CancelledError:
            passage.status = Status.CANCELLED
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            await self._tell(client, passage, as_request_error(error, passage))
        finally:
            self.metrics.request_ended(passage, time.monotonic())

    @staticmethod
    async def _tell(client: Client, passage: Passage, error: RequestError) -> None:
        rejected = error.status < 500 or error.status == 503  # noqa: PLR2004 - status classes
        passage.status = Status.REJECTED if rejected else Status.ERROR
        await client.refuse(error)

    def root(self, client: str) -> bytes:
        """The seed of a client's prompts."""
        return prompt.root_of({}, isolation=client.encode() if self.isolate else b"")

    def outgoing(self, client: Client) -> Headers:
        """The client's headers that the engine gets (hop-by-hop ones fall away where they are sent)."""
        return [
            (name, value)
            for name, value in client.scope["headers"]
            if not name.startswith(_OURS) and not (self.keyed and name in _KEYS)
        ]

    def on_behalf(self, client: Client) -> Headers:
        """Headers of a call that the router makes itself for a client: its key, where the engine asks."""
        keys = [pair for pair in self.outgoing(client) if pair[0] in _KEYS]
        return [*keys, (b"content-type", b"application/json")]


@dataclass(slots=True)
class Work:
    """One request on its way."""

    client: Client
    passage: Passage
    raw: bytes
    body: dict[str, Any]
    outbox: Outbox | None
    """Where a stream goes; ``None`` for an answer in one piece."""
    slot: int | None = None
    """The slot that the client chose, where it may."""
    text: str | None = None
    """The text that the engine evaluates, where it is known and needed."""
    masked: int = 0
    sorted_tools: bool = False


class Generation:
    """ASGI endpoint of one route whose requests the engine pins to a slot."""

    _needs_text = False

    def __init__(self, shop: Shop, route: Route) -> None:
        self._shop = shop
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._shop.attend(Client(scope, receive, send), Passage(self._route), self._serve)

    async def _serve(self, client: Client, passage: Passage) -> None:
        limits = self._shop.limits
        raw = await client.body(limits.max_body, limits.body_timeout)
        await client.unless_gone(self._answer(client, passage, raw))

    async def _answer(self, client: Client, passage: Passage, raw: bytes) -> None:
        raw = prompt.without_mark(raw)
        body = prompt.parse(raw)
        passage.pool = self._shop.pools.of_model(body.get("model"))
        self._describe(client, passage, body)
        if not prompt.is_streaming(body):
            await self._within_quota(client, passage, raw, body, None)
            return
        async with Outbox(client, ping=self._shop.limits.ping_interval) as outbox:
            try:
                await self._within_quota(client, passage, raw, body, outbox)
            except (EngineBroke, EngineUnreachable):
                await outbox.flush(broken=True)
                raise

    async def _within_quota(
        self, client: Client, passage: Passage, raw: bytes, body: dict[str, Any], outbox: Outbox | None
    ) -> None:
        """Serve it once its key has room, in the pool that its model names then."""

        async def serve() -> None:
            work = Work(client, passage, raw, body, outbox, self._wish(body))
            await self._lease_and_send(work, self._describe(client, passage, body))

        async with self._shop.quota.place(name_of(client)):
            await self._shop.pools.serve(body.get("model"), passage, serve)

    def _describe(
        self, client: Client, passage: Passage, body: dict[str, Any]
    ) -> Callable[[Prompt], Request]:
        """Check what the router acts on, before anything waits."""
        slots = prompt.slots_needed(body, self._route)
        tokens = prompt.expected_output_tokens(body)
        keeps = prompt.keeps_prefix(body, self._route)
        order = priority(client)
        session = client.header(b"x-warmslot-session")
        if session is not None and len(session) > _SESSION_LENGTH:
            raise errors.invalid(f"header X-Warmslot-Session: longer than {_SESSION_LENGTH} characters")
        several = prompt.has_several(body, self._route)
        pools = self._shop.pools
        most = pools.most_slots(passage.pool)
        if most is not None and slots > most and not several:
            raise errors.invalid(f"n: needs {slots} slots at once, allowed: at most {most}", param="n")

        def request(rendered: Prompt) -> Request:
            return Request(
                id=client.lease_id(),
                prompt=rendered,
                pool=passage.pool,
                route=self._route,
                client=name_of(client),
                priority=order,
                arrived=passage.began,
                max_output_tokens=tokens,
                session=session,
                # What is more than that waits in the engine, where nothing else is then.
                slots=min(slots, pools.most_slots(passage.pool) or slots) if several else slots,
                pinned=not several,
                keeps_prefix=keeps,
            )

        return request

    async def _lease_and_send(self, work: Work, describe: Callable[[Prompt], Request]) -> None:
        dispatcher = self._shop.dispatcher
        treatment = self._shop.pools.treatment(work.passage.pool)
        if (ordered := treatment.in_order(work.body)) is not None:
            work.body, work.raw, work.sorted_tools = ordered, prompt.dump(ordered), True
        engine = await dispatcher.engine(work.passage.pool)
        rendered = await prompt.render(
            engine, self._route, work.body, root=self._shop.root(name_of(work.client))
        )
        if self._needs_text and prompt.is_exact(rendered, self._route, self._shop.root(name_of(work.client))):
            work.text = prompt.text_of(rendered)
        rendered, work.masked = treatment.keyed(rendered)
        for _ in range(ATTEMPTS):
            request = describe(rendered)
            if work.slot is not None:
                # The slot is not the router's choice, so nothing else may run.
                request = replace(request, pinned=False)
            with self._telling(work, request):
                lease = await self._acquire(request, work)
            work.passage.backend = lease.slot.backend
            if self._shop.journal is not None:
                self._shop.journal.describe(
                    lease.request.id, work.body, masked=work.masked, sorted_tools=work.sorted_tools
                )
            if await self._attempt(lease, work).run():
                return
        raise errors.unavailable("no backend took the request")

    def _wish(self, body: dict[str, Any]) -> int | None:
        slot = body.get("id_slot")
        honoured = self._shop.honours_slot and not prompt.has_several(body, self._route)
        honoured = honoured and isinstance(slot, int) and not isinstance(slot, bool)
        return slot if honoured and slot is not None and slot >= 0 else None

    @contextmanager
    def _telling(self, work: Work, request: Request) -> Iterator[None]:
        """While a request waits, its stream's comments say for how long, if the client asked for that."""
        outbox = work.outbox
        if outbox is None or work.client.header(b"x-warmslot-queue") is None:
            yield
            return
        dispatcher = self._shop.dispatcher

        def place() -> bytes | None:
            found = dispatcher.position(request.id)
            return None if found is None else b": queued %d, about %.0f s\n\n" % (found[0] + 1, found[1])

        first = asyncio.get_running_loop().call_soon(outbox.comment, place)
        try:
            yield
        finally:
            first.cancel()
            outbox.comment(None)

    async def _acquire(self, request: Request, work: Work) -> Lease:  # noqa: ARG002 - others look at it
        return await self._shop.dispatcher.acquire(request)

    def _attempt(self, lease: Lease, work: Work) -> Attempt:
        return Attempt(self._shop, lease, work)


class Attempt:
    """One lease used: sends the request, relays the answer, and settles the lease in every case."""

    def __init__(self, shop: Shop, lease: Lease, work: Work) -> None:
        self._shop = shop
        self._dispatcher = shop.dispatcher
        self._lease = lease
        self._id = lease.request.id
        self._work = work
        self._reader = TruthReader(lease.request.route, work.outbox is not None)
        self._sent = work.passage.began
        self._settled = self._refused = False
        self._visit: Visit | None = None
        """Where clients are isolated, from the moment at which the engine may know of this request."""

    async def run(self) -> bool:
        """Whether an answer was given; False if nothing was sent and another lease may be tried."""
        try:
            engine = self._dispatcher.client(self._lease)
            self._dispatcher.sending(self._id)
            if self._shop.isolate:
                self._visit = Visit(self._shop.tenants, self._dispatcher, self._lease, self._touches)
            await self._prepare(engine)
            self._sent = time.monotonic()
            async with engine.open(
                "POST",
                self._work.client.scope["path"],
                self._shop.outgoing(self._work.client),
                self._body(),
            ) as response:
                self._dispatcher.started(self._id)
                await self._relay(response)
        except EngineUnreachable as error:
            if not error.sent:
                self._settled = True
                self._dispatcher.unsent(self._id)
                return False
            self._broke()
            raise
        except EngineBroke:
            self._broke()
            raise
        except BaseException:
            self._leave(Status.CANCELLED)
            raise
        if not self._settled:
            self._broke()
            raise EngineBroke(self._lease.slot.backend, "its answer ended before it was complete")
        return True

    # -- for routes that need more -------------------------------------------------------------------------

    async def _prepare(self, engine: EngineClient) -> None:
        """What the engine has to be asked before the request itself."""

    def _body(self) -> bytes:
        """What the engine is sent."""
        free = self._work.slot is None and not self._lease.request.pinned
        return prompt.pin(self._work.raw, -1 if free else self._slot, fresh=self._fresh)

    @property
    def _fresh(self) -> bool:
        """Whether nothing in the slot may be reused: another client's prefix would show in the time taken."""
        if self._visit is None:
            return False
        if self._touches is None:
            return True
        expected = self._work.slot is not None or self._lease.predicted_tokens > 0
        return not (expected and self._visit.owns(self._slot))

    @property
    def _touches(self) -> frozenset[int] | None:
        """The slots that the engine may run it in; ``None`` where that may be any."""
        if self._work.slot is not None:
            return frozenset({self._slot})
        lease = self._lease
        return (
            frozenset(ref.slot for ref in (lease.slot, *lease.extra_slots)) if lease.request.pinned else None
        )

    def _claim(self, visit: Visit) -> None:
        """Say what is certain now that the engine has answered this request whole, or refused it."""
        if self._touches is None:
            return  # of several prompts some may have been computed though one was refused
        if self._refused:
            visit.filled_only(())
        else:
            visit.filled(self._slot)

    @property
    def _disturbed(self) -> bool:
        """Whether slots were changed for this request before it was sent itself."""
        return False

    async def _look_where(self) -> None:
        """Find out in which slot the engine served a request that it was free to place."""

    @property
    def _settles_late(self) -> bool:
        """Whether the last event alone does not tell that all slots are free, or which one it was."""
        return self._lease.request.slots > 1

    def _shown(self, chunk: bytes) -> bytes:
        """A piece of a stream as the client gets it; empty while more is needed for that."""
        return chunk

    def _shown_last(self) -> bytes:
        """What :meth:`_shown` held back when the stream is over."""
        return b""

    @property
    def _most_held(self) -> int:
        """Bytes of a whole answer above which it passes as it comes."""
        return WHOLE

    def _shown_whole(self, body: bytes) -> bytes:
        """A whole answer as the client gets it."""
        return body

    # -- the lease -----------------------------------------------------------------------------------------

    @property
    def _slot(self) -> int:
        """Where the engine is told to run it."""
        chosen, slot = self._work.slot, self._lease.slot
        backend = self._dispatcher.fleet.backend(slot.backend)
        return slot.slot if chosen is None or backend is None else chosen % max(1, backend.slots)

    def _outcome(self, status: Status) -> Outcome:
        reader = self._reader
        began, first = self._work.passage.began, self._work.passage.first_token
        return Outcome(
            status=status,
            cached_tokens=reader.cached_tokens if reader.finished else None,
            processed_tokens=reader.processed_tokens if reader.finished else None,
            output_tokens=reader.output_tokens,
            prefill_seconds=reader.prefill_seconds,
            decode_seconds=reader.decode_seconds,
            drafted_tokens=reader.drafted_tokens,
            accepted_tokens=reader.accepted_tokens,
            ttft_seconds=None if first is None else first - began,
            generated=reader.generated,
            slot=None if self._work.slot is None else SlotRef(self._lease.slot.backend, self._slot),
        )

    def _finish(self, outcome: Outcome) -> None:
        if self._settled:
            return
        self._settled = True
        if self._visit is not None and (self._refused or outcome.status is Status.OK):
            self._claim(self._visit)
        self._dispatcher.finish(self._id, outcome)

    def _leave(self, status: Status) -> None:
        """Only the engine can say when the slot is free."""
        if not self._settled:
            self._settled = True
            self._dispatcher.abandon(self._id, self._outcome(status))

    def _broke(self) -> None:
        self._leave(Status.ERROR)
        self._dispatcher.fleet.suspect(self._lease.slot.backend)

    # -- the answer ----------------------------------------------------------------------------------------

    async def _relay(self, response: EngineResponse) -> None:
        outbox = self._work.outbox
        kind = response.header(b"content-type") or b""
        if outbox is None or not kind.startswith(b"text/event-stream"):
            await self._relay_whole(response)
        else:
            await self._relay_stream(response, outbox)

    async def _relay_stream(self, response: EngineResponse, outbox: Outbox) -> None:
        client, reader, passage = self._work.client, self._reader, self._work.passage
        if not client.started:
            await client.start(response.status, [*response.headers, *self._headers()], streams=True)
        late = self._settles_late
        async for chunk in response.chunks():
            reader.feed(chunk)
            if passage.first_token is None and reader.first_token:
                passage.first_token = time.monotonic()
                self._dispatcher.first_token(self._id)
            if reader.finished and not late:
                self._finish_stream()
            shown = self._shown(chunk)
            if shown and not outbox.put(shown):
                await outbox.room()
        if reader.finished:
            if not self._settled:
                await self._look_where()
            self._finish_stream()
            if rest := self._shown_last():
                outbox.put(rest)
            await outbox.flush()
            await client.end()

    def _finish_stream(self) -> None:
        if self._settled:
            return
        error = self._reader.error
        outcome = self._outcome(Status.OK)
        if error is not None:
            self._work.passage.status = Status.ERROR
            outcome = replace(failed(error), output_tokens=outcome.output_tokens)
        self._finish(outcome)

    async def _relay_whole(self, response: EngineResponse) -> None:
        client, reader = self._work.client, self._reader
        reader = self._reader = TruthReader(self._lease.request.route, streaming=False)
        held: list[bytes] = []
        size = 0
        headers = [*response.headers, *self._headers()]
        async for chunk in response.chunks():
            reader.feed(chunk)
            size += len(chunk)
            held.append(chunk)
            if size > self._most_held:
                if not client.started:
                    await client.start(response.status, headers)
                for piece in held:
                    await client.write(piece)
                held.clear()
        if 200 <= response.status < 300:  # noqa: PLR2004 - status classes
            # The first token was there before the rest was decoded, though nobody could see it. The engine
            # tells how long that took, but what it tells is no longer than the answer itself took.
            ended = time.monotonic()
            self._work.passage.first_token = ended - min(reader.decode_seconds, ended - self._sent)
            await self._look_where()
            outcome = self._outcome(Status.OK)
        else:
            self._work.passage.status = Status.ERROR
            error = reader.error or {}
            refused = 400 <= response.status < 500 or response.status in {501, 503}  # noqa: PLR2004
            self._refused = refused
            untouched = refused and not self._disturbed
            outcome = replace(failed(error), untouched=untouched)
        rest = b"".join(held) if client.started else self._shown_whole(b"".join(held))
        self._finish(outcome)
        if not client.started:
            await client.answer(response.status, rest, without_length(headers))
        elif client.streams:  # a ping has begun the stream: what would have been a status comes as an event
            await client.end(b"data: " + rest.strip() + b"\n\n")
        else:
            await client.end(rest)

    def _headers(self) -> Headers:
        lease = self._lease
        return [
            (b"x-warmslot-backend", lease.slot.backend.encode()),
            (b"x-warmslot-slot", b"%d" % self._slot),
            (b"x-warmslot-decision", lease.decision.encode()),
            (b"x-warmslot-predicted-tokens", b"%d" % lease.predicted_tokens),
        ]


def as_request_error(error: Exception, passage: Passage) -> RequestError:
    """What the client is told of a failure."""
    match error:
        case errors.RequestError():
            return error
        case prompt.BadRequest():
            return errors.invalid(error.message, param=error.param)
        case QueueFullError():
            return errors.queue_full(error.limit, error.retry_after)
        case NoBackendError() | StoppingError():
            return errors.unavailable(str(error))
        case EngineUnreachable() | EngineBroke():
            return errors.engine_failed(str(error))
    log.error("a request of route %s failed", passage.route, exc_info=error)
    return errors.internal()


def name_of(client: Client) -> str:
    """The name of a client's key."""
    name: str = client.scope.get(CLIENT, ANYONE)
    return name


def priority(client: Client) -> Priority:
    """The queue class that the client asked for. Raises 400."""
    given = client.header(b"x-warmslot-priority")
    if given is None:
        return Priority.INTERACTIVE
    try:
        return Priority(given.strip().lower())
    except ValueError:
        allowed = ", ".join(Priority)
        raise errors.invalid(f"header X-Warmslot-Priority: not known, allowed: {allowed}") from None


def failed(error: dict[str, Any]) -> Outcome:
    """What an engine's error means: perhaps that decoding failed for every slot that was processing."""
    message = str(error.get("message", "")).lower()
    fatal = any(words in message for words in (*_FATAL, _FULL))
    return Outcome(Status.ERROR, engine_error=fatal, context_full=_FULL in message)


def without_length(headers: Headers) -> Headers:
    """Without ``Content-Length``, which whoever sends the whole body writes anew."""
    return [pair for pair in headers if pair[0].lower() != b"content-length"]
