"""From a run's config to its container, and what can be said against it: before the queue, and on the nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.config import secrets_of
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.launch.components import components
from hpcdist.launch.container import (
    DETACHED,
    PASSED,
    WITHHELD,
    Box,
    Contained,
    Mount,
    contain,
    outer_env,
    without_nested,
)
from hpcdist.launch.snapshot import git_root
from hpcdist.rundir import RunDir
from hpcdist.schema import Config

#: Starting a container is quick; unpacking an image on a node is not.
LOOK_S = 300.0
#: The oldest drivers that run programs of a CUDA line (its own minor versions are compatible with each other).
#: Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
#: Executed by the image's Python. It tells what is inside, and what of the node can be seen from there.
_LOOK = """
import importlib.util, json, os, platform, re
facts = {"node": os.environ.get("SLURMD_NODENAME", ""), "python": platform.python_version()}
try:
    import hpcdist
    facts["hpcdist"] = hpcdist.__version__
except ImportError:
    pass
torch = importlib.util.find_spec("torch")
for key, path, pattern in (
    ("torch", torch and os.path.join(os.path.dirname(torch.origin), "version.py"), r"__version__ = '(.+)'"),
    ("cuda", torch and os.path.join(os.path.dirname(torch.origin), "version.py"), r"cuda\\b[^=]*= '(.+)'"),
    ("driver", "/proc/driver/nvidia/version", r"Kernel Module(?: for \\S+)?\\s+([0-9.]+)"),
):
    if path and os.path.exists(path) and (found := re.search(pattern, open(path).read())):
        facts[key] = found[1]
print("hpcdist-image", json.dumps(facts), flush=True)
"""
_FACTS = re.compile(r"hpcdist-image (\{.*\})")
#: Never mounted because someone happens to stand there: the image's own programs would be hidden.
_OF_THE_IMAGE = {"/", "/bin", "/dev", "/etc", "/lib", "/opt", "/proc", "/sbin", "/sys", "/usr", "/var"}
#: How a runtime marks what it says itself, where its exit codes tell nothing.
_MARKS = {"apptainer": "FATAL:", "charliecloud": "ch-run[", "enroot": "[ERROR]", "pyxis": "pyxis:"}


def box_for(config: Config, run: RunDir, *, cwd: Path, root: Path) -> Box | None:
    """What the containers of a run are told; None where it wants none.

    Args:
        cwd: the ranks' current folder.
        root: top of the user's code around it.

    Raises UserMistake for a path that cannot be mounted.
    """
    container = config.container
    if container.runtime == "none":
        return None
    own = [Mount.parse(text) for text in container.mounts]
    paths = [run.path, root, cwd]
    if Path(config.data.root).is_dir():
        paths.append(Path(config.data.root))
    if config.trainer.script:
        paths.append(Path(config.trainer.script[0]).parent)
    taken = {mount.target for mount in own} | _OF_THE_IMAGE
    same = [Mount(source=str(path), target=str(path)) for path in paths if str(path) not in taken]
    names = [*config.cluster.env, *config.launch.env, *secrets_of(config)]
    env = [*PASSED, *container.env, *(name for name in names if name not in WITHHELD)]
    asked = any(part.gpus_per_node for part in components(config)) and config.launch.device != "cpu"
    return Box(
        runtime=container.runtime,
        image=container.image,
        run=run.path,
        mounts=without_nested([*own, *same]),
        workdir=cwd,
        env=tuple(dict.fromkeys(env)),
        gpus=container.gpus == "all" or (container.gpus == "auto" and asked),
        python=container.python,
        extra_args=tuple(container.extra_args),
        image_env=container.runtime == "charliecloud" and (Path(container.image) / "ch/environment").is_file(),
    )


def look_command(box: Box) -> Contained:
    """What starts the image once and lets it tell what is in it. The run's folder may not exist yet."""
    bare = replace(box, mounts=(), workdir=Path("/"), env=("SLURMD_NODENAME",))
    return contain(bare, [box.python, "-c", _LOOK])


def look_env(box: Box, env: Mapping[str, str]) -> dict[str, str]:
    """The environment for `look_command`: without paths to code that is not the image's."""
    return {name: value for name, value in outer_env(box, env).items() if name != "PYTHONPATH"}


# --- before the queue


