"""Reinforcement learning with an agent and observers: proximal policy optimisation on gymnasium environments.

Observers step their environments and record rollouts; the agent, rank 0, learns from one rollout of each and evaluates
the policy over full greedy episodes. In `mode: sync` update k learns from rollouts of weights k, and observers idle
meanwhile. In `mode: async` they collect with weights k what update k + 1 learns from. That is always one update of
staleness, never more, so the same seed gives the same weights in both; what async gives up is that the policy which
learns is the one that acted; PPO's probability ratio corrects for that, at the cost of some more samples.

Where to infer was measured (CartPole, 2 observers on 2 cores): a copy of the weights in each observer, applied in
NumPy, is several times faster than asking the agent at each step, for networks of this size.

Sources: https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html (agent and observers),
https://arxiv.org/abs/1707.06347 (PPO), https://arxiv.org/abs/1506.02438 (GAE).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import gymnasium
import torch
from torch import Tensor
from torch.distributed import rpc

from hpcdist.config.schema import Config
from hpcdist.errors import ConfigError, PeerLost, RemoteError
from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import RpcGroup, remote, rpc_group
from hpcdist.rank.optimizer import build_optimizer, lr_factor
from hpcdist.rank.telemetry.step_timing import StepTimer
from hpcdist.rank.training_position import Position
from hpcdist.run.folder import write_atomic
from hpcdist.trainers.rl.environments import Environments, Floats, Problem, make_environments
from hpcdist.trainers.rl.episodes import greedy_gif, greedy_returns, returns_plot
from hpcdist.trainers.rl.policy import Actor, Policy
from hpcdist.trainers.rl.ppo import learn
from hpcdist.trainers.rl.rollouts import Collector, Rollout, random_numbers
from hpcdist.trainers.rl.schema import RlConfig

log = logging.getLogger(__name__)
#: What `checkpoint.monitor` may name.
MEASURED = ("eval/return", "eval/return_std")


# --- the observer


_collector: Collector | None = None
_timer: StepTimer | None = None
_inference: Inference | None = None


@remote
def collect(index: int, number: int, rl: RlConfig, weights: dict[str, Tensor], timeout_s: float) -> Rollout:
    """On an observer: collect a rollout, with these weights or by asking the agent at each step.

    Args:
        weights: the policy's `actor_state`; of it only `log_std`, if there is one, where the agent is asked.
    """
    assert _collector is not None
    assert _timer is not None
    is_local = rl.inference == "local"
    infer = Actor(weights, rl.activation) if is_local else functools.partial(_ask_agent, index, timeout_s)
    began = time.perf_counter()
    rollout = _collector.collect(number, rl.num_rollout_steps, infer, weights.get("log_std"))
    if is_local:  # else the agent's answers, which are the same for all, are most of it
        _timer.add(compute_s=time.perf_counter() - began)
    return rollout


def _ask_agent(index: int, timeout_s: float, observations: Floats) -> Floats:
    arguments = (index, torch.from_numpy(observations))
    outputs: Floats = rpc.rpc_sync("agent:0", answer, arguments, timeout=timeout_s).numpy()
    return outputs


# --- the agent


class Inference:
    """Answers the observers' steps: one forward pass once all of them have asked, in the order of the observers."""

    def __init__(self, policy: Policy, device: torch.device, num_observers: int) -> None:
        self._policy, self._device, self._num_observers = policy, device, num_observers
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[Tensor, torch.futures.Future[Tensor]]] = {}

    @torch.no_grad()
    def answer(self, index: int, observations: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        with self._lock:
            self._asked[index] = observations, future
            if len(self._asked) < self._num_observers:
                return future
            asked, self._asked = [self._asked[key] for key in sorted(self._asked)], {}
        outputs = self._policy(torch.cat([tensor for tensor, _ in asked]).to(self._device)).cpu()
        for (_, waiting), part in zip(asked, outputs.split([len(tensor) for tensor, _ in asked]), strict=True):
            waiting.set_result(part)
        return future


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
@remote
def answer(index: int, observations: Tensor) -> torch.futures.Future[Tensor]:
    """On the agent: the policy's outputs [n, num_outputs] for one step of one observer."""
    assert _inference is not None
    return _inference.answer(index, observations)


@dataclass
class Course(Position):
    """How far training is, and what it has come by."""

    env_steps: int = 0  #: transitions learnt from, by all observers
    #: env_steps, and mean, smallest and greatest return, of each evaluation
    history: list[tuple[int, float, float, float]] = field(default_factory=list)
    last_returns: list[float] = field(default_factory=list)  #: of the last evaluation's episodes


@dataclass
class Meter:
    """What happened since the last logged point."""

    losses: Tensor  #: sums of policy loss, value loss, entropy, divergence over optimizer steps
    num_losses: int = 0
    return_sum: float = 0.0
    num_episodes: int = 0
    num_steps: int = 0


@dataclass
class Agent:
    """What the agent holds."""

    ctx: Context
    cfg: Config
    problem: Problem
    policy: Policy
    optimizer: torch.optim.Optimizer
    at: Course
    meter: Meter
    total_steps: int
    test_envs: Environments
    group: RpcGroup | None = None
    #: Rollouts of the next update, on their way or here (`async`, or from a checkpoint).
    pending: Sequence[torch.futures.Future[Rollout] | Rollout] = ()
    began: float = 0.0  #: when this attempt began to train, evaluations included
    since: float = 0.0  #: when the last point was logged


def train(ctx: Context, cfg: Config) -> None:
    """Train until solved or told to end, evaluate after each epoch, and leave checkpoints and the final policy."""
    global _collector, _inference, _timer
    if (best := cfg.checkpoint.monitor) not in MEASURED:
        raise ConfigError([f"checkpoint.monitor={best!r} is not measured: use one of {', '.join(MEASURED)}"])
    problem = Problem.of(
        cfg.section(RlConfig).env_id, cfg.section(RlConfig).env_kwargs, cfg.section(RlConfig).max_episode_steps
    )
    if ctx.role == "observer":
        _timer = ctx.timer
        _collector = collector = Collector(problem, cfg.section(RlConfig).num_envs, seed=cfg.seed, index=ctx.role_index)
        saved = ctx.restore()
        if saved is not None and saved.local is not None:
            collector.load_state(saved.local)

        def save(step: int) -> None:
            ctx.save(step, model=None, trainer={}, local=collector.state())

        with rpc_group(ctx) as group:
            ctx.agree_among([0])
            group.serve({"save": save})
        return
    agent = _set_up(ctx, cfg, problem)
    _inference = Inference(agent.policy, ctx.device, ctx.roles.count("observer"))
    with rpc_group(ctx) as agent.group:
        ctx.agree_among([0])
        _lead(agent)


def _lead(agent: Agent) -> None:
    ctx = agent.ctx
    agent.began = agent.since = time.perf_counter()
    while not (reason := _end_reason(agent)):
        if not _train_epoch(agent):
            return  # stopped, and saved
        _save(agent, _evaluate(agent))
    ctx.end_reason = reason
    if agent.cfg.section(RlConfig).record_episode:
        _record(agent)
    example = torch.zeros(2, agent.problem.num_inputs)
    ctx.export_model(agent.policy, example)


def build_policy(problem: Problem, cfg: RlConfig) -> Policy:
    """Freshly initialised from torch's global generator."""
    return Policy(
        num_inputs=problem.num_inputs,
        num_outputs=problem.num_outputs,
        hidden=cfg.hidden_sizes,
        is_discrete=problem.is_discrete,
        activation=cfg.activation,
        normalize=cfg.normalize_observations,
    )


def _set_up(ctx: Context, cfg: Config, problem: Problem) -> Agent:
    policy = build_policy(problem, cfg.section(RlConfig)).to(ctx.device)
    at, meter = (
        Course(steps_per_epoch=cfg.section(RlConfig).updates_per_epoch),
        Meter(torch.zeros(4, device=ctx.device)),
    )
    optimizer = build_optimizer(policy.parameters(), cfg.optim)
    pending: list[Rollout] = []
    test_envs = make_environments(problem, cfg.section(RlConfig).num_eval_episodes, random_numbers(cfg.seed, 1, 0))
    if (saved := ctx.restore()) is not None:
        policy.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.trainer["optimizer"])
        at = Course(**saved.trainer["position"])
        at.rescale(cfg.section(RlConfig).updates_per_epoch)
        meter = Meter(**saved.trainer["meter"])
        meter.losses = meter.losses.to(ctx.device)
        pending = [Rollout(*parts) for parts in saved.trainer["pending"]]
    return Agent(
        ctx=ctx,
        cfg=cfg,
        problem=problem,
        policy=policy,
        optimizer=optimizer,
        at=at,
        meter=meter,
        total_steps=at.total_steps(cfg.stop),
        test_envs=test_envs,
        pending=pending,
    )


