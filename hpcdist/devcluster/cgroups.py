"""The cgroups by which Slurm tracks the processes of steps.

With version 1, the cluster uses a cgroup of its own, which is mounted in its state folder. With version 2, Slurm itself
chooses the places of its cgroups.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from hpcdist.devcluster.settings import Layout, Settings
from hpcdist.devcluster.system import run, succeeds
from hpcdist.files.atomic import write_atomic

ROOT = Path("/sys/fs/cgroup")
#: The hierarchy of version 1 that proctrack/cgroup uses.
FREEZER = "freezer"


def version() -> str:
    """Return the version of cgroups that proctrack/cgroup can use, `v1` or `v2`; empty if there is none."""
    freezer = ROOT / FREEZER
    if (freezer / "tasks").exists():
        return "v1" if _is_writable(freezer) else ""
    return "v2" if (ROOT / "cgroup.controllers").exists() and _is_writable(ROOT) else ""


def _is_writable(folder: Path) -> bool:
    """Return whether cgroups can be created: a container often has a read-only view of its machine's."""
    # Not os.access: a mount may be read-only for root as well.
    probe = folder / f"hpcdist-devcluster-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    probe.rmdir()
    return True


def create(settings: Settings, layout: Layout) -> None:
    """Create and mount the cluster's cgroup, if it uses cgroups of version 1 and has none yet."""
    target = layout.cgroups / FREEZER
    if settings.proctrack != "cgroup" or version() != "v1" or target.is_mount():
        return
    target.mkdir(parents=True, exist_ok=True)
    name = f"hpcdist-devcluster-{secrets.token_hex(4)}"
    write_atomic(layout.cgroup_name, name)
    (ROOT / FREEZER / name).mkdir()
    run(["mount", "--bind", str(ROOT / FREEZER / name), str(target)])


def remove(layout: Layout) -> None:
    """Remove the cluster's cgroup, which contains no processes any more, and its mount."""
    if (layout.cgroups / FREEZER).is_mount():
        succeeds(["umount", str(layout.cgroups / FREEZER)])
    if not layout.cgroup_name.exists():
        return
    top = ROOT / FREEZER / layout.cgroup_name.read_text()
    for folder, _, _ in os.walk(top, topdown=False):
        with suppress(OSError):  # a process of another program has moved into it
            os.rmdir(folder)  # the files in it vanish with it and cannot be deleted
