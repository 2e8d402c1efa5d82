"""The environment of ranks in a job: uv projects, modules, variables, and checks before the submission."""

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hpcdist_runs import hide_torch

import hpcdist
from hpcdist.config.launch_schema import ClusterConfig, ContainerConfig, EnvironmentConfig, LaunchConfig
from hpcdist.config.schema import Config, TrainerConfig
from hpcdist.environments import rank_environment as tested
from hpcdist.environments.node_copy import NodeRequest
from hpcdist.environments.packed import Interpreter, build, store_of, uv_fingerprint, uv_problems
from hpcdist.errors import ConfigError, HpcdistError, UserMistake
from hpcdist.host.files import read_json
from hpcdist.run.folder import RunDir
from hpcdist.slurm.on_nodes import JobNodes, answer_lines

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


#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


@pytest.fixture
def modules_env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site" / "init").mkdir(parents=True)
    (tmp_path / "site" / "init" / "bash").write_text(MODULES)
    binaries = tmp_path / "module-bin"
    binaries.mkdir()
    (binaries / "python3").symlink_to(sys.executable)
    own = {
        "MODULESHOME": str(tmp_path / "site"),
        "MODULE_BIN": str(binaries),
        "LOADEDMODULES": "first",
        "MULTI": "a\nb",
    }
    return {name: value for name, value in os.environ.items() if not name.startswith("BASH_FUNC_module")} | own


def config_of(tmp_path: Path, **keys: object) -> Config:
    environment = EnvironmentConfig(**keys)  # type: ignore[arg-type]
    return Config(runs_dir=str(tmp_path / "runs"), cluster=ClusterConfig(environment=environment))


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small virtual environment, which is packed without the installation of Python."""
    monkeypatch.setattr(Interpreter, "is_packed", False)
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "bin" / "python3").chmod(0o755)
    return folder


# --- modules


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
        tested.load_modules(["python", name], modules_env)
    assert str(found.value) == f"cluster.environment.modules: python, {name} cannot be loaded: {reason}"


def test_machine_without_modules(modules_env: dict[str, str], tmp_path: Path) -> None:
    if tested.has_modules(env := {**modules_env, "MODULESHOME": str(tmp_path / "none")}):
        pytest.skip("this machine has environment modules")
    with pytest.raises(UserMistake, match="the command `module` is not available on this machine: load the modules by"):
        tested.load_modules(["python"], env)
    config = config_of(tmp_path, kind="module", modules=["nix"])
    assert tested.module_problems(config, env) == []
    assert tested.module_problems(config_of(tmp_path), modules_env) == []
    (problem,) = tested.module_problems(config, modules_env)
    assert problem.startswith("cluster.environment.modules: nix cannot be loaded: ")


def test_modules_of_the_job_are_checked_with_its_variables(modules_env: dict[str, str], tmp_path: Path) -> None:
    variables = {name: modules_env.pop(name) for name in ("MODULESHOME", "MODULE_BIN")}
    if tested.has_modules(modules_env):
        pytest.skip("this machine has environment modules")
    config = config_of(tmp_path, kind="module", modules=["nix"])
    of_job = replace(config, cluster=replace(config.cluster, env=variables))
    (problem,) = tested.module_problems(of_job, modules_env)
    assert problem.startswith("cluster.environment.modules: nix cannot be loaded: ")
    with_setup = replace(config, cluster=replace(of_job.cluster, setup=["module use /apps/modules"]))
    assert tested.module_problems(with_setup, modules_env) == []


def test_environment_of_modules(
    modules_env: dict[str, str], tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tested.rank_environment(config_of(tmp_path, kind="module", modules=["python"]), run, modules_env)
    assert found.python == f"{modules_env['MODULE_BIN']}/python3"
    assert (found.env["LOADEDMODULES"], found.env["MULTI"]) == ("first:python/3.12", "a\nb")
    assert Path(*found.import_path, "hpcdist", "__init__.py").is_file()
    assert found.request.folder == ""
    assert found.record == {"kind": "module", "path": "", "modules": ["python"]}
    monkeypatch.setattr(tested, "PYTHON", "python9")
    with pytest.raises(UserMistake, match=r"cluster\.environment\.modules: no python9 on the PATH after loading them"):
        tested.rank_environment(config_of(tmp_path, kind="module", modules=["python"]), run, modules_env)


# --- uv


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project without dependencies but with a local package, locked by uv."""
    folder = tmp_path / "project"
    (folder / "local").mkdir(parents=True)
    requires = f'requires-python = ">={sys.version_info[0]}.{sys.version_info[1]}"'
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "own"\nversion = "1"\n{requires}\n[tool.uv]\npackage = false\n'
    )
    uv("lock", "--offline", f"--project={folder}")
    return folder


