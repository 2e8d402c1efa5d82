"""The processes of a dev cluster: those in one of its network namespaces.

Membership survives crashes, needs no list of process ids, and child processes cannot leave it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from hpcdist.devcluster.argv import Daemon
from hpcdist.devcluster.settings import Layout, Settings
from hpcdist.errors import DevClusterError

#: Process names of Slurm's daemons.
SLURM_DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "slurmrestd", "sackd")
KILL_WITHIN_S = 20.0
Namespace = tuple[int, int]
"""Device and inode of a namespace."""


def mounted_namespaces(layout: Layout) -> dict[str, Namespace]:
    """Return the cluster's mounted namespaces by node."""
    folder = layout.namespaces
    found = {path.name: _identity(path) for path in folder.iterdir()} if folder.is_dir() else {}
    kind = os.stat("/proc/self/ns/net").st_dev
    return {name: identity for name, identity in found.items() if identity is not None and identity[0] == kind}


def _identity(path: Path) -> Namespace | None:
    try:
        found = os.stat(path)
    except OSError:  # the process has ended, or belongs to another user
        return None
    return found.st_dev, found.st_ino


def members(namespaces: Iterable[Namespace]) -> list[int]:
    """Return the ids of processes in the namespaces; zombies are in none."""
    own = set(namespaces)
    return [pid for pid in psutil.pids() if _identity(Path(f"/proc/{pid}/ns/net")) in own]


def kill_members(namespaces: Iterable[Namespace]) -> int:
    """Kill all processes in the namespaces and return their number.

    Raises:
        DevClusterError: some are still alive after `KILL_WITHIN_S`.
    """
    remaining = set(namespaces)
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_WITHIN_S
    # Repeat until none is left, because a process may fork before it is killed.
    while found := members(remaining):
        if time.monotonic() > deadline:
            raise DevClusterError(f"processes {', '.join(map(str, found))} do not end after SIGKILL: see `ps -p`")
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        time.sleep(0.02)
    return len(killed)


def foreign_slurm(layout: Layout) -> list[tuple[int, str]]:
    """Return process id and name of Slurm daemons outside the cluster in `layout`."""
    own = set(members(mounted_namespaces(layout).values()))
    named = ((pid, _name(pid)) for pid in psutil.pids() if pid not in own)
    return [(pid, name) for pid, name in named if name in SLURM_DAEMONS]


def _name(pid: int) -> str:
    """Return the name of a running process, else an empty string."""
    try:
        process = psutil.Process(pid)
        return "" if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else process.name()
    except psutil.Error:
        return ""


def is_running(layout: Layout, daemon: Daemon) -> bool:
    """Return whether a daemon runs: its process must be in the namespace, so a stale pid file is harmless."""
    pid = _read_pid(layout.pid_file(daemon.name))
    namespace = mounted_namespaces(layout).get(daemon.node)
    if pid is None or namespace is None:
        return False
    if os.geteuid() != 0:  # namespaces of root's processes cannot be read
        return _name(pid) != ""
    return _identity(Path(f"/proc/{pid}/ns/net")) == namespace


def has_ended(layout: Layout, daemon: Daemon) -> bool:
    """Return whether a daemon was started and has ended; False while it is starting."""
    return _read_pid(layout.pid_file(daemon.name)) is not None and not is_running(layout, daemon)


def pid_of(layout: Layout, daemon: Daemon) -> int | None:
    """Return the process id of a daemon, None if it is not running."""
    return _read_pid(layout.pid_file(daemon.name)) if is_running(layout, daemon) else None


def _read_pid(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def node_members(layout: Layout, settings: Settings) -> dict[str, list[int]]:
    """Return process ids by node: slurmd, its steps and their processes."""
    namespaces = mounted_namespaces(layout)
    return {name: members([namespaces[name]]) for name in settings.nodes if name in namespaces}
