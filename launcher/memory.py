"""What a model needs: from a GGUF's own metadata to bytes per token, per slot and in all.

The sizes of the KV cache and of recurrent state are exact: tests compare them with what engines allocate. The
compute buffers are the engine's own affair; only a try tells (:mod:`.plan`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CACHE_TYPES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Bytes of one number in the KV cache."""

_CELLS = 256
"""The engine rounds the cells of a cache up to a multiple of this."""

UBATCH = 512
"""Tokens of one physical batch (``-ub``); a sliding window's cache has room for one on top."""

_SWA_PERIODS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "cohere2": 4,
    "gpt-oss": 2,
    "llama4": 4,
    "olmo2": 4,
    "exaone4": 4,
}
"""For models that do not tell it themselves: of so many layers the last attends to everything."""


class PlanError(Exception):
    """The model's metadata does not tell what is needed; one line."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps."""

    keys: int = 0
    """Numbers of K, and of V, for each token."""
    values: int = 0
    window: bool = False
    """Whether it looks at the last tokens only."""
    state: int = 0
    """Bytes of recurrent state for each slot, whatever the context."""


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model matters for memory."""

    name: str
    architecture: str
    weights: int
    """Bytes of all tensors."""
    trained_context: int
    window: int
    """Tokens of the sliding window, 0 where there is none."""
    layers: tuple[Layer, ...]

    @property
    def recurrent(self) -> bool:
        """Whether any layer keeps a recurrent state."""
        return any(layer.state for layer in self.layers)

    def token_bytes(self, key_type: str = "f16", value_type: str = "f16") -> float:
        """What one more token of context costs: layers that see all of it."""
        return sum(_bytes(layer, key_type, value_type) for layer in self.layers if not layer.window)

    def slot_bytes(
        self, context: int, key_type: str = "f16", value_type: str = "f16", *, ubatch: int = UBATCH
    ) -> int:
        """What one slot of ``context`` tokens takes, recurrent state included."""
        cells = _padded(context)
        windowed = min(cells, _padded(self.window + ubatch))
        total = 0.0
        for layer in self.layers:
            total += _bytes(layer, key_type, value_type) * (windowed if layer.window else cells) + layer.state
        return round(total)

    def state_bytes(self) -> int:
        """What one slot takes whatever its context: recurrent state."""
        return sum(layer.state for layer in self.layers)


def _bytes(layer: Layer, key_type: str, value_type: str) -> float:
    return layer.keys * CACHE_TYPES[key_type] + layer.values * CACHE_TYPES[value_type]


def _padded(tokens: int) -> int:
    return ceil(tokens / _CELLS) * _CELLS


def read_model(path: Path) -> Model:
    """The memory facts of a GGUF file. Raises :class:`PlanError`."""
    from .gguf_metadata import MetadataReader  # noqa: PLC0415 - it brings numpy along

    try:
        reader = MetadataReader(path)
    except (ValueError, OSError, IndexError, struct.error) as error:
        raise PlanError(f"{path} cannot be read as GGUF: {error}") from None
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith(("GGUF.", "tokenizer."))
    }
    weights = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    return describe(fields, weights, path.stem)


def describe(fields: Mapping[str, Any], weights: int, name: str) -> Model:
    """The memory facts from metadata (``llama.block_count`` …). Raises :class:`PlanError`."""
    facts = _Facts(fields)
    count = facts.number("block_count")
    heads = facts.per_layer("attention.head_count", count, 0)
    kv_heads = facts.per_layer("attention.head_count_kv", count, heads)
    width = facts.number("embedding_length")
    most = max(heads, default=0)
    head = width // most if most else 0
    key, value = facts.number("attention.key_length", head), facts.number("attention.value_length", head)
    latent = facts.number("attention.kv_lora_rank", 0)
    window = facts.number("attention.sliding_window", 0)
    windows = _windows(facts, count) if window else [False] * count
    state = _state_bytes(facts, width)
    periodic = facts.number("full_attention_interval", 0)
    layers = []
    for index in range(count):
        attends = kv_heads[index] > 0 and (not periodic or (index + 1) % periodic == 0)
        mixed = state and (not attends or facts.architecture == "falcon-h1")
        keys, values = kv_heads[index] * key, kv_heads[index] * value
        if latent:  # one compressed vector for keys and values of all heads
            keys, values = latent + facts.number("rope.dimension_count", 0), 0
        layers.append(
            Layer(
                keys if attends else 0,
                values if attends else 0,
                windows[index] and attends,
                state if mixed else 0,
            )
        )
    return Model(
        name=str(fields.get("general.name") or name),
        architecture=facts.architecture,
        weights=weights,
        trained_context=facts.number("context_length", 0),
        window=window,
        layers=tuple(layers),
    )


class _Facts:
    """Metadata of one architecture."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.architecture = str(fields.get("general.architecture", ""))
        if not self.architecture:
            raise PlanError("the model's metadata names no architecture")
        self._fields = fields

    def get(self, name: str) -> Any:
        """A value, or ``None``."""
        return self._fields.get(f"{self.architecture}.{name}")

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number. Raises :class:`PlanError` where it is missing and there is no default."""
        value = self.get(name)
        if isinstance(value, list | tuple):
            value = max(value, default=None)
        if value is None:
            value = default
        if value is None:
            raise PlanError(f"the model's metadata lacks {self.architecture}.{name}")
        return int(value)

    def per_layer(self, name: str, count: int, default: int | list[int]) -> list[int]:
        """A number for each layer, of one for all or of a list."""
        value: Any = self.get(name)
        if value is None:
            value = default
        if isinstance(value, list | tuple):
            return [int(one) for one in value] + [0] * (count - len(value))
        return [int(value)] * count


def _windows(facts: _Facts, count: int) -> list[bool]:
    """Which layers look at a window only."""
    pattern = facts.get("attention.sliding_window_pattern")
    if isinstance(pattern, list | tuple):
        return [bool(one) for one in pattern][:count] + [False] * (count - len(pattern))
    period = int(pattern) if pattern else _SWA_PERIODS.get(facts.architecture, 0)
    return [bool(period) and index % period < period - 1 for index in range(count)]


def _state_bytes(facts: _Facts, width: int) -> int:
    """Recurrent state of one layer for one slot, in bytes (it is kept in 32-bit numbers)."""
    short = facts.number("shortconv.l_cache", 0)
    if short:
        return 4 * width * (short - 1)
    head = facts.number("wkv.head_size", 0)
    if head:
        return 4 * (width * facts.number("token_shift_count", 2) + width * head)
    inner, size = facts.number("ssm.inner_size", 0), facts.number("ssm.state_size", 0)
    conv, groups = facts.number("ssm.conv_kernel", 0), facts.number("ssm.group_count", 0)
    return 4 * (max(0, conv - 1) * (inner + 2 * groups * size) + size * inner)
