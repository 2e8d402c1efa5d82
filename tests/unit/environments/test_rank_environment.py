"""Ranks in a virtual environment: its interpreter, its variables, its checks, and the hpcdist that is added to it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpcdist
from hpcdist.config.cluster_schema import ClusterConfig, EnvironmentConfig
from hpcdist.config.schema import Config
from hpcdist.environments.rank_environment import environment_problems, link_package, python_of, rank_environment
from hpcdist.errors import UserMistake
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import RunDir

pytestmark = pytest.mark.processes


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "exp" / "first")


def make_venv(folder: Path, script: str = f'exec {sys.executable} "$@"') -> Path:
    """Return a folder like a virtual environment, with a shell script as its Python."""
    program = folder / "bin" / "python3"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder


def answer(python: str = "3.12.3", more: str = "", missing: str = "") -> str:
    """Return the script of a Python that describes itself so."""
    return f"""echo 'hpcdist-versions {{"python": "{python}"{more}}}'; echo 'hpcdist-missing {missing}'"""


def config_of(venv: Path, *modules: str, setup: str = "") -> Config:
    environment = EnvironmentConfig(kind="venv", path=str(venv), modules=list(modules))
    return Config(cluster=ClusterConfig(environment=environment, setup=[setup] if setup else []))


def test_ranks_use_a_virtual_environment(run: RunDir, tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    config = config_of(venv)
    found = rank_environment(config, run, {"PATH": "/bin", "PYTHONHOME": "/x"})
    assert found.python == f"{venv}/bin/python3" == python_of(config)
    assert found.env == {"PATH": f"{venv}/bin:/bin", "VIRTUAL_ENV": str(venv)}
    assert found.import_path == (str(run.package),)
    record = read_json(run.rank_environment) or {}
    assert (record["kind"], record["path"]) == ("venv", str(venv))
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["torch"]
    # Without the key, ranks use this Python.
    found = rank_environment(Config(), run, {})
    assert (found.python, found.import_path) == (sys.executable, ()) == (python_of(Config()), ())
    assert not run.rank_environment.exists()


def test_package_folder_has_hpcdist_and_its_entry_points(tmp_path: Path) -> None:
    link_package(tmp_path / "package")
    link_package(tmp_path / "package")
    code = """
import importlib.metadata, importlib.util, hpcdist
print(hpcdist.__version__, hpcdist.__file__, importlib.util.find_spec("torch"))
print(*(point.value for point in importlib.metadata.entry_points(group="mlflow.tracking_store")))
"""
    env = {"PYTHONPATH": str(tmp_path / "package")}
    # Without the packages of this Python.
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        hpcdist.__version__,
        f"{tmp_path}/package/hpcdist/__init__.py",
        "None",
        "hpcdist.tracking.mlflow_plugin:tracking_store",
    ]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'error while loading libpython' >&2; exit 127", "does not start: error while loading libpython"),
        ("exit 3", "does not start: exit code 3"),
        (answer("3.9.2"), "is Python 3.9.2; hpcdist needs 3.11 or newer"),
        (answer(missing="psutil torch"), "has no psutil, torch: add the packages to the environment"),
    ],
)
def test_unfit_environment_is_refused(run: RunDir, tmp_path: Path, script: str, problem: str) -> None:
    venv = make_venv(tmp_path / "venv", script)
    expected = f"cluster.environment: {venv}/bin/python3 {problem}"
    assert environment_problems(config_of(venv), os.environ) == [expected]
    with pytest.raises(UserMistake) as found:
        rank_environment(config_of(venv), run, os.environ)
    assert str(found.value) == expected


def test_environment_that_this_machine_cannot_check(run: RunDir, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert environment_problems(config_of(nowhere), os.environ) == [
        f"cluster.environment.path: {nowhere} is not a virtual environment: no program {nowhere}/bin/python3"
    ]
    assert environment_problems(config_of(nowhere, setup="sbcast a b"), os.environ) == []
    with pytest.raises(UserMistake, match=r"nowhere/bin/python3 cannot be started: No such file or directory"):
        rank_environment(config_of(nowhere), run, os.environ)
    # Its Python may need the modules.
    broken = make_venv(tmp_path / "broken", "exit 1")
    assert environment_problems(config_of(broken, "cuda/13.0"), os.environ) == []


def test_driver_of_the_node_fits_torch(run: RunDir, tmp_path: Path) -> None:
    """The submitting machine may have another driver."""
    venv = make_venv(tmp_path / "venv", answer(more=', "cuda": "13.2", "driver": "470.1"'))
    assert environment_problems(config_of(venv), os.environ) == []
    with pytest.raises(UserMistake, match=r"the torch of .*python3 needs driver 580\.65 or newer for its CUDA 13\.2"):
        rank_environment(config_of(venv), run, os.environ)
