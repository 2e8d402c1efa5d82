"""The Python environment of a run's ranks on Slurm: from config to interpreter and variables, with environment modules,
and the checks before a submission.
"""

import importlib.util
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template
from typing import Any

import hpcdist
from hpcdist.config.launch_schema import EnvironmentConfig
from hpcdist.config.schema import Config
from hpcdist.environments.node_copy import NodeRequest, local_sources
from hpcdist.environments.packed import PYTHON, Packed, copy_sources, pack, store_of, touch, uv_problems
from hpcdist.errors import ConfigError, HpcdistError, UserMistake
from hpcdist.host.commands import last_line, run_within
from hpcdist.host.files import fill, make_private, write_json
from hpcdist.host.machine import driver_problem, install_command
from hpcdist.run.folder import RunDir, read_record
from hpcdist.slurm.on_nodes import JobNodes, ask, nodes_command

# Environment modules (Lmod or Tcl modules): the environment after `module load`.

#: Loading modules from a slow file system may take a while.
LOAD_S = 120.0
_MARK = "hpcdist-modules"
_NO_MODULES = 3
#: Batch scripts of a non-interactive shell may lack the function `module`; sites install its definition in one of
#: these places. `module load` of old versions returns 0 although it has failed, so the list of loaded modules counts.
_LOAD = f"""
if ! type module >/dev/null 2>&1; then
  for file in "${{LMOD_PKG:-/nowhere}}/init/bash" "${{MODULESHOME:-/nowhere}}/init/bash" \\
      /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /etc/profile.d/z00_lmod.sh \\
      /usr/share/lmod/lmod/init/bash /usr/share/modules/init/bash; do
    if [ -r "$file" ]; then . "$file"; break; fi
  done
fi
type module >/dev/null 2>&1 || exit {_NO_MODULES}
for name in "$@"; do
  before=$LOADEDMODULES
  module load "$name" || exit 1
  case ":$LOADEDMODULES:" in
  *":$name:"* | *":$name/"*) ;;
  *) [ "$LOADEDMODULES" != "$before" ] || exit 1 ;;  # an alias, or gcc/13 for gcc/13.2
  esac
done
printf '\\n{_MARK}\\n'
exec env -0
"""


def has_modules(env: Mapping[str, str]) -> bool:
    return run_within(["bash", "-c", _LOAD], LOAD_S, env=env).returncode == 0


