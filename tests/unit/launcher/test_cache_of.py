"""What the launcher tells the router of an engine's prompt cache in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmslot.launcher.host_memory import MIB, cache_of
from warmslot.router.config import Backend

if TYPE_CHECKING:
    from pathlib import Path


def test_without_a_cache_there_is_nothing_to_tell() -> None:
    assert cache_of(Backend(name="b", model="demo")) is None


def test_a_tokens_size_is_told_where_it_is_known(demo_model: Path) -> None:
    plain = cache_of(Backend(name="b", model=str(demo_model), cache_ram=64))
    assert plain is not None
    assert plain.limit == 64 * MIB
    assert plain.token_bytes > 0
    other = cache_of(Backend(name="b", model=str(demo_model), cache_ram=64, args=("-ctk", "q8_0")))
    assert other is not None
    assert other.token_bytes == 0.0


def test_a_model_that_cannot_be_read_has_a_limit_all_the_same(tmp_path: Path) -> None:
    found = cache_of(Backend(name="b", model=str(tmp_path / "none.gguf"), cache_ram=64))
    assert found is not None
    assert found.token_bytes == 0.0
