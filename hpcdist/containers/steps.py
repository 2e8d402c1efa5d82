"""The containers of a run's ranks on Slurm: their specification and checks before submission, the start of an image to
read the versions inside, the errors of runtimes, and the Slurm steps that check and clean up nodes.
"""

import hashlib
import inspect
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.config.schema import Config
from hpcdist.config.topology import expand
from hpcdist.config.written import secrets_of
from hpcdist.containers.spec import (
    CONTAINERS_STEP,
    DETACHED,
    PASSED,
    WITHHELD,
    ContainerCommand,
    ContainerSpec,
    Mount,
    container_command,
    outer_env,
    remove_command,
    without_nested,
)
from hpcdist.errors import HpcdistError, UserMistake, terminal_text
from hpcdist.host.commands import run_within
from hpcdist.host.files import parse_object, write_json
from hpcdist.host.log_files import last_lines
from hpcdist.host.machine import driver_problem, source_digest, versions
from hpcdist.host.retry import retry
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.snapshot import git_root
from hpcdist.slurm.on_nodes import lines_of_task, task_words
from hpcdist.slurm.placement import requested_cluster

# The containers of ranks: from config to ContainerSpec, and the checks before submission.

#: Never mounted just because they are the current folder: they would hide the image's own programs.
_OF_THE_IMAGE = {"/", "/bin", "/dev", "/etc", "/lib", "/opt", "/proc", "/sbin", "/sys", "/usr", "/var"}


def rank_container(config: Config, run: RunDir, *, cwd: Path, root: Path) -> ContainerSpec | None:
    """Return the container of a run's ranks; None if `container.runtime` is `none`."""
    container = config.container
    if container.runtime == "none":
        return None
    own = [Mount.parse(text) for text in container.mounts]
    paths = [run.path, root, cwd]
    if Path(config.data.root).is_dir():
        paths.append(Path(config.data.root))
    if file := config.trainer.script_file:
        paths.append(file.parent)
    taken = {mount.target for mount in own} | _OF_THE_IMAGE
    same = [Mount(source=str(path), target=str(path)) for path in paths if str(path) not in taken]
    names = [*config.cluster.env, *config.launch.env, *secrets_of(config)]
    env = [*PASSED, *container.env, *(name for name in names if name not in WITHHELD)]
    uses_gpus = requested_cluster(config).gpus_per_node > 0 and config.launch.device != "cpu"
    return ContainerSpec(
        runtime=container.runtime,
        image=container.image,
        run=run.path,
        mounts=without_nested([*own, *same]),
        workdir=cwd,
        env=tuple(dict.fromkeys(env)),
        gpus="all" if uses_gpus else "",
        python=container.python,
        extra_args=tuple(container.extra_args),
        unpacked=container.runtime == "enroot" and Path(container.image).is_dir(),
        image_env=container.runtime == "charliecloud" and (Path(container.image) / "ch/environment").is_file(),
    )


def container_problems(config: Config, cwd: Path, env: Mapping[str, str]) -> list[str]:
    container, image = config.container, config.container.image
    found = [
        f"container.mounts: {mount.source} does not exist here; mount folders that only the nodes have by"
        " container.extra_args"
        for mount in map(Mount.parse, container.mounts)
        if not Path(mount.source).exists()
    ]
    try:
        # pyxis takes a name that begins with `/` or `.` as a file. Whether a registry has another image is unknown
        # here: the nodes fetch it with credentials and mirrors of their own.
        is_file = container.runtime == "pyxis" and image.startswith(("/", "."))
        if is_file or container.runtime in ("apptainer", "charliecloud", "enroot"):
            _check_path(container.runtime, image)
        run = RunDir(Path(config.runs_dir) / config.experiment / (config.name or "probe"))
        spec = rank_container(config, run, cwd=cwd, root=git_root(cwd) or cwd)
        if spec is not None and not found:
            make_mount_points(spec)
            if container.check_image:
                _check_image_here(spec, env)
    except UserMistake as error:
        found.append(str(error))
    return found


