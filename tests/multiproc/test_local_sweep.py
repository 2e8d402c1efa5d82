"""Local sweeps: cells are runs and children of one MLflow run, and a repeated command runs only unfinished cells."""

import signal
from pathlib import Path

import pytest
from hpcdist_runs import Runs, finish, mlflow_runs, repair_trainer, wait_for

#: One rank per cell and no training.
SMALL = ["trainer=picky:train", "launch.num_ranks=1", "launch.max_restarts=0"]


@pytest.fixture
def own_runs(tmp_path: Path, empty_database: Path) -> Runs:
    """A separate runs folder, because the test changes the user code."""
    return Runs(tmp_path, empty_database)


def test_repeated_sweep_runs_only_the_failed_cell(own_runs: Runs) -> None:
    command = ["run", *own_runs.config("tune", *SMALL, "params.until=3"), "--sweep", "seed=1,2"]
    code, output = own_runs.command(*command)
    assert code == 1, output
    assert "ValueError: cannot bear seed 2" in output
    assert "sweep tune: 1 failed, 1 finished\n" in output
    before = mlflow_runs(own_runs.database, "tune")
    assert {name: run[:2] for name, run in before.items()} == {
        "tune": ("FAILED", None),
        "seed=1": ("FINISHED", "tune"),
        "seed=2": ("FAILED", "tune"),
    }

    first, second = own_runs.run_dir("tune-seed_1"), own_runs.run_dir("tune-seed_2")
    # Its parent of ranks imports torch while the first cell trains.
    parent_started = (second.path / "attempts" / "rank-parent.log").stat().st_mtime
    ended = first.read_state().ended
    assert ended is not None
    assert ended > parent_started

    repair_trainer(own_runs.project)
    code, output = own_runs.command(*command)
    assert code == 0, output
    assert "  0: seed=2 (failed)  tune-seed_2\n  -: seed=1 (finished)\n" in output
    after = mlflow_runs(own_runs.database, "tune")
    assert {run.status for run in after.values()} == {"FINISHED"}
    assert {name: run.run_id for name, run in after.items()} == {name: run.run_id for name, run in before.items()}
    assert [own_runs.run_dir(f"tune-seed_{seed}").read_state().attempt for seed in (1, 2)] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "hpcdist stop"])
def test_request_stops_the_running_cell_and_the_sweep(own_runs: Runs, how: str) -> None:
    command = ["run", *own_runs.config("tune", *SMALL, "params.until=100000"), "--sweep", "seed=3,4"]
    process = own_runs.start(*command)
    wait_for(own_runs.attempt("tune-seed_3").beat(0).exists, "a step of the first cell")
    if how == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        code, output = own_runs.command("stop", "tune")
        assert code == 0, output
        assert "tune-seed_3 will save and stop" in output
        assert "tune-seed_4 will not be started\n" in output
    code, output = finish(process)
    assert code == 0, output
    assert own_runs.checkpoint_steps("tune-seed_3")
    assert own_runs.run_dir("tune-seed_4").read_state().attempt == 0
    assert {name: run.status for name, run in mlflow_runs(own_runs.database, "tune").items()} == {
        "tune": "KILLED",
        "seed=3": "KILLED",
    }
    code, output = own_runs.command(*command, "--dry-run")
    assert code == 0, output
    assert "  0: seed=3 (stopped)  tune-seed_3\n  1: seed=4 (not started)  tune-seed_4\n" in output
    code, output = own_runs.command("status", "tune")
    assert code == 0, output
    assert "sweep tune: 1 created, 1 stopped\n" in output
    code, output = own_runs.command("cancel", "tune")
    assert code == 2
    assert "no cell of sweep tune runs or waits (stopped: 2 cells: 1 created, 1 stopped)" in output