def uv(*words: str) -> None:
    program = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not Path(program).exists():
        pytest.skip("needs uv: pip install uv")
    subprocess.run([program, *words, f"--python={sys.executable}"], capture_output=True, check=True)


def test_uv_builds_the_locked_environment(project: Path, tmp_path: Path) -> None:
    words = [f"--python={sys.executable}", "--offline"]
    build(project, words, tmp_path / "built", os.environ)
    code = "import sys; print(sys.prefix)"
    done = subprocess.run([tmp_path / "built/bin/python3", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "built")
    assert not (project / ".venv").exists()
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace('version = "1"', 'version = "1"\ndependencies = ["absent"]'))
    with pytest.raises(UserMistake, match=r"cluster\.environment\.path: uv cannot build .*project: "):
        build(project, words, tmp_path / "again", os.environ)
    assert not (tmp_path / "again").exists()


def test_fingerprint_of_a_project_depends_on_all_that_determines_the_environment(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    places = {"own": 'virtual = "."', "b": 'editable = "local"'}
    lock = "".join(f'[[package]]\nname = "{name}"\nsource = {{ {place} }}\n' for name, place in places.items())
    (tmp_path / "uv.lock").write_text(lock)
    seen = [uv_fingerprint(tmp_path, [])]
    seen.append(uv_fingerprint(tmp_path, ["--extra=train"]))
    (tmp_path / "local" / "b.py").write_text("")
    seen.append(uv_fingerprint(tmp_path, []))
    (tmp_path / "uv.lock").write_text(lock + "\n")
    seen.append(uv_fingerprint(tmp_path, []))
    assert len(set(seen)) == 4
    (tmp_path / "own.py").write_text("the code of the project is in the run's snapshot")
    assert uv_fingerprint(tmp_path, []) == seen[-1]
    (tmp_path / "uv.lock").write_text("[[")
    with pytest.raises(UserMistake, match=r"uv\.lock cannot be read \(.*\): `uv lock`"):
        uv_fingerprint(tmp_path, [])


def test_problems_of_uv_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = uv_problems(tmp_path, os.environ)
    assert problem.startswith(f"cluster.environment.path: {tmp_path} has no uv.lock with a pyproject.toml: ")
    (tmp_path / "uv.lock").write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    (problem,) = uv_problems(tmp_path, {"PATH": "/nowhere"})
    assert problem.endswith("needs the program uv, which is not installed here: `pip install uv`")


# --- from config to interpreter


def test_environment_in_place(tmp_path: Path, run: RunDir, venv: Path) -> None:
    config = config_of(tmp_path, kind="venv", path=str(venv), stage=False)
    found = tested.rank_environment(config, run, {"PATH": "/bin", "PYTHONHOME": "/x"})
    assert found.python == f"{venv}/bin/python3" == tested.python_of(config)
    assert found.env == {"PATH": f"{venv}/bin:/bin", "VIRTUAL_ENV": str(venv)}
    assert found.request.folder == ""
    assert Path(*found.import_path).parent == store_of(tmp_path / "runs")


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd: apt-get install zstd")
def test_job_uses_the_environment_of_the_submission(
    tmp_path: Path, run: RunDir, venv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, kind="venv", path=str(venv), local_dir="$SCRATCH/x")
    tested.record_environment(config, [run], os.environ)
    recorded = read_json(run.rank_environment)
    assert recorded is not None
    (venv / "later").write_text("a change after the submission")
    env = {**os.environ, "SCRATCH": str(tmp_path / "disk")}
    found = tested.rank_environment(config, run, env)
    folder = tmp_path / "disk" / "x" / tested.user_folder()
    assert (found.request.key, found.request.sha256) == (recorded["key"], recorded["sha256"])
    assert found.python == f"{folder}/{recorded['key']}/bin/python3"
    assert Path(*found.import_path).parent == folder
    assert tested.python_of(config) == f"$SCRATCH/x/{tested.user_folder()}/venv-…/bin/python3"
    # If the archive was removed, the ranks use the present content.
    Path(recorded["path"]).unlink()
    with caplog.at_level(logging.WARNING):
        again = tested.rank_environment(config, run, env)
    assert again.request.key != recorded["key"]
    assert "has changed since the run was submitted: the ranks use its present content" in caplog.text
    # `hpcdist in-job` has no submission.
    run.rank_environment.unlink()
    last = tested.rank_environment(config, run, env)
    assert last.request == again.request


def test_variables_in_the_local_folder() -> None:
    assert tested.expanded("$A/${B}", {"A": "/a", "B": "b"}) == "/a/b"
    with pytest.raises(UserMistake, match=r"local_dir=\$A/x: the job has no variable A: use another folder"):
        tested.expanded("$A/x", {})
    with pytest.raises(UserMistake, match=r"local_dir=\$A: tmp is not an absolute path"):
        tested.expanded("$A", {"A": "tmp"})
    assert tested.activated({}, Path("/e"))["PATH"] == f"/e/bin:{os.defpath}"


# --- checks before the submission


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd: apt-get install zstd")
def test_problems_before_the_submission(tmp_path: Path, venv: Path) -> None:
    def problems(**keys: object) -> list[str]:
        return tested.environment_problems(config_of(tmp_path, **keys), os.environ)

    assert problems(kind="venv", path=str(venv)) == []
    assert problems(kind="venv", path=str(tmp_path)) == [
        f"cluster.environment.path: {tmp_path} is not a virtual environment: no program {tmp_path}/bin/python3"
    ]
    (problem,) = problems(kind="uv", path=str(tmp_path))
    assert problem.startswith(f"cluster.environment.path: {tmp_path} has no uv.lock")
    without = tested.environment_problems(config_of(tmp_path, kind="venv", path=str(venv)), {"PATH": "/nowhere"})
    assert without == ["cluster.environment: packing needs the program zstd: install it, or set stage=false"]
    assert not tested.is_packed(EnvironmentConfig(kind="venv", path="/a", stage=False))


# --- The check that ranks find torch.


PROBLEM = (
    f"trainer.target=ddp needs torch, which {sys.executable} does not have: run `pip install '.[train]'` in a checkout"
    " of hpcdist"
)
IN_MODULES = ClusterConfig(environment=EnvironmentConfig(kind="module", modules=["python/3.12"]))


@pytest.mark.parametrize(
    ("config", "here", "on_slurm"),
    [
        ({}, [PROBLEM], [f"{PROBLEM}, or set container.image or cluster.environment"]),
        ({"container": ContainerConfig(runtime="podman", image="i")}, [PROBLEM], []),
        ({"cluster": IN_MODULES}, [PROBLEM], []),
        ({"trainer": TrainerConfig(script=["train.py"])}, [], []),
    ],
    ids=["trainer", "container", "environment", "script"],
)
def test_missing_torch_is_a_problem_of_ranks_that_use_this_python(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], here: list[str], on_slurm: list[str]
) -> None:
    hide_torch(monkeypatch)
    assert tested.torch_problems(Config(**config), {}, on_slurm=False) == here
    assert tested.torch_problems(Config(**config), {}, on_slurm=True) == on_slurm


