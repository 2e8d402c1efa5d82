"""Output of the commands on runs: plan, progress, result, tables of runs, and runs that are followed."""

import io
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Make, SetJob, job
from report_scene import BEGAN, account, add_attempt
from rich.console import Console

from hpcdist.cli import options, run_views, tables
from hpcdist.config.record_schema import TrackingConfig
from hpcdist.config.roles import Roles
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.host.files import short_path
from hpcdist.host.json_files import write_json
from hpcdist.run import status
from hpcdist.run.attempt_times import AttemptTimes, write_times
from hpcdist.run.folder import Attempt, RunDir, State
from hpcdist.run.lease import hold, holder
from hpcdist.run.lookup import find_runs
from hpcdist.slurm import client
from hpcdist.slurm.client import JobSnapshot
from hpcdist.slurm.output import JobInfo
from hpcdist.supervisor.plan import Plan
from hpcdist.tracking.journal import JournalWriter

METRICS = {"train/loss": 0.123456, "eval/accuracy": 0.975, "lr": 0.1}


@pytest.fixture
def console() -> Console:
    """Return a console without a terminal: long lines must stay whole in its 60 columns."""
    return Console(file=io.StringIO(), width=60)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows_of(console: Console) -> list[str]:
    return [line.rstrip() for line in text_of(console).splitlines()]


@pytest.fixture
def make(make_bare: Make) -> Make:
    return make_bare


def beat(run: RunDir, attempt: int, rank: int, **changes: Any) -> None:
    value = {"time": time.time(), "step": 7, "total_steps": 100, "metrics": {}}
    write_json(run.attempt(attempt).beat(rank), value | changes)


# --- the plan


def test_plan(console: Console, tmp_path: Path) -> None:
    config = Config(trainer=TrainerConfig(script=["/a/[b]/train.py", "--db", "http://ada:s3cret@host"]))
    plan = Plan(
        num_ranks=3, device="cuda", backend="gloo", threads=4, env={},
        roles=Roles.of({"trainer": 1, "parameter_server": 2}, 3),
        devices={"trainer": "cuda", "parameter_server": "cpu"},
    )  # fmt: skip
    run_views.show_plan(console, config, plan, tmp_path, "http://ada:s3cret@mlflow:5000", verbose=False)
    assert rows_of(console) == [
        "trainer     /a/[b]/train.py --db http://ada:***@host",
        "roles       rank  role                  device",
        "            0     trainer:0             cuda",
        "            1-2   parameter_server:0-1  cpu",
        "devices     1 × cuda + 2 × cpu, gloo, 4 threads per rank",
        f"run folder  {tmp_path}",
        "MLflow      http://ada:***@mlflow:5000",
    ]


# --- during a run


def test_notes_and_script_output_are_printed_unchanged(console: Console, tmp_path: Path) -> None:
    (tmp_path / "002").mkdir()
    with run_views.RunView(console) as shown:
        shown.attempt(Attempt(tmp_path / "002"), 1)
        shown.attempt(Attempt(tmp_path / "002"), 16)
        shown.note("[bold]as it is[/] " + "long " * 30)
        shown.output("[red]epoch 1[/]\nepoch 2\n")
        for doing in ("", "exporting the final model", "exporting the final model", ""):
            shown.progress({"step": 9, "total_steps": None, "metrics": {}, "doing": doing})
    assert rows_of(console) == [
        f"attempt 2: starting 1 rank, logs in {tmp_path}/002",
        f"attempt 2: starting 16 ranks, logs in {tmp_path}/002",
        ("[bold]as it is[/] " + "long " * 30).rstrip(),
        "[red]epoch 1[/]",
        "epoch 2",
        "exporting the final model",
    ]


