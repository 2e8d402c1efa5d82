"""Whether other machines see a folder as well, as far as its file system tells."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

#: File systems on a device, or in the memory, of one machine. All others (NFS, Lustre, GPFS, …) count as shared.
LOCAL = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "vfat", "exfat", "overlay", "squashfs")
) | {"tmpfs", "ramfs"}
#: In the memory of one machine: never shared.
IN_MEMORY = frozenset(("tmpfs", "ramfs"))
#: Each machine has its own, and where the site says so each job.
PRIVATE = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run")))  # noqa: S108 (nothing is written there)


def file_system(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that a path is on, or will be; empty where it cannot be known.

    Args:
        mounts: text of `/proc/self/mountinfo`; read from there by default.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return ""
    path = path.resolve()
    found, depth = "", -1
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split()[4]))
        # Of several on one folder the last one hides the others.
        if path.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = after.split()[0], len(point.parts)
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def folder_problems(runs_dir: Path, kind: str, hosts: Iterable[str], here: str) -> tuple[list[str], list[str]]:
    """Mistakes and doubts about a runs folder that the nodes must see.

    Args:
        kind: its file system's type, empty where unknown.
        hosts: the nodes that the run may stand on.
        here: this machine's name among them, if it is one of them.
    """
    if kind not in LOCAL or set(hosts) == {here}:
        return [], []
    private = next((place for place in PRIVATE if runs_dir.resolve().is_relative_to(place)), None)
    if private is not None or kind in IN_MEMORY:
        why = f"each machine has a {private} of its own" if private else f"{kind} is in this machine's memory"
        return [
            f"runs_dir={runs_dir}: {why}, so the nodes would not see the run:"
            " point runs_dir (or HPCDIST_RUNS_DIR) at a shared file system"
        ], []
    return [], [
        f"runs_dir={runs_dir} is on {kind}, a file system of this machine: the nodes must see it under the same path;"
        " if they do, say cluster.shared_runs=true"
    ]
