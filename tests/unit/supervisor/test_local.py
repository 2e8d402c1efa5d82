"""Creation of runs, and their supervision in this process or in a detached one."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from supervisor_scene import DONE, STOP_ON_REQUEST, Scene, ScriptedJob, fails

from hpcdist.config.launch_schema import ContainerConfig, LaunchConfig, TrackingConfig
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.schema import Config, TrainerConfig
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.host.files import read_json
from hpcdist.run import create, folder, snapshot
from hpcdist.run.create import check_trainer, create_run, with_name
from hpcdist.run.ending import end
from hpcdist.run.folder import Attempt, RunDir, State
from hpcdist.run.lease import hold
from hpcdist.run.records import kept, read_times
from hpcdist.supervisor import local, supervisor
from hpcdist.supervisor.launcher import NodeChanges
from hpcdist.supervisor.local import LocalRanks, supervise_locally
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


@pytest.mark.parametrize(
    ("trainer", "label"),
    [
        (TrainerConfig(), "ddp"),
        (TrainerConfig(target="pkg.mod:train"), r"pkg\.mod\.train"),
        (TrainerConfig(script=["/a/b/my_train.py", "--lr", "1"]), "my_train"),
    ],
)
def test_generated_name_has_trainer_time_and_random_suffix(
    make: Callable[..., Config], trainer: TrainerConfig, label: str
) -> None:
    assert with_name(make()) == make(), "a configured name"
    config = make(trainer=trainer, name="")
    names = {with_name(config).name for _ in range(5)}
    assert len(names) == 5
    assert all(re.fullmatch(label + r"-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)


# --- trainers


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            TrainerConfig(target="no_such_module.sub:train"),
            "trainer.target: no module 'no_such_module' in {cwd} or among the installed packages",
        ),
        (TrainerConfig(target="dpp"), "trainer: 'dpp' is not one of ddp, rl"),
        (TrainerConfig(target="__init__"), "trainer: '__init__' is not one of ddp, rl"),
    ],
)
def test_missing_trainer_is_an_error(project: Path, trainer: TrainerConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_trainer(Config(trainer=trainer), project)
    assert str(caught.value).startswith(message.format(cwd=project))


@pytest.mark.parametrize("target", ["ddp", "train:train", "hpcdist.trainers.ddp.train:train", "json:loads"])
def test_existing_trainer_is_not_imported(project: Path, target: str) -> None:
    (project / "train.py").write_text("raise RuntimeError\n")
    check_trainer(Config(trainer=TrainerConfig(target=target)), project)
    assert "train" not in sys.modules


def test_existing_script_is_accepted(project: Path) -> None:
    config = Config(trainer=TrainerConfig(script=[str(project / "train.py")]))
    check_trainer(config, project)
    (project / "train.py").unlink()
    with pytest.raises(ConfigError, match=r"trainer\.script: no such file"):
        check_trainer(config, project)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"x = 1\nreturn x\n", ":2: SyntaxError: 'return' outside function in `return x`"),
        (b"def f():\nx = 1\n", ":2: IndentationError: expected an indented block after function definition"),
        (b"x = '\0'\n", "source code string cannot contain null bytes"),
    ],
)
def test_syntax_error_is_reported_before_the_start(project: Path, content: bytes, problem: str) -> None:
    (project / "package").mkdir()
    (project / "package" / "__init__.py").write_text(r"ODD = '\d'")  # a warning of the compiler is no error
    file = project / "package" / "module.py"
    file.write_bytes(content)
    for key, trainer in (
        ("script", TrainerConfig(script=[str(file)])),
        ("target", TrainerConfig(target="package.module:train")),
    ):
        with pytest.raises(ConfigError, match=rf"^trainer\.{key}: {file}.*{re.escape(problem)}"):
            check_trainer(Config(trainer=trainer), project)
        check_trainer(Config(trainer=trainer), project, own_python=True)  # it may know another syntax
        check_trainer(Config(trainer=trainer, container=ContainerConfig(runtime="podman", image="i")), project)


# --- creating a run


def test_create_run_writes_config_code_environment_and_secrets(
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


# --- supervising


def no_view() -> AbstractContextManager[Any]:
    return nullcontext()


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace launcher and supervisor by stubs; return their arguments."""
    arguments_of: dict[str, Any] = {}

    class StubSupervisor:
        def __init__(self, run: RunDir, config: Config, launcher: object, report: object, **arguments: Any) -> None:
            arguments_of.update(arguments, run=run, held=run.lease.exists())

        def run(self) -> State:
            return State(status="finished")

    class StubLauncher:
        def __init__(self, run: RunDir, plan: Plan, **arguments: Any) -> None:
            arguments_of.update(arguments)

        def __enter__(self) -> StubLauncher:
            arguments_of.update(entered=True)
            return self

        def __exit__(self, *_: object) -> None:
            arguments_of.pop("entered")

    monkeypatch.setattr(local, "LocalLauncher", StubLauncher)
    monkeypatch.setattr(supervisor, "Supervisor", StubSupervisor)
    return arguments_of


