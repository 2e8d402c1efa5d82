"""Start an image once to read the versions inside, and interpret a runtime's errors when it cannot start."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.containers.spec import DETACHED, ContainerCommand, ContainerSpec, container_command, outer_env
from hpcdist.errors import HpcdistError, UserMistake, terminal_text
from hpcdist.host.commands import run_within
from hpcdist.host.files import parse_object
from hpcdist.host.machine import driver_problem, source_digest, versions
from hpcdist.slurm.on_nodes import lines_of_task

#: Starting a container is quick, but a runtime may have to unpack the image on a node first.
PROBE_TIMEOUT_S = 300.0
#: Bytes at the start and at the end of an image file that its digest covers: reading gigabytes would delay each start.
DIGEST_BYTES = 1 << 20

#: Executed by the image's Python, so it uses the standard library alone.
_PROBE = f"""
from __future__ import annotations
{inspect.getsource(source_digest)}
{inspect.getsource(versions)}
import json, os
print("hpcdist-image", json.dumps({{"node": os.environ.get("SLURMD_NODENAME", "")}} | versions()), flush=True)
"""
_FACTS = re.compile(r"hpcdist-image (\{.*\})")
#: Error messages of runtimes that use the same exit codes for their own failures and the command's.
_MESSAGES = {
    "apptainer": re.compile(r"^(FATAL|ERROR)\s*:|^Error for command "),
    "charliecloud": re.compile(r"ch-run\["),
    "enroot": re.compile(r"\[ERROR\]|^enroot-[a-z]+: |^Usage: enroot |^mkdir: .*enroot"),
    "pyxis": re.compile(r"^pyxis:|^execve\(\): "),
}
#: slurmstepd adds the node's name where several slurmds share a machine.
_PYXIS_ERROR = re.compile(r"(?:srun|slurmstepd(?:-\S+)?): error: (pyxis:.*|execve\(\): .*)")
#: pyxis starts one container per node and step; the log of the task that started it has the reason.
_STARTED_BY_OTHER_TASK = "pyxis: container was not started successfully by another task"
#: Slurm's messages; progress of pyxis and apptainer; references to the help, which end the errors of docker's clients;
#: and the log line of client 20.10 after an error of the daemon.
_NOT_ITS_OWN = re.compile(
    r"(srun|slurmstepd(-\S+)?|pyxis): |(INFO|WARNING)\s*:|(Run|See) 'docker .*--help'|Usage:  docker |"
    r"time=\S+ level=error"
)
#: apptainer and enroot print their whole help after a wrong option.
_BEFORE_HELP = ('Error for command "', "Usage: enroot ")
#: Errors of enroot whose reason is in the line before.
_CONSEQUENCE = re.compile(r"\[ERROR\] (Failed to mount: |/\S+ exited with return code)")
#: pyxis reports the signal that ended `enroot create`.
_ENDED_BY_USR2 = re.compile(rf"pyxis: child \d+ terminated with signal {int(signal.SIGUSR2)}\b")
#: Errors that no retry solves, and what to do about them.
_FIXES = (
    (
        "rlimit type 8: operation not permitted",
        "its daemon lacks CAP_SYS_RESOURCE (rootless, or in a container) and cannot unlock memory for RDMA:"
        " container.extra_args=[--ulimit=memlock=65536:65536] leaves the limit, and NCCL_IB_DISABLE=1 avoids RDMA",
    ),
    (
        "Requesting capability set",
        "root lacks a capability here (as in a container): name it in APPTAINER_DROP_CAPS, for example"
        " `export APPTAINER_DROP_CAPS=CAP_SYS_RESOURCE`",
    ),
    ("unknown (shorthand )?flag|^Usage: enroot ", "see container.extra_args"),
    (
        "could not create (character|block) device",
        "only root can unpack the device files of this image, and no container needs them: create the .sqsh again with"
        " `mksquashfs … -wildcards -e 'dev/*'`",
    ),
    (
        "permission denied while trying to connect|could not select device driver|/dev/fuse: Permission denied|"
        r"Failed to create user namespace|Command not found: |\[ERROR\] Invalid argument: /|mkdir: .*enroot",
        "docs/how-to/containers.md lists what the runtime needs on each node",
    ),
)


def image_probe_command(spec: ContainerSpec) -> ContainerCommand:
    """Return the command that starts the image without mounts (the run folder may not exist yet) and prints facts."""
    bare = replace(spec, mounts=(), workdir=Path("/"), env=("SLURMD_NODENAME",))
    return container_command(bare, [spec.python, "-c", _PROBE])


def image_probe_env(spec: ContainerSpec, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for `image_probe_command`, without PYTHONPATH: the image's own code is examined."""
    return {name: value for name, value in outer_env(spec, env).items() if name != "PYTHONPATH"}


