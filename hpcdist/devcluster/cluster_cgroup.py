"""The cgroup below which Slurm tracks the processes of steps; it belongs to the cluster and is mounted in its folder.

Only version 1 is used. For version 2, Slurm asks systemd for its cgroups, and cannot be kept apart from the machine's.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from hpcdist.devcluster.cluster_commands import run, succeeds
from hpcdist.devcluster.settings import Layout, Settings
from hpcdist.host.files import write_atomic

ROOT = Path("/sys/fs/cgroup")
#: The hierarchy of version 1 that proctrack/cgroup uses.
FREEZER = "freezer"


def are_usable() -> bool:
    """Return whether cgroups of version 1 can be created: a container often has a read-only view of its machine's."""
    freezer = ROOT / FREEZER
    if not (freezer / "tasks").exists():
        return False
    # Not os.access: a mount may be read-only for root as well.
    probe = freezer / f"hpcdist-devcluster-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    probe.rmdir()
    return True


def create(settings: Settings, layout: Layout) -> None:
    """Create and mount the cluster's cgroup if it tracks processes with cgroups."""
    target = layout.cgroups / FREEZER
    if settings.proctrack != "cgroup" or target.is_mount():
        return
    target.mkdir(parents=True, exist_ok=True)
    name = f"hpcdist-devcluster-{secrets.token_hex(4)}"
    write_atomic(layout.cgroup_name, name)
    cgroup = ROOT / FREEZER / name
    cgroup.mkdir()
    run(["mount", "--bind", str(cgroup), str(target)])


def remove(layout: Layout) -> None:
    """Unmount and remove the cluster's cgroup with those below it."""
    target = layout.cgroups / FREEZER
    if target.is_mount():
        succeeds(["umount", str(target)])
    if not layout.cgroup_name.exists():
        return
    top = ROOT / FREEZER / layout.cgroup_name.read_text()
    for folder, _, _ in os.walk(top, topdown=False):
        with suppress(OSError):  # a process of another program has moved into it
            os.rmdir(folder)  # the files in it vanish with it and cannot be deleted
