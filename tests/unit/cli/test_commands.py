"""The commands: their output, their files and their exit codes."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hpcdist_runs import unused_port

from hpcdist.cli import app
from hpcdist.config.loading import load_config
from hpcdist.errors import UserMistake
from hpcdist.files.atomic import read_json, write_json
from hpcdist.run import create
from hpcdist.run.folder import RunDir, State
from hpcdist.run.lease import hold
from hpcdist.run.secret_file import kept
from hpcdist.slurm.job_info import JobInfo
from hpcdist.slurm.job_snapshot import JobSnapshot
from hpcdist.supervisor import local_run
from hpcdist.tracking import ui

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

COMMANDS = (
    "run",
    "resume",
    "runs",
    "status",
    "logs",
    "follow",
    "stop",
    "cancel",
    "explain",
    "doctor",
    "config",
    "sync",
    "ui",
)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def hpcdist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Run a command in this process, in an empty folder, as the console script does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HPCDIST_TRACKING_URI", "")  # `--tracking-uri` sets it; monkeypatch restores it
    monkeypatch.delenv("HPCDIST_TRACKING_URI")

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["hpcdist", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, out, err)

    return call


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RunDir]:
    """Make a run folder in `runs/exp`, as a start does."""

    def make(name: str = "first", *overrides: str, **state: Any) -> RunDir:
        path = tmp_path / "made.yaml"
        path.write_text("experiment: exp\n")
        config = load_config(path, [f"name={name}", f"runs_dir={tmp_path}/runs", *overrides])
        run = create.create_run(config, tmp_path)
        for _ in range(state.get("attempt", 0)):
            run.new_attempt()
        run.write_state(replace(run.read_state(), **state))
        return run

    return make


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Replace `supervise`, which starts no ranks: it records its arguments and returns the state in `ends`."""
    seen: dict[str, Any] = {"ends": State(status="finished", reason="all epochs are done")}

    def supervise(run: RunDir, config: Any, plan: Any, report: Any, env: Any, *, tracking_uri: str) -> State:
        seen.update(run=run, config=config, plan=plan, env=env)
        state: State = seen["ends"]
        return state

    monkeypatch.setattr(local_run, "supervise", supervise)
    monkeypatch.setattr("hpcdist.logs.configure", lambda: None)
    return seen  # type: ignore[return-value]


def one_line(result: Result, code: int = 2) -> str:
    """Return the message of a failed command: one line, and nothing else on standard error."""
    assert result.code == code
    assert result.err.startswith("hpcdist: ")
    assert result.err.count("\n") == 1
    return result.err.removeprefix("hpcdist: ").rstrip()


# --- help


def test_help_lists_the_commands_and_hides_the_internal_ones(hpcdist: Cli) -> None:
    result = hpcdist("--help")
    assert (result.code, result.err) == (0, "")
    assert [command for command in COMMANDS if f" {command} " not in result.out] == []
    assert "worker" not in result.out
    assert "supervise" not in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(hpcdist: Cli, command: str) -> None:
    result = hpcdist(command, "--help")
    assert result.code == 0
    assert "Example" in result.out
    assert f"hpcdist {command}" in result.out.partition("Example")[2]


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"torch", "mlflow", "omegaconf", "submitit", "psutil"}),
        (["config", "ddp_digits"], {"torch", "mlflow", "submitit", "psutil"}),
        (["run", "ddp_digits", "--dry-run"], {"torch", "mlflow", "submitit"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_quick_commands_import_no_heavy_modules(tmp_path: Path, arguments: list[str], heavy: set[str]) -> None:
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr))\n"
        "from hpcdist.cli.app import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert ast.literal_eval(done.stderr) == []


