"""The probe of an image: start it once, read the versions inside, and explain why a runtime could not start it."""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.config.schema import Config
from hpcdist.containers.runtimes import container_words, outer_env
from hpcdist.containers.spec import IMAGE_PYTHON, ContainerSpec, planned_container
from hpcdist.errors import HpcdistError, UserMistake, terminal_text
from hpcdist.host.gpu_info import driver_problem
from hpcdist.host.json_files import parse_object
from hpcdist.host.time_limits import run_within
from hpcdist.host.versions import VERSIONS_MARK, source_digest, versions_program
from hpcdist.slurm.on_nodes import lines_of_task

#: Starting a container is quick, but a runtime may have to unpack the image on a node first.
PROBE_TIMEOUT_S = 300.0
_OLDEST_PYTHON = (3, 11)
#: Bytes at the start and at the end of an image file that its digest covers: reading gigabytes would delay each start.
DIGEST_BYTES = 1 << 20
#: The form of each runtime's error messages. By the exit code, a failed runtime looks like a failed rank.
_MESSAGES = {
    "apptainer": re.compile(r"^(FATAL|ERROR)\s*:|^Error for command "),
    "enroot": re.compile(r"\[ERROR\]|^enroot-[a-z]+: |^Usage: enroot |^mkdir: .*enroot"),
    "pyxis": re.compile(r"^pyxis:|^execve\(\): "),
}
#: slurmstepd adds the node's name where several slurmds share a machine.
_PYXIS_ERROR = re.compile(r"(?:srun|slurmstepd(?:-\S+)?): error: (pyxis:.*|execve\(\): .*)")
#: Lines that explain no failed start: Slurm's messages, and the progress of pyxis and apptainer.
_NO_REASON = re.compile(r"(srun|slurmstepd(-\S+)?|pyxis): |(INFO|WARNING)\s*:")
#: Patterns of errors that no retry solves, with their fixes.
_FIXES = (
    ("unknown (shorthand )?flag|^Usage: enroot ", "see container.extra_args"),
    ("Invalid image reference", "write container.image as [USER@][REGISTRY#]IMAGE[:TAG] with IMAGE in lower case"),
    (
        "Requesting capability set|could not create (character|block) device|/dev/fuse: Permission denied|"
        r"Failed to create user namespace|Command not found: |\[ERROR\] Invalid argument: /|mkdir: .*enroot",
        "docs/how-to/containers.md lists the requirements of the runtime on each node",
    ),
)


