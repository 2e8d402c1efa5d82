"""Inference at the agent for `rl.inference: remote`: one forward pass for the observations of all collectors."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.distributed import rpc

from hpcdist.rank.network.rpc import remote, rpc_target
from hpcdist.trainers.rl.environments import Floats
from hpcdist.trainers.rl.policy import Policy


class InferenceServer:
    """Answers the collectors of one step together, in the order of their index. It is the agent's RPC target."""

    def __init__(self, policy: Policy, device: torch.device, num_collectors: int) -> None:
        self._policy, self._device, self._num_collectors = policy, device, num_collectors
        self._lock = threading.Lock()
        self._requests: dict[int, tuple[Tensor, torch.futures.Future[Tensor]]] = {}

    @torch.no_grad()
    def infer(self, collector: int, observations: Tensor) -> torch.futures.Future[Tensor]:
        """Return a future of the policy's outputs, complete once all collectors have sent their observations."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        with self._lock:
            self._requests[collector] = observations, future
            if len(self._requests) < self._num_collectors:
                return future
            requests, self._requests = [self._requests[key] for key in sorted(self._requests)], {}
        outputs = self._policy(torch.cat([tensor for tensor, _ in requests]).to(self._device)).cpu()
        for (_, waiting), part in zip(requests, outputs.split([len(tensor) for tensor, _ in requests]), strict=True):
            waiting.set_result(part)
        return future


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
@remote
def _infer_at_agent(collector: int, observations: Tensor) -> torch.futures.Future[Tensor]:
    return rpc_target(InferenceServer).infer(collector, observations)


def request_inference(collector: int, timeout_s: float, observations: Floats) -> Floats:
    """Return the policy's outputs [n, num_outputs] for observations [n, num_inputs] of a collector, by RPC."""
    arguments = (collector, torch.from_numpy(observations))
    outputs: Floats = rpc.rpc_sync("agent:0", _infer_at_agent, arguments, timeout=timeout_s).numpy()
    return outputs
