"""Which processes belong to a dev cluster: those in one of its network namespaces, whoever started them.

That holds after any crash, needs no list of process ids that could be stale, and no child leaves it by itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpcdist.devcluster.argv import Daemon
from hpcdist.devcluster.settings import Layout, Settings
from hpcdist.errors import DevClusterError

#: Names under which a Slurm of the machine itself would run.
SLURM_DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "slurmrestd", "sackd")
KILL_WITHIN_S = 20.0
Namespace = tuple[int, int]
"""Device and inode of a namespace."""


def mounted_namespaces(layout: Layout) -> dict[str, Namespace]:
    """The cluster's namespaces by name of node; empty where none is mounted."""
    folder = layout.namespaces
    found = {path.name: _identity(path) for path in folder.iterdir()} if folder.is_dir() else {}
    kind = os.stat("/proc/self/ns/net").st_dev
    return {name: where for name, where in found.items() if where is not None and where[0] == kind}


def _identity(path: Path) -> Namespace | None:
    try:
        found = os.stat(path)
    except OSError:  # the process has just ended, or is another user's
        return None
    return found.st_dev, found.st_ino


def members(namespaces: Iterable[Namespace]) -> list[int]:
    """Ids of the processes in any of some namespaces; zombies are in none."""
    wanted = set(namespaces)
    return [pid for pid in _all() if _identity(Path(f"/proc/{pid}/ns/net")) in wanted]


def _all() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())


def kill_members(namespaces: Iterable[Namespace]) -> int:
    """Kill all processes in some namespaces; returns how many there were.

    Raises DevClusterError when some are still there after `KILL_WITHIN_S`.
    """
    wanted = set(namespaces)
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_WITHIN_S
    # Again until none is left: what is killed may have been forking.
    while found := members(wanted):
        if time.monotonic() > deadline:
            raise DevClusterError(f"processes {', '.join(map(str, found))} do not end on SIGKILL: look at `ps -p`")
        for pid in found:
            _kill(pid)
        killed.update(found)
        time.sleep(0.02)
    return len(killed)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def foreign_slurm(layout: Layout) -> list[tuple[int, str]]:
    """Slurm daemons on this machine that are not of the cluster in `layout`: process id and name."""
    own = set(members(mounted_namespaces(layout).values()))
    named = ((pid, _name(pid)) for pid in _all() if pid not in own)
    return [(pid, name) for pid, name in named if name in SLURM_DAEMONS]


def _name(pid: int) -> str:
    """Name of a living process, else the empty string."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    name, _, rest = stat.partition("(")[2].rpartition(")")
    return "" if rest.split()[0] in "ZX" else name


def is_running(layout: Layout, daemon: Daemon) -> bool:
    """Whether a daemon of the cluster lives. An old pid file deceives nobody: the process must be in the namespace."""
    pid = _read_pid(layout.pid_file(daemon.name))
    where = mounted_namespaces(layout).get(daemon.node)
    if pid is None or where is None:
        return False
    if os.geteuid() != 0:  # namespaces of root's processes cannot be read
        return _name(pid) != ""
    return _identity(Path(f"/proc/{pid}/ns/net")) == where


def has_ended(layout: Layout, daemon: Daemon) -> bool:
    """Whether a daemon was started and is gone; False while it is only on its way."""
    return _read_pid(layout.pid_file(daemon.name)) is not None and not is_running(layout, daemon)


def pid_of(layout: Layout, daemon: Daemon) -> int | None:
    """Process id of a daemon of the cluster, None where it does not run."""
    return _read_pid(layout.pid_file(daemon.name)) if is_running(layout, daemon) else None


def _read_pid(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def dead_daemons(layout: Layout, daemons: Iterable[Daemon]) -> list[str]:
    return [daemon.name for daemon in daemons if not is_running(layout, daemon)]


def node_members(layout: Layout, settings: Settings) -> dict[str, list[int]]:
    """Process ids by node: slurmd, its steps and all that runs in them."""
    namespaces = mounted_namespaces(layout)
    return {name: members([namespaces[name]]) for name in settings.nodes if name in namespaces}
