"""A running warmslot is found by its configuration file's name, whatever has become of the file."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import httpx
import pytest
from typer.testing import CliRunner
from warmslot.launcher.bench import routed
from warmslot.launcher.cli import app
from warmslot.launcher.control import Control
from warmslot.launcher.state import configuration_of, default_folder, known_folders, remember

from tests.fakes.llama_server import FakeLlamaServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path
    from typing import Any

    Run = Callable[[str, Path | None], Any]


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Stands in for ``warmslot up FILE`` with a state folder: listens there, and has noted its file."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "base"))
    controls = []

    async def start(name: str, folder: Path | None = None) -> Path:
        file = tmp_path / name
        state = folder or default_folder(file)
        state.mkdir(parents=True)

        async def restart(asked: Mapping[str, Any]) -> dict[str, Any]:
            return {"name": asked["name"], "state": name, "slots": 1, "context": 256}

        control = Control(state, {"restart": restart})
        await control.start()
        controls.append(control)
        remember(state, file)
        return file

    yield start
    for control in controls:
        control.close()


async def restart(*options: str) -> tuple[int, str]:
    came = await asyncio.to_thread(CliRunner().invoke, app, ["restart", "one", *options])
    return came.exit_code, came.output


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_broken_or_missing_file_still_names_its_run(
    run: Any, tmp_path: Path, *, elsewhere: bool
) -> None:
    file = await run("a.yaml", tmp_path / "else" / "where" if elsewhere else None)
    await run("b.yaml")
    assert await restart("-c", str(file)) == (0, "one: a.yaml, 1 slots of 256 tokens\n")
    file.write_text("pools: [")
    assert await restart("-c", str(file)) == (0, "one: a.yaml, 1 slots of 256 tokens\n")


async def test_one_whose_state_is_elsewhere_is_found_without_a_name(run: Any, tmp_path: Path) -> None:
    await run("a.yaml", tmp_path / "elsewhere")
    assert await restart() == (0, "one: a.yaml, 1 slots of 256 tokens\n")


async def test_several_are_listed_by_their_files(run: Any, tmp_path: Path) -> None:
    files = {await run("a.yaml"), await run("b.yaml", tmp_path / "elsewhere")}
    code, said = await restart()
    assert code == 1
    head, *names = said.splitlines()
    assert head == "several run here: name its configuration file with --config"
    assert set(names) == {f"  {file}" for file in files}


async def test_a_note_about_a_folder_that_another_file_has_taken_is_not_believed(
    run: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    file = await run("a.yaml", folder)
    remember(folder, tmp_path / "b.yaml")
    code, said = await restart("-c", str(file))
    assert (code, "a.yaml: No such file or directory" in said) == (2, True)
    assert configuration_of(folder) == tmp_path / "b.yaml"
    assert known_folders() == [folder]


async def test_a_measured_run_leaves_no_state_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with FakeLlamaServer() as fake:
        pools = [{"name": "m", "backends": [{"name": "far", "url": fake.base_url}]}]
        async with routed({"pools": pools}) as address, httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{address}/ui", timeout=60)).status_code == 200
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - nothing waits for it
