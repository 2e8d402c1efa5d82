"""Observers: ranks that step environments, and the agent's calls to them."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcdist.config.roles import share_of
from hpcdist.config.schema import Config
from hpcdist.rank.context import Context, Restored
from hpcdist.rank.rpc import RpcGroup, rpc_group
from hpcdist.trainers.rl import RlConfig
from hpcdist.trainers.rl.environments import Floats, Problem, make_environments
from hpcdist.trainers.rl.policy import Actor, log_prob

log = logging.getLogger(__name__)
#: The supervisor detects a hung rank, and names it, so many seconds before the agent's call to it fails.
HANG_MARGIN_S = 60
#: Second part of the seeds of collectors; `EVALUATION` in `train.py` is that of the agent's test environments.
_COLLECTION = 0
#: Smallest argument of a logarithm, since that of 0 is not finite.
_TINY = np.float32(1e-30)


class Rollout(NamedTuple):
    """T steps of n environments. Steps that only reset an environment have `valid` false: they are no transitions."""

    observations: Tensor  #: float [T + 1, n, num_inputs], including the one after the last step
    actions: Tensor  #: int64 [T, n], or float [T, n, num_outputs] in the unit box
    log_probs: Tensor  #: float [T, n], under the policy that acted
    rewards: Tensor  #: float [T, n]
    terminated: Tensor  #: bool [T, n]
    truncated: Tensor  #: bool [T, n]
    valid: Tensor  #: bool [T, n]
    returns: Tensor  #: float64 [episodes], full returns of the episodes that ended in this rollout

    @classmethod
    def join(cls, rollouts: Sequence["Rollout"]) -> Self:
        """Return one rollout of the environments of all."""
        joined = {}
        for name, parts in zip(cls._fields, zip(*rollouts, strict=True), strict=True):
            environment_axis = 1
            if name == "returns":  # which has one axis, of episodes
                environment_axis = 0
            joined[name] = torch.cat(parts, dim=environment_axis)
        return cls(**joined)


class Collector:
    """Steps environments; episodes continue from rollout to rollout. Each collector has its own `index`.

    The random numbers of a rollout depend on seed, index and number only, so no generator has to be saved.
    """

    def __init__(self, problem: Problem, num_envs: int, *, seed: int, index: int) -> None:
        self._problem = problem
        self._seed = seed
        self._index = index
        self._envs = make_environments(problem, num_envs, self._generator(0))
        self._returns = np.zeros(num_envs)  #: of the current episodes, up to the last rollout

    def _generator(self, part: int) -> np.random.Generator:
        """Return the random numbers of a part of the run: 0 makes the environments, 1 + n is rollout n."""
        return np.random.default_rng([self._seed, _COLLECTION, self._index, part])

    def collect(
        self, number: int, num_steps: int, infer: Callable[[Floats], Floats], log_std: Tensor | None = None
    ) -> Rollout:
        """Collect rollout `number` of all environments.

        Args:
            infer: returns the policy's outputs [n, num_outputs] for observations [n, num_inputs]: logits of discrete
                actions, or means of the others.
            log_std: logarithms of the standard deviations; None for discrete actions.
        """
        problem = self._problem
        envs = self._envs
        rng = self._generator(1 + number)
        steps = (num_steps, envs.num_envs)
        shape = (*steps, problem.num_outputs)
        noise = _noise(rng, shape, log_std)
        actions: NDArray[Any] = np.empty(shape, np.float32)
        if log_std is None:
            actions = np.empty(steps, np.int64)
        envs.begin(rng)
        outputs = np.empty(shape, np.float32)
        observations = np.empty((num_steps + 1, envs.num_envs, problem.num_inputs), np.float32)
        rewards = np.empty(steps, np.float32)
        terminated = np.empty(steps, np.bool_)
        truncated = np.empty(steps, np.bool_)
        valid = np.empty(steps, np.bool_)
        observations[0] = envs.observations
        for t in range(num_steps):
            output = infer(observations[t])
            outputs[t] = output
            if log_std is None:
                np.argmax(output + noise[t], axis=1, out=actions[t])
            else:
                np.add(output, noise[t], out=actions[t])
            np.logical_not(envs.over, out=valid[t])  # the step after an episode's end only resets the environment
            observations[t + 1], rewards[t], terminated[t], truncated[t] = envs.step(problem.to_env(actions[t]))
        sums = self._returns + np.cumsum(rewards, axis=0, dtype=np.float64)
        returns, self._returns = _per_episode(sums, terminated | truncated)
        log_probs, _ = log_prob(torch.from_numpy(outputs), torch.from_numpy(actions), log_std)
        return Rollout(
            observations=torch.from_numpy(observations),
            actions=torch.from_numpy(actions),
            log_probs=log_probs,
            rewards=torch.from_numpy(rewards),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            valid=torch.from_numpy(valid),
            returns=torch.from_numpy(returns),
        )

    def state(self) -> dict[str, Any]:
        """Return the environments' state and the returns of the current episodes so far, for `load_state`."""
        return {"envs": self._envs.state(), "returns": torch.from_numpy(self._returns.copy())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue the episodes of the result of `state`."""
        self._envs.load_state(state["envs"])
        self._returns = state["returns"].numpy().copy()


def _noise(rng: np.random.Generator, shape: tuple[int, ...], log_std: Tensor | None) -> Floats:
    """Return the noise that makes outputs of a policy actions: of logits if `log_std` is None, else of means.

    It is drawn for all steps at once: one call per step would cost as much as the step, tens of microseconds.
    """
    if log_std is None:  # the argmax of logits + Gumbel noise is a sample of their softmax
        exponential = rng.standard_exponential(shape, np.float32)
        gumbel: Floats = -np.log(np.maximum(exponential, _TINY))
        return gumbel
    normal: Floats = rng.standard_normal(shape, np.float32) * log_std.exp().numpy()
    return normal


def _per_episode(sums: NDArray[Any], ends: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Divide rewards among episodes.

    Args:
        sums: sums of each environment's rewards from the begin of its first episode to each step, [T, n].
        ends: whether a step is the last one of an episode, [T, n].

    Returns the sums over the episodes that ended, [episodes], and over the current episode of each environment, [n].
    """
    env, step = np.nonzero(ends.T)  # the ends of the first environment, then those of the next
    at_end = sums[step, env]
    # Without the rewards of the same environment's earlier episodes.
    ended = at_end.copy()
    has_earlier = env[1:] == env[:-1]
    ended[1:] -= np.where(has_earlier, at_end[:-1], 0)
    last_end = np.zeros_like(sums[-1])
    last_end[env] = at_end  # of several ends, the assignment keeps the last
    return ended, sums[-1] - last_end


def num_collectors_of(saved: Restored | None, num_observers: int) -> int:
    """Return the number of collectors: that of the checkpoint, unless there are more observers.

    So fewer observers step the same environments, and an update learns from as many steps as before.
    """
    if saved is None:
        return num_observers
    num_collectors = int(saved.trainer["num_collectors"])
    if num_observers > num_collectors:
        log.warning(
            "%d observers continue a run with %d collectors: an update learns from more environment steps from here on",
            num_observers,
            num_collectors,
        )
    return max(num_observers, num_collectors)


def serve_rollouts(ctx: Context, cfg: Config, problem: Problem) -> None:
    """Collect rollouts for the agent until it leaves."""
    rl = cfg.section(RlConfig)
    saved = ctx.restore()
    num_observers = ctx.roles.count("observer")
    indices = share_of(ctx.roles.own_index, num_observers, num_collectors_of(saved, num_observers))
    collectors = {index: Collector(problem, rl.num_envs, seed=cfg.seed, index=index) for index in indices}
    if saved is not None:
        load_collectors(collectors, saved)

    def collect(number: int, weights: dict[str, Tensor]) -> list[Rollout]:
        began = time.perf_counter()
        actor = Actor(weights, rl.activation)
        log_std = weights.get("log_std")
        rollouts = []
        for collector in collectors.values():
            rollouts.append(collector.collect(number, rl.num_rollout_steps, actor, log_std))
        ctx.timer.add(compute_s=time.perf_counter() - began)
        return rollouts

    def save(step: int) -> None:
        states = {index: collector.state() for index, collector in collectors.items()}
        ctx.save(step, model=None, trainer={}, local={"collectors": states})

    with rpc_group(ctx, {"collect": collect}) as rpc:
        ctx.roles.agree_among([0])  # only the agent counts steps and decides on a stop
        rpc.serve({"save": save})


def load_collectors(collectors: Mapping[int, Collector], saved: Restored) -> None:
    """Load the states of these collectors, which another observer may have saved."""
    for local in saved.local_by_rank[1:]:  # without the agent
        assert local is not None, "every observer saves its collectors"
        for index, state in local["collectors"].items():
            if index in collectors:
                collectors[index].load_state(state)


class ObserverGroup:
    """All observers, for the agent.

    Args:
        pending: rollouts of the next update, which a checkpoint holds.
    """

    def __init__(self, rpc: RpcGroup, cfg: Config, num_collectors: int, pending: Sequence[Rollout] = ()) -> None:
        self.num_collectors = num_collectors
        self._rpc = rpc
        self._is_async = cfg.section(RlConfig).mode == "async"
        self._timeout_s = cfg.launch.hang_s + HANG_MARGIN_S
        #: Rollouts of the next update: received, or as requests, one for each observer.
        self._pending: Sequence[Future[list[tuple[Tensor, ...]]] | Rollout] = pending

    def next_rollout(self, number: int, weights: dict[str, Tensor]) -> Rollout:
        """Return rollout `number` of all collectors, joined.

        In sync mode it is collected now with these weights. In async mode it was requested with the rollout before it,
        and these weights collect the next one while the agent learns.
        """

        def request(number: int) -> Sequence[Future[list[tuple[Tensor, ...]]]]:
            return self._rpc.call_all("observer", "collect", number, weights, timeout_s=self._timeout_s)

        if not self._pending:
            self._pending = request(number)
        rollout = Rollout.join(self.wait())
        self._pending = ()
        if self._is_async:
            self._pending = request(number + 1)
        return rollout

    def wait(self) -> list[Rollout]:
        """Wait for the pending rollouts and return them. They stay pending, so that a checkpoint can hold them."""
        received: list[Rollout] = []
        for item in self._pending:
            if isinstance(item, Rollout):
                received.append(item)
            else:  # RPC passes named tuples on as tuples
                received += [Rollout(*tensors) for tensors in item.result()]
        self._pending = received
        return received
