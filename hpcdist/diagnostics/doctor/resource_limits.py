"""Cores, memory, shared memory and limits that processes on this machine may use."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpcdist.machine.check import Check, failure, note, ok, warning
from hpcdist.machine.facts import num_cores

GIB = 2**30
#: Importing torch takes half a GiB per rank; two ranks with a small model need about this.
_LITTLE_MEMORY = 2 * GIB
#: docker's default of 64 MiB is the usual cause of `bus error` in data workers and NCCL.
_LITTLE_SHM = 256 * 2**20
#: Ranks, data workers and RPC open hundreds of sockets and files.
_FEW_FILES = 1024
_FEW_PROCESSES = 1024
#: cgroups version 1 writes larger values for `no limit`.
_NO_LIMIT = 2**60


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """Resources of this machine that a process may use."""

    cores: int
    quota: float | None  #: the cgroup's CPU quota in cores, which `nproc` does not show
    memory_bytes: int
    memory_limit_bytes: int | None  #: the cgroup's limit, if it is below the machine's memory
    shm_bytes: int | None
    shm_free_bytes: int
    max_files: int
    max_processes: int
    locked_bytes: int
    rdma: bool  #: whether there is an InfiniBand device, which must lock memory

    @classmethod
    def inspect(cls, root: Path = Path("/")) -> ResourceLimits:
        """Read the limits; tests set another `root` for /proc, /sys and /dev."""
        groups = list(_groups(root))
        limits = [value for folder in groups if (value := _memory_limit(folder)) is not None]
        quotas = [quota for folder in groups if (quota := _quota(folder)) is not None]
        memory = psutil.virtual_memory().total
        limit = min(limits, default=memory)
        shm = root / "dev/shm"
        size = os.statvfs(shm) if shm.is_dir() else None
        return cls(
            cores=num_cores(),
            quota=min(quotas, default=None),
            memory_bytes=memory,
            memory_limit_bytes=limit if limit < memory else None,
            shm_bytes=size.f_blocks * size.f_frsize if size else None,
            shm_free_bytes=size.f_bavail * size.f_frsize if size else 0,
            max_files=_soft(resource.RLIMIT_NOFILE),
            max_processes=_soft(resource.RLIMIT_NPROC),
            locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
            rdma=(root / "sys/class/infiniband").is_dir() and any((root / "sys/class/infiniband").iterdir()),
        )


def _soft(limit: int) -> int:
    value = resource.getrlimit(limit)[0]
    return _NO_LIMIT if value == resource.RLIM_INFINITY else value


def _groups(root: Path) -> Iterator[Path]:
    """Yield this process's cgroup folders and their parents, of both versions: the lowest limit of all applies."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = base if not controllers else base / controllers
        own = top / path.lstrip("/")
        # In a container the path is often the host's, and its folder does not exist.
        while own.is_relative_to(top):
            if own.is_dir():
                yield own
            if own == top:
                break
            own = own.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (value := _number(folder / name)) is not None and 0 < value < _NO_LIMIT:
            return value
    return None


def _quota(folder: Path) -> float | None:
    """Return the CPU quota in cores: version 2 has both numbers in one file, version 1 has a file for each."""
    try:
        time_us, period_us = (folder / "cpu.max").read_text().split()
        return int(time_us) / int(period_us)
    except (OSError, ValueError):
        pass
    time_us_1, period_us_1 = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return time_us_1 / period_us_1 if time_us_1 and period_us_1 and time_us_1 > 0 else None


def resource_checks(found: ResourceLimits) -> list[Check]:
    """Compare cores, memory and limits with the needs of a run."""
    return [_cores(found), _memory(found), *_shm(found), *_limits(found)]


def _cores(found: ResourceLimits) -> Check:
    if found.quota is not None and found.quota < found.cores - 0.5:
        text = f"{found.cores} visible, but a CPU quota of {found.quota:.1f} cores: additional threads are throttled"
        fix = f"launch.num_threads={max(1, int(found.quota) // 2)} for two ranks, or a larger --cpus for the container"
        return warning("cores", text, fix)
    if found.cores < 2:
        return note("cores", "1: two ranks share it and take twice as long", "in a job request more (--cpus-per-task)")
    return ok("cores", f"{found.cores}")


def _memory(found: ResourceLimits) -> Check:
    limit = found.memory_limit_bytes
    text = f"{found.memory_bytes / GIB:.1f} GiB" if limit is None else f"{limit / GIB:.1f} GiB (cgroup limit)"
    if (limit or found.memory_bytes) < _LITTLE_MEMORY:
        fix = "fewer ranks (launch.num_ranks=1), or a larger --memory (container) or --mem (Slurm)"
        return warning("memory", f"{text}: two ranks need about 2 GiB", fix)
    return ok("memory", text)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def _shm(found: ResourceLimits) -> list[Check]:
    if found.shm_bytes is None:
        text = "there is no /dev/shm: data workers and NCCL would fail"
        fix = "mount it (`mount -t tmpfs tmpfs /dev/shm`), or start the container with --ipc=host"
        return [failure("shared memory", text, fix)]
    text = f"{_size(found.shm_free_bytes)} of {_size(found.shm_bytes)} free in /dev/shm"
    if found.shm_free_bytes < _LITTLE_SHM:
        fix = "start the container with --ipc=host or --shm-size=8g; otherwise remove leftover files in /dev/shm"
        text += ": data workers and NCCL need some hundred MiB"
        return [warning("shared memory", text, fix)]
    return [ok("shared memory", text)]


def _limits(found: ResourceLimits) -> list[Check]:
    checks = []
    for name, value, least, flag in (
        ("open files", found.max_files, _FEW_FILES, "ulimit -n 65536"),
        ("processes", found.max_processes, _FEW_PROCESSES, "ulimit -u 65536"),
    ):
        if value < least:
            text = f"at most {value} (ulimit): many ranks or data workers exceed it"
            checks.append(warning(name, text, f"`{flag}`, or limits.conf (administrators)"))
    if found.rdma and found.locked_bytes < _NO_LIMIT:
        text = f"at most {found.locked_bytes // 1024} KiB may be locked, and InfiniBand locks its send buffers"
        fix = "`ulimit -l unlimited` (limits.conf, slurmd's LimitMEMLOCK); containers: --ulimit memlock=-1"
        checks.append(warning("locked memory", text, fix))
    shown = "unlimited" if found.max_files >= _NO_LIMIT else str(found.max_files)
    return checks or [ok("limits", f"{shown} open files")]