def probe_outcome(
    spec: ContainerSpec, output: str, errors: str, machine: str
) -> tuple[dict[str, Any] | None, str, bool]:
    """Interpret the output of `image_probe_command` on one machine.

    Returns:
        The facts (None if the image did not start), the problem (empty if there is none), whether a retry may help.
    """
    match = _FACTS.search(output)
    if match is None:
        problem, may_pass = _start_problem(spec, errors, machine)
        return None, problem, may_pass
    try:
        facts = parse_object(match[1])
        major, minor = (int(part) for part in str(facts.get("python")).split(".")[:2])
    except ValueError as error:
        return None, f"{spec.image} gives no valid description of its Python on {machine}: {error}", False
    found, own = facts.get("hpcdist"), hpcdist.__version__
    problem = ""
    if found is None:
        problem = f"{spec.image} has no hpcdist for its {spec.python}: see container.python"
    elif found != own:
        problem = f"{spec.image} has hpcdist {found}, this is {own}: build it again, or install {found}"
    # Ranks and supervisor exchange files, and the formats may change between commits of one version.
    elif facts.get("source") != source_digest(str(Path(hpcdist.__file__).parent)):
        problem = f"{spec.image} has hpcdist {found} from other source files than this one: build it again"
    elif (major, minor) < (3, 11):
        problem = f"{spec.image} has Python {facts['python']}; hpcdist needs 3.11 or newer"
    elif spec.gpus and (old := driver_problem(str(facts.get("cuda") or ""), str(facts.get("driver") or ""))):
        problem = f"{spec.image} needs {old} on {machine}"
    return facts, problem, False


def _start_problem(spec: ContainerSpec, errors: str, machine: str) -> tuple[str, bool]:
    lines = _own_lines(errors)
    text = " ".join(lines)
    if missing := next((line for line in lines if "is not installed on" in line), ""):
        return missing.removeprefix("hpcdist: "), False
    if re.search("exec format error", text, re.IGNORECASE):
        return f"{spec.image} is for another processor architecture than {machine} has ({os.uname().machine})", False
    if re.search("image not known|no such image|no such object", text, re.IGNORECASE):
        return f"{spec.image} is not on {machine}: {_last(lines)}", False
    if fix := _fix(text):
        return f"{spec.runtime} could not start {spec.image} on {machine}: {_last(lines)}: {fix}", False
    if re.search("no such file|not found|can't execve", text, re.IGNORECASE):
        return f"{spec.image} cannot be started on {machine}, or has no {spec.python} in it: {_last(lines)}", False
    return f"{spec.runtime} could not start {spec.image} on {machine}: {_last(lines)}", True


def start_failure(runtime: str, code: int, log: str) -> tuple[str, bool] | None:
    """Return the error of a container that did not start, and whether a retry may help; None if the rank itself ended.

    podman and docker reserve exit codes for this: 125 their own failure, 126 the command cannot be executed, 127 the
    command does not exist. The other runtimes end like a failed command and mark their messages.
    """
    last = _last(_own_lines(log))
    if runtime in DETACHED:
        if code not in (125, 126, 127):
            return None
    elif code <= 0 or not _MESSAGES[runtime].search(last):
        return None
    fix = _fix(last)
    error = f"{runtime} could not start the container (exit code {code}): {last}"
    return f"{error}: {fix}" if fix else error, not fix and not (runtime in DETACHED and code != 125)


def started_by_other_task(error: str) -> bool:
    """Return whether the error of a container has its cause in the log of another task."""
    return error.endswith(_STARTED_BY_OTHER_TASK)


def start_interrupted(runtime: str, log: str) -> bool:
    """Return whether Slurm's signal ahead of the time limit ended the creation of a container by pyxis."""
    return runtime == "pyxis" and bool(_ENDED_BY_USR2.search(log))


def _fix(text: str) -> str:
    """Return how to solve an error that no retry solves; empty if it is not known."""
    return next((fix for pattern, fix in _FIXES if re.search(pattern, text)), "")


