"""Create a run: its name, checks of its trainer, and its folder."""

import ast
import re
import secrets
import shlex
import shutil
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

from hpcdist.config.schema import Config, new_run_problems
from hpcdist.config.trainer_declaration import find_trainer, trainer_names
from hpcdist.config.written import run_yaml, secrets_of
from hpcdist.errors import ConfigError, RunFolderError, few, suggestion
from hpcdist.host import retry
from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import read_json
from hpcdist.host.ownership import make_private
from hpcdist.run import kept_secrets, snapshot
from hpcdist.run.config_origin import Origin, write_origin
from hpcdist.run.folder import RunDir
from hpcdist.run.trainer_source import defined_names, module_specs, parse_module
from hpcdist.run.weight_files import WeightSource


def with_name(config: Config) -> Config:
    """Return the config with a run name: its own, or one of trainer, time and a random suffix."""
    if config.name:
        return config
    moment = time.strftime("%Y%m%d-%H%M%S")
    suffix = secrets.token_hex(2)
    return replace(config, name=f"{label_of(config)}-{moment}-{suffix}")


def label_of(config: Config) -> str:
    """Return the beginning of a run's name: the name of its script without `.py`, or its trainer."""
    script = config.trainer.script_name.removesuffix(".py")
    if script:
        return plain_name(script)
    return config.trainer.target.replace(":", ".")


def plain_name(text: str) -> str:
    """Return a text with characters that are allowed in names of runs and experiments; others become `_`."""
    return re.sub(r"[^\w.-]", "_", text).lstrip("._-") or "script"


def check_trainer(config: Config, cwd: Path, *, own_python: bool = False, num_ranks: int = 0) -> None:
    """Raise ConfigError if a new run cannot start.

    Args:
        own_python: see `check_code`.
        num_ranks: 0 if it is not known yet.
    """
    problems = new_run_problems(config, num_ranks)
    if problems:
        raise ConfigError(*problems)
    check_code(config, cwd, own_python=own_python)


#: By the ending of a program that is not Python: its kind, and how to run it.
_NO_PYTHON = {
    ".ipynb": "is a notebook, and ranks run Python files: `jupyter nbconvert --to script {path}` writes one",
    ".sh": "is a shell script, and ranks run Python files: name the Python file that it starts, with its arguments",
}


def check_code(config: Config, cwd: Path, *, own_python: bool = False) -> None:
    """Raise ConfigError if the trainer or script of a run is missing or invalid.

    Args:
        own_python: the ranks have another Python than this process, so this one does not check the syntax. It is
            implied by a container or an environment of the ranks.
    """
    own_python |= config.container.runtime != "none" or config.cluster.environment.kind != "none"
    script_file = config.trainer.script_file
    if script_file is not None:
        _check_script(script_file, compiles=not own_python)
        return
    if config.trainer.script:
        if not own_python:
            _check_module("trainer.script", config.trainer.script_name, cwd, compiles=True)
        return
    module, colon, function = config.trainer.target.partition(":")
    if colon:
        _check_module("trainer.target", module, cwd, compiles=not own_python)
        if not own_python:
            _check_function(module, function, cwd)
        return
    trainer = find_trainer(module)
    if trainer is None:
        hint = suggestion(module, trainer_names(), "name your own as package.module:function")
        raise ConfigError(f"trainer: {module!r} is not one of {', '.join(trainer_names())}; {hint}")
    problems = trainer.check_host(config)
    if problems:
        raise ConfigError(*problems)


def _check_script(file: Path, *, compiles: bool) -> None:
    if not file.is_file():
        hint = suggestion(file.name, [path.name for path in file.parent.glob("*.py")], "")
        if hint:
            hint = f": {hint}"
        raise ConfigError(f"trainer.script: no such file: {file}{hint}")
    if file.suffix in _NO_PYTHON:
        problem = _NO_PYTHON[file.suffix].format(path=shlex.quote(str(file)))
        raise ConfigError(f"trainer.script: {file.name} {problem}")
    if compiles:
        _check_syntax("trainer.script", file)


def _check_module(key: str, module: str, cwd: Path, *, compiles: bool) -> None:
    """Raise ConfigError if the package of a module does not exist, or if one of their files is no valid Python."""
    package: ModuleSpec | None = None
    for name, spec in module_specs(module, cwd):
        if spec is None and package is None:
            hint = suggestion(name, [path.stem for path in cwd.glob("*.py")], "set PYTHONPATH to its folder")
            raise ConfigError(f"{key}: no module {name!r} in {cwd} or among the installed packages: {hint}")
        if not compiles:
            return
        if spec is None:
            _refuse_missing(key, name, package)
            return
        if spec.origin is not None:
            _check_syntax(key, Path(spec.origin))
        package = spec


