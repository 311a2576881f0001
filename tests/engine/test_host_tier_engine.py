"""The model of the engine's prompt cache in host memory against a real engine: every reuse as predicted."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import httpx
from warmslot.launcher.memory import read_model
from warmslot.router.host_tier import HostTier
from warmslot.router.residency import Context
from warmslot.router.values import BLOCK, HostMemory, Prompt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

MIB = 1 << 20
CACHE = 12
FLAGS = ("-np", "2", "-c", "2048", "--no-kv-unified", "--no-cache-idle-slots", "--cache-ram", str(CACHE))


def tokens_of(seed: int, count: int) -> list[int]:
    return [random.Random(1000 * seed + at).randrange(1000, 40000) for at in range(count)]  # noqa: S311


def prompt(tokens: list[int]) -> Prompt:
    """One token is one block, so that lengths are exact in both."""
    return Prompt.of(b"".join(struct.pack("<I", token) * (BLOCK // 4) for token in tokens))


def context(tokens: list[int]) -> Context:
    whole = prompt(tokens)
    return Context(whole.chain, whole.length, whole.data, ((0, 0), (whole.length, len(tokens))))


async def test_every_reuse_is_as_predicted(
    start_engine: Callable[..., Awaitable[str]], demo_model: Path
) -> None:
    cache = HostTier(HostMemory(limit=CACHE * MIB, token_bytes=read_model(demo_model).token_bytes() + 12))
    a, b, c, d = (tokens_of(seed, count) for seed, count in ((1, 200), (2, 150), (3, 220), (4, 24)))
    script = [
        (0, a),
        (0, b),
        (1, [*a, 5000]),  # an empty slot that it is pinned to: the cache is not looked at
        (0, [*a, *d]),  # comes back, and goes on
        (0, [*b, 5001]),
        (1, c),
        (1, [*d, *tokens_of(5, 300)]),  # of the prompt less than a tenth would be kept
        (0, [*c, 5002]),
        (0, [*b[:70], *d]),  # not half of its entry
        (1, [*a, *d, 5003]),  # the oldest had to make room by now
        (0, [*a[:150], *d]),
        (1, [*a[:30], *d]),  # too little of any entry
        (0, [*c, 5004]),
    ]
    url = await start_engine(*FLAGS)
    slots: dict[int, list[int]] = {}
    predicted, observed, loads = [], [], 0
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        for slot, tokens in script:
            held = slots.get(slot, [])
            exchange = cache.exchange(context(held) if held else None, prompt(tokens), len(tokens))
            kept = next((at for at, (x, y) in enumerate(zip(held, tokens, strict=False)) if x != y), 0)
            kept = kept or min(len(held), len(tokens)) * (held[: len(tokens)] == tokens[: len(held)])
            loads += exchange.loaded is not None
            predicted.append(min(exchange.kept if exchange.loaded else kept, len(tokens) - 1))
            body = {"prompt": tokens, "id_slot": slot, "n_predict": 1, "cache_prompt": True}
            timings = (await client.post("/completion", json=body)).json()["timings"]
            observed.append(timings["cache_n"])
            slots[slot] = tokens
    assert observed == predicted
    assert loads >= 3
    assert len(cache) >= 1
