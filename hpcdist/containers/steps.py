"""The containers of a run: of its ranks on Slurm, with the steps that check and clean up nodes, and of a whole run on
this machine; and the machine's container engine.
"""

from __future__ import annotations

import logging
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from hpcdist.config.schema import Config
from hpcdist.config.tree import parse_value
from hpcdist.config.written import redacted_argument, secrets_of
from hpcdist.containers.probe import (
    PROBE_TIMEOUT_S,
    check_image_on_nodes,
    image_digest,
    image_probe_command,
    image_probe_env,
    probe_outcome,
    start_failure,
    start_interrupted,
    started_by_other_task,
)
from hpcdist.containers.spec import (
    CONTAINERS_STEP,
    DETACHED,
    PASSED,
    WITHHELD,
    ContainerSpec,
    Mount,
    container_command,
    outer_env,
    remove_command,
    without_nested,
)
from hpcdist.errors import ImageError, UserMistake
from hpcdist.host.commands import last_line, run_within
from hpcdist.host.files import write_json
from hpcdist.host.log_files import last_lines
from hpcdist.host.machine import CAP_SYS_RESOURCE, DIGEST, NAME, has_capability
from hpcdist.host.nodelist import expand
from hpcdist.host.retry import retry
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.snapshot import git_root
from hpcdist.slurm.components import components
from hpcdist.slurm.on_nodes import task_words

# The containers of a run's ranks on Slurm: from config to ContainerSpec, and the checks before submission.

#: Never mounted just because they are the current folder: they would hide the image's own programs.
_OF_THE_IMAGE = {"/", "/bin", "/dev", "/etc", "/lib", "/opt", "/proc", "/sbin", "/sys", "/usr", "/var"}

#: Image references that `enroot import` accepts for pyxis: of a registry, or of the docker daemon on each node.
_PYXIS_REFERENCE = re.compile(
    r"(docker://)?([^@/#]+@)?([^@/#]+[#/])?[a-z0-9][a-z0-9/._-]*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?|dockerd://[A-Za-z0-9/._:-]+"
)


def rank_container(config: Config, run: RunDir, *, cwd: Path, root: Path) -> ContainerSpec | None:
    """Return the container of a run's ranks; None if `container.runtime` is `none`.

    Args:
        cwd: the ranks' current folder.
        root: top of the user's code around it.

    Raises UserMistake if a path cannot be mounted.
    """
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
    uses_gpus = any(part.gpus_per_node for part in components(config)) and config.launch.device != "cpu"
    return ContainerSpec(
        runtime=container.runtime,
        image=container.image,
        run=run.path,
        mounts=without_nested([*own, *same]),
        workdir=cwd,
        env=tuple(dict.fromkeys(env)),
        gpus="all" if container.gpus == "all" or (container.gpus == "auto" and uses_gpus) else "",
        python=container.python,
        extra_args=tuple(container.extra_args),
        unpacked=container.runtime == "enroot" and Path(container.image).is_dir(),
        image_env=container.runtime == "charliecloud" and (Path(container.image) / "ch/environment").is_file(),
    )


