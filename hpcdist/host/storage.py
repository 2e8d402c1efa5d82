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

_ON_DISK = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "vfat", "exfat", "overlay", "squashfs")
)
#: File systems in memory.
IN_MEMORY = frozenset(("tmpfs", "ramfs"))
#: File systems of one machine's disk or memory. All others (NFS, Lustre, GPFS, …) count as shared.
LOCAL = _ON_DISK | IN_MEMORY
#: Folders that each machine, or each job, has for itself.
PRIVATE = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/run"))  # noqa: S108 (nothing is written there)
#: Interval of looks for another machine's file.
_POLL_S = 0.1


def mount_of(path: Path) -> tuple[str, str]:
    """Return type and source (`server:/home`, `/dev/sda1`) of the file system of a path, both empty if unknown."""
    import psutil

    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return "", ""
    path = path.resolve()
    kind = ""
    source = ""
    deepest = 0
    for mount in mounts:
        point = Path(mount.mountpoint)
        depth = len(point.parts)
        # The deepest mount above the path has its files. Of two on one folder, the later one hides the earlier one.
        if path.is_relative_to(point) and depth >= deepest:
            kind = mount.fstype
            source = mount.device
            deepest = depth
    return kind, source


def existing(path: Path) -> Path:
    """Return a path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def space(path: Path) -> dict[str, int]:
    """Return `free` and `total` bytes for this user, and `free_files` if the file system counts inodes."""
    status = os.statvfs(existing(path))
    counts = {
        "free": status.f_bavail * status.f_frsize,  # without the blocks that are reserved for root
        "total": status.f_blocks * status.f_frsize,
    }
    if status.f_files:  # 0 if it does not count inodes
        counts["free_files"] = status.f_favail
    return counts


def write_speed(folder: Path, num_bytes: int, limit_s: float) -> float:
    """Return the bytes per second of synced writes to a temporary file in `folder` or its nearest existing parent."""
    block = os.urandom(2**20)  # incompressible
    written = 0
    began = time.perf_counter()
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
        time.sleep(_POLL_S)


def lock_problem(folder: Path) -> str:
    """Return why flock does not exclude a second process of this machine in a folder; empty if it does."""
    # Ends with an error if another process holds the lock.
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    try:
        with NamedTemporaryFile(dir=folder, prefix=".lock-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A second process, because some network file systems identify lock owners by process.
            second = subprocess.run([sys.executable, "-c", program, file.name], capture_output=True, check=False)
    except OSError as error:
        return error.strerror or str(error)
    if second.returncode == 0:
        return "two processes got the same lock"
    return ""


def describe(folder: Path, limit_s: float) -> dict[str, Any]:
    """Return `folder`, `kind`, `source` and space of a path's file system; `error` if it fails or does not answer."""
    facts: dict[str, Any] = {"folder": str(folder)}
    try:
        # In threads, because a call to a file system that hangs does not return.
        facts["kind"], facts["source"] = start(lambda: mount_of(folder)).result(limit_s)
        facts |= start(lambda: space(folder)).result(limit_s)
    except TimeoutError:
        facts["error"] = f"no answer in {limit_s:g} s"
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return facts
