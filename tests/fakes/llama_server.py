"""A fake llama-server: real HTTP, real slot arithmetic, deterministic answers, and controls for tests.

In a test::

    async with FakeLlamaServer(slots=4) as fake:
        fake.token.hold()
        ...
        await fake.token.arrived()

Its answers echo the last ``mark-…`` word of the prompt, so that a test can tell whose answer it got. It
agrees with the real engine on status, shape, framing, headers and token arithmetic
(``tests/engine/test_wire_fake.py``).
``python -m tests.fakes`` runs it as a command with llama-server's flags.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Self

from tests.fakes.answers import Chat, Completions, Infill, Messages, Native, Responses, Shape
from tests.fakes.gate import Gate
from tests.fakes.generation import Generation, body_of, to_json
from tests.fakes.http import Connection, HttpServer, Received
from tests.fakes.slot_model import EngineRefusalError, Slot, SlotModel, Vocabulary, render

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

_SHAPES: dict[str, type[Shape]] = {
    "/v1/chat/completions": Chat,
    "/chat/completions": Chat,
    "/v1/completions": Completions,
    "/completion": Native,
    "/completions": Native,
    "/infill": Infill,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}

_OPEN = frozenset({"/health", "/v1/health", "/models", "/v1/models"})
"""Routes that need no key."""


class FakeLlamaServer:
    """One fake engine. Every attribute below that is not private may be read and set by tests at any time."""

    def __init__(
        self,
        *,
        slots: int = 4,
        context: int = 2048,
        loading: bool = False,
        alias: str = "fake.gguf",
        answer_tokens: int = 16,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.n_slots, self.context, self.alias = slots, context, alias
        self.loading = loading
        self.answer_tokens = answer_tokens
        """Tokens until an answer ends by itself (``ignore_eos`` goes on to the request's own limit)."""
        self.prefill, self.token, self.notice, self.answering = Gate(), Gate(), Gate(), Gate()
        """Held up: prefills, each token, the notice that a client left, each control answer."""
        self.ignore_cancel = False
        self.drop_next = 0
        """So many generation requests are read and then dropped without an answer."""
        self.die_after: int | None = None
        """Break the connection off after so many tokens (once)."""
        self.fail_after: int | None = None
        """Fatal decode error after so many tokens (once): every processing slot is cleared."""
        self.adapters: list[dict[str, Any]] = []
        """What ``/lora-adapters`` lists: objects with ``id`` and ``scale``."""
        self.missing: set[str] = set()
        """What this build lacks: ``slots``, ``metrics``, ``props``, ``apply-template``, ``timings``,
        ``usage``, a generating route, or the name of a field of ``/slots`` elements."""
        self.unknown_fields = False
        self.unified = False
        """All slots share one context of ``context`` tokens; idle ones are purged when it is full."""
        self.sleeping = False
        self.failures = 0
        """Fatal decode errors for lack of room so far: each ends all that was processing."""
        self.token_ms = 10.0
        """What answers say that each generated token took."""
        self.on_launch: Callable[[Slot, Received], None] = lambda _slot, _request: None
        """Told of each prompt that begins in a slot, once it is cut back to what is reused."""
        self.requests: list[Received] = []
        self.violations: list[str] = []
        self.deferred_total = 0
        self.model = SlotModel(slots, context)
        self.vocabulary = Vocabulary()
        self.log = log or (lambda _line: None)
        self.api_key = api_key
        """Asked for (``--api-key``) by all routes but those that tell of health and models."""
        self._http = HttpServer(self._handle, tls)
        self._scheme = "https" if tls else "http"
        self.tasks = 0
        self.waiting: list[asyncio.Future[None]] = []
        self.counts = dict.fromkeys(("prompt", "cached", "predicted", "decodes"), 0)
        self._watchers: list[tuple[Callable[[FakeLlamaServer], object], asyncio.Future[None]]] = []

    # -- life ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.abort()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen."""
        await self._http.listen(host, port)

    @property
    def port(self) -> int:
        """The port it listens on; the same over :meth:`refuse` and :meth:`crash`."""
        return self._http.port

    @property
    def base_url(self) -> str:
        """Where clients find it."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def refuse(self) -> None:
        """Accept no more connections, go on with those that are."""
        self._http.refuse()

    async def accept(self) -> None:
        """Accept connections again."""
        await self._http.listen()

    async def crash(self) -> None:
        """Die: no port, all connections broken off, nothing kept."""
        await self._http.abort()
        self.model = SlotModel(self.n_slots, self.context)
        self.changed()

    async def restart(self, *, loading: bool = False) -> None:
        """Come back after :meth:`crash`, empty."""
        self.loading = loading
        await self._http.listen()
        self.changed()

    def sleep(self) -> None:
        """Put the model away, as after a while with nothing to do; the next task loads it into new slots."""
        self.sleeping = True
        self.model = SlotModel(self.n_slots, self.context)
        self.changed()

    def loaded(self) -> None:
        """Loading is over."""
        self.loading = False
        self.changed()

    # -- for tests -----------------------------------------------------------------------------------------

    @property
    def busy(self) -> int:
        """Slots that are processing."""
        return sum(slot.processing for slot in self.model.slots)

    @property
    def deferred(self) -> int:
        """Requests in the engine's own queue now."""
        return len(self.waiting)

    def generations(self) -> list[Received]:
        """The generation requests so far, in the order in which they came."""
        return [request for request in self.requests if request.path in _SHAPES]

    async def until(self, predicate: Callable[[FakeLlamaServer], object]) -> None:
        """Return once ``predicate(self)`` holds; it is asked again after every change of state."""
        if predicate(self):
            return
        future = asyncio.get_running_loop().create_future()
        entry = (predicate, future)
        self._watchers.append(entry)
        try:
            await future
        finally:
            self._watchers.remove(entry)

    def changed(self) -> None:
        """Let those who wait for a state look again."""
        for predicate, future in self._watchers:
            if not future.done() and predicate(self):
                future.set_result(None)

    # -- HTTP ----------------------------------------------------------------------------------------------

    async def _handle(self, connection: Connection, request: Received) -> None:
        self.requests.append(request)
        self.changed()
        try:
            self._refuse_strangers(request)
            self._refuse_while_loading()
            self.sleeping = self.sleeping and request.path in {*_OPEN, "/props"}
            shape = _SHAPES.get(request.path) if request.method == "POST" else None
            if shape is not None and request.path.lstrip("/") not in self.missing:
                await self._generation(connection, request, shape)
                return
            answer = self._control(request)
            await self.answering.passed()
            if isinstance(answer, str):
                connection.answer(200, answer.encode(), "text/plain; version=0.0.4")
            else:
                connection.answer(200, to_json(answer))
            request.outcome = "ok"
        except EngineRefusalError as refusal:
            connection.answer(refusal.status, to_json(refusal.body))
            request.outcome = "error"
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            # The engine tells a body of a wrong shape much like this.
            body = {"error": {"code": 500, "message": type(error).__name__, "type": "server_error"}}
            connection.answer(500, to_json(body))
            request.outcome = "error"
        finally:
            self.changed()

    def _refuse_strangers(self, request: Received) -> None:
        given = request.header("authorization") or request.header("x-api-key") or ""
        if (
            self.api_key is not None
            and request.path not in _OPEN
            and given.removeprefix("Bearer ") != self.api_key
        ):
            raise EngineRefusalError(401, "Invalid API Key", "authentication_error")

    def make_room(self) -> None:
        """Where all slots share a context: forget what idle ones hold, else all of them."""
        if not self.unified:
            return
        for slot in self.model.slots:
            if sum(len(one.tokens) for one in self.model.slots) < self.context:
                return
            if not slot.processing:
                self.model.clear(slot)
        if sum(len(one.tokens) for one in self.model.slots) >= self.context:
            self.failures += 1
            for slot in self.model.slots:
                self.model.clear(slot)

    def _refuse_while_loading(self) -> None:
        if self.loading:
            raise EngineRefusalError(503, "Loading model", "unavailable_error")

    def _control(self, request: Received) -> Any:
        name = f"{request.method} {request.path}"
        found: Callable[[], Any] | None = {
            "GET /health": lambda: {"status": "ok"},
            "GET /v1/health": lambda: {"status": "ok"},
            "GET /props": self._props,
            "GET /slots": self._slots,
            "GET /metrics": self._metrics,
            "GET /v1/models": self._models,
            "GET /lora-adapters": lambda: self.adapters,
            "POST /lora-adapters": lambda: self._scale(request),
            "POST /apply-template": lambda: {"prompt": render(body_of(request))},
            "POST /tokenize": lambda: {"tokens": self.vocabulary.encode(body_of(request).get("content", ""))},
            "POST /detokenize": lambda: {
                "content": self.vocabulary.decode(body_of(request).get("tokens", []))
            },
        }.get(name)
        if request.method == "POST" and request.path.startswith("/slots/"):
            return self._act(int(request.path.rpartition("/")[2]), request.query)
        if found is None or request.path.lstrip("/") in self.missing - {"slots", "metrics"}:
            refusal = EngineRefusalError(404, "")
            refusal.body = {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}
            raise refusal
        if (endpoint := request.path.lstrip("/")) in self.missing:
            message = f"This server does not support {endpoint} endpoint. Start it with `--{endpoint}`"
            raise EngineRefusalError(501, message, "not_supported_error")
        return found()

    def _props(self) -> Any:
        props: dict[str, Any] = {
            "default_generation_settings": {"params": {"seed": 4294967295}, "n_ctx": self.context},
            "total_slots": self.n_slots,
            "model_alias": self.alias,
            "model_path": f"/models/{self.alias}",
            "modalities": {"vision": False, "video": False, "audio": False},
            "chat_template": "",
            "build_info": "b0-fake",
            "is_sleeping": self.sleeping,
        }
        return self.drifted(props)

    def _slots(self) -> Any:
        return [self.drifted(slot.as_json()) for slot in self.model.slots]

    def _act(self, number: int, query: str) -> Any:
        slot, action = self.model.slots[number], query.partition("=")[2]
        count = len(slot.tokens)
        if action == "erase":
            self.model.clear(slot)
            return {"id_slot": number, "n_erased": count}
        slot.tokens = self.vocabulary.encode("restored") if action == "restore" else slot.tokens
        return {"id_slot": number, "filename": "x", f"n_{action}d": len(slot.tokens)}

    def _scale(self, request: Received) -> Any:
        """As the engine: those that are not named are switched off, and slots are cleared when next used."""
        told = json.loads(request.body)
        if not isinstance(told, list):
            raise EngineRefusalError(400, "Request body must be an array")
        scales = {one["id"]: one["scale"] for one in told}
        if scales.keys() - {one["id"] for one in self.adapters}:
            raise EngineRefusalError(400, "invalid adapter id")
        for one in self.adapters:
            one["scale"] = scales.get(one["id"], 0.0)
        self.model.outdated = {slot.id for slot in self.model.slots}
        return {"success": True}

    def _models(self) -> Any:
        meta = {"n_ctx": self.context, "n_ctx_train": 8192}
        one = {"id": self.alias, "object": "model", "created": 0, "owned_by": "llamacpp", "meta": meta}
        return {"object": "list", "data": [one]}

    def drifted(self, element: dict[str, Any]) -> dict[str, Any]:
        """An object as this build would write it."""
        kept = {name: value for name, value in element.items() if name not in self.missing}
        return kept | {"brand_new_field": {"nested": [1]}} if self.unknown_fields else kept

    def _metrics(self) -> str:
        values = {
            "prompt_tokens_total": ("counter", self.counts["prompt"]),
            "prompt_tokens_cached_total": ("counter", self.counts["cached"]),
            "tokens_predicted_total": ("counter", self.counts["predicted"]),
            "n_decode_total": ("counter", self.counts["decodes"]),
            "requests_processing": ("gauge", self.busy),
            "requests_deferred": ("gauge", self.deferred),
        }
        return "".join(
            f"# HELP llamacpp:{name} -\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:g}\n"
            for name, (kind, value) in values.items()
        )

    # -- generation ----------------------------------------------------------------------------------------

    async def _generation(self, connection: Connection, request: Received, shape_of: type[Shape]) -> None:
        if self.drop_next > 0:
            self.drop_next -= 1
            request.outcome = "dropped"
            connection.abort()
            connection.close_announced = True
            return
        generation = Generation(self, connection, request, shape_of)
        watch = asyncio.create_task(connection.watch())
        run = asyncio.create_task(generation.run())
        try:
            await self._unless_gone(connection, run)
        finally:
            watch.cancel()
            run.cancel()
            await asyncio.gather(watch, run, return_exceptions=True)
            self.changed()
        if run.cancelled():
            connection.close_announced = True
            return
        await run

    async def _unless_gone(self, connection: Connection, run: asyncio.Task[None]) -> None:
        """Wait for ``run``; cancel it once the engine notices that its client left."""
        gone = asyncio.create_task(connection.gone.wait())
        try:
            await asyncio.wait({run, gone}, return_when=asyncio.FIRST_COMPLETED)
            if run.done() or self.ignore_cancel:
                await asyncio.wait({run})
                return
            noticed = asyncio.create_task(self.notice.passed())
            try:
                await asyncio.wait({run, noticed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                noticed.cancel()
        finally:
            gone.cancel()
