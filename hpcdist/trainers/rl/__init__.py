"""Trainer `rl`: proximal policy optimization with one agent and several observers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.section import ConfigSection, number
from hpcdist.config.trainer_declaration import Trainer


@dataclass(frozen=True, kw_only=True)
class RlConfig(ConfigSection):
    """Reinforcement learning with one agent and several observers (`trainer: rl`).

    An optimizer step of the run (`stop.max_steps`, `checkpoint.every_steps`, `tracking.log_every_steps`) is one PPO
    update: the agent learns from one rollout of each collector.
    """

    env_id: str = "CartPole-v1"
    """Gymnasium environment with vector observations and discrete or box actions; `module:Name-v0` imports a module."""
    num_envs: int = number(8, least=1)
    """Environments per collector, stepped together; at the first start of a run each observer has one collector."""
    num_rollout_steps: int = number(128, least=1)
    """Steps of each environment in one rollout, between two updates."""
    updates_per_epoch: int = number(10, least=1)
    """Updates between two evaluations; `stop.max_epochs` and `stop.patience` count evaluations."""
    num_eval_episodes: int = number(100, least=1)
    """Greedy episodes per evaluation. If `stop.threshold` is null, the environment's reward threshold ends the run."""
    mode: Literal["sync", "async"] = "sync"
    """`async` overlaps rollouts with learning: faster, deterministic, but the weights are one update old."""
    hidden_sizes: list[int] = field(default_factory=lambda: [64])
    """Sizes of the hidden layers of the policy network and of the value network."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the hidden layers; `relu` is faster, `tanh` usually learns better with box actions."""
    gamma: float = number(0.99, least=0, most=1)
    """Discount factor per step."""
    update_epochs: int = number(4, least=1)
    """Passes over the rollouts in each update; 1, with num_minibatches=1, is A2C."""
    num_minibatches: int = number(4, least=1)
    """Minibatches, and therefore optimizer steps, per pass."""
    entropy_coef: float = number(0.01, least=0)
    """Coefficient of the entropy bonus, which encourages exploration."""

    def problems(self) -> list[str]:
        """Return a message for each invalid value of this section."""
        return [f"hidden_sizes must hold sizes >= 1, got {size}" for size in self.hidden_sizes if size < 1]


TRAINER = Trainer(
    section=RlConfig,
    shared_sections=("optim", "schedule"),
    roles={"agent": 1, "observer": 2},
    single_roles=("agent",),
    charts={"mean return of an episode": ("train/return", "eval/return")},
    fixed_keys=("rl.env_id", "rl.hidden_sizes", "optim.name"),
    module_key="env_id",
)
