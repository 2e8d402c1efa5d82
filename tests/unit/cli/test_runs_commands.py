"""Commands on runs: list, status, logs, stop, cancel, save, profile, and how they find a run."""

import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Cli, Make, Result, SetJob, job, make_sweep, one_line
from report_scene import BEGAN, ReportScene, account, add_attempt
from typer.main import get_command

from hpcdist.checks import doctor_report as checks_doctor
from hpcdist.checks import machine_checks, slurm_checks
from hpcdist.cli import runs
from hpcdist.cli.app import make_app
from hpcdist.errors import RunFolderError
from hpcdist.host.check_result import ok
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run.folder import RunDir, StopRequest
from hpcdist.run.lease import hold, user_name
from hpcdist.run.lookup import find_runs, list_runs, resolve, resolve_run
from hpcdist.run.rank_requests import CommandResult, write_result
from hpcdist.run.sweeps import SweepDir
from hpcdist.slurm.client import JobSnapshot

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

# --- `hpcdist runs`, `status`, `logs`, `follow` and `explain`


def test_runs_writes_a_page_on_the_last_weeks(hpcdist: Cli, make: Make, tmp_path: Path) -> None:
    make("first", status="finished", attempt=1)
    result = hpcdist("runs", "--html", "usage.html")
    assert (result.code, result.out) == (0, "usage.html\n")
    assert "<h1>Runs of 4 weeks</h1>" in (tmp_path / "usage.html").read_text()
    for option in ("--json", "--sort=best"):
        refused = hpcdist("runs", "--html", "other.html", option)
        assert refused.code == 2
        assert "--html other.html writes a page instead of a list: leave out --json and --sort" in one_line(refused)
    assert not (tmp_path / "other.html").exists()
    without_folder = hpcdist("runs", "--html", "missing/usage.html")
    assert (without_folder.code, one_line(without_folder)) == (2, "No such file or directory: missing/usage.html")


def test_logs_prints_the_log_of_a_rank_and_attempt(hpcdist: Cli, make: Make) -> None:
    run = make("first", status="finished", attempt=2)
    for attempt, rank in ((1, 0), (2, 0), (2, 1)):
        run.attempt(attempt).log(rank).write_bytes(f"attempt {attempt} rank {rank}\n".encode() + b"\xff\n" * rank)
    assert hpcdist("logs", "first") == Result(0, "attempt 2 rank 0\n", "")
    assert hpcdist("logs", "first", "-f", "--rank", "1").out == "attempt 2 rank 1\n\ufffd\n"
    assert hpcdist("logs", "first", "--attempt", "1").out == "attempt 1 rank 0\n"
    assert one_line(hpcdist("logs", "first", "--rank", "2")).startswith("no log of rank 2 in attempt 2 of first (")


# --- `hpcdist stop` and `hpcdist cancel`


def test_request_is_written_to_the_last_attempt(hpcdist: Cli, make: Make) -> None:
    for command, output in (
        ("stop", "will save and stop; `hpcdist status stop` shows its progress\n"),
        ("cancel", "will end at once\n"),
    ):
        run = make(command, status="running", attempt=2)
        with hold(run):
            assert hpcdist(command, command) == Result(0, f"{command} {output}", "")
        request = read_json(run.attempt(2).request) or {}
        by = f"`hpcdist {command}` by {user_name()}"
        assert (request["action"], request["cause"], request["by"]) == (command, "user", by)
        assert not run.attempt(1).request.exists()
    Path("train.py").touch()
    with hold(make("script", f"trainer.script=[{Path.cwd()}/train.py]", status="running", attempt=1)):
        assert hpcdist("stop", "script").out == (
            "script: train.py gets SIGTERM, and SIGKILL unless it ends within launch.stop_grace_s;"
            " `hpcdist status script` shows the files that it has saved\n"
        ), "no promise that it is saved"


def test_stop_and_cancel_reject_a_run_that_is_not_running(hpcdist: Cli, make: Make) -> None:
    lost, created = make("lost", status="running", attempt=1), make("created")
    for command, run, status in (("stop", lost, "running"), ("cancel", created, "created")):
        message = one_line(hpcdist(command, run.name))
        assert message.startswith(f"run {run.name} is not running")
        assert repr(status) in message
        assert list(run.path.rglob("request.json")) == []


