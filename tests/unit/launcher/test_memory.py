"""Memory from metadata: what is known of public models comes out; what is missing is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from warmslot.launcher.host_memory import (
    MIB,
    Device,
    MemoryWatch,
    cap_cache_ram,
    fit_cache_ram,
    parse_devices,
)
from warmslot.launcher.memory import PlanError, describe
from warmslot.launcher.plan import choose, need, table
from warmslot.router.config import Backend

LLAMA = {
    "general.architecture": "llama",
    "general.name": "L",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
}
GEMMA = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 18,
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.sliding_window": 512,
}
MAMBA = {
    "general.architecture": "mamba",
    "mamba.block_count": 4,
    "mamba.context_length": 1_000_000,
    "mamba.embedding_length": 64,
    "mamba.attention.head_count": 0,
    "mamba.ssm.conv_kernel": 4,
    "mamba.ssm.inner_size": 128,
    "mamba.ssm.state_size": 16,
}
HYBRID = {
    "general.architecture": "lfm2",
    "lfm2.block_count": 3,
    "lfm2.context_length": 32768,
    "lfm2.embedding_length": 64,
    "lfm2.attention.head_count": 4,
    "lfm2.attention.head_count_kv": [0, 2, 0],
    "lfm2.shortconv.l_cache": 3,
}


def test_grouped_queries() -> None:
    model = describe(LLAMA, 100 * MIB, "file")
    assert model.token_bytes() == 30 * 2 * 3 * 64 * 2
    assert model.slot_bytes(2048) == 45 * MIB
    assert model.slot_bytes(2000) == 45 * MIB  # whole blocks of cells
    assert model.slot_bytes(2048, "q8_0", "q8_0") == 45 * MIB * 34 // 64
    assert (model.window, model.recurrent) == (0, False)


def test_sliding_windows_cost_the_same_whatever_the_context() -> None:
    model = describe(GEMMA, 0, "file")
    assert sum(layer.window for layer in model.layers) == 15
    assert model.slot_bytes(2048) == 6 * MIB + 15 * MIB
    assert model.slot_bytes(32768) - model.slot_bytes(16384) == 48 * MIB
    assert model.slot_bytes(256) == 18 * 2 * 256 * 2 * 256


def test_recurrent_state_is_a_fixed_cost() -> None:
    model = describe(MAMBA, 0, "file")
    assert model.token_bytes() == 0
    assert model.slot_bytes(4096) == model.slot_bytes(65536) == model.state_bytes()
    assert model.state_bytes() == 4 * 4 * (3 * 128 + 16 * 128)


def test_hybrids_have_both() -> None:
    model = describe(HYBRID, 0, "file")
    assert model.token_bytes() == 2 * 2 * 16 * 2
    assert model.state_bytes() == 2 * 4 * 64 * 2


def test_missing_metadata_is_named() -> None:
    with pytest.raises(PlanError, match="names no architecture"):
        describe({}, 0, "file")
    with pytest.raises(PlanError, match=r"lacks llama\.block_count"):
        describe({"general.architecture": "llama"}, 0, "file")


def test_the_table_marks_what_fits() -> None:
    model = describe(LLAMA, 100 * MIB, "file")
    rows = table(model, 1000 * MIB, slots=(1, 4, 32), contexts=(4096, 8192, 65536))
    assert [[cell.fits for cell in row] for row in rows] == [[True, True], [True, True], [False, False]]
    assert rows[1][1].bytes == need(model, 4, 8192) == 820 * MIB


@pytest.mark.parametrize(
    ("mib", "chosen"), [(150, None), (310, (1, 8192)), (600, (4, 4096)), (1000, (4, 8192)), (1300, (6, 8192))]
)
def test_four_slots_come_before_a_long_context(mib: int, chosen: tuple[int, int] | None) -> None:
    assert choose(describe(LLAMA, 100 * MIB, "file"), mib * MIB, ("f16", "f16")) == chosen


def test_the_prompt_cache_gets_what_the_host_can_give() -> None:
    assert cap_cache_ram(8192, 64 << 30, 4 << 30) == 8192
    assert cap_cache_ram(8192, 8 << 30, 4 << 30) == 2048
    assert cap_cache_ram(8192, 4 << 30, 4 << 30) == 0
    assert cap_cache_ram(8192, (4 << 30) + 100 * MIB, 4 << 30) == 0


@pytest.mark.parametrize(
    ("free", "gets", "said"),
    [
        (64 << 30, 8192, ""),
        (8 << 30, 4095, "b: cache_ram is 8192 MiB, but the host has 8192 MiB available: it gets 4095 MiB"),
        (100 * MIB, 0, "b: cache_ram is 8192 MiB, but the host has 100 MiB available: it is switched off"),
    ],
)
def test_a_host_without_the_memory_for_a_prompt_cache_caps_it_and_says_so(
    free: int, gets: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(__file__)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    fitted = fit_cache_ram(Backend(name="b", model=str(model), cache_ram=8192), model)
    assert fitted.cache_ram == gets
    assert [record.getMessage() for record in caplog.records] == ([said] if said else [])


def test_devices_without_figures_are_left_out() -> None:
    assert parse_devices("0, 100, 1000\n1, [N/A], [N/A]\n\n") == [Device(0, 100 * MIB, 1000 * MIB)]


def test_short_memory_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    watch, total = MemoryWatch(), 1000 * MIB
    for free in (500, 40, 30, 60, 40, 200, 300):
        watch.look(free * MIB, total, [Device(0, total // 2, total)])
    assert [record.getMessage() for record in caplog.records] == [
        "host: only 40 of 1000 MiB of memory are free",
        "host: 200 MiB of memory are free again",
    ]
