"""Checks of one machine that `doctor` and the preflight have in common, each with one threshold: driver, GPUs, disk,
shared memory, locked memory, name lookups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcdist.host.machine import Check, Level, driver_problem, failure, warning

MB = 1e6
#: Assumed need of a checkpoint before the first one is saved.
LITTLE_DISK_BYTES, NO_DISK_BYTES = 1e9, 100 * MB
FEW_FILES, NO_FILES = 1000, 50
#: docker's default of 64 MiB is the usual cause of `bus error` in data workers and NCCL.
LITTLE_SHM_BYTES = 2**28
#: NCCL locks its send buffers for InfiniBand.
LOCKED_BYTES = 2**30
#: The driver itself uses a few hundred MB of each GPU, and a display no more than that.
USED_GPU_MB = 1024
#: Each rank pays the time of a lookup at its start.
SLOW_LOOKUP_S = 1.0
#: Above this, times of logs, metrics and files of two machines cannot be compared.
SKEW_S = 2.0


def driver_checks(versions: Mapping[str, str]) -> Iterator[Check]:
    """Check whether the driver supports the CUDA version of torch; nothing is reported if one of them is unknown."""
    if old := driver_problem(versions.get("cuda", ""), versions.get("driver", "")):
        fix = (
            "update the driver, or use a torch (or an image) for an older CUDA: https://pytorch.org/get-started/locally"
        )
        yield failure("driver", f"torch {versions.get('torch', '')} needs {old}", fix)


def gpu_checks(gpu: Mapping[str, Any]) -> Iterator[Check]:
    """Report memory errors, throttling and use of a GPU, given the fields of a `Gpu`."""
    name, used_mb, total_mb = f"GPU {gpu['index']}", gpu["used_mb"] or 0, gpu["total_mb"] or 0
    if gpu["uncorrected_errors"]:
        fix = f"an administrator drains the node and resets it (`nvidia-smi --gpu-reset -i {gpu['index']}`); if errors"
        fix += " return, the card is defective: exclude it by CUDA_VISIBLE_DEVICES"
        yield failure(
            name, f"has {gpu['uncorrected_errors']} uncorrected memory errors since its driver was loaded", fix
        )
    if gpu["throttled"]:
        yield warning(
            name, f"is throttled: {', '.join(gpu['throttled'])}", "check cooling and power, or exclude the node"
        )
    if used_mb > USED_GPU_MB:
        who = f" by process {', '.join(map(str, gpu['pids']))}" if gpu["pids"] else ""
        level: Level = "failure" if used_mb * 2 > total_mb > 0 else "warning"
        fix = "find their owner (`nvidia-smi`; `ps -fp PID`), and end leftover processes"
        yield Check(name=name, level=level, text=f"has {used_mb:,} of {total_mb:,} MB in use{who}", fix=fix)


def space_checks(disk: Mapping[str, Any], checkpoint_bytes: int | None = None) -> Iterator[Check]:
    """Check the free space and the free inodes of the file system of checkpoints.

    Args:
        disk: result of `storage.describe`, without an error.
        checkpoint_bytes: size of the last checkpoint, None without one.
    """
    where, size = disk["folder"], checkpoint_bytes
    fix = f"remove old runs or checkpoints (`df -h {where}`, `hpcdist runs`), or set runs_dir to another file system"
    if disk["free"] < (2 * size if size else LITTLE_DISK_BYTES):
        need = f"the last checkpoint had {size / MB:,.0f} MB" if size else "possibly too little for a checkpoint"
        level: Level = "failure" if disk["free"] < (size or NO_DISK_BYTES) else "warning"
        yield Check(name="disk", level=level, text=f"{disk['free'] / MB:,.0f} MB are free in {where}, {need}", fix=fix)
    if disk.get("free_files", FEW_FILES) < FEW_FILES:
        level = "failure" if disk["free_files"] < NO_FILES else "warning"
        text = f"{disk['free_files']:,} more files can be created in {where} (`df -i {where}`)"
        yield Check(name="disk", level=level, text=text, fix=fix)


def shm_checks(free_bytes: int) -> Iterator[Check]:
    """Check the free space of /dev/shm, through which data workers and NCCL pass tensors."""
    if free_bytes < LITTLE_SHM_BYTES:
        text = f"{free_bytes / 2**20:,.0f} MiB are free in /dev/shm; data workers and NCCL pass tensors through it"
        fix = "start the container with --shm-size=8g or --ipc=host, or remove leftover files there"
        yield warning("shm", text, fix)


def locked_memory_checks(limit_bytes: int | None) -> Iterator[Check]:
    """Check the limit of locked memory on a machine with InfiniBand; None is no limit."""
    if limit_bytes is not None and limit_bytes < LOCKED_BYTES:
        text = f"only {limit_bytes / MB:,.0f} MB may be locked in memory, and InfiniBand locks its send buffers"
        fix = "`ulimit -l unlimited` (limits.conf, LimitMEMLOCK=infinity of slurmd); containers: --ulimit memlock=-1"
        yield warning("locked memory", text, fix)


def lookup_checks(called: str, look: Mapping[str, Any]) -> Iterator[Check]:
    """Report a name that cannot be looked up, or only slowly.

    Args:
        called: the subject of the sentence, such as `its own name` or `the name n1`.
        look: its result of `machine.Lookups`.
    """
    if "error" in look:
        fix = "add it to the DNS, or to /etc/hosts on all machines of a run"
        yield failure("names", f"{called} cannot be looked up ({look['error']})", fix)
        return
    if "late" in look:
        text = f"looking up {called}, or its address, took more than {look['late']:g} s"
    elif look["forward_s"] > SLOW_LOOKUP_S:
        text = f"looking up {called} took {look['forward_s']:.1f} s"
    elif look.get("reverse_s", 0) > SLOW_LOOKUP_S:
        text = f"the reverse lookup of {look['address']} took {look['reverse_s']:.1f} s"
    else:
        return
    fix = "add the nodes to /etc/hosts, or set cluster.env.RES_OPTIONS='timeout:1 attempts:1'"
    yield warning("names", f"{text}; torch repeats the lookup when ranks start", fix)


def loopback_checks(called: str, look: Mapping[str, Any]) -> Iterator[Check]:
    """Report a name for which this machine has an address that others cannot reach."""
    if look.get("address", "").startswith("127."):
        text = f"{called} resolves to {look['address']}, which other nodes cannot reach"
        yield failure("names", text, "set its reachable address in /etc/hosts (Debian's installer writes 127.0.1.1)")