def test_supervise_holds_the_run_and_passes_code_and_secrets(
    project: Path, make: Callable[..., Config], supervised: dict[str, Any]
) -> None:
    config = make(trainer=TrainerConfig(target="train:train"), params={"hf_token": "s3cret"})
    run = create_run(config, project)
    state = supervise_locally(run, config, PLAN, no_view, {"HOME": "/home/ada"}, tracking_uri="sqlite:///x")
    assert state.status == "finished"
    assert supervised["held"]
    assert not run.lease.exists()
    assert supervised["cwd"] == project
    assert supervised["import_path"] == [str(run.code)]
    assert supervised["tracking_uri"] == "sqlite:///x"
    identity = {"HPCDIST_FOLDER_IDENTITY": folder.identity(run.path)}
    assert supervised["env"] == {"HOME": "/home/ada", "HPCDIST_PARAMS_HF_TOKEN": "s3cret", **identity}
    assert load_run_config(run.config, [], supervised["env"]) == config


def test_launcher_starts_before_the_plan_is_shown_and_is_closed_if_that_fails(
    project: Path, make: Callable[..., Config], supervised: dict[str, Any]
) -> None:
    def closed_terminal() -> AbstractContextManager[Any]:
        assert supervised["entered"]
        raise BrokenPipeError

    run = create_run(make(), project)
    with pytest.raises(BrokenPipeError):
        supervise_locally(run, make(), PLAN, closed_terminal, {}, tracking_uri="sqlite:///x")
    assert "entered" not in supervised
    assert not run.lease.exists()


def test_supervise_uses_the_run_folder_if_the_working_directory_is_missing(
    project: Path, make: Callable[..., Config], supervised: dict[str, Any]
) -> None:
    config = make(trainer=TrainerConfig(target="train:train"))
    run = create_run(config, project)
    project.rename(project.with_name("moved"))
    supervise_locally(run, config, PLAN, no_view, {}, tracking_uri="sqlite:///x")  # type: ignore[arg-type]
    assert supervised["cwd"] == run.path
    assert supervised["import_path"] == [str(run.code)]


def test_supervise_rejects_a_held_run(project: Path, make: Callable[..., Config], supervised: dict[str, Any]) -> None:
    run = create_run(make(), project)
    with hold(run), pytest.raises(RunFolderError, match=f"run first is held by process {os.getpid()} of "):
        supervise_locally(run, make(), PLAN, no_view, {}, tracking_uri="sqlite:///x")  # type: ignore[arg-type]
    assert supervised == {}


def test_supervise_rejects_an_incomplete_run(
    project: Path, make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "write_environment", lambda *_, **__: None)
    run = create_run(make(), project)
    with pytest.raises(RunFolderError, match=r"^run first is incomplete \(no environment\.json\): remove"):
        supervise_locally(run, make(), PLAN, no_view, {}, tracking_uri="sqlite:///x")  # type: ignore[arg-type]
    assert not run.lease.exists()


