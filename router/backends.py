"""What the dispatcher knows of each backend, and what it answers when none can serve."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import EngineClient
    from .health import HealthWatch
    from .settling import SlotWatch


class NoBackendError(Exception):
    """No backend of the pool came up in time."""

    def __init__(self, pool: str, seconds: float) -> None:
        super().__init__(f"no backend of pool {pool!r} is up (waited {seconds:g} s)")
        self.pool, self.seconds = pool, seconds


class PoolRemovedError(Exception):
    """The pool is there no more: what was meant for it is looked up anew, as any request that comes now."""

    def __init__(self, pool: str) -> None:
        super().__init__(f"the pool {pool!r} was removed")
        self.pool = pool


class StoppingError(Exception):
    """The router is stopping and takes no more requests."""

    def __init__(self) -> None:
        super().__init__("the router is stopping")


@dataclass(slots=True, eq=False)
class Backend:
    """What the dispatcher knows of one backend."""

    name: str
    pool: str
    client: EngineClient | None = None
    life: SlotWatch | None = None
    """Its leases since it came up last; ``None`` while it is down."""
    slots: int = 0
    context: int = 0
    """Tokens per slot."""
    watch: HealthWatch | None = None
    draining: bool = False
    """It finishes what runs on it and gets nothing new."""
    alone: bool = False
    """A call has it for itself, or waits for that."""
    withheld: str = ""
    """Why it gets no requests though it serves, in words; empty where nothing of that kind is the matter."""
    scales: str | None = None
    """The mark of the LoRA scales that its engine has; empty: those of its flags, ``None``: not known."""
    filled_with: str | None = None
    """The mark of those with which was computed what its slots hold; so marked."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of calls that need it for themselves, the one that has it."""
    unified: bool = False
    """Its slots share one context of ``context`` tokens, as was told or seen when it was full."""
    copies_pay: bool | None = None
    """What was last said of its prompt cache in host memory: whether it saves time."""

    @property
    def up(self) -> bool:
        """Whether it serves."""
        return self.life is not None

    @property
    def trouble(self) -> str:
        """Why one that runs elsewhere is down; empty where that is not known."""
        return "" if self.up or self.watch is None else self.watch.trouble

    async def looked_at(self) -> None:
        """Wait until one that runs elsewhere was looked at once."""
        if self.watch is not None:
            await self.watch.looked.wait()

    @property
    def suspected(self) -> bool:
        """Whether it has just refused or broken a connection, and has not proved itself since."""
        return self.watch is not None and self.watch.suspecting

    @property
    def usable(self) -> bool:
        """Whether it serves, and serves as it should."""
        return self.up and not self.suspected and not self.withheld

    @property
    def admits(self) -> bool:
        """Whether leases may be given on it now."""
        return self.usable and not self.draining and not self.alone
