"""What a configuration names and this machine lacks is said before a start, each at its setting."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from warmslot.launcher import preflight as module
from warmslot.launcher.engine import Engine, EngineError, EngineKind, parse_help
from warmslot.launcher.preflight import preflight
from warmslot.router.config import Config

HELP = """\
-m,    --model FNAME
-np,   --parallel N
-c,    --ctx-size N
-ngl,  --n-gpu-layers N
--host HOST
--port PORT
--override-kv KEY=TYPE:VALUE,...
"""
BACKEND = ("pools", 0, "backends", 0)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file; the engine that is found has the options of :data:`HELP`."""
    engine = Engine(EngineKind.STOCK, ("/bin/engine",), "test", parse_help(HELP))
    monkeypatch.setattr(module, "find_engine", lambda _: engine)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and nothing else")
    return path


def config(model: Path, *, pool: dict[str, Any] | None = None, top: Any = None, **backend: Any) -> Config:
    backends = [{"name": "a", "model": str(model), **backend}, {"name": "b", "url": "http://127.0.0.1:1"}]
    return Config.model_validate(
        {"pools": [{"name": "m", "backends": backends, **(pool or {})}], **(top or {})}
    )


def test_nothing_is_said_where_all_is_there(model: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text('{"prompt": "x"}')
    good = config(
        model,
        pool={"warm_up": [str(prompt)]},
        top={"journal": {"path": str(tmp_path / "j.jsonl")}, "state": {"path": str(tmp_path / "a" / "b")}},
        slot_save_path=str(tmp_path / "kv" / "deep"),
        args=["-ngl", "99", "--override-kv=a=int:-1"],
        cpus=str(min(os.sched_getaffinity(0))),
    )
    assert preflight(good) == []
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("name", "value", "step", "said"),
    [
        ("args", ["-np", "2"], (), "the extra argument -np clashes with -np 4, which warmslot sets itself"),
        ("args", ["-c", "1", "--frob"], (), "the extra argument -c clashes with -c 16384"),
        ("args", ["--frob=1"], (0,), "the engine /bin/engine has no option --frob"),
        ("cpus", "100000", (), "there is no CPU 100000 for us here"),
        (
            "cpus",
            "99000-99999,100001,100003-100004",
            (),
            "there is no CPU 99000-99999, 100001, 100003-100004 for",
        ),
    ],
)
def test_what_a_backend_lacks(model: Path, name: str, value: Any, step: tuple[int, ...], said: str) -> None:
    lack = preflight(config(model, **{name: value}))[0]
    assert lack.place == (*BACKEND, name, *step)
    assert lack.message.startswith(said)


def test_every_lack_is_said_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: str | None) -> Engine:
        raise EngineError("no engine found")

    monkeypatch.setattr(module, "find_engine", none)
    model.write_bytes(b"ELF, no model")
    file = tmp_path / "file"
    file.write_text("[]")
    wrong = config(
        model,
        pool={"warm_up": [str(file)]},
        top={"journal": {"path": str(tmp_path / "no" / "j")}, "state": {"path": str(file)}},
        slot_save_path=str(file / "kv"),
    )
    assert [(lack.place, lack.message.split(": ")[-1]) for lack in preflight(wrong)] == [
        (("journal", "path"), f"there is no folder {tmp_path / 'no'}"),
        (("state", "path"), f"{file} is no folder"),
        (("pools", 0, "warm_up", 0), "a request body"),
        ((*BACKEND, "model"), f"the model {model} is not a GGUF file (it begins with b'ELF,')"),
        (("engine",), "no engine found"),
        ((*BACKEND, "slot_save_path"), f"{file} is no folder"),
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_what_cannot_be_written_is_said(model: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    wrong = config(model, top={"journal": {"path": str(closed / "j")}}, slot_save_path=str(closed / "kv"))
    assert [lack.message for lack in preflight(wrong)] == [
        f"{closed / 'j'} cannot be written: {closed}: Permission denied",
        f"{closed / 'kv'} cannot be made: {closed} cannot be written (Permission denied)",
    ]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, where nobody can make anything")
def test_folders_that_nobody_can_make_are_said(model: Path) -> None:
    top = {"journal": {"path": "/proc/j"}, "state": {"path": "/proc/y"}}
    wrong = config(model, top=top, slot_save_path="/proc/z/deep")
    said = [(lack.place, lack.message.partition(" (")[0]) for lack in preflight(wrong)]
    assert said == [
        (("journal", "path"), "/proc/j cannot be written: /proc: No such file or directory"),
        (("state", "path"), "/proc/y cannot be made: /proc cannot be written"),
        ((*BACKEND, "slot_save_path"), "/proc/z/deep cannot be made: /proc cannot be written"),
    ]