def image_probe(spec: ContainerSpec, env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that prints the versions in the image, and its environment.

    The image is started without mounts, because the run folder may not exist yet. The environment has no PYTHONPATH,
    because the image's own code is examined.
    """
    bare = replace(spec, mounts=(), workdir=Path("/"))
    outer = outer_env(bare, env)
    outer.pop("PYTHONPATH", None)
    return container_words(bare, [IMAGE_PYTHON, "-c", versions_program()]), outer


def probe_outcome(
    spec: ContainerSpec, output: str, errors: str, machine: str
) -> tuple[dict[str, Any] | None, str, bool]:
    """Judge the output of the probe.

    Returns:
        the facts about the image, or None if it did not start or its answer is not valid,
        why ranks cannot use the image, empty if they can,
        whether a retry may solve the problem.
    """
    match = re.search(VERSIONS_MARK + r" (\{.*\})", output)  # the facts are one line of JSON
    if match is None:
        problem, may_pass = _start_problem(spec, errors, machine)
        return None, problem, may_pass
    try:
        facts = parse_object(match[1])
        major, minor = (int(part) for part in str(facts.get("python")).split(".")[:2])
    except ValueError as error:
        return None, f"{spec.image} gives no valid description of its Python on {machine}: {error}", False
    return facts, _content_problem(spec, facts, (major, minor), machine), False


def _content_problem(spec: ContainerSpec, facts: Mapping[str, Any], python: tuple[int, int], machine: str) -> str:
    """Return why ranks cannot use an image that has started; empty if they can."""
    version = facts.get("hpcdist")
    outside = hpcdist.__version__
    if version is None:
        return f"{spec.image} has no hpcdist for its {IMAGE_PYTHON}: install hpcdist {outside} in the image"
    if version != outside:
        return f"{spec.image} has hpcdist {version}, this is {outside}: build it again, or install {version}"
    # Ranks and supervisor exchange files, and the formats may change between commits of one version.
    if facts.get("source") != source_digest(str(Path(hpcdist.__file__).parent)):
        return f"{spec.image} has hpcdist {version} from other source files than this one: build it again"
    if python < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return f"{spec.image} has Python {facts['python']}; hpcdist needs {oldest} or newer"
    if spec.uses_gpus:
        old_driver = driver_problem(str(facts.get("cuda") or ""), str(facts.get("driver") or ""))
        if old_driver:
            return f"{spec.image} needs {old_driver} on {machine}"
    return ""


def image_problems(config: Config, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """Start the image once on this machine, if it has the runtime, and return why ranks cannot use it."""
    spec = planned_container(config, cwd, env)
    if spec is None or spec.runtime == "pyxis":  # a plugin of srun, which starts containers in a job only
        return []
    if shutil.which(spec.runtime, path=env.get("PATH")) is None:
        return []
    command, outer = image_probe(spec, env)
    done = run_within(command, PROBE_TIMEOUT_S, env=outer)
    _, problem, _ = probe_outcome(spec, done.stdout, done.stderr, "this machine")
    if not problem:
        return []
    return [f"container.image: {problem}"]


def check_image_on_nodes(spec: ContainerSpec, nodes: Sequence[str], output: str, errors: str) -> dict[str, Any]:
    """Return the facts of the first node from the output of `srun --label` with one probe per node.

    Raises UserMistake if ranks cannot use the image on a node, and another HpcdistError if a retry may help.
    """
    answers: dict[str, dict[str, Any]] = {}
    # Nodes with the same problem share one line of the message; `on {}` stands for their names.
    nodes_by_problem: dict[str, list[str]] = {}
    may_all_pass = True
    # Errors that srun itself reports have no label of a task: they may be about any of them.
    errors_of_srun = [line for line in errors.splitlines() if _PYXIS_ERROR.match(line)]
    for task, node in enumerate(nodes):
        messages = "\n".join([*errors_of_srun, lines_of_task(errors, task)])
        facts, problem, may_pass = probe_outcome(spec, lines_of_task(output, task), messages, node)
        if problem:
            shared_problem = problem.replace(f"on {node}", "on {}")
            nodes_by_problem.setdefault(shared_problem, []).append(node)
            may_all_pass = may_all_pass and may_pass
        elif facts is not None:
            answers[node] = facts
    if nodes_by_problem:
        sentences = []
        for problem, names in nodes_by_problem.items():
            sentences.append(problem.replace("on {}", f"on {', '.join(names)}"))
        text = "; ".join(sentences)
        if may_all_pass:
            raise HpcdistError(text)
        raise UserMistake(text)
    return answers[nodes[0]]


def _start_problem(spec: ContainerSpec, errors: str, machine: str) -> tuple[str, bool]:
    """Return why an image did not start, and whether a retry may help."""
    lines = _runtime_lines(errors)
    for line in lines:
        if "is not installed on" in line:  # a message of `node_wrapper.sh`
            return line.removeprefix("hpcdist: "), False
    text = " ".join(lines)
    # The first error is the kernel's, the second one apptainer's, which reads the headers of an image's programs.
    if re.search("exec format error|image targets .+ cannot run on", text, re.IGNORECASE):
        return f"{spec.image} is for another processor architecture than {machine} has ({os.uname().machine})", False
    reason = _reason(lines)
    fix = _fix(text)
    if fix:
        return f"{spec.runtime} could not start {spec.image} on {machine}: {reason}: {fix}", False
    if re.search("no such file|not found|can't execve", text, re.IGNORECASE):
        return f"{spec.image} cannot be started on {machine}, or has no {IMAGE_PYTHON} in it: {reason}", False
    return f"{spec.runtime} could not start {spec.image} on {machine}: {reason}", True


def start_failure(runtime: str, code: int, log: str) -> tuple[str, bool] | None:
    """Return the error of a container that did not start, and whether a retry may help; None if the rank itself ended.

    A runtime that fails has the exit code of a failed command; only the form of its message shows the difference.
    """
    reason = _reason(_runtime_lines(log))
    if code <= 0 or not _MESSAGES[runtime].search(reason):
        return None
    error = f"{runtime} could not start the container (exit code {code}): {reason}"
    fix = _fix(reason)
    if fix:
        return f"{error}: {fix}", False
    return error, True


def _fix(text: str) -> str:
    """Return advice on an error that no retry solves; empty for other errors."""
    for pattern, fix in _FIXES:
        if re.search(pattern, text):
            return fix
    return ""


def _runtime_lines(text: str) -> list[str]:
    """Return the output of the runtime and its command, without Slurm's messages, progress, help and colours.

    pyxis reports errors through Slurm, as `slurmstepd: error: pyxis: …`, and its progress as `pyxis: …`.
    """
    lines = []
    for line in filter(str.strip, terminal_text(text).splitlines()):
        if line.startswith(('Error for command "', "Usage: enroot ")):
            return [line.strip()]  # apptainer and enroot print their whole help after a wrong option
        pyxis_error = _PYXIS_ERROR.match(line)
        if pyxis_error is not None:
            lines.append(pyxis_error[1].rstrip())
        elif not _NO_REASON.match(line):
            lines.append(line.strip())
    return lines


def _reason(lines: Sequence[str]) -> str:
    """Return the line with the reason why a container did not start: in general the last one."""
    line = lines[-1] if lines else "it printed nothing"
    if line.startswith("pyxis:"):
        line = _pyxis_reason([line for line in lines if line.startswith("pyxis:")])
    elif len(lines) > 1 and re.match(r"\[ERROR\] (Failed to mount: |/\S+ exited with return code)", line):
        line = f"{lines[-2]} {line}"  # enroot prints the reason before it
    return " ".join(line.split())


def _pyxis_reason(lines: Sequence[str]) -> str:
    """Return the first error of pyxis, or, if that is a failed program, the error in the output that pyxis quotes."""
    first, *others = lines
    quoted = [line for line in others if line.startswith("pyxis:    ")]
    if not quoted or not re.match(r"pyxis: child \d+ failed ", first):
        return first
    errors = [line for line in quoted if re.search(r"\[ERROR\]|FATAL ERROR|could not create", line)]
    return (errors or quoted)[-1]


def image_digest(spec: ContainerSpec) -> str | None:
    """Return the digest in the name of an image's file (`hpcdist-0.1.0-…`), or else a digest of parts of the file.

    The name counts only if the file is this user's or root's: others may use any name. The result is None if the
    digest is unknown, as for images in folders.
    """
    digest_in_name = re.search(r"-([0-9a-f]{12,64})(\.\w+)?$", spec.image)
    path = Path(spec.image)
    if digest_in_name and (not path.exists() or path.stat().st_uid in (os.geteuid(), 0)):
        return f"sha256:{digest_in_name[1]}"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(f"{size}\n".encode())
            # The start of an image file contains the date of its build.
            digest.update(file.read(DIGEST_BYTES))
            file.seek(max(0, size - DIGEST_BYTES))
            digest.update(file.read(DIGEST_BYTES))
    except OSError:
        return None
    return f"ends-sha256:{digest.hexdigest()}"
