"""What of this machine processes may use: cores and memory of the cgroup, limits of the shell, shared memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcdist.machine.check import Check

GIB = 2**30
#: Importing torch takes half a GiB a rank; two ranks and a small model need about this.
_LITTLE_MEMORY = 2 * GIB
#: docker's default of 64 MiB is the usual cause of `bus error` in data workers and NCCL.
_LITTLE_SHM = 256 * 2**20
#: Ranks, data workers and RPC open sockets and files by the hundred.
_FEW_FILES = 1024
_FEW_PROCESSES = 1024
#: Above this a limit of a cgroup of the first version means none.
_NO_LIMIT = 2**60


@dataclass(frozen=True, kw_only=True)
class Share:
    """Cores may be fewer than the affinity says: a quota takes time away, and `nproc` does not see it."""

    cores: int
    quota: float | None  #: cores' worth of time by the cgroup's quota
    memory_bytes: int
    memory_limit_bytes: int | None  #: of the cgroup, where it is below the machine's
    shm_bytes: int | None
    shm_free_bytes: int
    max_files: int
    max_processes: int
    locked_bytes: int
    rdma: bool  #: whether there is an InfiniBand device, which has to lock memory

    @classmethod
    def inspect(cls, root: Path = Path("/")) -> Share:
        """What the kernel says; `root` is where its file systems are."""
        groups = list(_groups(root))
        limits = [value for folder in groups if (value := _memory_limit(folder)) is not None]
        quotas = [quota for folder in groups if (quota := _quota(folder)) is not None]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = min(limits, default=memory)
        shm = root / "dev/shm"
        size = os.statvfs(shm) if shm.is_dir() else None
        return cls(
            cores=len(os.sched_getaffinity(0)),
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


def _soft(what: int) -> int:
    value = resource.getrlimit(what)[0]
    return _NO_LIMIT if value == resource.RLIM_INFINITY else value


def _groups(root: Path) -> Iterator[Path]:
    """This process's cgroup folders and all above them, of either version: a limit anywhere on the way counts."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = base if not controllers else base / controllers
        own = top / path.lstrip("/")
        # In a container the path is often the host's, and the folder it names is not there.
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
    """Cores' worth of time: version 2 has both numbers in a file, version 1 a file for each."""
    try:
        time_us, period_us = (folder / "cpu.max").read_text().split()
        return int(time_us) / int(period_us)
    except (OSError, ValueError):
        pass
    time_us_1, period_us_1 = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return time_us_1 / period_us_1 if time_us_1 and period_us_1 and time_us_1 > 0 else None


def processors(share: Share) -> list[Check]:
    """Cores, memory and limits as they bear on ranks."""
    return [_cores(share), _memory(share), *_shm(share), *_limits(share)]


def _cores(share: Share) -> Check:
    if share.quota is not None and share.quota < share.cores - 0.5:
        text = f"{share.cores} visible, but a quota allows the time of {share.quota:.1f}: more threads stand still"
        fix = f"launch.num_threads={max(1, int(share.quota) // 2)} for two ranks, or a larger --cpus for the container"
        return Check(name="cores", level="warning", text=text, fix=fix)
    if share.cores < 2:
        text = "1: two ranks share it, and take twice the time"
        return Check(name="cores", level="note", text=text, fix="in a job ask for more (--cpus-per-task)")
    return Check(name="cores", level="ok", text=f"{share.cores}")


