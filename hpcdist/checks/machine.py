"""Checks of this machine: software, GPUs, host name, resource limits, and a test with ranks."""

from __future__ import annotations

import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

import hpcdist
from hpcdist.host.commands import last_line, run_within
from hpcdist.host.machine import (
    Check,
    Gpu,
    driver_checks,
    failure,
    gpu_checks,
    install_command,
    locked_memory,
    locked_memory_checks,
    lookup_checks,
    loopback_checks,
    note,
    num_cores,
    ok,
    shm_checks,
    warning,
)
from hpcdist.review.explain import Finding, explain_attempt
from hpcdist.review.facts import readable
from hpcdist.run.folder import RunDir

# Checks of the installed software; nothing is imported for them.

TOGETHER = "install both together from one index: `pip install --force-reinstall torch torchvision`"


def software_checks(found: Mapping[str, str], *, torch_required: bool) -> list[Check]:
    """Check hpcdist and torch, and whether the versions are compatible."""
    torch, cuda, driver = (found.get(name, "") for name in ("torch", "cuda", "driver"))
    checks = [
        ok("Python", f"{found['python']}, {sys.prefix}"),
        ok("hpcdist", f"{hpcdist.__version__}, {Path(hpcdist.__file__).parent}"),
    ]
    if not torch and torch_required:
        return [*checks, failure("torch", "not installed: a run on this machine would fail", install_command("train"))]
    if not torch:
        text = "not installed: ranks need container.image or cluster.environment, as they use this Python otherwise"
        return [*checks, note("torch", text, install_command("train"))]
    vision = version_of("torchvision")
    # torchvision pins the version of torch exactly.
    lines = (vision and metadata.requires("torchvision")) or []
    pinned = next((match[1] for line in lines if (match := re.match(r"torch\s*\(?==\s*([\w.]+)", line))), "")
    if pinned and pinned != torch.partition("+")[0]:
        text = f"{torch} beside a torchvision {vision} built for {pinned}, which cannot be imported"
        checks.append(failure("torch", text, TOGETHER))
    elif driver and not cuda:
        text = f"{torch} is built without CUDA, and this machine has GPUs: training uses the CPUs"
        checks.append(warning("torch", text, f"install a build with CUDA; {TOGETHER}"))
    else:
        checks.append(ok("torch", f"{torch}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"))
    if not vision:
        checks.append(warning("torchvision", "not installed: image trainers need it", TOGETHER))
    if problems := [*driver_checks(found)]:
        return checks + problems
    return [*checks, ok("driver", driver + (f", supports CUDA {cuda}" if cuda else ""))] if driver else checks


def version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


# Checks of this machine's GPUs.


def all_gpu_checks(found: Sequence[Gpu], num_visible: int, num_devices: int, driver: str) -> list[Check]:
    """Return the results of all GPUs, or one that explains why there are none."""
    if not found:
        if num_devices or driver:
            text = f"NVML reports no GPU, although driver {driver} is loaded and {num_devices} device files exist"
            fix = "see the error of `nvidia-smi`; in a container pass GPUs in (docker: --gpus all, podman: --device"
            return [warning("GPUs", text, f"{fix} nvidia.com/gpu=all)")]
        return [note("GPUs", "none: training uses the CPUs")]
    checks = []
    for gpu in found:
        text = gpu.name + (f", {gpu.total_mb / 1024:.0f} GiB" if gpu.total_mb else "")
        problems = [replace(check, text=f"{text}: {check.text}") for check in gpu_checks(vars(gpu))]
        checks += problems or [ok(f"GPU {gpu.index}", text)]
    if num_visible < len(found):
        text = f"{num_visible} of {len(found)} according to CUDA_VISIBLE_DEVICES"
        checks.append(note("visible", text, "unset it to use all of them"))
    return checks


#: glibc queries each server twice for 5 s, forward and reverse.
GIVE_UP_S = 15.0


def host_name_checks(host: str, found: Mapping[str, Any], *, is_node: bool) -> list[Check]:
    """Explain the effect of the resolver's answers on the start of ranks."""
    if problems := [*lookup_checks(host, found), *loopback_checks(host, found)]:
        unaffected = "; runs on this machine alone are not affected"
        return problems if is_node else [replace(one, level="note", text=one.text + unaffected) for one in problems]
    back = found.get("reverse") or f"no name ({found['reverse_error']}): fast, so harmless"
    took = f"{1000 * found['forward_s']:.0f} ms, reverse {1000 * found['reverse_s']:.0f} ms"
    return [ok("names", f"{host} → {found['address']} → {back} ({took})")]


# Cores, memory, shared memory and limits that processes on this machine may use.

GIB = 2**30
#: Importing torch takes half a GiB per rank; two ranks with a small model need about this.
_LITTLE_MEMORY = 2 * GIB
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
    locked_bytes: int | None  #: None without a limit
    rdma: bool  #: whether there is an InfiniBand device, which must lock memory

    @classmethod
    def inspect(cls, root: Path = Path("/")) -> ResourceLimits:
        """Read the limits; tests set another `root` for /proc, /sys and /dev."""
        memory = psutil.virtual_memory().total
        quotas, limits = [], [memory]
        for folder in _cgroups(root):
            # Version 2 has both numbers of the quota in one file, version 1 has a file for each.
            quota = _text(folder / "cpu.max") or "".join(
                _text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")
            )
            if quota and not quota.startswith(("max", "-1")):
                time_us, period_us = quota.split()
                quotas.append(int(time_us) / int(period_us))
            limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
            limits += [int(limit)] if limit.strip().isdigit() else []
        shm, infiniband = root / "dev/shm", root / "sys/class/infiniband"
        size = os.statvfs(shm) if shm.is_dir() else None
        return cls(
            cores=num_cores(),
            quota=min(quotas, default=None),
            memory_bytes=memory,
            memory_limit_bytes=min(limits) if min(limits) < memory else None,
            shm_bytes=size.f_blocks * size.f_frsize if size else None,
            shm_free_bytes=size.f_bavail * size.f_frsize if size else 0,
            max_files=_soft(resource.RLIMIT_NOFILE),
            max_processes=_soft(resource.RLIMIT_NPROC),
            locked_bytes=locked_memory(),
            rdma=infiniband.is_dir() and any(infiniband.iterdir()),
        )


