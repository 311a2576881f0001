"""Models of a few random weights, in architectures whose caches differ; the vocabulary is borrowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 64
LAYERS = 4
CONTEXT = 4096


class Tiny(GGUFWriter):
    """A model being written."""

    def __init__(self, path: Path, architecture: str, vocabulary: Path) -> None:
        super().__init__(path, architecture)
        self._random = np.random.default_rng(7)
        self.add_block_count(LAYERS)
        self.add_context_length(CONTEXT)
        self.add_embedding_length(WIDTH)
        self.add_name(f"tiny {architecture}")
        self.tokens = self._copy_vocabulary(vocabulary)
        self.add_vocab_size(self.tokens)
        self.weights("token_embd.weight", self.tokens, WIDTH)

    def weights(self, name: str, *shape: int) -> None:
        """A random tensor; ``shape`` has rows first."""
        self.add_tensor(name, (self._random.standard_normal(shape) * 0.02).astype(np.float32))

    def ones(self, name: str, size: int = WIDTH) -> None:
        """A norm's weights."""
        self.add_tensor(name, np.ones(size, dtype=np.float32))

    def feed_forward(self, layer: int, size: int = 128) -> None:
        """The part that all attention models have."""
        self.ones(f"blk.{layer}.ffn_norm.weight")
        self.weights(f"blk.{layer}.ffn_gate.weight", size, WIDTH)
        self.weights(f"blk.{layer}.ffn_up.weight", size, WIDTH)
        self.weights(f"blk.{layer}.ffn_down.weight", WIDTH, size)

    def attention(self, layer: int, heads: int, kv_heads: int, head: int) -> None:
        """Queries, keys, values, output."""
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            self.weights(f"blk.{layer}.attn_{part}.weight", count * head, WIDTH)
        self.weights(f"blk.{layer}.attn_output.weight", WIDTH, heads * head)

    def finish(self) -> None:
        """Write the file."""
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_tensors_to_file()
        self.close()

    def _copy_vocabulary(self, source: Path) -> int:
        count = 0
        for name, field in GGUFReader(source).fields.items():
            if not name.startswith("tokenizer.") or name == "tokenizer.chat_template":
                continue
            value = field.contents()
            kind = field.types[0]
            self.add_key_value(name, value, kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
            if name == "tokenizer.ggml.tokens":
                count = len(value)
        return count


def grouped_query(path: Path, vocabulary: Path) -> None:
    """Eight query heads on two of keys and values."""
    model = Tiny(path, "llama", vocabulary)
    model.add_feed_forward_length(128)
    model.add_head_count(8)
    model.add_head_count_kv(2)
    model.add_layer_norm_rms_eps(1e-5)
    model.add_rope_dimension_count(8)
    for layer in range(LAYERS):
        model.ones(f"blk.{layer}.attn_norm.weight")
        model.attention(layer, 8, 2, 8)
        model.feed_forward(layer)
    model.ones("output_norm.weight")
    model.finish()


def hybrid(path: Path, vocabulary: Path) -> None:
    """Short convolutions, and attention in every second layer."""
    model = Tiny(path, "lfm2", vocabulary)
    kv_heads = [2 if layer % 2 else 0 for layer in range(LAYERS)]
    model.add_feed_forward_length(128)
    model.add_head_count(4)
    model.add_head_count_kv(kv_heads)
    model.add_layer_norm_rms_eps(1e-5)
    model.add_shortconv_l_cache(3)
    for layer in range(LAYERS):
        model.ones(f"blk.{layer}.attn_norm.weight")
        if kv_heads[layer]:
            model.attention(layer, 4, 2, 16)
            model.ones(f"blk.{layer}.attn_q_norm.weight", 16)
            model.ones(f"blk.{layer}.attn_k_norm.weight", 16)
        else:
            model.weights(f"blk.{layer}.shortconv.conv.weight", WIDTH, 3)
            model.weights(f"blk.{layer}.shortconv.in_proj.weight", 3 * WIDTH, WIDTH)
            model.weights(f"blk.{layer}.shortconv.out_proj.weight", WIDTH, WIDTH)
        model.feed_forward(layer)
    model.ones("token_embd_norm.weight")
    model.finish()


def recurrent(path: Path, vocabulary: Path) -> None:
    """State spaces only."""
    inner, state, rank, conv = 128, 16, 4, 4
    model = Tiny(path, "mamba", vocabulary)
    model.add_feed_forward_length(0)
    model.add_head_count(0)
    model.add_ssm_conv_kernel(conv)
    model.add_ssm_inner_size(inner)
    model.add_ssm_state_size(state)
    model.add_ssm_time_step_rank(rank)
    model.add_layer_norm_rms_eps(1e-5)
    for layer in range(LAYERS):
        model.ones(f"blk.{layer}.attn_norm.weight")
        model.weights(f"blk.{layer}.ssm_in.weight", 2 * inner, WIDTH)
        model.weights(f"blk.{layer}.ssm_conv1d.weight", inner, conv)
        model.weights(f"blk.{layer}.ssm_conv1d.bias", inner)
        model.weights(f"blk.{layer}.ssm_x.weight", rank + 2 * state, inner)
        model.weights(f"blk.{layer}.ssm_dt.weight", inner, rank)
        model.weights(f"blk.{layer}.ssm_dt.bias", inner)
        model.weights(f"blk.{layer}.ssm_a", inner, state)
        model.weights(f"blk.{layer}.ssm_d", inner)
        model.weights(f"blk.{layer}.ssm_out.weight", WIDTH, inner)
    model.ones("output_norm.weight")
    model.finish()


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "grouped-query": grouped_query,
    "hybrid": hybrid,
    "recurrent": recurrent,
}