def _memory(share: Share) -> Check:
    limit = share.memory_limit_bytes
    text = f"{share.memory_bytes / GIB:.1f} GiB" if limit is None else f"{limit / GIB:.1f} GiB by a cgroup's limit"
    if (limit or share.memory_bytes) < _LITTLE_MEMORY:
        fix = "fewer ranks (launch.num_ranks=1), or a larger --memory (container) or --mem (Slurm)"
        return Check(name="memory", level="warning", text=f"{text}: two ranks need about 2 GiB", fix=fix)
    return Check(name="memory", level="ok", text=text)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def _shm(share: Share) -> list[Check]:
    if share.shm_bytes is None:
        text = "there is no /dev/shm: data workers and NCCL would fail"
        fix = "mount it (`mount -t tmpfs tmpfs /dev/shm`), or start the container with --ipc=host"
        return [Check(name="shared memory", level="failure", text=text, fix=fix)]
    text = f"{_size(share.shm_free_bytes)} of {_size(share.shm_bytes)} free in /dev/shm"
    if share.shm_free_bytes < _LITTLE_SHM:
        fix = "start the container with --ipc=host or --shm-size=8g; on a machine remove what is left in /dev/shm"
        text += ": data workers and NCCL need some hundred MiB"
        return [Check(name="shared memory", level="warning", text=text, fix=fix)]
    return [Check(name="shared memory", level="ok", text=text)]


def _limits(share: Share) -> list[Check]:
    checks = []
    for name, value, least, flag in (
        ("open files", share.max_files, _FEW_FILES, "ulimit -n 65536"),
        ("processes", share.max_processes, _FEW_PROCESSES, "ulimit -u 65536"),
    ):
        if value < least:
            text = f"at most {value} (ulimit): many ranks or data workers reach that"
            checks.append(Check(name=name, level="warning", text=text, fix=f"`{flag}`, or in limits.conf by staff"))
    if share.rdma and share.locked_bytes < _NO_LIMIT:
        text = f"at most {share.locked_bytes // 1024} KiB may be locked, and InfiniBand locks what it sends"
        fix = "`ulimit -l unlimited` (staff: limits.conf, slurmd's LimitMEMLOCK); containers: --ulimit memlock=-1"
        checks.append(Check(name="locked memory", level="warning", text=text, fix=fix))
    shown = "any number of" if share.max_files >= _NO_LIMIT else str(share.max_files)
    return checks or [Check(name="limits", level="ok", text=f"{shown} open files")]


# --- inside a container


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The container around this process."""

    image: str  #: name and build as far as they are known, empty where it is none of ours
    driver: bool  #: whether the host's kernel has NVIDIA's driver
    devices: bool  #: whether devices of it are passed
    home: str
    home_writable: bool
    has_name: bool  #: whether the user has a name here


def in_container(root: Path = Path("/")) -> bool:
    """Whether this is one, as far as runtimes leave a mark."""
    marks = (".dockerenv", "run/.containerenv", ".singularity.d", "ch/environment")
    return any((root / mark).exists() for mark in marks)


def look_inside(image: Mapping[str, str], env: Mapping[str, str], root: Path = Path("/")) -> Inside:
    import pwd

    try:
        named = bool(env.get("USER") or env.get("LOGNAME") or pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        named = False
    home = env.get("HOME", "")
    build = image.get("image_build", "")[:12]
    return Inside(
        image=" ".join(filter(None, [image.get("image", ""), f"build {build}" if build else ""])),
        driver=(root / "proc/driver/nvidia/version").is_file(),
        devices=any((root / "dev").glob("nvidia[0-9]*")),
        home=home,
        home_writable=bool(home) and os.access(home, os.W_OK),
        has_name=named,
    )


def container(inside: Inside) -> list[Check]:
    """What goes wrong in containers that are started by hand."""
    checks = [
        Check(name="image", level="ok", text=inside.image)
        if inside.image
        else Check(name="image", level="note", text="none that `hpcdist image build` has made")
    ]
    if inside.driver and not inside.devices:
        text = "the machine has NVIDIA's driver, but no GPU is passed in: training runs on the CPUs"
        fix = "docker: --gpus all; podman: --device nvidia.com/gpu=all; apptainer: --nv; or `hpcdist run … --in docker`"
        checks.append(Check(name="GPUs", level="warning", text=text, fix=fix))
    if not inside.home_writable:
        text = f"{inside.home} cannot be written: caches of libraries go there" if inside.home else "no HOME"
        checks.append(Check(name="home", level="note", text=text, fix="--env HOME=/tmp"))
    if not inside.has_name:
        text = "the user has no name in here, and some libraries ask for it"
        checks.append(Check(name="user", level="note", text=text, fix='--env USER="$USER"'))
    return checks
