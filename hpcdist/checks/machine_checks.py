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
from hpcdist.checks.site import GIB, version_of
from hpcdist.config.launch_schema import GPU_BACKENDS
from hpcdist.host import cgroups
from hpcdist.host import machine as host_machine
from hpcdist.host.check_result import Check, failure, note, ok, warning
from hpcdist.host.gpu_info import Gpu
from hpcdist.host.image_identity import install_command
from hpcdist.host.time_limits import last_line, run_within
from hpcdist.review.explain import Finding, explain_attempt
from hpcdist.review.facts import readable
from hpcdist.run.folder import RunDir

TOGETHER = "install both together from one index: `pip install --force-reinstall torch torchvision`"


def software_checks(found: Mapping[str, str], *, torch_required: bool) -> list[Check]:
    torch, cuda, driver = (found.get(name, "") for name in ("torch", "cuda", "driver"))
    checks = [
        ok("Python", f"{found['python']}, {sys.prefix}"),
        ok("hpcdist", f"{hpcdist.__version__}, {Path(hpcdist.__file__).parent}"),
    ]
    if not torch and torch_required:
        return [
            *checks,
            failure("torch", "not installed: a run on this machine would fail", install_command("train")),
        ]
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
    if problems := [*node_facts.driver_checks(found)]:
        return checks + problems
    return [*checks, ok("driver", driver + (f", supports CUDA {cuda}" if cuda else ""))] if driver else checks


def all_gpu_checks(found: Sequence[Gpu], num_visible: int, num_devices: int, driver: str) -> list[Check]:
    if not found:
        if num_devices or driver:
            text = f"NVML reports no GPU, although driver {driver} is loaded and {num_devices} device files exist"
            fix = "see the error of `nvidia-smi`; in a container pass GPUs in (docker: --gpus all, podman: --device"
            return [warning("GPUs", text, f"{fix} nvidia.com/gpu=all, apptainer: --nv)")]
        return [note("GPUs", "none: training uses the CPUs")]
    checks = []
    for gpu in found:
        text = gpu.name + (f", {gpu.total_mb / 1024:.0f} GiB" if gpu.total_mb else "")
        problems = [replace(check, text=f"{text}: {check.text}") for check in node_facts.gpu_checks(vars(gpu))]
        checks += problems or [ok(f"GPU {gpu.index}", text)]
    if num_visible < len(found):
        text = f"{num_visible} of {len(found)} according to CUDA_VISIBLE_DEVICES"
        checks.append(note("visible", text, "unset it to use all of them"))
    return checks


#: glibc queries each server twice for 5 s, forward and reverse.
GIVE_UP_S = 15.0


def host_name_checks(host: str, found: Mapping[str, Any], *, is_node: bool) -> list[Check]:
    if problems := [*node_facts.lookup_checks(host, found), *node_facts.loopback_checks(host, found)]:
        unaffected = "; runs on this machine alone are not affected"
        return problems if is_node else [replace(one, level="note", text=one.text + unaffected) for one in problems]
    back = found.get("reverse") or f"no name ({found['reverse_error']}): fast, so harmless"
    took = f"{1000 * found['forward_s']:.0f} ms, reverse {1000 * found['reverse_s']:.0f} ms"
    return [ok("names", f"{host} → {found['address']} → {back} ({took})")]


