"""The RL trainer on several ranks: equal to one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from context_scene import new_run, open_context
from spawn import Rank, spawn_ranks

from hpcdist.checkpoint.state import load_weights
from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import OptimConfig, StopConfig
from hpcdist.rank.context import close
from hpcdist.rank.process_group import seed_everything
from hpcdist.rank.training_loop import build_optimizer
from hpcdist.run.folder import RunDir
from hpcdist.trainers.rl import RlConfig, train
from hpcdist.trainers.rl.environments import Problem
from hpcdist.trainers.rl.observers import Collector, Rollout
from hpcdist.trainers.rl.policy import Actor, Policy
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
        close(ctx)


def train_in_one_process(cfg: Config) -> dict[str, torch.Tensor]:
    """Return the weights after the same training in one process."""
    seed_everything(cfg.seed)
    problem = Problem.of(cfg.section(RlConfig).env_id)
    policy = Policy(cfg.section(RlConfig), problem.num_inputs, problem.num_outputs, is_discrete=problem.is_discrete)
    optimizer = build_optimizer(policy.parameters(), cfg.optim)
    seed_everything(cfg.seed + 1)  # the seed of rank 0 for its training
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
        pytest.param({"mode": "async", "env_id": "Pendulum-v1"}, marks=pytest.mark.slow),
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