# --- user errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "ddp_digits", "optim.lr=-1"], "optim.lr must be > 0, got -1.0"),
        (["run", "ddp_digits", "optim.lrr=1"], "optim.lrr is not a key: did you mean 'optim.lr'?"),
        (["run", "ddp_digits", "nonsense"], "'nonsense' is no override: write key=value, as in optim.lr=0.01"),
        (["run", "ddp_digit"], "ddp_digit: no such config file: did you mean 'ddp_digits'?"),
        (["run", "ddp_digits", "trainer=dpp"], "trainer: 'dpp' is not one of "),
        (["run", "ddp_digits", "launch.device=cuda"], "launch.device=cuda, but no GPU is visible here"),
        (["run", "ddp_digits", "--sweep", "seed=1,1"], "--sweep: seed: 1 is given twice"),
        (["run", "ddp_digits", "seed=3", "--sweep", "seed=1,2"], "--sweep: seed is both swept and overridden"),
        (["run", "ddp_digits", "--sweep", "optim.lr=0.1,-1"], "optim.lr must be > 0, got -1.0"),
        (["run", "ddp_digits", "--sweep", "trainer=ddp,dpp"], "trainer: 'dpp' is not one of "),
        (["run", "ddp_digits", "--sweep", "seed=1,2", "--detach"], "--sweep and --detach exclude each other: "),
        (["run", "ddp_digits", "--sweep", "seed=1,2", "tracking.uri=http://ada:***@mlflow"], "the password of "),
        (["submit", "ddp_digits", "--array-parallelism", "2"], "--array-parallelism needs --sweep"),
        (["submit", "ddp_digits", "--sweep", "cluster.nodes=1,2"], "--sweep: cluster.nodes cannot be swept: "),
        (["config"], "CONFIG is missing: shipped configs are "),
        (["config", "ddp_digits", "seed=x"], "seed must be int, got 'x'"),
        (["status", "nope"], "no run 'nope' under "),
        (["resume", "nope"], "no run 'nope' under "),
        (["supervise", "nope"], "nope holds no run"),
        (["run", "ddp_digits", "tracking.uri=http://ada:***@mlflow"], "the password of http://ada:***@mlflow is not"),
    ],
)
def test_a_user_error_is_one_line(hpcdist: Cli, arguments: list[str], message: str) -> None:
    result = hpcdist(*arguments)
    assert message in one_line(result, 1 if "tracking.uri" in arguments[-1] else 2)
    assert os.listdir() == []