def problems(config: Config, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """What this machine can tell to be wrong with a run's containers: a line a mistake, with key and fix."""
    container = config.container
    found = [
        f"container.mounts: {mount.source} does not exist here; what only the nodes have can be mounted by"
        " container.extra_args"
        for mount in map(Mount.parse, container.mounts)
        if not Path(mount.source).exists()
    ]
    try:
        if container.runtime in ("apptainer", "charliecloud", "enroot"):
            _check_path(container.runtime, container.image)
        run = RunDir(Path(config.runs_dir) / config.experiment / (config.name or "probe"))
        if (box := box_for(config, run, cwd=cwd, root=git_root(cwd) or cwd)) is not None and not found:
            check_here(config, box, env)
    except UserMistake as error:
        found.append(str(error))
    return found


def _check_path(runtime: str, image: str) -> None:
    if "://" in image:
        raise UserMistake(f"container.image: {image} would be fetched by every rank: convert it to a file first")
    path = Path(image)
    if not path.exists():
        raise UserMistake(f"container.image: no such file or folder: {image}")
    if runtime == "charliecloud" and not ((path / "usr").is_dir() and (path / "dev").is_dir()):
        raise UserMistake(f"container.image: {image} holds no root file system (no usr and dev in it)")
    if runtime == "enroot" and not path.is_file():
        raise UserMistake(f"container.image: {image} is no file: enroot starts a .sqsh")


def check_here(config: Config, box: Box, env: Mapping[str, str]) -> dict[str, Any] | None:
    """What is in the image, by a look into it on this machine; None where this machine cannot start it.

    Raises UserMistake when the image is not there, or is not one that this hpcdist can use.
    """
    prepare_image(box)
    command = look_command(box)
    tool = {"charliecloud": "ch-run", "pyxis": ""}.get(box.runtime, box.runtime)
    if not config.container.check_here or shutil.which(tool, path=env.get("PATH")) is None:
        return None
    if box.runtime in DETACHED and (said := _missing_in_store(box, env)):
        raise UserMistake(
            f"container.image: {box.image} is not in {box.runtime}'s store on this machine ({said}): build or load it,"
            " or set container.check_here=false where only the nodes have it"
        )
    done = subprocess.run(
        command.words, env=look_env(box, env), capture_output=True, text=True, timeout=LOOK_S, check=False
    )
    facts, problem, _ = judge(box, done.stdout, done.stderr, "this machine")
    if problem:
        raise UserMistake(f"container.image: {problem}")
    return facts


def _missing_in_store(box: Box, env: Mapping[str, str]) -> str:
    command = [box.runtime, "image", "inspect", "--format", "{{.Id}}", box.image]
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=LOOK_S, check=False)
    return "" if done.returncode == 0 else " ".join(done.stderr.split()).removeprefix("Error: ")


def prepare_image(box: Box) -> None:
    """Make what a run mounts things at: an unpacked image is read-only once it is started.

    ch-run shows the host's names by itself, where the image has files that these can take the place of.
    """
    if box.runtime != "charliecloud":
        return
    binds = [word.removeprefix("--bind=").split(":") for word in contain(box, []).words if word.startswith("--bind=")]
    for source, target in [*binds, *((path, path) for path in ("/etc/hosts", "/etc/resolv.conf"))]:
        place = Path(box.image) / target.lstrip("/")
        try:
            if not Path(source).is_file():
                place.mkdir(parents=True, exist_ok=True)
            elif not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
        except OSError as error:
            raise UserMistake(
                f"container.image: {box.image} has no {target} to mount something at, and it cannot be made:"
                f" {error.strerror}"
            ) from error


# --- what was seen


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
    if tuple(map(int, facts["python"].split(".")[:2])) < (3, 11):
        return facts, f"{box.image} has Python {facts['python']}; hpcdist needs 3.11 or newer", False
    if box.gpus and (old := _driver_problem(facts)):
        return facts, f"{box.image} needs {old} on {where}", False
    return facts, "", False


def _driver_problem(facts: Mapping[str, Any]) -> str:
    cuda, driver = facts.get("cuda"), facts.get("driver")
    if not cuda or not driver:
        return ""
    oldest = _OLDEST_DRIVER.get(int(str(cuda).split(".")[0]))
    if oldest is None or tuple(map(int, str(driver).split(".")[:2])) >= oldest:
        return ""
    return f"driver {oldest[0]}.{oldest[1]} or newer for its CUDA {cuda}, found {driver}"


def _why_not_started(box: Box, errors: str, where: str) -> tuple[str, bool]:
    said = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith("srun: ")]
    text = " ".join(said)
    if "is not installed on" in text:
        return said[0].removeprefix("hpcdist: "), False
    if re.search("exec format error", text, re.IGNORECASE):
        return f"{box.image} is for another processor than {where} has ({os.uname().machine})", False
    if re.search("image not known|no such image|no such object", text, re.IGNORECASE):
        return f"{box.image} is not on {where}: {said[-1]}", False
    if re.search("no such file|not found|can't execve", text, re.IGNORECASE):
        return f"{box.image} cannot be started on {where}, or has no {box.python} in it: {said[-1]}", False
    last = said[-1] if said else "nothing was said"
    return f"{box.runtime} could not start {box.image} on {where}: {last}", True


def own_failure(runtime: str, code: int, log: str) -> tuple[str, bool] | None:
    """What a runtime says of a container that it could not start, and whether a retry may help; None for a rank's end.

    podman and docker keep exit codes 125 to 127 for themselves: they failed, the command cannot be executed, it is
    not there. The others end as a command that failed, and mark their lines.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    if runtime in DETACHED:
        if code not in (125, 126, 127):
            return None
        return f"{runtime} could not start the container (exit code {code}): {last}", code == 125
    if code <= 0 or _MARKS[runtime] not in last:
        return None
    return f"{runtime} could not start the container (exit code {code}): {last}", True


def digest(box: Box, env: Mapping[str, str]) -> str | None:
    """What names the image's content: its id in its store, or what its file's name says (`hpcdist-0.1.0-…`)."""
    if box.outlives_step:
        if shutil.which(box.runtime, path=env.get("PATH")) is None:
            return None
        command = [box.runtime, "image", "inspect", "--format", "{{.Id}}", box.image]
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=LOOK_S, check=False)
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
    for task, node in enumerate(nodes):
        facts, problem, may_pass = judge(box, _of_task(output, task), _of_task(errors, task), node)
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
