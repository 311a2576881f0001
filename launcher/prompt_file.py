"""Reads a file that holds a prompt worth having: a request body, as clients send it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from pathlib import Path


class WarmUpError(Exception):
    """A file holds no prompt; one line."""


def read_prompt(path: Path) -> dict[str, Any]:
    """A request body with ``messages`` or ``prompt``. Raises :class:`WarmUpError`."""
    try:
        body = orjson.loads(path.read_bytes())
    except OSError as error:
        raise WarmUpError(f"warm_up: {path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise WarmUpError(f"warm_up: {path}: not JSON: {error}") from None
    if not isinstance(body, dict) or not {"messages", "prompt"} & body.keys():
        raise WarmUpError(f"warm_up: {path}: found no messages and no prompt, allowed: a request body")
    return body
