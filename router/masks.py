"""What an operator has set for the prompts of a pool: text left out of their keys, tools in order. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

from .values import Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Treatment:
    """``masks`` are patterns of volatile text, such as a clock or a client's nonce.

    The engine still evaluates that text: a mask lets requests that differ in nothing else go to one slot, and
    does not make the engine reuse what follows it.
    """

    def __init__(self, masks: Sequence[str] = (), *, sort_tools: bool = False) -> None:
        self._masks = [re.compile(mask.encode(), re.MULTILINE) for mask in masks]
        self._sort_tools = sort_tools

    def keyed(self, prompt: Prompt) -> tuple[Prompt, int]:
        """The prompt that stands for ``prompt`` in keys, and how many bytes were left out of it."""
        if not self._masks or prompt.data is None or prompt.tokens is not None:
            return prompt, 0
        data = prompt.data
        for mask in self._masks:
            data = mask.sub(b"", data)
        left_out = len(prompt.data) - len(data)
        return (Prompt.of(data, root=prompt.root) if left_out else prompt), left_out

    def in_order(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The body with its tools sorted by name; ``None`` where nothing is to be changed."""
        tools = body.get("tools")
        if not self._sort_tools or not isinstance(tools, list):
            return None
        try:
            ordered = sorted(tools, key=_name)
        except TypeError:
            return None
        return None if ordered == tools else {**body, "tools": ordered}


def _name(tool: Any) -> tuple[str, bytes]:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    return (name if isinstance(name, str) else "", orjson.dumps(tool, option=orjson.OPT_SORT_KEYS))