def test_detach_starts_a_supervisor_in_a_new_session(
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
    pid = local.detach(run, {"HOME": "/home/ada", "PATH": "/usr/bin:/bin"})
    assert started[0].wait(20) == 0
    assert (run.path / "supervisor.log").read_text().splitlines() == [
        f"-P -m hpcdist supervise {run.path}",
        "/home/ada ",  # `supervise` reads it from the run folder
        "err",
        str(pid),
    ]


def test_missing_click_log_is_reported_before_the_start(tmp_path: Path) -> None:
    missing = tmp_path / "clicks.parquet"
    config = load_config("hybrid_clicks", [f"hybrid.file={missing}"])
    with pytest.raises(ConfigError, match=rf"hybrid\.file: no such file: {missing}"):
        create.check_trainer(config, tmp_path)
    missing.touch()
    create.check_trainer(config, tmp_path)


# --- Restarts on other nodes: failures that lost nodes explain, nodes that do not answer, and nodes that return.


EXIT_0: list[list[Any]] = []


@pytest.fixture
def scene(runs_dir: Path) -> Scene:
    return Scene(RunDir.create(runs_dir / "exp" / "first"))


class Nodes(NodeChanges):
    """Node changes that a test prescribes for the first attempts; later ones have none."""

    def __init__(self, *, changes: tuple[str, ...] = (), lost: tuple[int, str] | None = None, growth: str = "") -> None:
        self.changes = list(changes)
        self.silent = lost
        self.more = growth

    def detect_lost(self) -> tuple[int, str] | None:
        return self.silent

    def replace_lost(self) -> str:
        self.silent = None
        return self.changes.pop(0) if self.changes else ""

    def detect_returned(self) -> str:
        return self.more

    def use_returned(self) -> None:
        self.more = ""


def test_failures_that_nodes_explain_do_not_count_against_max_restarts(scene: Scene) -> None:
    scene.launch = {"max_restarts": 0}
    scene.script(first=[fails("peer lost"), EXIT_0], second=[fails("peer lost"), EXIT_0], third=[[*DONE], EXIT_0])
    nodes = Nodes(changes=("no answer from n3: continuing on 3 of 4 nodes", "n4 takes over"))
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes))
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt, state.restarts) == ("finished", 3, 2)
    assert "restart: no answer from n3: continuing on 3 of 4 nodes" in scene.report.notes
    assert scene.run.attempt(1).failure.exists(), "it counts in the search for a failing node"


def test_node_without_an_answer_ends_the_attempt(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, STOP_ON_REQUEST], second=[[*DONE], EXIT_0])
    nodes = Nodes(changes=("no answer from n2: continuing on 1 of 2 nodes",))
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes))
    scene.report.on_attempt = lambda attempt: setattr(nodes, "silent", (1, "n2") if attempt.number == 1 else None)
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 1)
    ((failure, _),) = scene.report.failures
    assert (failure.kind, failure.rank, failure.host) == ("lost", 1, "n2")
    assert failure.sentence().startswith("rank 1 on n2 was lost: its node does not answer")


def test_ranks_are_restarted_on_more_nodes_and_the_run_goes_on(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, STOP_ON_REQUEST], second=[[*DONE], EXIT_0])
    nodes = Nodes(growth="n3")
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes))
    scene.report.on_attempt = lambda attempt: setattr(nodes, "more", "n3" if attempt.number == 1 else "")
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 1)
    request = scene.run.attempt(1).read_request()
    assert request is not None
    assert (request.cause, request.sentence) == ("growth", "to restart on more nodes: n3 answers again")
    assert scene.run.attempt(2).read_request() is None


def test_nodes_that_the_preflight_check_leaves_out_are_not_recorded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.script(first=[[*DONE]])
    supervisor = scene.supervisor(ScriptedJob(nodes=Nodes()))
    launcher, found = scene.launcher, []
    start = launcher.start

    def start_on_fewer_nodes(attempt: Attempt) -> LocalRanks:
        times = read_times(attempt)
        assert times is not None
        found.append((scene.run.read_state().world_size, times.num_ranks))
        launcher.num_ranks = 1
        return start(attempt)

    monkeypatch.setattr(launcher, "start", start_on_fewer_nodes)
    state = scene.supervise(supervisor)
    times = read_times(scene.run.attempt(1))
    assert times is not None
    assert found == [(2, 2)]
    assert (state.status, state.world_size, times.num_ranks, times.status) == ("finished", 1, 1, "finished")


def test_end_of_the_job_during_a_restart_on_more_nodes_ends_the_run(scene: Scene) -> None:
    scene.script(first=[STOP_ON_REQUEST, STOP_ON_REQUEST])
    nodes = Nodes(growth="n3")
    supervisor = scene.supervisor(ScriptedJob(nodes=nodes, ending=True))
    state = scene.supervise(supervisor)
    assert (state.status, state.attempt) == ("stopped", 1)
    request = scene.run.attempt(1).read_request()
    assert request is not None
    assert request.cause == "preemption"


@pytest.mark.parametrize("name", ["growth", "preemption", "SIGTERM", "{by}"])
def test_name_of_a_user_is_never_taken_for_the_cause_of_a_request(
    scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", name)
    scene.script(first=[STOP_ON_REQUEST, [["await", "{attempt}/request.json"]]], second=[[*DONE], EXIT_0])
    scene.report.on_attempt = lambda attempt: attempt.number == 1 and end(scene.run, "stop")
    with hold(scene.run):
        state = scene.supervise()
    assert (state.status, state.attempt) == ("stopped", 1)
    assert state.reason == f"everything saved (`hpcdist stop` by {name})"
    request = scene.run.attempt(1).read_request()
    assert request is not None
    assert (request.cause, request.by) == ("user", f"`hpcdist stop` by {name}")
