"""The device and the collective backend of a rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from hpcdist.config.schema import Config, role_device
from hpcdist.errors import ConfigError
from hpcdist.machine.compiler import require_compiler
from hpcdist.rank.roles import Roles
from hpcdist.rank.topology import Topology, cuda_index, ranks_on_node


def place(config: Config, topology: Topology, env: Mapping[str, str]) -> tuple[torch.device, str]:
    """Make this rank's device the current one, and return it and the collective backend.

    Raises ConfigError if the config requires a device or backend that is not available here.
    """
    roles = Roles.of(config.roles, topology.world_size)
    asked = {role: role_device(config, role) for role in roles.names}
    role, _ = roles.of_rank(topology.rank)
    wanted = asked[role]
    mixed = "cpu" in asked.values() and set(asked.values()) != {"cpu"}
    sharers = None
    if mixed:
        here = ranks_on_node(topology, env)
        sharers = [rank for rank in here if asked[roles.of_rank(rank)[0]] != "cpu"]
    index = cuda_index(topology, torch.cuda.device_count(), env, sharers) if wanted != "cpu" else None
    if wanted == "cuda" and index is None:
        key = f"launch.devices.{role}" if role in config.launch.devices else "launch.device"
        raise ConfigError([f"{key}=cuda, but no GPU is visible here: use {key}=auto or cpu"])
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    if config.model.compile and not config.trainer.script:
        require_compiler(device.type, {**env, **config.launch.env})
    if device.type == "cpu":
        if config.precision.dtype == "fp16":
            raise ConfigError(["precision.dtype=fp16 needs a GPU, and none is visible here: use bf16"])
        if config.model.sync_batch_norm:
            raise ConfigError(["model.sync_batch_norm needs GPUs, and none is visible here: set it to false"])
    else:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32
        torch.backends.cudnn.allow_tf32 = config.precision.tf32
    backend = config.launch.backend
    if backend == "auto":
        # A rank without a GPU cannot be a member of an NCCL group.
        backend = "nccl" if device.type == "cuda" and not mixed and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and device.type == "cpu":
        raise ConfigError(["launch.backend=nccl needs GPUs, and none is visible here: use gloo"])
    return device, backend
