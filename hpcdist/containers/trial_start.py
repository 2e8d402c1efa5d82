"""What an image tells of itself when it is started once, and what a runtime says where it cannot be started."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.containers.runtimes import DETACHED, Box, Contained, contain, outer_env
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.machine.cuda_drivers import driver_problem
from hpcdist.machine.facts import source_digest, versions
from hpcdist.machine.timed_command import run_within

#: Starting a container is quick; unpacking an image on a node is not.
LOOK_S = 300.0


#: Executed by the image's Python. It tells what is inside, and what of the node can be seen from there.
_LOOK = f"""
from __future__ import annotations
{inspect.getsource(source_digest)}
{inspect.getsource(versions)}
import json, os
print("hpcdist-image", json.dumps({{"node": os.environ.get("SLURMD_NODENAME", "")}} | versions()), flush=True)
"""
_FACTS = re.compile(r"hpcdist-image (\{.*\})")
#: Messages of a runtime itself, where its exit codes do not distinguish them from the command's.
_MESSAGES = {
    "apptainer": re.compile(r"^(FATAL|ERROR)\s*:"),
    "charliecloud": re.compile(r"ch-run\["),
    "enroot": re.compile(r"\[ERROR\]|^enroot-[a-z]+: "),
    "pyxis": re.compile(r"^pyxis:"),
}
_PYXIS_ERROR = re.compile(r"(?:srun|slurmstepd): error: (pyxis:.*)")
#: Slurm's messages, pyxis' progress, and the reference to its help with which docker's client 28 ends every error.
_NOT_ITS_OWN = re.compile(r"(srun|slurmstepd|pyxis): |(Run|See) 'docker .*--help'")


def look_command(box: Box) -> Contained:
    """What starts the image once and lets it tell what is in it. The run's folder may not exist yet."""
    bare = replace(box, mounts=(), workdir=Path("/"), env=("SLURMD_NODENAME",))
    return contain(bare, [box.python, "-c", _LOOK])


def look_env(box: Box, env: Mapping[str, str]) -> dict[str, str]:
    """The environment for `look_command`: without paths to code that is not the image's."""
    return {name: value for name, value in outer_env(box, env).items() if name != "PYTHONPATH"}


def judge(box: Box, output: str, errors: str, where: str) -> tuple[dict[str, Any] | None, str, bool]:
    """What `look_command` has told on one machine: facts, what is wrong with them, whether that may pass by itself."""
    match = _FACTS.search(output)
    if match is None:
        problem, passing = _why_not_started(box, errors, where)
        return None, problem, passing
    facts: dict[str, Any] = json.loads(match[1])
    found, wanted = facts.get("hpcdist"), hpcdist.__version__
    if found is None:
        return facts, f"{box.image} has no hpcdist for its {box.python}: see container.python", False
    if found != wanted:
        return facts, f"{box.image} has hpcdist {found}, this is {wanted}: build it again, or install {found}", False
    # Ranks and supervisor talk through files whose form is their version's alone.
    if facts.get("source") != source_digest(str(Path(hpcdist.__file__).parent)):
        return (
            facts,
            f"{box.image} has hpcdist {found} of another state of its code than this one: build it again",
            False,
        )
    if tuple(map(int, facts["python"].split(".")[:2])) < (3, 11):
        return facts, f"{box.image} has Python {facts['python']}; hpcdist needs 3.11 or newer", False
    if box.gpus and (old := driver_problem(str(facts.get("cuda") or ""), str(facts.get("driver") or ""))):
        return facts, f"{box.image} needs {old} on {where}", False
    return facts, "", False


def _why_not_started(box: Box, errors: str, where: str) -> tuple[str, bool]:
    said = _own_lines(errors)
    text = " ".join(said)
    if "is not installed on" in text:
        return said[0].removeprefix("hpcdist: "), False
    if re.search("exec format error", text, re.IGNORECASE):
        return f"{box.image} is for another processor than {where} has ({os.uname().machine})", False
    if re.search("image not known|no such image|no such object", text, re.IGNORECASE):
        return f"{box.image} is not on {where}: {_last(said)}", False
    if re.search("no such file|not found|can't execve", text, re.IGNORECASE):
        return f"{box.image} cannot be started on {where}, or has no {box.python} in it: {_last(said)}", False
    return f"{box.runtime} could not start {box.image} on {where}: {_last(said)}", True


