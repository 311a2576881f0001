"""LoRA adapters on the real engine: what was computed with others is neither counted on nor reused."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from warmslot.launcher.engine import EngineKind

from tests.support.router import serving
from tests.support.stack import stack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from warmslot.launcher.engine import Engine

RANK = 4
TEXT = "Rivers run to the sea, and nobody knows why. " * 8


@dataclass
class Address:
    """A running engine as the router needs it."""

    base_url: str
    n_slots: int
    context: int


def write_adapter(path: Path, model: Path) -> None:
    """An adapter of random weights on the queries of a model: its answers are others with it."""
    rng = np.random.default_rng(3)
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for tensor in GGUFReader(model).tensors:
        if tensor.name.endswith("attn_q.weight"):
            inner, outer = (int(size) for size in tensor.shape)
            for part, shape in (("a", (RANK, inner)), ("b", (outer, RANK))):
                weights = (rng.standard_normal(shape) * 0.3).astype(np.float32)
                writer.add_tensor(f"{tensor.name}.lora_{part}", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def adapter_for(engine: Engine, model: Path, folder: Path) -> Path:
    """One for a model, where the engine takes any."""
    if engine.kind is EngineKind.EMBEDDED:
        pytest.skip("the embedded engine has no option --lora")
    adapter = folder / "adapter.gguf"
    write_adapter(adapter, model)
    return adapter


async def test_answers_are_those_of_the_adapters_in_force(
    installed_engine: Engine,
    demo_model: Path,
    start_engine: Callable[..., Awaitable[str]],
    tmp_path: Path,
) -> None:
    adapter = adapter_for(installed_engine, demo_model, tmp_path)
    profile = ("--no-kv-unified", "--no-cache-idle-slots", "--cache-ram", "0")
    url = await start_engine("-np", "2", "-c", "1024", *profile, "--lora", str(adapter))
    async with serving([Address(url, 2, 512)]) as service, httpx.AsyncClient(timeout=100) as direct:

        async def ask(**more: Any) -> dict[str, Any]:
            body = {"prompt": TEXT, "n_predict": 8, "temperature": 0, **more}
            answer = await service.http.post("/completion", json=body)
            told: dict[str, Any] = answer.json()
            return told

        async def scale(to: float) -> None:
            answer = await service.http.post("/lora-adapters", json=[{"id": 0, "scale": to}])
            assert (answer.status_code, answer.json()) == (200, {"success": True})
            assert (await direct.get(f"{url}/lora-adapters")).json()[0]["scale"] == to
            assert not any(view.resident_tokens for view in service.router.dispatcher.slots())

        answers = {}
        for to in (1.0, 0.0, 1.0, 0.0, 0.5):
            await scale(to)
            first = await ask()
            assert service.watcher.reports[-1].predicted_tokens == 0
            again = await ask()
            assert again["timings"]["prompt_n"] == 1
            anew = await ask(cache_prompt=False)
            assert first["content"] == anew["content"]  # both computed whole, in the same batches
            assert first["timings"]["cache_n"] == 0
            assert answers.setdefault(to, first["content"]) == first["content"]
        assert answers[0.0] != answers[1.0]


async def test_scales_outlast_the_engine(installed_engine: Engine, demo_model: Path, tmp_path: Path) -> None:
    adapter = adapter_for(installed_engine, demo_model, tmp_path)
    args = ["--no-warmup", "--lora", str(adapter)]
    async with stack(installed_engine, demo_model, tmp_path, slots=2, threads=2, args=args) as running:

        async def ask() -> tuple[str, int]:
            told = (await running.complete(TEXT, n_predict=8)).json()
            return told["content"], told["timings"]["cache_n"]

        async def scale(to: float) -> None:
            answer = await running.http.post("/lora-adapters", json=[{"id": 0, "scale": to}])
            assert answer.status_code == 200

        async def die(count: int) -> None:
            os.kill(running.pid, signal.SIGKILL)
            await running.ready(count)

        flags, _ = await ask()
        await scale(0)
        off, cached = await ask()
        assert (off != flags, cached) == (True, 0)
        await die(2)
        assert await ask() == (off, 0)  # nothing was saved: all is computed anew, with the same scales
        again, whole = await ask()
        await running.supervisor.restart("one")
        assert await ask() == (again, whole)  # it was saved, and is put back under the scales that filled it
        await scale(1)
        await die(4)
        assert await ask() == (flags, 0)  # what lies in files was filled under others
