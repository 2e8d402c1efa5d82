"""Whole runs of trainers with roles: exact after a stop, a kill or a hang of a rank; on a private network."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
import pytest
import torch
from hpcdist_runs import Runs, assert_states_equal, finish, listening, rank_of, wait_for

from hpcdist.checkpoint.state import load_weights
from hpcdist.data.datasets import build_model
from hpcdist.rank import private_network


@dataclass(frozen=True, kw_only=True)
class Case:
    """A short run with checkpoints before and after the step at which `gated.py` can hold it."""

    config: str
    overrides: tuple[str, ...]
    hold_at: int
    last_step: int
    epochs: str
    num_held: int  #: ranks that have steps; they are the first ones


#: Two evaluations per run, and no early end.
RL = (
    *("rl.num_envs=8", "rl.updates_per_epoch=10", "rl.num_eval_episodes=10"),
    *("stop.max_epochs=2", "stop.threshold=1000", "checkpoint.every_steps=4"),
)
#: Box actions, environments in a loop, and a pending rollout at each checkpoint.
ASYNC = ("rl.env_id=Pendulum-v1", "rl.mode=async", "rl.num_rollout_steps=16")
RNN = (
    *("roles.trainer=2", "rnn.max_corpus_mb=0.05", "rnn.vocab_size=300", "rnn.embedding_size=16"),
    *("rnn.hidden_size=16", "rnn.batch_size=8", "rnn.bptt=16"),
    *("checkpoint.every_steps=5", "stop.max_epochs=1", "stop.max_steps=36"),
)
HYBRID = (
    *("hybrid.tables={user: 60, item: 30, tag: 5}", "hybrid.num_samples=12800", "hybrid.batch_size=128"),
    *("hybrid.table_lr=0.1", "optim.lr=0.01", "checkpoint.every_steps=20", "launch.num_threads=1"),
)
#: 22 steps per epoch; checkpoints at 15, 22, 30 and 44. A measured split may differ between runs on a busy machine.
PIPELINE = (
    *("model.name=resnet18", "data.image_size=16", "data.batch_size=64"),
    *("pipeline.split_points=[layer2]", "checkpoint.every_steps=15", "stop.max_epochs=2"),
    *("optim.max_grad_norm=1.0", "schedule.warmup_steps=5"),
)
CASES = {
    "rl": Case(config="rl_cartpole", overrides=RL, hold_at=14, last_step=20, epochs="2 epochs", num_held=1),
    "rl-async": Case(config="rl_cartpole", overrides=RL + ASYNC, hold_at=14, last_step=20, epochs="2", num_held=1),
    "rnn": Case(config="rnn_lm", overrides=RNN, hold_at=12, last_step=36, epochs="0.", num_held=2),
    "hybrid": Case(config="hybrid_clicks", overrides=HYBRID, hold_at=50, last_step=90, epochs="2 epochs", num_held=2),
    "pipeline": Case(
        config="pipeline_resnet50", overrides=PIPELINE, hold_at=25, last_step=44, epochs="2 epochs", num_held=2
    ),
}


def arguments(runs: Runs, kind: str, name: str, *overrides: str, export: bool = False) -> list[str]:
    case = CASES[kind]
    settings = (f"experiment={runs.experiment}", *case.overrides, *overrides)
    return ["run", case.config, *runs.config(name, *settings, export=export)[1:]]


def start_held(runs: Runs, kind: str, name: str, *overrides: str) -> tuple[Any, dict[int, psutil.Process]]:
    """Start a run that waits at `hold_at`; return its process, and those of its ranks."""
    case = CASES[kind]
    gate = ("trainer=gated:train", f"params.gated={kind.partition('-')[0]}", f"params.hold_at={case.hold_at}")
    process = runs.start(*arguments(runs, kind, name, *gate, *overrides))
    runs.wait_until_held(name, num_ranks=case.num_held)
    return process, ranks_of(process.pid)


def ranks_of(supervisor: int) -> dict[int, psutil.Process]:
    """Return the processes of the ranks of a run by rank."""
    ranks = {}
    for process in psutil.Process(supervisor).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a program that the supervisor has run has ended
            number = rank_of(process)
            if number is not None:
                ranks[number] = process
    return ranks


@cache
def control(runs: Runs, kind: str) -> str:
    """Return the name of an uninterrupted run."""
    name, case = f"control-{kind}", CASES[kind]
    code, output = runs.command(*arguments(runs, kind, name))
    assert code == 0, output
    assert f"finished: trained {case.last_step} steps, {case.epochs}" in output
    logs = "".join(path.read_text() for path in runs.attempt(name).path.glob("rank-*.log"))
    assert "Warning" not in output + logs
    return name


def results(runs: Runs, name: str) -> tuple[dict[str, Any], dict[tuple[str, int], float]]:
    """Return the last checkpoint with all shards, and the metrics that do not depend on the clock."""
    folder = runs.run_dir(name).checkpoints / f"step-{runs.checkpoint_steps(name)[-1]:08d}"
    state = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))}
    points = [one for one in runs.points(name) if one[0].startswith(("train/", "eval/")) and "per_s" not in one[0]]
    found = {(key, step): value for key, step, value in points}
    assert len(found) == len(points), "duplicate points in MLflow"
    return state, found


def assert_as_control(runs: Runs, kind: str, name: str) -> None:
    assert_states_equal(results(runs, name), results(runs, control(runs, kind)))
    assert runs.mlflow_status(name) == "FINISHED"


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.faults) for kind in [*CASES][:3]),
        "hybrid",
        pytest.param("pipeline", marks=[pytest.mark.slow, pytest.mark.quick_fault]),
    ],
)
def test_stopped_run_resumes_exactly(runs: Runs, kind: str) -> None:
    name, case = f"stopped-{kind}", CASES[kind]
    process, ranks = start_held(runs, kind, name, "params.pace_s=0.1")
    # Those of gloo; store and RPC use Unix sockets in the run folder.
    assert {host for rank in ranks.values() for host, _ in listening(rank.pid)} == {"127.0.0.1"}
    if kind == "hybrid":
        ranks[3].send_signal(signal.SIGTERM)  # the server forwards the signal to rank 0
        runs.release(name)
    else:
        code, output = runs.command("stop", name)
        assert code == 0, output
    code, output = finish(process)
    assert code == 0, output
    by = "the ranks received a stop signal)" if kind == "hybrid" else "`hpcdist stop` by"
    assert f"stopped: everything saved ({by}" in output
    at = runs.checkpoint_steps(name)[-1]
    assert case.hold_at <= at < case.last_step
    code, output = runs.command("resume", name)
    assert code == 0, output
    assert f"resumed at step {at} from" in runs.attempt(name, 2).log(0).read_text()
    assert_as_control(runs, kind, name)


KILLED = [
    *(("rl", 0, "agent:0"), ("rnn", 0, "trainer:0"), ("rnn", 1, "trainer:1")),
    *(("rnn", 2, "parameter_server:0"), ("hybrid", 0, "trainer:0"), ("hybrid", 2, "parameter_server:0")),
    *(("pipeline", 0, "stage:0"), ("pipeline", 1, "stage:1")),
]


@pytest.mark.parametrize(
    ("kind", "victim", "role"),
    [
        pytest.param("rl", 2, "observer:1", marks=pytest.mark.slow),
        *(pytest.param(*one, marks=pytest.mark.faults) for one in KILLED),
    ],
)
def test_run_restarts_exactly_after_a_rank_is_killed(runs: Runs, kind: str, victim: int, role: str) -> None:
    name = f"killed-{kind}-{victim}"
    process, ranks = start_held(runs, kind, name)
    os.kill(ranks[victim].pid, signal.SIGKILL)
    runs.release(name)
    _, alive = psutil.wait_procs([rank for number, rank in ranks.items() if number != victim], timeout=50)
    assert alive == [], "the other ranks end before a call of RPC times out after 60 s"
    code, output = finish(process)
    assert code == 0, output
    assert f"rank {victim} ({role}) on {os.uname().nodename} was killed by SIGKILL" in output
    assert "restart 1 of 3\n" in output
    assert_as_control(runs, kind, name)


@pytest.mark.slow
def test_run_restarts_exactly_after_a_server_is_suspended(runs: Runs) -> None:
    """It keeps its connections, so only the hang detection can find it; the trainers wait for it."""
    process, ranks = start_held(runs, "rnn", "frozen", "launch.hang_timeout_s=15")
    ranks[2].suspend()
    runs.release("frozen")
    code, output = finish(process)
    assert code == 0, output
    assert f"rank 2 (parameter_server:0) on {os.uname().nodename} made no progress for" in output
    assert "restart 1 of 3\n" in output
    assert not ranks[2].is_running()
    assert_as_control(runs, "rnn", "frozen")


@pytest.mark.slow
def test_tables_and_policies_learn(runs: Runs) -> None:
    _, series = results(runs, control(runs, "hybrid"))
    assert series["eval/auc", 90] > series["eval/best_auc", 90] - 0.01
    settings = runs.config("solved", f"experiment={runs.experiment}", export=True)[1:]
    code, output = runs.command("run", "rl_cartpole", *settings)
    assert code == 0, output
    assert "finished: eval/return reached " in output
    assert "(solved: CartPole-v1's reward_threshold=475) at step " in output
    assert "Warning" not in "".join(runs.attempt("solved").log(rank).read_text() for rank in range(3))
    assert (runs.run_dir("solved").model / "MLmodel").is_file()


def pipeline_weights(runs: Runs, name: str) -> dict[str, torch.Tensor]:
    return load_weights(runs.run_dir(name).checkpoints / f"step-{CASES['pipeline'].last_step:08d}")


def test_all_stages_train_and_export_one_model(runs: Runs) -> None:
    case = CASES["pipeline"]
    process = runs.start(*arguments(runs, "pipeline", "stages", export=True))
    wait_for(runs.attempt("stages").beat(0).exists, "a heartbeat")
    ranks = ranks_of(process.pid)
    networks = {os.readlink(f"/proc/{rank.pid}/ns/net") for rank in ranks.values()}
    code, output = finish(process)
    assert code == 0, output
    if not private_network.why_refused():
        assert os.readlink("/proc/self/ns/net") not in networks, "a shipped trainer has a network of its own"
    _, series = results(runs, "stages")
    assert series["eval/accuracy", case.last_step] > 0.5, "ten classes"
    points = {key for key, _, _ in runs.points("stages")}
    assert {"pipeline/bubble", "pipeline/bubble_in_theory", "pipeline/busy_s/stage_1"} <= points
    assert (runs.run_dir("stages").model / "MLmodel").is_file()
    weights = pipeline_weights(runs, "stages")
    torch.manual_seed(0)
    model = build_model("resnet18", num_classes=10, in_channels=3, image_size=16)
    start = model.state_dict()
    assert weights.keys() == start.keys()
    assert [name for name, _ in model.named_parameters() if torch.equal(weights[name], start[name])] == []
    # Two micro-batches per step, each counted once.
    assert weights["layer4.1.bn2.num_batches_tracked"] == 2 * case.last_step
    model.load_state_dict(weights)


@pytest.mark.faults
def test_three_stages_continue_a_run_of_two_exactly(runs: Runs) -> None:
    process, _ = start_held(runs, "pipeline", "other-split", "launch.num_threads=1", "params.pace_s=0.1")
    code, output = runs.command("stop", "other-split")
    assert code == 0, output
    code, output = finish(process)
    assert code == 0, output
    code, output = runs.command("resume", "other-split", "roles.stage=3", "pipeline.split_points=[measured]")
    assert code == 0, output
    assert "split by measured cost" in runs.attempt("other-split", 2).log(0).read_text()
    expected = control(runs, "pipeline")
    assert_states_equal(pipeline_weights(runs, "other-split"), pipeline_weights(runs, expected))
    assert runs.series("other-split") == runs.series(expected)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["rl", "rnn", "pipeline", "hybrid"])
def test_rerun_repeats_every_value_and_the_model_has_its_program(runs: Runs, kind: str) -> None:
    name = f"repeated-{kind}"
    settings = ("tracking.drain_timeout_s=300", "launch.num_threads=1")
    code, output = runs.command(*arguments(runs, kind, name, *settings, export=True))
    assert code == 0, output
    torch.export.load(runs.run_dir(name).model / "data" / "exported" / "model.pt2")
    code, output = runs.command("rerun", name)
    assert code == 0, output
    assert ": no value differs: " in output.splitlines()[-1], output


def test_own_environment_is_imported_by_each_rank(runs: Runs) -> None:
    """`module:Name-v0`, with the module in the working directory."""
    settings = ("rl.env_id=corridor:Corridor-v0", "rl.num_envs=2", "rl.num_rollout_steps=20", "stop.max_steps=3")
    own = runs.config("corridor", f"experiment={runs.experiment}", *settings, export=True)[1:]
    code, output = runs.command("run", "rl_cartpole", *own)
    assert code == 0, output
    assert "finished: trained 3 steps" in output
    assert runs.datasets("corridor") == [("Corridor-v0", '{"uri": "corridor"}')]
