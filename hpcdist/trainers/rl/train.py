"""Reinforcement learning with an agent and observers: proximal policy optimisation on gymnasium environments.

Observers step the environments of their collectors and record rollouts. The agent, rank 0, learns from one rollout of
each collector and evaluates the policy over full greedy episodes. At the first start each observer has one collector; a
resume with fewer observers gives some of them several, and the result stays the same.

In `mode: sync` update k learns from rollouts of weights k, and observers are idle meanwhile. In `mode: async` observers
collect with weights k the rollouts of update k + 1. The weights are always one update old, so a seed determines the
result in both modes. In async mode the policy that learns is not the one that acted: PPO's probability ratio corrects
for that, at the price of somewhat more samples.

Observers infer with a copy of the weights in NumPy. Measured on CartPole (2 observers on 2 cores), that is several
times faster than an RPC to the agent for each step.

Sources: https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html (agent and observers),
https://arxiv.org/abs/1707.06347 (PPO), https://arxiv.org/abs/1506.02438 (GAE).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

import gymnasium
import torch

from hpcdist.config.schema import Config
from hpcdist.data.identity import digest_of
from hpcdist.errors import ConfigError
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import RpcGroup, rpc_group
from hpcdist.rank.optimizer import build_optimizer, lr_factor, set_lr
from hpcdist.rank.training_loop import Meter, run_epochs
from hpcdist.rank.training_position import TrainingPosition
from hpcdist.trainers.rl.environments import Environments, Problem, make_environments
from hpcdist.trainers.rl.episodes import greedy_returns
from hpcdist.trainers.rl.figures import returns_curves, returns_histogram
from hpcdist.trainers.rl.observers import ObserverGroup, num_collectors_of, serve_rollouts
from hpcdist.trainers.rl.policy import Actor, Policy
from hpcdist.trainers.rl.ppo import learn
from hpcdist.trainers.rl.rollouts import Rollout, random_numbers
from hpcdist.trainers.rl.schema import RlConfig

log = logging.getLogger(__name__)
#: Valid values of `checkpoint.monitor`.
EVAL_METRICS = ("eval/return", "eval/return_std")


@dataclass
class History:
    """Samples and evaluations so far; part of the checkpoint."""

    env_steps: int = 0  #: transitions learned from, of all observers
    #: (env_steps, mean return, smallest return, largest return) of each evaluation
    evaluations: list[tuple[int, float, float, float]] = field(default_factory=list)
    last_returns: list[float] = field(default_factory=list)  #: of the episodes of the last evaluation


@dataclass(frozen=True)
class RlLoop:
    """State of the agent's training loop."""

    ctx: Context
    cfg: Config
    problem: Problem
    policy: Policy
    optimizer: torch.optim.Optimizer
    observers: ObserverGroup
    group: RpcGroup
    test_envs: Environments
    position: TrainingPosition
    meter: Meter
    history: History
    began: float  #: time of `time.perf_counter` at the start of this attempt


def train(ctx: Context, cfg: Config) -> None:
    """Train until solved or stopped, evaluate after each epoch, save checkpoints and export the final policy."""
    if (best := cfg.checkpoint.monitor) not in EVAL_METRICS:
        raise ConfigError([f"checkpoint.monitor={best!r} is not measured: use one of {', '.join(EVAL_METRICS)}"])
    rl = cfg.section(RlConfig)
    problem = Problem.of(rl.env_id, rl.env_kwargs, rl.max_episode_steps)
    if ctx.role == "observer":
        serve_rollouts(ctx, cfg, problem)
        return
    policy = build_policy(problem, rl).to(ctx.device)
    ctx.log_dataset(
        rl.env_id,
        split="environment",
        digest=digest_of(problem.name, problem.options, gymnasium.__version__),
        source="gymnasium",
    )
    ctx.log_model_size(sum(parameter.numel() for parameter in policy.parameters()))
    saved = ctx.restore()
    num_collectors = num_collectors_of(saved, ctx.roles.count("observer"))
    with rpc_group(ctx, {}) as group:
        ctx.agree_among([0])
        train_policy(make_loop(ctx, cfg, problem, policy, saved, group, num_collectors))


def build_policy(problem: Problem, cfg: RlConfig) -> Policy:
    """Return a policy, initialised from torch's global generator."""
    return Policy(
        num_inputs=problem.num_inputs,
        num_outputs=problem.num_outputs,
        hidden=cfg.hidden_sizes,
        is_discrete=problem.is_discrete,
        activation=cfg.activation,
        normalize=cfg.normalize_observations,
    )


