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

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import cast

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.data.loading import digest_of
from hpcdist.errors import ConfigError
from hpcdist.rank.context import Context
from hpcdist.rank.rpc import rpc_group
from hpcdist.rank.training_loop import Meter, Progress, build_optimizer, lr_factor, set_lr
from hpcdist.review.figures import MAX_POINTS, Curves, Histogram, histogram
from hpcdist.trainers.rl import RlConfig
from hpcdist.trainers.rl.environments import Environments, Problem, greedy_returns, make_environments
from hpcdist.trainers.rl.observers import ObserverGroup, Rollout, num_collectors_of, random_numbers, serve_rollouts
from hpcdist.trainers.rl.policy import Actor, Floats, Policy, log_prob

#: Valid values of `checkpoint.monitor`.
EVAL_METRICS = ("eval/return", "eval/return_std")


@dataclass
class History:
    """Samples and evaluations so far; part of the checkpoint."""

    env_steps: int = 0  #: transitions learned from, of all observers
    #: (env_steps, mean return, smallest return, largest return) of each evaluation
    evaluations: list[tuple[int, float, float, float]] = field(default_factory=list)
    last_returns: list[float] = field(default_factory=list)  #: of the episodes of the last evaluation


def train(ctx: Context, cfg: Config) -> None:
    """Train until solved or stopped, evaluate after each epoch, save checkpoints and export the final policy."""
    if (best := cfg.checkpoint.monitor) not in EVAL_METRICS:
        raise ConfigError([f"checkpoint.monitor={best!r} is not measured: use one of {', '.join(EVAL_METRICS)}"])
    rl = cfg.section(RlConfig)
    problem = Problem.of(rl.env_id, rl.env_kwargs, rl.max_episode_steps)
    if ctx.role == "observer":
        serve_rollouts(ctx, cfg, problem)
    else:
        train_policy(ctx, cfg, problem)


