"""What a steered client is told of its prompt tokens: what it would have been told without the steering.

The prompt was computed by a call before the request, so the engine tells that all but one token was cached.
In its place come the counts of that call. Nothing else of the answer changes: the two numbers are replaced
where they stand, and only where the outcome reads as meant; else the bytes stay as they are.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

_USAGE: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*\})')
_INPUT: Final = re.compile(rb'("input_tokens"\s*:\s*)[0-9]+')
_CACHED: Final = re.compile(rb'("cache_read_input_tokens"\s*:\s*)[0-9]+')

_HELD: Final = 64 * 1024
"""Bytes of a stream among which its ``message_start`` ends; where it does not, nothing is replaced."""


def corrected(data: bytes, cached: int, total: int) -> bytes:
    """An Anthropic message, or the ``message_start`` of one, as it would be without the call before it.

    That call found ``cached`` of the prompt's ``total`` tokens. The sum of both counts stays what the message
    says. Where the message did not find what the call had computed, it tells the truth already.
    """
    told = _loads(data)
    holder = told.get("message") if told.get("type") == "message_start" else told
    if not isinstance(holder, dict) or not isinstance(usage := holder.get("usage"), dict):
        return data
    processed, found_there = usage.get("input_tokens"), usage.get("cache_read_input_tokens")
    if not isinstance(processed, int) or not isinstance(found_there, int) or found_there < total - 1:
        return data
    cached = min(cached, found_there)
    processed += found_there - cached
    meant = usage | {"input_tokens": processed, "cache_read_input_tokens": cached}
    for found in _USAGE.finditer(data):
        if _loads(found[1]) != usage:
            continue
        changed = _INPUT.sub(rb"\g<1>%d" % processed, found[1])
        changed = _CACHED.sub(rb"\g<1>%d" % cached, changed)
        whole = data[: found.start(1)] + changed + data[found.end(1) :]
        # A tool's input may hold something that looks alike: only the message's own usage may have changed.
        holder["usage"] = meant
        if _loads(whole) == told:
            return whole
        holder["usage"] = usage
    return data


class Correction:
    """Fed a stream of ``/v1/messages`` as it passes, hands it on with the counts :func:`corrected`.

    Holds back the beginning of a stream until its first event of data is whole; the rest passes as it comes.
    """

    def __init__(self, cached: int, total: int) -> None:
        self._cached, self._total = cached, total
        self._held = b""
        self._done = False

    def feed(self, chunk: bytes) -> bytes:
        """The next piece of a stream; empty while more is needed."""
        if self._done:
            return chunk
        data = self._held + chunk
        at = 0
        while (end := data.find(b"\n\n", at)) >= 0:
            event = data[at : end + 2]
            start = event.find(b"data:")
            if start >= 0:
                self._done, self._held = True, b""
                first = event[:start] + b"data:" + corrected(event[start + 5 :], self._cached, self._total)
                return data[:at] + first + data[end + 2 :]
            at = end + 2
        if len(data) > _HELD:
            self._done, self._held = True, b""
            return data
        self._held = data[at:]
        return data[:at]

    def rest(self) -> bytes:
        """What is still held back when the stream is over."""
        held, self._held = self._held, b""
        return held


def _loads(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
