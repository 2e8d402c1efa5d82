"""Checks of this machine: software, GPUs, host name, resource limits, a test with ranks, and containers."""

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import psutil

import hpcdist
from hpcdist.checks import node_facts
from hpcdist.checks.node_facts import GIB
from hpcdist.config.launch_schema import GPU_BACKENDS
from hpcdist.errors import plural
from hpcdist.host import cgroups
from hpcdist.host import machine as host_machine
from hpcdist.host.check_result import Check, failure, note, ok, warning
from hpcdist.host.gpu_info import Gpu
from hpcdist.host.image_identity import install_command
from hpcdist.host.time_limits import last_line, run_within
from hpcdist.host.versions import version_of
from hpcdist.review.explain import Finding, explain_attempt
from hpcdist.review.facts import readable
from hpcdist.run.folder import RunDir

TOGETHER = "install both together from one index: `pip install --force-reinstall torch torchvision`"


def software_checks(found: Mapping[str, str], *, torch_required: bool) -> list[Check]:
    """Check the installed software.

    Args:
        found: versions as `versions.versions` returns them.
        torch_required: whether ranks run on this machine with this Python.
    """
    torch, cuda, driver = (found.get(name, "") for name in ("torch", "cuda", "driver"))
    checks = [
        ok("Python", f"{found['python']}, {sys.prefix}"),
        ok("hpcdist", f"{hpcdist.__version__}, {Path(hpcdist.__file__).parent}"),
    ]
    if not torch and torch_required:
        text = "not installed: a run on this machine would fail"
        return [*checks, failure("torch", text, install_command("train"))]
    if not torch:
        text = "not installed: ranks need container.image or cluster.environment, as they use this Python otherwise"
        return [*checks, note("torch", text, install_command("train"))]
    vision = version_of("torchvision")
    pinned = _torch_of_torchvision() if vision else ""
    if pinned and pinned != torch.partition("+")[0]:
        text = f"{torch} beside a torchvision {vision} built for {pinned}, which cannot be imported"
        checks.append(failure("torch", text, TOGETHER))
    elif driver and not cuda:
        text = f"{torch} is built without CUDA, and this machine has GPUs: training uses the CPUs"
        checks.append(warning("torch", text, f"install a build with CUDA; {TOGETHER}"))
    else:
        build = f"for CUDA {cuda}" if cuda else "without CUDA"
        checks.append(ok("torch", f"{torch}, built {build}"))
    if not vision:
        checks.append(warning("torchvision", "not installed: image trainers need it", TOGETHER))
    problems = list(node_facts.driver_checks(found))
    if problems:
        checks += problems
    elif driver and cuda:
        checks.append(ok("driver", f"{driver}, supports CUDA {cuda}"))
    elif driver:
        checks.append(ok("driver", driver))
    return checks


def _torch_of_torchvision() -> str:
    """Return the version of torch that the installed torchvision requires, which it pins exactly; empty if unknown."""
    for requirement in metadata.requires("torchvision") or ():
        match = re.match(r"torch\s*\(?==\s*([\w.]+)", requirement)
        if match:
            return match[1]
    return ""


def all_gpu_checks(found: Sequence[Gpu], num_visible: int, num_devices: int, driver: str) -> list[Check]:
    """Check all GPUs of this machine.

    Args:
        num_visible: number of GPUs that CUDA_VISIBLE_DEVICES selects.
        num_devices: number of GPUs with a device file.
        driver: version of the driver; empty without one.
    """
    if not found:
        if num_devices or driver:
            text = f"NVML reports no GPU, although driver {driver} is loaded and {num_devices} device files exist"
            fix = "see the error of `nvidia-smi`; in a container pass GPUs in (docker: --gpus all, podman: --device"
            return [warning("GPUs", text, f"{fix} nvidia.com/gpu=all, apptainer: --nv)")]
        return [note("GPUs", "none: training uses the CPUs")]
    checks = []
    for gpu in found:
        text = gpu.name
        if gpu.total_mb:
            text += f", {gpu.total_mb / 1024:.0f} GiB"
        problems = [replace(check, text=f"{text}: {check.text}") for check in node_facts.gpu_checks(vars(gpu))]
        checks += problems or [ok(f"GPU {gpu.index}", text)]
    if num_visible < len(found):
        text = f"{num_visible} of {len(found)} according to CUDA_VISIBLE_DEVICES"
        checks.append(note("visible", text, "unset it to use all of them"))
    return checks