def test_several_user_errors_are_a_list(hpcdist: Cli) -> None:
    result = hpcdist("run", "ddp_digits", "optim.lr=-1", "seed=-1", "nope=1")
    assert result.code == 2
    first, *lines = result.err.splitlines()
    assert first.endswith("ddp_digits.yaml: 3 mistakes")
    assert [line.split()[1] for line in lines] == ["nope", "optim.lr", "seed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runn"], "No such command 'runn'"),
        (["run"], "Missing argument 'CONFIG'"),
        (["run", "ddp_digits", "--dryrun"], "No such option"),
        (["logs", "first", "--rank", "x"], "Invalid value for '--rank'"),
    ],
)
def test_a_usage_error_is_one_line(hpcdist: Cli, arguments: list[str], message: str) -> None:
    result = hpcdist(*arguments)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_the_real_process_ends_with_the_same_message_and_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpcdist", "run", "ddp_digits", "optim.lr=-1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith("configs/ddp_digits.yaml: optim.lr must be > 0, got -1.0\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(28, "No space left on device", "/runs/x"), 2, "hpcdist: No space left on device: /runs/x\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_the_system_end_without_a_traceback(
    hpcdist: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("hpcdist.run.lookup.list_runs", fail)
    result = hpcdist("runs")
    assert (result.code, result.err) == (code, message)


def test_an_unexpected_exception_is_one_line_that_names_a_file_with_the_traceback(
    monkeypatch: pytest.MonkeyPatch, hpcdist: Cli, tmp_path: Path
) -> None:
    monkeypatch.setattr("hpcdist.run.lookup.list_runs", lambda _: 1 // 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = hpcdist("runs")
    (kept,) = tmp_path.glob("hpcdist-*.traceback")
    assert (result.code, result.out) == (app.DEFECT, "")
    assert result.err == (
        f"hpcdist: internal error (ZeroDivisionError: integer division or modulo by zero): please report it with"
        f" {kept}\n"
    )
    assert "ZeroDivisionError" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert "Traceback (most recent call last)" in hpcdist("runs").err


def test_an_unexpected_exception_of_a_supervisor_goes_to_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hpcdist.run.folder.RunDir.open", lambda _: 1 // 0)
    monkeypatch.setattr(sys, "argv", ["hpcdist", "supervise", str(tmp_path)])
    with pytest.raises(ZeroDivisionError):
        app.main()


# --- config


def test_config_prints_the_resolved_config(hpcdist: Cli) -> None:
    result = hpcdist("config", "ddp_digits", "optim.lr=0.01", "launch.env.API_KEY=s3cret", "params.lr=${optim.lr}")
    assert (result.code, result.err) == (0, "")
    shown = yaml.safe_load(result.out)
    assert (shown["optim"]["lr"], shown["params"], shown["data"]["name"]) == (0.01, {"lr": 0.01}, "digits")
    assert shown["launch"]["env"] == {"API_KEY": "***"}


def test_the_schema_has_every_key_with_type_default_and_meaning(hpcdist: Cli) -> None:
    result = hpcdist("config", "--schema")
    assert result.code == 0
    assert "optim.lr: float = 0.001\n    Peak learning rate.\n" in result.out
    assert "launch.max_restarts: int = 3\n" in result.out


# --- run


def test_a_dry_run_shows_the_plan_and_writes_nothing(hpcdist: Cli, tmp_path: Path) -> None:
    result = hpcdist("run", "ddp_digits", "name=first", "launch.env.API_KEY=s3cret", "--dry-run")
    assert (result.code, result.err) == (0, "")
    rows = {line.split()[0]: line for line in result.out.splitlines()}
    assert rows["trainer"].endswith("ddp")
    assert rows["roles"].endswith("trainer → rank 0 … 1")
    assert "2 × cpu, gloo, " in rows["devices"]
    assert rows["run"].endswith(f"{tmp_path}/runs/digits/first")
    assert rows["MLflow"].endswith(f"sqlite:///{tmp_path}/runs/mlflow.db")
    assert f"hpcdist.rank.worker {tmp_path}/runs/digits/first" in rows["command"]
    assert "API_KEY=***" in result.out
    assert "s3cret" not in result.out
    assert list(tmp_path.iterdir()) == []


def test_run_shows_the_plan_supervises_and_ends_with_the_reason(
    hpcdist: Cli, tmp_path: Path, supervised: dict[str, Any]
) -> None:
    result = hpcdist("run", "ddp_digits", "name=first", "launch.num_ranks=3")
    assert result.code == 0
    assert result.out.startswith("trainer")
    assert result.out.splitlines()[-1] == "finished: all epochs are done"
    assert supervised["run"].path == tmp_path / "runs" / "digits" / "first"
    assert supervised["plan"].num_ranks == 3
    assert supervised["config"].launch.num_ranks == 3
    assert supervised["run"].config.is_file()


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (State(status="finished"), 0),
        (State(status="stopped"), 0),
        (State(status="failed"), 1),
        (State(status="failed", rejected=True), 2),
        (State(status="cancelled"), 130),
    ],
    ids=lambda value: getattr(value, "status", None),
)
def test_the_exit_code_follows_the_status_of_the_run(
    hpcdist: Cli, supervised: dict[str, Any], state: State, code: int
) -> None:
    supervised["ends"] = state
    assert hpcdist("run", "ddp_digits").code == code


def test_run_rejects_a_name_in_use(hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]) -> None:
    make("first")
    result = hpcdist("run", "ddp_digits", "name=first", "experiment=exp")
    assert one_line(result).endswith("choose another `name`, or continue that run with `hpcdist resume first`")
    assert "run" not in supervised


def test_run_reports_a_folder_that_it_cannot_write(hpcdist: Cli, tmp_path: Path, supervised: dict[str, Any]) -> None:
    (tmp_path / "file").touch()
    result = hpcdist("run", "ddp_digits", "runs_dir=file/runs", "name=first")
    assert one_line(result) == (
        f"run folder {tmp_path}/file/runs/digits/first cannot be created (Not a directory):"
        " set `runs_dir` to a folder that you can write"
    )


def test_a_detached_run_prints_how_to_follow_it(
    hpcdist: Cli, monkeypatch: pytest.MonkeyPatch, supervised: dict[str, Any]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(local_run, "detach", lambda run, env: seen.append(run.name) or 4711)
    result = hpcdist("run", "ddp_digits", "name=first", "--detach")
    assert result.code == 0
    assert result.out.splitlines()[-1] == (
        "first runs in the background (process 4711): `hpcdist follow first` shows its progress"
    )
    assert seen == ["first"]
    assert "run" not in supervised


def test_supervise_runs_a_run_folder(hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]) -> None:
    run = make("first", "seed=7")
    supervised["ends"] = State(status="failed", reason="so it is")
    assert hpcdist("supervise", str(run.path)).code == 1
    assert (supervised["run"].path, supervised["config"].seed) == (run.path, 7)