def train_policy(ctx: Context, cfg: Config, problem: Problem) -> None:
    """Train as the agent, and export the final policy."""
    rl = cfg.section(RlConfig)
    policy = build_policy(problem, rl).to(ctx.device)
    optimizer = build_optimizer(policy.parameters(), cfg.optim)
    digest = digest_of(problem.name, problem.options, gymnasium.__version__)
    ctx.log_dataset(rl.env_id, split="environment", digest=digest, source="gymnasium")
    ctx.log_model_size(sum(parameter.numel() for parameter in policy.parameters()))
    saved = ctx.restore()  # the newest valid checkpoint, None at the first start
    pending, history, goal = [], History(), None
    if saved is not None:
        policy.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.trainer["optimizer"])
        pending = [Rollout(*tensors) for tensors in saved.trainer["pending"]]
        history = History(**saved.trainer["history"])
    if problem.reward_threshold is not None and cfg.checkpoint.monitor == "eval/return":
        goal = problem.reward_threshold, f"solved: {problem.name}'s reward_threshold"
    with rpc_group(ctx, {}) as group:
        ctx.agree_among([0])  # observers count no steps
        observers = ObserverGroup(group, cfg, num_collectors_of(saved, ctx.roles.count("observer")), pending)
        test_envs = make_environments(problem, rl.num_eval_episodes, random_numbers(cfg.seed, 1, 0))
        progress = Progress(cfg, rl.updates_per_epoch, saved.trainer["position"] if saved else None, goal=goal)
        meter = Meter(saved.trainer["meter"] if saved else None, ctx.device)
        began = time.perf_counter()

        def save(metrics: Mapping[str, float]) -> None:
            """Save, with the observers between two rollouts; rollouts collected ahead are part of the checkpoint."""
            received = observers.wait()
            group.order("save", progress.step)
            state = {
                "optimizer": optimizer.state_dict(),
                "position": progress.state_dict(),
                "meter": meter.state_dict(),
                "history": asdict(history),
                "pending": [list(rollout) for rollout in received],
                "num_collectors": observers.num_collectors,
            }
            ctx.save(progress.step, model=policy, trainer=state, metrics=metrics)

        ctx.training_begins()  # the time until here counts as start-up
        while not progress.end_reason:  # solved, or a stop rule of the config applies; known after an evaluation
            for _ in range(progress.steps_until_evaluation):
                if not observers.has_pending:
                    observers.request(progress.step, policy.actor_state())
                rollout = observers.take()
                if rl.mode == "async":
                    observers.request(progress.step + 1, policy.actor_state())
                set_lr(optimizer, cfg.optim.lr * lr_factor(progress.step, progress.total_steps, cfg.schedule))
                losses, num_losses = learn(policy, optimizer, rollout, cfg, ctx.device)
                if policy.normalize:
                    policy.observe(rollout.observations[:-1][rollout.valid].to(ctx.device))
                num_env_steps = int(rollout.valid.sum())
                history.env_steps += num_env_steps
                meter.add(losses=losses, num_losses=num_losses, num_env_steps=num_env_steps)
                meter.add(return_sum=float(rollout.returns.sum()), num_episodes=len(rollout.returns))
                progress.count_step()
                if progress.log_is_due:
                    ctx.log(interval_metrics(optimizer, history, meter), progress.step)
                    meter.reset()
                if ctx.should_stop(progress.step, progress.total_steps):
                    save({})
                    return
                # Before an evaluation no checkpoint is saved, as one with its metrics follows.
                if ctx.should_save(progress.step) and progress.steps_until_evaluation > 0:
                    save({})
            with meter.paused():
                with ctx.evaluating():
                    rng = random_numbers(cfg.seed, 1, 1 + progress.step)
                    metrics = evaluate(ctx, problem, policy, test_envs, rng, history)
                    metrics["eval/after_s"] = time.perf_counter() - began
                ctx.log(metrics, progress.step)
                progress.end_epoch(metrics)
                save(metrics)
        ctx.end_reason = f"{progress.end_reason}, {history.env_steps} environment steps"
        ctx.export_model(policy, torch.zeros(2, problem.num_inputs))


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


def interval_metrics(optimizer: torch.optim.Optimizer, history: History, meter: Meter) -> dict[str, float]:
    """Return the training metrics since the last logged step."""
    sums = meter.sums
    policy_loss, value_loss, entropy, divergence = (sums["losses"] / sums["num_losses"]).tolist()
    metrics = {
        "train/policy_loss": policy_loss,
        "train/value_loss": value_loss,
        "train/entropy": entropy,
        "train/kl": divergence,
        "train/lr": optimizer.param_groups[0]["lr"],
        "train/env_steps": history.env_steps,
        "train/env_steps_per_s": sums["num_env_steps"] / meter.elapsed_s,
        "samples": history.env_steps,
    }
    if sums["num_episodes"]:
        metrics["train/return"] = sums["return_sum"] / sums["num_episodes"]
    return metrics


def evaluate(
    ctx: Context,
    problem: Problem,
    policy: Policy,
    envs: Environments,
    rng: np.random.Generator,
    history: History,
) -> dict[str, float]:
    """Play full greedy episodes at the agent; `rng` draws their initial states. Adds the returns to `history`."""
    envs.begin(rng)
    returns = greedy_returns(problem, envs, Actor(policy.actor_state(), policy.activation), ctx.alive)
    mean = float(returns.mean())
    history.last_returns = returns.tolist()
    history.evaluations.append((history.env_steps, mean, float(returns.min()), float(returns.max())))
    ctx.figure("returns", returns_curves(problem.name, history.evaluations))
    ctx.figure("returns_of_last_evaluation", returns_histogram(history.last_returns))
    return {"eval/return": mean, "eval/return_std": float(returns.std())}


# Proximal policy optimisation (https://arxiv.org/abs/1707.06347) with generalised advantage estimation.