def test_progress_without_a_terminal_is_a_line_every_few_seconds(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(run_views, "time", SimpleNamespace(monotonic=lambda: now))
    shown = run_views.RunView(console)
    older = dict.fromkeys(METRICS, 1)
    for step, later_s in ((1, 0.0), (1, 60.0), (2, 1.0), (3, run_views.PLAIN_INTERVAL_S), (4, 0.1), (100, 0.1)):
        now += later_s if step != 1 else 0.0
        shown.progress({"step": step, "total_steps": 100, "metrics": METRICS, "metric_steps": older})
    evaluated = older | {"eval/accuracy": 100}  # after the last step
    last = {"step": 100, "total_steps": 100, "metrics": METRICS, "metric_steps": evaluated, "doing": "saving"}
    shown.progress(last)
    shown.progress(last)
    shown.note("ended")
    shown.progress({"step": 101, "total_steps": None, "metrics": {}})
    numbers = "loss 0.1235  accuracy 0.975"
    # At two steps in six seconds, 97 steps take a bit less than five minutes.
    eta = "ETA 0:04:51"
    assert rows_of(console) == [
        *(f"step 1/100  {numbers}", f"step 3/100  {numbers} (step 1)  {eta}"),
        *("step 100/100  accuracy 0.975  loss 0.1235 (step 1)", "saving", "ended"),
    ]


def test_progress_bar_keeps_step_and_total_on_a_narrow_terminal() -> None:
    numbers = METRICS | {"train/samples_per_s": 3832.0, "train/return": 1.5}
    for width in (50, 80, 120):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        with run_views.RunView(console) as shown:
            for step in (4, 253):
                shown.progress({"step": step, "total_steps": 46000, "metrics": numbers})
        last = text_of(console).rpartition("step")[2].splitlines()[0]
        assert " 253/46000 " in last, (width, last)
        assert "loss 0.1235" in last, (width, last)
        assert "-:--:--" in last, (width, last)
    assert "loss 0.1235  return 1.5  accuracy 0.975" in last


def test_wrapped_lines_are_indented_and_paths_stay_whole(make: Make) -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    path = f"/shared/{'folder/' * 9}file"
    reason = f"rank 1 on n1 was killed by SIGKILL while it wrote {path} and nothing else happened"
    run = make(status="failed", attempt=1, reason=reason)
    run_views.show_status(console, run)
    first, *rest = rows_of(console)
    assert first == "status       failed: rank 1 on n1 was killed by SIGKILL"
    assert rest[:3] == ["             while it wrote", f"             {path}", "             and nothing else happened"]
    run_views.RunView(console).note(f"a note about {path} that is longer than a line")
    assert rows_of(console)[-3:] == ["a note about", f"    {path}", "    that is longer than a line"]


# --- the end


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")


def test_printed_commands_run_in_the_same_shell(
    console: Console, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make(status="finished")
    write_json(run.mlflow, {"uri": "sqlite:////db", "experiment_id": "7", "run_id": "ab"})
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.chdir(tmp_path)
    for started, shown in (
        (str(tmp_path / ".venv" / "bin" / "hpcdist"), ".venv/bin/hpcdist"),
        ("/x/__main__.py", f"{sys.executable} -m hpcdist"),
    ):
        monkeypatch.setattr(sys, "argv", [started, "run"])
        assert f"review in MLflow: HPCDIST_RUNS_DIR='/my runs' {shown} ui" in end(console, run, run.read_state())
    monkeypatch.setenv("HPCDIST_RUNS_DIR", "/my runs")
    assert f"review in MLflow: {sys.executable} -m hpcdist ui" in end(console, run, run.read_state())


def end(console: Console, run: RunDir, state: State, **config: Any) -> list[str]:
    run_views.show_end(
        console, run, state, Config(runs_dir="/my runs", **{"tracking": TrackingConfig(uri=""), **config})
    )
    return rows_of(console)


def test_end_of_a_run_shows_metrics_report_and_the_next_command(
    console: Console, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(attempt=2, status="finished", reason="all [3] epochs are done")
    run.artifacts.mkdir()
    with JournalWriter(run.journal) as journal:
        for step, speed in enumerate((10.0, 30.0, 990.0), 1):
            journal.log(METRICS | {"train/samples_per_s": speed, "time/data_s": 0.5}, step)
    assert f"not in MLflow yet: hpcdist sync {run.path}" in end(console, run, run.read_state()), "without an upload"
    write_json(run.mlflow, {"uri": "sqlite:////db", "experiment_id": "7", "run_id": "ab"})
    console.file = io.StringIO()
    assert end(console, run, run.read_state(), trainer=TrainerConfig(target="comm")) == [
        "review in MLflow: HPCDIST_RUNS_DIR='/my runs' hpcdist ui",
        f"report: hpcdist bench show {run.path}",
        "finished: all [3] epochs are done",
    ], "the last metrics of a benchmark are those of its largest message only"
    run.report.write_text("<!doctype html>")
    monkeypatch.chdir(tmp_path)
    lines = end(console, run, run.read_state())
    assert [line.strip("│ ").split()[-1] for line in lines if "samples_per_s, median" in line] == ["30"], (
        "not of the last interval"
    )
    assert lines[-2:] == ["report: runs/exp/first/report.html", "finished: all [3] epochs are done"]
    table = "\n".join(lines)
    words = ("exp/first", "eval/accuracy", "0.975", "train/loss", "0.123456", "lr")
    assert [word for word in words if word not in table] == []
    assert "time/data_s" not in table, "it is hpcdist's own"
    uri = TrackingConfig(uri="http://ada:s3cret@mlflow")
    failed = State(status="failed", reason="a reason")
    assert end(console, run, failed, tracking=uri)[-4:] == [
        "review in MLflow: MLFLOW_TRACKING_URI='http://ada:***@mlflow' hpcdist ui",
        "report: runs/exp/first/report.html",
        "continue: hpcdist resume runs/exp/first",
        "failed: a reason",
    ]
    rejected = {"outcome": "rejected", "time": 1.0, "error": "no such key", "traceback": []}
    write_json(run.attempt(2).outcome(0), rejected)  # the same config would be rejected again
    failed_attempt = replace(failed, attempt=2)
    assert end(console, run, failed_attempt)[-2] == "correct it: hpcdist resume runs/exp/first key=value …"
    ids = {"uri": "http://ada:***@mlflow", "experiment_id": "7", "run_id": "ab"}
    write_json(run.mlflow, ids)  # it is in MLflow: a link to its page
    assert end(console, run, failed, tracking=uri)[-4] == (
        "review in MLflow: http://mlflow/#/experiments/7/runs/ab?workflowType=machine_learning"
    )


# --- status of runs


def test_table_of_runs_lists_the_newest_last_and_cuts_no_name(make: Make, runs_dir: Path) -> None:
    old = make("zzz-20261120-051903-ab12", created=1.0, attempt=3, status="failed", reason="nan [at] step 3 " * 9)
    new = make("aaa", created=2e9, attempt=1, status="running")
    beat(old, 3, 0, step=42)
    console = Console(file=io.StringIO(), width=160)
    run_views.show_runs(console, *run_views.read_rows([new, old]), runs_dir)
    lines = [line for line in rows_of(console) if "exp/" in line]
    assert [line.split()[1] for line in lines] == ["exp/zzz-20261120-051903-ab12", "exp/aaa"]
    assert [word for word in ("failed", "42", "3", "nan [at] step 3") if word not in lines[0]] == []
    assert "lost" in lines[1]
    console = Console(file=io.StringIO(), width=60)
    run_views.show_runs(console, *run_views.read_rows([new, old]), runs_dir)
    names = ("zzz-20261120-051903-ab12", "aaa")
    assert tuple(line.split()[0] for line in rows_of(console) if line.startswith(names)) == names
    assert "exp/zzz-20261120-051903-ab12 failed: nan [at] step 3" in text_of(console)


def test_table_of_runs_fits_in_80_columns(make: Make, runs_dir: Path) -> None:
    for name, mode, value in (("one", "max", 0.75), ("two", "max", 0.5), ("three", "min", 0.25), ("none", "max", None)):
        run = make(name, status="finished")
        run.config.write_text(f"checkpoint: {{monitor: eval/{mode}, monitor_mode: {mode}}}\n")
        add_attempt(run, 1, 3601, [account(1, 3601)] * 4)
        save = run.checkpoints / "step-00000010"
        save.mkdir()
        metrics = {} if value is None else {f"eval/{mode}": value}
        write_json(save / "manifest.json", {"step": 10, "metrics": metrics | {"eval/other": 9.0}})
    make("a-name-of-eighty-columns-" + "x" * 55, status="stopped", reason="paused")
    console = Console(file=io.StringIO(), width=80)
    rows, notes = run_views.read_rows(find_runs(runs_dir))
    (three,) = (row for row in rows if row["run"] == "exp/three")
    assert {key: three[key] for key in ("best", "best_metric", "best_step", "unit", "duration_s")} == {
        "best": 0.25, "best_metric": "eval/min", "best_step": 10, "unit": "core", "duration_s": 3601.0,
    }  # fmt: skip
    run_views.show_runs(console, rows, notes, runs_dir)
    lines = rows_of(console)
    assert sum("finished" in line for line in lines) == 4
    assert max(len(line) for line in lines if "x" * 55 not in line) <= 80
    started = time.strftime("%m-%d %H:%M", time.localtime(BEGAN + 1))
    (line,) = (line for line in lines if line.startswith("three"))
    assert line.split() == ["three", "finished", "min", "0.25", "5", *started.split(), "1", "h"]
    assert lines[-1].endswith("stopped: paused")


def test_wide_table_of_runs_has_durations_in_two_units(make: Make, runs_dir: Path) -> None:
    run = make("one", status="finished")
    add_attempt(run, 1, 6660, [account(1, 6660)])
    for width, expected in ((160, "1 h 51 min"), (60, "1 h")):
        console = Console(file=io.StringIO(), width=width)
        run_views.show_runs(console, *run_views.read_rows([run]), runs_dir)
        (found,) = re.findall(r"\d+ h(?: \d+ min)?", text_of(console))
        assert found == expected


def test_tables_in_a_pipe_have_the_width_of_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns, width in (("", 160), ("100", 100), ("wide", 160), ("60", 60)):
        monkeypatch.setenv("COLUMNS", columns)
        tables.print_table(options.console(), ("run", "reason"), [("first", "word " * 40)])
        table = capsys.readouterr().out.splitlines()
        assert max(map(len, table)) == width


def test_status_of_a_running_run(console: Console, make: Make) -> None:
    run = make(status="running", attempt=2, restarts=1, world_size=3)
    beat(run, 2, 0, metrics=METRICS, time=time.time() - 5.5)
    beat(run, 2, 2, total_steps=None, time=time.time() + 99)
    for step in (200, 100):
        (run.checkpoints / f"step-{step:08d}").mkdir()
    write_json(run.mlflow, {"run_id": "abc123"})
    with hold(run):
        run_views.show_status(console, run)
        supervisor = f"process {os.getpid()} of {holder(run)['user']} on {socket.gethostname()}"  # type: ignore[index]
    assert rows_of(console) == [
        "status       running",
        f"folder       {run.path}",
        "attempt      2, 1 restart after failures",
        "attempt 1    interrupted: the supervisor was killed, or its node failed: no end was recorded",
        f"supervisor   {supervisor}",
        "rank 0       step 7 of 100, 5 s ago  loss 0.1235  accuracy 0.975",
        "rank 2       step 7, 0 s ago",
        "checkpoints  step-00000100, step-00000200",
        "MLflow run   abc123",
    ]
    run_views.show_status(console, run)
    lost = rows_of(console)[9:]
    assert lost[0] == "status       lost"
    advice = "the supervisor died: `hpcdist resume` continues the run, `hpcdist sync` closes it in MLflow"
    assert f"next         {advice}" in lost


def test_status_of_a_requeued_run_has_no_supervisor(console: Console, make: Make, slurm: SetJob) -> None:
    """A failed node takes the supervisor with it, whose lease looks fresh for a while."""
    run = submitted(make(status="running", attempt=1))
    with hold(run):
        slurm(job("RUNNING", nodes="n1"))
        assert run_views.read_status(run)["held_by"] is not None
        slurm(job("PENDING", reason="BeginTime"))
        found = run_views.read_status(run)
    assert (found["status"], found["held_by"]) == ("queued", None)


def test_status_of_a_finished_run_has_value_duration_and_cost(console: Console, make: Make) -> None:
    run = make(status="finished", reason="trained 10 steps")
    run.config.write_text("checkpoint: {monitor: eval/loss, monitor_mode: min}\n")
    add_attempt(run, 1, 3601, [account(1, 3601)] * 4)
    (run.checkpoints / "step-00000010").mkdir()
    write_json(run.checkpoints / "step-00000010" / "manifest.json", {"step": 10, "metrics": {"eval/loss": 0.25}})
    run_views.show_status(console, run)
    rows = dict(row.split(maxsplit=1) for row in rows_of(console))
    assert (rows["best"], rows["duration"], rows["cost"]) == ("eval/loss 0.25 at step 10", "1 h", "5 core-hours")
    document = run_views.read_status(run)
    assert (document["best"], document["best_metric"], document["best_step"]) == (0.25, "eval/loss", 10)
    assert (document["hours"], document["unit"], document["duration_s"]) == (pytest.approx(5.0, abs=0.01), "core", 3601)


def test_status_names_causes_of_ended_attempts_and_stragglers(console: Console, make: Make) -> None:
    run = make(status="failed", attempt=7, world_size=64, reason="rank 0 failed")
    for number in range(1, 8):
        attempt = run.attempt(number)
        attempt.path.mkdir(exist_ok=True)
        cause = "rank 0 failed" if number == 7 else f"node n{number} [failed]"
        write_times(attempt, AttemptTimes(supervised=1.0, began=1.0, ended=2.0, status="failed", reason=cause))
    line = {"role": "trainer", "name": "n3", "event": "slow", "text": "n3 is [slow]"}
    run.attempt(7).stragglers.write_text(json.dumps(line) + "\n")
    run_views.show_status(console, run)
    rows = rows_of(console)
    assert [row for row in rows if row.startswith("attempt ")] == [
        "attempt      7, 0 restarts after failures",
        *(f"attempt {number}    interrupted: node n{number} [failed]" for number in (3, 4, 5, 6)),
    ]
    assert "straggler    n3 is [slow]" in rows
    assert f"more ranks   32, see {run.attempt(7).path}" in rows
    assert "straggler: n3 is [slow]" in end(console, run, run.read_state())
    assert run_views.read_status(run)["ended_attempts"][0] == {
        "attempt": 3, "status": "failed", "end": "interrupted", "nodes": [], "cause": "node n3 [failed]"
    }  # fmt: skip


# --- runs on Slurm


def waiting(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(client, "accounted_starts", lambda _: [])
    write_json(run.path / "slurm.json", {"job_id": "7", "job_name": "exp/first"})
    return run


def test_status_has_the_answer_of_slurm(make: Make, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = waiting(make(status="queued"), monkeypatch)
    info = JobInfo(id="7", state="PENDING", reason="Resources", started=4e9)
    for snapshot, row in (
        (JobSnapshot(info=info), "Slurm        job 7 waits (Resources), expected to start at 2096-10-02 "),
        (JobSnapshot(), "Slurm        the job is no longer known"),
        (JobSnapshot(error="no answer"), "Slurm        not available: no answer"),
    ):
        monkeypatch.setattr(client, "take_snapshot", lambda job, history=False, now=snapshot: now)
        console = Console(file=io.StringIO(), width=60)
        run_views.show_status(console, run)
        assert [line for line in rows_of(console) if line.startswith(row)]
    run_views.show_runs(console, *run_views.read_rows([run]), runs_dir)
    assert "Slurm does not report the states of jobs (no answer)" in rows_of(console)


def test_table_of_runs_queries_slurm_once(make: Make, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=120)
    runs = [
        waiting(make(name, status=status), monkeypatch) for name, status in (("first", "queued"), ("done", "finished"))
    ]
    gone = make("gone", status="queued")
    write_json(gone.path / "slurm.json", {"job_id": "8"})
    queries: list[object] = []

    def query_jobs(jobs: list[str]) -> dict[str, JobInfo]:
        queries.append(jobs)
        return {"7": JobInfo(id="7", name="exp/first", state="PENDING", reason="Priority")}

    def take_snapshot(job: Any) -> JobSnapshot:
        queries.append(job.id)
        return JobSnapshot()

    monkeypatch.setattr(client, "query_jobs", query_jobs)
    monkeypatch.setattr(client, "take_snapshot", take_snapshot)
    run_views.show_runs(console, *run_views.read_rows([*runs, gone]), runs_dir)
    assert queries == [["7", "8"], "8"]
    text = text_of(console)
    expected = ("job 7 waits (Priority)", "lost", "Slurm no longer knows job 8")
    assert [word for word in expected if word not in text] == []


# --- `follow` and `logs -f` continue through restarts and requeues until the run ends


def test_log_is_that_of_the_rank_that_failed_first(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(status="failed", attempt=1)
    attempt = run.attempt(1)
    for rank in range(2):
        attempt.log(rank).write_text(f"rank {rank}\n")
    write_json(attempt.failure, {"rank": 1})
    assert "".join(run_views.stream_log(run, None, None, follow=False)) == "rank 1\n"
    assert capsys.readouterr().err == "hpcdist: the log of rank 1, which failed first\n"
    assert "".join(run_views.stream_log(run, 0, None, follow=False)) == "rank 0\n"


class Events:
    """Events of a run while a command follows it: one at each pause of the command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, events: Sequence[Callable[[], object]]) -> None:
        self._events: Iterator[Callable[[], object]] = iter(events)
        monkeypatch.setattr(run_views, "Event", lambda: self)

    def wait(self, timeout_s: float) -> None:
        assert timeout_s == run_views.POLL_S
        next(self._events, lambda: pytest.fail("the command waits after the last event"))()


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_followed_log_continues_through_all_attempts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(status="running", attempt=1)
    log = run.attempt(1).log(0)

    def two_restarts() -> None:
        """An attempt that starts and ends between two polls."""
        append(log, "c")
        for number in (2, 3):
            run.new_attempt()
            run.attempt(number).log(0).write_text(f" attempt {number} ")
        run.write_state(replace(run.read_state(), attempt=3))

    def finish() -> None:
        append(run.attempt(3).log(0), "last")
        run.write_state(replace(run.read_state(), status="finished"))

    Events(monkeypatch, [lambda: log.write_text("a"), lambda: append(log, "b"), two_restarts, finish])
    with hold(run):
        assert "".join(run_views.stream_log(run, 0, None, follow=True)) == "abc attempt 2  attempt 3 last"
    run.write_state(replace(run.read_state(), status="running"))  # a lost run
    assert "".join(run_views.stream_log(run, 0, 1, follow=True)) == "abc"


def test_followed_log_shows_lines_that_follow_its_removal(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that a rank writes while the reader prints the note."""
    run = make(status="running", attempt=1)
    log = run.attempt(1).log(0)
    log.write_text("long text")
    finished = replace(run.read_state(), status="finished")
    Events(monkeypatch, [lambda: log.write_text("short"), lambda: run.write_state(finished)])
    pieces = []
    with hold(run):
        for piece in run_views.stream_log(run, 0, None, follow=True):
            pieces.append(piece)
            if "shortened" in piece:
                append(log, " next line")
    assert "".join(pieces) == "long text\n[hpcdist: this log was shortened]\n next line"


# --- jobs of Slurm


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SetJob:
    """Set the job snapshot that Slurm returns; each poll returns a new one."""
    now: list[JobSnapshot] = []
    monkeypatch.setattr(client, "take_snapshot", lambda job, history=False: replace(now[-1]))
    monkeypatch.setattr(status, "QUERY_EVERY_S", 0.0)
    monkeypatch.setattr(status, "QUERY_UNAVAILABLE_S", 0.0)
    return now.append


def submitted(run: RunDir) -> RunDir:
    write_json(run.path / "slurm.json", {"job_id": "7"})
    return run


def test_follow_prints_each_straggler_event_once(make: Make, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(status="running", attempt=1)

    def report(text: str) -> None:
        line = {"role": "trainer", "name": "n3", "event": "slow", "text": text}
        append(run.attempt(1).stragglers, json.dumps(line) + "\n")

    def finish() -> None:
        run.write_state(replace(run.read_state(), status="finished"))

    Events(
        monkeypatch, [lambda: report("n3 is slow"), lambda: None, lambda: report("n3 is slower"), lambda: None, finish]
    )
    with hold(run):
        run_views.follow(console, run)
    assert [line for line in rows_of(console) if line.startswith("n3")] == ["n3 is slow", "n3 is slower"]


def test_follow_shows_how_an_attempt_ended(make: Make, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(status="running", attempt=1, world_size=2)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def steps(attempt: int, step: int, later_s: float) -> None:
        nonlocal now
        now += later_s
        beat(run, attempt, 0, step=step, total_steps=1000, metrics={})

    def restarts() -> None:
        failed = AttemptTimes(supervised=1.0, began=1.0, ended=2.0, status="failed", reason="rank 1 on n1 was killed")
        write_times(run.attempt(1), failed)
        run.new_attempt()
        run.write_state(replace(run.read_state(), attempt=2, restarts=1))
        steps(2, 10, 600.0)

    def finish() -> None:
        run.write_state(replace(run.read_state(), status="finished"))

    Events(monkeypatch, [lambda: steps(1, 10, 0.0), lambda: steps(1, 20, 10.0), restarts,
                         lambda: steps(2, 20, 10.0), finish])  # fmt: skip
    with hold(run):
        run_views.follow(console, run)
    assert rows_of(console) == [
        *("running", "step 10/1000", "step 20/1000    ETA 0:16:20"),
        "attempt 1 failed: rank 1 on n1 was killed",
        f"attempt 2: starting 2 ranks, logs in {short_path(run.attempt(2).path)}",
        *("step 10/1000", "step 20/1000    ETA 0:16:20"),
    ]


def test_follow_continues_through_a_requeue(
    make: Make, console: Console, slurm: SetJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(make(status="queued"))

    def state(**changes: Any) -> None:
        run.write_state(replace(run.read_state(), **changes))

    def beat(step: int) -> None:
        write_json(run.attempt(1).beat(0), {"time": 1.0, "step": step, "total_steps": 9, "metrics": {}})

    holding = hold(run, job_id="7")

    def starts() -> None:
        holding.__enter__()
        slurm(job("RUNNING", nodes="n[1-2]"))
        run.new_attempt()
        state(status="running", attempt=1)
        beat(4)

    def preempted() -> None:
        """The supervisor has written the state, which looks like the end, but still runs."""
        state(status="stopped", reason="everything saved (SIGTERM)")

    def supervisor_exits() -> None:
        """No supervisor holds the lease, and the job is in the queue."""
        holding.__exit__(None, None, None)
        state(status="queued")
        slurm(job("PENDING", reason="BeginTime"))

    def starts_again() -> None:
        """The supervisor has not written a state yet."""
        slurm(job("RUNNING", nodes="n3"))

    def runs_again() -> None:
        state(status="running", reason="")

    def ends() -> None:
        state(status="finished", reason="all done")

    slurm(job("PENDING", reason="Priority"))
    events = [lambda: slurm(job("PENDING", reason="Resources")), starts, preempted, supervisor_exits]
    Events(monkeypatch, [*events, starts_again, runs_again, ends])
    assert run_views.follow(console, run).status == "finished"
    assert rows_of(console) == [
        "queued: job 7 waits (Priority)",
        "queued: job 7 waits (Resources)",
        "running: job 7 on n[1-2]",
        "step 4/9",
        "stopped: everything saved (SIGTERM); job 7 is RUNNING on n[1-2]",
        "queued: requeued (everything saved (SIGTERM)); job 7 waits (BeginTime)",
        "starting: job 7 is RUNNING on n3",
        "running: job 7 on n3",
    ]


def test_follow_closes_a_run_that_died_without_a_status(
    make: Make, console: Console, slurm: SetJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers of Slurm must agree, since a network file system may show changes of the folder later."""
    job_died, supervisor_died = submitted(make(status="queued")), make("second", status="running", attempt=1)
    slurm(job("FAILED", exit_code=1, nodes="n1"))
    for run, pauses, reason in (
        (job_died, [lambda: None], "job 7 ended as FAILED with exit code 1 on n1"),
        (supervisor_died, [], "its supervisor died"),
    ):
        Events(monkeypatch, pauses)
        state = run_views.follow(console, run)
        assert (state.status, state.reason) == ("failed", reason)
        assert run.read_state() == state


def test_follow_prints_that_slurm_is_unavailable(
    make: Make, console: Console, slurm: SetJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(make(status="running", attempt=1))
    slurm(JobSnapshot(error="Unable to contact slurm controller (connect failure)"))
    Events(monkeypatch, [lambda: None, lambda: run.write_state(replace(run.read_state(), status="finished"))])
    assert run_views.follow(console, run).status == "finished"
    assert rows_of(console) == [
        "running",
        "Slurm does not report the state of the job (Unable to contact slurm controller (connect failure))",
    ]