def test_worker_is_one_rank(hpcdist: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(arguments: list[str]) -> None:
        assert arguments == ["/runs/exp/first"]
        sys.exit(7)

    monkeypatch.setitem(sys.modules, "hpcdist.rank.worker", SimpleNamespace(main=work))
    assert hpcdist("worker", "/runs/exp/first").code == 7


# --- resume


def test_resume_uses_the_config_of_the_run(
    hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]
) -> None:
    run = make("first", "seed=7", status="failed", attempt=1)
    before = run.config.read_text()
    assert hpcdist("resume", "fi").code == 0
    assert supervised["run"].path == run.path
    assert supervised["config"].seed == 7
    assert run.config.read_text() == before
    assert not run.lease.exists()


def test_resume_saves_overrides(hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]) -> None:
    run = make("first", status="finished", attempt=1)
    assert hpcdist("resume", "first", "stop.max_epochs=20").code == 0
    assert supervised["config"].stop.max_epochs == 20
    assert yaml.safe_load(run.effective_config.read_text())["stop"]["max_epochs"] == 20
    assert yaml.safe_load(run.config.read_text())["stop"]["max_epochs"] == 3, "kept until a step is completed"


def test_resume_rejects_a_finished_run(hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]) -> None:
    make("first", status="finished", attempt=1)
    message = one_line(hpcdist("resume", "first"))
    assert message == "run first is finished: to train longer, add an override such as stop.max_epochs=20"
    assert "run" not in supervised


def test_resume_rejects_a_held_run_and_keeps_its_config(
    hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]
) -> None:
    run = make("first", status="running", attempt=1)
    before = run.config.read_text()
    with hold(run):
        message = one_line(hpcdist("resume", "first", "seed=9"))
    assert message.startswith(f"run first is held by process {os.getpid()} of ")
    assert run.config.read_text() == before
    assert "run" not in supervised


@pytest.mark.parametrize("current", [False, True])
def test_resume_uses_the_code_snapshot_unless_current_code_is_requested(
    hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any], tmp_path: Path, current: bool
) -> None:
    code = tmp_path / "train.py"
    code.write_text("old")
    run = make("first", "trainer=train:train", status="failed", attempt=1)
    code.write_text("new")
    assert hpcdist("resume", "first", *["--with-current-code"] * current).code == 0
    assert (run.code / "train.py").read_text() == ("new" if current else "old")
    command = (read_json(run.environment) or {})["command"]
    assert ("--with-current-code" in command) == current


