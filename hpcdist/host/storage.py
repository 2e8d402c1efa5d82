"""Type, space and behaviour of the file system of a path, by its mount and by tests."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from hpcdist.host.time_limits import start

#: File systems of one machine's disk or memory. All others (NFS, Lustre, GPFS, …) count as shared.
LOCAL = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "vfat", "exfat", "overlay", "squashfs")
) | {"tmpfs", "ramfs"}
#: File systems in memory.
IN_MEMORY = frozenset(("tmpfs", "ramfs"))
#: Folders that each machine, or each job, has for itself.
PRIVATE = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run")))  # noqa: S108 (nothing is written there)


def mount_of(path: Path) -> tuple[str, str]:
    """Return type and source (`server:/home`, `/dev/sda1`) of the file system of a path, both empty if unknown."""
    import psutil

    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return "", ""
    path = path.resolve()
    kind = source = ""
    depth = -1
    for mount in mounts:
        point = Path(mount.mountpoint)
        # The last mount on a folder hides earlier ones.
        if path.is_relative_to(point) and len(point.parts) >= depth:
            kind, source = mount.fstype, mount.device
            depth = len(point.parts)
    return kind, source


def existing(path: Path) -> Path:
    """Return a path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def space(path: Path) -> dict[str, int]:
    """Return `free` and `total` bytes for this user, and `free_files` if the file system counts inodes."""
    status = os.statvfs(existing(path))
    counts = {"free": status.f_bavail * status.f_frsize, "total": status.f_blocks * status.f_frsize}
    if status.f_files:
        counts["free_files"] = status.f_favail
    return counts


def write_speed(folder: Path, num_bytes: int, limit_s: float) -> float:
    """Return the bytes per second of synced writes to a temporary file in `folder` or its nearest existing parent."""
    block = os.urandom(2**20)  # incompressible
    began, written = time.perf_counter(), 0
    with NamedTemporaryFile(dir=existing(folder), prefix=".preflight-", buffering=0) as file:
        while written < num_bytes and time.perf_counter() - began < limit_s:
            written += file.write(block[: num_bytes - written])
            os.fsync(file.fileno())
    return written / (time.perf_counter() - began)


def sees(path: Path, content: str, limit_s: float) -> bool:
    """Return whether another machine's new file appears with its content within a limit; network file systems lag."""
    until = time.monotonic() + limit_s
    while True:
        try:
            if path.read_text() == content:
                return True
        except (OSError, UnicodeDecodeError):
            pass  # not visible yet
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def lock_problem(folder: Path) -> str:
    """Return why flock does not exclude a second process of this machine in a folder; empty if it does."""
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    try:
        with NamedTemporaryFile(dir=folder, prefix=".lock-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A second process, because some network file systems identify lock owners by process.
            done = subprocess.run([sys.executable, "-c", code, file.name], capture_output=True, check=False)
        return "" if done.returncode else "two processes got the same lock"
    except OSError as error:
        return error.strerror or str(error)


def describe(folder: Path, limit_s: float) -> dict[str, Any]:
    """Return `folder`, `kind`, `source` and space of a path's file system; `error` if it fails or does not answer."""
    found: dict[str, Any] = {"folder": str(folder)}
    try:
        found["kind"], found["source"] = start(lambda: mount_of(folder)).result(limit_s)
        found |= start(lambda: space(folder)).result(limit_s)
    except TimeoutError:
        found["error"] = f"no answer in {limit_s:g} s"
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found
