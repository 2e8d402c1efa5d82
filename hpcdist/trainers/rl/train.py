"""Reinforcement learning with an agent and observers: proximal policy optimization on gymnasium environments.

Observers step the environments of their collectors and record rollouts. The agent, rank 0, learns from one rollout of
each collector and evaluates the policy over full greedy episodes. At the first start each observer has one collector; a
resume with fewer observers gives some of them several, and the result stays the same.

In `mode: sync` update k learns from rollouts of weights k, and observers are idle meanwhile. In `mode: async` observers
collect with weights k the rollouts of update k + 1. So every update but the first learns from rollouts of the weights
before the last update: the lag is fixed, and a seed determines the result in both modes. In async mode the policy that
learns is not the one that acted: PPO's probability ratio corrects for that, at the price of somewhat more samples.

Observers infer with a copy of the weights in NumPy. Measured on CartPole (2 observers on 2 cores), that is several
times faster than an RPC to the agent for each step.

Sources: https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html (agent and observers),
https://arxiv.org/abs/1707.06347 (PPO), https://arxiv.org/abs/1506.02438 (GAE).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from hpcdist.config.schema import Config
from hpcdist.data.datasets import digest_of
from hpcdist.rank.context import Context, Restored
from hpcdist.rank.rpc import RpcGroup, rpc_group
from hpcdist.rank.training_loop import Meter, Progress, build_optimizer, lr_factor, set_lr
from hpcdist.run.figures import MAX_POINTS, Curves, histogram
from hpcdist.trainers.rl import RlConfig
from hpcdist.trainers.rl.environments import Environments, Problem, greedy_returns, make_environments
from hpcdist.trainers.rl.observers import ObserverGroup, Rollout, num_collectors_of, serve_rollouts
from hpcdist.trainers.rl.policy import Actor, Floats, Policy, log_prob

#: Second part of the seed of the evaluation's environments, where seeds of collectors have 0. The third part is 0 when
#: the environments are made, and 1 + step at an evaluation.
EVALUATION = 1
#: Arguments of an environment in its digest: none, since `rl` has no key for them. Earlier versions had one, and the
#: digest of an environment without arguments must stay the same.
NO_OPTIONS: dict[str, Any] = {}
#: PPO clips the probability ratio of an action to 1 plus and minus this value (arXiv:1707.06347, section 6.1).
CLIP_RANGE = 0.2
#: Lambda of generalised advantage estimation: 1 is the Monte Carlo return, 0 the one-step TD error (arXiv:1506.02438
#: finds the best values between 0.9 and 0.99).
GAE_LAMBDA = 0.95
#: Weight of the value loss. Policy and values have separate networks, so it only scales the steps of the latter.
VALUE_COEF = 0.5
#: Divides advantages together with their standard deviation, which may be 0.
ADVANTAGE_EPS = 1e-8
#: Of one evaluation: environment steps before it; mean, smallest and largest return.
Evaluation: TypeAlias = tuple[int, float, float, float]


def train(ctx: Context, cfg: Config) -> None:
    """Train until solved or stopped, evaluate after each epoch, save checkpoints and export the final policy."""
    rl = cfg.section(RlConfig)
    problem = Problem.of(rl.env_id)  # the environment's spaces
    if ctx.roles.own == "observer":
        serve_rollouts(ctx, cfg, problem)
        return
    policy = Policy(rl, problem.num_inputs, problem.num_outputs, is_discrete=problem.is_discrete).to(ctx.device)
    version = ""  # of another package it is not known, and code of the user has a commit
    if problem.source == "gymnasium":
        version = gymnasium.__version__
    digest = digest_of(problem.name, NO_OPTIONS, version)
    # In MLflow the environment takes the place of a dataset.
    ctx.report.log_dataset(problem.name, split="environment", digest=digest, source=problem.source)
    ctx.report.log_model_size(sum(parameter.numel() for parameter in policy.parameters()))
    saved = ctx.restore()  # the newest valid checkpoint, None at the first start; restores random number generators
    ctx.init_from(policy)  # without a checkpoint: the weights of `model.init_from`; observers get them from the agent
    with rpc_group(ctx, {}) as rpc:
        ctx.roles.agree_among([0])  # rank 0 decides on stops and saves; observers call this in `serve_rollouts`
        agent = open_agent(ctx, cfg, problem, policy, rpc, saved)
        train_policy(ctx, cfg, agent)
    # After the end of RPC, until which the observers stay.
    if ctx.end_reason:  # empty after a stop
        ctx.export_model(policy, torch.zeros(2, problem.num_inputs))


def train_policy(ctx: Context, cfg: Config, agent: "Agent") -> None:
    """Train as the agent until a stop rule of the config applies, which becomes `ctx.end_reason`, or a stop."""
    policy, optimizer, observers = agent.policy, agent.optimizer, agent.observers
    progress, meter = agent.progress, agent.meter
    steps = ctx.steps(progress.total_steps, save=partial(save_step, ctx, agent))
    ctx.timer.training_begins()  # the time until here counts as start-up

    while not progress.end_reason:  # until solved, or a stop rule of the config applies, known after an evaluation
        for step in progress.until_evaluation(steps):
            rollout = observers.next_rollout(step, policy.actor_state())
            set_lr(optimizer, cfg.optim.lr * lr_factor(step, progress.total_steps, cfg.schedule))
            sums = train_step(policy, optimizer, rollout, cfg, ctx.device)
            meter.add(**sums)
            progress.add_samples(sums["num_env_steps"])  # transitions learned from, of all observers
            if steps.log_is_due:
                ctx.log(interval_metrics(optimizer, progress, meter))
                meter.reset()
        if steps.is_stopped:  # its last step is saved
            return
        with meter.paused():
            with ctx.timer.evaluating():  # its time counts apart from training
                metrics = evaluate(ctx, cfg, agent)
            progress.end_epoch(metrics)
            steps.save(metrics)

    ctx.end_reason = f"{progress.end_reason}, {progress.samples} environment steps"


def save_step(ctx: Context, agent: "Agent", step: int, metrics: Mapping[str, float]) -> None:
    """Save on all ranks, with the observers between two rollouts, and with the rollouts collected ahead."""
    pending = agent.observers.wait()
    agent.rpc.send_command("save", step)  # observers call `ctx.save` as well, which gathers from all ranks
    state = {
        "optimizer": agent.optimizer.state_dict(),
        "position": agent.progress.state_dict(),
        "meter": agent.meter.state_dict(),
        "evaluations": agent.history,
        "pending": [list(rollout) for rollout in pending],
        "num_collectors": agent.observers.num_collectors,
    }
    ctx.save(step, model=agent.policy, trainer=state, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class Agent:
    """The agent: its policy, what trains and evaluates it, and how far."""

    problem: Problem
    policy: Policy
    optimizer: torch.optim.Optimizer
    rpc: RpcGroup
    observers: ObserverGroup
    test_envs: Environments
    progress: Progress  #: updates and evaluations done so far
    meter: Meter  #: sums for the metrics since the last logged update
    history: list[Evaluation]  #: evaluations so far


def open_agent(
    ctx: Context, cfg: Config, problem: Problem, policy: Policy, rpc: RpcGroup, saved: Restored | None
) -> Agent:
    """Build the agent around its policy, and load the newest checkpoint."""
    optimizer = build_optimizer(policy.parameters(), cfg.optim)
    state: Mapping[str, Any] = {}
    if saved is not None:
        policy.load_state_dict(saved.model)
        state = saved.trainer
        optimizer.load_state_dict(state["optimizer"])
    pending = [Rollout(*tensors) for tensors in state.get("pending", [])]  # of each collector, for the next update
    num_collectors = num_collectors_of(saved, ctx.roles.count("observer"))
    observers = ObserverGroup(rpc, cfg, num_collectors, pending)
    rl = cfg.section(RlConfig)
    test_rng = np.random.default_rng([cfg.seed, EVALUATION, 0])
    test_envs = make_environments(problem, rl.num_eval_episodes, test_rng)
    goal = None  # the return at which training ends, and why
    if problem.reward_threshold is not None and cfg.checkpoint.monitor == "eval/return":
        goal = problem.reward_threshold, f"solved: {problem.name}'s reward_threshold"
    return Agent(
        problem=problem,
        policy=policy,
        optimizer=optimizer,
        rpc=rpc,
        observers=observers,
        test_envs=test_envs,
        progress=Progress(cfg, rl.updates_per_epoch, state.get("position"), goal=goal),
        meter=Meter(state.get("meter"), ctx.device),
        history=state.get("evaluations", []),
    )


def train_step(
    policy: Policy, optimizer: torch.optim.Optimizer, rollout: Rollout, cfg: Config, device: torch.device
) -> dict[str, Any]:
    """Update the policy by PPO's clipped surrogate objective; one epoch of one minibatch is A2C.

    Returns sums for the metrics. `losses` are sums over minibatches, on `device`: of policy loss, value loss, entropy
    and KL divergence from the policy that acted.
    """
    rl = cfg.section(RlConfig)
    samples = learning_samples(policy, rollout, rl.gamma, device)
    num_samples = len(samples[0])
    losses = torch.zeros(4, device=device)
    num_minibatches = 0
    for _ in range(rl.update_epochs):
        # Drawn on the CPU, so that it does not depend on the kind of device.
        permutation = torch.randperm(num_samples).to(device)
        minibatches = zip(*(tensor[permutation].chunk(rl.num_minibatches) for tensor in samples), strict=True)
        for advantage, value_target, observations, actions, old_log_prob in minibatches:
            outputs, value = policy.outputs_and_values(observations)
            new_log_prob, entropies = log_prob(outputs, actions, policy.log_std)
            log_ratio = new_log_prob - old_log_prob
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
            policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            value_loss = nn.functional.mse_loss(value, value_target)
            entropy = entropies.mean()
            kl = -log_ratio.mean()
            loss = policy_loss + VALUE_COEF * value_loss - rl.entropy_coef * entropy
            optimizer.zero_grad()
            loss.backward()
            if cfg.optim.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(policy.parameters(), cfg.optim.max_grad_norm)
            optimizer.step()
            losses += torch.stack((policy_loss, value_loss, entropy, kl)).detach()
            num_minibatches += 1
    return {
        "losses": losses,
        "num_minibatches": num_minibatches,
        "num_env_steps": num_samples,
        "return_sum": float(rollout.returns.sum()),
        "num_episodes": len(rollout.returns),
    }


def learning_samples(
    policy: Policy, rollout: Rollout, gamma: float, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return advantages, value targets, observations, actions and their log-probabilities, on `device`.

    Each has an element for each valid step; the advantages have mean 0 and standard deviation 1.
    """
    valid = rollout.valid  # [T, n]; False where a step only begins an episode
    with torch.no_grad():
        all_values = policy.value(rollout.observations.to(device)).cpu()
    all_advantages = gae(rollout, all_values.numpy(), gamma)
    advantages = torch.from_numpy(all_advantages)[valid]
    value_targets = advantages + all_values[:-1][valid]
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + ADVANTAGE_EPS)
    return (
        advantages.to(device),
        value_targets.to(device),
        rollout.observations[:-1][valid].to(device),
        rollout.actions[valid].to(device),
        rollout.log_probs[valid].to(device),
    )