# --- one epoch, one update


def _train_epoch(agent: Agent) -> bool:
    """Do what is left of the epoch; False when a stop was agreed, with everything saved."""
    ctx, at, cfg = agent.ctx, agent.at, agent.cfg
    while at.step < agent.total_steps and at.step_in_epoch < at.steps_per_epoch:
        _update(agent)
        at.count_step()
        if at.step % cfg.tracking.log_every_steps == 0:
            _log(agent)
        stop = ctx.should_stop(at.step, agent.total_steps)
        # A save before an evaluation waits for it, unless the ranks leave before.
        if ctx.should_save(at.step) and (stop or not at.before_evaluation(agent.total_steps)):
            _save(agent, {})
        if stop:
            return False
    at.close_epoch()
    return True


def _update(agent: Agent) -> None:
    """Learn from one rollout of every observer."""
    cfg, at, meter = agent.cfg, agent.at, agent.meter
    agent.pending = agent.pending or _request(agent, at.step)
    rollout = Rollout.join(_arrived(agent))
    agent.pending = _request(agent, at.step + 1) if cfg.section(RlConfig).mode == "async" else ()
    for group in agent.optimizer.param_groups:
        group["lr"] = cfg.optim.lr * lr_factor(at.step, agent.total_steps, cfg.schedule)
    losses, num_losses = learn(agent.policy, agent.optimizer, rollout, cfg, agent.ctx.device)
    if agent.policy.normalize:
        agent.policy.observe(rollout.observations[:-1][rollout.valid].to(agent.ctx.device))
    num_steps = int(rollout.valid.sum())
    at.env_steps += num_steps
    meter.losses += losses
    meter.num_losses += num_losses
    meter.return_sum += float(rollout.returns.sum())
    meter.num_episodes += len(rollout.returns)
    meter.num_steps += num_steps