def container_problems(config: Config, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """Return the mistakes in a run's container settings that this machine can find: one line each, with key and fix."""
    container = config.container
    found = [
        f"container.mounts: {mount.source} does not exist here; mount folders that only the nodes have by"
        " container.extra_args"
        for mount in map(Mount.parse, container.mounts)
        if not Path(mount.source).exists()
    ]
    try:
        if container.runtime in ("apptainer", "charliecloud", "enroot"):
            _check_path(container.runtime, container.image)
        if container.runtime == "pyxis":
            _check_pyxis_image(container.image)
        run = RunDir(Path(config.runs_dir) / config.experiment / (config.name or "probe"))
        if (spec := rank_container(config, run, cwd=cwd, root=git_root(cwd) or cwd)) is not None and not found:
            check_image_here(config, spec, env)
    except UserMistake as error:
        found.append(str(error))
    return found


def _check_path(runtime: str, image: str) -> None:
    if "://" in image:
        raise UserMistake(f"container.image: {image} would be fetched by every rank: convert it to a file first")
    path = Path(image)
    if not path.exists():
        raise UserMistake(f"container.image: no such file or folder: {image}")
    is_folder = runtime == "charliecloud" or (runtime == "enroot" and path.is_dir())
    if is_folder and not ((path / "usr").is_dir() and (path / "dev").is_dir()):
        raise UserMistake(f"container.image: {image} holds no root file system (no usr and dev in it)")


def _check_pyxis_image(image: str) -> None:
    """Reject images that pyxis cannot start: a name that begins with `/` or `.` is a file, others are references.

    Whether a registry has the image is unknown here: the nodes fetch it with credentials and mirrors of their own.
    """
    if image.startswith(("/", ".")):
        _check_path("pyxis", image)
        if Path(image).is_dir():
            raise UserMistake(
                f"container.image: {image} is a folder, and pyxis needs a .sqsh file or an image reference"
            )
    elif not _PYXIS_REFERENCE.fullmatch(image):
        raise UserMistake(
            f"container.image: {image} is neither a path that begins with / nor an image reference of pyxis:"
            " [USER@][REGISTRY#]IMAGE[:TAG] with IMAGE in lower case"
        )


def check_image_here(config: Config, spec: ContainerSpec, env: Mapping[str, str]) -> dict[str, Any] | None:
    """Start the image once on this machine and return its facts; None if this machine has no such runtime.

    Raises UserMistake if the image does not exist, or does not fit this hpcdist.
    """
    make_mount_points(spec)
    command = image_probe_command(spec)
    tool = {"charliecloud": "ch-run", "pyxis": ""}.get(spec.runtime, spec.runtime)
    if not config.container.check_image or shutil.which(tool, path=env.get("PATH")) is None:
        return None
    if spec.runtime in DETACHED and (error := _missing_in_store(spec, env)):
        raise UserMistake(
            f"container.image: {spec.image} is not in {spec.runtime}'s store on this machine ({error}): build or load"
            " it, or set container.check_image=false if only the nodes have it"
        )
    done = run_within(command.argv, PROBE_TIMEOUT_S, env=image_probe_env(spec, env))
    facts, problem, _ = probe_outcome(spec, done.stdout, done.stderr, "this machine")
    if problem:
        raise UserMistake(f"container.image: {problem}")
    return facts


def _missing_in_store(spec: ContainerSpec, env: Mapping[str, str]) -> str:
    command = [spec.runtime, "image", "inspect", "--format", "{{.Id}}", spec.image]
    done = run_within(command, PROBE_TIMEOUT_S, env=env)
    return "" if done.returncode == 0 else " ".join(done.stderr.split()).removeprefix("Error: ")


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


# Slurm steps of a job that check the image on every node and remove leftover containers.

log = logging.getLogger(__name__)

#: Number of lines at the end of a rank's log that are searched for messages of the container runtime.
MAX_LINES = 20_000
REMOVE_S = 30.0
#: Slurm starts no more steps in this job; it has killed the running ones, and their containers ended with them.
_JOB_IS_OVER = re.compile("job \\d+ has expired|Unable to confirm allocation|already complet")


class NoContainers:
    def env(self, env: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment of the step that runs the ranks."""
        return env

    def prepare(self, end_steps: Callable[[], object]) -> None:
        """Remove leftover containers and, the first time, check the image on every node.

        Args:
            end_steps: ends the remaining steps of the job.

        Raises UserMistake if a retry cannot help: a node lacks the runtime or the image, or the image has another
        version.
        """

    def clean_up(self, attempt: Attempt, *, failed: bool) -> None:
        """Remove what a step has left on the nodes and in the folder of an attempt.

        Args:
            failed: whether the step has failed or was killed.
        """

    def exit_code(self, attempt: Attempt, rank: int, host: str, code: int) -> int:
        """Return a rank's exit code as if it ran outside a container.

        If the runtime could not start the container, write the outcome file that the rank could not write.
        """
        return code

    def reported_exits(self, attempt: Attempt, *, skip: Container[int] = ()) -> dict[int, int]:
        """Return the exit codes other than 0 that process 1 of the ranks' containers (`pid1.py`) has written, by rank.

        srun reports the end of a rank only after the runtime's client has ended, which may take many seconds.
        """
        return {}


class ContainerSteps(NoContainers):
    """The containers of a job from one start of its batch script to the next requeue.

    Args:
        het: whether the job is heterogeneous: several components, each with its own nodes.
        present: returns the nodes of the job on which steps can run, if these may not be all.
    """

    def __init__(
        self,
        spec: ContainerSpec,
        run: RunDir,
        env: Mapping[str, str],
        *,
        het: bool = False,
        present: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._spec = spec
        self._run = run
        self._env = dict(env)
        self._het = het
        self._checked = False
        self._present = present
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
        facts: dict[str, Any] = {}
        for group, nodes in self._nodes():
            # Some components of a heterogeneous job may have no GPUs; the driver's version is visible without them.
            probe = image_probe_command(replace(self._spec, gpus="" if self._het else self._spec.gpus))
            env = image_probe_env(self._spec, self._env)
            task = [*probe.srun_flags, *probe.argv]
            step = ["srun", *task_words(nodes, task, CONTAINERS_STEP, {**group, "label": True})]
            done = run_within(step, PROBE_TIMEOUT_S, env=env)
            facts = check_image_on_nodes(self._spec, nodes, done.stdout, done.stderr)
        self._checked = True
        write_json(
            self._run.container,
            {
                "runtime": self._spec.runtime,
                "image": self._spec.image,
                "image_digest": image_digest(self._spec, self._env),
                **{key: facts[key] for key in ("hpcdist", "python", "torch", "cuda") if key in facts},
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
        for group, nodes in self._nodes():
            step = ["srun", *task_words(nodes, command, CONTAINERS_STEP, group)]
            done = run_within(step, REMOVE_S, env=self._env)
            if done.returncode != 0 and not _JOB_IS_OVER.search(done.stderr):
                log.warning("containers may remain on a node: %s", " ".join(done.stderr.split()))

    def exit_code(self, attempt: Attempt, rank: int, host: str, code: int) -> int:
        path = attempt.log(rank)
        text = "\n".join(line for _, line in last_lines(path, MAX_LINES)) if path.exists() else ""
        failed = start_failure(self._spec.runtime, code, text)
        # Ranks ignore the signal that Slurm sends ahead of the time limit: their container was still being created.
        interrupted = code == -signal.SIGUSR2 or start_interrupted(self._spec.runtime, text)
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
                    "peer_lost": started_by_other_task(error),
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

    def _nodes(self) -> list[tuple[Mapping[str, Any], list[str]]]:
        """Return srun's flags and the nodes, in Slurm's order, of each component of the job."""
        if present := self._present():
            return [({"nodelist": ",".join(present)}, list(present))]
        if not self._het:
            return [({}, expand(self._env["SLURM_JOB_NODELIST"]))]
        size = int(self._env["SLURM_HET_SIZE"])
        return [
            ({"het-group": index}, expand(self._env[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"])) for index in range(size)
        ]


def _with_signal(code: int) -> int:
    """Return an exit code of a shell, 128 + a signal, as the negative signal."""
    known = code > 128 and code - 128 in {int(number) for number in signal.Signals}
    return 128 - code if known else code


# The container engine of this machine: docker, podman or buildah.

EngineName = Literal["docker", "podman", "buildah"]
#: Engines that can run containers; buildah only builds images.
RUNNERS: tuple[EngineName, ...] = ("docker", "podman")
#: Limit for the first answer of the engine, because a daemon may hang.
ANSWER_S = 30.0
_TAR_SUMMARY = "Exiting with failure status due to previous errors"


@dataclass(frozen=True)
class Engine:
    name: EngineName

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.name, *arguments], input=stdin, capture_output=True, text=True, errors="replace", check=False
        )

    def output(self, *arguments: str) -> str:
        """Run a command of the engine and return its standard output. Raises ImageError with its last error line."""
        done = self.run(*arguments)
        if done.returncode:
            raise ImageError(f"`{self.name} {' '.join(arguments[:2])}` failed: {error_line(done.stderr)}")
        return done.stdout

    def is_rootless_daemon(self) -> bool:
        """Return whether this is docker with a daemon of an ordinary user, who is root in its containers."""
        if self.name != "docker":
            return False
        return "name=rootless" in self.run("info", "--format", "{{.SecurityOptions}}").stdout


def find_engine(requested: str | None, among: Sequence[EngineName]) -> Engine:
    """Return the requested engine, or the first one that works on this machine.

    Raises UserMistake if no engine works; the message has the problem of each.
    """
    if requested is not None and requested not in among:
        raise UserMistake(f"{requested!r} cannot do this; choose one of {', '.join(among)}")
    candidates = [name for name in among if requested in (None, name)]
    problems = []
    for name in candidates:
        problem = _engine_problem(name)
        if problem is None:
            return Engine(name)
        problems.append(f"{name} {problem}")
    raise UserMistake(f"no container engine to use here: {'; '.join(problems)}")


def _engine_problem(name: EngineName) -> str | None:
    """Return why an engine does not work on this machine; None if it works."""
    if shutil.which(name) is None:
        return "is not installed"
    # docker's client answers without its daemon, so the server's version is requested. The others have no daemon, and
    # commands on their store would block for minutes while a build writes a large layer.
    command = [name, "version", "--format", "{{.Server.Version}}"] if name == "docker" else [name, "--version"]
    done = run_within(command, ANSWER_S)
    return f"is installed, but fails: {error_line(done.stderr)}" if done.returncode else None


def error_line(stderr: str) -> str:
    """Return the last line of a command's standard error that gives a reason: tar ends with one that does not."""
    lines = [line for line in stderr.splitlines() if not line.endswith(_TAR_SUMMARY)]
    return last_line("\n".join(lines), limit_chars=1000) or "no error message"


# `hpcdist run --in docker|podman`: the container of a whole run on this machine.

#: Prefixes of variables that are passed by name, so that no value is in the command line. All others stay outside.
PASSED_PREFIXES = ("MLFLOW_TRACKING_", "NCCL_", "GLOO_", "TORCH_", "HPCDIST_")
#: Variables that the image or the command line sets.
SET_HERE = ("HPCDIST_RUNS_DIR", "HPCDIST_DATA_DIR", NAME, DIGEST)
_REFERENCE = "${oc.env:"


def host_container(
    engine: EngineName, image: str, digest: str, user: str, env: Mapping[str, str], *, rootless_daemon: bool = False
) -> ContainerSpec:
    """Return the container of an image with this machine's devices, limits and user, before a config is applied.

    Args:
        rootless_daemon: whether docker's daemon belongs to the caller. Its containers then map root to the caller, and
            the caller's own user id to another user, who cannot write to the caller's folders.
    """
    has_rdma = Path("/dev/infiniband").is_dir()
    if engine == "docker":
        # A daemon without CAP_SYS_RESOURCE (rootless, in a container) cannot raise the limit, and starts no container.
        ulimits = ("memlock=-1",) if has_rdma and (not rootless_daemon or _may_lock_memory()) else ()
    else:
        # podman without root is bound to the limits of its caller.
        ulimits = ("memlock=-1" if _may_lock_memory() else "host",)
    return ContainerSpec(
        runtime=engine,
        image=image,
        user="0:0" if rootless_daemon else f"{os.getuid()}:{os.getgid()}",
        ulimits=ulimits,
        devices=("/dev/infiniband",) if has_rdma else (),
        env=tuple(sorted(name for name in env if name.startswith(PASSED_PREFIXES) and name not in SET_HERE)),
        env_values={"USER": user, NAME: image, DIGEST: digest},
        host_network=False,
        terminal=os.isatty(0) and os.isatty(1),
    )


def for_config(
    spec: ContainerSpec, config: Config, cwd: Path, *, own_code: bool, num_gpus: int, env: Mapping[str, str]
) -> ContainerSpec:
    """Add what a config needs: folders, GPUs, network, and the time to save a checkpoint when the container stops.

    Args:
        own_code: whether the run imports code from `cwd`.
    """
    runs, data = (Path(folder).expanduser().absolute() for folder in (config.runs_dir, config.data.root))
    gpus = ""
    if num_gpus and config.launch.device != "cpu":
        gpus = env.get("CUDA_VISIBLE_DEVICES", "").strip() or "all"
    folders = dict.fromkeys([runs, data, *([cwd] if own_code else [])])
    return replace(
        spec,
        gpus=gpus,
        # Ranks use loopback and need no network except to reach an MLflow server on this machine.
        host_network=urlsplit(config.tracking.uri).hostname in ("localhost", "127.0.0.1", "::1"),
        # Paths are the same inside and outside, because MLflow's database and the run folder store them.
        mounts=tuple(Mount(source=str(folder), target=str(folder)) for folder in folders),
        workdir=cwd if own_code else None,
        env_values={**spec.env_values, "HPCDIST_RUNS_DIR": str(runs), "HPCDIST_DATA_DIR": str(data)},
        # Ranks need the first to save a checkpoint, the supervisor the second to deliver the rest to MLflow.
        stop_timeout_s=math.ceil(config.launch.stop_grace_s + config.tracking.drain_timeout_s),
    )


def with_mount(spec: ContainerSpec, folder: Path) -> ContainerSpec:
    return replace(spec, mounts=(*spec.mounts, Mount(source=str(folder), target=str(folder))))


def folder_overrides(config: Config, default: Config) -> list[str]:
    """Return overrides with absolute paths for the folders that a config sets: `~` and relative paths differ inside."""
    chosen = {"runs_dir": (config.runs_dir, default.runs_dir), "data.root": (config.data.root, default.data.root)}
    return [f"{key}={value}" for key, (value, usual) in chosen.items() if value != usual]


def without_secrets(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Move the secrets of overrides into variables, because `docker inspect` and `ps` show arguments to other users.

    Returns:
        The overrides, which refer to the variables, and the variables.

    Raises UserMistake if a secret is inside a list or a mapping.
    """
    arguments, variables = [], {}
    for number, text in enumerate(overrides):
        key, _, raw = text.partition("=")
        if redacted_argument(text) == text or _REFERENCE in raw:
            arguments.append(text)
            continue
        if not isinstance(value := parse_value(raw), str):
            raise UserMistake(
                f"{key} holds a secret, which the container's command line would show to other users:"
                f" give each by a key of its own, such as {key}.NAME=…"
            )
        name = f"HPCDIST_OVERRIDE_{number}"
        variables[name] = value
        arguments.append(f"{key}={_REFERENCE}{name}}}")
    return arguments, variables


def _may_lock_memory() -> bool:
    """Return whether a child of this process may lock unlimited memory, as RDMA must."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        return True
    return has_capability(CAP_SYS_RESOURCE)
