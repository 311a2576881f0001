"""The JSON of llama-server's answers, for each route."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

CREATED = 1_700_000_000
BUILD = "b0-fake"


@dataclass
class Job:
    """One sequence being generated: one choice of one prompt."""

    index: int
    prompt: str
    tokens: list[int]
    limit: int | None
    slot: int = -1
    cached: int = 0
    evaluated: int = 0
    text: str = ""
    produced: int = 0
    stop: str = ""
    """``limit`` or ``eos``."""
    token_ms: float = 10.0
    """What it says that a generated token took; nothing waits for that."""
    extra: dict[str, Any] = field(default_factory=dict)

    def timings(self) -> dict[str, Any]:
        """The engine's account of this sequence."""
        prompt_ms, predicted_ms = self.evaluated * 2.0, self.produced * self.token_ms
        return {
            "cache_n": self.cached,
            "prompt_n": self.evaluated,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": 2.0,
            "prompt_per_second": 500.0,
            "predicted_n": self.produced,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": self.token_ms,
            "predicted_per_second": 1000.0 / self.token_ms,
        }

    def usage(self) -> dict[str, Any]:
        """The OpenAI account of this sequence."""
        total = self.cached + self.evaluated
        return {
            "completion_tokens": self.produced,
            "prompt_tokens": total,
            "total_tokens": total + self.produced,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def progress(self, processed: int) -> dict[str, int]:
        """``prompt_progress``: ``processed`` counts the cached tokens in, as the engine does."""
        return {"total": len(self.tokens), "cache": self.cached, "processed": processed, "time_ms": 0}


def event(data: object, name: str | None = None) -> bytes:
    """One server-sent event as the engine frames it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


class Shape:
    """How one route answers; ``model`` is the alias."""

    def __init__(self, model: str, body: dict[str, Any]) -> None:
        self.model, self.body = model, body
        options = body.get("stream_options") or {}
        self.include_usage = options.get("include_usage") is True
        self.identifier = "chatcmpl-fake"

    def _frame(self, kind: str, choices: list[Any], **more: object) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": CREATED,
            "id": self.identifier,
            "model": self.model,
            "system_fingerprint": BUILD,
            "object": kind,
            **more,
        }

    def progress(self, job: Job, processed: int) -> Iterable[bytes]:
        """A ``prompt_progress`` event, where the route has one."""
        del job, processed
        return ()

    def first(self, job: Job) -> Iterable[bytes]:
        """What comes with the first token of a sequence."""
        del job
        return ()

    def token(self, job: Job, piece: str, number: int) -> Iterable[bytes]:
        """The event of one token."""
        raise NotImplementedError

    def last(self, job: Job) -> Iterable[bytes]:
        """What comes when a sequence is done."""
        raise NotImplementedError

    def end(self, jobs: list[Job]) -> Iterable[bytes]:
        """What comes when all are done."""
        del jobs
        return ()

    def whole(self, jobs: list[Job]) -> Any:
        """The answer in one piece."""
        raise NotImplementedError

    def lead(self, jobs: list[Job]) -> Iterable[bytes]:
        """What a stream of several prompts begins with."""
        return (b"data: null\n\n",) if len(jobs) > 1 and jobs[0].extra.get("several") else ()


class Chat(Shape):
    """``/v1/chat/completions``."""

    def _piece(self, job: Job, delta: dict[str, Any], finish: str | None = None, **more: object) -> bytes:
        choice = {"finish_reason": finish, "index": job.index, "delta": delta}
        return event(self._frame("chat.completion.chunk", [choice], **more))

    def progress(self, job: Job, processed: int) -> Iterable[bytes]:
        delta = {"role": "assistant", "content": None}
        return (self._piece(job, delta, prompt_progress=job.progress(processed)),)

    def first(self, job: Job) -> Iterable[bytes]:
        return (self._piece(job, {"role": "assistant", "content": None}),)

    def token(self, job: Job, piece: str, number: int) -> Iterable[bytes]:
        del number
        return (self._piece(job, {"content": piece}),)

    def last(self, job: Job) -> Iterable[bytes]:
        finish = "stop" if job.stop == "eos" else "length"
        if self.include_usage:
            tail = event(self._frame("chat.completion.chunk", [], usage=job.usage(), timings=job.timings()))
            return (self._piece(job, {}, finish), tail)
        return (self._piece(job, {}, finish, timings=job.timings()),)

    def end(self, jobs: list[Job]) -> Iterable[bytes]:
        del jobs
        return (b"data: [DONE]\n\n",)

    def whole(self, jobs: list[Job]) -> Any:
        choices = [
            {
                "finish_reason": "stop" if job.stop == "eos" else "length",
                "index": job.index,
                "message": {"role": "assistant", "content": job.text},
            }
            for job in jobs
        ]
        return self._frame("chat.completion", choices, usage=jobs[0].usage(), timings=jobs[0].timings())


class Completions(Shape):
    """``/v1/completions``."""

    def _choice(self, job: Job, text: str, finish: str | None) -> dict[str, Any]:
        return {"text": text, "index": job.index, "logprobs": None, "finish_reason": finish}

    def token(self, job: Job, piece: str, number: int) -> Iterable[bytes]:
        del number
        return (event(self._frame("text_completion", [self._choice(job, piece, None)])),)

    def last(self, job: Job) -> Iterable[bytes]:
        choice = self._choice(job, "", "stop" if job.stop == "eos" else "length")
        return (event(self._frame("text_completion", [choice], usage=job.usage(), timings=job.timings())),)

    def end(self, jobs: list[Job]) -> Iterable[bytes]:
        del jobs
        return (b"data: [DONE]\n\n",)

    def whole(self, jobs: list[Job]) -> Any:
        choices = [self._choice(job, job.text, "stop" if job.stop == "eos" else "length") for job in jobs]
        return self._frame("text_completion", choices, usage=jobs[0].usage(), timings=jobs[0].timings())


class Native(Shape):
    """``/completion``."""

    def progress(self, job: Job, processed: int) -> Iterable[bytes]:
        return (event(self._piece(job, "", [0]) | {"prompt_progress": job.progress(processed)}),)

    def _piece(self, job: Job, piece: str, tokens: list[int]) -> dict[str, Any]:
        return {
            "index": job.index,
            "content": piece,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": job.produced,
            "tokens_evaluated": len(job.tokens),
        }

    def token(self, job: Job, piece: str, number: int) -> Iterable[bytes]:
        return (event(self._piece(job, piece, [number])),)

    def _done(self, job: Job, text: str) -> dict[str, Any]:
        return {
            "index": job.index,
            "content": text,
            "tokens": [],
            "id_slot": job.slot,
            "stop": True,
            "model": self.model,
            "tokens_predicted": job.produced,
            "tokens_evaluated": len(job.tokens),
            "generation_settings": {"stream": self.body.get("stream") is True},
            "prompt": job.prompt,
            "has_new_line": "\n" in job.text,
            "truncated": False,
            "stop_type": job.stop,
            "stopping_word": "",
            "tokens_cached": len(job.tokens) + job.produced - 1,
            "timings": job.timings(),
        }

    def last(self, job: Job) -> Iterable[bytes]:
        return (event(self._done(job, "")),)

    def whole(self, jobs: list[Job]) -> Any:
        done = [self._done(job, job.text) for job in jobs]
        return done[0] if len(done) == 1 else done


class Infill(Native):
    """``/infill``."""


class Responses(Shape):
    """``/v1/responses``."""

    def _typed(self, name: str, **more: object) -> bytes:
        return event({"type": name, **more}, name)

    def _item(self, job: Job, status: str = "completed") -> dict[str, Any]:
        content = {"type": "output_text", "annotations": [], "logprobs": [], "text": job.text}
        return {
            "type": "message",
            "status": status,
            "id": "msg_fake",
            "content": [content],
            "role": "assistant",
        }

    def _usage(self, job: Job) -> dict[str, Any]:
        total = job.cached + job.evaluated
        return {
            "input_tokens": total,
            "output_tokens": job.produced,
            "total_tokens": total + job.produced,
            "input_tokens_details": {"cached_tokens": job.cached},
        }

    def first(self, job: Job) -> Iterable[bytes]:
        begun = {"id": "resp_fake", "object": "response", "status": "in_progress"}
        yield self._typed("response.created", response=begun)
        yield self._typed("response.in_progress", response=begun)
        item = self._item(job, "in_progress") | {"content": []}
        yield self._typed("response.output_item.added", item=item)
        part = {"type": "output_text", "text": ""}
        yield self._typed("response.content_part.added", item_id="msg_fake", part=part)

    def token(self, job: Job, piece: str, number: int) -> Iterable[bytes]:
        del job, number
        return (self._typed("response.output_text.delta", item_id="msg_fake", delta=piece),)

    def last(self, job: Job) -> Iterable[bytes]:
        item = self._item(job)
        yield self._typed("response.output_text.done", item_id="msg_fake", text=job.text)
        yield self._typed("response.content_part.done", item_id="msg_fake", part=item["content"][0])
        yield self._typed("response.output_item.done", item=item)
        done = self._response(job) | {"output": [item]}
        yield self._typed("response.completed", response=done, timings=job.timings())

    def _response(self, job: Job) -> dict[str, Any]:
        return {
            "id": "resp_fake",
            "object": "response",
            "created_at": CREATED,
            "status": "completed",
            "model": self.model,
            "output": [self._item(job)],
            "usage": self._usage(job),
        }

    def whole(self, jobs: list[Job]) -> Any:
        return self._response(jobs[0]) | {"completed_at": CREATED}


class Messages(Shape):
    """``/v1/messages``."""

    def _typed(self, name: str, **more: object) -> bytes:
        return event({"type": name, **more}, name)

    def _stop(self, job: Job) -> str:
        return "end_turn" if job.stop == "eos" else "max_tokens"

    def _message(self, job: Job, content: list[Any], reason: str | None, produced: int) -> dict[str, Any]:
        return {
            "id": self.identifier,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": {
                "cache_read_input_tokens": job.cached,
                "input_tokens": job.evaluated,
                "output_tokens": produced,
            },
        }

    def first(self, job: Job) -> Iterable[bytes]:
        yield self._typed("message_start", message=self._message(job, [], None, 0))
        yield self._typed("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def token(self, job: Job, piece: str, number: int) -> Iterable[bytes]:
        del job, number
        delta = {"type": "text_delta", "text": piece}
        return (self._typed("content_block_delta", index=0, delta=delta),)

    def last(self, job: Job) -> Iterable[bytes]:
        yield self._typed("content_block_stop", index=0)
        delta = {"stop_reason": self._stop(job), "stop_sequence": None}
        yield self._typed("message_delta", delta=delta, usage={"output_tokens": job.produced})
        yield self._typed("message_stop")

    def whole(self, jobs: list[Job]) -> Any:
        job = jobs[0]
        return self._message(job, [{"type": "text", "text": job.text}], self._stop(job), job.produced)
