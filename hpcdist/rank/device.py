"""The device, the collective backend and the random seeds of a rank."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from hpcdist.config.schema import Config, role_device
from hpcdist.config.topology import SLURM_FIX, Roles, Topology, Variables
from hpcdist.errors import ConfigError, TopologyError, shortened
from hpcdist.host.machine import require_compiler

# The device and the collective backend of a rank.


def gpu_uuid(device: torch.device) -> str | None:
    """Return the UUID of a GPU as NVML writes it; None for the CPU."""
    return None if device.type == "cpu" else f"GPU-{torch.cuda.get_device_properties(device).uuid}"


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


def ranks_on_node(topology: Topology, env: Mapping[str, str]) -> list[int]:
    """Return the ranks on this rank's node, ordered by local rank. Raises TopologyError as `from_env` does."""
    if topology.launcher == "slurm" and env.get("SLURM_GTIDS"):
        # Correct for every --distribution and for heterogeneous steps.
        return Variables(env, SLURM_FIX).parsed("SLURM_GTIDS", _numbers)
    first = topology.rank - topology.local_rank
    return list(range(first, first + topology.local_world_size))


def cuda_index(
    topology: Topology, num_visible: int, env: Mapping[str, str], sharers: Sequence[int] | None = None
) -> int | None:
    """Return the CUDA device index of this rank; None if the process sees no GPU.

    If at least as many GPUs are visible as the node has ranks, the index is the local rank. Otherwise the index is 0,
    provided that each rank sees GPUs of its own. SLURM_GPUS_ON_NODE shows this, which counts the GPUs of all tasks of
    the step on this node; if it is not set, CUDA_VISIBLE_DEVICES must name a single device.

    Args:
        topology: the topology of this rank.
        num_visible: number of GPUs that this process sees.
        env: environment variables.
        sharers: the ranks on this node that use GPUs, if not all ranks do.

    Raises TopologyError in all other cases, because two ranks on one GPU fail with NCCL's "Duplicate GPU detected".
    """
    num_local = topology.local_world_size if sharers is None else len(sharers)
    if num_visible == 0:
        return None
    if num_visible >= num_local:
        return topology.local_rank if sharers is None else sharers.index(topology.rank)
    variables = Variables(
        env,
        f"request a GPU for each rank (Slurm: --gpus-per-node={num_local} --gpu-bind=none), "
        f"or start fewer ranks here (launch.num_ranks={num_visible})",
    )
    if variables.has("SLURM_GPUS_ON_NODE"):
        if num_visible * num_local <= variables.number("SLURM_GPUS_ON_NODE"):
            return 0
    elif num_visible == 1 and "," not in variables.text("CUDA_VISIBLE_DEVICES", ","):
        return 0
    known = variables.shown(("SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES")) or "CUDA_VISIBLE_DEVICES not set"
    raise variables.error(
        f"rank {topology.rank} sees {num_visible} GPU(s) ({known}), but {num_local} ranks "
        f"{'run' if sharers is None else 'use GPUs'} on its node, so two ranks would use the same GPU"
    )


def _numbers(text: str) -> list[int]:
    if re.fullmatch(r"[0-9]{1,10}(,[0-9]{1,10})*", text) is None:
        raise TopologyError(f"must be whole numbers separated by commas, got {shortened(text)!r}")
    return [int(part) for part in text.split(",")]


# Seeds of a rank's random number generators.


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and GPUs), Python's `random`, and NumPy if it is already imported."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
