"""The control groups of this process, of both versions, and processes that the kernel has killed for lack of memory.

References:
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from hpcdist.host.machine import text_of

ROOT = Path("/")
#: The owner of the exhausted memory; `group` is a control group of another program, such as one of systemd.
MemoryScope = Literal["step", "job", "container", "group", "machine"]
_SCOPE_NAMES: dict[MemoryScope, str] = {
    "step": "the Slurm step",
    "job": "the Slurm job",
    "container": "the container",
    "group": "the control group",
}
#: Version 1 shows a missing limit as the largest number of whole pages.
_NO_LIMIT_BYTES = 2**60
_MIB = 2**20
#: Folders that docker, podman, containerd, CRI-O and Kubernetes create, as `docker/ID` or `docker-ID.scope`.
_CONTAINER = re.compile(r"^(?:docker|libpod|containerd|cri-containerd|crio|kubepods)\b")


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
    text = (text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes")).strip()
    if not text.isdigit() or int(text) >= _NO_LIMIT_BYTES:
        return None
    return int(text)


@dataclass(frozen=True, kw_only=True)
class MemoryKill:
    """Processes of a control group that the kernel has killed for lack of memory."""

    count: int
    scope: MemoryScope
    limit_bytes: int  #: the limit of `scope`, for `machine` its memory

    @property
    def reason(self) -> str:
        """Why the kernel has killed, as the end of a sentence."""
        size = f"{self.limit_bytes / _MIB:,.0f} MiB"
        if self.scope == "machine":
            return f"out of memory, since all {size} of the machine were in use"
        return f"out of memory, with a limit of {size} for {_SCOPE_NAMES[self.scope]}"


class MemoryCounts(NamedTuple):
    """Counters of the kernel for one control group."""

    kills: int  #: processes of the group that were killed for lack of memory; version 2 includes the groups below
    hits: int  #: how often an allocation has failed because of the limit of this very group


def memory_counts(root: Path = ROOT) -> dict[Path, MemoryCounts]:
    """Return the counters of each group of this process, the innermost one first."""
    counts = {}
    for folder in folders(root):
        events = text_of(folder / "memory.events")
        local = text_of(folder / "memory.events.local") or events
        kills = _number(r"^oom_kill (\d+)$", events or text_of(folder / "memory.oom_control"))
        hits = _number(r"^oom (\d+)$", local)
        if hits is None:
            hits = _number(r"^(\d+)$", text_of(folder / "memory.failcnt"))
        if kills is not None:
            counts[folder] = MemoryCounts(kills, hits or 0)
    return counts


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        return None
    return int(match[1])


def memory_kill(before: Mapping[Path, MemoryCounts], root: Path = ROOT) -> MemoryKill | None:
    """Return the kills in the group of this process since `before`, an earlier `memory_counts`; None without any.

    The kernel counts kills in the group of the killed process, whatever limit was exceeded, and also if the machine's
    memory was exhausted. The limit is therefore that of a group which has hit its limit meanwhile.
    """
    now = memory_counts(root)
    if not now:
        return None
    own = next(iter(now))
    count = now[own].kills - before.get(own, MemoryCounts(0, 0)).kills
    if own not in before or count <= 0:
        return None
    limits = []
    for folder, counts in now.items():
        limit = memory_limit_bytes(folder)
        if folder in before and counts.hits > before[folder].hits and limit is not None:
            limits.append((limit, _scope(folder, root)))
    if limits:
        limit, scope = min(limits, key=lambda item: item[0])
        return MemoryKill(count=count, scope=scope, limit_bytes=limit)
    total = _number(r"^MemTotal: +(\d+) kB$", text_of(root / "proc/meminfo")) or 0
    return MemoryKill(count=count, scope="machine", limit_bytes=total * 1024)


def _scope(folder: Path, root: Path) -> MemoryScope:
    """Return the owner of a group's folder, by the names that Slurm and container runtimes give to groups."""
    mount = root / "sys/fs/cgroup"
    parts = folder.relative_to(mount).parts
    # In a container with a name space of its own, its group is the top, which has no limit elsewhere. Version 1 has a
    # top for each controller.
    is_top = folder == mount or (folder.parent == mount and (folder / "memory.failcnt").exists())
    if is_top or any(_CONTAINER.match(part) for part in parts[-2:]):
        return "container"
    if any(part.startswith("step_") for part in parts):
        return "step"
    if any(part.startswith("job_") for part in parts):
        return "job"
    return "group"
