"""Inference at the agent for `rl.inference: remote`: one forward pass for the observations of all collectors."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch
from torch import Tensor

from hpcdist.trainers.rl.policy import Policy


class InferenceServer:
    """Answers the collectors of one step together, in the order of their index."""

    def __init__(self, policy: Policy, device: torch.device, num_collectors: int) -> None:
        self._policy, self._device, self._num_collectors = policy, device, num_collectors
        self._lock = threading.Lock()
        self._requests: dict[int, tuple[Tensor, Future[Tensor]]] = {}

    @torch.no_grad()
    def infer(self, collector: int, observations: Tensor) -> Future[Tensor]:
        """Return a future of the policy's outputs, complete once all collectors have sent their observations."""
        future: Future[Tensor] = Future()
        with self._lock:
            self._requests[collector] = observations, future
            if len(self._requests) < self._num_collectors:
                return future
            requests, self._requests = [self._requests[key] for key in sorted(self._requests)], {}
        outputs = self._policy(torch.cat([tensor for tensor, _ in requests]).to(self._device)).cpu()
        for (_, waiting), part in zip(requests, outputs.split([len(tensor) for tensor, _ in requests]), strict=True):
            waiting.set_result(part)
        return future