def learn(
    policy: Policy, optimizer: torch.optim.Optimizer, rollout: Rollout, cfg: Config, device: torch.device
) -> tuple[Tensor, int]:
    """Update the policy by PPO's clipped surrogate objective; one epoch of one minibatch is A2C.

    Returns:
        Sums over optimizer steps of policy loss, value loss, entropy and KL divergence from the policy that acted, [4]
        on `device`, and the number of optimizer steps.
    """
    rl = cfg.section(RlConfig)
    with torch.no_grad():
        values = policy.value(rollout.observations.to(device)).cpu()
    gains = torch.from_numpy(advantages(rollout, values.numpy(), rl.gamma, rl.gae_lambda))
    valid = rollout.valid
    gains, values = gains[valid], values[:-1][valid]
    targets = (gains + values).to(device)
    gains = ((gains - gains.mean()) / (gains.std(correction=0) + 1e-8)).to(device)
    further = (rollout.observations[:-1][valid], rollout.actions[valid], rollout.log_probs[valid])
    data = (gains, targets, *(tensor.to(device) for tensor in further))
    parameters = list(policy.parameters())
    sums, num_steps = torch.zeros(4, device=device), 0
    for _ in range(rl.update_epochs):
        order = torch.randperm(len(gains)).to(
            device
        )  # drawn on the CPU, so that it does not depend on the kind of device
        for gain, target, observations, actions, acted in zip(
            *(tensor[order].chunk(rl.num_minibatches) for tensor in data), strict=True
        ):
            outputs, estimates = policy.both(observations)
            log_probs, entropies = log_prob(outputs, actions, policy.log_std)
            change = log_probs - acted
            ratio = change.exp()
            policy_loss = -torch.minimum(ratio * gain, ratio.clamp(1 - rl.clip_range, 1 + rl.clip_range) * gain).mean()
            value_loss = nn.functional.mse_loss(estimates, target)
            entropy = entropies.mean()
            optimizer.zero_grad()
            (policy_loss + rl.value_coef * value_loss - rl.entropy_coef * entropy).backward()
            if cfg.optim.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, cfg.optim.max_grad_norm)
            optimizer.step()
            sums += torch.stack((policy_loss, value_loss, entropy, -change.mean())).detach()
            num_steps += 1
    return sums, num_steps


def advantages(rollout: Rollout, values: Floats, discount: float, gae_lambda: float) -> Floats:
    """Return the advantage of each action [T, n] by generalised advantage estimation.

    The value after the end of a terminated episode is zero, after a truncated one that of its last observation. Sums
    do not cross the end of an episode. The result of a step that is not valid is undefined.

    Args:
        values: of all observations, [T + 1, n].
    """
    rewards, terminated = rollout.rewards.numpy(), rollout.terminated.numpy()
    delta = rewards + discount * values[1:] * ~terminated - values[:-1]
    carries = np.float32(discount * gae_lambda) * ~(terminated | rollout.truncated.numpy())
    for t in range(len(delta) - 2, -1, -1):
        delta[t] += carries[t] * delta[t + 1]
    return cast(Floats, delta)


# Figures of trainer `rl` in the report of a run.


def returns_curves(environment: str, evaluations: Sequence[tuple[int, float, float, float]]) -> Curves:
    """Return the returns of all evaluations; of many, every n-th and the last one.

    Args:
        evaluations: environment steps and mean, smallest and largest return of each evaluation.
    """
    every = -(-len(evaluations) // (MAX_POINTS - 1)) or 1
    shown = [*evaluations[:-1:every], *evaluations[-1:]]
    names = ("mean", "smallest", "largest")
    return Curves(
        title=f"returns of greedy episodes of {environment}",
        x_label="environment steps",
        y_label="return",
        lines={name: [[float(one[0]), float(one[index])] for one in shown] for index, name in enumerate(names, 1)},
    )


def returns_histogram(returns: Sequence[float]) -> Histogram:
    """Return the distribution of the returns of the last evaluation."""
    return histogram("returns of the last evaluation", returns, x_label="return", y_label="episodes")