def load_modules(names: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment after loading modules in `env`."""
    done = run_within(["bash", "-c", _LOAD, "bash", *names], LOAD_S, env=env)
    output, mark, variables = done.stdout.partition(f"\n{_MARK}\n")
    if done.returncode == _NO_MODULES:
        raise UserMistake(
            "cluster.environment.modules: the command `module` is not available on this machine: load the modules by"
            " cluster.setup, or set MODULESHOME to the installation's folder in cluster.env"
        )
    if done.returncode != 0 or not mark:
        # Lmod breaks an error into lines, ends it by an empty line, and prints advice after it.
        named = re.search(r"(?im)^.*\berror:.*(?:\n.*\S.*)*", f"{done.stderr}\n{output}")
        printed = " ".join(named[0].split())[:300] if named else last_line(done.stderr) or last_line(output)
        reason = printed or "module load changed nothing in LOADEDMODULES"
        raise UserMistake(f"cluster.environment.modules: {', '.join(names)} cannot be loaded: {reason}")
    pairs = (entry.partition("=") for entry in variables.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    python: str  #: path of the interpreter on the nodes
    env: Mapping[str, str]  #: all variables of the ranks
    import_path: tuple[str, ...] = ()  #: the folder with hpcdist; none for the supervisor's Python
    request: NodeRequest | None = None  #: the work of each node; none for the supervisor's Python
    record: Mapping[str, object] = field(default_factory=dict)  #: for the run folder


def is_packed(environment: EnvironmentConfig) -> bool:
    """Whether it is packed in `runs_dir` and copied to the nodes."""
    return environment.stage and environment.kind in ("venv", "uv")


def record_environment(config: Config, runs: Sequence[RunDir], env: Mapping[str, str]) -> None:
    """Pack the environment of runs and record it in the run folders, so that later changes do not affect these runs."""
    if not is_packed(config.cluster.environment):
        for run in runs:
            run.rank_environment.unlink(missing_ok=True)
        return
    packed = pack(config.cluster.environment, Path(config.runs_dir), env)
    for run in runs:
        write_json(run.rank_environment, asdict(packed))


def rank_environment(config: Config, run: RunDir, env: Mapping[str, str]) -> RankEnvironment:
    """Return the environment of a run's ranks in a job: the supervisor's Python without `cluster.environment`."""
    environment = config.cluster.environment
    if environment.kind == "none":
        return RankEnvironment(python=sys.executable, env=env)
    make_private(store := store_of(Path(config.runs_dir)))
    sources = str(copy_sources(store))
    packed, copied = _packed(config, run, env), {}
    if environment.modules:
        env = load_modules(environment.modules, env)
    if environment.kind == "module":
        python = shutil.which(PYTHON, path=env.get("PATH", "")) or ""
        if not python:
            raise UserMistake(f"cluster.environment.modules: no {PYTHON} on the PATH after loading them")
    elif not environment.stage:
        root = Path(environment.path)
        python, env = str(root / "bin" / PYTHON), activated(env, root)
    else:
        assert packed is not None
        folder = Path(expanded(environment.local_dir, env)) / user_folder()
        python, env = str(folder / packed.key / "bin" / PYTHON), activated(env, folder / packed.key)
        archive = {"archive": packed.path, "sha256": packed.sha256, "prefix": packed.prefix}
        copied = {"folder": str(folder), "key": packed.key, **archive}
    request = NodeRequest(python=python, sources=sources, **copied)
    record = asdict(packed) if packed else {"kind": environment.kind, "path": environment.path}
    record |= {"modules": environment.modules}
    return RankEnvironment(
        python=python, env=env, import_path=(str(local_sources(request)),), request=request, record=record
    )


def python_of(config: Config) -> str | None:
    """Return the ranks' Python as far as it is known before a job, for `submit --dry-run`; None for hpcdist's own."""
    environment = config.cluster.environment
    if environment.kind == "none":
        return None
    if environment.kind == "module":
        return PYTHON
    root = f"{environment.local_dir}/{user_folder()}/{environment.kind}-…" if environment.stage else environment.path
    return f"{root}/bin/{PYTHON}"


def user_folder() -> str:
    return f"hpcdist-{os.geteuid()}"


def activated(env: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return variables with the programs of an environment first on the PATH, as after its `activate` script."""
    kept = {name: value for name, value in env.items() if name != "PYTHONHOME"}
    return {**kept, "VIRTUAL_ENV": str(root), "PATH": os.pathsep.join([f"{root}/bin", env.get("PATH", os.defpath)])}


def expanded(folder: str, env: Mapping[str, str]) -> str:
    """Return an absolute path with the values of variables such as `$TMPDIR`."""
    template = Template(folder)
    if missing := [name for name in template.get_identifiers() if not env.get(name)]:
        raise UserMistake(
            f"cluster.environment.local_dir={folder}: the job has no variable {missing[0]}: use another folder"
        )
    found = template.safe_substitute(env)
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


# The step that copies the environment to each node of a job and checks it there.


def prepare_nodes(environment: RankEnvironment, run: RunDir, nodes: JobNodes, env: Mapping[str, str]) -> None:
    """Prepare the environment on nodes of a job, and record it with its versions in the run folder.

    Raises UserMistake where a retry cannot help, as for a node without space, and HpcdistError where it may.
    """
    if environment.request is None:
        return
    words = [sys.executable, "-P", "-m", "hpcdist.environments.node_copy", json.dumps(asdict(environment.request))]
    # The time to read some gigabytes from a busy file system and to write tens of thousands of files.
    answers, _, errors, _ = ask(nodes_command(nodes, words), nodes.names, 1800.0, env=env)
    check_answers(nodes.names, answers, environment.python, last_line(errors))
    copied = [answer for answer in answers.values() if answer["copied"]]
    if copied:
        slowest = max(answer["seconds"] for answer in copied)
        log.info("environment: copied to %d of %d nodes in %.1f s", len(copied), len(answers), slowest)
    elif environment.request.folder:
        log.info("environment: %s is on all %d nodes", environment.request.key, len(answers))
    facts = next(iter(answers.values()))["facts"]
    versions = {name: facts[name] for name in ("python", "torch", "cuda") if name in facts}
    write_json(run.rank_environment, {**environment.record, **versions})


def check_answers(nodes: Sequence[str], answers: Mapping[str, Mapping[str, Any]], python: str, message: str) -> None:
    """Raise an error if a node has not prepared the environment, with srun's last message, or if it does not fit."""
    problems: dict[str, list[str]] = {}
    may_pass = True
    for node in nodes:
        answer = answers.get(node)
        if answer is None:
            problem, passing = message or "no answer", True
        elif "error" in answer:
            problem, passing = str(answer["error"]), bool(answer["may_pass"])
        else:
            problem, passing = _unfit(answer["facts"], python), False
        if problem:
            problems.setdefault(problem, []).append(node)
            may_pass = may_pass and passing
    if problems:
        lines = [f"environment on {', '.join(where)}: {problem}" for problem, where in problems.items()]
        raise HpcdistError("; ".join(lines)) if may_pass else UserMistake("; ".join(lines))


def _unfit(facts: Mapping[str, Any], python: str) -> str:
    if tuple(map(int, facts["python"].split(".")[:2])) < (3, 11):
        return f"{python} is Python {facts['python']}; hpcdist needs 3.11 or newer"
    if facts["missing"]:
        return f"{python} has no {', '.join(facts['missing'])}: add the packages to the environment"
    if facts.get("hpcdist") != hpcdist.__version__:
        return f"{python} imports hpcdist {facts.get('hpcdist')}, this is {hpcdist.__version__}: unset PYTHONPATH"
    if old := driver_problem(str(facts.get("cuda") or ""), str(facts.get("driver") or "")):
        return f"its torch needs {old}"
    return ""


# Checks that ranks find torch, before they start. Nothing imports it.


def require_torch(config: Config, env: Mapping[str, str], *, on_slurm: bool) -> None:
    if problems := torch_problems(config, env, on_slurm=on_slurm):
        raise ConfigError(*problems)


def torch_problems(config: Config, env: Mapping[str, str], *, on_slurm: bool) -> list[str]:
    """Return the missing torch of ranks that use this Python; scripts import the packages that they need themselves."""
    has_own_python = on_slurm and (config.container.runtime != "none" or config.cluster.environment.kind != "none")
    if config.trainer.script or has_own_python or _has_torch({**env, **config.launch.env}):
        return []
    others = ", or set container.image or cluster.environment" if on_slurm else ""
    return [
        f"trainer.target={config.trainer.target} needs torch, which {sys.executable} does not have: run"
        f" {install_command('train')}{others}"
    ]


def _has_torch(env: Mapping[str, str]) -> bool:
    folders = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    specs = importlib.util.find_spec("torch"), PathFinder.find_spec("torch", folders)
    # A folder of this name without a module has no origin.
    return any(spec is not None and spec.origin is not None for spec in specs)


# Checks of `cluster.environment` before a submission.


def environment_problems(config: Config, env: Mapping[str, str]) -> list[str]:
    environment = config.cluster.environment
    path = Path(environment.path)
    found = []
    if environment.kind == "venv":
        program = path / "bin" / PYTHON
        if not os.access(program, os.X_OK):
            found.append(f"cluster.environment.path: {path} is not a virtual environment: no program {program}")
    elif environment.kind == "uv":
        found += uv_problems(path, env)
    if is_packed(environment) and shutil.which("zstd", path=env.get("PATH")) is None:
        found.append("cluster.environment: packing needs the program zstd: install it, or set stage=false")
    return found


def module_problems(config: Config, env: Mapping[str, str]) -> list[str]:
    """Return why the modules cannot be loaded on this machine; no problem if it has no environment modules."""
    names = config.cluster.environment.modules
    env = {**env, **config.cluster.env}
    # Commands of the job, such as `module use`, may change which modules exist.
    if not names or config.cluster.setup or not has_modules(env):
        return []
    try:
        load_modules(names, env)
    except UserMistake as error:
        return [str(error)]
    return []
