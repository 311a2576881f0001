"""The schema, the examples and the reference page agree with the model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from warmslot.router.config_file import load
from warmslot.router.config_schema import schema, settings

TOP = Path(__file__).parents[3]
CONFIGS = sorted((TOP / "configs").glob("*.yaml"))


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, TOP / "scripts/generate_docs.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_shipped_configs_load_and_satisfy_the_schema(file: Path) -> None:
    load(file)
    jsonschema.Draft202012Validator(schema()).validate(yaml.safe_load(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_shipped_configs_name_their_schema_for_editors(file: Path) -> None:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    match = re.fullmatch(r"# yaml-language-server: \$schema=(.+)", first)
    assert match
    assert json.loads((file.parent / match[1]).read_text(encoding="utf-8")) == schema()


def test_the_example_shows_every_setting() -> None:
    text = (TOP / "configs/example.yaml").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\s*(?:# +)?(?:- )?([a-z_]+):(?: |$)", text, re.MULTILINE))
    missing = {setting.path for setting in settings() if setting.path.rsplit(".", 1)[-1] not in shown}
    assert missing == set()


def test_every_setting_has_a_text() -> None:
    assert [setting.path for setting in settings() if not setting.text] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"pools": []},
        {"pools": [{"name": "p", "backends": [{"name": "b"}]}]},
        {"pools": [{"name": "p", "backends": [{"name": "b", "model": "demo", "url": "http://h:1"}]}]},
        {"pools": [{"name": "p", "backends": [{"name": "b", "model": "demo", "slots": 0}]}]},
        {"pools": [{"name": "p", "backends": [{"name": "b", "model": "demo"}]}], "extra": 1},
        {"pools": [{"name": "p", "backends": [{"name": "b", "model": "demo"}]}], "keys": [{"name": "k"}]},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(wrong: dict[str, Any]) -> None:
    assert not jsonschema.Draft202012Validator(schema()).is_valid(wrong)