def _check_path(runtime: str, image: str) -> None:
    if "://" in image:
        raise UserMistake(f"container.image: {image} would be fetched by every rank: convert it to a file first")
    path = Path(image)
    if not path.exists():
        raise UserMistake(f"container.image: no such file or folder: {image}")
    if runtime == "pyxis" and path.is_dir():
        raise UserMistake(f"container.image: {image} is a folder, and pyxis needs a .sqsh file or an image reference")
    is_folder = runtime == "charliecloud" or (runtime == "enroot" and path.is_dir())
    if is_folder and not ((path / "usr").is_dir() and (path / "dev").is_dir()):
        raise UserMistake(f"container.image: {image} holds no root file system (no usr and dev in it)")


def _check_image_here(spec: ContainerSpec, env: Mapping[str, str]) -> None:
    """Start the image once on this machine, if it has such a runtime."""
    tool = {"charliecloud": "ch-run", "pyxis": ""}.get(spec.runtime, spec.runtime)
    if shutil.which(tool, path=env.get("PATH")) is None:
        return
    if spec.outlives_step and (stored := _inspect_in_store(spec, env)).returncode != 0:
        error = " ".join(stored.stderr.split()).removeprefix("Error: ")
        raise UserMistake(
            f"container.image: {spec.image} is not in {spec.runtime}'s store on this machine ({error}): build or load"
            " it, or set container.check_image=false if only the nodes have it"
        )
    command, outer = image_probe(spec, env)
    done = run_within(command.argv, PROBE_TIMEOUT_S, env=outer)
    _, problem, _ = probe_outcome(spec, done.stdout, done.stderr, "this machine")
    if problem:
        raise UserMistake(f"container.image: {problem}")