def gae(rollout: Rollout, values: Floats, gamma: float) -> Floats:
    """Return advantages [T, n] by generalised advantage estimation from `values` [T + 1, n].

    The advantages of steps that are not valid are arbitrary: leave them out. The value after the end of a terminated
    episode is zero, after a truncated one it is the value of its last observation. Sums do not cross the end of an
    episode.
    """
    rewards = rollout.rewards.numpy()
    terminated = rollout.terminated.numpy()
    has_ended = terminated | rollout.truncated.numpy()
    advantages = rewards + gamma * values[1:] * ~terminated - values[:-1]  # the TD errors
    factors = np.float32(gamma * GAE_LAMBDA) * ~has_ended
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t] += factors[t] * advantages[t + 1]
    return cast(Floats, advantages)


def interval_metrics(optimizer: torch.optim.Optimizer, progress: Progress, meter: Meter) -> dict[str, float]:
    """Return the training metrics since the last logged step."""
    sums = meter.sums
    policy_loss, value_loss, entropy, kl = (sums["losses"] / sums["num_minibatches"]).tolist()
    metrics = {
        "train/policy_loss": policy_loss,
        "train/value_loss": value_loss,
        "train/entropy": entropy,
        "train/kl": kl,
        "train/lr": optimizer.param_groups[0]["lr"],
        "train/env_steps": progress.samples,
        "train/env_steps_per_s": sums["num_env_steps"] / meter.elapsed_s,
        "samples": progress.samples,
    }
    if sums["num_episodes"]:
        metrics["train/return"] = sums["return_sum"] / sums["num_episodes"]
    return metrics


