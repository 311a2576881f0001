"""The unit for systemd under a real one: installed by the instructions, served, reloaded, killed, stopped."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from tests.support.booted import Booted, booted, lacking
from tests.support.site import ROOT, config_of, engine_script
from tests.support.up import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENGINE = "/opt/warmslot/engine"
MODEL = "/srv/models/model.gguf"
FILE = "/etc/warmslot/warmslot.yaml"
STATUS = "STATE_DIRECTORY=/var/lib/warmslot /opt/warmslot/bin/warmslot status --json"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def instructions() -> list[str]:
    """The lines that install the service, less the one that fetches packages."""
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    block = re.search(r"## As a service\n.*?```\n(.*?)```", text, re.DOTALL)
    assert block
    first, *lines = block[1].splitlines()
    assert "pip install" in first
    return lines


class Service:
    """The installed service."""

    def __init__(self, machine: Booted) -> None:
        self.machine = machine

    def write(self, file: str, text: str, mode: int = 0o644) -> None:
        """A file on the machine."""
        self.machine.shell(
            f"install -d {Path(file).parent}; printf %s {shlex.quote(text)} > {file}; chmod {mode:o} {file}"
        )

    def status(self) -> dict[str, Any] | None:
        """What it says of itself, as the instructions ask it; ``None`` while it does not run."""
        done = self.machine.run("/bin/sh", "-c", STATUS, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def until(self, is_meant: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask it until it says what is meant."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            shown = self.status()
            if shown is not None and is_meant(shown):
                return shown
        raise AssertionError(self.machine.run("systemctl", "status", "warmslot", check=False).stdout)

    def ready(self) -> dict[str, Any]:
        """Wait until its backend serves."""
        return self.until(lambda shown: [one["state"] for one in shown["backends"]] == ["ready"])

    def show(self, name: str) -> str:
        """A property of the unit."""
        return self.machine.show("warmslot.service", name)

    def processes(self) -> list[str]:
        """The commands that run as its user."""
        return self.machine.run("ps", "-ww", "-u", "warmslot", "-o", "args=", check=False).stdout.splitlines()


def config(**more: Any) -> str:
    backend = {"name": "one", "engine": ENGINE, "model": MODEL, "slots": 1, "context": 1024}
    return yaml.safe_dump(config_of(backend, listen={"port": 0}, **more))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    if reason := lacking():
        pytest.skip(f"no systemd can be started here: {reason}")
    packages = [Path(one) for one in sys.path if "site-packages" in one and Path(one).is_dir()]
    libraries = {f"/opt/packages/{number}": path for number, path in enumerate(packages)}
    with booted(tmp_path, {"/opt/clone": ROOT, "/opt/python": Path(sys.base_prefix), **libraries}) as machine:
        service = Service(machine)
        python = f"/opt/python/bin/{Path(sys.executable).resolve().name}"
        service.write(ENGINE, engine_script(python, "/opt/clone"), 0o755)
        service.write(
            "/opt/warmslot/bin/warmslot",
            f"#!/bin/sh\nexport PYTHONPATH={':'.join(['/opt/packages', *libraries])}\n"
            "export LD_LIBRARY_PATH=/opt/python/lib\n"
            f'exec {python} -c "from warmslot.launcher.cli import main; main()" "$@"\n',
            0o755,
        )
        service.write(MODEL, "GGUF and nothing else")
        service.write("/run/clone/my.yaml", config())
        machine.shell(
            "install -d /opt/packages/warmslot; "
            "ln -s /opt/clone/router /opt/clone/launcher /opt/packages/warmslot; "
            "ln -s /opt/clone/configs /run/clone/configs"
        )
        for line in instructions():
            machine.shell(f"cd /run/clone; {line}")
        yield service


def test_it_serves_as_its_user_reloads_comes_back_and_stops_when_all_is_served(service: Service) -> None:
    shown = service.ready()
    with httpx.Client(base_url=shown["address"], timeout=PATIENCE, trust_env=False) as http:
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    running = service.processes()
    assert any(f" up {FILE} --quiet" in command for command in running)
    assert any("tests.fakes" in command for command in running)
    assert service.show("User") == "warmslot"
    assert service.machine.shell("stat -c '%U %a' /var/lib/warmslot").split() == ["warmslot", "700"]

    # Another name for the pool, by a reload.
    service.write("/run/clone/my.yaml", config(pool={"aliases": ["another"]}))
    service.machine.shell(f"install -m 640 -g warmslot /run/clone/my.yaml {FILE}")
    service.machine.run("systemctl", "reload", "warmslot")
    with httpx.Client(base_url=shown["address"], timeout=PATIENCE, trust_env=False) as http:
        while "another" not in http.get("/v1/models").text:
            pass
        assert http.post("/v1/chat/completions", json={**CHAT, "model": "another"}).status_code == 200
    assert service.show("NRestarts") == "0"

    # Killed, it is started again, and nothing is left of the engine from before.
    service.machine.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "warmslot")
    service.until(lambda now: now["pid"] != shown["pid"])
    again = service.ready()
    assert service.show("NRestarts") == "1"
    assert sum("tests.fakes" in command for command in service.processes()) == 1

    # Stopped, it lets a running answer end first.
    engine = again["backends"][0]["url"]
    with httpx.Client(timeout=PATIENCE, trust_env=False) as http:
        assert http.post(f"{engine}/fake", json={"op": "hold", "gate": "token"}).status_code == 200
        body = {**CHAT, "stream": True}
        url = f"{again['address']}/v1/chat/completions"
        with http.stream("POST", url, json=body) as answer:
            service.machine.run("systemctl", "stop", "--no-block", "warmslot")
            service.until(lambda now: now["stopping"])
            assert http.post(f"{engine}/fake", json={"op": "release", "gate": "token"}).status_code == 200
            assert "data: [DONE]" in answer.read().decode()
    service.machine.run("systemctl", "stop", "warmslot")
    assert (service.show("ActiveState"), service.show("Result")) == ("inactive", "success")
    assert service.show("ExecMainStatus") == "0"
    assert service.processes() == []