def own_failure(runtime: str, code: int, log: str) -> tuple[str, bool] | None:
    """What a runtime says of a container that it could not start, and whether a retry may help; None for a rank's end.

    podman and docker keep exit codes 125 to 127 for themselves: they failed, the command cannot be executed, it is
    not there. The others end as a command that failed, and mark their lines.
    """
    last = _last(_own_lines(log))
    if runtime in DETACHED:
        if code not in (125, 126, 127):
            return None
        return f"{runtime} could not start the container (exit code {code}): {last}", code == 125
    if code <= 0 or not _MESSAGES[runtime].search(last):
        return None
    return f"{runtime} could not start the container (exit code {code}): {last}", True


def _own_lines(text: str) -> list[str]:
    """The output of a container's start and its command, without Slurm's messages and references to docker's help.

    pyxis reports errors through Slurm, as `slurmstepd: error: pyxis: …`, and its progress as `pyxis: …`.
    """
    lines = []
    for line in filter(str.strip, text.splitlines()):
        if error := _PYXIS_ERROR.match(line):
            lines.append(error[1].rstrip())
        elif not _NOT_ITS_OWN.match(line):
            lines.append(line.strip())
    return lines


def _last(lines: Sequence[str]) -> str:
    """The line that gives the reason: the last one, or the last of the log that pyxis quotes, indented."""
    quoted = [line for line in lines if line.startswith("pyxis:    ")]
    line = quoted[-1] if quoted and lines[-1].startswith("pyxis:") else lines[-1] if lines else "it printed nothing"
    return " ".join(line.split())


def digest(box: Box, env: Mapping[str, str]) -> str | None:
    """What names the image's content: its id in its store, or what its file's name says (`hpcdist-0.1.0-…`)."""
    if box.outlives_step:
        if shutil.which(box.runtime, path=env.get("PATH")) is None:
            return None
        command = [box.runtime, "image", "inspect", "--format", "{{.Id}}", box.image]
        done = run_within(command, LOOK_S, env=env)
        found = re.search(r"[0-9a-f]{64}", done.stdout)
        return f"sha256:{found[0]}" if done.returncode == 0 and found else None
    named = re.search(r"-([0-9a-f]{12,64})(\.\w+)?$", box.image)
    return f"sha256:{named[1]}" if named else None


def judge_nodes(box: Box, nodes: Sequence[str], output: str, errors: str) -> dict[str, Any]:
    """The facts of the first node, once all are well. Output is that of `srun --label`, one task a node.

    Raises UserMistake for what only the user can put right, HpcdistError for the rest.
    """
    answers: dict[str, dict[str, Any]] = {}
    problems: dict[str, list[str]] = {}
    passing = True
    # srun's own errors carry no label of a task.
    shared = [line for line in errors.splitlines() if _PYXIS_ERROR.match(line)]
    for task, node in enumerate(nodes):
        complaints = "\n".join([*shared, _of_task(errors, task)])
        facts, problem, may_pass = judge(box, _of_task(output, task), complaints, node)
        if problem:
            # One line for all nodes that say the same.
            problems.setdefault(problem.replace(f"on {node}", "on {}"), []).append(node)
            passing = passing and may_pass
        elif facts is not None:
            answers[node] = facts
    if problems:
        text = "; ".join(problem.replace("on {}", f"on {', '.join(where)}") for problem, where in problems.items())
        raise HpcdistError(text) if passing else UserMistake(text)
    return answers[nodes[0]]


def _of_task(text: str, task: int) -> str:
    pattern = re.compile(rf"^\s*0*{task}: (.*)$", re.MULTILINE)
    return "\n".join(pattern.findall(text))
