"""The RL trainer on several ranks: equal to one process, exact after a stop or a kill, and able to solve CartPole."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from context_scene import new_run, open_context
from hpcdist_runs import Runs, assert_states_equal, finish, rank_of
from spawn import Rank, spawn_ranks

from hpcdist.checkpoint.state import load_weights
from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.config.launch_schema import CheckpointConfig
from hpcdist.config.schema import Config, OptimConfig, StopConfig
from hpcdist.rank.process_group import seed_everything
from hpcdist.rank.training_loop import build_optimizer
from hpcdist.run.folder import RunDir
from hpcdist.trainers.rl import RlConfig, train
from hpcdist.trainers.rl.environments import Problem
from hpcdist.trainers.rl.observers import Collector, Rollout
from hpcdist.trainers.rl.policy import Actor
from hpcdist.trainers.rl.train import train_step

NUM_UPDATES = 4


def config(**values: Any) -> Config:
    return Config(
        seed=3,
        roles={"agent": 1, "observer": 2},
        sections={"rl": RlConfig(num_envs=4, num_rollout_steps=32, hidden_sizes=[8], num_eval_episodes=3, **values)},
        optim=OptimConfig(lr=1e-2, max_grad_norm=0.5),
        stop=StopConfig(max_steps=NUM_UPDATES, max_epochs=99),
        checkpoint=CheckpointConfig(monitor="eval/return"),
    )


def train_on_ranks(here: Rank, path: Path, cfg: Config) -> None:
    with open_context(here, RunDir(path), cfg) as ctx:
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]  # seconds for MLflow's import
        train.train(ctx, cfg)
        ctx.close()


def train_in_one_process(cfg: Config) -> dict[str, torch.Tensor]:
    """Return the weights after the same training in one process."""
    seed_everything(cfg.seed)
    problem = Problem.of(cfg.section(RlConfig).env_id, cfg.section(RlConfig).env_kwargs)
    policy = train.build_policy(problem, cfg.section(RlConfig))
    optimizer = build_optimizer(policy.parameters(), cfg.optim)
    collectors = [Collector(problem, cfg.section(RlConfig).num_envs, seed=cfg.seed, index=index) for index in range(2)]

    def collect(number: int) -> Rollout:
        actor = Actor(policy.actor_state(), cfg.section(RlConfig).activation)
        log_std = policy.log_std.detach().clone() if policy.log_std is not None else None
        return Rollout.join(
            [one.collect(number, cfg.section(RlConfig).num_rollout_steps, actor, log_std) for one in collectors]
        )

    ahead = None
    for number in range(NUM_UPDATES):
        rollout = ahead or collect(number)
        if cfg.section(RlConfig).mode == "async":
            ahead = collect(number + 1)
        train_step(policy, optimizer, rollout, cfg, torch.device("cpu"))
    return policy.state_dict()


@pytest.mark.parametrize(
    "values",
    [
        {},
        pytest.param(
            {"mode": "async", "env_id": "Pendulum-v1", "normalize_observations": True}, marks=pytest.mark.slow
        ),
    ],
    ids=["sync", "async"],
)
def test_ranks_learn_the_weights_of_one_process(tmp_path: Path, values: dict[str, Any]) -> None:
    cfg = config(**values)
    run = new_run(tmp_path)
    spawn_ranks(train_on_ranks, 3, path=run.path, cfg=cfg)
    newest = CheckpointStore(run.checkpoints).latest()
    assert newest is not None
    weights, expected = load_weights(newest.path), train_in_one_process(cfg)
    assert weights.keys() == expected.keys()
    for key, value in weights.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.slow
def test_other_numbers_of_observers_learn_the_same_weights(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    values = {"mode": "async", "env_id": "Pendulum-v1"}
    for num_observers, num_updates in ((2, 1), (1, 3), (2, NUM_UPDATES)):
        cfg = replace(
            config(**values), roles={"agent": 1, "observer": num_observers}, stop=StopConfig(max_steps=num_updates)
        )
        spawn_ranks(train_on_ranks, 1 + num_observers, path=run.path, cfg=cfg)
    newest = CheckpointStore(run.checkpoints).latest()
    assert newest is not None
    weights, expected = load_weights(newest.path), train_in_one_process(config(**values))
    for key, value in weights.items():
        assert torch.equal(value, expected[key]), key


# --- whole runs

#: Two evaluations per run, checkpoints between them, and no early end.
SHORT = [
    "rl.num_envs=8",
    "rl.updates_per_epoch=10",
    "stop.max_epochs=2",
    "stop.threshold=1000",
    "checkpoint.every_steps=4",
    "rl.num_eval_episodes=10",
]
HOLD_OVERRIDES = ["trainer=gated:train", "params.gated=rl", "params.hold_at=14"]
#: Box actions, environments in a loop, and a pending rollout at each checkpoint.
ASYNC = ["rl.env_id=Pendulum-v1", "rl.mode=async", "rl.normalize_observations=true", "rl.num_rollout_steps=16"]


@pytest.fixture(scope="module")
def rl_runs(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("rl"), empty_database, experiment="cartpole")


def command(runs: Runs, name: str, *overrides: str, export: bool = False) -> list[str]:
    overrides = ("tracking.drain_timeout_s=180", *overrides)
    return ["run", "rl_cartpole", *runs.config(name, *overrides, export=export)[1:]]


def series(runs: Runs, name: str) -> dict[tuple[str, int], float]:
    """Return the metrics that do not depend on the clock."""
    points = [point for point in runs.points(name) if point[0].startswith(("train/", "eval/"))]
    deterministic = [point for point in points if point[0] != "train/env_steps_per_s"]
    found = {(key, step): value for key, step, value in deterministic}
    assert len(found) == len(deterministic), "duplicate points in MLflow"
    return found


def assert_as_control(runs: Runs, name: str, control: str) -> None:
    assert_states_equal(runs.final_state(name), runs.final_state(control))
    assert series(runs, name) == series(runs, control)
    assert runs.mlflow_status(name) == "FINISHED"


@pytest.fixture(scope="module")
def control(rl_runs: Runs) -> str:
    code, output = finish(rl_runs.start(*command(rl_runs, "control", *SHORT)))
    assert code == 0, output
    assert "finished: trained 20 steps, 2 epochs, " in output
    assert {key for key, _ in series(rl_runs, "control")} >= {"train/return", "train/entropy", "eval/return"}
    return "control"


@pytest.mark.faults  # test_hybrid.py stops and resumes a run with roles
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_stopped_run_resumes_exactly(rl_runs: Runs, control: str, kind: str) -> None:
    name, more = f"stopped-{kind}", ASYNC if kind == "async" else []
    if kind == "async":
        control = "control-async"
        code, output = finish(rl_runs.start(*command(rl_runs, control, *SHORT, *more)))
        assert code == 0, output
    process = rl_runs.start(*command(rl_runs, name, *SHORT, *more, *HOLD_OVERRIDES))
    rl_runs.wait_until_held(name, num_ranks=1)
    code, output = rl_runs.command("stop", name)
    assert code == 0, output
    code, output = finish(process)
    assert code == 0, output
    assert "stopped: everything saved" in output
    at = rl_runs.checkpoint_steps(name)[-1]
    assert 14 <= at < 20
    code, output = rl_runs.command("resume", name)
    assert code == 0, output
    assert f"resumed at step {at} from" in rl_runs.attempt(name, 2).log(0).read_text()
    assert_as_control(rl_runs, name, control)


@pytest.mark.parametrize(("victim", "role"), [pytest.param(0, "agent:0", marks=pytest.mark.faults), (2, "observer:1")])
def test_run_restarts_exactly_after_a_rank_is_killed(rl_runs: Runs, control: str, victim: int, role: str) -> None:
    name = f"killed-{victim}"
    process = rl_runs.start(*command(rl_runs, name, *SHORT, *HOLD_OVERRIDES))
    (agent,) = rl_runs.wait_until_held(name, num_ranks=1)
    ranks = {
        number: rank
        for rank in psutil.Process(process.pid).children(recursive=True)
        if (number := rank_of(rank)) is not None
    }
    assert ranks[0].pid == agent
    assert len(ranks) == 3
    others = [rank for rank in ranks.values() if rank.pid != ranks[victim].pid]
    os.kill(ranks[victim].pid, signal.SIGKILL)
    rl_runs.release(name)
    _, alive = psutil.wait_procs(others, timeout=50)
    assert alive == [], "the other ranks end before a call of RPC times out after 60 s"
    code, output = finish(process)
    assert code == 0, output
    assert f"rank {victim} ({role}) on " in output
    assert "was killed by SIGKILL" in output
    assert "restart 1 of 3\n" in output
    assert_as_control(rl_runs, name, control)


@pytest.mark.slow
def test_cartpole_is_solved(rl_runs: Runs) -> None:
    code, output = finish(rl_runs.start(*command(rl_runs, "solved", export=True)))
    assert code == 0, output
    assert "finished: eval/return reached " in output
    assert "(solved: CartPole-v1's reward_threshold=475) at step " in output
    assert "Warning" not in "".join(rl_runs.attempt("solved").log(rank).read_text() for rank in range(3))
    run = rl_runs.run_dir("solved")
    assert (run.model / "MLmodel").is_file()
