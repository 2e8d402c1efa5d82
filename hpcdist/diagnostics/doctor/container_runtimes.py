"""Checks of the container runtimes on this machine: installed, and usable by this user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hpcdist.machine.check import Check

#: Limit for each command.
TIMEOUT_S = 10.0
#: Folders with descriptions of GPUs for containers (CDI).
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
#: Subordinate ids that a user needs, because an image's files belong to several users.
_SUB_IDS = 65536


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """The result of a command."""

    code: int | None  #: None if it did not answer in time or could not be started
    out: str = ""
    err: str = ""

    @property
    def last(self) -> str:
        """The last line of its error output."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return " ".join(lines[-1].split()) if lines else "no error message"


RunCommand = Callable[[Sequence[str]], CommandResult]


def run_command(command: Sequence[str]) -> CommandResult:
    """Run a command with a short time limit."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            # ch-run requires the variable.
            env={"USER": str(os.getuid()), **os.environ},
        )
    except subprocess.TimeoutExpired:
        return CommandResult(code=None, err=f"no answer within {TIMEOUT_S:g} s")
    except OSError as error:
        return CommandResult(code=None, err=str(error))
    return CommandResult(code=done.returncode, out=done.stdout, err=done.stderr)


@dataclass(frozen=True, kw_only=True)
class Host:
    """Facts of this machine that decide whether containers start."""

    uid: int
    user: str
    has_gpus: bool
    subuid: str = ""  #: text of /etc/subuid
    cdi: bool = False  #: whether a CDI description of NVIDIA devices exists

    @classmethod
    def inspect(cls, user: str, has_gpus: bool) -> Host:
        ranges = Path("/etc/subuid")
        return cls(
            uid=os.getuid(),
            user=user,
            has_gpus=has_gpus,
            subuid=ranges.read_text() if ranges.is_file() else "",
            cdi=any(folder.is_dir() and any(folder.glob("nvidia*")) for folder in CDI_FOLDERS),
        )


def runtime_checks(
    host: Host,
    *,
    expected: bool = True,
    which: Callable[[str], object] = shutil.which,
    ask: RunCommand = run_command,
) -> list[Check]:
    """Return one result per installed runtime, or a note if there is none and one is `expected`."""
    by_command: dict[str, Callable[[Host, RunCommand], Check]] = {
        "docker": _docker,
        "podman": _podman,
        "apptainer": _apptainer,
        "enroot": _enroot,
        "ch-run": _charliecloud,
        "srun": _pyxis,
    }
    installed = [check for command, check in by_command.items() if which(command)]
    if which("singularity") and not which("apptainer"):
        installed.append(_singularity)
    with ThreadPoolExecutor() as pool:
        checks = [check for check in pool.map(lambda check: check(host, ask), installed) if check.text]
    if any(check.level == "ok" for check in checks):
        # One working runtime suffices, so a broken one is no warning.
        return [replace(check, level="note") if check.level == "warning" else check for check in checks]
    if not checks and expected:
        text = "none installed: runs work without a container"
        fix = (
            "for containers install podman or docker; on clusters apptainer, enroot or charliecloud, which need no root"
        )
        return [Check(name="runtimes", level="note", text=text, fix=fix)]
    return checks


def _docker(host: Host, ask: RunCommand) -> Check:
    # docker's client answers without its daemon, so the server's version is requested.
    done = ask(["docker", "version", "--format", "{{.Server.Version}}"])
    if done.code != 0:
        fix = "start its daemon (`sudo systemctl start docker`)"
        if "permission denied" in done.last.lower():
            fix = f"`sudo usermod -aG docker {host.user}` and log in again (equals root on this machine), or podman"
        return Check(name="docker", level="warning", text=f"installed, but fails: {done.last[:200]}", fix=fix)
    text = f"{done.out.strip() or 'answers'}"
    if host.has_gpus and not host.cdi:
        known = ask(["docker", "info", "--format", "{{json .Runtimes}}"])
        if "nvidia" not in known.out:
            return _no_toolkit("docker", text, "`sudo nvidia-ctk runtime configure --runtime=docker`")
    return Check(name="docker", level="ok", text=text)


def _podman(host: Host, ask: RunCommand) -> Check:
    done = ask(["podman", "--version"])
    if done.code != 0:
        return Check(name="podman", level="warning", text=f"installed, but fails: {done.last[:200]}")
    text = _version(done.out)
    if host.uid:
        if _sub_ids(host) < _SUB_IDS:
            return Check(
                name="podman",
                level="warning",
                text=f"{text}; {host.user} has no {_SUB_IDS} subordinate ids in /etc/subuid, which images need",
                fix=f"`sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {host.user}`,"
                " then `podman system migrate`",
            )
        if problem := _no_user_namespaces("podman", text, ask):
            return problem
    if host.has_gpus and not host.cdi:
        return _no_toolkit("podman", text, "`sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`")
    return Check(name="podman", level="ok", text=text)


def _no_toolkit(name: str, text: str, fix: str) -> Check:
    return Check(
        name=name,
        level="warning",
        text=f"{text}; containers get no GPUs: neither a CDI description nor NVIDIA's runtime is installed",
        fix=f"install nvidia-container-toolkit, then {fix}",
    )


def _sub_ids(host: Host) -> int:
    """Return the number of subordinate ids of this user."""
    rows = (line.split(":") for line in host.subuid.splitlines())
    return sum(int(row[2]) for row in rows if len(row) == 3 and row[0] in (host.user, str(host.uid)))


def _no_user_namespaces(name: str, text: str, ask: RunCommand) -> Check | None:
    """Return a warning if the user cannot create user namespaces; three settings may forbid it, so it is tested."""
    done = ask(["unshare", "--user", "--map-root-user", "true"])
    if done.code == 0 or "No such file" in done.err:
        return None
    return Check(
        name=name,
        level="warning",
        text=f"{text}; this user cannot create user namespaces ({done.last[:120]}), which it requires",
        fix="an administrator can allow it: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone,"
        " kernel.apparmor_restrict_unprivileged_userns",
    )


def _apptainer(host: Host, ask: RunCommand, name: str = "apptainer") -> Check:
    done = ask([name, "--version"])
    if done.code != 0:
        return Check(name=name, level="warning", text=f"installed, but fails: {done.last[:200]}")
    text = _version(done.out)
    return Check(name=name, level="ok", text=text + (", GPUs by --nv" if host.has_gpus else ""))


def _singularity(host: Host, ask: RunCommand) -> Check:
    found = _apptainer(host, ask, "singularity")
    text = f"{found.text}; container.runtime=apptainer calls `apptainer`, which is not installed"
    fix = 'create a link: `ln -s "$(command -v singularity)" ~/.local/bin/apptainer`'
    return Check(name="singularity", level="note", text=text, fix=fix)


def _enroot(host: Host, ask: RunCommand) -> Check:
    done = ask(["enroot", "version"])
    if done.code != 0:
        return Check(name="enroot", level="warning", text=f"installed, but fails: {done.last[:200]}")
    text = _version(done.out)
    return (_no_user_namespaces("enroot", text, ask) if host.uid else None) or Check(
        name="enroot", level="ok", text=text
    )


def _charliecloud(host: Host, ask: RunCommand) -> Check:
    done = ask(["ch-run", "--version"])
    if done.code != 0:
        return Check(name="charliecloud", level="warning", text=f"installed, but fails: {done.last[:200]}")
    text = _version(done.out + done.err)
    return (_no_user_namespaces("charliecloud", text, ask) if host.uid else None) or Check(
        name="charliecloud", level="ok", text=text
    )


def _pyxis(host: Host, ask: RunCommand) -> Check:
    """Check for pyxis, a plugin of Slurm; the result has no text without it."""
    installed = "--container-image" in ask(["srun", "--help"]).out
    return Check(name="pyxis", level="ok", text="srun has --container-image" if installed else "")


def _version(text: str) -> str:
    """Return the version in the output of `--version`."""
    found = re.search(r"\d+(\.\d+)+\S*", text)
    return found[0].rstrip(",") if found else " ".join(text.split())[:60]
