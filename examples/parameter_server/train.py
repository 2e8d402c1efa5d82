"""Trainers and a parameter server that exchange weights and gradients by RPC.

hpcdist run parameter_server.yaml
"""

from __future__ import annotations

import json
import os
import threading

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc

import hpcdist

TOTAL_STEPS = 200


class ParameterServer:
    """Keeps the weights, and updates them by the gradients of all trainers."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.lock = threading.Lock()

    def weights(self) -> dict[str, Tensor]:
        with self.lock:
            return {name: value.clone() for name, value in self.model.state_dict().items()}

    def load(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict(weights)

    def update(self, gradients: list[Tensor]) -> None:
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()


def train(index: int, server: rpc.RRef) -> None:
    """Count the steps of one trainer; the first one saves the weights."""
    newest = hpcdist.checkpoint_dir() / "newest.pt"
    step = 0
    if newest.exists():
        saved = torch.load(newest, weights_only=True)
        step = saved["step"]
        server.rpc_sync().load(saved["weights"])
    torch.manual_seed(1000 * index + step)
    model = nn.Linear(8, 1)
    target = torch.arange(8.0)
    while not hpcdist.should_stop(step, TOTAL_STEPS) and step < TOTAL_STEPS:
        model.load_state_dict(server.rpc_sync().weights())
        x = torch.randn(32, 8)
        loss = (model(x).squeeze(1) - x @ target).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        server.rpc_sync().update(gradients)
        step += 1
        hpcdist.log({"train/loss": loss.item()}, step)
    if index == 0:
        torch.save({"step": step, "weights": server.rpc_sync().weights()}, newest)


def main() -> None:
    role, index = os.environ["HPCDIST_ROLE"], int(os.environ["HPCDIST_ROLE_INDEX"])
    roles = json.loads(os.environ["HPCDIST_ROLES"])  # {"trainer": 2, "parameter_server": 1}, in the order of the ranks
    dist.init_process_group("gloo")  # MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are those of torchrun
    rpc.init_rpc(f"{role}:{index}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    hpcdist.agree_among(range(roles["trainer"]))  # the parameter server counts no steps
    if role == "trainer":
        server = rpc.remote("parameter_server:0", shared_server)
        train(index, server)
    rpc.shutdown()  # the parameter server answers calls until all ranks are here
    dist.destroy_process_group()


_server = ParameterServer()


def shared_server() -> ParameterServer:
    """Return the parameter server of this rank, of which all trainers get a reference."""
    return _server


if __name__ == "__main__":
    main()
