"""A real Prometheus for tests: over blocks that were filled before, or scraping what tests start."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.browser import browser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["browser"]

_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')
_READY = "Server is ready to receive web requests"
PATIENCE = 60.0
"""Seconds that anything waited for here may take at most."""


class Prometheus:
    """One Prometheus process on a port of its own, with its data in ``folder``."""

    def __init__(self, folder: Path, config: str = "scrape_configs: []\n") -> None:
        file = folder / "prometheus.yml"
        file.write_text(config, encoding="utf-8")
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--storage.tsdb.retention.time=100y",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()
        with self._changed:
            up = self._changed.wait_for(lambda: self._started() or self.process.poll() is not None, PATIENCE)
        assert up, self.lines[-10:]
        assert self._started(), self.lines[-10:]
        address = next(found[1] for line in self.lines if (found := _LISTENING.search(line)))
        self.http = httpx.Client(base_url=f"http://{address}/api/v1", timeout=30, trust_env=False)

    def _started(self) -> bool:
        return any(_READY in line for line in self.lines) and any(map(_LISTENING.search, self.lines))

    def _follow(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()

    def ask(self, path: str, **parameters: Any) -> Any:
        """The ``data`` of an answer of the HTTP API."""
        answer = self.http.get(path, params=parameters)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expr: str, at: float | None = None) -> dict[tuple[tuple[str, str], ...], float]:
        """An instant query: value by sorted labels, the name left out."""
        more = {} if at is None else {"time": at}
        found = self.ask("/query", query=expr, **more)["result"]
        return {labels(one["metric"]): float(one["value"][1]) for one in found}

    def range(
        self, expr: str, start: float, end: float, step: float
    ) -> dict[tuple[tuple[str, str], ...], list[float]]:
        """A range query: values by sorted labels, the name left out."""
        found = self.ask("/query_range", query=expr, start=start, end=end, step=step)["result"]
        return {labels(one["metric"]): [float(value) for _, value in one["values"]] for one in found}

    def until(self, predicate: Callable[[Prometheus], Any]) -> Any:
        """Ask again until the answer is true; there is no event to wait for in its API."""
        deadline = time.monotonic() + PATIENCE
        pause = threading.Event()
        while not (answer := predicate(self)):
            assert time.monotonic() < deadline, self.lines[-10:]
            pause.wait(0.1)
        return answer

    def stop(self) -> None:
        """End the process."""
        self.http.close()
        self.process.terminate()
        self.process.wait(30)
        self._reader.join(10)


def labels(metric: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Labels as a key."""
    return tuple(sorted((name, value) for name, value in metric.items() if name != "__name__"))


@pytest.fixture(scope="session")
def has_prometheus() -> None:
    """Skips where Prometheus is not installed."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("Prometheus is not installed (Debian: apt-get install prometheus)")


@pytest.fixture
def prometheus(has_prometheus: None, tmp_path: Path) -> Iterator[Callable[[str], Prometheus]]:  # noqa: ARG001
    """Starts a Prometheus with a configuration; it is stopped at the end."""
    running: list[Prometheus] = []

    def start(config: str) -> Prometheus:
        running.append(Prometheus(tmp_path, config))
        return running[-1]

    yield start
    for one in running:
        one.stop()
