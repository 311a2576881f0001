"""What a llama-server's slots hold and which one it takes: the rules of the real engine, without an engine.

Token lists are real lists: cached and evaluated counts come out of comparing them and of nothing else.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PIECE = re.compile(r"<\|[a-z_]+\|>| ?[A-Za-z]{1,6}|[0-9]| ?[^\sA-Za-z0-9]|\s", re.DOTALL)

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What SmolLM2's template puts in front of a conversation that has no system message."""

SIMILARITY = 0.10
"""``--slot-prompt-similarity``: above it an idle slot is taken for its content."""


class EngineRefusalError(Exception):
    """The engine's answer to a request that it does not run."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", **more: int) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": status, "message": message, "type": kind, **more}}


class Vocabulary:
    """Turns text into numbers and back; the number of a piece is the same in every process."""

    def __init__(self) -> None:
        self._pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        ids = []
        for piece in _PIECE.findall(text):
            number = zlib.crc32(piece.encode("utf-8", "surrogatepass")) & 0x7FFFFFFF
            self._pieces[number] = piece
            ids.append(number)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``; a number that no text had so far shows as itself."""
        return "".join(self._pieces.get(token, f"<{token}>") for token in tokens)


def render(body: Mapping[str, Any]) -> str:
    """SmolLM2's chat template as llama-server applies it."""
    messages = body.get("messages")
    if messages is None:
        raise EngineRefusalError(400, "'messages' is required")
    if not isinstance(messages, list):
        raise EngineRefusalError(400, "Expected 'messages' to be an array")
    parts = []
    last = len(messages) - 1
    if messages and messages[0].get("role") != "system":
        parts.append(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        text = _content(content, role)
        if index == last and role == "assistant" and not message.get("tool_calls"):
            return "".join([*parts, f"<|im_start|>assistant\n{text}"])
        parts.append(f"<|im_start|>{role}\n{text}<|im_end|>\n")
    if body.get("add_generation_prompt", True):
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def _content(content: object, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role != "assistant":
            raise EngineRefusalError(400, "All non-assistant messages must contain 'content'")
        return ""
    if not isinstance(content, list):
        raise EngineRefusalError(400, "Expected 'content' to be a string or an array")
    if any(part.get("type") not in {"text", "input_text"} for part in content):
        hint = "hint: if this is unexpected, you may need to provide the mmproj"
        raise EngineRefusalError(500, f"image input is not supported - {hint}", "server_error")
    return "\n".join(part["text"] for part in content)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


@dataclass
class Slot:
    """One slot: what its KV holds, and what runs on it."""

    id: int
    context: int
    tokens: list[int] = field(default_factory=list)
    used: bool = False
    task: int | None = None
    processing: bool = False
    last_used: int = -1
    cached: int = 0
    evaluated: int = 0
    decoded: int = 0

    def as_json(self) -> dict[str, Any]:
        """The slot's element in ``/slots``."""
        shown: dict[str, Any] = {
            "id": self.id,
            "n_ctx": self.context,
            "speculative": False,
            "is_processing": self.processing,
        }
        if self.used:
            shown |= {
                "id_task": self.task,
                "n_prompt_tokens": len(self.tokens),
                "n_prompt_tokens_processed": self.evaluated if self.processing else 0,
                "n_prompt_tokens_cache": self.cached if self.processing else 0,
                "params": {"stream": False},
                "next_token": [
                    {"has_next_token": self.processing, "n_remain": -1, "n_decoded": self.decoded}
                ],
            }
        return shown


class SlotModel:
    """All slots of one engine."""

    def __init__(self, slots: int, context: int) -> None:
        self.slots = [Slot(number, context) for number in range(slots)]
        self.tick = 0
        self.outdated: set[int] = set()
        """Slots that were computed with other adapters: cleared when they are used next."""

    def select(self, tokens: Sequence[int], wanted: object) -> tuple[Slot | None, str]:
        """The slot for a prompt and how it was found; ``None`` where the request must be deferred."""
        if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
            slot = self.slots[wanted % len(self.slots)]
            return (None if slot.processing else slot), "id"
        idle = [slot for slot in self.slots if not slot.processing]
        if not idle:
            return None, "none"
        best, similarity = None, SIMILARITY
        for slot in idle:
            share = common_prefix(slot.tokens, tokens) / len(tokens)
            if share > similarity:
                best, similarity = slot, share
        if best is not None:
            return best, "lcp"
        return min(idle, key=lambda slot: (slot.last_used, -slot.id)), "lru"

    def launch(self, slot: Slot, task: int, tokens: Sequence[int], *, keep: bool) -> None:
        """Begin a prompt on an idle slot: cut it back to what the prompt shares with it."""
        shared = common_prefix(slot.tokens, tokens) if keep and slot.id not in self.outdated else 0
        self.outdated.discard(slot.id)
        # The last token is always evaluated: its logits are needed.
        slot.cached = min(shared, len(tokens) - 1)
        slot.tokens = list(tokens[: slot.cached])
        slot.task, slot.processing, slot.used = task, True, True
        slot.evaluated = slot.decoded = 0

    def prefill(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Evaluate what the slot lacks of the prompt."""
        slot.evaluated = len(tokens) - slot.cached
        slot.tokens = list(tokens)

    def release(self, slot: Slot) -> None:
        """The slot is idle again and keeps what it holds."""
        self.tick += 1
        slot.processing = False
        slot.last_used = self.tick

    def clear(self, slot: Slot) -> None:
        """Drop what the slot holds."""
        slot.tokens = []
