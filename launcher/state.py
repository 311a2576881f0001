"""Where a configuration keeps what outlasts a run: one folder for each, found again by its file.

In it lie the records of running engines (:mod:`.orphans`), their logs (:mod:`.logfiles`), the socket of
:mod:`.control`, and the name of the configuration file. Where ``state.path`` names a folder elsewhere, the
default one leads there, so that a run is found without reading its file again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmslot.router.config import Config


_FILE = "configuration"
_ELSEWHERE = "elsewhere"


def base_folder(env: Mapping[str, str] = os.environ) -> Path:
    """The folder that holds the folders of all configurations which name none."""
    if given := env.get("STATE_DIRECTORY"):  # systemd; several are separated by colons
        return Path(given.split(":")[0])
    if given := env.get("XDG_STATE_HOME"):
        return Path(given) / "warmslot"
    return Path(env.get("HOME") or "~").expanduser() / ".local" / "state" / "warmslot"


def folder_of(config: Config, file: Path, env: Mapping[str, str] = os.environ) -> Path:
    """The state folder of the configuration that was read from ``file``."""
    if config.state.path is not None:
        return Path(config.state.path)
    return default_folder(file, env)


def default_folder(file: Path, env: Mapping[str, str] = os.environ) -> Path:
    """The state folder of a configuration file that names none."""
    path = file.absolute()
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem)[:32] or "config"
    digest = hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()
    return base_folder(env) / f"{name}-{digest}"


def known_folders(env: Mapping[str, str] = os.environ) -> list[Path]:
    """The state folders under the base folder and where these lead, whether or not anything runs there."""
    base = base_folder(env)
    folders = sorted(path for path in base.glob("*") if path.is_dir()) if base.is_dir() else []
    return list(dict.fromkeys(one for folder in folders for one in _leads_to(folder)))


def remember(folder: Path, file: Path, env: Mapping[str, str] = os.environ) -> None:
    """Note that ``folder`` is that of the run of ``file``. What cannot be noted is found less easily."""
    with contextlib.suppress(OSError):
        (folder / _FILE).write_bytes(os.fsencode(file.absolute()))
        default = default_folder(file, env)
        if default != folder:
            default.mkdir(mode=0o700, parents=True, exist_ok=True)
            (default / _ELSEWHERE).write_bytes(os.fsencode(folder))
        else:
            (default / _ELSEWHERE).unlink(missing_ok=True)


def configuration_of(folder: Path) -> Path | None:
    """The configuration file of the last run with this state folder; ``None`` where none is noted."""
    return _read(folder / _FILE)


def remembered(file: Path, env: Mapping[str, str] = os.environ) -> list[Path]:
    """The state folders of the last run of ``file``, as noted; the file itself is not looked at."""
    return [
        folder
        for folder in _leads_to(default_folder(file, env))
        if configuration_of(folder) == file.absolute()
    ]


def _leads_to(folder: Path) -> list[Path]:
    elsewhere = _read(folder / _ELSEWHERE)
    return [folder] if elsewhere is None else [elsewhere]


def _read(file: Path) -> Path | None:
    try:
        return Path(os.fsdecode(file.read_bytes()))
    except OSError:
        return None