def _soft(limit: int) -> int:
    value = resource.getrlimit(limit)[0]
    return _NO_LIMIT if value == resource.RLIM_INFINITY else value


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield this process's cgroup folders and their parents, of both versions: the lowest limit of all applies."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup" / controllers
        own = top / path.lstrip("/")
        # In a container the path is often the host's, and its folder does not exist.
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top) and folder.is_dir())


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def resource_checks(found: ResourceLimits) -> list[Check]:
    """Compare cores, memory and limits with the needs of a run."""
    if found.quota is not None and found.quota < found.cores - 0.5:
        text = f"{found.cores} visible, but a CPU quota of {found.quota:.1f} cores: additional threads are throttled"
        fix = f"launch.num_threads={max(1, int(found.quota) // 2)} for two ranks, or a larger --cpus for the container"
        checks = [warning("cores", text, fix)]
    elif found.cores < 2:
        fix = "in a job request more (--cpus-per-task)"
        checks = [note("cores", "1: two ranks share it and take twice as long", fix)]
    else:
        checks = [ok("cores", f"{found.cores}")]
    limit = found.memory_limit_bytes
    text = f"{found.memory_bytes / GIB:.1f} GiB" if limit is None else f"{limit / GIB:.1f} GiB (cgroup limit)"
    if (limit or found.memory_bytes) < _LITTLE_MEMORY:
        fix = "fewer ranks (launch.num_ranks=1), or a larger --memory (container) or --mem (Slurm)"
        checks.append(warning("memory", f"{text}: two ranks need about 2 GiB", fix))
    else:
        checks.append(ok("memory", text))
    if found.shm_bytes is None:
        text = "there is no /dev/shm: data workers and NCCL would fail"
        fix = "mount it (`mount -t tmpfs tmpfs /dev/shm`), or start the container with --ipc=host"
        checks.append(failure("shm", text, fix))
    else:
        text = f"{_size(found.shm_free_bytes)} of {_size(found.shm_bytes)} free in /dev/shm"
        checks += [*shm_checks(found.shm_free_bytes)] or [ok("shm", text)]
    limits = [*locked_memory_checks(found.locked_bytes)] if found.rdma else []
    for name, value, least, flag in (
        ("open files", found.max_files, _FEW_FILES, "ulimit -n 65536"),
        ("processes", found.max_processes, _FEW_PROCESSES, "ulimit -u 65536"),
    ):
        if value < least:
            text = f"at most {value} (ulimit): many ranks or data workers exceed it"
            limits.append(warning(name, text, f"`{flag}`, or limits.conf (administrators)"))
    shown = "unlimited" if found.max_files >= _NO_LIMIT else str(found.max_files)
    return checks + (limits or [ok("limits", f"{shown} open files")])


# Test of the start of ranks: a short communication benchmark, in child processes, so that a hang cannot block doctor.

#: On a slow network file system, the import of torch takes most of this time.
TRIAL_S = 90.0
_TRIAL = (
    *("bench_comm", "comm.operations=[all_reduce]", "comm.max_bytes=64K", "name=trial", "launch.hang_timeout_s=30"),
    "launch.max_restarts=0",
    *("launch.init_timeout_s=60", "tracking.drain_timeout_s=0", "tracking.system_interval_s=0"),
)


def trial_checks(device: Literal["cpu", "cuda"], num_ranks: int, env: Mapping[str, str]) -> list[Check]:
    """Start ranks on this machine as `hpcdist run` does, and check the sums of their all-reduces."""
    name = f"{num_ranks} rank{'s' * (num_ranks > 1)}, {'nccl' if device == 'cuda' else 'gloo'}"
    with tempfile.TemporaryDirectory(prefix="hpcdist-trial-", ignore_cleanup_errors=True) as folder:
        words = [*_TRIAL, f"launch.device={device}", f"launch.num_ranks={num_ranks}", f"runs_dir={folder}/runs"]
        command = [sys.executable, "-P", "-m", "hpcdist", "run", *words]
        began = time.monotonic()
        done = run_within(command, TRIAL_S, env={**env, "HPCDIST_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"})
        run = RunDir(Path(folder, "runs", "comm", "trial"))
        state = readable(run.read_state)
        if done.returncode == -1:  # the time limit: a slow file system, which makes no run fail
            return [warning(name, f"the ranks did not end within {TRIAL_S:g} s", "install torch on a local disk")]
        if state is None:
            return [failure(name, f"they cannot be started: {last_line(done.stderr or done.stdout)}")]
        if state.status == "finished":
            return [ok(name, f"{state.reason}, {time.monotonic() - began:.0f} s with all imports")]
        found = explain_attempt(run, run.attempt(state.attempt), state.reason) or Finding(cause=state.reason)
        return [failure(name, f"{found.cause}: {found.evidence}" if found.evidence else found.cause, found.fix)]
