"""A systemd of the test's own: process 1 of its namespaces, with ``/etc``, ``/run`` and ``/opt`` of its own.

It needs Linux, root, and cgroups of version 2; :func:`lacking` says what is not there. Nothing of the machine
changes: mounts, processes and cgroups are private, and end with it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SYSTEMD = Path("/lib/systemd/systemd")
_TOOLS = ("unshare", "nsenter", "systemctl", "useradd", "install", "mount")
_TARGETS = ("sysinit", "basic", "shutdown", "umount", "final", "multi-user", "network-online")
_ENVIRONMENT = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "container=test",
    "SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/units",
    "SYSTEMD_GENERATOR_PATH=/run/none",
    "SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/run/none",
)
_OPTIONS = ("--system", "--unit=multi-user.target", "--log-target=console", "--show-status=no")
_PATIENCE = 100
_BOOTED = """\
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'echo up > /run/booted'
"""


def lacking() -> str:
    """Why none can be started here; empty where one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "systemd can be started by root on Linux only"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"there is no {', '.join(missing)}"
    if not SYSTEMD.exists():
        return f"there is no {SYSTEMD}"
    if _cgroups() is None:
        return "no cgroup of version 2 is mounted"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--cgroup", "mount", "-t", "tmpfs", "none", "/run"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"no namespaces of one's own: {tried.stderr.strip()}"


def _cgroups() -> Path | None:
    """Where the cgroups of version 2 are mounted."""
    with Path("/proc/self/mounts").open(encoding="utf-8") as mounts:
        for line in mounts:
            _, path, kind, *_ = line.split()
            if kind == "cgroup2":
                return Path(path)
    return None


class Booted:
    """A running one."""

    def __init__(self, init: int) -> None:
        self._enter = ["nsenter", "--target", str(init), "--mount", "--pid", "--uts", "--ipc", "--cgroup"]

    def run(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in there, as root."""
        done = subprocess.run(
            [*self._enter, *words], capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def shell(self, line: str) -> str:
        """Run a line of a shell in there, as root; its output."""
        return self.run("/bin/sh", "-euc", line).stdout

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).stdout.strip()


@contextmanager
def booted(folder: Path, seen: Mapping[str, Path]) -> Iterator[Booted]:
    """Boots one, and ends it with all that runs in it.

    ``seen`` are folders of ours by where they are in there: whoever may read them reaches them.
    """
    cgroups = _cgroups()
    assert cgroups is not None
    group = cgroups / f"warmslot-test-{os.getpid()}"
    group.mkdir()
    script, log = folder / "boot.sh", folder / "boot.log"
    script.write_text(_script(group, seen))
    process: subprocess.Popen[bytes] | None = None
    try:
        fifo = folder / "booted"
        os.mkfifo(fifo)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    "unshare",
                    "--mount",
                    "--pid",
                    "--ipc",
                    "--uts",
                    "--fork",
                    "--kill-child",
                    "/bin/sh",
                    "-eu",
                    script,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"PATH": os.environ["PATH"], "BOOTED": str(fifo)},
            )
        reached = subprocess.run(["cat", fifo], stdout=subprocess.PIPE, timeout=_PATIENCE, check=False)
        assert reached.stdout == b"up\n", log.read_text(errors="replace")
        (init,) = psutil.Process(process.pid).children()
        yield Booted(init.pid)
    finally:
        if process is not None:
            process.send_signal(
                signal.SIGKILL
            )  # its child, process 1 in there, goes with it, and takes all along
            process.wait()
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a cgroup and what is under it, all of which is empty or about to be."""
    for path, _, _ in os.walk(group, topdown=False):
        events = Path(path) / "cgroup.events"
        while "populated 1" in events.read_text():
            pass
        Path(path).rmdir()


def _script(group: Path, seen: Mapping[str, Path]) -> str:
    """What makes the namespaces fit for it, and becomes process 1."""
    lines = [
        f"echo $$ > {group}/cgroup.procs",
        'if [ -z "${INSIDE:-}" ]; then INSIDE=1 exec unshare --cgroup /bin/sh -eu "$0"; fi',
        "mount -t proc proc /proc",
        "mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys",
        "mount -t tmpfs -o mode=755 tmpfs /run",
        'mkfifo /run/booted && mount --bind "$BOOTED" /run/booted',
        "mkdir /run/etc /run/units /run/none /run/keep",
        "cp -a /etc/. /run/etc && mount --bind /run/etc /etc",
        "rm -rf /etc/systemd/system && mkdir /etc/systemd/system",
        *(
            f"mkdir /run/keep/{number} && mount --bind {shlex.quote(str(path))} /run/keep/{number}"
            for number, path in enumerate(seen.values())
        ),
        *(f"mount -t tmpfs -o mode=755 tmpfs {path}" for path in ("/opt", "/srv", "/var/lib")),
        *(
            f"mkdir -p {there} && mount --bind /run/keep/{number} {there}"
            for number, there in enumerate(seen)
        ),
        "mount -t tmpfs -o mode=1777 tmpfs /tmp",
        "mount -t cgroup2 cgroup2 /sys/fs/cgroup",
        *(f"printf '[Unit]\\nDefaultDependencies=no\\n' > /run/units/{name}.target" for name in _TARGETS),
        f"printf %s {shlex.quote(_BOOTED)} > /run/units/booted.service",
        "mkdir /run/units/multi-user.target.wants",
        "ln -s ../booted.service /run/units/multi-user.target.wants/",
        f"exec env -i {' '.join(_ENVIRONMENT)} {SYSTEMD} {' '.join(_OPTIONS)}",
    ]
    return "\n".join(lines) + "\n"
