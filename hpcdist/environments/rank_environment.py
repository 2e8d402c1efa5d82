"""The Python environment of a run's ranks on Slurm: from config to interpreter, variables and the nodes' work."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.config.schema.environment import EnvironmentConfig
from hpcdist.environments.loaded_modules import load_modules, program
from hpcdist.environments.node_copy import NodeRequest, local_sources
from hpcdist.environments.own_sources import copy_sources
from hpcdist.environments.packed import DAY_S, Packed, pack, store_of, touch
from hpcdist.errors import UserMistake
from hpcdist.files.atomic import write_json
from hpcdist.files.formats import fill
from hpcdist.files.ownership import make_private
from hpcdist.run.folder import RunDir, read_record

log = logging.getLogger(__name__)
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """The environment of the ranks of one job."""

    python: str  #: path of the interpreter on the nodes
    env: Mapping[str, str]  #: all variables of the ranks
    import_path: str  #: folder with hpcdist
    request: NodeRequest
    record: Mapping[str, object] = field(default_factory=dict)  #: for the run folder


def is_packed(environment: EnvironmentConfig) -> bool:
    """Return whether an environment is prepared in `runs_dir` before it is used."""
    return environment.kind == "uv" or (environment.stage and environment.kind in ("venv", "squashfs"))


def record_environment(config: Config, runs: Sequence[RunDir], env: Mapping[str, str]) -> None:
    """Pack the environment of runs and record it in the run folders, so that later changes do not affect these runs.

    Raises:
        UserMistake: the environment cannot be built or packed.
        OSError: the archive cannot be written.
    """
    if not is_packed(config.cluster.environment):
        for run in runs:
            run.rank_environment.unlink(missing_ok=True)
        return
    packed = pack(config.cluster.environment, Path(config.runs_dir), env)
    for run in runs:
        write_json(run.rank_environment, asdict(packed))


def rank_environment(config: Config, run: RunDir, env: Mapping[str, str]) -> RankEnvironment | None:
    """Return the environment of a run's ranks in a job; None if they use the supervisor's Python.

    Args:
        env: environment of the batch step.

    Raises:
        UserMistake: modules cannot be loaded, the environment cannot be packed, or `local_dir` has unknown variables.
    """
    environment = config.cluster.environment
    if environment.kind == "none":
        return None
    make_private(store := store_of(Path(config.runs_dir)))
    sources = str(copy_sources(store))
    packed = _packed(config, run, env)
    if environment.modules:
        env = load_modules(environment.modules, env)
    if environment.kind == "module":
        python = program(environment.python, env)
        request = NodeRequest(python=python, sources=sources)
    elif not environment.stage:
        root = Path(packed.path if packed else environment.path)
        python, env = str(root / "bin" / environment.python), activated(env, root)
        request = NodeRequest(python=python, sources=sources)
    else:
        assert packed is not None
        folder = Path(expanded(environment.local_dir, env)) / user_folder()
        python, env = str(folder / packed.key / "bin" / environment.python), activated(env, folder / packed.key)
        request = NodeRequest(
            python=python,
            sources=sources,
            folder=str(folder),
            key=packed.key,
            archive=packed.path,
            sha256=packed.sha256,
            prefix=packed.prefix,
            max_age_s=environment.max_age_days * DAY_S,
        )
    record = asdict(packed) if packed else {"kind": environment.kind, "path": environment.path}
    record |= {"modules": environment.modules}
    return RankEnvironment(
        python=python, env=env, import_path=str(local_sources(request)), request=request, record=record
    )


def python_of(config: Config) -> str | None:
    """Return the ranks' Python as far as it is known before a job, for `submit --dry-run`; None for hpcdist's own."""
    environment = config.cluster.environment
    if environment.kind == "none":
        return None
    if environment.kind == "module":
        return environment.python
    if environment.stage:
        root = f"{environment.local_dir}/{user_folder()}/{environment.kind}-…"
    else:
        root = environment.path if environment.kind == "venv" else f"{store_of(Path(config.runs_dir))}/uv-…"
    return f"{root}/bin/{environment.python}"


def user_folder() -> str:
    """Return the name of this user's folder on local disks."""
    return f"hpcdist-{os.geteuid()}"


def activated(env: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return variables with the programs of an environment first on the PATH, as after its `activate` script."""
    kept = {name: value for name, value in env.items() if name != "PYTHONHOME"}
    return {**kept, "VIRTUAL_ENV": str(root), "PATH": os.pathsep.join([f"{root}/bin", env.get("PATH", os.defpath)])}


def expanded(folder: str, env: Mapping[str, str]) -> str:
    """Return a path with the values of variables such as `$TMPDIR`.

    Raises:
        UserMistake: a variable is not set, or the result is not an absolute path.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1].strip("{}")
        if not env.get(name):
            raise UserMistake(
                f"cluster.environment.local_dir={folder}: the job has no variable {name}: use another folder"
            )
        return env[name]

    found = _VARIABLE.sub(value, folder)
    if not found.startswith("/"):
        raise UserMistake(f"cluster.environment.local_dir={folder}: {found} is not an absolute path")
    return found


def _packed(config: Config, run: RunDir, env: Mapping[str, str]) -> Packed | None:
    """Return the environment that was packed at submission; pack it now if that is missing, as after `in-job`."""
    if not is_packed(config.cluster.environment):
        return None
    raw = read_record(run.rank_environment)
    recorded = fill(Packed, raw, run.rank_environment) if raw is not None else None
    if recorded is not None and touch(recorded, Path(config.runs_dir)):
        return recorded
    packed = pack(config.cluster.environment, Path(config.runs_dir), env)
    if recorded is not None and recorded.key != packed.key:
        log.warning(
            "%s was removed, and %s has changed since the run was submitted: the ranks use its present content",
            recorded.path,
            config.cluster.environment.path,
        )
    write_json(run.rank_environment, asdict(packed))
    return packed
