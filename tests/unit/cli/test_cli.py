"""The command line: what it prints, its exit codes, and that it starts fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner
from warmslot.launcher.cli import app
from warmslot.router.config_file import load
from warmslot.router.config_schema import schema_text

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = Path(__file__).parents[3]
EXAMPLE = TOP / "configs/example.yaml"


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_config_check_of_a_good_file() -> None:
    assert run("config", "check", "--elsewhere", EXAMPLE) == (
        0,
        f"{EXAMPLE}: good: 1 pool(s), 1 backend(s) launched here, 1 remote, 1 key(s)\n",
        "",
    )


def test_config_check_names_what_is_not_here_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "warmslot.yaml"
    file.write_text(
        "engine: /nowhere/llama-server\n"
        "journal: {path: none/journal.jsonl}\n"
        "pools:\n  - name: p\n    backends:\n      - {name: b, model: none.gguf}\n"
    )
    code, out, err = run("config", "check", file)
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        f"{file}:2: journal.path: there is no folder {tmp_path}/none",
        f"{file}:6: pools[0].backends[0].model: there is no model file {tmp_path}/none.gguf",
        f"{file}:1: engine: setting engine: there is no file /nowhere/llama-server",
    ]


@pytest.mark.parametrize("command", [("config", "check"), ("config", "show"), ("up",)])
def test_a_wrong_file_is_one_line_for_each_setting_and_exit_code_2(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(
        "pools:\n  - name: p\n    backends:\n      - {name: b, model: demo, slots: four, thread: 2}\n"
    )
    assert run(*command, file) == (
        2,
        "",
        (
            f'{file}:4: pools[0].backends[0].slots: found "four", allowed: an integer from 1 to 256\n'
            f"{file}:4: pools[0].backends[0].thread: unknown setting, did you mean threads?\n"
        ),
    )


def test_config_show_fills_in_defaults_and_is_a_configuration_itself(tmp_path: Path) -> None:
    file = tmp_path / "short.yaml"
    file.write_text(
        "pools:\n  - name: p\n    backends:\n"
        "      - {name: a, model: demo}\n      - {name: b, url: 'http://127.0.0.1:1'}\n"
    )
    code, shown, _ = run("config", "show", file)
    assert code == 0
    assert yaml.safe_load(shown)["pools"][0]["backends"][0]["slots"] == 4
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert load(again) == load(file)


def test_config_show_hides_secrets(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-in-file")
    file = tmp_path / "keys.yaml"
    file.write_text(
        "keys:\n  - {name: a, value: secret-inline}\n  - {name: b, file: key}\n"
        "pools:\n  - name: p\n    backends:\n"
        "      - {name: a, model: demo, env: {HF_TOKEN: secret-env, OMP_NUM_THREADS: '2'}}\n"
    )
    code, shown, _ = run("config", "show", file)
    assert code == 0
    assert "secret" not in shown
    assert "OMP_NUM_THREADS: '2'" in shown


def test_config_schema_is_what_editors_get() -> None:
    assert run("config", "schema") == (0, schema_text(), "")


def test_every_command_is_listed_and_has_help() -> None:
    code, listing, _ = run("--help")
    assert code == 0
    for name in ("up", "config", "bench", "simulate"):
        assert name in listing
        assert run(name, "--help")[0] == 0


def parameters(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    for parameter in command.params:
        yield f"{path} {parameter.name}", parameter
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from parameters(f"{path} {name}", command.get_command(None, name))


def test_every_option_and_argument_has_a_text() -> None:
    found = dict(parameters("warmslot", get_command(app)))
    assert "warmslot bench demo slots" in found
    assert [path for path, parameter in found.items() if not parameter.help] == []


def test_the_page_shows_both_sides_of_every_switch() -> None:
    page = (TOP / "docs/cli.md").read_text(encoding="utf-8")
    switches = [one for _, one in parameters("warmslot", get_command(app)) if one.secondary_opts]
    assert switches
    for one in switches:
        on, off = one.opts[0], one.secondary_opts[0]
        assert f"| `{on}` / `{off}` | {one.help} Default: `{on if one.default else off}`. |" in page


def test_an_unknown_command_is_wrong_usage() -> None:
    code, _, error = run("start")
    assert code == 2
    assert "No such command 'start'" in error


def test_looking_at_a_configuration_imports_neither_server_nor_client() -> None:
    program = (
        "import sys; from warmslot.launcher.cli import app; "
        f"app(['config', 'check', {str(EXAMPLE)!r}], standalone_mode=False); "
        "print(sorted({'uvicorn', 'httpx', 'starlette', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_python_dash_m_is_the_same_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "warmslot.launcher", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("warmslot ")