def _refuse_missing(key: str, name: str, package: ModuleSpec | None) -> None:
    """Raise ConfigError if a package has no module of a name, unless its source changes how modules are found."""
    assert package is not None, "a module is missing in a package"
    folders = list(package.submodule_search_locations or [])
    if not folders:
        raise ConfigError(f"{key}: {package.name!r} is a module, not a package, and so has no module {name!r}")
    source = ""
    if package.origin is not None:
        source = Path(package.origin).read_text(errors="replace")
    if "__path__" in source or "sys.modules" in source or "sys.meta_path" in source:
        return
    known = [path.stem for folder in folders for path in Path(folder).glob("*.py")]
    hint = suggestion(name, known, f"it has {few(sorted(known)) or 'none'}")
    raise ConfigError(f"{key}: no module {name!r} in the package {folders[0]}: {hint}")


def _check_function(module: str, function: str, cwd: Path) -> None:
    """Raise ConfigError if the source of a trainer's module shows that it has no such function."""
    *_, (_, spec) = module_specs(module, cwd)
    tree = parse_module(spec)
    if spec is None or tree is None:
        return
    names = defined_names(tree)
    if names is None or function in names:
        return
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    hint = suggestion(function, functions, f"it has {few(functions) or 'none'}")
    raise ConfigError(f"trainer.target: {spec.origin} has no function {function!r}: {hint}")


def _check_syntax(key: str, file: Path) -> None:
    if file.suffix != ".py":
        return
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(file.read_bytes(), file, "exec", dont_inherit=True)
    except SyntaxError as error:
        place = str(file)
        if error.lineno is not None:
            place = f"{file}:{error.lineno}"
        code = (error.text or "").strip()
        if code:
            code = f" in `{code}`"
        raise ConfigError(f"{key}: {place}: {type(error).__name__}: {error.msg}{code}") from None
    except ValueError as error:  # a NUL character, for example
        raise ConfigError(f"{key}: {file}: {type(error).__name__}: {error}") from None


def create_run(
    config: Config,
    cwd: Path,
    *,
    launcher: str = "local",
    origin: Origin | None = None,
    like: RunDir | None = None,
    weights: WeightSource | None = None,
) -> RunDir:
    """Create the folder of a run: its config, its secrets and copies of its code and of its first weights.

    An error removes the folder.

    Args:
        cwd: folder of the code, unless `like` is given.
        launcher: recorded in `environment.json`.
        like: the run that gives the new one its code.
        weights: the files that `model.init_from` names.
    """
    run = RunDir.create(config.folder)
    if config.container.runtime != "none":
        # A container can only mount an existing folder. Without it, ranks compile in each new place.
        with suppress(RunFolderError, OSError):
            make_private(config.compiled_folder)
    try:
        kept_secrets.keep(run, secrets_of(config))
        write_atomic(run.config, run_yaml(config), durable=True)
        if origin is not None:
            write_origin(run, origin)
        if like is None:
            code = snapshot.take(config, run, cwd)
            snapshot.write_environment(run, code, launcher=launcher)
        else:
            code = snapshot.take_from(like, config, run, cwd)
            snapshot.write_environment(run, code, launcher=launcher, like=likeness(like))
            _check_copied_code(config, run, code)
        if weights is not None:
            weights.copy_to(run.init_from)
    except BaseException:
        with suppress(OSError):  # the first error explains more
            retry.retry(lambda: shutil.rmtree(run.path), run.path)
        raise
    return run


def likeness(run: RunDir) -> dict[str, str]:
    """Return the names of a run in its folder of runs and in MLflow, for the record of a run that is like it."""
    names = {"run": f"{run.experiment}/{run.name}"}
    run_id = (read_json(run.mlflow) or {}).get("run_id")
    if run_id:
        names["run_id"] = str(run_id)
    return names


def _check_copied_code(config: Config, run: RunDir, code: snapshot.CodeState) -> None:
    """Raise ConfigError if a run cannot start with the code in its folder; a script in the copy needs no check."""
    file = config.trainer.script_file
    if file is not None and run.snapshot_of(file) is not None:
        return
    folders = [*snapshot.import_path(code, run), code.cwd]
    check_trainer(config, Path(folders[0]))
