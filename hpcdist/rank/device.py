"""The device of a rank: which GPU it uses, its collective backend, and the CPUs beside that GPU.

NVIDIA's and AMD's GPUs are `cuda` in torch. Other modules compare a type with `cpu`, and call `torch.accelerator`, or
the module of the device where that lacks a function. They write `cuda` or `nccl` only for NVIDIA's own (versions,
images, NCCL's log and records), values and messages that users read, and where torch has nothing else:

    checkpoint/saver.py  `torch.Event` ignores `blocking`, with which the waiting thread sleeps; copies of other GPUs
                         are complete at once
    rank/parent.py       no other function says whether a fork came too late
    trainers/comm        the version of NCCL
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hpcdist.config.launch_schema import GPU_BACKENDS
from hpcdist.config.roles import Roles
from hpcdist.config.schema import Config, role_device
from hpcdist.config.topology import SLURM_FIX, Topology, Variables
from hpcdist.errors import ConfigError, TopologyError, shortened
from hpcdist.host.compiler import require_compiler
from hpcdist.host.machine import text_of

log = logging.getLogger(__name__)
CPU = torch.device("cpu")
PCI_DEVICES = Path("/sys/bus/pci/devices")
#: TF32 for fp32 matrix products and convolutions, several times faster on GPUs that support it: training tolerates its
#: shorter mantissa. Code of one's own may set `torch.backends` otherwise.
ALLOW_TF32 = True


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of a rank, which `select_device` finds once."""

    device: torch.device  #: type and index
    backend: str  #: of collectives between the ranks of the run
    name: str = "CPU"  #: such as `NVIDIA H100 80GB HBM3`
    memory_bytes: int | None = None  #: of a GPU
    uuid: str | None = None  #: of a GPU or a MIG slice, as NVML writes it
    pci: str = ""  #: address of a GPU, such as `0000:1b:00.0`; empty if unknown

    @classmethod
    def of(cls, device: torch.device, backend: str) -> Self:
        if device.type == "cpu":
            return cls(device=device, backend=backend)
        found: Any = torch.get_device_module(device).get_device_properties(device)
        address = [getattr(found, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
        return cls(
            device=device,
            backend=backend,
            name=found.name,
            memory_bytes=found.total_memory,
            uuid=f"GPU-{found.uuid}" if hasattr(found, "uuid") else None,
            pci="" if -1 in address else "{:04x}:{:02x}:{:02x}.0".format(*address),
        )

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / 2**30:.0f} GiB"
        return f"{self.device} ({self.name}{memory}), {self.backend}"


def select_device(config: Config, topology: Topology, env: Mapping[str, str]) -> Device:
    """Make this rank's device the current one, and return it."""
    roles = Roles.of(config.roles, topology.world_size)
    asked = {role: role_device(config, role) for role in roles.names}
    role, _ = roles.of_rank(topology.rank)
    mixed = "cpu" in asked.values() and set(asked.values()) != {"cpu"}
    kind, index = config.launch.gpu_type if asked[role] == "auto" else asked[role], None
    if kind != "cpu":
        position, num_ranks = topology.local_rank, topology.local_world_size
        if mixed:
            sharers = [rank for rank in ranks_on_node(topology, env) if asked[roles.of_rank(rank)[0]] != "cpu"]
            position, num_ranks = sharers.index(topology.rank), len(sharers)
        built_for = torch.accelerator.current_accelerator()
        num_visible = torch.accelerator.device_count() if built_for is not None and built_for.type == kind else 0
        index = gpu_index(position, num_ranks, num_visible)
    if asked[role] in GPU_BACKENDS and index is None:
        key = f"launch.devices.{role}" if role in config.launch.devices else "launch.device"
        raise ConfigError(f"{key}={kind}, but no GPU is visible here: use {key}=auto or cpu")
    device = CPU if index is None else torch.device(kind, index)
    if config.model.compile and not config.trainer.script:
        require_compiler(device.type, {**env, **config.launch.env})
    if device.type == "cpu":
        if config.precision.dtype == "fp16":
            raise ConfigError("precision.dtype=fp16 needs a GPU, and none is visible here: use bf16")
    else:
        torch.accelerator.set_device_index(device)
        torch.backends.cuda.matmul.allow_tf32 = ALLOW_TF32
        torch.backends.cudnn.allow_tf32 = ALLOW_TF32
    # A rank without a GPU cannot be a member of a group of GPUs.
    backend = "gloo" if mixed else collective_backend(device)
    found = Device.of(device, backend)
    log.info("device: %s", found)
    return found


def collective_backend(device: torch.device) -> str:
    """Return torch's backend for tensors on a device; gloo if this torch is built without it."""
    backend = dist.get_default_backend_for_device(device)
    return backend if dist.is_backend_available(backend) else "gloo"


def initialized_device() -> torch.device:
    """Return the type of GPU that a script uses in this process, or the CPU."""
    built_for = torch.accelerator.current_accelerator() or CPU
    module: Any = torch.get_device_module(built_for)
    return built_for if getattr(module, "is_initialized", lambda: True)() else CPU


def listed(names: Sequence[str]) -> str:
    """Return `2 × NVIDIA H100 80GB HBM3, 1 × CPU` of the devices of all ranks; `CPU` if none is a GPU."""
    counts = Counter(names)
    return "CPU" if set(counts) == {"CPU"} else ", ".join(f"{number} × {name}" for name, number in counts.items())


# Which GPU: `docs/how-to/gpus.md` has the table of cases.


def ranks_on_node(topology: Topology, env: Mapping[str, str]) -> list[int]:
    """Return the ranks on this rank's node, ordered by local rank."""
    if topology.launcher == "slurm" and env.get("SLURM_GTIDS"):
        # Correct for every --distribution.
        return Variables(env, SLURM_FIX).parsed("SLURM_GTIDS", _numbers)
    first = topology.rank - topology.local_rank
    return list(range(first, first + topology.local_world_size))


def _numbers(text: str) -> list[int]:
    if re.fullmatch(r"[0-9]{1,10}(,[0-9]{1,10})*", text) is None:
        raise TopologyError(f"must be whole numbers separated by commas, got {shortened(text)!r}")
    return [int(part) for part in text.split(",")]


def gpu_index(position: int, num_ranks: int, num_visible: int) -> int | None:
    """Return the index of the GPU of the rank at `position` among those of its node that use GPUs; None without one.

    A rank that sees fewer GPUs than ranks sees GPUs of its own, or else `refuse_shared_gpu` finds it.
    """
    return None if num_visible == 0 else position if num_visible >= num_ranks else 0


def refuse_shared_gpu(device: torch.device, topology: Topology, store: Store, env: Mapping[str, str]) -> None:
    """Raise TopologyError if another rank has the same GPU: NCCL would end both, without the reason and the fix."""
    if device.type != "cpu":
        own = Device.of(device, "")
        if store.add(f"gpu/{topology.node_rank}/{own.uuid or device}/{own.pci}", 1) > 1:
            variables = Variables(
                env,
                "request a GPU for each rank (Slurm: --gpus-per-node and --gpu-bind=none), start fewer ranks"
                " (launch.num_ranks), or leave CUDA_VISIBLE_DEVICES unset",
            )
            known = variables.shown(("SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES")) or "CUDA_VISIBLE_DEVICES not set"
            raise variables.error(
                f"rank {topology.rank} sees {torch.accelerator.device_count()} GPU(s) ({known}) and would use the same"
                f" one as another of {topology.local_world_size} ranks on its node, {own.uuid or device}"
            )


def cpus_beside(device: Device, pci_devices: Path = PCI_DEVICES) -> str:
    """Return the CPUs of the NUMA node to which a GPU is connected, such as `0-31,64-95`; empty if unknown."""
    return text_of(pci_devices / (device.pci or "none") / "local_cpulist").strip()


def bind_to_cpus(beside: str, num_ranks: int, env: Mapping[str, str]) -> None:
    """Keep the threads of this rank on the CPUs beside its GPU, which `num_ranks` ranks of the node share.

    Nothing changes if Slurm has bound the task, or if these CPUs are fewer than the threads of those ranks: with the
    GPUs of all ranks at one of two NUMA nodes, the CPUs of the other would be idle.
    """
    if env.get("SLURM_CPU_BIND_TYPE", "none") not in ("", "none"):
        return
    spans = [part.partition("-") for part in beside.split(",") if part]
    near = {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}
    usable = os.sched_getaffinity(0)
    if num_ranks * torch.get_num_threads() <= len(near & usable) < len(usable):
        os.sched_setaffinity(0, near & usable)
        log.info("bound to %d of %d CPUs, those beside its GPU", len(near & usable), len(usable))
