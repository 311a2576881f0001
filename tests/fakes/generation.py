"""One generation request inside the fake: which slots it takes, what it computes, what it writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

from warmslot.router.conversion import chat_of
from warmslot.router.values import Route

from tests.fakes.answers import Chat, Infill, Job, Messages, Responses, Shape
from tests.fakes.slot_model import EngineRefusalError, Slot, render

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fakes.http import Connection, Received
    from tests.fakes.llama_server import FakeLlamaServer

_MARK = re.compile(r"mark-[A-Za-z0-9]+")
_WORDS = (" one", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten")
_CHOSEN = {"id": "by id", "lcp": "by LCP similarity", "lru": "by LRU", "child": "as child"}


class Generation:
    """Runs one request on ``server``; cancelled when its client has left and the engine noticed.

    Raises :class:`EngineRefusalError` where the engine answers with an error instead.
    """

    def __init__(
        self, server: FakeLlamaServer, connection: Connection, request: Received, shape: type[Shape]
    ) -> None:
        self.server, self.connection, self.request = server, connection, request
        self.body = body_of(request)
        self.stream = self.body.get("stream") is True
        self.jobs = self._jobs(shape)
        self.shape = shape(server.alias, self.body)
        self.slots: list[Slot] = []
        self.produced = 0
        self.failures = server.failures

    async def run(self) -> None:
        """From the choice of slots to the last byte."""
        try:
            await self._take()
            await self._prefill()
            await self._decode_all()
        except EngineRefusalError as failure:
            self.request.outcome = "error"
            if not self.connection.streamed:
                raise
            self.connection.chunk(b"data: " + to_json(failure.body) + b"\n\n")
            self.connection.chunk(b"")
            return
        except asyncio.CancelledError:
            self.request.outcome = self.request.outcome or "cancelled"
            raise
        finally:
            for slot in self.slots:
                if slot.processing:
                    self._release(slot)
        self._finish()
        self.request.outcome = "ok"

    # -- what is asked -------------------------------------------------------------------------------------

    def _jobs(self, shape: type[Shape]) -> list[Job]:
        body = self.body
        if shape is Infill:
            body = {name: part for name, part in body.items() if name != "n"} | {"prompt": _infill(body)}
        _typed(body, "stream", bool, "boolean")
        limit = None
        for name in ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens"):
            _typed(body, name, int, "number")
            limit = body.get(name) if limit is None else limit
        _typed(body, "n", int, "number")
        prompts = (
            [self._chat_tokens(body, shape)] if shape in {Chat, Responses, Messages} else self._tokens(body)
        )
        choices = body.get("n") or 1
        if not 1 <= choices <= self.server.n_slots:
            range_ = f"1 <= value <= {self.server.n_slots}"
            raise EngineRefusalError(400, f"Field 'n': Value must be between {range_}, but got {choices}")
        several = len(prompts) > 1
        return [
            Job(
                0,
                self.server.vocabulary.decode(tokens),
                tokens,
                limit,
                token_ms=self.server.token_ms,
                extra={"several": several, "prompt": number},
            )
            for number, tokens in enumerate(prompts)
            for _ in range(choices)
        ]

    def _chat_tokens(self, body: dict[str, Any], shape: type[Shape]) -> list[int]:
        if shape is Responses:
            if "input" not in body:
                raise EngineRefusalError(400, "'input' is required")
            body = chat_of(Route.RESPONSES, body) or {}
        elif shape is Messages:
            if "messages" not in body:
                raise EngineRefusalError(500, "'messages' is required", "server_error")
            body = chat_of(Route.MESSAGES, body) or {}
        return self.server.vocabulary.encode(render(body))

    def _tokens(self, body: dict[str, Any]) -> list[list[int]]:
        if "prompt" not in body:
            raise EngineRefusalError(400, "[json.exception.out_of_range.403] key 'prompt' not found")
        prompt = body["prompt"]
        if isinstance(prompt, list) and not any(type(part) is int for part in prompt):
            found = [self._one(part) for part in prompt]
        else:
            found = [self._one(prompt)]
        if not found:
            raise EngineRefusalError(400, '"prompt" must not be empty')
        return found

    def _one(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return self.server.vocabulary.encode(prompt)
        if isinstance(prompt, list) and all(type(part) in {int, str} for part in prompt):
            return [
                token
                for part in prompt
                for token in ([part] if isinstance(part, int) else self.server.vocabulary.encode(part))
            ]
        allowed = "a string, a list of tokens, a JSON object containing a prompt string, or a list of mixed"
        raise EngineRefusalError(400, f'"prompt" elements must be {allowed} strings & tokens.')

    # -- slots ---------------------------------------------------------------------------------------------

    async def _take(self) -> None:
        """Give each job its slot, the engine's way; wait in the engine's queue where there is none."""
        server = self.server
        # /v1/messages knows no such field.
        keep = isinstance(self.shape, Messages) or self.body.get("cache_prompt") is not False
        for index, job in enumerate(self.jobs):
            job.index = index
            siblings = index > 0 and self.jobs[index - 1].extra["prompt"] == job.extra["prompt"]
            slot = await self._slot(job, child=siblings)
            self._check_length(job)
            server.tasks += 1
            if siblings:
                slot.tokens = list(self.slots[-1].tokens)
            server.model.launch(slot, server.tasks, job.tokens, keep=keep or siblings)
            server.log(f"slot launch_slot_: id {slot.id:2d} | task {server.tasks} | processing task")
            server.on_launch(slot, self.request)
            job.slot, job.cached = slot.id, slot.cached
            job.extra["child"] = siblings
            self.request.slots.append(slot.id)
            self.slots.append(slot)
        server.changed()

    def _check_length(self, job: Job) -> None:
        count, context = len(job.tokens), self.server.context
        if count >= context:
            message = f"request ({count} tokens) exceeds the available context size ({context} tokens), "
            kind = "exceed_context_size_error"
            raise EngineRefusalError(
                400, message + "try increasing it", kind, n_prompt_tokens=count, n_ctx=context
            )

    async def _slot(self, job: Job, *, child: bool) -> Slot:
        server = self.server
        while True:
            wanted = self.body.get("id_slot")
            if child:
                idle = [slot for slot in server.model.slots if not slot.processing]
                slot, how = (idle[0] if idle else None), "child"
            else:
                # /v1/messages does not honour the pin.
                pin = None if isinstance(self.shape, Messages) else wanted
                slot, how = server.model.select(job.tokens, pin)
            if slot is not None:
                server.log(f"slot get_availabl: id {slot.id:2d} | task -1 | selected slot {_CHOSEN[how]}")
                return slot
            await self._defer(f"pinned to busy slot {wanted}" if how == "id" else "deferred")

    async def _defer(self, violation: str) -> None:
        server = self.server
        server.violations.append(violation)
        server.deferred_total += 1
        waiter = asyncio.get_running_loop().create_future()
        server.waiting.append(waiter)
        server.changed()
        try:
            await waiter
        finally:
            if waiter in server.waiting:
                server.waiting.remove(waiter)

    def _release(self, slot: Slot) -> None:
        server = self.server
        server.model.release(slot)
        count = len(slot.tokens)
        server.log(
            f"slot      release: id {slot.id:2d} | task {slot.task} | stop processing: n_tokens = {count}"
        )
        while server.waiting:
            waiter = server.waiting.pop(0)
            if not waiter.done():
                waiter.set_result(None)
                break
        server.changed()

    # -- computing -----------------------------------------------------------------------------------------

    async def _prefill(self) -> None:
        server, first = self.server, self.jobs[0]
        progress = self.stream and self.body.get("return_progress") is True
        if progress:
            self._send(self.shape.progress(first, first.cached))
        await server.prefill.passed()
        for job, slot in zip(self.jobs, self.slots, strict=True):
            server.model.prefill(slot, job.tokens)
            job.evaluated = slot.evaluated
            server.counts["prompt"] += slot.evaluated
            server.counts["cached"] += slot.cached
        if progress:
            self._send(self.shape.progress(first, len(first.tokens)))
        server.changed()

    async def _decode_all(self) -> None:
        running = list(zip(self.jobs, self.slots, strict=True))
        while running:
            for job, slot in list(running):
                await self.server.token.passed()
                self._die_or_fail()
                piece, number = self._decode(job, slot)
                if self.stream:
                    if job.produced == 1:
                        self._send(self.shape.first(job))
                    self._send(self.shape.token(job, piece, number))
                if job.stop:
                    running.remove((job, slot))
                    self._release(slot)
                    if job.extra["child"]:
                        self.server.model.clear(slot)
                    if self.stream:
                        self._send(self.shape.last(job))
            await self.connection.drain()
            self.server.changed()

    def _decode(self, job: Job, slot: Slot) -> tuple[str, int]:
        """One token: the one before it joins the slot, as the engine decodes it to get the next."""
        vocabulary = self.server.vocabulary
        if job.produced:
            slot.tokens.append(job.extra["last"])
        else:
            found = _MARK.findall(job.prompt)
            job.extra["answer"] = vocabulary.encode(f"echo {found[-1] if found else 'nothing'}")
        answer = job.extra["answer"]
        if job.produced < len(answer):
            number = answer[job.produced]
        else:
            number = vocabulary.encode(_WORDS[(job.produced - len(answer)) % len(_WORDS)])[0]
        piece = vocabulary.decode([number])
        job.extra["last"] = number
        job.produced += 1
        job.text += piece
        slot.decoded = job.produced
        self.produced += 1
        self.server.counts["predicted"] += 1
        self.server.counts["decodes"] += 1
        if (job.limit is not None and 0 <= job.limit <= job.produced) or len(slot.tokens) + 1 >= slot.context:
            job.stop = "limit"
        elif job.produced >= self.server.answer_tokens and self.body.get("ignore_eos") is not True:
            job.stop = "eos"
        return piece, number

    def _die_or_fail(self) -> None:
        server = self.server
        server.make_room()
        if self.failures != server.failures:
            raise EngineRefusalError(500, "Context size has been exceeded.", "server_error")
        if server.die_after is not None and self.produced >= server.die_after:
            server.die_after = None
            self.request.outcome = "died"
            self.connection.abort()
            raise asyncio.CancelledError
        if server.fail_after is not None and self.produced >= server.fail_after:
            server.fail_after = None
            for slot in server.model.slots:
                if slot.processing:
                    server.model.clear(slot)
            raise EngineRefusalError(500, "Invalid input batch.", "server_error")

    # -- writing -------------------------------------------------------------------------------------------

    def _send(self, events: Iterable[bytes]) -> None:
        if not self.connection.streamed:
            self.connection.start_stream()
            self._send(self.shape.lead(self.jobs))
        server = self.server
        for data in events:
            drift = server.missing & {"timings", "usage"} or server.unknown_fields
            self.connection.chunk(self._rewritten(data) if drift else data)

    def _finish(self) -> None:
        if self.stream:
            self._send(self.shape.end(self.jobs))
            self.connection.chunk(b"")
        else:
            self.connection.answer(200, to_json(self._without_truth(self.shape.whole(self.jobs))))

    def _rewritten(self, data: bytes) -> bytes:
        head, mark, rest = data.partition(b"data: ")
        with contextlib.suppress(ValueError):
            return head + mark + to_json(self._without_truth(json.loads(rest))) + b"\n\n"
        return data

    def _without_truth(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._without_truth(element) for element in value]
        if not isinstance(value, dict):
            return value
        lost = self.server.missing & {"timings", "usage"}
        return self.server.drifted({name: part for name, part in value.items() if name not in lost})


def to_json(value: object) -> bytes:
    """JSON as the engine writes it: no spaces, no escapes beyond what is needed."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def body_of(request: Received) -> dict[str, Any]:
    """The decoded body; raises the engine's own refusal of what is no JSON."""
    try:
        body = json.loads(request.body)
    except ValueError as error:
        raise EngineRefusalError(400, f"[json.exception.parse_error.101] {error.args[0]}") from None
    return body if isinstance(body, dict) else {}


def _infill(body: dict[str, Any]) -> str:
    prefix, suffix = body.get("input_prefix", ""), body.get("input_suffix", "")
    return f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"


def _typed(body: dict[str, Any], name: str, kind: type, word: str) -> None:
    value = body.get(name)
    if value is not None and type(value) is not kind:
        found = {bool: "boolean", str: "string", list: "array", dict: "object"}.get(type(value), "number")
        text = f"[json.exception.type_error.302] type must be {word}, but is {found}"
        raise EngineRefusalError(400, f"Field '{name}': {text}")
