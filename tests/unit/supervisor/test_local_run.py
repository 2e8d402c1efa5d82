"""From a config to a run under way."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.bench.comm_config import CommConfig
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.schema import Config, LaunchConfig, TrackingConfig, TrainerConfig
from hpcdist.errors import ConfigError, RunFolderError, UserMistake
from hpcdist.files.atomic import read_json
from hpcdist.run import create, snapshot
from hpcdist.run.create import check_trainer, create_run, with_name
from hpcdist.run.folder import RunDir, State
from hpcdist.run.lease import hold
from hpcdist.run.secret_file import kept
from hpcdist.supervisor import local_run
from hpcdist.supervisor.local_run import supervise
from hpcdist.supervisor.plan import Plan

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

PLAN = Plan(num_ranks=1, device="cpu", backend="gloo", threads=1, env={})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    (path / "train.py").write_text("def train(ctx, cfg): ...\n")
    return path


@pytest.fixture
def make(runs_dir: Path, tmp_path: Path) -> Callable[..., Config]:
    path = tmp_path / "run.yaml"
    path.write_text(f"{{experiment: exp, name: first, runs_dir: {runs_dir}}}\n")
    loaded = load_config(path)

    def make(**changes: Any) -> Config:
        return replace(loaded, **changes)

    return make


# --- names


def test_a_name_of_ones_own_stays(make: Callable[..., Config]) -> None:
    assert with_name(make()) == make()


@pytest.mark.parametrize(
    ("trainer", "label"),
    [
        (TrainerConfig(), "ddp"),
        (TrainerConfig(target="pkg.mod:train"), r"pkg\.mod\.train"),
        (TrainerConfig(script=["/a/b/my_train.py", "--lr", "1"]), "my_train"),
    ],
)
def test_a_run_is_named_after_trainer_time_and_chance(
    make: Callable[..., Config], trainer: TrainerConfig, label: str
) -> None:
    config = make(trainer=trainer, name="")
    names = {with_name(config).name for _ in range(5)}
    assert len(names) == 5
    assert all(re.fullmatch(label + r"-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)


# --- trainers


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            TrainerConfig(script=["/no/such/train.py"]),
            "trainer.script: no such file: /no/such/train.py",
        ),
        (
            TrainerConfig(target="no_such_module.sub:train"),
            "trainer.target: no module 'no_such_module' in {cwd} or among the installed packages",
        ),
        (TrainerConfig(target="dpp"), "trainer: 'dpp' is not one of ddp, rl"),
        (TrainerConfig(target="__init__"), "trainer: '__init__' is not one of ddp, rl"),
    ],
)
def test_a_trainer_that_is_not_there(project: Path, trainer: TrainerConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_trainer(Config(trainer=trainer), project)
    assert str(caught.value).startswith(message.format(cwd=project))


def test_a_torch_without_mpi_is_told_before_the_start(project: Path) -> None:
    config = Config(trainer=TrainerConfig(target="comm"), sections={"comm": CommConfig(backend="mpi")})
    with pytest.raises(ConfigError, match=r"^comm\.backend=mpi needs a torch that was built with MPI.* or use comm\.b"):
        check_trainer(config, project)


@pytest.mark.parametrize("target", ["ddp", "train:train", "hpcdist.trainers.ddp.train:train", "json:loads"])
def test_a_trainer_that_is_there_is_not_imported(project: Path, target: str) -> None:
    (project / "train.py").write_text("raise RuntimeError\n")
    check_trainer(Config(trainer=TrainerConfig(target=target)), project)


def test_a_script_that_is_there(project: Path) -> None:
    check_trainer(Config(trainer=TrainerConfig(script=[str(project / "train.py")])), project)


# --- making a run


def test_create_run_leaves_all_that_a_restart_needs(
    project: Path, make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(
        trainer=TrainerConfig(target="train:train"),
        launch=LaunchConfig(env={"API_KEY": "env-s3cret"}),
        tracking=TrackingConfig(uri="http://ada:uri-s3cret@mlflow"),
    )
    monkeypatch.setattr(sys, "argv", ["hpcdist", "run", "launch.env.API_KEY=env-s3cret"])
    run = create_run(config, project)
    assert run.read_state().status == "created"
    secrets = {"API_KEY": "env-s3cret", "HPCDIST_TRACKING_URI": "http://ada:uri-s3cret@mlflow"}
    assert load_run_config(run.config, [], secrets) == config
    assert (run.code / "train.py").is_file()
    facts = read_json(run.environment) or {}
    assert (facts["launcher"], facts["user"]) == ("local", getpass.getuser())
    assert kept(run) == secrets
    for path in run.path.rglob("*"):
        assert path == run.secrets or not path.is_file() or b"s3cret" not in path.read_bytes(), path


def test_create_run_that_fails_leaves_nothing_behind(project: Path, make: Callable[..., Config]) -> None:
    (project / "big.bin").write_bytes(bytes(2**20))
    config = make(trainer=TrainerConfig(target="train:train"), launch=LaunchConfig(code_max_mb=0.5))
    with pytest.raises(UserMistake, match=r"more than launch\.code_max_mb=0\.5"):
        create_run(config, project)
    assert not Path(config.runs_dir, "exp", "first").exists()
    create_run(make(), project)


def test_create_run_does_not_touch_an_existing_run(project: Path, make: Callable[..., Config]) -> None:
    run = create_run(make(), project)
    with pytest.raises(RunFolderError, match="exists already"):
        create_run(make(seed=3), project)
    assert load_run_config(run.config, [], {}).seed == 0


# --- supervising


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the supervisor was made with; it runs nothing."""
    seen: dict[str, Any] = {}

    class Nothing:
        def __init__(self, run: RunDir, config: Config, launcher: object, report: object, **arguments: Any) -> None:
            seen.update(arguments, run=run, held=run.lease.exists())

        def run(self) -> State:
            return State(status="finished")

    class NoRanks:
        def __init__(self, run: RunDir, plan: Plan, **arguments: Any) -> None:
            seen.update(arguments)

        def __enter__(self) -> NoRanks:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(local_run, "LocalLauncher", NoRanks)
    monkeypatch.setattr(local_run, "Supervisor", Nothing)
    return seen


