"""Environment modules: their variables, modules that cannot be loaded, and ranks with the Python of a module."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config.cluster_schema import ClusterConfig, EnvironmentConfig
from hpcdist.config.schema import Config
from hpcdist.environments import rank_environment as rank_environment_module
from hpcdist.environments.modules import has_modules, load_modules, module_problems
from hpcdist.environments.rank_environment import rank_environment
from hpcdist.errors import UserMistake
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import RunDir

#: A definition of `module` as sites have it: it changes the shell's environment and reports errors on stderr.
MODULES = """
module() {
  if [ "$1" = --version ]; then printf '\n%s\n' 'Modules based on Lua: Version 8.6.19  2022-04-16' >&2; return; fi
  case "$2" in
    python/3.12 | python) export LOADEDMODULES="$LOADEDMODULES:python/3.12" PATH="$MODULE_BIN:$PATH" ;;
    quiet) ;;
    lmod) printf '%s\n' 'Lmod has detected the following error: Cannot load module "a/1" because' \
        'these module(s) are loaded:' '   python' '' 'While processing the following module(s):' >&2; return 1 ;;
    *) echo "ERROR: Unable to locate a modulefile for '$2'" >&2; return 1 ;;
  esac
  echo "Loading $2"
}
"""

pytestmark = pytest.mark.processes


@pytest.fixture
def modules_env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site" / "init").mkdir(parents=True)
    (tmp_path / "site" / "init" / "bash").write_text(MODULES)
    binaries = tmp_path / "module-bin"
    binaries.mkdir()
    (binaries / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (binaries / "python3").chmod(0o755)
    own = {
        "MODULESHOME": str(tmp_path / "site"),
        "MODULE_BIN": str(binaries),
        "LOADEDMODULES": "first",
        "MULTI": "a\nb",
    }
    return {name: value for name, value in os.environ.items() if not name.startswith("BASH_FUNC_module")} | own


def config_of(*modules: str) -> Config:
    environment = EnvironmentConfig(kind="module" if modules else "none", modules=list(modules))
    return Config(cluster=ClusterConfig(environment=environment))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("quiet", "Loading quiet"),
        (
            "lmod",
            'Lmod has detected the following error: Cannot load module "a/1" because'
            " these module(s) are loaded: python",
        ),
    ],
)
def test_module_that_cannot_be_loaded(modules_env: dict[str, str], name: str, reason: str) -> None:
    with pytest.raises(UserMistake) as found:
        load_modules(["python", name], modules_env)
    assert str(found.value) == f"cluster.environment.modules: python, {name} cannot be loaded: {reason}"


def test_machine_without_modules(modules_env: dict[str, str], tmp_path: Path) -> None:
    if has_modules(env := {**modules_env, "MODULESHOME": str(tmp_path / "none")}):
        pytest.skip("this machine has environment modules")
    with pytest.raises(UserMistake, match="the command `module` is not available on this machine: load the modules by"):
        load_modules(["python"], env)
    config = config_of("nix")
    assert module_problems(config, env) == []
    assert module_problems(config_of(), modules_env) == []
    (problem,) = module_problems(config, modules_env)
    assert problem.startswith("cluster.environment.modules: nix cannot be loaded: ")


def test_modules_of_the_job_are_checked_with_its_variables(modules_env: dict[str, str]) -> None:
    variables = {name: modules_env.pop(name) for name in ("MODULESHOME", "MODULE_BIN")}
    if has_modules(modules_env):
        pytest.skip("this machine has environment modules")
    config = config_of("nix")
    of_job = replace(config, cluster=replace(config.cluster, env=variables))
    (problem,) = module_problems(of_job, modules_env)
    assert problem.startswith("cluster.environment.modules: nix cannot be loaded: ")
    with_setup = replace(config, cluster=replace(of_job.cluster, setup=["module use /apps/modules"]))
    assert module_problems(with_setup, modules_env) == []


def test_ranks_use_the_python_of_a_module(
    modules_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "exp" / "first")
    found = rank_environment(config_of("python"), run, modules_env)
    assert found.python == f"{modules_env['MODULE_BIN']}/python3"
    assert (found.env["LOADEDMODULES"], found.env["MULTI"]) == ("first:python/3.12", "a\nb")
    assert Path(*found.import_path, "hpcdist", "__init__.py").is_file()
    record = read_json(run.rank_environment) or {}
    assert (record["kind"], record["path"], record["modules"]) == ("module", "", ["python"])
    monkeypatch.setattr(rank_environment_module, "PYTHON", "python9")
    with pytest.raises(UserMistake, match=r"cluster\.environment\.modules: no python9 on the PATH after loading them"):
        rank_environment(config_of("python"), run, modules_env)
