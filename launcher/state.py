"""Where a configuration keeps what outlasts a run: one folder for each, found again by its file.

In it lie the records of running engines (:mod:`.orphans`), their logs (:mod:`.logfiles`) and the socket of
:mod:`.control`.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmslot.router.config import Config


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
    path = file.absolute()
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem)[:32] or "config"
    digest = hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()
    return base_folder(env) / f"{name}-{digest}"


def known_folders(env: Mapping[str, str] = os.environ) -> list[Path]:
    """The state folders under the base folder, whether or not anything runs there."""
    base = base_folder(env)
    return sorted(path for path in base.glob("*") if path.is_dir()) if base.is_dir() else []
