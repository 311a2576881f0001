"""Which pool a model name leads to, and what clients are told of the pools."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from . import errors
from .backends import PoolRemovedError
from .masks import Treatment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .config import Config
    from .dispatcher import Dispatcher
    from .generation import Passage


T = TypeVar("T")


class Pools:
    """The pools of the configuration in force, by every name that clients may use."""

    def __init__(self, config: Config, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._created = int(time.time())
        self.renew(config)

    def renew(self, config: Config) -> None:
        """Other names from now on, also for requests that came before and are not in their pool yet."""
        self._config = config
        self._by_name = {name: pool.name for pool in config.pools for name in (pool.name, *pool.aliases)}
        self._catches_all = any(pool.default for pool in config.pools)
        self._treatments = {
            pool.name: Treatment(pool.masks, sort_tools=pool.sort_tools) for pool in config.pools
        }
        self.default = config.default_pool.name

    async def serve(self, model: object, passage: Passage, serve: Callable[[], Awaitable[T]]) -> T:
        """Call ``serve`` with the pool that ``model`` names now noted in ``passage``; what it returned.

        Where that pool is removed before a backend of it has served, the name is looked up again, so that
        the request gets what one that comes now would get. Raises what :meth:`of_model` raises.
        """
        while True:
            passage.pool = self.of_model(model)
            try:
                return await serve()
            except PoolRemovedError:
                passage.pool = "none"

    def treatment(self, pool: str) -> Treatment:
        """Masks and the order of tools in a pool; for one that is not there, none."""
        return self._treatments.get(pool) or Treatment()

    def of_model(self, model: object) -> str:
        """The pool that a body's ``model`` names; the default pool where it names none.

        An unknown name is a 404 unless a pool is marked as the default: then that one takes it.
        """
        if model is None or model == "":
            return self.default
        if not isinstance(model, str):
            raise errors.invalid("model: must be a string", param="model")
        pool = self._by_name.get(model)
        if pool is None and not self._catches_all:
            raise errors.unknown_model(self._by_name)
        return pool or self.default

    def most_slots(self, pool: str) -> int | None:
        """The slots of the pool's largest backend; ``None`` while nothing of it is up."""
        return max((b.slots for b in self._dispatcher.fleet.pools.get(pool, ()) if b.up), default=None)

    def listing(self) -> dict[str, Any]:
        """The body of ``GET /v1/models``: an entry for each pool, with the context that a slot really has."""
        return {
            "object": "list",
            "data": [self._entry(pool.name, pool.aliases) for pool in self._config.pools],
        }

    def _entry(self, name: str, aliases: tuple[str, ...]) -> dict[str, Any]:
        up = [backend for backend in self._dispatcher.fleet.pools[name] if backend.up]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "llamacpp",
            "aliases": list(aliases),
            "meta": {
                "n_ctx": min((backend.context for backend in up), default=None),
                "slots": sum(backend.slots for backend in up),
                "backends_up": len(up),
                "default": name == self.default,
            },
        }