def evaluate(ctx: Context, cfg: Config, agent: Agent) -> dict[str, float]:
    """Play full greedy episodes. Their initial states follow from the step. Adds the returns to the history."""
    problem, policy = agent.problem, agent.policy
    rng = np.random.default_rng([cfg.seed, EVALUATION, 1 + agent.progress.step])
    agent.test_envs.begin(rng)
    actor = Actor(policy.actor_state(), policy.activation)
    returns = greedy_returns(problem, agent.test_envs, actor, ctx.timer.alive)
    mean = float(returns.mean())
    agent.history.append((agent.progress.samples, mean, float(returns.min()), float(returns.max())))
    ctx.report.figure("returns", returns_curves(problem.name, agent.history))
    last = histogram("returns of the last evaluation", returns.tolist(), x_label="return", y_label="episodes")
    ctx.report.figure("returns_of_last_evaluation", last)
    return {"eval/return": mean, "eval/return_std": float(returns.std())}


def returns_curves(environment: str, evaluations: Sequence[Evaluation]) -> Curves:
    """Return a figure of the evaluations; of many, every n-th and the last one."""
    every = max(1, math.ceil(len(evaluations) / (MAX_POINTS - 1)))
    shown = [*evaluations[:-1:every], *evaluations[-1:]]
    lines: dict[str, list[list[float]]] = {"mean": [], "smallest": [], "largest": []}
    for num_env_steps, mean, smallest, largest in shown:
        lines["mean"].append([float(num_env_steps), mean])
        lines["smallest"].append([float(num_env_steps), smallest])
        lines["largest"].append([float(num_env_steps), largest])
    return Curves(
        title=f"returns of greedy episodes of {environment}",
        x_label="environment steps",
        y_label="return",
        lines=lines,
    )
