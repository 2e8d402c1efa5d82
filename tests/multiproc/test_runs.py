"""Runs with `hpcdist run`: after an interruption, a run ends with the same results as without one."""

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hpcdist_runs import (
    HOLD_OVERRIDES,
    HOLD_STEP,
    LAST_STEP,
    TRAINING,
    Descendants,
    Runs,
    assert_equals_control,
    finish,
    listening,
    wait_for,
)
from io_faults import Fault
from other_user import NOBODY, as_other_user

from hpcdist.host.json_files import read_json


def test_run_logs_metrics_and_saves_the_model(runs: Runs, control_run: str) -> None:
    series = runs.series(control_run)
    assert series["eval/accuracy", LAST_STEP] > 0.9
    assert series["train/lr", LAST_STEP] < series["train/lr", 40]
    assert (runs.run_dir(control_run).model / "MLmodel").is_file()
    assert any(key.startswith("system/") for key, _, _ in runs.points(control_run))


def test_other_ranks_do_not_wait_for_the_export(runs: Runs) -> None:
    code, output = runs.command("run", *runs.config("exporting", "trainer=exporting:train", export=True))
    assert code == 0, output
    run = runs.run_dir("exporting")
    assert (run.model / "MLmodel").is_file()
    assert not run.exported.exists()
    assert "model" in (read_json(run.journal / "sent-files.json") or {})


@pytest.mark.slow
def test_run_stopped_in_the_middle_of_an_epoch_is_resumed(runs: Runs, control_run: str) -> None:
    name = "stopped"
    process = runs.start("run", *runs.config(name, *TRAINING, *HOLD_OVERRIDES))
    held = runs.wait_until_held(name)
    assert {host for pid in held for host, _ in listening(pid)} == {"127.0.0.1"}
    assert (runs.attempt(name).key.stat().st_mode & 0o777, len(runs.attempt(name).read_key())) == (0o600, 32)
    code, output = runs.command("stop", name)
    assert code == 0, output
    code, output = finish(process)
    assert code == 0, output
    assert "stopped: everything saved (`hpcdist stop` by" in output
    stopped_at = runs.checkpoint_steps(name)[-1]
    assert HOLD_STEP <= stopped_at < LAST_STEP, "stopped in the middle of the second epoch"
    assert runs.mlflow_status(name) == "KILLED"

    code, output = runs.command("resume", name)
    assert code == 0, output
    assert f"resumed at step {stopped_at} from" in runs.attempt(name, 2).log(0).read_text()
    assert_equals_control(runs, name, control_run)
    assert len(runs.run_dir(name).attempts()) == 2

    code, output = runs.command("resume", name)
    assert (code, "to train longer, add an override" in output) == (2, True), output


@pytest.mark.slow
def test_ctrl_c_that_ends_the_reader_first_saves(runs: Runs) -> None:
    name = "unread"
    process = runs.start("run", *runs.config(name, *TRAINING, *HOLD_OVERRIDES))
    runs.wait_until_held(name)
    assert process.stdout is not None
    process.stdout.close()  # as of `| tee log`, whose `tee` Ctrl-C ends at once
    process.send_signal(signal.SIGINT)
    process.wait(600)
    state = runs.run_dir(name).read_state()
    assert (state.status, state.reason) == ("stopped", "everything saved (SIGINT to the supervisor)")
    assert runs.checkpoint_steps(name)[-1] >= HOLD_STEP


@pytest.mark.smoke
def test_killed_rank_resumes_from_the_last_checkpoint(runs: Runs, control_run: str) -> None:
    name = "rank-killed"
    process = runs.start("run", *runs.config(name, *TRAINING, *HOLD_OVERRIDES))
    _, victim = runs.wait_until_held(name)
    wait_for(lambda: runs.step(name, rank=1), "a heartbeat with a step")
    wait_for(lambda: 45 in runs.checkpoint_steps(name), "the checkpoint of the first epoch")
    os.kill(victim, signal.SIGKILL)
    runs.release(name)
    code, output = finish(process)
    assert code == 0, output
    assert "rank 1 on " in output
    assert "was killed by SIGKILL, last heartbeat at step " in output
    assert "restart 1 of 3\n" in output
    assert "\nresuming at step 45" in output
    state = runs.run_dir(name).read_state()
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 1)
    assert_equals_control(runs, name, control_run)


def test_run_is_resumed_after_a_killed_supervisor(runs: Runs, control_run: str) -> None:
    name = "supervisor-killed"
    process = runs.start("run", *runs.config(name, *TRAINING, *HOLD_OVERRIDES, "params.grandchild=true"))
    ranks = runs.wait_until_held(name)
    descendants = Descendants(process.pid)
    assert {process.pid for process in descendants.processes} >= set(ranks)
    assert sum(command == "sleep 1000" for command in descendants.commands) == 2, descendants.commands
    process.kill()
    descendants.wait_until_ended(600)  # the shipper among them, which uploads the end; minutes on a busy machine
    assert finish(process)[0] == -signal.SIGKILL

    code, output = runs.command("status", name)
    assert code == 0, output
    assert "lost" in output
    assert "the supervisor died: `hpcdist resume` continues the run" in output
    assert runs.mlflow_status(name) == "FAILED", "the shipper recorded the end of the run"
    code, output = runs.command("resume", name)
    assert code == 0, output
    assert_equals_control(runs, name, control_run)
    # Child processes of ranks also end with a finished run.
    wait_for(lambda: not _sleepers(runs), "the grandchildren of the second attempt to end")