#: Time limit of a lookup of names. glibc waits 5 s for each server and asks it twice.
GIVE_UP_S = 15.0


def host_name_checks(host: str, found: Mapping[str, Any], *, is_node: bool) -> list[Check]:
    """Check the lookup of this machine's name.

    Args:
        found: result of `look_up`.
        is_node: whether the machine is a node of a cluster, whose name other nodes look up.
    """
    problems = [*node_facts.lookup_checks(host, found), *node_facts.loopback_checks(host, found)]
    if problems and is_node:
        return problems
    if problems:
        unaffected = "; runs on this machine alone are not affected"
        return [replace(problem, level="note", text=problem.text + unaffected) for problem in problems]
    back = found.get("reverse") or f"no name ({found['reverse_error']}): fast, so harmless"
    took = f"{1000 * found['forward_s']:.0f} ms, reverse {1000 * found['reverse_s']:.0f} ms"
    return [ok("names", f"{host} → {found['address']} → {back} ({took})")]


#: Stands for `unlimited` in the numbers of `ResourceLimits`.
_NO_LIMIT = 2**60
#: A quota that lacks less than this to the number of cores throttles little.
_QUOTA_TOLERANCE = 0.5
#: Number of ranks of a small run, such as the trial.
_FEW_RANKS = 2
#: The import of torch takes half a GiB in each rank.
_MIN_MEMORY_BYTES = 2 * GIB
_MIN_LOCKED_BYTES = GIB
#: Ranks, data workers and RPC open hundreds of sockets and files.
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
        """Return the limits of this process on this machine, whose root file system is `root`."""
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
        shm, infiniband = root / "dev/shm", root / "sys/class/infiniband"
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
        case [quota, period] if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return None


def _soft(limit: int) -> int:
    """Return the soft limit of a resource of this process."""
    value = resource.getrlimit(limit)[0]
    if value == resource.RLIM_INFINITY:
        return _NO_LIMIT
    return value


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"


def resource_checks(found: ResourceLimits) -> list[Check]:
    """Check whether cores, memory, /dev/shm and limits suffice for a few ranks."""
    return [_cores_check(found), _memory_check(found), *_shm_checks(found), *_limit_checks(found)]


