"""The service files that are shipped: systemd reads the unit without a complaint, the compose file is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

CONFIGS = Path(__file__).parents[3] / "configs"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    # What is started must exist for the check: any program that does stands in for ours.
    text = (CONFIGS / "systemd/warmslot.service").read_text(encoding="utf-8")
    unit = tmp_path / "warmslot.service"
    unit.write_text(text.replace("/opt/warmslot/bin/warmslot", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "warmslot.service" in line]
    assert (done.returncode, complaints) == (0, [])


def test_the_unit_gives_a_stop_the_time_that_it_needs() -> None:
    unit = (CONFIGS / "systemd/warmslot.service").read_text(encoding="utf-8")
    seconds = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert seconds
    assert int(seconds[1]) >= 30 + 120 + 10  # drain_timeout, slots saved, engines stopped
    assert "\nExecReload=/bin/kill -HUP $MAINPID\n" in unit


def test_the_service_is_a_user_that_the_instructions_make_and_let_read_the_configuration() -> None:
    unit = (CONFIGS / "systemd/warmslot.service").read_text(encoding="utf-8")
    told = (CONFIGS.parent / "docs/operations.md").read_text(encoding="utf-8")
    user = re.search(r"^User=(\w+)$", unit, re.MULTILINE)
    served = re.search(r"^ExecStart=(\S+)/bin/warmslot up (\S+)", unit, re.MULTILINE)
    assert user
    assert served
    folder, file = served.groups()
    assert re.search(rf"^useradd --system --user-group .* {user[1]}$", told, re.MULTILINE)
    assert f"install -D -m 640 -g {user[1]} my.yaml {file}\n" in told
    assert f"python3 -m venv {folder} && {folder}/bin/pip install .\n" in told


def test_the_compose_file_is_one() -> None:
    file = CONFIGS / "docker/compose.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    (service,) = content["services"].values()
    assert service["command"][0] == "up"
    assert service["stop_signal"] == "SIGTERM"
    assert (file.parent / service["build"]["context"] / service["build"]["dockerfile"]).resolve().is_file()
    named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(".")}
    assert named == set(content["volumes"])
    if shutil.which("docker") is None:
        return
    version = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if version.returncode == 0:
        subprocess.run(["docker", "compose", "-f", file, "config", "--quiet"], check=True)