#: cgroups version 1 writes larger values for `no limit`.
_NO_LIMIT = 2**60


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
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
        memory = psutil.virtual_memory().total
        quotas, limits = [], [memory]
        for folder in cgroups.folders(root):
            # Version 2 has both numbers of the quota in one file, version 1 has a file for each.
            version_1 = (host_machine.text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            quota = (host_machine.text_of(folder / "cpu.max") or " ".join(version_1)).split()
            if len(quota) == 2 and quota[0] not in ("max", "-1"):
                quotas.append(int(quota[0]) / int(quota[1]))
            limit = cgroups.memory_limit_bytes(folder)
            limits += [] if limit is None else [limit]
        shm, infiniband = root / "dev/shm", root / "sys/class/infiniband"
        size = os.statvfs(shm) if shm.is_dir() else None
        return cls(
            cores=host_machine.num_cores(),
            quota=min(quotas, default=None),
            memory_bytes=memory,
            memory_limit_bytes=min(limits) if min(limits) < memory else None,
            shm_bytes=size.f_blocks * size.f_frsize if size else None,
            shm_free_bytes=size.f_bavail * size.f_frsize if size else 0,
            max_files=_soft(resource.RLIMIT_NOFILE),
            max_processes=_soft(resource.RLIMIT_NPROC),
            locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
            rdma=infiniband.is_dir() and any(infiniband.iterdir()),
        )


def _soft(limit: int) -> int:
    value = resource.getrlimit(limit)[0]
    return _NO_LIMIT if value == resource.RLIM_INFINITY else value


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def resource_checks(found: ResourceLimits) -> list[Check]:
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
    if (limit or found.memory_bytes) < 2 * GIB:  # importing torch takes half a GiB per rank
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
        checks += [*node_facts.shm_checks(found.shm_free_bytes)] or [ok("shm", text)]
    limits = []
    if found.rdma and found.locked_bytes < 2**30:
        text = f"only {found.locked_bytes / 1e6:,.0f} MB may be locked in memory, and InfiniBand locks its send buffers"
        fix = "`ulimit -l unlimited` (limits.conf, LimitMEMLOCK=infinity of slurmd); containers: --ulimit memlock=-1"
        limits.append(warning("locked memory", text, fix))
    for name, value, flag in (
        ("open files", found.max_files, "ulimit -n 65536"),
        ("processes", found.max_processes, "ulimit -u 65536"),
    ):
        if value < 1024:  # ranks, data workers and RPC open hundreds of sockets and files
            text = f"at most {value} (ulimit): many ranks or data workers exceed it"
            limits.append(warning(name, text, f"`{flag}`, or limits.conf (administrators)"))
    shown = "unlimited" if found.max_files >= _NO_LIMIT else str(found.max_files)
    return checks + (limits or [ok("limits", f"{shown} open files")])


#: On a slow network file system, the import of torch takes most of this time.
TRIAL_S = 90.0
_TRIAL = (
    *("bench_comm", "comm.operations=[all_reduce]", "comm.max_bytes=64K", "name=trial", "launch.hang_timeout_s=60"),
    "launch.max_restarts=0",
    *("launch.init_timeout_s=60", "tracking.drain_timeout_s=0", "tracking.system_interval_s=0"),
)


def trial_checks(device: str, num_ranks: int, env: Mapping[str, str]) -> list[Check]:
    """Start ranks as `hpcdist run` does, in child processes, so that a hang cannot block doctor."""
    name = f"{num_ranks} rank{'s' * (num_ranks > 1)}, {GPU_BACKENDS.get(device, 'gloo')}"
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


#: Limit for each command.
TIMEOUT_S = 10.0
#: Subordinate ids that a user needs, because an image's files belong to several users.
_SUB_IDS = 65536
#: Oldest major version of a runtime that has the options which hpcdist uses.
_OLDEST = {"podman": 4, "apptainer": 1}

RunCommand = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with a short time limit; the return code is negative if it gives no answer or cannot be started."""
    try:
        return run_within(command, TIMEOUT_S, env=os.environ)
    except OSError as error:
        return subprocess.CompletedProcess(command, -1, "", str(error))


@dataclass(frozen=True, kw_only=True)
class Host:
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
    name, arguments, further_problem = _RUNTIMES[command]
    done = query([command, *arguments])
    if name == "pyxis":
        return ok("pyxis", "srun has --container-image") if "--container-image" in done.stdout else None
    if done.returncode != 0:
        error, fix = _last(done), ""
        if name == "docker" and "permission denied" in error.lower():
            fix = f"`sudo usermod -aG docker {host.user}` and log in again (equals root on this machine), or podman"
        elif name == "docker":
            fix = "start its daemon (`sudo systemctl start docker`)"
        return warning(name, f"installed, but fails: {error[:200]}", fix)
    output = done.stdout + done.stderr
    found = re.search(r"(\d+)(\.\d+)+\S*", output)
    version = found[0].rstrip(",") if found else " ".join(output.split())[:60] or "answers"
    if name in _OLDEST and found is not None and int(found[1]) < _OLDEST[name]:
        return warning(name, f"{version}; hpcdist requires {name} {_OLDEST[name]} or newer", "install a newer one")
    if further_problem is not None and (problem := further_problem(host, query)) is not None:
        text, fix = problem
        return warning(name, f"{version}; {text}", fix)
    return ok(name, f"{version}{', GPUs by --nv' if name == 'apptainer' and host.has_gpus else ''}")


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(last_line(done.stderr or done.stdout).split()) or "no error message"


def _docker_problem(host: Host, query: RunCommand) -> tuple[str, str] | None:
    if not host.has_gpus or host.cdi or "nvidia" in query(["docker", "info", "--format", "{{json .Runtimes}}"]).stdout:
        return None
    return _NO_TOOLKIT, "install nvidia-container-toolkit, then `sudo nvidia-ctk runtime configure --runtime=docker`"


def _apptainer_problem(host: Host, query: RunCommand) -> tuple[str, str] | None:
    """Return a problem of apptainer: root mounts a .sif by the kernel, a user needs namespaces and squashfuse."""
    if host.uid == 0:
        return None
    built = dict(line.partition("=")[::2] for line in query(["apptainer", "buildcfg"]).stdout.splitlines())
    if built.get("APPTAINER_SUID_INSTALL") != "1" and (problem := _namespace_problem(host, query)):
        return problem
    own = Path(built.get("LIBEXECDIR", "/")) / "apptainer/bin/squashfuse_ll"
    if host.opens_fuse and own.exists():
        if host.proctrack not in ("linuxproc", "pgid"):  # which signal every process of a step
            return None
        text = f"proctrack/{host.proctrack} signals {own}, which mounts a .sif: ranks lose their files while they save"
        return text, f"`container.extra_args=[--unsquash]`, {_FOLDER}"
    return _fuse_problem(host, ".sif", "without squashfuse every rank unpacks the .sif at its start")


def _enroot_problem(host: Host, query: RunCommand) -> tuple[str, str] | None:
    without = "without squashfuse it cannot start a .sqsh (pyxis needs none)"
    return _namespace_problem(host, query) or _fuse_problem(host, ".sqsh", without)


def _fuse_problem(host: Host, form: str, without_squashfuse: str) -> tuple[str, str] | None:
    if not host.opens_fuse:
        text = f"this user may not open /dev/fuse and so cannot start a {form}"
        return text, f"`sudo chmod 0666 /dev/fuse`, {_FOLDER}"
    return None if host.squashfuse else (without_squashfuse, f"install squashfuse, {_FOLDER}")


def _podman_problem(host: Host, query: RunCommand) -> tuple[str, str] | None:
    rows = (line.split(":") for line in host.subuid.splitlines())
    num_ids = sum(int(row[2]) for row in rows if len(row) == 3 and row[0] in (host.user, str(host.uid)))
    if host.uid and num_ids < _SUB_IDS:
        text = f"{host.user} has no {_SUB_IDS} subordinate ids in /etc/subuid, which images need"
        fix = f"`sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {host.user}`"
        return text, f"{fix}, then `podman system migrate`"
    if problem := _namespace_problem(host, query):
        return problem
    if host.has_gpus and not host.cdi:
        fix = "`sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
        return _NO_TOOLKIT, f"install nvidia-container-toolkit, then {fix}"
    return None


def _namespace_problem(host: Host, query: RunCommand) -> tuple[str, str] | None:
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
_RUNTIMES: dict[str, tuple[str, list[str], Callable[[Host, RunCommand], tuple[str, str] | None] | None]] = {
    # docker's client answers without its daemon, so the server's version is requested.
    "docker": ("docker", ["version", "--format", "{{.Server.Version}}"], _docker_problem),
    "podman": ("podman", ["--version"], _podman_problem),
    "apptainer": ("apptainer", ["--version"], _apptainer_problem),
    "enroot": ("enroot", ["version"], _enroot_problem),
    "srun": ("pyxis", ["--help"], None),
}