def _cores_check(found: ResourceLimits) -> Check:
    if found.quota is not None and found.quota < found.cores - _QUOTA_TOLERANCE:
        num_threads = max(1, int(found.quota) // _FEW_RANKS)
        text = f"{found.cores} visible, but a CPU quota of {found.quota:.1f} cores: additional threads are throttled"
        fix = f"launch.num_threads={num_threads} for two ranks, or a larger --cpus for the container"
        return warning("cores", text, fix)
    if found.cores < _FEW_RANKS:
        fix = "in a job request more (--cpus-per-task)"
        return note("cores", "1: two ranks share it and take twice as long", fix)
    return ok("cores", f"{found.cores}")


def _memory_check(found: ResourceLimits) -> Check:
    num_bytes = found.memory_bytes
    text = f"{num_bytes / GIB:.1f} GiB"
    if found.memory_limit_bytes is not None:
        num_bytes = found.memory_limit_bytes
        text = f"{num_bytes / GIB:.1f} GiB (cgroup limit)"
    if num_bytes < _MIN_MEMORY_BYTES:
        fix = "fewer ranks (launch.num_ranks=1), or a larger --memory (container) or --mem (Slurm)"
        return warning("memory", f"{text}: two ranks need about 2 GiB", fix)
    return ok("memory", text)


def _shm_checks(found: ResourceLimits) -> list[Check]:
    if found.shm_bytes is None:
        text = "there is no /dev/shm: data workers and NCCL would fail"
        fix = "mount it (`mount -t tmpfs tmpfs /dev/shm`), or start the container with --ipc=host"
        return [failure("shm", text, fix)]
    problems = list(node_facts.shm_checks(found.shm_free_bytes))
    if problems:
        return problems
    return [ok("shm", f"{_size(found.shm_free_bytes)} of {_size(found.shm_bytes)} free in /dev/shm")]


def _limit_checks(found: ResourceLimits) -> list[Check]:
    problems = []
    if found.rdma and found.locked_bytes < _MIN_LOCKED_BYTES:
        text = f"only {found.locked_bytes / 1e6:,.0f} MB may be locked in memory, and InfiniBand locks its send buffers"
        fix = "`ulimit -l unlimited` (limits.conf, LimitMEMLOCK=infinity of slurmd); containers: --ulimit memlock=-1"
        problems.append(warning("locked memory", text, fix))
    for name, value, flag in (
        ("open files", found.max_files, "ulimit -n 65536"),
        ("processes", found.max_processes, "ulimit -u 65536"),
    ):
        if value < _MIN_FILES:
            text = f"at most {value} (ulimit): many ranks or data workers exceed it"
            problems.append(warning(name, text, f"`{flag}`, or limits.conf (administrators)"))
    if problems:
        return problems
    shown = "unlimited" if found.max_files >= _NO_LIMIT else str(found.max_files)
    return [ok("limits", f"{shown} open files")]


#: On a slow network file system, the import of torch takes most of this time.
TRIAL_S = 90.0
_TRIAL = (
    *("bench_comm", "comm.operations=[all_reduce]", "comm.max_bytes=64K", "name=trial", "launch.hang_timeout_s=60"),
    "launch.max_restarts=0",
    *("launch.init_timeout_s=60", "tracking.drain_timeout_s=0", "tracking.system_interval_s=0"),
)


def trial_checks(device: str, num_ranks: int, env: Mapping[str, str]) -> list[Check]:
    """Start ranks with `hpcdist run`, in child processes, so that a hang cannot block doctor."""
    backend = GPU_BACKENDS.get(device, "gloo")
    name = f"{plural(num_ranks, 'rank')}, {backend}"
    with tempfile.TemporaryDirectory(prefix="hpcdist-trial-", ignore_cleanup_errors=True) as folder:
        words = [*_TRIAL, f"launch.device={device}", f"launch.num_ranks={num_ranks}", f"runs_dir={folder}/runs"]
        command = [sys.executable, "-P", "-m", "hpcdist", "run", *words]
        began = time.monotonic()
        done = run_within(command, TRIAL_S, env={**env, "HPCDIST_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"})
        run = RunDir(Path(folder, "runs", "comm", "trial"))
        state = readable(run.read_state)
        # The code of `run_within` after the time limit. A slow file system makes no run fail.
        if done.returncode == -1:
            return [warning(name, f"the ranks did not end within {TRIAL_S:g} s", "install torch on a local disk")]
        if state is None:
            return [failure(name, f"they cannot be started: {last_line(done.stderr or done.stdout)}")]
        if state.status == "finished":
            return [ok(name, f"{state.reason}, {time.monotonic() - began:.0f} s with all imports")]
        finding = explain_attempt(run, run.attempt(state.attempt), state.reason) or Finding(cause=state.reason)
        text = finding.cause
        if finding.evidence:
            text += f": {finding.evidence}"
        return [failure(name, text, finding.fix)]


#: Time limit of each command of the checks of container runtimes.
TIMEOUT_S = 10.0
#: Subordinate ids that a user needs, because an image's files belong to several users.
_SUB_IDS = 65536
#: Oldest major version of a runtime that has the options which hpcdist uses.
_OLDEST = {"podman": 4, "apptainer": 1}

#: A problem of a runtime, and its fix.
_Problem = tuple[str, str]
RunCommand = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with a short time limit; the return code is negative if it gives no answer or cannot be started."""
    try:
        return run_within(command, TIMEOUT_S, env=os.environ)
    except OSError as error:
        return subprocess.CompletedProcess(command, -1, "", str(error))


@dataclass(frozen=True, kw_only=True)
class Host:
    """The facts of this machine and user on which container runtimes depend."""

    uid: int
    user: str
    has_gpus: bool
    subuid: str = ""  #: text of /etc/subuid
    cdi: bool = False  #: whether a CDI description of NVIDIA devices exists
    opens_fuse: bool = True  #: whether the user may open /dev/fuse
    squashfuse: bool = True  #: whether a program that mounts .sif and .sqsh files is installed
    proctrack: str = ""  #: how Slurm finds the processes of a step: the plugin's name; empty without Slurm

    @classmethod
    def inspect(cls, user: str, has_gpus: bool, proctrack: str) -> Self:
        """Return the facts of this machine."""
        return cls(
            uid=os.getuid(),
            user=user,
            has_gpus=has_gpus,
            subuid=host_machine.text_of(Path("/etc/subuid")),
            cdi=any(any(Path(folder).glob("nvidia*")) for folder in ("/etc/cdi", "/var/run/cdi")),
            opens_fuse=os.access("/dev/fuse", os.R_OK | os.W_OK),
            squashfuse=any(map(shutil.which, ("squashfuse_ll", "squashfuse"))),
            proctrack=proctrack,
        )


def runtime_checks(
    host: Host, *, expected: bool = True, which: Callable[[str], object] = shutil.which, query: RunCommand = run_command
) -> list[Check]:
    """Return one result per installed runtime, or a note if there is none and one is `expected`."""
    installed = [command for command in _RUNTIMES if which(command)]
    with ThreadPoolExecutor() as pool:
        results = pool.map(lambda command: _check_runtime(command, host, query), installed)
        checks = [check for check in results if check is not None]
    if any(check.level == "ok" for check in checks):
        # One working runtime suffices, so a broken one is no warning.
        return [replace(check, level="note") if check.level == "warning" else check for check in checks]
    if not checks and expected:
        fix = "install podman or docker; on clusters apptainer or enroot, which need no root"
        return [note("runtimes", "none installed: runs work without a container", fix)]
    return checks


def _check_runtime(command: str, host: Host, query: RunCommand) -> Check | None:
    """Check one runtime; None if the command exists but the runtime, a plugin of it, does not."""
    name, arguments, further_problem = _RUNTIMES[command]
    done = query([command, *arguments])
    if name == "pyxis":
        if "--container-image" not in done.stdout:
            return None
        return ok("pyxis", "srun has --container-image")
    if done.returncode != 0:
        error, fix = _last(done), ""
        if name == "docker" and "permission denied" in error.lower():
            fix = f"`sudo usermod -aG docker {host.user}` and log in again (equals root on this machine), or podman"
        elif name == "docker":
            fix = "start its daemon (`sudo systemctl start docker`)"
        return warning(name, f"installed, but fails: {error[:200]}", fix)
    output = done.stdout + done.stderr
    match = re.search(r"(\d+)(\.\d+)+\S*", output)
    version = match[0].rstrip(",") if match else " ".join(output.split())[:60] or "answers"
    if name in _OLDEST and match is not None and int(match[1]) < _OLDEST[name]:
        return warning(name, f"{version}; hpcdist requires {name} {_OLDEST[name]} or newer", "install a newer one")
    problem = further_problem(host, query) if further_problem is not None else None
    if problem is not None:
        text, fix = problem
        return warning(name, f"{version}; {text}", fix)
    if name == "apptainer" and host.has_gpus:
        version += ", GPUs by --nv"
    return ok(name, version)


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(last_line(done.stderr or done.stdout).split()) or "no error message"


def _docker_problem(host: Host, query: RunCommand) -> _Problem | None:
    if not host.has_gpus or host.cdi:
        return None
    runtimes = query(["docker", "info", "--format", "{{json .Runtimes}}"]).stdout
    if "nvidia" in runtimes:
        return None
    return _NO_TOOLKIT, "install nvidia-container-toolkit, then `sudo nvidia-ctk runtime configure --runtime=docker`"


def _apptainer_problem(host: Host, query: RunCommand) -> _Problem | None:
    """Return a problem of apptainer: root mounts a .sif by the kernel, a user needs namespaces and squashfuse."""
    if host.uid == 0:
        return None
    built = dict(line.partition("=")[::2] for line in query(["apptainer", "buildcfg"]).stdout.splitlines())
    if built.get("APPTAINER_SUID_INSTALL") != "1":
        problem = _namespace_problem(host, query)
        if problem is not None:
            return problem
    mounter = Path(built.get("LIBEXECDIR", "/")) / "apptainer/bin/squashfuse_ll"
    if host.opens_fuse and mounter.exists():
        if host.proctrack not in ("linuxproc", "pgid"):  # which signal every process of a step
            return None
        where = f"proctrack/{host.proctrack} signals {mounter}, which mounts a .sif"
        text = f"{where}: ranks lose their files while they save"
        return text, f"`container.extra_args=[--unsquash]`, {_FOLDER}"
    return _fuse_problem(host, ".sif", "without squashfuse every rank unpacks the .sif at its start")


def _enroot_problem(host: Host, query: RunCommand) -> _Problem | None:
    without = "without squashfuse it cannot start a .sqsh (pyxis needs none)"
    return _namespace_problem(host, query) or _fuse_problem(host, ".sqsh", without)


def _fuse_problem(host: Host, form: str, without_squashfuse: str) -> _Problem | None:
    """Return why this user cannot mount image files of a form, `.sif` or `.sqsh`."""
    if not host.opens_fuse:
        text = f"this user may not open /dev/fuse and so cannot start a {form}"
        return text, f"`sudo chmod 0666 /dev/fuse`, {_FOLDER}"
    if not host.squashfuse:
        return without_squashfuse, f"install squashfuse, {_FOLDER}"
    return None


def _podman_problem(host: Host, query: RunCommand) -> _Problem | None:
    num_ids = 0
    for line in host.subuid.splitlines():
        match line.split(":"):
            case [user, _, count] if user in (host.user, str(host.uid)):
                num_ids += int(count)
    if host.uid and num_ids < _SUB_IDS:
        text = f"{host.user} has no {_SUB_IDS} subordinate ids in /etc/subuid, which images need"
        fix = f"`sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {host.user}`"
        return text, f"{fix}, then `podman system migrate`"
    problem = _namespace_problem(host, query)
    if problem is not None:
        return problem
    if host.has_gpus and not host.cdi:
        fix = "`sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
        return _NO_TOOLKIT, f"install nvidia-container-toolkit, then {fix}"
    return None


def _namespace_problem(host: Host, query: RunCommand) -> _Problem | None:
    """Test whether the user can create user namespaces, because three settings may forbid it."""
    if host.uid == 0:
        return None
    done = query(["unshare", "--user", "--map-root-user", "true"])
    if done.returncode == 0 or "No such file" in done.stderr:
        return None
    return (
        f"this user cannot create user namespaces ({_last(done)[:120]}), which it requires",
        "an administrator can allow it: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone,"
        " kernel.apparmor_restrict_unprivileged_userns",
    )


_FOLDER = "or use a folder: `hpcdist image convert --to dir`"
_NO_TOOLKIT = "containers get no GPUs: neither a CDI description nor NVIDIA's runtime is installed"
#: By command: name of the runtime, arguments that print its version, and the search for a problem with its fix.
_RUNTIMES: dict[str, tuple[str, list[str], Callable[[Host, RunCommand], _Problem | None] | None]] = {
    # docker's client answers without its daemon, so the server's version is requested.
    "docker": ("docker", ["version", "--format", "{{.Server.Version}}"], _docker_problem),
    "podman": ("podman", ["--version"], _podman_problem),
    "apptainer": ("apptainer", ["--version"], _apptainer_problem),
    "enroot": ("enroot", ["version"], _enroot_problem),
    "srun": ("pyxis", ["--help"], None),
}
