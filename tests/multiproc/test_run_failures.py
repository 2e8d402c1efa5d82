"""Failures of runs with `hpcdist run`: each has one clear message, and no unnecessary restarts."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hpcdist_runs import HOLD_OVERRIDES, LAST_STEP, TRAINING, Runs, assert_states_equal, finish, unused_port, wait_for

from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.host.json_files import read_json
from hpcdist.review.facts import read_facts
from hpcdist.review.ledger import read_ledger
from hpcdist.run.fitted_batch import read_fitted
from hpcdist.run.training_record import read_training

COUNTING = ["trainer=counting:train", "checkpoint.every_steps=10"]


def test_first_failed_rank_is_reported_with_traceback_and_log(runs: Runs) -> None:
    name = "raises"
    params = ["params.until=1000", "params.raise_at=25", "launch.num_ranks=3"]
    code, output = runs.command("run", *runs.config(name, *COUNTING, *params), **runs.unshipped)
    assert code == 1, output
    lines = [line.rstrip() for line in output.splitlines()]
    sentence = f"rank 2 on {os.uname().nodename} failed with ValueError: a mistake in the user's own code after step 24"
    # The restart from step 20 fails in the same way, so there is no third attempt.
    assert lines.count(sentence) == 2, output
    first = lines.index(sentence)
    assert "    ValueError: a mistake in the user's own code" in lines[first : first + 10]
    assert any('counting.py", line ' in line for line in lines[first : first + 10]), output
    assert f"    full log: {runs.attempt(name).log(2)}" in lines[first : first + 12]
    assert lines[-1] == f"failed: {sentence}, twice in a row: another restart would not help"
    assert "resumed at step 20 from" in runs.attempt(name, 2).log(2).read_text()
    # The other ranks failed as a consequence, and are not reported.
    assert not [line for line in lines if line.startswith(("rank 0", "rank 1"))]


def test_script_is_fixed_in_the_original_and_finds_its_data(runs: Runs) -> None:
    name, project = "broken", runs.project
    (project / ".gitignore").write_text("ignored\n")
    (project / "ignored").mkdir()
    (project / "ignored" / "data.txt").write_text("found")
    (project / "broken.py").write_text(
        "from pathlib import Path\n"
        "folder = Path(__file__).parent\n"
        "print(folder.parent.name, (folder / 'ignored' / 'data.txt').read_text())\n"
        "import broken_part\n"
        "broken_part.begin()\n"
    )
    (project / "broken_part.py").write_text("def begin():\n    raise ValueError('bad')\n")
    config = runs.config(name, "trainer.script=[broken.py]", "launch.num_ranks=1", "launch.max_restarts=0")
    code, output = runs.command("run", *config, **runs.unshipped)
    assert code == 1, output
    run = runs.run_dir(name)
    assert f"code        {run.code}, a copy of {project}; links in it lead to the files that are left out\n" in output
    assert f"running the copy {run.code}/broken.py" in runs.attempt(name).log(0).read_text()
    assert f"{name} found\n" in output
    assert f'File "{project}/broken_part.py", line 2, in begin' in output
    assert output.splitlines()[-2].startswith("fix broken_part.py:2, then: ")
    assert output.splitlines()[-2].endswith(f"resume {run.path} --with-current-code")
    code, output = runs.command("explain", name)
    assert (
        f"fix:      correct {project}/broken_part.py:2, then `hpcdist resume {run.path} --with-current-code`" in output
    )

    (project / "broken_part.py").write_text("def begin():\n    print('fixed')\n")
    code, output = runs.command("resume", name, **runs.unshipped)
    assert code == 1, output
    assert "changed since the run copied the code: broken_part.py; this resume runs the copy" in output
    code, output = runs.command("resume", name, "--with-current-code", **runs.unshipped)
    assert code == 0, output
    assert "\nfixed\n" in output


def test_hung_rank_ends_the_attempt_and_is_reported(runs: Runs) -> None:
    """Rank 2 waits in user code, the others in a collective."""
    name = "hangs"
    options = ["params.until=1000", "params.hang_at=15", "launch.hang_timeout_s=15", "launch.max_restarts=0"]
    options += ["checkpoint.every_steps=1000"]  # ranks 0 and 1 wait in the stop agreement, not in a save
    config = runs.config(name, *COUNTING, *options, "launch.num_ranks=3")
    code, output = runs.command("run", *config)
    assert code == 1, output
    last = output.splitlines()[-1]
    assert last.startswith(f"failed: rank 2 on {os.uname().nodename} made no progress for launch.hang_timeout_s=15 s")
    assert " (stack traces of all ranks are in " in last
    assert "; rank 2 differs from the others: in " in last
    assert re.search(r"wait \(threading\.py:\d+\), called by train \(counting\.py:\d+\); ranks 0-1 in ", last), last
    waits = re.compile(
        r"; rank 2 has not called gloo all_reduce \[4\] \(number \d+ of group control\), which ranks 0-1 wait"
    )
    assert waits.search(last), last
    attempt = runs.attempt(name)
    summary = attempt.stacks_summary.read_text()
    assert last.endswith(summary.partition("\n")[0])
    assert (read_json(attempt.failure) or {})["step"] == 14
    for rank in range(3):
        assert "Current thread" in attempt.log(rank).read_text(), "printed by faulthandler"
        (row,) = re.findall(rf"\n  rank {rank} on .*: state sleeping; gloo, .*", summary)  # before it was killed
        assert ("waits in" in row) == (rank != 2)
        own = summary.partition(f"\nstacks of rank {rank}:\n")[2].partition("\nstacks of rank ")[0]
        assert "counting.py" in own
        recorded = (read_json(attempt.flight(rank)) or {})["recorders"]["gloo"]["entries"]
        assert [entry["retired"] for entry in recorded if entry["profiling_name"] == "gloo:all_reduce"][-1] == (
            rank == 2
        )

    kept = {path.name for path in runs.artifacts(name, "logs/attempt-001").iterdir()}
    assert {"stacks.txt", *(f"rank-0000{rank}.flight.json" for rank in range(3))} <= kept
    code, output = runs.command("explain", name)
    assert "cause:    the ranks hung: rank 2 differs from the others: in " in output


def test_run_without_mlflow_finishes_and_is_shipped_later(runs: Runs) -> None:
    """The run finishes and recommends `hpcdist sync`, which ships all records once."""
    name = "no-mlflow"
    unreachable = f"tracking.uri=http://127.0.0.1:{unused_port()}"
    options = ["params.until=40", "launch.num_ranks=1", "tracking.drain_timeout_s=2"]
    code, output = runs.command("run", *runs.config(name, *COUNTING, *options, unreachable))
    assert code == 0, output
    assert "finished: counted to 40" in output
    assert "has not received all records (see shipper.log); none are lost" in output
    assert f"`hpcdist sync {name}` ships the rest" in output
    assert "Traceback" not in (runs.run_dir(name).path / "shipper.log").read_text()

    sqlite_uri = f"sqlite:///{runs.database}"
    code, output = runs.command("sync", name, HPCDIST_TRACKING_URI=sqlite_uri)
    assert code == 0, output
    series = runs.series(name)
    assert series == {("train/loss", step): 1 / step for step in range(1, 41)}
    assert runs.mlflow_status(name) == "FINISHED"
    before = runs.points(name)
    code, output = runs.command("sync", name, HPCDIST_TRACKING_URI=sqlite_uri)
    assert code == 0, output
    assert runs.points(name) == before


def test_detached_run_is_held_by_one_supervisor(runs: Runs) -> None:
    name = "detached"
    config = runs.config(name, *COUNTING, "params.until=100000")
    code, output = runs.command("run", *config, "--detach", **runs.unshipped)
    assert code == 0, output
    assert f"{name} runs in the background (process " in output
    assert runs.run_dir(name).read_state().status == "running", "for a `follow` that comes next"
    first = runs.holder_pid(name)
    assert os.getsid(first) == first, "it outlives the terminal"
    wait_for(lambda: runs.checkpoint_steps(name), "the first checkpoint")

    code, output = runs.command("run", *config)
    assert code == 2, output
    assert "exists already" in output
    assert f"hpcdist resume {name}" in output
    code, output = runs.command("resume", name)
    assert code == 2, output
    assert f"hpcdist: run {name} is held by process {first} of " in output
    assert "Traceback" not in output

    code, output = runs.command("status", name)
    assert code == 0, output
    for part in ("running", f"supervisor   process {first} of", "rank 0       step ", "rank 1       step "):
        assert part in output
    code, output = runs.command("logs", name, "--rank", "1")
    assert code == 0, output

    code, output = runs.command("stop", name)
    assert code == 0, output
    wait_for(lambda: runs.run_dir(name).read_state().status == "stopped", "the run to stop")
    wait_for(lambda: not runs.run_dir(name).lease.exists(), "the supervisor to end")
    stopped_at = runs.checkpoint_steps(name)[-1]
    code, output = runs.command("stop", name)
    assert code == 2, output
    assert f"run {name} is not running: it has no supervisor, and its last state is 'stopped'" in output

    code, output = runs.command("resume", name, "--detach", **runs.unshipped)
    assert code == 0, output
    assert runs.run_dir(name).read_state().status == "running"
    wait_for(lambda: runs.checkpoint_steps(name)[-1] > stopped_at, "the run to continue")
    assert f"resumed at step {stopped_at} from" in runs.command("logs", name)[1]
    code, output = runs.command("cancel", name)
    assert code == 0, output
    wait_for(lambda: runs.run_dir(name).read_state().status == "cancelled", "the run to end")
    wait_for(lambda: not runs.run_dir(name).lease.exists(), "the supervisor to end")


def test_first_ctrl_c_stops_and_second_cancels_the_run(runs: Runs) -> None:
    name = "interrupted"
    process = runs.start("run", *runs.config(name, *COUNTING, "params.until=100000"), **runs.unshipped)
    wait_for(lambda: runs.checkpoint_steps(name), "the first checkpoint")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 0, output
    assert "stopped: everything saved (SIGINT to the supervisor)" in output
    stopped_at = runs.checkpoint_steps(name)[-1]

    process = runs.start("resume", name, "params.hang_at=" + str(stopped_at + 2), **runs.unshipped)
    wait_for(lambda: len(runs.run_dir(name).attempts()) == 2, "the second attempt")
    attempt = runs.attempt(name, 2)
    wait_for(lambda: read_training(attempt) is not None, "the ranks to resume")
    process.send_signal(signal.SIGINT)
    wait_for(attempt.request.exists, "the request of the first Ctrl-C")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "cancelled: SIGINT to the supervisor" in output


# --- a full disk

HOW_TO_MOUNT = "as root: sudo .venv/bin/python -m pytest tests/multiproc/test_run_failures.py -k full_disk"


@pytest.fixture
def small_disk(tmp_path: Path, empty_database: Path) -> Iterator[Runs]:
    """Yield runs on a file system of 32 MB."""
    (tmp_path / "runs").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "hpcdist-test", str(tmp_path / "runs")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"`mount` is not installed; {HOW_TO_MOUNT}")
    if done.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted ({done.stderr.strip()}); {HOW_TO_MOUNT}")
    try:
        yield Runs(tmp_path, empty_database)
    finally:
        subprocess.run(["umount", str(tmp_path / "runs")], check=True)


def test_run_resumes_after_a_full_disk(small_disk: Runs) -> None:
    name = "full-disk"
    one_rank = ("launch.num_ranks=1", "launch.num_threads=1", "data.batch_size=32")
    config = small_disk.config(name, *TRAINING, *HOLD_OVERRIDES, *one_rank)
    process = small_disk.start("run", *config, **small_disk.unshipped)
    small_disk.wait_until_held(name, num_ranks=1)
    wait_for(lambda: small_disk.checkpoint_steps(name)[-2:] == [40, 45], "two checkpoints")
    filler = small_disk.folder / "filler"
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk.folder).free)
    assert shutil.disk_usage(small_disk.folder).free == 0
    small_disk.release(name)
    code, output = finish(process)
    assert code == 1, output
    *_, last = output.splitlines()
    # The first failed write is the checkpoint of step 60 or the metrics since step 45.
    assert last.startswith(f"failed: rank 0 on {os.uname().nodename} failed with ")
    assert "could not be written" in last or "cannot be written" in last
    assert "No space left on device" in last
    assert last.endswith(f"; no restart, since the disk of {small_disk.run_dir(name).path} is full")
    assert "Traceback" not in output
    newest = CheckpointStore(small_disk.run_dir(name).checkpoints).latest()
    assert newest is not None
    assert newest.step == 45

    filler.unlink()
    code, output = small_disk.command("resume", name, **small_disk.unshipped)
    assert code == 0, output
    assert small_disk.checkpoint_steps(name)[-1] == LAST_STEP


def test_restarted_script_has_its_cause_and_lost_steps(runs: Runs) -> None:
    """Rank 1 is killed after step 45 and reports nothing; the script continues from its own checkpoint of step 10."""
    name = "restarted-script"
    script = ["trainer.script=[restarting.py]", "tracking.system_interval_s=0.2", "launch.num_ranks=2"]
    code, output = runs.command("run", *runs.config(name, *script), **runs.unshipped)
    assert code == 0, output
    killed = f"rank 1 on {os.uname().nodename} was killed by SIGKILL, last heartbeat at step 45"
    run = runs.run_dir(name)
    facts, ledger = read_facts(run), read_ledger(run)
    # The same cause everywhere.
    assert killed in output
    assert [attempt.cause for attempt in facts.attempts[:1]] == [killed]
    explained = runs.command("explain", name)[1].splitlines()
    assert explained[0] == "finished after 1 restart: restarting.py ended with exit status 0 at step 60"
    assert explained[1] == f"1:        interrupted: {killed}; 35 steps lost"
    assert [line.partition(":")[0] for line in explained[2:]] == ["cause", "fix"]
    # Steps 11 to 45 were done twice.
    found = [(attempt.first_step, attempt.last_step, attempt.steps_lost) for attempt in facts.attempts]
    assert found == [(0, 45, 35), (10, 60, 0)]
    seconds = ledger.seconds
    assert min(seconds["start"], seconds["redone"], seconds["compute"]) > 0
    assert ledger.goodput is not None
    assert ledger.goodput < seconds["compute"] / (seconds["compute"] + seconds["redone"])
    # What hpcdist records for a script.
    assert '"system/cpu_utilization_percentage"' in (run.journal / "attempt-002.rank-00000.jsonl").read_text()
    assert facts.script_files == ("step10.pt",)
    assert re.search(r"checkpoints +step10\.pt", runs.command("status", name)[1])


@pytest.mark.slow
@pytest.mark.parametrize("is_stuck", [True, False])
def test_process_that_outlives_its_script_is_idle(runs: Runs, is_stuck: bool) -> None:
    name = f"outlived-{is_stuck}"
    begin = ""
    if is_stuck:
        begin = "threading.Thread(target=threading.Event().wait, name='upload').start()"
    (runs.project / "outlived.py").write_text(f"import threading\nprint('loss 1')\n{begin}\n")
    config = runs.config(name, "trainer.script=[outlived.py]", "launch.num_ranks=1", "launch.stop_grace_s=4")
    code, output = runs.command("run", *config, **runs.unshipped)
    assert code == 0, output
    run = runs.run_dir(name)
    late = re.search(r"; the process of rank 0 did not end for (\d+) s: thread 'upload' \(", run.read_state().reason)
    idle_s = read_ledger(run).seconds.get("idle", 0.0)
    assert (late is not None) == is_stuck
    if late is not None:
        assert int(late[1]) >= 2
        assert idle_s >= 2
    else:
        assert idle_s < 2


def test_loss_that_stays_nan_is_reported_and_may_end_the_run(runs: Runs) -> None:
    loss = "float('nan') if step >= 5 else 1 / step"
    (runs.project / "diverging.py").write_text(
        "import hpcdist\nfor step in range(1, 11):\n"
        f"    hpcdist.log({{'train/loss': {loss}}}, step)\n    hpcdist.should_stop(step, 10)\n"
    )
    script = ["trainer.script=[diverging.py]", "launch.num_ranks=1"]
    code, output = runs.command("run", *runs.config("nan-reported", *script), **runs.unshipped)
    assert code == 0, output
    found = "train/loss is nan since step 5 (3 logged steps in a row)"
    assert f"{found}: the training has diverged; `stop.nan_losses` ends such a run" in output
    assert output.count(found) == 1
    assert runs.run_dir("nan-reported").attempts()[0].log(0).read_text().count(found) == 1
    code, output = runs.command("run", *runs.config("nan-ended", *script, "stop.nan_losses=2"), **runs.unshipped)
    assert code == 2, output
    assert (
        "train/loss is nan since step 5 (2 logged steps in a row), which ends the run (stop.nan_losses=2): " in output
    )
    state = runs.run_dir("nan-ended").read_state()
    assert (state.status, state.attempt, state.restarts) == ("failed", 1, 0)


FITTING = ["trainer=fitting:train", "data.global_batch_size=32", "elastic.exact=true", "checkpoint.every_steps=3"]


@pytest.mark.slow
def test_smaller_micro_batches_do_not_change_the_result(runs: Runs) -> None:
    """The lack of GPU memory is simulated by an exception."""
    fits = ["launch.fit_batch=true", "launch.max_restarts=0", "elastic.micro_batches=2", "params.fits=4"]
    for name, *overrides in (
        ("early", *fits, "params.after=0"),
        ("late", *fits, "params.after=5"),
        ("fine", "elastic.micro_batches=8", "params.fits=4", "params.after=0"),
    ):
        code, output = runs.command("run", *runs.config(name, *FITTING, *overrides), **runs.unshipped)
        assert code == 0, output
    assert read_fitted(runs.run_dir("early")) == read_fitted(runs.run_dir("late")) == 8
    weights = {name: runs.final_state(name)["model.pt"] for name in ("early", "late", "fine")}
    assert_states_equal(weights["early"], weights["fine"])
    for key, weight in weights["late"].items():
        # The first steps had larger micro-batches, so their sums are rounded differently.
        torch.testing.assert_close(weight, weights["fine"][key])
    assert "resumed at step 3 from" in runs.attempt("late", 3).log(0).read_text()