def _request(agent: Agent, number: int) -> list[torch.futures.Future[Rollout]]:
    """Have every observer collect its rollout of this number with the weights as they are now."""
    assert agent.group is not None
    rl, weights = agent.cfg.section(RlConfig), agent.policy.actor_state()
    if rl.inference == "remote":
        weights = {name: value for name, value in weights.items() if name == "log_std"}
    # Longer than any rollout: it is the supervisor who finds a rank that hangs.
    timeout_s = agent.cfg.launch.hang_timeout_s
    return [
        rpc.rpc_async(name, collect, (index, number, rl, weights, timeout_s), timeout=timeout_s)
        for index, name in enumerate(agent.group.of_role("observer"))
    ]


def _arrived(agent: Agent) -> list[Rollout]:
    """The pending rollouts, once they are here. Raises PeerLost, or the error of the observer that failed."""
    assert agent.group is not None
    arrived: list[Rollout] = []
    for index, item in enumerate(agent.pending):
        if isinstance(item, Rollout):  # of a checkpoint, perhaps of another number of observers
            arrived.append(item)
            continue
        try:
            arrived.append(item.wait())
        except RuntimeError as error:
            if RemoteError.received(error) is not None:
                raise
            name = agent.group.of_role("observer")[index]
            raise PeerLost(f"{name} sent no rollout: {str(error).partition(chr(10))[0]}") from error
    return arrived