def test_resume_needs_the_secrets_again(
    hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("first", "launch.env.API_KEY=s3cret", status="failed", attempt=1)
    assert hpcdist("resume", "first").code == 0
    assert supervised["config"].launch.env == {"API_KEY": "s3cret"}
    run.write_state(replace(run.read_state(), status="cancelled"))
    assert not run.secrets.exists()
    assert "launch.env.API_KEY was redacted when the run was written: set API_KEY in the environment" in one_line(
        hpcdist("resume", "first")
    )
    monkeypatch.setenv("API_KEY", "s3cret")
    assert hpcdist("resume", "first").code == 0
    assert supervised["config"].launch.env == {"API_KEY": "s3cret"}
    assert "s3cret" not in run.config.read_text()
    monkeypatch.setenv("API_KEY", "another")
    assert hpcdist("resume", "first").code == 0
    assert supervised["config"].launch.env == {"API_KEY": "another"}
    assert kept(run) == {"API_KEY": "another"}


# --- status of runs


def test_runs_lists_them(hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch) -> None:
    make("first", status="finished", attempt=1)
    make("second", status="failed", attempt=1)
    for arguments in (["runs"], ["runs", "--runs-dir", "./runs"]):
        result = hpcdist(*arguments)
        assert result.code == 0
        assert result.out.index("exp/first") < result.out.index("exp/second")
    assert hpcdist("runs", "--runs-dir", "elsewhere").out.startswith("no runs under ")
    monkeypatch.setenv("HPCDIST_RUNS_DIR", "elsewhere")
    assert hpcdist("runs").out.startswith("no runs under ")


def test_status_of_a_prefix(hpcdist: Cli, make: Callable[..., RunDir]) -> None:
    run = make("first", status="failed", attempt=1, reason="so it is")
    result = hpcdist("status", "fir")
    assert result.code == 0
    assert result.out.splitlines()[:2] == ["status       failed: so it is", f"folder       {run.path}"]


@pytest.mark.parametrize("command", ["status", "logs", "stop", "cancel", "resume", "sync"])
def test_an_ambiguous_name_lists_the_matches(
    hpcdist: Cli, make: Callable[..., RunDir], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real module imports mlflow, which takes seconds.
    monkeypatch.setitem(sys.modules, "hpcdist.tracking.shipper", SimpleNamespace(sync=None))
    make("first")
    make("fire")
    assert one_line(hpcdist(command, "fir")) == (
        "'fir' matches 2 runs (exp/fire, exp/first): write more of the name, or the folder"
    )


def test_logs_of_a_rank_and_an_attempt(hpcdist: Cli, make: Callable[..., RunDir]) -> None:
    run = make("first", status="finished", attempt=2)
    for attempt, rank in ((1, 0), (2, 0), (2, 1)):
        run.attempt(attempt).log(rank).write_text(f"attempt {attempt} rank {rank}\n")
    assert hpcdist("logs", "first") == Result(0, "attempt 2 rank 0\n", "")
    assert hpcdist("logs", "first", "-f", "--rank", "1").out == "attempt 2 rank 1\n"
    assert hpcdist("logs", "first", "--attempt", "1").out == "attempt 1 rank 0\n"
    assert one_line(hpcdist("logs", "first", "--rank", "2")).startswith("no log of rank 2 in attempt 2 of first (")


# --- stop and cancel


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("stop", "first will save and stop; `hpcdist status first` shows its progress\n"),
        ("cancel", "first will end at once\n"),
    ],
)
def test_a_request_is_written_into_the_last_attempt(
    hpcdist: Cli, make: Callable[..., RunDir], command: str, said: str
) -> None:
    run = make("first", status="running", attempt=2)
    with hold(run):
        assert hpcdist(command, "first") == Result(0, said, "")
    request = read_json(run.attempt(2).request) or {}
    assert request["action"] == command
    assert request["reason"] == f"`hpcdist {command}` by {request['by']}"
    assert not run.attempt(1).request.exists()


@pytest.mark.parametrize("command", ["stop", "cancel"])
@pytest.mark.parametrize(
    ("status", "attempt", "held"), [("running", 1, False), ("finished", 1, False), ("created", 0, True)]
)
def test_a_run_that_is_not_running_takes_no_requests(
    hpcdist: Cli, make: Callable[..., RunDir], command: str, status: str, attempt: int, held: bool
) -> None:
    run = make("first", status=status, attempt=attempt)
    holding: AbstractContextManager[None] = hold(run) if held else nullcontext()
    with holding:
        message = one_line(hpcdist(command, "first"))
    assert message.startswith("run first is not running")
    assert repr(status) in message
    assert list(run.path.rglob("request.json")) == []


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[[JobSnapshot], None]:
    """Set the snapshot that Slurm returns for every job."""
    said: list[JobSnapshot] = []
    monkeypatch.setattr("hpcdist.slurm.job_snapshot.take_snapshot", lambda job, history=False: said[-1])
    return said.append


def job(state: str, **facts: Any) -> JobSnapshot:
    return JobSnapshot(info=JobInfo(id="7", state=state, **facts))


@pytest.mark.parametrize(("command", "status"), [("stop", "stopped"), ("cancel", "cancelled")])
@pytest.mark.parametrize("before", ["queued", "running"])
def test_a_queued_run_is_removed_from_the_queue(
    hpcdist: Cli,
    make: Callable[..., RunDir],
    slurm: Callable[[JobSnapshot], None],
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    command: str,
    status: str,
) -> None:
    """This includes a run with a supervisor that was killed before Slurm requeued the job."""
    run = make("first", status=before, attempt=1)
    write_json(run.path / "slurm.json", {"job_id": "7"})
    slurm(job("PENDING", reason="Resources"))
    asked: list[tuple[str, bool]] = []

    def scancel(job_id: str, *, pending_only: bool) -> None:
        asked.append((job_id, pending_only))
        slurm(job("CANCELLED"))

    monkeypatch.setattr("hpcdist.slurm.client.cancel_job", scancel)
    said = "job 7 of first was taken out of the queue; `hpcdist resume first` submits it again\n"
    assert hpcdist(command, "first") == Result(0, said, "")
    assert asked == [("7", True)]
    state = run.read_state()
    assert state.status == status
    assert state.reason.startswith(f"{status} in the queue (`hpcdist {command}` by ")