@pytest.fixture
def queued(make: Make, slurm: SetJob) -> RunDir:
    """A run with job 7, which is in the queue."""
    run = make("first", status="queued")
    write_json(run.path / "slurm.json", {"job_id": "7"})
    slurm(job("PENDING", reason="Resources"))
    return run


@pytest.mark.parametrize(("command", "status"), [("stop", "stopped"), ("cancel", "cancelled")])
@pytest.mark.parametrize("before", ["queued", "running"])
def test_stop_and_cancel_remove_a_queued_run_from_the_queue(
    hpcdist: Cli, queued: RunDir, slurm: SetJob, monkeypatch: pytest.MonkeyPatch, before: Any, command: str, status: str
) -> None:
    queued.write_state(replace(queued.read_state(), status=before))
    cancelled: list[tuple[str, bool]] = []

    def scancel(job_id: str, *, pending_only: bool) -> None:
        cancelled.append((job_id, pending_only))
        slurm(job("CANCELLED"))

    monkeypatch.setattr("hpcdist.slurm.client.cancel_job", scancel)
    output = "job 7 of first was taken out of the queue; `hpcdist resume first` submits it again\n"
    assert hpcdist(command, "first") == Result(0, output, "")
    assert cancelled == [("7", True)]
    state = queued.read_state()
    assert state.status == status
    assert state.reason.startswith(f"taken out of the queue (`hpcdist {command}` by ")


