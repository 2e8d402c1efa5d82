"""Checks of container runtimes and of the programs that environments without containers need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hpcdist.environments.packed import uv_program
from hpcdist.environments.rank_environment import modules_version
from hpcdist.host.commands import last_line, run_within
from hpcdist.host.files import read_json
from hpcdist.host.machine import CAP_SYS_RESOURCE, Check, has_capability, note, ok, warning
from hpcdist.run.folder import RunDir

# Checks of the container runtimes on this machine: installed, and usable by this user.

#: Limit for each command.
TIMEOUT_S = 10.0
#: Folders with descriptions of GPUs for containers (CDI).
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
#: Subordinate ids that a user needs, because an image's files belong to several users.
_SUB_IDS = 65536

#: Values of ProctrackType with which Slurm signals every process of a step.
_SIGNALS_ALL = ("linuxproc", "pgid")
#: Oldest major version of a runtime that has the options which hpcdist uses.
_OLDEST = {"podman": 4, "apptainer": 1}

RunCommand = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with a short time limit; the return code is negative if it gives no answer or cannot be started."""
    try:
        return run_within(command, TIMEOUT_S, env={"USER": str(os.getuid()), **os.environ})  # ch-run requires USER
    except OSError as error:
        return subprocess.CompletedProcess(command, -1, "", str(error))


@dataclass(frozen=True, kw_only=True)
class Host:
    """What decides whether containers start on this machine."""

    uid: int
    user: str
    has_gpus: bool
    subuid: str = ""  #: text of /etc/subuid
    cdi: bool = False  #: whether a CDI description of NVIDIA devices exists
    lacks_capability: bool = False  #: whether root lacks CAP_SYS_RESOURCE, and APPTAINER_DROP_CAPS does not say so
    opens_fuse: bool = True  #: whether the user may open /dev/fuse
    squashfuse: bool = True  #: whether a program that mounts .sif and .sqsh files is installed
    proctrack: str = ""  #: how Slurm finds the processes of a step: the plugin's name; empty without Slurm

    @classmethod
    def inspect(cls, user: str, has_gpus: bool, proctrack: str) -> Host:
        ranges = Path("/etc/subuid")
        return cls(
            uid=os.getuid(),
            user=user,
            has_gpus=has_gpus,
            subuid=ranges.read_text() if ranges.is_file() else "",
            cdi=any(folder.is_dir() and any(folder.glob("nvidia*")) for folder in CDI_FOLDERS),
            lacks_capability=not has_capability(CAP_SYS_RESOURCE)
            and "CAP_SYS_RESOURCE" not in os.environ.get("APPTAINER_DROP_CAPS", ""),
            opens_fuse=os.access("/dev/fuse", os.R_OK | os.W_OK),
            squashfuse=any(map(shutil.which, ("squashfuse_ll", "squashfuse"))),
            proctrack=proctrack,
        )


def runtime_checks(
    host: Host,
    *,
    expected: bool = True,
    which: Callable[[str], object] = shutil.which,
    query: RunCommand = run_command,
) -> list[Check]:
    """Return one result per installed runtime, or a note if there is none and one is `expected`."""
    installed = [command for command in _RUNTIMES if which(command)]
    if "apptainer" in installed and "singularity" in installed:
        installed.remove("singularity")
    with ThreadPoolExecutor() as pool:
        results = pool.map(lambda command: _check(command, host, query), installed)
        checks = [check for check in results if check is not None]
    if any(check.level == "ok" for check in checks):
        # One working runtime suffices, so a broken one is no warning.
        return [replace(check, level="note") if check.level == "warning" else check for check in checks]
    if not checks and expected:
        fix = (
            "for containers install podman or docker; on clusters apptainer, enroot or charliecloud, which need no root"
        )
        return [note("runtimes", "none installed: runs work without a container", fix)]
    return checks