def test_a_job_that_starts_during_the_stop_gets_a_request(
    hpcdist: Cli, make: Callable[..., RunDir], slurm: Callable[[JobSnapshot], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("first", status="queued")
    write_json(run.path / "slurm.json", {"job_id": "7"})
    slurm(job("PENDING"))
    monkeypatch.setattr("hpcdist.slurm.client.cancel_job", lambda job_id, pending_only: slurm(job("RUNNING")))
    holding = hold(run)

    def supervisor_starts(seconds: float) -> None:
        run.new_attempt()
        run.write_state(replace(run.read_state(), status="running", attempt=1))
        holding.__enter__()

    monkeypatch.setattr("hpcdist.run.stop.time.sleep", supervisor_starts)
    assert hpcdist("stop", "first").out.startswith("first will save and stop")
    holding.__exit__(None, None, None)
    assert (read_json(run.attempt(1).request) or {})["action"] == "stop"
    assert run.read_state().status == "running"


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (
            JobSnapshot(error="no squeue here"),
            "run first has no supervisor, and Slurm does not answer about job 7: no squeue here",
        ),
        (
            JobSnapshot(),
            "run first is not running: it is lost: Slurm no longer knows job 7, and its supervisor did",
        ),
    ],
    ids=["away", "vanished"],
)
def test_jobs_that_cannot_be_removed_from_the_queue(
    hpcdist: Cli, make: Callable[..., RunDir], slurm: Callable[[JobSnapshot], None], look: JobSnapshot, message: str
) -> None:
    run = make("first", status="queued")
    write_json(run.path / "slurm.json", {"job_id": "7"})
    slurm(look)
    assert one_line(hpcdist("stop", "first")).startswith(message)
    assert run.read_state().status == "queued"


def test_a_run_in_the_queue_cannot_be_resumed(
    hpcdist: Cli, make: Callable[..., RunDir], slurm: Callable[[JobSnapshot], None]
) -> None:
    run = make("first", status="queued")
    write_json(run.path / "slurm.json", {"job_id": "7"})
    slurm(job("PENDING"))
    assert one_line(hpcdist("resume", "first")) == ("run first is queued and cannot be resumed: `hpcdist follow first`")


# --- following


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 0), ("failed", 1), ("cancelled", 130)])
def test_following_an_ended_run_prints_its_end(
    hpcdist: Cli, make: Callable[..., RunDir], status: str, code: int
) -> None:
    make("first", status=status, attempt=1, reason="so it is")
    result = hpcdist("follow", "first")
    assert (result.code, result.out.splitlines()[-1]) == (code, f"{status}: so it is")


