"""The dev clusters of this machine, and their processes: those in one of a cluster's network namespaces.

Membership survives crashes, needs no list of process ids, and child processes cannot leave it.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from hpcdist.devcluster.settings import CLUSTER, NAME, Daemon, Layout
from hpcdist.errors import DevClusterError

#: Device and inode of a namespace.
Namespace = tuple[int, int]


def others(layout: Layout) -> list[Layout]:
    """Return the other dev clusters of this machine, whether they run or not."""
    prefix = f"{layout.first.name}-"
    folders = layout.first.parent.glob(f"{prefix}*")
    names = {CLUSTER, *(folder.name.removeprefix(prefix) for folder in folders)}
    names.discard(layout.name)
    clusters = [Layout(name, layout.first) for name in sorted(names) if NAME.fullmatch(name)]
    return [cluster for cluster in clusters if cluster.settings_file.exists()]


def mounted_namespaces(layout: Layout) -> dict[str, Namespace]:
    """Return the network namespaces of a cluster by host name; files without a mounted namespace are left out."""
    if not layout.namespaces.is_dir():
        return {}
    device_of_namespaces = os.stat("/proc/self/ns/net").st_dev
    mounted = {}
    for path in layout.namespaces.iterdir():
        identity = _identity(path)
        if identity is not None and identity[0] == device_of_namespaces:
            mounted[path.name] = identity
    return mounted


def _identity(path: Path) -> Namespace | None:
    """Return the namespace of a file; None if it cannot be read: its process has ended, or is another user's."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def namespace_of(pid: int) -> Namespace | None:
    """Return the network namespace of a process; None if it has ended, or is another user's."""
    return _identity(Path(f"/proc/{pid}/ns/net"))


def members(namespaces: Iterable[Namespace]) -> list[int]:
    """Return the ids of the processes in network namespaces."""
    wanted = set(namespaces)
    return [pid for pid in psutil.pids() if namespace_of(pid) in wanted]


#: A process ends within milliseconds after SIGKILL, unless it waits for a device or a file system.
_KILL_WITHIN_S = 20.0
_POLL_S = 0.02


def kill_members(namespaces: Iterable[Namespace]) -> int:
    """Kill the processes in network namespaces and return their number; raise DevClusterError if some do not end."""
    namespaces = set(namespaces)
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_WITHIN_S
    # Repeat until none is left, because a process may fork before it is killed.
    while True:
        remaining = members(namespaces)
        if not remaining:
            return len(killed)
        if time.monotonic() > deadline:
            raise DevClusterError(f"processes {', '.join(map(str, remaining))} do not end after SIGKILL: see `ps -p`")
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(remaining)
        time.sleep(_POLL_S)


def name_of(pid: int) -> str:
    """Return the name of a process; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return ""
        return process.name()
    except psutil.Error:
        return ""


def is_running(layout: Layout, daemon: Daemon) -> bool:
    """Return whether a daemon runs: its process must be in the namespace, so a stale pid file is harmless."""
    pid = read_pid(layout, daemon)
    namespace = mounted_namespaces(layout).get(daemon.node)
    if pid is None or namespace is None:
        return False
    if os.geteuid() != 0:  # namespaces of root's processes cannot be read
        return name_of(pid) != ""
    return namespace_of(pid) == namespace


def pid_of(layout: Layout, daemon: Daemon) -> int | None:
    """Return the process id of a daemon; None if it does not run."""
    if not is_running(layout, daemon):
        return None
    return read_pid(layout, daemon)


def read_pid(layout: Layout, daemon: Daemon) -> int | None:
    """Return the process id in a daemon's pid file, also if it has ended; None without one."""
    try:
        return int(layout.pid_file(daemon.name).read_text())
    except (OSError, ValueError):
        return None
