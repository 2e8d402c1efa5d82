"""Container runtimes on this machine: which are there, and whether this user can start anything with them."""

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

#: A daemon or a store that takes longer is of no use.
ANSWER_S = 10.0
#: Where descriptions of GPUs for containers (CDI) are looked for.
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
#: How many ids a user's containers need: an image's files belong to more than one user.
_SUB_IDS = 65536


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a command has answered."""

    code: int | None  #: None where it gave no answer in time, or could not be started
    out: str = ""
    err: str = ""

    @property
    def last(self) -> str:
        """The last line of its complaint."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return " ".join(lines[-1].split()) if lines else "nothing more"


Ask = Callable[[Sequence[str]], Said]


def ask(command: Sequence[str]) -> Said:
    """Run a command that should answer at once."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
            # charliecloud starts nothing without it.
            env={"USER": str(os.getuid()), **os.environ},
        )
    except subprocess.TimeoutExpired:
        return Said(code=None, err=f"no answer within {ANSWER_S:g} s")
    except OSError as error:
        return Said(code=None, err=str(error))
    return Said(code=done.returncode, out=done.stdout, err=done.stderr)


@dataclass(frozen=True, kw_only=True)
class Host:
    """Of this machine, what decides whether containers start."""

    uid: int
    user: str
    has_gpus: bool
    subuid: str = ""  #: text of /etc/subuid
    cdi: bool = False  #: whether some CDI description of NVIDIA's devices is there

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


def runtimes(
    host: Host, *, wanted: bool = True, which: Callable[[str], object] = shutil.which, ask: Ask = ask
) -> list[Check]:
    """A line for each runtime that is here; a note where there is none, though one is `wanted`."""
    looks: dict[str, Callable[[Host, Ask], Check]] = {
        "docker": _docker,
        "podman": _podman,
        "apptainer": _apptainer,
        "enroot": _enroot,
        "ch-run": _charliecloud,
        "srun": _pyxis,
    }
    here = [look for command, look in looks.items() if which(command)]
    if which("singularity") and not which("apptainer"):
        here.append(_singularity)
    with ThreadPoolExecutor() as pool:
        checks = [check for check in pool.map(lambda look: look(host, ask), here) if check.text]
    if any(check.level == "ok" for check in checks):
        # One that works is enough: another that does not is no alarm.
        return [replace(check, level="note") if check.level == "warning" else check for check in checks]
    if not checks and wanted:
        text = "none is here: runs are trained without a container"
        fix = "to use one: podman or docker on one machine; apptainer, enroot or charliecloud where nodes have no root"
        return [Check(name="runtimes", level="note", text=text, fix=fix)]
    return checks


def _docker(host: Host, ask: Ask) -> Check:
    # The client answers without its daemon; what the server says is what counts.
    said = ask(["docker", "version", "--format", "{{.Server.Version}}"])
    if said.code != 0:
        fix = "start its daemon (`sudo systemctl start docker`)"
        if "permission denied" in said.last.lower():
            fix = f"`sudo usermod -aG docker {host.user}` and log in again (as good as root on this machine), or podman"
        return Check(name="docker", level="warning", text=f"installed, but: {said.last[:200]}", fix=fix)
    text = f"{said.out.strip() or 'answers'}"
    if host.has_gpus and not host.cdi:
        known = ask(["docker", "info", "--format", "{{json .Runtimes}}"])
        if "nvidia" not in known.out:
            return _no_toolkit("docker", text, "`sudo nvidia-ctk runtime configure --runtime=docker`")
    return Check(name="docker", level="ok", text=text)


def _podman(host: Host, ask: Ask) -> Check:
    said = ask(["podman", "--version"])
    if said.code != 0:
        return Check(name="podman", level="warning", text=f"installed, but: {said.last[:200]}")
    text = _version(said.out)
    if host.uid:
        if _sub_ids(host) < _SUB_IDS:
            return Check(
                name="podman",
                level="warning",
                text=f"{text}; {host.user} has no {_SUB_IDS} sub-ids in /etc/subuid, and images need them",
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
        text=f"{text}; its containers get no GPUs: neither a CDI description nor NVIDIA's runtime is here",
        fix=f"install nvidia-container-toolkit, then {fix}",
    )


def _sub_ids(host: Host) -> int:
    """How many ids are set aside for this user."""
    rows = (line.split(":") for line in host.subuid.splitlines())
    return sum(int(row[2]) for row in rows if len(row) == 3 and row[0] in (host.user, str(host.uid)))


def _no_user_namespaces(name: str, text: str, ask: Ask) -> Check | None:
    """A finding where the kernel lets this user make no namespace; it is tried, since three settings may forbid it."""
    said = ask(["unshare", "--user", "--map-root-user", "true"])
    if said.code == 0 or "No such file" in said.err:
        return None
    return Check(
        name=name,
        level="warning",
        text=f"{text}; this user may make no user namespace ({said.last[:120]}), which it needs",
        fix="the machine's staff can allow it: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone,"
        " kernel.apparmor_restrict_unprivileged_userns",
    )


def _apptainer(host: Host, ask: Ask, name: str = "apptainer") -> Check:
    said = ask([name, "--version"])
    if said.code != 0:
        return Check(name=name, level="warning", text=f"installed, but: {said.last[:200]}")
    text = _version(said.out)
    return Check(name=name, level="ok", text=text + (", GPUs by --nv" if host.has_gpus else ""))


def _singularity(host: Host, ask: Ask) -> Check:
    found = _apptainer(host, ask, "singularity")
    text = f"{found.text}; container.runtime=apptainer calls `apptainer`, which is not here"
    fix = 'a link does where this user may make one: `ln -s "$(command -v singularity)" ~/.local/bin/apptainer`'
    return Check(name="singularity", level="note", text=text, fix=fix)


def _enroot(host: Host, ask: Ask) -> Check:
    said = ask(["enroot", "version"])
    if said.code != 0:
        return Check(name="enroot", level="warning", text=f"installed, but: {said.last[:200]}")
    text = _version(said.out)
    return (_no_user_namespaces("enroot", text, ask) if host.uid else None) or Check(
        name="enroot", level="ok", text=text
    )


def _charliecloud(host: Host, ask: Ask) -> Check:
    said = ask(["ch-run", "--version"])
    if said.code != 0:
        return Check(name="charliecloud", level="warning", text=f"installed, but: {said.last[:200]}")
    text = _version(said.out + said.err)
    return (_no_user_namespaces("charliecloud", text, ask) if host.uid else None) or Check(
        name="charliecloud", level="ok", text=text
    )


def _pyxis(host: Host, ask: Ask) -> Check:
    """Part of Slurm where the site has it: no word where it has not."""
    there = "--container-image" in ask(["srun", "--help"]).out
    return Check(name="pyxis", level="ok", text="srun has --container-image" if there else "")


def _version(text: str) -> str:
    """The version in what a program says of itself."""
    found = re.search(r"\d+(\.\d+)+\S*", text)
    return found[0].rstrip(",") if found else " ".join(text.split())[:60]
