"""What can be known of the file system that a path is on, by its mounts and by trying."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hpcdist.machine.time_limit import within

#: File systems on a device, or in the memory, of one machine. All others (NFS, Lustre, GPFS, …) count as shared.
LOCAL = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "vfat", "exfat", "overlay", "squashfs")
) | {"tmpfs", "ramfs"}
#: In the memory of one machine: never shared.
IN_MEMORY = frozenset(("tmpfs", "ramfs"))
#: Each machine has its own, and where the site says so each job.
PRIVATE = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run")))  # noqa: S108 (nothing is written there)
_CHUNK = 2**20
_RENAMES = 200


def file_system(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that a path is on, or will be; empty where it cannot be known.

    Args:
        mounts: text of `/proc/self/mountinfo`; read from there by default.
    """
    return mount_of(path, mounts)[0]


def mount_of(path: Path, mounts: str | None = None) -> tuple[str, str]:
    """Type and source (`server:/home`, `/dev/sda1`) of the file system that a path is on, both empty where unknown."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return "", ""
    path = path.resolve()
    found, depth = ("", ""), -1
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split()[4]))
        # Of several on one folder the last one hides the others.
        if path.is_relative_to(point) and len(point.parts) >= depth:
            kind, source = after.split()[:2]
            found, depth = (kind, _unescaped(source)), len(point.parts)
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def space(path: Path) -> dict[str, int]:
    """`free` and `total` bytes of a path's file system for this user, `free_files` of those that count them.

    Raises OSError.
    """
    status = os.statvfs(existing(path))
    found = {"free": status.f_bavail * status.f_frsize, "total": status.f_blocks * status.f_frsize}
    return found | ({"free_files": status.f_favail} if status.f_files else {})


def write_speed(folder: Path, num_bytes: int, limit_s: float) -> float:
    """Bytes per second to a file in `folder`, or the nearest one above it that is there, with all of it on disk.

    The file is gone afterwards. No more is written than fits into the time. Raises OSError: full, read-only, no quota.
    """
    path = existing(folder) / f".preflight-{os.uname().nodename}-{os.getpid()}"
    block = os.urandom(_CHUNK)  # nothing that a file system could compress
    began, written = time.perf_counter(), 0
    try:
        with open(path, "xb", buffering=0) as file:
            while written < num_bytes and time.perf_counter() - began < limit_s:
                written += file.write(block[: num_bytes - written])
                os.fsync(file.fileno())
        return written / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)


def sees(path: Path, content: str, limit_s: float) -> bool:
    """Whether a file that another machine has just written is here with that content; network file systems lag."""
    until = time.monotonic() + limit_s
    while True:
        try:
            if path.read_text() == content:
                return True
        except (OSError, UnicodeDecodeError):
            pass  # not there yet, or never
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def lock_problem(folder: Path) -> str:
    """Why locks (flock) do not keep two processes of this machine apart in a folder; empty where they do."""
    path = folder / f".lock-{os.uname().nodename}-{os.getpid()}"
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    try:
        with open(path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process: some network file systems tell owners apart by that.
            done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
        return "" if done.returncode else "two processes got the same lock"
    except OSError as error:
        return error.strerror or str(error)
    finally:
        path.unlink(missing_ok=True)


def rename_problem(folder: Path) -> str:
    """Why replacing a file is not safe from readers in a folder; empty where they see the old file or the new."""
    path = folder / f".rename-{os.uname().nodename}-{os.getpid()}"
    temporary = path.with_name(f"{path.name}.new")
    ended = threading.Event()
    problems: list[str] = []

    def watch() -> None:
        while not ended.is_set() and not problems:
            try:
                if path.read_bytes() not in (b"old", b"new"):
                    problems.append("a reader saw a part of a file")
            except OSError as error:
                problems.append(f"a reader saw no file ({error.strerror})")

    try:
        path.write_bytes(b"old")
        reader = threading.Thread(target=watch, daemon=True)
        reader.start()
        for _ in range(_RENAMES):
            temporary.write_bytes(b"new")
            os.replace(temporary, path)
        ended.set()
        reader.join()
    except OSError as error:
        return error.strerror or str(error)
    finally:
        ended.set()
        temporary.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return problems[0] if problems else ""


def exclusive_problem(folder: Path) -> str:
    """Why two processes could both believe that they have made the same file in a folder; empty where one is told."""
    path = folder / f".exclusive-{os.uname().nodename}-{os.getpid()}"
    try:
        for wanted in (None, errno.EEXIST):
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except OSError as error:
                if error.errno != wanted:
                    return error.strerror or str(error)
            else:
                if wanted is not None:
                    return "the same file was made twice"
        return ""
    finally:
        path.unlink(missing_ok=True)


def look_at(folder: Path, limit_s: float) -> dict[str, Any]:
    """`folder`, `kind`, `source` and `space` of a path's file system; `error` where it does not answer or cannot be."""
    found: dict[str, Any] = {"folder": str(folder)}
    try:
        found["kind"], found["source"] = within(limit_s, lambda: mount_of(folder))
        found |= within(limit_s, lambda: space(folder))
    except TimeoutError:
        found["error"] = f"no answer in {limit_s:g} s"
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found