def _sleepers(runs: Runs) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cmdline"] == ["sleep", "1000"] and process.info["cwd"] == str(runs.project)
    ]


# --- Ranks end as Python ends a process, and their output and loggers are their own: `support/user_code/ending.py`.


def written(folder: Path) -> list[str]:
    """Return the files in which the end of the ranks has left its text."""
    return sorted(path.name for path in folder.iterdir() if path.read_text() == "written")


OF_BOTH_RANKS = [f"{name}-{rank}" for name in ("atexit", "buffer", "thread") for rank in (0, 1)]


@pytest.mark.parametrize("kind", [pytest.param("script", marks=pytest.mark.slow), "trainer"])
def test_ranks_end_as_python_ends_a_script(runs: Runs, tmp_path: Path, kind: str) -> None:
    name = f"{kind}-end"
    trainer = [f"trainer.script=[ending.py,{tmp_path}]", "launch.num_ranks=2"]
    if kind == "trainer":  # in ranks that a parent forks
        trainer = ["trainer=ending:train", f"params.folder={tmp_path}"]
    code, output = runs.command("run", *runs.config(name, *trainer), **runs.unshipped)
    assert code == 0, output
    assert written(tmp_path) == OF_BOTH_RANKS
    (journal,) = runs.run_dir(name).journal.glob("attempt-001.rank-00000.jsonl")
    assert '"late":1.0' in journal.read_text(), "a metric that a thread of rank 0 has logged"
    # `logging.basicConfig` works, and lines of hpcdist are in the log only.
    assert "\nINFO of my own: rank 0\nprinted by rank 0\n" in output
    assert "this is rank 0 of" not in output
    assert "INFO of my own: rank 1\n" in runs.attempt(name).log(1).read_text()


def test_failed_script_does_not_wait_for_an_endless_thread(runs: Runs, tmp_path: Path) -> None:
    name = "script-fails"
    words = [f"trainer.script=[ending.py,{tmp_path},1]", "launch.num_ranks=2", "launch.max_restarts=0"]
    code, output = runs.command("run", *runs.config(name, *words), **runs.unshipped)
    assert code == 1, output
    assert "failed with ValueError: a mistake" in output.splitlines()[-1]
    assert written(tmp_path) == OF_BOTH_RANKS
    log = runs.attempt(name).log(1).read_text()
    assert "thread 'endless upload'" in log
    code, output = runs.command("logs", name)
    assert log in output, "the log of the rank that failed"


# --- Another user who may write to the folder above all runs replaces it during the start of a run.