def test_supervise_holds_the_run_and_passes_code_folder_and_secrets_on(
    project: Path, make: Callable[..., Config], supervised: dict[str, Any]
) -> None:
    config = make(trainer=TrainerConfig(target="train:train"), params={"hf_token": "s3cret"})
    run = create_run(config, project)
    state = supervise(run, config, PLAN, None, {"HOME": "/home/ada"}, tracking_uri="sqlite:///x")  # type: ignore[arg-type]
    assert state.status == "finished"
    assert supervised["held"]
    assert not run.lease.exists()
    assert supervised["cwd"] == project
    assert supervised["import_path"] == [str(run.code)]
    assert supervised["tracking_uri"] == "sqlite:///x"
    assert supervised["env"] == {"HOME": "/home/ada", "HPCDIST_PARAMS_HF_TOKEN": "s3cret"}
    assert load_run_config(run.config, [], supervised["env"]) == config


def test_supervise_on_a_machine_without_the_folder_of_the_start(
    project: Path, make: Callable[..., Config], supervised: dict[str, Any]
) -> None:
    config = make(trainer=TrainerConfig(target="train:train"))
    run = create_run(config, project)
    project.rename(project.with_name("moved"))
    supervise(run, config, PLAN, None, {}, tracking_uri="sqlite:///x")  # type: ignore[arg-type]
    assert supervised["cwd"] == run.path
    assert supervised["import_path"] == [str(run.code)]


def test_supervise_refuses_a_run_that_is_held(
    project: Path, make: Callable[..., Config], supervised: dict[str, Any]
) -> None:
    run = create_run(make(), project)
    with hold(run), pytest.raises(RunFolderError, match=f"run first is held by process {os.getpid()} of "):
        supervise(run, make(), PLAN, None, {}, tracking_uri="sqlite:///x")  # type: ignore[arg-type]
    assert supervised == {}


def test_supervise_refuses_a_run_that_was_never_made_to_the_end(
    project: Path, make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "write_environment", lambda *_, **__: None)
    run = create_run(make(), project)
    with pytest.raises(RunFolderError, match=r"^run first was never made to the end \(no environment\.json\): remove"):
        supervise(run, make(), PLAN, None, {}, tracking_uri="sqlite:///x")  # type: ignore[arg-type]
    assert not run.lease.exists()


def test_detach_starts_a_supervisor_of_its_own(
    project: Path, make: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\necho "$@"; echo "$HOME $API_KEY"; echo err >&2; cut -d " " -f 6 /proc/$$/stat; cat\n')
    stub.chmod(0o700)
    config = make(launch=LaunchConfig(env={"API_KEY": "s3cret"}))
    run = create_run(config, project)
    monkeypatch.setattr(sys, "executable", str(stub))
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    pid = local_run.detach(run, {"HOME": "/home/ada", "PATH": "/usr/bin:/bin"})
    assert started[0].wait(20) == 0
    assert (run.path / "supervisor.log").read_text().splitlines() == [
        f"-P -m hpcdist supervise {run.path}",
        "/home/ada ",  # `supervise` reads it from the run folder
        "err",
        str(pid),
    ]


def test_a_click_log_that_is_not_there_is_told_before_the_start(tmp_path: Path) -> None:
    missing = tmp_path / "clicks.parquet"
    config = load_config("hybrid_clicks", [f"hybrid.file={missing}"])
    with pytest.raises(ConfigError, match=rf"hybrid\.file: no such file: {missing}"):
        create.check_trainer(config, tmp_path)
    missing.touch()
    create.check_trainer(config, tmp_path)