def _own_lines(text: str) -> list[str]:
    """Return the output of the runtime and its command, without Slurm's messages, progress, help and colours.

    pyxis reports errors through Slurm, as `slurmstepd: error: pyxis: …`, and its progress as `pyxis: …`.
    """
    lines = []
    for line in filter(str.strip, terminal_text(text).splitlines()):
        if line.startswith(_BEFORE_HELP):
            return [line.strip()]
        if error := _PYXIS_ERROR.match(line):
            lines.append(error[1].rstrip())
        elif not _NOT_ITS_OWN.match(line):
            lines.append(line.strip())
    return lines


def _last(lines: Sequence[str]) -> str:
    """Return the line with the reason: the last line in general."""
    line = lines[-1] if lines else "it printed nothing"
    if line.startswith("pyxis:"):
        line = _pyxis_reason([line for line in lines if line.startswith("pyxis:")])
    elif _CONSEQUENCE.match(line) and len(lines) > 1:
        line = f"{lines[-2]} {line}"
    return " ".join(line.split())


def _pyxis_reason(lines: Sequence[str]) -> str:
    """Return the first error of pyxis; if that is a failed program, the error in its output, which pyxis quotes."""
    quoted = [line for line in lines if line.startswith("pyxis:    ")]
    errors = [line for line in quoted if re.search(r"\[ERROR\]|FATAL ERROR|could not create", line)]
    if quoted and re.match(r"pyxis: child \d+ failed ", lines[0]):
        return (errors or quoted)[-1]
    return lines[0]


def image_digest(spec: ContainerSpec, env: Mapping[str, str]) -> str | None:
    """Return the image's id in its store, the digest in its file name (`hpcdist-0.1.0-…`), or one of parts of the file.

    The name counts only if the file is this user's or root's: others may use any name. The result is None if it is
    unknown, as for images in folders.
    """
    if spec.outlives_step:
        if shutil.which(spec.runtime, path=env.get("PATH")) is None:
            return None
        command = [spec.runtime, "image", "inspect", "--format", "{{.Id}}", spec.image]
        done = run_within(command, PROBE_TIMEOUT_S, env=env)
        found = re.search(r"[0-9a-f]{64}", done.stdout)
        return f"sha256:{found[0]}" if done.returncode == 0 and found else None
    named = re.search(r"-([0-9a-f]{12,64})(\.\w+)?$", spec.image)
    path = Path(spec.image)
    is_own = not path.exists() or path.stat().st_uid in (os.geteuid(), 0)
    return f"sha256:{named[1]}" if named and is_own else _file_digest(path)


def _file_digest(path: Path) -> str | None:
    """Return a digest of size, start and end of a file. The start of an image file contains the date of its build."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            parts = hashlib.sha256(f"{size}\n".encode() + file.read(DIGEST_BYTES))
            file.seek(max(0, size - DIGEST_BYTES))
            parts.update(file.read(DIGEST_BYTES))
    except OSError:
        return None
    return f"ends-sha256:{parts.hexdigest()}"


def check_image_on_nodes(spec: ContainerSpec, nodes: Sequence[str], output: str, errors: str) -> dict[str, Any]:
    """Interpret the output of `srun --label` with one probe per node; return the facts of the first node.

    Raises:
        UserMistake: a problem that only the user can solve.
        HpcdistError: a problem that a retry may solve.
    """
    answers: dict[str, dict[str, Any]] = {}
    problems: dict[str, list[str]] = {}
    passing = True
    # srun's own errors carry no task label.
    shared = [line for line in errors.splitlines() if _PYXIS_ERROR.match(line)]
    for task, node in enumerate(nodes):
        messages = "\n".join([*shared, lines_of_task(errors, task)])
        facts, problem, may_pass = probe_outcome(spec, lines_of_task(output, task), messages, node)
        if problem:
            # One line for all nodes with the same problem.
            problems.setdefault(problem.replace(f"on {node}", "on {}"), []).append(node)
            passing = passing and may_pass
        elif facts is not None:
            answers[node] = facts
    if problems:
        text = "; ".join(problem.replace("on {}", f"on {', '.join(where)}") for problem, where in problems.items())
        raise HpcdistError(text) if passing else UserMistake(text)
    return answers[nodes[0]]