def _log(agent: Agent) -> None:
    """Record what happened since the last point."""
    meter, at, now = agent.meter, agent.at, time.perf_counter()
    policy_loss, value_loss, entropy, divergence = (meter.losses / meter.num_losses).tolist()
    metrics = {
        "train/policy_loss": policy_loss,
        "train/value_loss": value_loss,
        "train/entropy": entropy,
        "train/kl": divergence,
        "train/lr": agent.optimizer.param_groups[0]["lr"],
        "train/env_steps": at.env_steps,
        "train/env_steps_per_s": meter.num_steps / (now - agent.since),
    }
    if meter.num_episodes:
        metrics["train/return"] = meter.return_sum / meter.num_episodes
    agent.ctx.log(metrics, at.step)
    agent.meter = Meter(torch.zeros_like(meter.losses))
    agent.since = now


# --- evaluation and the end


def _evaluate(agent: Agent) -> dict[str, float]:
    """Full greedy episodes at the agent, from starts that are others each time."""
    ctx, cfg, at = agent.ctx, agent.cfg, agent.at
    began = time.perf_counter()
    agent.test_envs.begin(random_numbers(cfg.seed, 1, 1 + at.step))
    returns = greedy_returns(
        agent.problem, agent.test_envs, Actor(agent.policy.actor_state(), agent.policy.activation), ctx.alive
    )
    metrics = {
        "eval/return": float(returns.mean()),
        "eval/return_std": float(returns.std()),
        "eval/after_s": time.perf_counter() - agent.began,
    }
    ctx.log(metrics, at.step)
    at.last_returns = returns.tolist()
    at.history.append((at.env_steps, metrics["eval/return"], float(returns.min()), float(returns.max())))
    at.note_evaluation(metrics, cfg.checkpoint)
    agent.since += time.perf_counter() - began  # steps/s are those of training
    return metrics


def _end_reason(agent: Agent) -> str:
    """Why training is over, or nothing while it goes on."""
    cfg, at, problem = agent.cfg, agent.at, agent.problem
    goal = None
    if problem.reward_threshold is not None and cfg.checkpoint.monitor == "eval/return":
        goal = problem.reward_threshold, f"solved: {problem.name}'s reward_threshold"
    reason = at.end_reason(cfg.stop, cfg.checkpoint, agent.total_steps, goal=goal)
    return f"{reason}, {at.env_steps} environment steps" if reason else ""


def _record(agent: Agent) -> None:
    """Leave pictures of the last evaluation: returns over the run, and one episode where it can be drawn."""
    problem, ctx = agent.problem, agent.ctx
    write_atomic(ctx.artifact("returns.png"), returns_plot(problem, agent.at.history, agent.at.last_returns))
    try:
        gif = greedy_gif(problem, Actor(agent.policy.actor_state(), agent.policy.activation), seed=agent.cfg.seed)
    except (gymnasium.error.Error, ImportError) as error:
        log.warning("no episode.gif: %s cannot be drawn here: %s", problem.name, error)
    else:
        write_atomic(ctx.artifact("episode.gif"), gif)


# --- checkpoints


def _save(agent: Agent, metrics: dict[str, float]) -> None:
    """Save, with the observers between two rollouts; one that they collect ahead belongs to the checkpoint."""
    assert agent.group is not None
    agent.pending = arrived = _arrived(agent)
    agent.group.order("save", agent.at.step)
    agent.ctx.save(
        agent.at.step,
        model=agent.policy,
        trainer={
            "optimizer": agent.optimizer.state_dict(),
            "position": asdict(agent.at),
            "meter": vars(agent.meter),
            "pending": [list(rollout) for rollout in arrived],
        },
        metrics=metrics,
    )
