"""The control groups of this process, of both versions, and processes that their memory limits have killed.

Reference: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcdist.host.machine import text_of

ROOT = Path("/")


def folders(root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of this process's groups and of those above: the lowest limit of all applies."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            # In a container the path is often the host's, and its folder does not exist.
            if folder.is_relative_to(top) and folder.is_dir():
                yield folder


def memory_limit_bytes(folder: Path) -> int | None:
    """Return the memory limit of a group; None without one."""
    limit = text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes")
    return int(limit) if limit.strip().isdigit() else None


def memory_kills(root: Path = ROOT) -> dict[Path, int]:
    """Return how many processes the kernel has killed because of the memory limit of each group of this process."""
    kills = {}
    for folder in folders(root):
        text = text_of(folder / "memory.events") or text_of(folder / "memory.oom_control")
        match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        if match is not None:
            kills[folder] = int(match[1])
    return kills


def exceeded_limit_bytes(before: Mapping[Path, int]) -> int | None:
    """Return the memory limit for which the kernel has killed a process since `before`, an earlier `memory_kills`."""
    now = memory_kills()
    limits = [memory_limit_bytes(folder) for folder in now if now[folder] > before.get(folder, 0)]
    return min((limit for limit in limits if limit is not None), default=None)
