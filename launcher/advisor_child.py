"""What works out advice beside a running router: a process of its own, since it computes for a minute.

``python -m warmslot.launcher.advisor_child PARENT`` reads a question from its standard input and prints what
``warmslot advise`` finds of each backend, both as JSON; see :func:`answer`. It takes only what nobody else
wants of the CPUs, has a bound on its memory, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
from warmslot.router.advice import Advised
from warmslot.router.config import Backend
from warmslot.router.journal import JournalError

from .advise import ENGINES_OWN, AdviceError, advise
from .advise_show import headline, reason
from .host_memory import cache_of
from .process import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MEMORY: Final = 1 << 30
"""Bytes that it may take."""


def question(journal: str, latest: int, backends: Sequence[Backend]) -> bytes:
    """What the child is asked: how many slots each backend should have, by the journal's latest requests."""
    fields = {"name", "model", "url", "cache_ram", "args"}
    told = [
        {name: value for name, value in one.model_dump(include=fields).items() if value is not None}
        if one.url is None
        else {"name": one.name, "url": one.url}
        for one in backends
    ]
    return orjson.dumps({"journal": journal, "latest": latest, "backends": told})


def answer(asked: Mapping[str, Any]) -> dict[str, Advised]:
    """What is found of each backend of a :func:`question`. Raises JournalError."""
    path, latest = Path(asked["journal"]), int(asked["latest"])
    backends = [Backend.model_validate_json(orjson.dumps(one)) for one in asked["backends"]]
    return {one.name: _advised(path, latest, one) for one in backends}


def read_answer(text: bytes) -> dict[str, Advised]:
    """What the child printed. Raises ValueError or TypeError where that is something else."""
    return {str(name): Advised(**fields) for name, fields in orjson.loads(text).items()}


def _advised(path: Path, latest: int, backend: Backend) -> Advised:
    try:
        found, _ = advise(
            path,
            kv_tokens=None,
            host=cache_of(backend) or ENGINES_OWN,
            backend=backend.name,
            latest=latest,
            progress=_silent,
        )
    except AdviceError as error:
        return Advised(0, str(error), time.time())
    slots = found.best.setup.slots
    return Advised(slots, reason(found), time.time(), headline(found), found.confidence)


def _silent(what: str, done: int, total: int) -> None:
    """Nobody looks on."""


def _stand_back() -> None:
    """Take what is left of the CPUs, and no more memory than :data:`MEMORY`."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - not to be had on Windows

    os.nice(19)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # forbidden in some containers
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def main() -> int:
    """Entry point of ``python -m warmslot.launcher.advisor_child``."""
    if leave := die_with_parent(int(sys.argv[1])):
        leave()
    _stand_back()
    try:
        found = answer(orjson.loads(sys.stdin.buffer.read()))
    except JournalError as error:
        print(error, file=sys.stderr)  # noqa: T201 - read by the parent
        return 1
    sys.stdout.buffer.write(orjson.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