def test_torch_in_folders_of_pythonpath_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide_torch(monkeypatch)
    (tmp_path / "torch").mkdir()
    path = {"PYTHONPATH": f"/nowhere:{tmp_path}"}
    with pytest.raises(ConfigError, match=r"^trainer\.target=ddp needs torch"):
        tested.require_torch(Config(), path, on_slurm=False)
    (tmp_path / "torch" / "__init__.py").touch()
    tested.require_torch(Config(), path, on_slurm=False)
    tested.require_torch(Config(launch=LaunchConfig(env=path)), {}, on_slurm=False)


# --- the step that prepares the environment on the nodes of a job

FACTS = {"python": "3.12.3", "hpcdist": hpcdist.__version__, "torch": "2.15.0", "cuda": "13.2", "missing": []}
NODE_REQUEST = NodeRequest(python="/tmp/e/bin/python3", sources="/runs/hpcdist-1", folder="/tmp/e", key="venv-1")
ENVIRONMENT = tested.RankEnvironment(
    python=NODE_REQUEST.python,
    env={},
    import_path=("/tmp/e",),
    request=NODE_REQUEST,
    record={"kind": "venv", "key": "venv-1"},
)


def answer(**changes: Any) -> dict[str, Any]:
    return {"copied": True, "seconds": 2.5, "facts": FACTS | changes}