def _check(command: str, host: Host, query: RunCommand) -> Check | None:
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
    if name == "singularity":
        text = f"{version}; container.runtime=apptainer calls `apptainer`, which is not installed"
        return note(name, text, 'create a link: `ln -s "$(command -v singularity)" ~/.local/bin/apptainer`')
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
        text = "root lacks CAP_SYS_RESOURCE here, as in a container, and apptainer then starts no container"
        return (text, "`export APPTAINER_DROP_CAPS=CAP_SYS_RESOURCE`") if host.lacks_capability else None
    built = dict(line.partition("=")[::2] for line in query(["apptainer", "buildcfg"]).stdout.splitlines())
    if built.get("APPTAINER_SUID_INSTALL") != "1" and (problem := _namespace_problem(host, query)):
        return problem
    own = Path(built.get("LIBEXECDIR", "/")) / "apptainer/bin/squashfuse_ll"
    if host.opens_fuse and own.exists():
        if host.proctrack not in _SIGNALS_ALL:
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
    "ch-run": ("charliecloud", ["--version"], _namespace_problem),
    "srun": ("pyxis", ["--help"], None),
    "singularity": ("singularity", ["--version"], None),
}


# Checks of the container around this process.


def container_checks(image: Mapping[str, str], root: Path = Path("/")) -> list[Check]:
    """Return the usual mistakes in containers that are started by hand, given the result of `image_facts`."""
    build = image.get("image_build", "")[:12]
    if named := " ".join(filter(None, [image.get("image", ""), f"build {build}" if build else ""])):
        checks = [ok("image", named)]
    else:
        checks = [note("image", "not built by `hpcdist image build`")]
    if (root / "proc/driver/nvidia/version").is_file() and not any((root / "dev").glob("nvidia[0-9]*")):
        text = "the host has an NVIDIA driver, but no GPU is passed into the container: training uses the CPUs"
        fix = "docker: --gpus all; podman: --device nvidia.com/gpu=all; apptainer: --nv; or `hpcdist run … --in docker`"
        checks.append(warning("GPUs", text, fix))
    return checks


# Checks of Python environments of ranks without containers (`cluster.environment`): programs, and those of a run.

#: Versions in the record, with their names.
_VERSIONS = {"python": "Python", "torch": "torch", "cuda": "CUDA"}


def program_checks(env: Mapping[str, str]) -> list[Check]:
    """Return which kinds of environments this machine can prepare; nodes need zstd and tar, too."""
    if (uv := uv_program(env)) is None:
        checks = [note("uv", "not installed: locked projects cannot be built (kind=uv)", "`pip install uv`")]
    elif (done := run_within([uv, "--version"], TIMEOUT_S, env=env)).returncode != 0:
        checks = [note("uv", f"installed, but fails: {_last(done)}", f"`{uv} --version`")]
    else:
        version = done.stdout.removeprefix("uv ").split()[0]
        checks = [ok("uv", f"{version}: locked projects are built (kind=uv)")]
    if shutil.which("zstd", path=env.get("PATH")):
        checks.append(ok("zstd", "installed: copies of environments are packed (kind=venv, kind=uv)"))
    else:
        lack = "not installed: environments are not copied to local disks (kind=venv, kind=uv)"
        checks.append(note("zstd", lack, "install zstd here and on the nodes, or set cluster.environment.stage=false"))
    if (modules := modules_version(env)) is None:
        return [*checks, note("modules", "the command `module` is not available: kind=module cannot be used")]
    return [*checks, ok("modules", f"{modules} (kind=module, cluster.environment.modules)")]


def run_checks(run: RunDir) -> list[Check]:
    """Return the recorded environment of a run's ranks, and whether the next start can use it."""
    record = read_json(run.rank_environment)
    if record is None:
        return []
    path, modules = str(record.get("path", "")), " ".join(record.get("modules") or [])
    versions = [f"{title} {record[name]}" for name, title in _VERSIONS.items() if record.get(name)]
    parts = [f"kind={record.get('kind')}", path, f"modules {modules}" if modules else ""]
    checks = [ok("environment", ", ".join(filter(None, [*parts, *(versions or ["no node has prepared it yet"])])))]
    if path and not Path(path).exists():
        is_copy = path.endswith(".zst") or record.get("kind") == "uv"
        effect = "packs the present content of cluster.environment.path" if is_copy else "fails"
        text = f"{path} does not exist any more: the next start of the job {effect}"
        checks.append(warning("files", text, "restore it if the run must keep its versions"))
    return checks