def make_loop(
    ctx: Context,
    cfg: Config,
    problem: Problem,
    policy: Policy,
    saved: Restored | None,
    group: RpcGroup,
    num_collectors: int,
) -> RlLoop:
    """Build the rest of the agent's state, and load it from the checkpoint if there is one."""
    rl = cfg.section(RlConfig)
    optimizer = build_optimizer(policy.parameters(), cfg.optim)
    pending: list[Rollout] = []
    if saved is not None:
        policy.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.trainer["optimizer"])
        pending = [Rollout(*tensors) for tensors in saved.trainer["pending"]]
    observers = ObserverGroup(group, cfg, num_collectors, pending)
    test_envs = make_environments(problem, rl.num_eval_episodes, random_numbers(cfg.seed, 1, 0))
    position = TrainingPosition.resume(saved.trainer["position"] if saved else None, rl.updates_per_epoch, cfg.stop)
    meter = Meter(saved.trainer["meter"] if saved else None, ctx.device)
    history = History(**saved.trainer["history"]) if saved else History()
    began = time.perf_counter()
    return RlLoop(ctx, cfg, problem, policy, optimizer, observers, group, test_envs, position, meter, history, began)


def train_policy(loop: RlLoop) -> None:
    """Train as the agent, and export the final policy."""
    ctx, cfg, problem = loop.ctx, loop.cfg, loop.problem
    goal = None
    if problem.reward_threshold is not None and cfg.checkpoint.monitor == "eval/return":
        goal = problem.reward_threshold, f"solved: {problem.name}'s reward_threshold"
    reason = run_epochs(loop, train_epoch, interval_metrics, evaluate, save, goal=goal)
    if reason:
        ctx.end_reason = f"{reason}, {loop.history.env_steps} environment steps"
        ctx.export_model(loop.policy, torch.zeros(2, problem.num_inputs))


def train_epoch(loop: RlLoop) -> Iterator[None]:
    """Do one PPO update after the other; `run_epochs` ends the epoch."""
    cfg, position, policy, observers = loop.cfg, loop.position, loop.policy, loop.observers
    while True:
        if not observers.has_pending:
            observers.request(position.step, policy.actor_state())
        rollout = observers.take()
        if cfg.section(RlConfig).mode == "async":
            observers.request(position.step + 1, policy.actor_state())
        set_lr(loop.optimizer, cfg.optim.lr * lr_factor(position.step, position.total_steps, cfg.schedule))
        losses, num_losses = learn(policy, loop.optimizer, rollout, cfg, loop.ctx.device)
        if policy.normalize:
            policy.observe(rollout.observations[:-1][rollout.valid].to(loop.ctx.device))
        num_env_steps = int(rollout.valid.sum())
        loop.history.env_steps += num_env_steps
        loop.meter.add(
            losses=losses,
            num_losses=num_losses,
            return_sum=float(rollout.returns.sum()),
            num_episodes=len(rollout.returns),
            num_env_steps=num_env_steps,
        )
        yield


def interval_metrics(loop: RlLoop) -> dict[str, float]:
    """Return the training metrics since the last logged step."""
    sums = loop.meter.sums
    policy_loss, value_loss, entropy, divergence = (sums["losses"] / sums["num_losses"]).tolist()
    metrics = {
        "train/policy_loss": policy_loss,
        "train/value_loss": value_loss,
        "train/entropy": entropy,
        "train/kl": divergence,
        "train/lr": loop.optimizer.param_groups[0]["lr"],
        "train/env_steps": loop.history.env_steps,
        "train/env_steps_per_s": sums["num_env_steps"] / loop.meter.elapsed_s,
        "samples": loop.history.env_steps,
    }
    if sums["num_episodes"]:
        metrics["train/return"] = sums["return_sum"] / sums["num_episodes"]
    return metrics


def evaluate(loop: RlLoop) -> dict[str, float]:
    """Play full greedy episodes at the agent, from other initial states at each evaluation."""
    policy, history = loop.policy, loop.history
    loop.test_envs.begin(random_numbers(loop.cfg.seed, 1, 1 + loop.position.step))
    actor = Actor(policy.actor_state(), policy.activation)
    returns = greedy_returns(loop.problem, loop.test_envs, actor, loop.ctx.alive)
    mean = float(returns.mean())
    history.last_returns = returns.tolist()
    history.evaluations.append((history.env_steps, mean, float(returns.min()), float(returns.max())))
    loop.ctx.figure("returns", returns_curves(loop.problem.name, history.evaluations))
    loop.ctx.figure("returns_of_last_evaluation", returns_histogram(history.last_returns))
    return {
        "eval/return": mean,
        "eval/return_std": float(returns.std()),
        "eval/after_s": time.perf_counter() - loop.began,
    }


def save(loop: RlLoop, metrics: Mapping[str, float]) -> None:
    """Save, with the observers between two rollouts; rollouts collected ahead are part of the checkpoint."""
    received = loop.observers.wait()
    loop.group.order("save", loop.position.step)
    loop.ctx.save(
        loop.position.step,
        model=loop.policy,
        trainer={
            "optimizer": loop.optimizer.state_dict(),
            "position": asdict(loop.position),
            "meter": loop.meter.sums,
            "history": asdict(loop.history),
            "pending": [list(rollout) for rollout in received],
            "num_collectors": loop.observers.num_collectors,
        },
        metrics=metrics,
    )