#: In the parent of the ranks and before its imports: the other user puts a copy of the runs with another config and
#: another module of the code in their place.
SITE = """
import os, shutil, sys
if "hpcdist.rank.parent" in sys.orig_argv:
    runs, planted = {runs!r}, {runs!r} + ".planted"
    # The other user cannot read the identity; temporary files may vanish during the copy.
    shutil.copytree(runs, planted, symlinks=True, ignore=shutil.ignore_patterns("identity", "key", ".*"))
    for folder, _, files in os.walk(planted):
        for path in [folder, *(os.path.join(folder, name) for name in files)]:
            os.lchown(path, {nobody}, {nobody})
            if path.endswith("/config.yaml"):
                text = open(path).read().replace("counting:train", "evil:train")
                open(path, "w").write(text)
            if path.endswith("/code"):
                for name in ("evil.py", "usercustomize.py", "sitecustomize.py"):
                    open(os.path.join(path, name), "w").write("import sys; print(sys.argv, file=open({marker!r}, 'a'))")
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid({nobody})
        os.setuid({nobody})
        os.rename(runs, runs + ".old")
        os.rename(planted, runs)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def open_runs(empty_database: Path) -> Iterator[Runs]:
    """Runs in a folder of the group `nogroup`, which has the mode of many project folders."""
    root = Path(tempfile.mkdtemp(dir="/var/tmp"))
    os.chown(root, 0, NOBODY)
    root.chmod(0o2770)
    yield Runs(root, empty_database)
    shutil.rmtree(root)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
def test_folder_replaced_by_another_user_is_not_used(open_runs: Runs, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    text = SITE.format(runs=str(open_runs.folder), nobody=NOBODY, marker=str(marker))
    (tmp_path / "sitecustomize.py").write_text(text)
    path = f"launch.env.PYTHONPATH={tmp_path}:{open_runs.no_mlflow}"
    words = open_runs.config("first", "trainer=counting:train", "params.until=3", path)
    code, output = open_runs.command("run", *words)
    assert code == 2
    assert f"others may write to {open_runs.folder.parent} (mode 2770)" in output
    # This site trusts the group.
    code, output = open_runs.command("run", *words, HPCDIST_TRUSTED_GROUPS="nogroup", **open_runs.unshipped)
    assert (open_runs.folder.parent / "runs.old").exists(), output
    assert not marker.exists(), marker.read_text()
    assert code == 2, output
    assert f"{open_runs.folder}/digits/first has been replaced by another one" in output.splitlines()[-1]
    assert "Traceback" not in output


# --- A run in a folder like /tmp, in which another user has taken all names that hpcdist, MLflow and torch use.


SCRIPT = "import os, torch._dynamo; print('cache:', os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
FOLDERS = ("mlartifacts", "torchinductor_root", "torchinductor_0")
LINKS = ("mlflow.db", "mlflow.db-journal", "mlflow.db-wal", "mlflow.db-shm", "mlflow.db.lock")


@pytest.fixture
def planted() -> Iterator[Path]:
    """A folder with mode 1777 and what the other user has made in it; the links lead to `victim` beside it."""
    if os.getuid() != 0:
        pytest.skip("only root can act as a second user")
    parent = Path(tempfile.mkdtemp(dir="/var/tmp"))
    parent.chmod(0o755)
    (parent / "victim").write_text("valuable")
    (folder := parent / "runs").mkdir()
    folder.chmod(0o1777)
    for name in FOLDERS:
        (folder / name).mkdir()
    for name in LINKS:
        (folder / name).symlink_to(parent / "victim")
    for path in folder.iterdir():
        os.lchown(path, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(parent)


def readable(folder: Path) -> list[str]:
    """Return the files and links below a folder that this user can read."""
    found = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    return sorted(os.path.basename(path) for path in found if os.access(path, os.R_OK))


@pytest.mark.slow
def test_planted_names_stop_no_run_and_get_nothing_of_it(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_root")  # as an import of torch._dynamo sets it
    runs = Runs(tmp_path)
    runs.folder.rmdir()
    runs.folder = planted
    (runs.project / "cache.py").write_text(SCRIPT)
    code, output = runs.command("run", "experiment=exp", "name=first", "cache.py", TMPDIR=str(planted))
    assert code == 0, output
    code, output = runs.command("sync", "exp/first", TMPDIR=str(planted))
    assert code == 0, output
    run = planted / "exp/first"
    assert (planted / ".hpcdist-0/mlflow.db").is_file()
    assert f"cache: {run}/torchinductor\n" in (run / "attempts/001/rank-00000.log").read_text()
    assert (planted.parent / "victim").read_text() == "valuable"
    assert [name for name in FOLDERS if os.listdir(planted / name)] == []
    assert as_other_user(lambda: readable(planted.parent)) == sorted([*LINKS, "victim"])


# --- Runs on a file system that fails for some calls of ranks, supervisor and shipper: the results do not change.


#: Part of the command line of all hpcdist processes, but not of pytest.
ALL = "hpcdist"
#: Six calls in a row, after the start of the process.
SIX: dict[str, Any] = {"first": 12, "count": 6}
heavy = pytest.mark.faults


@pytest.mark.parametrize(
    ("only", "fault"),
    [
        pytest.param(ALL, Fault(operation="*", path="checkpoints/*", error=errno.ESTALE, **SIX), id="checkpoints"),
        pytest.param(
            "hpcdist.rank.", Fault(operation="*", path="*", error=errno.EACCES, **SIX), id="ranks denied", marks=heavy
        ),
        pytest.param(ALL, Fault(operation="fsync", path="*", error=errno.EIO, **SIX), id="fsync", marks=heavy),
        pytest.param(ALL, Fault(operation="*", path="*", error=errno.ESTALE, count=6), id="start", marks=heavy),
        pytest.param(ALL, Fault(operation="write", path="*.jsonl", first=9, delay_ms=60_000), id="hang", marks=heavy),
        pytest.param(
            # The library is loaded once, into the process that forks the ranks.
            "hpcdist.rank.", Fault(operation="open", path="checkpoints/*", first=5, delay_ms=60_000),
            id="save hangs", marks=heavy,
        ),
        pytest.param(
            "tracking.shipper", Fault(operation="*", path="*", error=errno.ESTALE, **SIX), id="shipper", marks=heavy
        ),
    ],
)  # fmt: skip
def test_failing_file_system_calls_do_not_change_the_results(
    runs: Runs,
    control_run: str,
    io_faults: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    only: str,
    fault: Fault,
) -> None:
    name = f"storage-{request.node.callspec.id.replace(' ', '-')}"
    fired = tmp_path / "fired"
    env = fault.environment(io_faults, runs.run_dir(name).path, only=only, fired=fired)
    code, output = runs.command("run", *runs.config(name, *TRAINING), **env)
    assert code == 0, output
    run = runs.run_dir(name)
    logs = [output, *(path.read_text() for path in (run.path / "shipper.log", *run.attempt(1).path.glob("*.log")))]
    assert not [text for text in logs if "Traceback" in text]
    assert len(fired.read_text().splitlines()) >= fault.count
    assert len(run.attempts()) == 1
    assert_equals_control(runs, name, control_run)
