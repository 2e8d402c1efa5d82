"""`hpcdist.log`, `should_stop`, `should_save` and `checkpoint_dir`, outside of a run and on one rank."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path

import pytest
from launcher_env import topology_of

import hpcdist
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.roles import Roles
from hpcdist.config.schema import Config
from hpcdist.errors import TrainerError, UserMistake
from hpcdist.host.gpu_info import visible_devices
from hpcdist.host.json_files import read_if_valid
from hpcdist.host.machine import cpu_name
from hpcdist.rank import script_api
from hpcdist.rank.processes import STOP_SIGNALS
from hpcdist.rank.script_api import RunningScript, entered_script
from hpcdist.rank.worker import run_script, script_environment, separate_ranks, set_script_environment
from hpcdist.run.folder import Attempt, RunDir, StopRequest
from hpcdist.run.lease import hold
from hpcdist.run.rank_requests import CommandResult, LiveCommand, send_command
from hpcdist.run.training_record import TrainingRecord, read_training
from hpcdist.tracking import rank_records
from hpcdist.tracking.journal import read_records
from hpcdist.tracking.rank_records import RankRecords

CONFIG, ALONE = Config(), topology_of(0, 1)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the handlers of the stop signals."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run folder of which this process is rank 0."""
    made = RunDir.create(tmp_path / "runs" / "e" / "r")
    made.new_attempt()
    monkeypatch.setattr(rank_records, "_own", None)
    monkeypatch.setattr(script_api, "_rank", None)
    return made


@pytest.fixture
def records(run: RunDir) -> Iterator[RankRecords]:
    records = rank_records.begin(RankRecords(run, attempt=1, rank=0, pid=os.getpid()))
    yield records
    records.close()


@pytest.fixture
def script(run: RunDir, records: RankRecords) -> Iterator[RunningScript]:
    with entered_script(CONFIG, run.attempt(1), ALONE, records) as running:
        yield running


@pytest.mark.processes
def test_outside_of_a_run_nothing_happens_or_is_imported(tmp_path: Path) -> None:
    code = (
        "import hpcdist, os, sys\n"
        "print(hpcdist.log({'a': 1}, 1), hpcdist.should_stop(1), hpcdist.should_save(1), os.listdir())\n"
        "print(hpcdist.checkpoint_dir(), os.listdir())\n"
        "print(sorted({'torch', 'mlflow', 'numpy', 'omegaconf'} & sys.modules.keys()))"
    )
    env = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=env
    )
    assert done.stdout.splitlines() == ["None False False []", f"{tmp_path}/checkpoints ['checkpoints']", "[]"]
    assert (tmp_path / "checkpoints").is_dir()


def test_metrics_steps_and_a_stop_signal_of_one_rank(run: RunDir, script: RunningScript) -> None:
    assert script.last_step() is None
    called: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: called.append(number))
    hpcdist.log({"loss": 0.5}, 3)
    assert not hpcdist.should_stop(4, 10)
    os.kill(os.getpid(), signal.SIGUSR2)
    step = 5
    # The ranks agree at intervals, so that a step is not slowed down.
    while not hpcdist.should_stop(step, 10):
        step += 1
    assert hpcdist.should_stop(step + 1), "it stays True"
    assert script.stop_agreed
    assert called == [signal.SIGUSR2], "the handler of the script is called as well"
    assert hpcdist.checkpoint_dir() == run.checkpoints
    script.close()
    beat = run.attempt(1).read_beat(0)
    assert beat is not None
    assert (beat["step"], beat["metrics"]) == (script.last_step(), {"loss": 0.5})
    (record,) = read_records(run.journal / "attempt-001.rank-00000.jsonl")[0]
    assert (record.step, record.metrics) == (3, {"loss": 0.5})
    with pytest.raises(UserMistake, match="metric 'loss' must be a number"):
        hpcdist.log({"loss": "x"}, 4)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("attempt", "reported", "first_step"),
    [
        (1, [100, 200], 0),
        (2, [200, 300], None),
        (2, [101, 101, 102, 103], 100),
        (1, [501, 502], 500),
        (2, [7], None),
        (1, [0, 1, 2], -1),
        (2, [0, 100, 200], -1),
        # MLflow's client logs a value without a step at 0.
        (1, [1, 0, 2, 3], 0),
        (2, [101, 102, 0, 103], 100),
    ],
    ids=[
        "first attempt",
        "every hundredth step",
        "each step",
        "from a checkpoint",
        "one report",
        "from 0",
        "again",
        "a value without a step",
        "one after a restart",
    ],
)
def test_attempt_of_a_script_begins_where_its_reports_show_it(
    run: RunDir, records: RankRecords, attempt: int, reported: list[int], first_step: int | None
) -> None:
    while len(run.attempts()) < attempt:
        run.new_attempt()
    with entered_script(CONFIG, run.attempt(attempt), ALONE, records):
        for step in reported:
            hpcdist.log({"loss": 0.5}, step)
    training = read_training(run.attempt(attempt))
    assert training is not None
    assert training.step_before == first_step


