"""Reinforcement learning: an agent and observers (`trainer: rl`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hpcdist.config.schema.checks import above, at_least, check


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """Reinforcement learning: an agent and observers (`trainer: rl`).

    An optimizer step of the run (`stop.steps`, `checkpoint.every_steps`, `tracking.log_every`) is one update: the
    agent learns from one rollout of every observer.
    """

    env: str = "CartPole-v1"
    """A gymnasium environment with vector observations and discrete or box actions; `module:Name-v0` imports first."""
    env_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_episode_steps: int | None = None
    """Truncate episodes here; null keeps the environment's own limit."""
    num_envs: int = 8
    """Environments per observer, stepped together."""
    rollout_steps: int = 128
    """Steps of each environment between two updates."""
    updates_per_epoch: int = 10
    """Updates between two evaluations; `stop.epochs` counts evaluations, `stop.patience` too."""
    eval_episodes: int = 100
    """Full greedy episodes of an evaluation. Where `stop.threshold` is null the environment's own ends the run."""
    mode: Literal["sync", "async"] = "sync"
    """`async` collects the next rollouts while the agent learns: faster, from weights one update old, deterministic."""
    inference: Literal["local", "remote"] = "local"
    """`local`: observers get the weights once an update; `remote`: the agent answers each step, for large policies."""
    hidden: list[int] = field(default_factory=lambda: [64])
    """Sizes of the hidden layers of the policy, and of the value network beside it."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Of the hidden layers; `relu` computes faster, `tanh` is mostly the better learner for box actions."""
    normalize_observations: bool = False
    """Scale observations by their running mean and deviation, which are part of the model."""
    discount: float = 0.99
    """What a reward is worth one step later."""
    gae_lambda: float = 0.95
    """Generalised advantage estimation: 1 sums up rewards, 0 trusts the value network after one step."""
    clip: float = 0.2
    """How far an update may move an action's probability before its gradient is cut off (PPO)."""
    passes: int = 4
    """Passes over the rollouts in each update; 1, with minibatches=1, is A2C."""
    minibatches: int = 4
    """Optimizer steps a pass."""
    value_weight: float = 0.5
    """Weight of the value network's squared error in the loss."""
    entropy_weight: float = 0.01
    """Weight of the policy's entropy, which keeps it exploring."""
    record: bool = True
    """Leave a GIF of one greedy episode and a plot of the returns as artifacts at the end."""

    def __post_init__(self) -> None:
        check(
            at_least(self, 1, "max_episode_steps", "num_envs", "rollout_steps", "updates_per_epoch", "eval_episodes")
            + at_least(self, 1, "passes", "minibatches")
            + at_least(self, 0, "value_weight", "entropy_weight")
            + above(self, 0, "clip")
            + [
                f"{name} must be from 0 to 1, got {value}"
                for name, value in (("discount", self.discount), ("gae_lambda", self.gae_lambda))
                if not 0 <= value <= 1
            ]
            + [f"hidden must hold sizes >= 1, got {size}" for size in self.hidden if size < 1]
            + ["mode=async needs inference=local: weights change under remote inference"]
            * (self.mode == "async" and self.inference == "remote")
        )
