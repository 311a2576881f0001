"""Reads the truth about a request from its answer as the bytes pass by.

The reader is fed what the client gets and changes nothing. Counts come from the engine alone: ``timings``
where the route has them, else ``usage``, else ``prompt_progress``; what none of them told stays ``None``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .values import Route

BODY_LIMIT: Final = 32 * 1024 * 1024
"""Bytes of a non-streaming body that are kept for parsing; of a longer one only the end is searched."""

_TAIL: Final = 64 * 1024

_TIMINGS: Final = re.compile(rb'"timings"\s*:\s*(\{[^{}]*\})')


@dataclass(slots=True)
class Answer:
    """What is known of one choice (``n`` > 1) or one of several prompts; counts are engine tokens."""

    cached_tokens: int | None = None
    processed_tokens: int | None = None
    output_tokens: int | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    stop_reason: str | None = None
    slot: int | None = None
    """Where it ran, told by ``/completion`` only."""
    exact: bool = False
    """Whether the counts come from ``timings``."""
    text: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    called: bool = False
    """Whether it called a tool: the raw text from there on is not known."""


class _Lines:
    """Cuts a byte stream into lines at LF or CRLF, wherever the pieces were split."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        lines = data.split(b"\n")
        if len(lines) == 1:
            self._rest.append(data)
            return
        if self._rest:
            lines[0] = b"".join((*self._rest, lines[0]))
            self._rest.clear()
        rest = lines.pop()
        if rest:
            self._rest.append(rest)
        for line in lines:
            yield line[:-1] if line.endswith(b"\r") else line