def _inspect_in_store(spec: ContainerSpec, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [spec.runtime, "image", "inspect", "--format", "{{.Id}}", spec.image]
    return run_within(command, PROBE_TIMEOUT_S, env=env)


def make_mount_points(spec: ContainerSpec) -> None:
    """Create the mount points of a run in charliecloud's unpacked image, which is read-only once it is started.

    ch-run mounts the host's /etc/hosts and /etc/resolv.conf by itself if the image has such files.
    """
    if spec.runtime != "charliecloud":
        return
    argv = container_command(spec, []).argv
    binds = [word.removeprefix("--bind=").split(":") for word in argv if word.startswith("--bind=")]
    for source, target in [*binds, *((path, path) for path in ("/etc/hosts", "/etc/resolv.conf"))]:
        place = Path(spec.image) / target.lstrip("/")
        try:
            if not Path(source).is_file():
                place.mkdir(parents=True, exist_ok=True)
            elif not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
        except OSError as error:
            raise UserMistake(
                f"container.image: {spec.image} has no mount point {target}, and it cannot be created"
                f" ({error.strerror}): ask the owner of the image to create it, or use a copy of your own"
            ) from error


# The start of an image to read the versions inside, and the errors of runtimes that cannot start it.

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
#: Error messages of runtimes that use the same exit codes for their own failures and the command's.
_MESSAGES = {
    "apptainer": re.compile(r"^(FATAL|ERROR)\s*:|^Error for command "),
    "charliecloud": re.compile(r"ch-run\["),
    "enroot": re.compile(r"\[ERROR\]|^enroot-[a-z]+: |^Usage: enroot |^mkdir: .*enroot"),
    "pyxis": re.compile(r"^pyxis:|^execve\(\): "),
}
#: slurmstepd adds the node's name where several slurmds share a machine.
_PYXIS_ERROR = re.compile(r"(?:srun|slurmstepd(?:-\S+)?): error: (pyxis:.*|execve\(\): .*)")
#: Slurm's messages; progress of pyxis and apptainer; references to the help, which end the errors of docker's clients;
#: and the log line of client 20.10 after an error of the daemon.
_NOT_ITS_OWN = re.compile(
    r"(srun|slurmstepd(-\S+)?|pyxis): |(INFO|WARNING)\s*:|(Run|See) 'docker .*--help'|Usage:  docker |"
    r"time=\S+ level=error"
)
#: pyxis reports the signal that ended `enroot create`.
_ENDED_BY_USR2 = re.compile(rf"pyxis: child \d+ terminated with signal {int(signal.SIGUSR2)}\b")
#: Errors that no retry solves, and what to do about them.
_FIXES = (
    ("unknown (shorthand )?flag|^Usage: enroot ", "see container.extra_args"),
    ("Invalid image reference", "write container.image as [USER@][REGISTRY#]IMAGE[:TAG] with IMAGE in lower case"),
    (
        "rlimit type 8: operation not permitted|Requesting capability set|could not create (character|block) device|"
        "permission denied while trying to connect|could not select device driver|/dev/fuse: Permission denied|"
        r"Failed to create user namespace|Command not found: |\[ERROR\] Invalid argument: /|mkdir: .*enroot",
        "docs/how-to/containers.md lists what the runtime needs on each node",
    ),
)


def image_probe(spec: ContainerSpec, env: Mapping[str, str]) -> tuple[ContainerCommand, dict[str, str]]:
    """Return the command that starts the image without mounts (the run folder may not exist yet) and prints facts.

    Its environment has no PYTHONPATH, because the image's own code is examined.
    """
    bare = replace(spec, mounts=(), workdir=Path("/"), env=("SLURMD_NODENAME",))
    outer = {name: value for name, value in outer_env(spec, env).items() if name != "PYTHONPATH"}
    return container_command(bare, [spec.python, "-c", _PROBE]), outer


def probe_outcome(
    spec: ContainerSpec, output: str, errors: str, machine: str
) -> tuple[dict[str, Any] | None, str, bool]:
    """Return the facts of the probe (None if the image did not start), the problem, and whether a retry may help."""
    match = re.search(r"hpcdist-image (\{.*\})", output)
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
    if fix := next((fix for pattern, fix in _FIXES if re.search(pattern, text)), ""):
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
    if not (code in (125, 126, 127) if runtime in DETACHED else code > 0 and _MESSAGES[runtime].search(last)):
        return None
    fix = next((fix for pattern, fix in _FIXES if re.search(pattern, last)), "")
    error = f"{runtime} could not start the container (exit code {code}): {last}"
    return f"{error}: {fix}" if fix else error, not fix and not (runtime in DETACHED and code != 125)


def _own_lines(text: str) -> list[str]:
    """Return the output of the runtime and its command, without Slurm's messages, progress, help and colours.

    pyxis reports errors through Slurm, as `slurmstepd: error: pyxis: …`, and its progress as `pyxis: …`.
    """
    lines = []
    for line in filter(str.strip, terminal_text(text).splitlines()):
        if line.startswith(('Error for command "', "Usage: enroot ")):
            return [line.strip()]  # apptainer and enroot print their whole help after a wrong option
        if error := _PYXIS_ERROR.match(line):
            lines.append(error[1].rstrip())
        elif not _NOT_ITS_OWN.match(line):
            lines.append(line.strip())
    return lines


def _last(lines: Sequence[str]) -> str:
    """Return the line with the reason: in general the last one.

    Of several errors of pyxis it is the first, or, if that is a failed program, the error in its output, which pyxis
    quotes.
    """
    line = lines[-1] if lines else "it printed nothing"
    if line.startswith("pyxis:"):
        line, *others = [line for line in lines if line.startswith("pyxis:")]
        quoted = [other for other in others if other.startswith("pyxis:    ")]
        errors = [other for other in quoted if re.search(r"\[ERROR\]|FATAL ERROR|could not create", other)]
        if quoted and re.match(r"pyxis: child \d+ failed ", line):
            line = (errors or quoted)[-1]
    elif len(lines) > 1 and re.match(r"\[ERROR\] (Failed to mount: |/\S+ exited with return code)", line):
        line = f"{lines[-2]} {line}"  # enroot prints the reason before it
    return " ".join(line.split())


def image_digest(spec: ContainerSpec, env: Mapping[str, str]) -> str | None:
    """Return the image's id in its store, the digest in its file name (`hpcdist-0.1.0-…`), or one of parts of the file.

    The name counts only if the file is this user's or root's: others may use any name. The result is None if it is
    unknown, as for images in folders.
    """
    if spec.outlives_step:
        if shutil.which(spec.runtime, path=env.get("PATH")) is None:
            return None
        found = re.search(r"[0-9a-f]{64}", (done := _inspect_in_store(spec, env)).stdout)
        return f"sha256:{found[0]}" if done.returncode == 0 and found else None
    named = re.search(r"-([0-9a-f]{12,64})(\.\w+)?$", spec.image)
    path = Path(spec.image)
    if named and (not path.exists() or path.stat().st_uid in (os.geteuid(), 0)):
        return f"sha256:{named[1]}"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # The start of an image file contains the date of its build.
            parts = hashlib.sha256(f"{size}\n".encode() + file.read(DIGEST_BYTES))
            file.seek(max(0, size - DIGEST_BYTES))
            parts.update(file.read(DIGEST_BYTES))
    except OSError:
        return None
    return f"ends-sha256:{parts.hexdigest()}"


def check_image_on_nodes(spec: ContainerSpec, nodes: Sequence[str], output: str, errors: str) -> dict[str, Any]:
    """Return the facts of the first node from the output of `srun --label` with one probe per node."""
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


# Slurm steps of a job that check the image on every node and remove leftover containers.

log = logging.getLogger(__name__)

#: Number of lines at the end of a rank's log that are searched for messages of the container runtime.
MAX_LINES = 20_000
#: Slurm starts no more steps in this job; it has killed the running ones, and their containers ended with them.
_JOB_IS_OVER = re.compile("job \\d+ has expired|Unable to confirm allocation|already complet")


class NoContainers:
    def env(self, env: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment of the step that runs the ranks."""
        return env

    def prepare(self, end_steps: Callable[[], object]) -> None:
        """End the remaining steps, remove leftover containers and, the first time, check the image on every node.

        Raises UserMistake if a retry cannot help: a node lacks the runtime, or the image of this version.
        """

    def clean_up(self, attempt: Attempt, *, failed: bool) -> None:
        """Remove what a step has left on the nodes and in the folder of an attempt."""

    def exit_code(self, attempt: Attempt, rank: int, host: str, code: int) -> int:
        """Return a rank's exit code as if it ran outside a container."""
        return code

    def reported_exits(self, attempt: Attempt, *, skip: Container[int] = ()) -> dict[int, int]:
        """Return the exit codes other than 0 that process 1 of the ranks' containers (`pid1.py`) has written, by rank.

        srun reports the end of a rank only after the runtime's client has ended, which may take many seconds.
        """
        return {}


class ContainerSteps(NoContainers):
    """The containers of a job from one start of its batch script to the next requeue.

    Args:
        present: returns the nodes of the job on which steps can run, if these may not be all.
    """

    def __init__(
        self,
        spec: ContainerSpec,
        run: RunDir,
        env: Mapping[str, str],
        *,
        present: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._spec, self._run, self._env = spec, run, dict(env)
        self._present = present
        self._checked = False
        #: Whether a signal to a step, also of an earlier supervisor, may have ended pyxis' work on its containers.
        self._interrupted = True

    def env(self, env: Mapping[str, str]) -> Mapping[str, str]:
        return outer_env(self._spec, env)

    def prepare(self, end_steps: Callable[[], object]) -> None:
        # pyxis may still be removing containers, and ending its step kills that: the next line removes the rest.
        end_steps()
        self.remove_containers()
        self._interrupted = False
        if self._checked:
            return
        make_mount_points(self._spec)
        nodes, flags = self._nodes()
        probe, env = image_probe(self._spec, self._env)
        task = [*probe.srun_flags, *probe.argv]
        step = ["srun", *task_words(nodes, task, CONTAINERS_STEP, {**flags, "label": True})]
        done = run_within(step, PROBE_TIMEOUT_S, env=env)
        facts = check_image_on_nodes(self._spec, nodes, done.stdout, done.stderr)
        self._checked = True
        write_json(
            self._run.container,
            {
                "runtime": self._spec.runtime,
                "image": self._spec.image,
                "image_digest": image_digest(self._spec, self._env),
                **{key: facts[key] for key in ("hpcdist", "python", "torch", "cuda", "driver") if key in facts},
            },
        )

    def clean_up(self, attempt: Attempt, *, failed: bool) -> None:
        self._interrupted |= failed
        self.remove_containers()
        with suppress(OSError):  # nothing reads these files any more
            for path in attempt.path.glob("rank-*"):
                if path.suffix in (".line", ".exit"):
                    path.unlink(missing_ok=True)

    def remove_containers(self) -> None:
        """Remove the run's containers from every node; the run's lease guarantees that no other job uses them.

        pyxis removes its containers itself, unless a signal to the step ends the creation or the removal.
        """
        if not (self._spec.outlives_step or (self._interrupted and self._spec.runtime == "pyxis")):
            return
        command = remove_command(self._spec, self._env.get("SLURM_JOB_ID", ""))
        nodes, flags = self._nodes()
        done = run_within(["srun", *task_words(nodes, command, CONTAINERS_STEP, flags)], 30.0, env=self._env)
        if done.returncode != 0 and not _JOB_IS_OVER.search(done.stderr):
            log.warning("containers may remain on a node: %s", " ".join(done.stderr.split()))

    def exit_code(self, attempt: Attempt, rank: int, host: str, code: int) -> int:
        path = attempt.log(rank)
        text = "\n".join(line for _, line in last_lines(path, MAX_LINES)) if path.exists() else ""
        failed = start_failure(self._spec.runtime, code, text)
        # Ranks ignore the signal that Slurm sends ahead of the time limit: their container was still being created.
        is_pyxis = self._spec.runtime == "pyxis"
        interrupted = code == -signal.SIGUSR2 or (is_pyxis and _ENDED_BY_USR2.search(text) is not None)
        if interrupted:
            self._interrupted = True
            failed = f"{self._spec.runtime} was interrupted by SIGUSR2 while it created the container", True
        if failed is not None and not attempt.outcome(rank).exists():
            error, may_pass = failed
            write_json(
                attempt.outcome(rank),
                {
                    "outcome": "failed" if may_pass else "rejected",
                    "rank": rank,
                    "host": host,
                    "time": time.time(),
                    "step": None,
                    "error": error,
                    # It starts one container per node and step; the log of the task that started it has the reason.
                    "peer_lost": error.endswith("pyxis: container was not started successfully by another task"),
                    "interrupted": interrupted,
                    "traceback": [],
                },
            )
        return _with_signal(code)

    def reported_exits(self, attempt: Attempt, *, skip: Container[int] = ()) -> dict[int, int]:
        if not self._spec.outlives_step:
            return {}
        found = {}
        for path in retry(lambda: sorted(attempt.path.glob("rank-*.exit")), attempt.path):
            rank = int(path.stem.removeprefix("rank-"))
            # The wrapper of the rank removes the file once the container is removed.
            with suppress(FileNotFoundError):
                if rank not in skip and (code := int(retry(path.read_text, path))):
                    found[rank] = _with_signal(code)
        return found

    def _nodes(self) -> tuple[list[str], Mapping[str, Any]]:
        """Return the nodes on which steps can run, in Slurm's order, and the flags of srun that choose them."""
        if present := self._present():
            return list(present), {"nodelist": ",".join(present)}
        return expand(self._env["SLURM_JOB_NODELIST"]), {}


def _with_signal(code: int) -> int:
    """Return an exit code of a shell, 128 + a signal, as the negative signal."""
    return 128 - code if code - 128 in set(signal.Signals) else code
