"""Checks of the container runtimes on this machine."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from hpcdist.host import machine as host_machine
from hpcdist.host.check_result import Check, note, ok, warning
from hpcdist.host.time_limits import last_line, run_within

#: Time limit of each command of the checks of container runtimes.
COMMAND_TIMEOUT_S = 10.0
#: Subordinate ids that a user needs, because an image's files belong to several users.
_SUB_IDS = 65536
#: Oldest major version of a runtime that has the options which hpcdist uses.
_OLDEST = {"podman": 4, "apptainer": 1}
#: Characters of a runtime's output in a result: of an error, of the details of a problem, and of a version.
_MAX_ERROR = 200
_MAX_DETAILS = 120
_MAX_VERSION = 60

#: Runs a command on this machine, such as `run_command`.
RunCommand = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with a short time limit; the return code is negative if it gives no answer or cannot be started."""
    try:
        return run_within(command, COMMAND_TIMEOUT_S, env=os.environ)
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
        cdi_files: list[Path] = []
        for folder in ("/etc/cdi", "/var/run/cdi"):
            cdi_files += Path(folder).glob("nvidia*")
        return cls(
            uid=os.getuid(),
            user=user,
            has_gpus=has_gpus,
            subuid=host_machine.text_of(Path("/etc/subuid")),
            cdi=bool(cdi_files),
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
        for index, check in enumerate(checks):
            if check.level == "warning":
                checks[index] = replace(check, level="note")
        return checks
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
        error = _last_message(done)
        text = f"installed, but fails: {error[:_MAX_ERROR]}"
        if name == "docker" and "permission denied" in error.lower():
            fix = f"`sudo usermod -aG docker {host.user}` and log in again (equals root on this machine), or podman"
            return warning(name, text, fix)
        if name == "docker":
            return warning(name, text, "start its daemon (`sudo systemctl start docker`)")
        return warning(name, text)
    output = done.stdout + done.stderr
    match = re.search(r"(\d+)(\.\d+)+\S*", output)
    version = " ".join(output.split())[:_MAX_VERSION] or "answers"
    if match is not None:
        version = match[0].rstrip(",")
    if name in _OLDEST and match is not None and int(match[1]) < _OLDEST[name]:
        return warning(name, f"{version}; hpcdist requires {name} {_OLDEST[name]} or newer", "install a newer one")
    problem = further_problem(host, query) if further_problem is not None else None
    if problem is not None:
        return replace(problem, text=f"{version}; {problem.text}")
    if name == "apptainer" and host.has_gpus:
        version += ", GPUs by --nv"
    return ok(name, version)


def _last_message(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of the errors of a command, or else of its output."""
    return " ".join(last_line(done.stderr or done.stdout).split()) or "no error message"


def _docker_problem(host: Host, query: RunCommand) -> Check | None:
    if not host.has_gpus or host.cdi:
        return None
    runtimes = query(["docker", "info", "--format", "{{json .Runtimes}}"]).stdout
    if "nvidia" in runtimes:
        return None
    fix = "install nvidia-container-toolkit, then `sudo nvidia-ctk runtime configure --runtime=docker`"
    return warning("docker", _NO_TOOLKIT, fix)


def _apptainer_problem(host: Host, query: RunCommand) -> Check | None:
    """Return a problem of apptainer: root mounts a .sif by the kernel, a user needs namespaces and squashfuse."""
    if host.uid == 0:
        return None
    built = {}
    for line in query(["apptainer", "buildcfg"]).stdout.splitlines():
        key, _, value = line.partition("=")
        built[key] = value
    if built.get("APPTAINER_SUID_INSTALL") != "1":
        problem = _namespace_problem("apptainer", host, query)
        if problem is not None:
            return problem
    mounter = Path(built.get("LIBEXECDIR", "/")) / "apptainer/bin/squashfuse_ll"
    if host.opens_fuse and mounter.exists():
        if host.proctrack not in ("linuxproc", "pgid"):  # which signal every process of a step
            return None
        text = (
            f"proctrack/{host.proctrack} signals {mounter}, which mounts a .sif: ranks lose their files while they save"
        )
        return warning("apptainer", text, f"`container.extra_args=[--unsquash]`, {_FOLDER}")
    if not host.opens_fuse:
        return _closed_fuse("apptainer", ".sif")
    if not host.squashfuse:
        return warning("apptainer", "without squashfuse every rank unpacks the .sif at its start", _INSTALL_SQUASHFUSE)
    return None


def _enroot_problem(host: Host, query: RunCommand) -> Check | None:
    problem = _namespace_problem("enroot", host, query)
    if problem is not None:
        return problem
    if not host.opens_fuse:
        return _closed_fuse("enroot", ".sqsh")
    if not host.squashfuse:
        text = "without squashfuse it cannot start a .sqsh (pyxis needs none)"
        return warning("enroot", text, _INSTALL_SQUASHFUSE)
    return None


def _closed_fuse(name: str, form: str) -> Check:
    """Report that this user cannot mount image files of a form, `.sif` or `.sqsh`."""
    text = f"this user may not open /dev/fuse and so cannot start a {form}"
    return warning(name, text, f"`sudo chmod 0666 /dev/fuse`, {_FOLDER}")


def _podman_problem(host: Host, query: RunCommand) -> Check | None:
    num_ids = 0
    for line in host.subuid.splitlines():
        match line.split(":"):  # user, first id, number of ids
            case [user, _, count] if user in (host.user, str(host.uid)):
                num_ids += int(count)
    if host.uid and num_ids < _SUB_IDS:
        text = f"{host.user} has no {_SUB_IDS} subordinate ids in /etc/subuid, which images need"
        fix = (
            f"`sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {host.user}`,"
            " then `podman system migrate`"
        )
        return warning("podman", text, fix)
    problem = _namespace_problem("podman", host, query)
    if problem is not None:
        return problem
    if host.has_gpus and not host.cdi:
        fix = "install nvidia-container-toolkit, then `sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
        return warning("podman", _NO_TOOLKIT, fix)
    return None


def _namespace_problem(name: str, host: Host, query: RunCommand) -> Check | None:
    """Test whether the user can create user namespaces, because three settings may forbid it."""
    if host.uid == 0:
        return None
    done = query(["unshare", "--user", "--map-root-user", "true"])
    if done.returncode == 0 or "No such file" in done.stderr:
        return None
    error = _last_message(done)[:_MAX_DETAILS]
    text = f"this user cannot create user namespaces ({error}), which it requires"
    fix = (
        "an administrator can allow it: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone,"
        " kernel.apparmor_restrict_unprivileged_userns"
    )
    return warning(name, text, fix)


_FOLDER = "or use a folder: `hpcdist image convert --to dir`"
_INSTALL_SQUASHFUSE = f"install squashfuse, {_FOLDER}"
_NO_TOOLKIT = "containers get no GPUs: neither a CDI description nor NVIDIA's runtime is installed"
#: By command: name of the runtime, arguments that print its version, and a further check, which returns a problem.
_RUNTIMES: dict[str, tuple[str, list[str], Callable[[Host, RunCommand], Check | None] | None]] = {
    # docker's client answers without its daemon, so the server's version is requested.
    "docker": ("docker", ["version", "--format", "{{.Server.Version}}"], _docker_problem),
    "podman": ("podman", ["--version"], _podman_problem),
    "apptainer": ("apptainer", ["--version"], _apptainer_problem),
    "enroot": ("enroot", ["version"], _enroot_problem),
    "srun": ("pyxis", ["--help"], None),
}
