"""Observers: ranks that step environments, and the agent's calls to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from hpcdist.config.schema import Config
from hpcdist.rank.checkpointing import Restored
from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import RpcGroup, rpc_group
from hpcdist.rank.roles import share_of
from hpcdist.trainers.rl.environments import Problem
from hpcdist.trainers.rl.policy import Actor
from hpcdist.trainers.rl.rollouts import Collector, Rollout
from hpcdist.trainers.rl.schema import RlConfig

log = logging.getLogger(__name__)


class Observer:
    """The collectors of an observer and the policy that acts in them.

    Args:
        indices: the collectors of this observer.
    """

    def __init__(self, ctx: Context, cfg: Config, problem: Problem, indices: range) -> None:
        self._ctx, self._cfg = ctx, cfg
        num_envs = cfg.section(RlConfig).num_envs
        self.collectors = {index: Collector(problem, num_envs, seed=cfg.seed, index=index) for index in indices}

    def collect(self, number: int, weights: dict[str, Tensor]) -> list[Rollout]:
        """Collect a rollout with every collector.

        Args:
            number: of the rollout; its random numbers follow from it and the collector.
            weights: `Policy.actor_state`.
        """
        rl, log_std, began = self._cfg.section(RlConfig), weights.get("log_std"), time.perf_counter()
        actor = Actor(weights, rl.activation)
        rollouts = [one.collect(number, rl.num_rollout_steps, actor, log_std) for one in self.collectors.values()]
        self._ctx.timer.add(compute_s=time.perf_counter() - began)
        return rollouts

    def state(self) -> dict[str, Any]:
        """Return the states of all collectors for `load`."""
        return {"collectors": {index: one.state() for index, one in self.collectors.items()}}

    def load(self, saved: Restored) -> None:
        """Load the states of this observer's collectors, which other observers may have saved."""
        for index, state in _collector_states(saved).items():
            if index in self.collectors:
                self.collectors[index].load_state(state)


def _collector_states(saved: Restored) -> dict[int, Any]:
    """Return the saved states by collector. Older versions of hpcdist had one collector per observer."""
    states: dict[int, Any] = {}
    for observer, local in enumerate(saved.local_by_rank[1:]):
        if local is not None:
            states |= local.get("collectors", {observer: local})
    return states


def num_collectors_of(saved: Restored | None, num_observers: int) -> int:
    """Return the number of collectors: that of the checkpoint, unless there are more observers."""
    num_collectors = num_observers if saved is None else int(saved.trainer.get("num_collectors", num_observers))
    if num_observers > num_collectors:
        log.warning(
            "%d observers continue a run with %d collectors: an update learns from more environment steps from here on",
            num_observers,
            num_collectors,
        )
    return max(num_observers, num_collectors)


def serve_rollouts(ctx: Context, cfg: Config, problem: Problem) -> None:
    """Collect rollouts for the agent until it leaves."""
    saved = ctx.restore()
    num_observers = ctx.roles.count("observer")
    indices = share_of(ctx.role_index, num_observers, num_collectors_of(saved, num_observers))
    observer = Observer(ctx, cfg, problem, indices)
    if saved is not None:
        observer.load(saved)

    def save(step: int) -> None:
        ctx.save(step, model=None, trainer={}, local=observer.state())

    with rpc_group(ctx, {"collect": observer.collect}) as group:
        ctx.agree_among([0])
        group.serve({"save": save})


class ObserverGroup:
    """All observers as the agent sees them.

    Args:
        num_collectors: number of rollouts of an update.
        pending: rollouts of the next update that a checkpoint holds.
    """

    def __init__(self, group: RpcGroup, cfg: Config, num_collectors: int, pending: Sequence[Rollout] = ()) -> None:
        self.num_collectors = num_collectors
        self._group = group
        self._cfg = cfg
        self._pending: Sequence[Future[list[tuple[Tensor, ...]]] | Rollout] = pending

    @property
    def has_pending(self) -> bool:
        """Whether rollouts have been requested and not taken."""
        return bool(self._pending)

    def request(self, number: int, weights: dict[str, Tensor]) -> None:
        """Request rollout `number` from every observer with these weights, without waiting."""
        timeout_s = self._cfg.launch.hang_s  # longer than any rollout: the supervisor detects a hung rank
        self._pending = self._group.call_all("observer", "collect", number, weights, timeout_s=timeout_s)

    def wait(self) -> list[Rollout]:
        """Wait for the pending rollouts and return them; they stay pending.

        Raises PeerLost, or RemoteError with the error of the observer that failed.
        """
        received: list[Rollout] = []
        for item in self._pending:
            received += [item] if isinstance(item, Rollout) else (Rollout(*tensors) for tensors in item.result())
        self._pending = received
        return received

    def take(self) -> Rollout:
        """Wait for the pending rollouts and return them joined."""
        rollout = Rollout.join(self.wait())
        self._pending = ()
        return rollout