class TruthReader:
    """Fed an answer's body as it passes, tells what it cost and what the slot holds now.

    With several choices or prompts in one request, the counts are those of the first (index 0), whose slot is
    the lease's; :attr:`answers` has all of them. Never raises on what an engine sends.
    """

    def __init__(self, route: Route, streaming: bool) -> None:
        self.route, self.streaming = route, streaming
        self.answers: dict[int, Answer] = {}
        self._first_token = False
        self.progress: tuple[int, int, int] | None = None
        """Total, cached and evaluated prompt tokens of the last ``prompt_progress``."""
        self._error_object: dict[str, Any] | None = None
        self.events = 0
        self._finished = False
        self._lines = _Lines()
        self._data: list[bytes] = []
        self._body: list[bytes] = []
        self._size = 0
        self._parsed = 0
        self._pieces = 0

    # -- what it tells -------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the answer is whole: its terminal event, or a complete JSON body, has passed."""
        self._settle()
        return self._finished

    @property
    def first_token(self) -> bool:
        """Whether generated content (or the end of an answer that has none) has passed."""
        self._settle()
        return self._first_token

    @property
    def error(self) -> dict[str, Any] | None:
        """The engine's error object, where it answered with one or broke off a stream with one."""
        self._settle()
        return self._error_object

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the engine reused (``timings.cache_n``), ``None`` if it did not say."""
        return self._first().cached_tokens

    @property
    def processed_tokens(self) -> int | None:
        """Prompt tokens that the engine evaluated (``timings.prompt_n``), ``None`` if it did not say."""
        return self._first().processed_tokens

    @property
    def output_tokens(self) -> int:
        """Generated tokens; of an answer that broke off, the content events that had come."""
        told = self._first().output_tokens
        return self._pieces if told is None else told

    @property
    def prefill_seconds(self) -> float:
        """Seconds that the engine spent on the prompt (0 if it did not say)."""
        return self._first().prefill_seconds

    @property
    def decode_seconds(self) -> float:
        """Seconds that the engine spent on generating (0 if it did not say)."""
        return self._first().decode_seconds

    @property
    def drafted_tokens(self) -> int:
        """Tokens that speculation drafted (0 if it did not say)."""
        return self._first().drafted_tokens

    @property
    def accepted_tokens(self) -> int:
        """Of the drafted tokens, those that were kept."""
        return self._first().accepted_tokens

    @property
    def stop_reason(self) -> str | None:
        """Why it stopped, in the route's own words."""
        return self._first().stop_reason

    @property
    def slot(self) -> int | None:
        """The slot that the engine says it took (``/completion`` only)."""
        return self._first().slot

    @property
    def generated(self) -> bytes:
        """The text that follows the prompt in the slot, as far as the answer shows it.

        Plain content is what the engine generated. Reasoning is put back between the usual think marks; a
        tool call's raw text cannot be known, so the text ends before it.
        """
        answer = self._first()
        content = "".join(answer.text)
        thought = "".join(answer.thought)
        if thought:
            content = f"<think>{thought}</think>{content}"
        return content.encode("utf-8", "surrogatepass")

    def _first(self) -> Answer:
        self._settle()
        return self._answer(0)

    def _answer(self, index: object) -> Answer:
        key = index if isinstance(index, int) else 0
        found = self.answers.get(key)
        if found is None:
            found = self.answers[key] = Answer()
        return found

    # -- what it is fed ------------------------------------------------------------------------------------

    def feed(self, chunk: bytes) -> None:
        """Look at the next piece of the body, cut anywhere."""
        if not self._size and self.streaming and chunk[:1] in {b"{", b"["}:
            # Asked for a stream, refused with a JSON body.
            self.streaming = False
        if not self.streaming:
            self._keep(chunk)
            return
        self._size += len(chunk)
        for line in self._lines.feed(chunk):
            if not line:
                if self._data:
                    data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                    self._data.clear()
                    self._event(data)
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line.startswith(b"error:"):
                self._error(_loads(line[6:]))

    def _keep(self, chunk: bytes) -> None:
        self._size += len(chunk)
        self._body.append(chunk)
        if self._size > BODY_LIMIT:
            self._body = [b"".join(self._body)[-_TAIL:]]

    def _settle(self) -> None:
        """Parse a non-streaming body, once for each length that it had when someone asked."""
        if self.streaming or self._parsed == self._size:
            return
        self._parsed = self._size
        body = b"".join(self._body)
        self._body = [body]
        if self._size > BODY_LIMIT:
            for found in _TIMINGS.findall(body):
                self._timings(self._answer(0), _loads(found))
            self._finished = body.rstrip().endswith((b"}", b"]"))
            return
        data = _loads(body)
        if data is None:
            # An error page, or not all there yet.
            return
        self._finished = True
        self._whole(data)
        self._body.clear()

    def _whole(self, data: Any) -> None:
        if isinstance(data, list):
            for position, element in enumerate(data):
                if isinstance(element, dict):
                    self._answer(element.get("index", position))
                    self._object(element)
        elif isinstance(data, dict):
            self._object(data)
        self._first_token = self._error_object is None

    def _event(self, data: bytes) -> None:
        self.events += 1
        if data == b"[DONE]":
            self._finished = True
            return
        event = _loads(data)
        if isinstance(event, dict):
            self._object(event)

    def _object(self, event: dict[str, Any]) -> None:
        if event.get("error") is not None:
            self._error(event)
            return
        kind = event.get("type")
        if "choices" in event:
            self._openai(event)
        elif isinstance(kind, str):
            self._typed(kind, event)
        elif "content" in event:
            self._native(event)
        elif event.get("object") == "response" or "usage" in event:
            self._response(event)
        timings = event.get("timings")
        if timings is not None:
            self._timings(self._answer(self._index(event)), timings)

    @staticmethod
    def _index(event: Mapping[str, Any]) -> object:
        choices = event.get("choices")
        if isinstance(choices, list):
            if len(choices) == 1 and isinstance(choices[0], dict):
                return choices[0].get("index", 0)
            return 0
        return event.get("index", 0)

    def _error(self, event: Any) -> None:
        error = event.get("error", event) if isinstance(event, dict) else {}
        self._error_object = error if isinstance(error, dict) else {"message": str(error)}
        self._finished = True

    # -- shapes --------------------------------------------------------------------------------------------

    def _openai(self, event: dict[str, Any]) -> None:
        """Chat and text completions, in pieces or whole."""
        choices = event["choices"]
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            answer = self._answer(choice.get("index", 0))
            part = choice.get("delta", choice.get("message"))
            if isinstance(part, dict):
                self._say(answer, part.get("content"))
                self._think(answer, part.get("reasoning_content"))
                if part.get("tool_calls"):
                    self._call(answer)
            self._say(answer, choice.get("text"))
            if isinstance(reason := choice.get("finish_reason"), str):
                answer.stop_reason = reason
                self._first_token = True
        usage = event.get("usage")
        if isinstance(usage, dict):
            index = self._index(event)
            self._usage(self._answer(index), usage, "prompt", "completion")
        if "prompt_progress" in event:
            self._progress(event["prompt_progress"])

    def _native(self, event: dict[str, Any]) -> None:
        """``/completion`` and ``/infill``."""
        answer = self._answer(event.get("index", 0))
        self._say(answer, event.get("content"))
        if "prompt_progress" in event:
            self._progress(event["prompt_progress"])
        if event.get("stop") is not True:
            return
        self._first_token = True
        answer.stop_reason = _string(event.get("stop_type"))
        slot = event.get("id_slot")
        if isinstance(slot, int) and slot >= 0:
            answer.slot = slot
        if self.streaming:
            self._finished = all(one.stop_reason for one in self.answers.values())

    def _typed(self, kind: str, event: dict[str, Any]) -> None:
        """Responses and Anthropic messages, whose events carry a ``type``."""
        if kind.startswith("response."):
            self._responses_event(kind, event)
        elif kind == "message":
            self._message(event)
        else:
            self._messages_event(kind, event)

    def _responses_event(self, kind: str, event: dict[str, Any]) -> None:
        answer = self._answer(0)
        if kind == "response.output_text.delta":
            self._say(answer, event.get("delta"))
        elif kind.startswith("response.reasoning") and kind.endswith(".delta"):
            self._think(answer, event.get("delta"))
        elif kind.startswith("response.function_call_arguments"):
            self._call(answer)
        elif kind in {"response.completed", "response.incomplete", "response.failed"}:
            response = event.get("response")
            if isinstance(response, dict):
                self._response(response)
            self._finished = True

    def _messages_event(self, kind: str, event: dict[str, Any]) -> None:
        answer = self._answer(0)
        if kind == "message_start":
            self._anthropic(_dict(event.get("message")).get("usage"))
        elif kind == "content_block_start":
            if _dict(event.get("content_block")).get("type") == "tool_use":
                self._call(answer)
        elif kind == "content_block_delta":
            delta = _dict(event.get("delta"))
            self._say(answer, delta.get("text"))
            self._think(answer, delta.get("thinking"))
        elif kind == "message_delta":
            answer.stop_reason = _string(_dict(event.get("delta")).get("stop_reason"))
            self._anthropic(event.get("usage"))
            self._first_token = True
        elif kind == "message_stop":
            self._finished = True

    def _response(self, response: dict[str, Any]) -> None:
        """A whole response object; its text is taken only where no deltas brought it before."""
        answer = self._answer(0)
        if not answer.text and not answer.thought and not answer.called:
            output = response.get("output")
            for item in output if isinstance(output, list) else ():
                if not isinstance(item, dict):
                    continue
                parts = item.get("content")
                say = self._think if item.get("type") == "reasoning" else self._say
                for part in parts if isinstance(parts, list) else ():
                    if isinstance(part, dict):
                        say(answer, part.get("text"))
                if item.get("type") == "function_call":
                    self._call(answer)
        answer.stop_reason = _string(response.get("status")) or answer.stop_reason
        if isinstance(usage := response.get("usage"), dict):
            self._usage(answer, usage, "input", "output")
        if isinstance(error := response.get("error"), dict):
            self._error_object = error

    def _message(self, message: dict[str, Any]) -> None:
        answer = self._answer(0)
        blocks = message.get("content")
        for block in blocks if isinstance(blocks, list) else ():
            if not isinstance(block, dict):
                continue
            self._think(answer, block.get("thinking"))
            self._say(answer, block.get("text"))
            if block.get("type") == "tool_use":
                self._call(answer)
        answer.stop_reason = _string(message.get("stop_reason"))
        self._anthropic(message.get("usage"))

    # -- pieces --------------------------------------------------------------------------------------------

    def _say(self, answer: Answer, text: object) -> None:
        if isinstance(text, str) and text:
            if not answer.called:
                answer.text.append(text)
            self._pieces += 1
            self._first_token = True

    def _think(self, answer: Answer, text: object) -> None:
        if isinstance(text, str) and text:
            answer.thought.append(text)
            self._pieces += 1
            self._first_token = True

    def _call(self, answer: Answer) -> None:
        answer.called = True
        self._pieces += 1
        self._first_token = True

    # -- counts --------------------------------------------------------------------------------------------

    def _timings(self, answer: Answer, timings: Any) -> None:
        if not isinstance(timings, dict):
            return
        cached, processed = _count(timings.get("cache_n")), _count(timings.get("prompt_n"))
        if cached is not None and processed is not None:
            answer.cached_tokens, answer.processed_tokens, answer.exact = cached, processed, True
        answer.output_tokens = _either(_count(timings.get("predicted_n")), answer.output_tokens)
        answer.prefill_seconds = _milliseconds(timings.get("prompt_ms"), answer.prefill_seconds)
        answer.decode_seconds = _milliseconds(timings.get("predicted_ms"), answer.decode_seconds)
        answer.drafted_tokens = _count(timings.get("draft_n")) or answer.drafted_tokens
        answer.accepted_tokens = _count(timings.get("draft_n_accepted")) or answer.accepted_tokens

    @staticmethod
    def _usage(answer: Answer, usage: Mapping[str, Any], prompt: str, output: str) -> None:
        answer.output_tokens = _either(_count(usage.get(f"{output}_tokens")), answer.output_tokens)
        total = _count(usage.get(f"{prompt}_tokens"))
        details = usage.get(f"{prompt}_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        if answer.exact or total is None or cached is None or cached > total:
            return
        answer.cached_tokens, answer.processed_tokens = cached, total - cached

    def _anthropic(self, usage: Any) -> None:
        """Here ``input_tokens`` leaves out what was cached."""
        if not isinstance(usage, dict):
            return
        answer = self._answer(0)
        answer.output_tokens = _either(_count(usage.get("output_tokens")), answer.output_tokens)
        processed, cached = _count(usage.get("input_tokens")), _count(usage.get("cache_read_input_tokens"))
        if not answer.exact and processed is not None and cached is not None:
            answer.cached_tokens, answer.processed_tokens = cached, processed

    def _progress(self, progress: Any) -> None:
        if not isinstance(progress, dict):
            return
        total, cached = _count(progress.get("total")), _count(progress.get("cache"))
        done = _count(progress.get("processed"))
        if total is None or cached is None or done is None:
            return
        self.progress = (total, cached, done)
        answer = self._answer(0)
        if not answer.exact:
            answer.cached_tokens, answer.processed_tokens = cached, max(done - cached, 0)


def _loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    """A token count, or ``None`` where the field is missing or makes no sense."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    return int(value)


def _either(value: int | None, otherwise: int | None) -> int | None:
    return otherwise if value is None else value


def _milliseconds(value: object, otherwise: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return otherwise
    return value / 1000


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None
