"""The Python environment of a run's ranks on Slurm: from config to interpreter and variables, with their checks."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import hpcdist
from hpcdist.config.cluster_schema import EnvironmentConfig
from hpcdist.config.schema import Config
from hpcdist.environments.modules import load_modules
from hpcdist.errors import UserMistake
from hpcdist.host.files import write_atomic
from hpcdist.host.gpu_info import driver_problem
from hpcdist.host.json_files import write_json
from hpcdist.host.time_limits import last_line, run_within
from hpcdist.host.versions import VERSIONS_MARK, versions_program
from hpcdist.run.folder import RunDir

#: Name of the Python in an environment.
PYTHON = "python3"
#: Packages that a rank imports before the user's code.
REQUIRED = ("numpy", "psutil", "torch")
#: Time limit for one start of Python, which takes a while from a slow file system.
START_S = 120.0
#: Versions that are recorded in the run folder.
RECORDED = ("python", "torch", "cuda")
#: First word of the line in which the probe lists missing packages.
_MISSING_MARK = "hpcdist-missing"
_OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """The Python of a run's ranks, and the variables that it is started with."""

    python: str  #: path of the interpreter on the nodes
    env: Mapping[str, str]  #: all variables of the ranks
    import_path: tuple[str, ...] = ()  #: the folder with hpcdist; none for the supervisor's Python


def rank_environment(config: Config, run: RunDir, env: Mapping[str, str]) -> RankEnvironment:
    """Return the environment of a run's ranks in a job; start its Python once, and record the versions.

    Without `cluster.environment`, the ranks use the supervisor's Python. Raises UserMistake if ranks cannot use the
    environment on this node.
    """
    environment = config.cluster.environment
    if environment.kind == "none":
        run.rank_environment.unlink(missing_ok=True)
        return RankEnvironment(python=sys.executable, env=env)
    if environment.modules:
        env = load_modules(environment.modules, env)
    if environment.kind == "module":
        python = shutil.which(PYTHON, path=env.get("PATH", "")) or ""
        if not python:
            raise UserMistake(f"cluster.environment.modules: no {PYTHON} on the PATH after loading them")
    else:
        python = program_of(environment)
        env = activated(env, Path(environment.path))
    versions = python_versions(python, env)
    problem = driver_problem(versions.get("cuda", ""), versions.get("driver", ""))
    if problem:
        raise UserMistake(f"cluster.environment: the torch of {python} needs {problem}")
    recorded = {name: versions[name] for name in RECORDED if name in versions}
    origin = {"kind": environment.kind, "path": environment.path, "modules": environment.modules}
    write_json(run.rank_environment, {**origin, **recorded})
    link_package(run.package)
    return RankEnvironment(python=python, env=env, import_path=(str(run.package),))


def python_of(config: Config) -> str:
    """Return the ranks' Python for `submit --dry-run`: without its path if only modules in the job give it."""
    environment = config.cluster.environment
    if environment.kind == "none":
        return sys.executable
    if environment.kind == "module":
        return PYTHON
    return program_of(environment)


def program_of(environment: EnvironmentConfig) -> str:
    """Return the Python of a virtual environment."""
    return str(Path(environment.path) / "bin" / PYTHON)


def activated(env: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return variables with the programs of an environment first on the PATH, as after its `activate` script."""
    kept = {name: value for name, value in env.items() if name != "PYTHONHOME"}
    path = os.pathsep.join([f"{root}/bin", env.get("PATH", os.defpath)])
    return {**kept, "VIRTUAL_ENV": str(root), "PATH": path}


def link_package(folder: Path) -> None:
    """Make a folder for PYTHONPATH with this hpcdist, and nothing else of the Python that it is installed in.

    Ranks and supervisor then have the same version. The folder includes the entry points by which MLflow in a rank
    finds hpcdist's tracking store.
    """
    from importlib import metadata  # slow to import

    folder.mkdir(exist_ok=True)
    link = folder / "hpcdist"
    link.unlink(missing_ok=True)  # an earlier start of the job may have used another installation
    link.symlink_to(Path(hpcdist.__file__).parent)
    with suppress(metadata.PackageNotFoundError):  # a checkout on PYTHONPATH has no entry points
        installed = metadata.distribution("hpcdist")
        information = folder / f"hpcdist-{hpcdist.__version__}.dist-info"
        information.mkdir(exist_ok=True)
        for name in ("METADATA", "entry_points.txt"):
            write_atomic(information / name, installed.read_text(name) or "")


def python_versions(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """Start a Python once and return its versions. Raises UserMistake if ranks cannot use it."""
    try:
        done = run_within([python, "-c", _program()], START_S, env=env)
    except OSError as error:
        raise UserMistake(f"cluster.environment: {python} cannot be started: {error.strerror}") from error
    answers = {}
    for line in done.stdout.splitlines():
        word, _, answer = line.partition(" ")
        answers[word] = answer
    if done.returncode != 0 or _MISSING_MARK not in answers:
        reason = last_line(done.stderr) or f"exit code {done.returncode}"
        raise UserMistake(f"cluster.environment: {python} does not start: {reason}")
    versions: dict[str, str] = json.loads(answers[VERSIONS_MARK])
    major, minor = versions["python"].split(".")[:2]
    if (int(major), int(minor)) < _OLDEST_PYTHON:
        raise UserMistake(f"cluster.environment: {python} is Python {versions['python']}; hpcdist needs 3.11 or newer")
    missing = answers[_MISSING_MARK].split()
    if missing:
        raise UserMistake(
            f"cluster.environment: {python} has no {', '.join(missing)}: add the packages to the environment"
        )
    return versions


def _program() -> str:
    """Return the source of the probe: it prints the versions, and in a second line the missing packages."""
    return f"""{versions_program()}
import importlib.util
print({_MISSING_MARK!r}, *(name for name in {REQUIRED!r} if importlib.util.find_spec(name) is None))
"""


def environment_problems(config: Config, env: Mapping[str, str]) -> list[str]:
    """Return why ranks cannot use the virtual environment, as far as this machine can find out before a submission."""
    environment = config.cluster.environment
    # The commands of `cluster.setup` may create it on a local disk of each node. The job checks it again.
    if environment.kind != "venv" or config.cluster.setup:
        return []
    python = program_of(environment)
    if not os.access(python, os.X_OK):
        path = environment.path
        return [f"cluster.environment.path: {path} is not a virtual environment: no program {python}"]
    if environment.modules:  # its Python may need them
        return []
    try:
        python_versions(python, activated({**env, **config.cluster.env}, Path(environment.path)))
    except UserMistake as error:
        return [str(error)]
    return []
