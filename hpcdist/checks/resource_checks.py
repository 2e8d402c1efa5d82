"""Checks whether the cores, the memory and the limits of this machine suffice for a few ranks."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from hpcdist.checks import node_facts
from hpcdist.checks.node_facts import GIB
from hpcdist.errors import memory_size
from hpcdist.host import cgroups
from hpcdist.host import machine as host_machine
from hpcdist.host.check_result import Check, failure, note, ok, warning

#: Stands for `unlimited` in the numbers of `ResourceLimits`.
_NO_LIMIT = 2**60
#: A quota that lacks less than this to the number of cores throttles little.
_QUOTA_TOLERANCE = 0.5
#: Number of ranks of a small run, such as the trial.
_FEW_RANKS = 2
#: The import of torch takes half a GiB in each rank.
_MIN_MEMORY_BYTES = 2 * GIB
_MIN_LOCKED_BYTES = GIB
#: Ranks, data workers and RPC open hundreds of sockets and files. It is the least number of processes, too.
_MIN_FILES = 1024


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """The cores, the memory and the limits that a process of this user has on this machine."""

    cores: int
    quota: float | None  #: the cgroup's CPU quota in cores, which `nproc` does not show
    memory_bytes: int
    memory_limit_bytes: int | None  #: the cgroup's limit, if it is below the machine's memory
    shm_bytes: int | None
    shm_free_bytes: int
    max_files: int
    max_processes: int
    locked_bytes: int  #: that a process may lock in memory
    rdma: bool  #: whether there is an InfiniBand device, which must lock memory

    @classmethod
    def inspect(cls, root: Path = Path("/")) -> Self:
        """Return the limits of this process on this machine, with `root` as its root file system."""
        memory = psutil.virtual_memory().total
        quotas = []
        limits = []
        for folder in cgroups.folders(root):
            quota = _cpu_quota(folder)
            if quota is not None:
                quotas.append(quota)
            limit = cgroups.memory_limit_bytes(folder)
            if limit is not None and limit < memory:
                limits.append(limit)
        infiniband = root / "sys/class/infiniband"
        shm = root / "dev/shm"
        shm_bytes = None
        shm_free_bytes = 0
        if shm.is_dir():
            status = os.statvfs(shm)
            shm_bytes = status.f_blocks * status.f_frsize
            shm_free_bytes = status.f_bavail * status.f_frsize
        return cls(
            cores=host_machine.num_cores(),
            quota=min(quotas, default=None),
            memory_bytes=memory,
            memory_limit_bytes=min(limits, default=None),
            shm_bytes=shm_bytes,
            shm_free_bytes=shm_free_bytes,
            max_files=_soft(resource.RLIMIT_NOFILE),
            max_processes=_soft(resource.RLIMIT_NPROC),
            locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
            rdma=infiniband.is_dir() and any(infiniband.iterdir()),
        )


def _cpu_quota(folder: Path) -> float | None:
    """Return the CPU quota of a control group in cores; None without one."""
    # Version 2 has both numbers in one file, version 1 has a file for each.
    text = host_machine.text_of(folder / "cpu.max")
    if not text:
        version_1 = [host_machine.text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        text = " ".join(version_1)
    match text.split():
        case [quota, period] if quota not in ("max", "-1"):  # no quota in version 2 and 1
            return int(quota) / int(period)
    return None


def _soft(limit: int) -> int:
    """Return the soft limit of a resource of this process."""
    value = resource.getrlimit(limit)[0]
    if value == resource.RLIM_INFINITY:
        return _NO_LIMIT
    return value


def resource_checks(limits: ResourceLimits) -> list[Check]:
    """Check whether cores, memory, /dev/shm and limits suffice for a few ranks."""
    return [_cores_check(limits), _memory_check(limits), *_shm_checks(limits), *_limit_checks(limits)]


def _cores_check(limits: ResourceLimits) -> Check:
    if limits.quota is not None and limits.quota < limits.cores - _QUOTA_TOLERANCE:
        num_threads = max(1, int(limits.quota) // _FEW_RANKS)
        text = f"{limits.cores} visible, but a CPU quota of {limits.quota:.1f} cores: additional threads are throttled"
        fix = f"launch.num_threads={num_threads} for two ranks, or a larger --cpus for the container"
        return warning("cores", text, fix)
    if limits.cores < _FEW_RANKS:
        fix = "in a job request more (--cpus-per-task)"
        return note("cores", "1: two ranks share it and take twice as long", fix)
    return ok("cores", f"{limits.cores}")


def _memory_check(limits: ResourceLimits) -> Check:
    num_bytes = limits.memory_bytes
    origin = ""
    if limits.memory_limit_bytes is not None:
        num_bytes = limits.memory_limit_bytes
        origin = " (cgroup limit)"
    text = f"{num_bytes / GIB:.1f} GiB{origin}"
    if num_bytes < _MIN_MEMORY_BYTES:
        fix = "fewer ranks (launch.num_ranks=1), or a larger --memory (container) or --mem (Slurm)"
        return warning("memory", f"{text}: two ranks need about 2 GiB", fix)
    return ok("memory", text)


def _shm_checks(limits: ResourceLimits) -> list[Check]:
    if limits.shm_bytes is None:
        text = "there is no /dev/shm: data workers and NCCL would fail"
        fix = "mount it (`mount -t tmpfs tmpfs /dev/shm`), or start the container with --ipc=host"
        return [failure("shm", text, fix)]
    problems = list(node_facts.shm_checks(limits.shm_free_bytes))
    if problems:
        return problems
    return [ok("shm", f"{memory_size(limits.shm_free_bytes)} of {memory_size(limits.shm_bytes)} free in /dev/shm")]


def _limit_checks(limits: ResourceLimits) -> list[Check]:
    problems = []
    if limits.rdma and limits.locked_bytes < _MIN_LOCKED_BYTES:
        text = (
            f"only {limits.locked_bytes / 1e6:,.0f} MB may be locked in memory, and InfiniBand locks its send buffers"
        )
        fix = "`ulimit -l unlimited` (limits.conf, LimitMEMLOCK=infinity of slurmd); containers: --ulimit memlock=-1"
        problems.append(warning("locked memory", text, fix))
    for name, limit, command in (
        ("open files", limits.max_files, "ulimit -n 65536"),
        ("processes", limits.max_processes, "ulimit -u 65536"),
    ):
        if limit < _MIN_FILES:
            text = f"at most {limit} (ulimit): many ranks or data workers exceed it"
            problems.append(warning(name, text, f"`{command}`, or limits.conf (administrators)"))
    if problems:
        return problems
    shown = "unlimited" if limits.max_files >= _NO_LIMIT else str(limits.max_files)
    return [ok("limits", f"{shown} open files")]