def test_nodes_are_prepared_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir.create(tmp_path / "exp" / "first")
    nodes = JobNodes(["n1", "n2"])
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\ncd {tmp_path}\necho "$@" > called\ncat answers\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def prepare(**copied: bool) -> None:
        lines = [line for node, was in copied.items() for line in answer_lines(node, answer() | {"copied": was})]
        (tmp_path / "answers").write_text("\n".join(lines))
        tested.prepare_nodes(ENVIRONMENT, run, nodes, os.environ)

    with caplog.at_level(logging.INFO):
        prepare(n1=True, n2=True)
        prepare(n1=False, n2=False)
    called = (tmp_path / "called").read_text()
    assert "--ntasks-per-node=1" in called
    assert called.endswith(f" -m hpcdist.environments.node_copy {json.dumps(asdict(NODE_REQUEST))}\n")
    assert caplog.messages == ["environment: copied to 2 of 2 nodes in 2.5 s", "environment: venv-1 is on all 2 nodes"]
    assert read_json(run.rank_environment) == {
        "kind": "venv",
        "key": "venv-1",
        "python": "3.12.3",
        "torch": "2.15.0",
        "cuda": "13.2",
    }
    with pytest.raises(HpcdistError, match="environment on n2: no answer"):
        prepare(n1=True)


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ({node: {"error": "zstd is not installed", "may_pass": False} for node in ("n1", "n2")}, UserMistake,
         "environment on n1, n2: zstd is not installed"),
        ({"n1": answer(), "n2": {"error": "stale", "may_pass": True}}, HpcdistError, "environment on n2: stale"),
        ({"n1": answer(), "n2": answer(python="3.9.2")}, UserMistake,
         "environment on n2: /e/python3 is Python 3.9.2; hpcdist needs 3.11 or newer"),
        ({"n1": answer(missing=["psutil", "torch"]), "n2": answer()}, UserMistake,
         "environment on n1: /e/python3 has no psutil, torch: add the packages to the environment"),
        ({"n1": answer(hpcdist="9.9"), "n2": answer()}, UserMistake,
         f"environment on n1: /e/python3 imports hpcdist 9.9, this is {hpcdist.__version__}: unset PYTHONPATH"),
        ({"n1": answer(driver="470.1"), "n2": answer()}, UserMistake,
         "environment on n1: its torch needs driver 580.65 or newer for its CUDA 13.2, found 470.1"),
    ],
)  # fmt: skip
def test_problems_of_nodes(answers: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as found:
        tested.check_answers(["n1", "n2"], answers, "/e/python3", "srun: error: x")
    assert (type(found.value), str(found.value)) == (kind, message)
    tested.check_answers(["n1"], {"n1": answer()}, "/e/python3", "")