def test_ctrl_c_does_not_stop_a_followed_run(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("first", status="running", attempt=1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpcdist.cli.follow.Event", lambda: SimpleNamespace(wait=interrupt))
    with hold(run):
        result = hpcdist("follow", "first", "--wait")
    assert result.code == 130
    assert result.out.splitlines() == [
        "running",
        "run first continues: `hpcdist follow first` shows it again, `hpcdist stop` stops it",
    ]
    assert not run.attempt(1).request.exists()


def test_a_run_that_was_never_started_cannot_be_followed(hpcdist: Cli, make: Callable[..., RunDir]) -> None:
    make("first")
    message = one_line(hpcdist("follow", "first"))
    assert message == "run first was never started: `hpcdist resume first` starts it"


def test_explain_prints_its_findings(hpcdist: Cli, make: Callable[..., RunDir]) -> None:
    make("first", status="finished", attempt=1, reason="all epochs are done")
    assert hpcdist("explain", "first") == Result(0, "finished: all epochs are done; nothing to explain\n", "")


# --- MLflow


def test_sync_uploads_all_runs_without_a_shipper(
    hpcdist: Cli, make: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hpcdist.errors import TrackingError

    shipped: list[tuple[str, str]] = []

    def ship(run: RunDir, uri: str) -> str:
        if run.name == "down":
            raise TrackingError("the server does not answer")
        shipped.append((run.name, uri))
        return "3 points shipped"

    monkeypatch.setitem(sys.modules, "hpcdist.tracking.shipper", SimpleNamespace(sync=ship))
    make("first")
    second = make("second", "tracking.uri=http://ada:s3cret@mlflow", "launch.env.API_KEY=s3cret")
    assert hpcdist("sync", "second").code == 0
    second.write_state(replace(second.read_state(), status="finished"))
    busy = make("third")
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    with hold(busy):
        assert hpcdist("sync", "first") == Result(0, "first: 3 points shipped\n", "")
        result = hpcdist("sync")
    assert result.code == 1
    assert result.out.splitlines()[0] == "first: 3 points shipped"
    assert result.out.splitlines()[1].startswith(f"third: its supervisor runs (process {os.getpid()} on ")
    assert result.err == (
        "second: the password of http://ada:***@mlflow is not kept in the run folder:"
        " set HPCDIST_TRACKING_URI to the whole URI\n"
    )
    monkeypatch.setenv("HPCDIST_TRACKING_URI", "http://ada:s3cret@mlflow")
    assert hpcdist("sync", "second").code == 0
    with_password = ("second", "http://ada:s3cret@mlflow")
    assert shipped == [with_password, ("first", uri), ("first", uri), with_password]
    make("down")
    assert hpcdist("sync", "down") == Result(1, "", "down: the server does not answer\n")


def test_ui_starts_mlflow_behind_a_token(hpcdist: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []
    masks: list[int] = []
    for name in ("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "MLFLOW_BACKEND_STORE_URI", "HPCDIST_UI_TOKEN_FILE"):
        monkeypatch.setenv(name, "of the caller")  # restored after the test
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(arguments))
    monkeypatch.setattr(os, "umask", lambda mask: masks.append(mask))
    store = f"sqlite:///{tmp_path}/runs/mlflow.db"
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    run.config.write_text("{}")
    write_json(run.mlflow, {"experiment_id": "7", "uri": store})
    port = unused_port()
    shown = hpcdist("ui", "--port", str(port))
    (file,) = tmp_path.glob("state/hpcdist/ui/*.token")
    address = f"http://127.0.0.1:{port}"
    assert shown == Result(
        0,
        f"all experiments: {address}/?token={file.read_text()}\n"
        f"exp: {address}/?token={file.read_text()}#/experiments/7/runs?workflowType=machine_learning\n"
        f"scripts: MLFLOW_TRACKING_URI={address} MLFLOW_TRACKING_TOKEN=$(cat {file})\n",
        "",
    )
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["MLFLOW_BACKEND_STORE_URI"] == store
    assert os.environ["HPCDIST_UI_TOKEN_FILE"] == str(file)
    assert started == [ui.command(port)]
    assert masks == [0o077]


def test_ui_rejects_an_invalid_port(hpcdist: Cli) -> None:
    shown = hpcdist("ui", "--port", "70000")
    assert shown.code == 2
    assert "Invalid value for '--port'" in shown.err


def test_ui_prints_the_address_of_a_server(hpcdist: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("MLflow was started"))
    assert (
        hpcdist("ui", "--tracking-uri", "http://mlflow:5000").out
        == "the UI of this MLflow server is at http://mlflow:5000\n"
    )
    monkeypatch.delenv("HPCDIST_TRACKING_URI")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://other")
    assert hpcdist("ui").out == "the UI of this MLflow server is at https://other\n"


# --- sweeps


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[RunDir], State]]:
    """Set the ends of cells by the last part of their names; all others finish."""
    ends: dict[str, Callable[[RunDir], State]] = {}

    def supervise(run: RunDir, config: Any, plan: Any, report: Any, env: Any, *, tracking_uri: str) -> State:
        run.new_attempt()
        how = ends.get(run.name.rpartition("-")[2], lambda run: State(status="finished", reason="done"))
        state = replace(how(run), attempt=1)
        run.write_state(state)
        return state

    monkeypatch.setattr(local_run, "supervise", supervise)
    monkeypatch.setattr("hpcdist.logs.configure", lambda: None)
    monkeypatch.setattr("hpcdist.cli.sweep._close_parent_run", lambda run, uri: print("closed the parent run"))
    return ends


SWEEP = ("run", "ddp_digits", "name=tune", "--sweep", "seed=1,2,3", "--sweep", "optim.lr=0.1")


def test_a_dry_run_of_a_sweep_shows_its_cells_and_writes_nothing(hpcdist: Cli) -> None:
    result = hpcdist(*SWEEP, "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "sweep tune: 3 cells, 3 to run, in " in result.out
    assert "  2: seed=3 lr=0.1 (new)  tune-seed_3-lr_0.1\n" in result.out
    assert "hpcdist.rank.worker" in result.out
    assert os.listdir() == []


def test_a_failed_cell_does_not_end_the_sweep(hpcdist: Cli, cells: dict[str, Callable[[RunDir], State]]) -> None:
    swept = (*SWEEP[:4], "optim.lr=0.1", "--sweep", "seed=1,2,3")
    cells["seed_2"] = lambda run: State(status="failed", reason="it broke")
    result = hpcdist(*swept)
    assert (result.code, result.err) == (1, "")
    assert "sweep tune: 1 failed, 2 finished" in result.out
    del cells["seed_2"]
    result = hpcdist(*swept)
    assert (result.code, result.err) == (0, "")
    assert "sweep tune: 3 cells, 1 to run, in " in result.out
    assert "cell 1 of 1: lr=0.1 seed=2" in result.out
    assert "sweep tune: 3 finished" in result.out
    assert "closed the parent run" not in result.out


def test_a_cell_that_cannot_be_started_does_not_end_the_sweep(
    hpcdist: Cli, cells: dict[str, Callable[[RunDir], State]]
) -> None:
    def fails(run: RunDir) -> State:
        raise UserMistake("someone else has it")

    cells["lr_0.1"] = fails
    result = hpcdist(*SWEEP[:4], "seed=1", "--sweep", "optim.lr=0.1,0.2")
    assert "tune-seed_1-lr_0.1: someone else has it" in result.out
    assert "1 finished" in result.out
    assert result.code == 1


@pytest.mark.parametrize("within", [True, False], ids=["within a cell", "between two"])
def test_ctrl_c_ends_the_sweep(hpcdist: Cli, cells: dict[str, Callable[[RunDir], State]], within: bool) -> None:
    def stopped(run: RunDir) -> State:
        if within:  # as the signal handler of the supervisor writes it
            run.attempt(1).send_request("stop", by="SIGINT", reason="SIGINT to the supervisor")
            return State(status="stopped", reason="saved")
        os.kill(os.getpid(), signal.SIGINT)
        return State(status="finished")

    cells["seed_2"] = stopped
    result = hpcdist(*SWEEP[:4], "optim.lr=0.1", "--sweep", "seed=1,2,3")
    assert (result.code, result.err) == (0, "")
    ended = "1 created, 1 finished, 1 stopped" if within else "1 created, 2 finished"
    assert f"sweep tune: {ended}" in result.out
    assert "run the same command again for missing and failed cells" in result.out
    assert "closed the parent run" in result.out


def test_stopping_one_cell_leaves_the_others(hpcdist: Cli, cells: dict[str, Callable[[RunDir], State]]) -> None:
    def stopped(run: RunDir) -> State:
        run.attempt(1).send_request("stop", by="ada", reason="`hpcdist stop` by ada")
        return State(status="stopped", reason="saved")

    cells["seed_1"] = stopped
    result = hpcdist(*SWEEP[:4], "optim.lr=0.1", "--sweep", "seed=1,2,3")
    assert "sweep tune: 2 finished, 1 stopped" in result.out
    assert result.code == 0


def test_the_script_of_a_job_array(hpcdist: Cli) -> None:
    result = hpcdist("submit", *SWEEP[1:], "--cluster", "devcluster", "--array-parallelism", "2", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "\n#SBATCH --array=0-2%2\n" in result.out
    assert "\n#SBATCH --job-name=digits/tune\n" in result.out
    assert "\n# srun --job-name=attempt-001 " in result.out
    assert os.listdir() == []
    result = hpcdist("submit", *SWEEP[1:4], "seed=1", "--cluster", "devcluster", "--dry-run")
    assert "--array" not in result.out, "a single cell is an ordinary job"
