"""Observers: ranks that step environments, and the agent's calls to them."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import rpc

from hpcdist.config.schema import Config
from hpcdist.errors import PeerLost, RemoteError
from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import RpcGroup, remote, rpc_group, rpc_target
from hpcdist.trainers.rl.environments import Problem
from hpcdist.trainers.rl.inference import request_inference
from hpcdist.trainers.rl.policy import Actor
from hpcdist.trainers.rl.rollouts import Collector, Rollout
from hpcdist.trainers.rl.schema import RlConfig


class Observer:
    """An observer's environments and the policy that acts in them. It is the observer's RPC target."""

    def __init__(self, ctx: Context, cfg: Config, problem: Problem) -> None:
        self._ctx, self._cfg = ctx, cfg
        self.collector = Collector(problem, cfg.section(RlConfig).num_envs, seed=cfg.seed, index=ctx.role_index)

    def collect(self, number: int, weights: dict[str, Tensor]) -> Rollout:
        """Collect a rollout.

        Args:
            number: of the rollout; its random numbers follow from it.
            weights: `Policy.actor_state`; with `rl.inference: remote` only `log_std`, if there is one.
        """
        rl, began = self._cfg.section(RlConfig), time.perf_counter()
        if rl.inference == "local":
            rollout = self.collector.collect(
                number, rl.num_rollout_steps, Actor(weights, rl.activation), weights.get("log_std")
            )
            self._ctx.timer.add(compute_s=time.perf_counter() - began)
            return rollout
        # Most of this time is that of the agent's answers, the same for all observers, so it is not measured.
        infer = functools.partial(request_inference, self._ctx.role_index, self._cfg.launch.hang_timeout_s)
        return self.collector.collect(number, rl.num_rollout_steps, infer, weights.get("log_std"))


def serve_rollouts(ctx: Context, cfg: Config, problem: Problem) -> None:
    """Collect rollouts for the agent until it leaves."""
    observer = Observer(ctx, cfg, problem)
    saved = ctx.restore()
    if saved is not None and saved.local is not None:
        observer.collector.load_state(saved.local)

    def save(step: int) -> None:
        ctx.save(step, model=None, trainer={}, local=observer.collector.state())

    with rpc_group(ctx, target=observer) as group:
        ctx.agree_among([0])
        group.serve({"save": save})


@remote
def _collect(number: int, weights: dict[str, Tensor]) -> Rollout:
    return rpc_target(Observer).collect(number, weights)


class ObserverGroup:
    """All observers as the agent sees them.

    Args:
        pending: rollouts of the next update that a checkpoint holds, perhaps of another number of observers.
    """

    def __init__(self, group: RpcGroup, cfg: Config, pending: Sequence[Rollout] = ()) -> None:
        self._names = group.of_role("observer")
        self._cfg = cfg
        self._pending: Sequence[torch.futures.Future[Rollout] | Rollout] = pending

    @property
    def has_pending(self) -> bool:
        """Whether rollouts have been requested and not taken."""
        return bool(self._pending)

    def request(self, number: int, weights: dict[str, Tensor]) -> None:
        """Request rollout `number` from every observer with these weights, without waiting."""
        if self._cfg.section(RlConfig).inference == "remote":
            weights = {name: value for name, value in weights.items() if name == "log_std"}
        timeout_s = self._cfg.launch.hang_timeout_s  # longer than any rollout: the supervisor detects a hung rank
        self._pending = [rpc.rpc_async(name, _collect, (number, weights), timeout=timeout_s) for name in self._names]

    def wait(self) -> list[Rollout]:
        """Wait for the pending rollouts and return them; they stay pending.

        Raises PeerLost, or the error of the observer that failed.
        """
        received: list[Rollout] = []
        for index, item in enumerate(self._pending):
            if isinstance(item, Rollout):
                received.append(item)
                continue
            try:
                received.append(item.wait())
            except RuntimeError as error:
                if RemoteError.received(error) is not None:
                    raise
                reason = str(error).partition("\n")[0]
                raise PeerLost(f"{self._names[index]} sent no rollout: {reason}") from error
        self._pending = received
        return received

    def take(self) -> Rollout:
        """Wait for the pending rollouts and return them joined."""
        rollout = Rollout.join(self.wait())
        self._pending = ()
        return rollout