def live(run: RunDir) -> RunDir:
    run.config.write_text("trainer: {target: ddp, script: [train.py]}\n")
    run.write_state(replace(run.read_state(), status="running", attempt=1, world_size=1))
    return run


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks look for commands at every step."""
    for name in ("REQUEST_INTERVAL_S", "AGREEMENT_INTERVAL_S"):
        monkeypatch.setattr(f"hpcdist.rank.stopping.{name}", 0.0)


def result_of(attempt: Attempt, number: int) -> CommandResult | None:
    return read_if_valid(CommandResult, attempt.command_result(number, 0))


def saved_at(script: RunningScript, first: int, last: int) -> list[int]:
    """Train steps; return those at which the script saves."""
    found = []
    for step in range(first, last + 1):
        assert not hpcdist.should_stop(step)
        if hpcdist.should_save(step):
            found.append(step)
    return found


@pytest.mark.usefixtures("at_once")
def test_a_script_saves_on_command_and_reports_it_after_the_save(run: RunDir, script: RunningScript) -> None:
    attempt = run.attempt(1)
    assert saved_at(script, 1, 2) == []
    with hold(live(run)):
        assert send_command(run, LiveCommand(action="save"))[1] == 1
    assert not hpcdist.should_stop(3)
    assert hpcdist.should_save(3)
    assert hpcdist.should_save(3), "the same answer at the same step"
    assert result_of(attempt, 1) is None, "the script is still saving"
    assert saved_at(script, 4, 6) == []
    assert result_of(attempt, 1) == CommandResult(step=3, path="checkpoints")
    with hold(run):
        send_command(run, LiveCommand(action="save"))
    assert saved_at(script, 7, 7) == [7]
    script.close(failed=True)
    assert result_of(attempt, 2) is None, "the script failed while it saved"
    script.close()
    assert result_of(attempt, 2) == CommandResult(step=7, path="checkpoints")


@pytest.mark.usefixtures("at_once", "script")
def test_a_script_that_never_asks_to_save_refuses_the_command(run: RunDir) -> None:
    hpcdist.should_stop(1)
    with hold(live(run)):
        send_command(run, LiveCommand(action="save"))
    for step in (2, 3, 4):
        assert not hpcdist.should_stop(step)
    result = result_of(run.attempt(1), 1)
    assert result is not None
    assert result.error.startswith("not saved, since the script does not call hpcdist.should_save(step)")


@pytest.mark.usefixtures("at_once")
def test_script_saves_at_its_configured_interval_and_at_a_stop(run: RunDir, records: RankRecords) -> None:
    config, attempt = replace(CONFIG, checkpoint=CheckpointConfig(every_steps=3)), run.attempt(1)
    with entered_script(config, attempt, ALONE, records) as script:
        assert not hpcdist.should_save(0), "untrained weights"
        assert saved_at(script, 1, 6) == [3, 6]
        attempt.send_request(StopRequest(cause="user", by="hpcdist stop"))
        assert hpcdist.should_stop(7)
        assert hpcdist.should_save(7)
        assert script.stop_agreed


def test_ranks_that_count_no_steps_take_no_part(run: RunDir) -> None:
    """As a parameter server: rank 0 decides alone, without a process group, and SIGTERM does not end rank 1."""
    first = RunningScript(CONFIG, run, run.attempt(1), topology_of(0, 2))
    other = RunningScript(CONFIG, run, run.attempt(1), topology_of(1, 2))
    try:
        with pytest.raises(TrainerError, match="2 ranks need a process group to agree on a stop"):
            first.should_stop(1, None)
        with pytest.raises(TrainerError, match=r"^hpcdist\.agree_among: rank 0 must count steps: put the role"):
            first.agree_among([1])
        first.agree_among([0])
        other.agree_among([0])
        with pytest.raises(TrainerError, match=r"^hpcdist\.should_stop: rank 1 is not in the ranks of agree_among"):
            other.should_stop(1, None)
        assert not first.should_stop(1, None)
        os.kill(os.getpid(), signal.SIGTERM)
        limit = time.monotonic() + 30  # one rank asks its clock, however many steps it does
        steps = takewhile(lambda _: time.monotonic() < limit, count(2))
        assert any(first.should_stop(step, None) for step in steps)
    finally:
        first.close()
        other.close()


def test_number_of_steps_done_shows_where_the_attempt_began(run: RunDir) -> None:
    attempt = run.attempt(1)
    logging_script = RunningScript(CONFIG, run, attempt, ALONE)
    logging_script.note({"loss": 1.0}, None)  # MLflow's metrics without a step are numbered in each attempt anew
    logging_script.note({"loss": 1.0}, 0)
    assert read_training(attempt) == TrainingRecord(devices=visible_devices(os.environ), cpu=cpu_name()), "not begun"
    logging_script.close()
    # `should_stop` is told the number of steps done.
    asking_script = RunningScript(CONFIG, run, run.new_attempt(), ALONE)
    asking_script.should_stop(20, None)
    asking_script.close()
    recorded = read_training(run.attempt(2))
    assert recorded is not None
    assert recorded.first_step == 20


@pytest.mark.parametrize(
    ("first", "loop", "first_step"),
    [
        (20, ("ask", "train", "log"), 20),
        (20, ("ask", "log", "train"), 19),
        (0, ("ask", "log", "train"), -1),
        (0, ("train", "ask", "log"), 0),
        (0, ("train", "log", "ask"), 0),
    ],
    ids=["documented", "labels from 0 after a checkpoint", "labels from 0", "asks after a step", "asks at last"],
)
def test_first_step_of_a_script_that_asks_and_logs(
    run: RunDir, records: RankRecords, first: int, loop: tuple[str, ...], first_step: int
) -> None:
    with entered_script(CONFIG, run.attempt(1), ALONE, records):
        done = first
        for part in loop * 3:
            if part == "ask":
                hpcdist.should_stop(done)
            elif part == "log":
                hpcdist.log({"loss": 0.5}, done)
            else:
                done += 1
    training = read_training(run.attempt(1))
    assert training is not None
    assert training.step_before == first_step


def test_metric_before_the_training_does_not_count_as_a_step(run: RunDir, records: RankRecords) -> None:
    with entered_script(CONFIG, run.attempt(1), ALONE, records):
        hpcdist.log({"val/loss": 0.5}, 0)
        for step in (1, 2):
            hpcdist.log({"loss": 0.5}, step)
    training = read_training(run.attempt(1))
    assert training is not None
    assert training.step_before == 0


def test_log_notes_the_step_of_ranks_that_record_no_metrics(run: RunDir) -> None:
    """Otherwise a failure of rank 1 has no step."""
    records = rank_records.begin(RankRecords(run, attempt=1, rank=1, pid=os.getpid()))
    with entered_script(CONFIG, run.attempt(1), topology_of(1, 2), records) as other:
        hpcdist.log({"loss": 1.0}, 37)
        assert other.last_step() == 37
    records.close()
    assert read_training(run.attempt(1)) is None, "rank 0 writes it"


# --- Unmodified scripts as trainers.


def test_ranks_that_never_met_are_not_called_one_training() -> None:
    end = (
        "; its 2 ranks never connected to each other by torch.distributed: if it starts its own ranks, they were"
        " separate trainings, and {} starts it once"
    )
    assert separate_ranks(CONFIG, topology_of(0, 2), has_joined=False) == end.format("launch.num_ranks=1")
    on_slurm = topology_of(0, 2, launcher="slurm")
    once = end.format("cluster.nodes=1 cluster.tasks_per_node=1")
    assert separate_ranks(CONFIG, on_slurm, has_joined=False) == once
    for topology, has_joined in ((on_slurm, True), (on_slurm, None), (ALONE, False)):
        assert separate_ranks(CONFIG, topology, has_joined) == ""
    unknown = replace(CONFIG, launch=LaunchConfig(device="xpu"))
    assert separate_ranks(unknown, on_slurm, has_joined=False) == ""


def test_missing_files_and_modules_are_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(sys, "argv", [])
    for command, problem in ((["-m", "package_missing"], "no module 'package_missing'"), (["a.py"], "no such file: a")):
        with pytest.raises(TrainerError, match=rf"^trainer\.script: {problem}"):
            run_script(command, run, ALONE)


def test_environment_has_the_variables_of_torchrun_and_the_role(tmp_path: Path) -> None:
    of_rank = topology_of(2, 4, 2, master_addr="n1", master_port=29500, launcher="slurm", job_id="7", attempt=2)
    run = RunDir(tmp_path)
    roles = {"trainer": 1, "server": 3}
    found = script_environment(of_rank, run, Roles.of(roles, 4), 3)
    assert found.pop("HPCDIST_ROLES") == '{"trainer": 1, "server": 3}'
    assert " ".join(f"{name}={value}" for name, value in found.items()) == (
        "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_NAME=server"
        " ROLE_RANK=1 ROLE_WORLD_SIZE=3 MASTER_ADDR=n1 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=7"
        " TORCHELASTIC_RESTART_COUNT=1 TORCHELASTIC_MAX_RESTARTS=3 TORCHELASTIC_USE_AGENT_STORE=False"
        f" HPCDIST_RUN_DIR={tmp_path} HPCDIST_CHECKPOINT_DIR={run.checkpoints}"
        " HPCDIST_ATTEMPT=2 HPCDIST_ROLE=server HPCDIST_ROLE_INDEX=1"
    )
    without = script_environment(of_rank, run, Roles.of({}, 4), 3)
    assert (without["HPCDIST_ROLE"], without["HPCDIST_ROLE_INDEX"]) == ("trainer", "2")


def test_variables_of_another_launcher_do_not_reach_a_script(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/tmp/error",
        "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
        "NODE_RANK": "5",
        "GROUP_RANK": "5",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
    monkeypatch.setattr(os, "environ", {**os.environ, **inherited})
    config = replace(CONFIG, launch=LaunchConfig(env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}))
    set_script_environment(config, run, ALONE)
    found = {name: os.environ.get(name) for name in inherited}
    assert found == {
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": None,
        "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
        "NODE_RANK": None,
        "GROUP_RANK": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
