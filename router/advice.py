"""What an advisor says of a backend's slot count: made by the launcher, published by the router. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advised:
    """Advice on one backend, from its own traffic."""

    slots: int
    """0: there is no advice; the reason tells why."""
    reason: str
    """A paragraph. It holds figures, and no text of prompts."""
    time: float
    """When it was found, in Unix seconds."""
    headline: str = ""
    """The recommendation in a few words."""
    confidence: str = ""
    """``high``, ``medium`` or ``low``; nothing where there is no advice."""