def test_stop_sends_a_request_if_the_job_starts_meanwhile(
    hpcdist: Cli, queued: RunDir, slurm: SetJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcdist.slurm.client.cancel_job", lambda job_id, pending_only: slurm(job("RUNNING")))
    holding = hold(queued)

    def supervisor_starts(seconds: float) -> None:
        queued.new_attempt()
        queued.write_state(replace(queued.read_state(), status="running", attempt=1))
        holding.__enter__()

    monkeypatch.setattr("hpcdist.run.status.time.sleep", supervisor_starts)
    assert hpcdist("stop", "first").out.startswith("first will save and stop")
    holding.__exit__(None, None, None)
    assert (read_json(queued.attempt(1).request) or {})["action"] == "stop"
    assert queued.read_state().status == "running"


def test_stop_reports_an_unknown_state_of_the_job(hpcdist: Cli, queued: RunDir, slurm: SetJob) -> None:
    slurm(JobSnapshot(error="no squeue here"))
    assert one_line(hpcdist("stop", "first")) == (
        "run first has no supervisor, and Slurm does not answer about job 7: no squeue here"
    )
    slurm(JobSnapshot())
    message = "run first is not running: it is lost: Slurm no longer knows job 7: it was cancelled in the queue"
    assert one_line(hpcdist("stop", "first")).startswith(message)
    assert queued.read_state().status == "queued"


# --- `hpcdist save` and `hpcdist profile`; the ranks are replaced


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Set what happens while a command waits for the ranks."""
    return lambda action: monkeypatch.setattr(runs, "time", SimpleNamespace(sleep=lambda _: action()))


def running(make: Make) -> RunDir:
    return make("first", status="running", attempt=1, world_size=4)


def test_profile_reports_rank_errors_and_the_end_of_the_attempt(
    hpcdist: Cli, make: Make, ranks: Callable[..., None]
) -> None:
    run = running(make)

    def finish() -> None:
        write_result(run.attempt(1), 1, 0, CommandResult(step=7, num_steps=4, path="artifacts/t"))
        write_result(run.attempt(1), 1, 3, CommandResult(error="disk full"))

    ranks(finish)
    with hold(run):
        code, out, err = hpcdist("profile", "first", "--steps", "4", "--ranks", "3,0,3")
    assert (code, err) == (1, "")
    assert out == f"rank 0: profiled 4 steps from step 7 on: {run.path}/artifacts/t\nrank 3: disk full\n"
    ranks(lambda: run.write_state(replace(run.read_state(), attempt=2)))
    with hold(run):
        assert hpcdist("profile", "first") == Result(1, "rank 0: attempt 1 ended before it was done\n", "")


def test_commands_that_a_run_cannot_obey_are_refused(hpcdist: Cli, make: Make) -> None:
    run = running(make)
    account = {"cause": "idle", "seconds": {"start": 1.0, "idle": 2.0}}
    beat = {"time": 1.0, "step": 0, "total_steps": None, "metrics": {}, "account": account}
    write_json(run.attempt(1).beat(2), beat)
    assert one_line(hpcdist("save", "first")) == "run first is not running: its state is 'running'"
    with hold(run):
        for words, message in (
            ("--ranks 1,4", "run first has no rank 4: its ranks are 0 to 3"),
            ("--ranks -1", "--ranks '-1': expected ranks, separated by commas, such as 0,3"),
            ("--steps 1001", "a profile has 1 to 1000 steps, got 1001"),
            ("--ranks 2", "rank 2 of run first (trainer:2) has no steps to profile: choose another rank"),
        ):
            assert one_line(hpcdist("profile", "first", *words.split())) == message
        run.attempt(1).send_request(StopRequest(cause="user", by="`hpcdist stop` by me"))
        assert one_line(hpcdist("profile", "first")) == "run first is ending (`hpcdist stop` by me)"
    assert not run.attempt(1).command(1).exists()
    with hold(make("script", "trainer.script=[train.py]", status="running", attempt=1, world_size=4)):
        assert one_line(hpcdist("save", "script")) == (
            "run script reports no steps: its script must call hpcdist.should_stop(step) after each step"
        )


# --- Commands without the argument RUN act on the newest run of the folder, and print its name first


@pytest.fixture
def made(make: Make) -> list[RunDir]:
    """An old run, with the last name by the alphabet, and a new one."""
    found = [make("zeta", status="failed", reason="killed", attempt=1, created=1.0, ended=2.0)]
    found.append(make("alpha", status="finished", reason="done", attempt=1, created=9.0, ended=10.0))
    for run in found:
        run.attempt(1).log(0).write_text(f"log of {run.name}\n")
    return found


def test_explanation_as_json_has_cause_and_fix_without_passwords(hpcdist: Cli, made: list[RunDir]) -> None:
    made[0].write_state(replace(made[0].read_state(), reason='no answer of "http://u:s3cret@h"'))
    found = json.loads(hpcdist("explain", "zeta", "--json").out)
    assert [found[key] for key in ("run", "status", "cause")] == ["exp/zeta", "failed", 'no answer of "http://u:***@h"']
    assert found["sentence"] == f"failed: {found['cause']}"
    found = json.loads(hpcdist("explain", "alpha", "--json").out)
    assert (found["sentence"], found["cause"]) == ("finished: done; nothing to explain", "")
    assert one_line(hpcdist("explain", "none", "--json")).startswith("no run 'none' under ")
    for path in ("/no/folder", "./folder", "../folder"):
        assert one_line(hpcdist("explain", path)) == f"no such folder: {path}", "no hint at names of runs"


@pytest.mark.parametrize("command", ["status", "logs", "explain", "follow", "cost"])
def test_newest_run_is_chosen_and_named_on_standard_error(hpcdist: Cli, made: list[RunDir], command: str) -> None:
    named = hpcdist(command, "alpha")
    assert named.code == 0
    newest = hpcdist(command)
    assert newest.err.splitlines()[0] == "run: exp/alpha (the newest in runs)"
    assert (newest.code, newest.out) == (0, named.out)


def test_resume_takes_overrides_without_a_name(hpcdist: Cli, made: list[RunDir], make: Make) -> None:
    make("broken", created=50.0).path.joinpath("state.json").write_text("{")  # damaged runs are passed over
    result = hpcdist("resume", "stop.max_epochs=0")
    assert result.code == 2
    assert result.err.startswith("run: exp/alpha (the newest in runs)\n")
    assert "stop.max_epochs" in result.err


def test_stop_takes_the_newest_run_that_runs_or_waits(
    hpcdist: Cli, make: Make, made: list[RunDir], tmp_path: Path
) -> None:
    fix = "name one, or set HPCDIST_RUNS_DIR to the folder of all runs"
    assert one_line(hpcdist("stop")) == f"no run in {tmp_path / 'runs'} runs or waits: {fix}"
    older = make("older", status="running", attempt=1, created=3.0)
    newer = make("newer", status="running", attempt=1, created=4.0)
    make("killed", status="running", attempt=1, created=5.0)
    with hold(older), hold(newer):
        result = hpcdist("stop")
    assert (result.code, result.err) == (0, "run: exp/newer (the newest in runs that runs or waits)\n")
    assert (read_json(newer.attempt(1).request) or {})["action"] == "stop"
    assert not older.attempt(1).request.exists()


def test_newest_sweep_stands_for_its_cells(hpcdist: Cli, make: Make, made: list[RunDir], tmp_path: Path) -> None:
    make("grid-1", created=20.0)
    write_json(tmp_path / "runs/exp/grid-1/cell.json", {"sweep": "grid"})
    make_sweep(tmp_path / "runs/exp", "grid-1")
    assert hpcdist("status").err == "sweep: exp/grid (the newest in runs)\n"
    assert hpcdist("logs").err.splitlines()[1] == "hpcdist: grid is a sweep: name one of its cells (grid-1, …)"


def test_folder_without_runs_is_named(hpcdist: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("status", "logs", "explain", "follow", "stop", "resume", "cost"):
        message = one_line(hpcdist(command))
        assert message.startswith(f"no run in {tmp_path / 'runs'}"), command
    monkeypatch.setenv("HPCDIST_RUNS_DIR", "elsewhere")
    assert hpcdist("runs").out == f"no runs under {tmp_path / 'elsewhere'}\n"


def test_misspelt_names_have_a_suggestion(hpcdist: Cli, make: Make, made: list[RunDir]) -> None:
    make("created")
    assert one_line(hpcdist("follow", "created")).endswith("never started: `hpcdist resume created` starts it")
    assert one_line(hpcdist("status", "alhpa")).endswith(": did you mean 'alpha'?")
    assert one_line(hpcdist("status", "exp/zeat")).endswith(": did you mean 'exp/zeta'?")
    assert one_line(hpcdist("status", "nothing-like-it")).endswith(": `hpcdist runs` lists them")


# --- The argument RUN: a name, prefix or folder finds the run; any other text is a one-line error


def commands_of(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return every command with an argument RUN, read from the command line so that new ones are included."""
    for name, command in getattr(group, "commands", {}).items():
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        if any("RUN" in (param.metavar or "") for param in arguments):
            yield (*path, name)
        yield from commands_of(command, (*path, name))


COMMANDS = sorted(commands_of(get_command(make_app())))
assert {("bench", "show"), ("cancel",), ("doctor",), ("logs",), ("resume",), ("sync",)} <= {*COMMANDS}
#: Commands that only read; the others would start processes for an existing run.
READING = ("status", "logs", "explain")


@pytest.fixture
def ended(make: Make) -> Callable[..., RunDir]:
    """Make a finished run with a log."""

    def made(name: str) -> RunDir:
        run = make(name, status="finished", reason="ended", attempt=1, ended=2.0)
        run.attempt(1).log(0).write_text("one line of the log\n")
        return run

    return made


@pytest.fixture
def first(ended: Callable[..., RunDir]) -> RunDir:
    ended("second")
    return ended("first")


def test_text_without_a_matching_run_is_a_one_line_error(
    hpcdist: Cli, first: RunDir, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sweep(runs_dir / "exp", "grid-1")
    before = first.path.joinpath("state.json").read_bytes()
    monkeypatch.setenv("HPCDIST_RUNS_DIR", str(runs_dir))
    monkeypatch.chdir(runs_dir)
    (runs_dir / "a_file").touch()
    texts = ["", " ", "*", "f*", "a**b", "?irst", "[f]irst", ".", "..", "/", "a_file", "exp", "x" * 5000, "exp/*"]
    texts += ["\x00", "first\x00", "first\n", "nowhere/../first", "/dev/null", "~nobody", "-", "\udcff", "/" * 1500]
    for words in COMMANDS:
        # `cost` also takes an experiment.
        for text in [text for text in texts if (words, text) != (("cost",), "exp")]:
            code, out, err = hpcdist(*words, "--", text)
            assert code == 2, (words, text, out)
            assert "Traceback" not in err
            assert len(out + err) < 500, (words, text)
            assert (out + err).startswith("hpcdist: "), (words, text, out)
    assert first.path.joinpath("state.json").read_bytes() == before
    assert not first.attempt(1).request.exists()


def test_run_is_found_by_folder_name_and_prefix(
    hpcdist: Cli, first: RunDir, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCDIST_RUNS_DIR", str(runs_dir))
    monkeypatch.chdir(runs_dir.parent)
    for name in (f"{first.path}/", "runs/exp/first", "runs/exp/../exp/first", "exp/first", "fir", "."):
        if name == ".":
            monkeypatch.chdir(first.path)
        found = resolve_run(name, runs_dir)
        assert (found.path, found.name, found.experiment) == (first.path, "first", "exp")
    for command in READING:
        assert hpcdist(command, "fir").code == 0, command
    for command in ("stop", "cancel"):
        message = one_line(hpcdist(command, "fir"))
        assert message == "run first is not running: it has no supervisor, and its last state is 'finished'"


def test_sweep_is_found_by_folder_name_and_prefix(hpcdist: Cli, first: RunDir, runs_dir: Path) -> None:
    sweep = make_sweep(runs_dir / "exp", "grid-1")
    for text in (str(sweep.path), f"{sweep.path}/", "grid", "exp/grid", "gri"):
        found = resolve(text, runs_dir)
        assert isinstance(found, SweepDir)
        assert found.path == sweep.path
        assert one_line(hpcdist("stop", text)) == "no cell of sweep grid runs or waits (stopped: 1 cell: 1 missing)"
    with pytest.raises(RunFolderError, match=r"^grid is a sweep: name one of its cells \(grid-1, …\)$"):
        resolve_run("grid", runs_dir)


def test_ambiguous_prefix_is_an_error_with_the_matches(
    hpcdist: Cli, ended: Callable[..., RunDir], runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real module imports mlflow, which takes seconds.
    monkeypatch.setitem(sys.modules, "hpcdist.tracking.shipper", SimpleNamespace(sync=None))
    make_sweep(runs_dir / "exp", "grid-1")
    ended("grid-1")
    assert isinstance(resolve("grid", runs_dir), SweepDir), "the whole name"
    for command in ("status", "logs", "stop", "cancel", "resume", "sync"):
        assert one_line(hpcdist(command, "gri")) == (
            "'gri' matches 2 runs (exp/grid, exp/grid-1): write more of the name, or the folder"
        )


# --- folders of other users
@pytest.fixture
def foreign_run(ended: Callable[..., RunDir]) -> RunDir:
    if os.geteuid() != 0:
        pytest.skip("only root can change the owner of a folder")
    run = ended("theirs")
    for path in [run.path, *run.path.rglob("*")]:
        os.lchown(path, 65534, 65534)
    return run


def test_commands_on_all_runs_skip_runs_of_other_users(
    hpcdist: Cli, foreign_run: RunDir, ended: Callable[..., RunDir], runs_dir: Path
) -> None:
    mine = ended("mine")
    assert [run.path for run in find_runs(runs_dir)] == [mine.path]
    assert list_runs(runs_dir)[1].startswith("1 run folder of other users skipped")
    code, out, _ = hpcdist("runs")
    assert (code, "theirs" in out) == (0, False)
    assert "1 run folder of other users skipped: `hpcdist status RUN` shows one by its name" in out


def test_page_on_all_runs_has_those_of_other_users(hpcdist: Cli, foreign_run: RunDir, tmp_path: Path) -> None:
    write_json(foreign_run.environment, {"user": "eve"})
    began = time.time() - BEGAN - 3600.0
    add_attempt(foreign_run, began, began + 60.0, [account(began, began + 60.0)])
    ReportScene.state_of(foreign_run, attempt=2, ended=BEGAN + began + 60.0)
    assert hpcdist("runs", "--html", "usage.html").code == 0
    assert "<td>eve</td>" in (tmp_path / "usage.html").read_text()


def test_run_of_another_user_can_be_read_but_not_changed(hpcdist: Cli, foreign_run: RunDir) -> None:
    for command in READING:
        assert hpcdist(command, "theirs").code == 0, command
    for command in ("stop", "cancel", "resume", "doctor", "sync"):
        for text in ("theirs", str(foreign_run.path)):
            code, out, err = hpcdist(command, text)
            assert code == 2, (command, out)
            assert (
                f"run folder {foreign_run.path} belongs to nobody, and `hpcdist {command}` acts only on your own runs"
            ) in out + err
    assert not foreign_run.attempt(1).request.exists()


def test_link_of_another_user_to_an_own_run_is_skipped(first: RunDir, runs_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can change the owner of a link")
    first.path.rename(runs_dir.parent / "elsewhere")
    first.path.symlink_to(runs_dir.parent / "elsewhere")
    assert "first" in [found.name for found in find_runs(runs_dir)]
    os.lchown(first.path, 65534, 65534)
    assert "first" not in [found.name for found in find_runs(runs_dir)]


def test_resume_rejects_a_folder_that_others_can_write(hpcdist: Cli, first: RunDir) -> None:
    for mode, inner, refused in ((0o770, 0o700, first.path), (0o755, 0o775, first.path / "attempts")):
        (first.path / "attempts").chmod(inner)
        first.path.chmod(mode)
        assert one_line(hpcdist("resume", "first")) == (
            f"{refused} is writable by group or others (mode {refused.stat().st_mode & 0o7777:04o}), and"
            f" `hpcdist resume` would execute their code: `chmod -R go-w {first.path}`"
        )
    for mode, inner in ((0o700, 0o777), (0o755, 0o755)):
        (first.path / "attempts").chmod(inner)
        first.path.chmod(mode)
        message = "run first is finished: to train longer, add an override such as stop.max_epochs=20"
        assert one_line(hpcdist("resume", "first")) == message


# --- `hpcdist doctor` with its real checks, except those that start ranks or query clusters


@pytest.fixture
def checked(hpcdist: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `hpcdist doctor` in this process, on a machine without Slurm."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(machine_checks, "trial_checks", lambda *_: [ok("2 ranks, gloo", "32 checks passed")])
    monkeypatch.setattr(checks_doctor, "read_slurm", lambda: slurm_checks.SlurmFacts(missing=slurm_checks.NEEDED))
    which = shutil.which

    def without_slurm(name: str, *more: Any, **named: Any) -> str | None:
        return None if name == "sbatch" else which(name, *more, **named)

    monkeypatch.setattr(shutil, "which", without_slurm)
    monkeypatch.setattr(checks_doctor, "gpu_device_files", lambda: 0)
    monkeypatch.setattr(checks_doctor, "container_runtime", lambda: "")
    return functools.partial(hpcdist, "doctor")


def checks(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the findings of the document by section and name."""
    return {(check["section"], check["name"]): check for check in json.loads(text)["checks"]}


def test_doctor_prints_sections_and_a_summary(checked: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = checked()
    assert (code, err) == (0, ""), out
    first, *lines = out.splitlines()
    assert first.startswith("hpcdist ")
    titles = [line for line in lines if line and not line.startswith((" ", "No problem"))]
    assert titles[:3] == ["Software", "Training test", "GPUs"]
    assert "  ok       2 ranks, gloo  32 checks passed" in lines
    assert lines[-1].startswith("No problem found that would make a run fail;")
    assert list(tmp_path.iterdir()) == [], "nothing is left by looking"
    access = os.access
    # Root can write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    code, out, _ = checked()
    assert code == 1
    # A long path is never cut, so the line may break around it.
    words = " ".join(out.split())
    assert "FAILURE runs" in words
    assert "1 problem would make a run fail" in words
    assert f"- Folder of runs, runs: {tmp_path} belongs to" in words


def test_doctor_checks_the_folder_of_a_local_run_and_redacts(
    checked: Cli, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("first")
    code, out, err = checked("first", "--json")
    assert (code, err) == (0, "")
    document, found = json.loads(out), checks(out)
    assert (document["would_fail"], document["run"]) == (False, str(run.path))
    assert found["Run", "state"]["text"] == "created"
    assert found["Folder of runs", "runs"]["text"] == str(run.path)
    assert found["MLflow", "database"]["text"] == f"{tmp_path}/runs/mlflow.db does not exist; the first run creates it"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ada:***@mlflow.site")
    code, out, _ = checked("--json")
    store = checks(out)["MLflow", "store"]
    assert (code, store["level"], "HPCDIST_TRACKING_URI" in store["text"]) == (0, "warning", True)
