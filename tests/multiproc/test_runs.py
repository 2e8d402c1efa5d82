"""Runs with `hpcdist run`: after an interruption, a run ends with the same results as without one."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from hpcdist_runs import (
    AUGMENTED,
    HOLD_OVERRIDES,
    HOLD_STEP,
    LAST_STEP,
    TRAINING,
    Descendants,
    Runs,
    assert_equals_control,
    assert_no_ports,
    finish,
    listening,
    wait_for,
)


def test_run_logs_metrics_and_saves_the_model(runs: Runs, control_run: str) -> None:
    series = runs.series(control_run)
    assert series["eval/accuracy", LAST_STEP] > 0.9
    assert series["train/lr", LAST_STEP] < series["train/lr", 40]
    assert (runs.run_dir(control_run).model / "MLmodel").is_file()
    assert any(key.startswith("system/") for key, _, _ in runs.points(control_run))


@pytest.mark.slow
def test_run_stopped_in_the_middle_of_an_epoch_is_resumed(runs: Runs, control_run: str) -> None:
    name = "stopped"
    process = runs.start("run", *runs.config(name, *TRAINING, *HOLD_OVERRIDES))
    held = runs.wait_until_held(name)
    assert_no_ports([listening(pid) for pid in held])
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
def test_truncated_newest_checkpoint_is_skipped(runs: Runs, augmented_control_run: str) -> None:
    name = "truncated"
    process = runs.start("run", *runs.config(name, *TRAINING, *HOLD_OVERRIDES, *AUGMENTED))
    for pid in runs.wait_until_held(name):
        os.kill(pid, signal.SIGUSR2)  # a stop signal to the ranks, without the supervisor
    runs.release(name)
    code, output = finish(process)
    assert code == 0, output
    assert "stopped: everything saved (the ranks received a stop signal)" in output
    *_, before, newest = runs.checkpoint_steps(name)
    weights = runs.run_dir(name).checkpoints / f"step-{newest:08d}" / "model.pt"
    os.truncate(weights, weights.stat().st_size // 2)

    code, output = runs.command("resume", name)
    assert code == 0, output
    log = runs.attempt(name, 2).log(0).read_text()
    assert f"skipping checkpoint {weights.parent}: model.pt has " in log
    assert f"resumed at step {before} from" in log
    assert_equals_control(runs, name, augmented_control_run)


@pytest.mark.smoke
def test_run_resumes_from_the_last_checkpoint_after_a_killed_rank(runs: Runs, augmented_control_run: str) -> None:
    name = "rank-killed"
    process = runs.start("run", *runs.config(name, *TRAINING, *HOLD_OVERRIDES, *AUGMENTED))
    _, victim = runs.wait_until_held(name)
    wait_for(lambda: (runs.attempt(name).read_beat(1) or {}).get("step"), "a heartbeat with a step")
    os.kill(victim, signal.SIGKILL)
    runs.release(name)
    code, output = finish(process)
    assert code == 0, output
    assert "rank 1 on " in output
    assert "was killed by SIGKILL after step " in output
    assert "restart 1 of 3\n" in output
    assert "\nresuming at step 45, checkpoint of " in output
    state = runs.run_dir(name).read_state()
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 1)
    assert_equals_control(runs, name, augmented_control_run)


def test_run_is_resumed_after_a_killed_supervisor(runs: Runs, control_run: str) -> None:
    name = "supervisor-killed"
    process = runs.start("run", *runs.config(name, *TRAINING, *HOLD_OVERRIDES, "params.grandchild=true"))
    ranks = runs.wait_until_held(name)
    descendants = Descendants(process.pid)
    assert {process.pid for process in descendants.processes} >= set(ranks)
    assert sum(command == "sleep 1000" for command in descendants.commands) == 2, descendants.commands
    process.kill()
    descendants.wait_until_ended(30)
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
    wait_for(lambda: not _sleepers(runs), "the grandchildren of the second attempt to end", timeout_s=10)


def _sleepers(runs: Runs) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cmdline"] == ["sleep", "1000"] and process.info["cwd"] == str(runs.project)
    ]


@pytest.mark.faults  # test_run_failures.py has another error of this kind; test_topology.py has the message
def test_roles_that_a_trainer_does_not_support_are_a_user_error(runs: Runs) -> None:
    code, output = runs.command("run", *runs.config("wrong-roles", "trainer=roles:train", "roles.worker=2"))
    message = (
        "this trainer needs the roles server 1, worker 1 or more, got worker 2: set roles='{server: 1, worker: 1}'"
    )
    assert (code, f"failed with {message}" in output) == (2, True), output
    assert "(worker:" in output
    assert runs.run_dir("wrong-roles").read_state().attempt == 1
