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
        """Return a device with the properties that torch knows of it."""
        if device.type == "cpu":
            return cls(device=device, backend=backend)
        properties: Any = torch.get_device_module(device).get_device_properties(device)
        uuid = None
        if hasattr(properties, "uuid"):
            uuid = f"GPU-{properties.uuid}"
        return cls(
            device=device,
            backend=backend,
            name=properties.name,
            memory_bytes=properties.total_memory,
            uuid=uuid,
            pci=_pci_address(properties),
        )

    def __str__(self) -> str:
        memory = ""
        if self.memory_bytes is not None:
            memory = f", {self.memory_bytes / 2**30:.0f} GiB"
        return f"{self.device} ({self.name}{memory}), {self.backend}"


def _pci_address(properties: Any) -> str:
    """Return the PCI address in torch's properties of a GPU; empty if it is unknown."""
    unknown = -1
    address = [getattr(properties, f"pci_{part}_id", unknown) for part in ("domain", "bus", "device")]
    if unknown in address:
        return ""
    return "{:04x}:{:02x}:{:02x}.0".format(*address)


def select_device(config: Config, topology: Topology, env: Mapping[str, str]) -> Device:
    """Make this rank's device the current one, and return it.

    Raises ConfigError if the config requires a GPU and none is visible.
    """
    roles = Roles.of(config.roles, topology.world_size)
    requested = {role: role_device(config, role) for role in roles.names}
    role, _ = roles.of_rank(topology.rank)
    is_mixed = "cpu" in requested.values() and set(requested.values()) != {"cpu"}
    kind = requested[role]
    if kind == "auto":
        kind = config.launch.gpu_type
    index = None
    if kind != "cpu":
        position, num_ranks = topology.local_rank, topology.local_world_size
        if is_mixed:
            on_node = ranks_on_node(topology, env)
            with_gpu = [rank for rank in on_node if requested[roles.of_rank(rank)[0]] != "cpu"]
            position, num_ranks = with_gpu.index(topology.rank), len(with_gpu)
        index = gpu_index(position, num_ranks, _num_visible_gpus(kind))
    if requested[role] in GPU_BACKENDS and index is None:
        key = "launch.device"
        if role in config.launch.devices:
            key = f"launch.devices.{role}"
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
    backend = "gloo" if is_mixed else collective_backend(device)
    selected = Device.of(device, backend)
    log.info("device: %s", selected)
    return selected


def _num_visible_gpus(kind: str) -> int:
    """Return the number of visible GPUs of a type; 0 if torch is built for another one."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind:
        return 0
    return torch.accelerator.device_count()


def collective_backend(device: torch.device) -> str:
    """Return torch's backend for tensors on a device; gloo if this torch is built without it."""
    backend = dist.get_default_backend_for_device(device)
    if not dist.is_backend_available(backend):
        return "gloo"
    return backend


def initialized_device() -> torch.device:
    """Return the type of GPU that a script uses in this process, or the CPU."""
    accelerator = torch.accelerator.current_accelerator() or CPU
    module: Any = torch.get_device_module(accelerator)
    is_initialized = getattr(module, "is_initialized", lambda: True)
    return accelerator if is_initialized() else CPU


def listed(names: Sequence[str]) -> str:
    """Return `2 × NVIDIA H100 80GB HBM3, 1 × CPU` of the devices of all ranks; `CPU` if none is a GPU."""
    counts = Counter(names)
    if set(counts) == {"CPU"}:
        return "CPU"
    return ", ".join(f"{number} × {name}" for name, number in counts.items())


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
    """Return the index of a rank's GPU among the visible ones; None if no GPU is visible.

    Args:
        position: position of the rank among the ranks of its node that use GPUs.
        num_ranks: number of these ranks.
        num_visible: number of GPUs that this rank sees.
    """
    if num_visible == 0:
        return None
    if num_visible < num_ranks:
        # Slurm has given each rank GPUs of its own. If not, `refuse_shared_gpu` finds the mistake.
        return 0
    return position


def refuse_shared_gpu(device: torch.device, topology: Topology, store: Store, env: Mapping[str, str]) -> None:
    """Raise TopologyError if another rank has the same GPU: NCCL would end both, without the reason and the fix."""
    if device.type == "cpu":
        return
    gpu = Device.of(device, "")
    name = gpu.uuid or device
    num_users = store.add(f"gpu/{topology.node_rank}/{name}/{gpu.pci}", 1)
    if num_users <= 1:
        return
    variables = Variables(
        env,
        "request a GPU for each rank (Slurm: --gpus-per-node and --gpu-bind=none), start fewer ranks"
        " (launch.num_ranks), or leave CUDA_VISIBLE_DEVICES unset",
    )
    known = variables.shown(("SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES")) or "CUDA_VISIBLE_DEVICES not set"
    raise variables.error(
        f"rank {topology.rank} sees {torch.accelerator.device_count()} GPU(s) ({known}) and would use the same"
        f" one as another of {topology.local_world_size} ranks on its node, {name}"
    )


def cpus_beside(device: Device, pci_devices: Path = PCI_DEVICES) -> str:
    """Return the CPUs of the NUMA node to which a GPU is connected, such as `0-31,64-95`; empty if unknown."""
    return text_of(pci_devices / (device.pci or "none") / "local_cpulist").strip()


def bind_to_cpus(beside: str, num_ranks: int, env: Mapping[str, str]) -> None:
    """Keep the threads of this rank on the CPUs beside its GPU.

    Nothing changes if Slurm has bound the task, or if these CPUs are fewer than the threads of the ranks that share
    them: with the GPUs of all ranks at one of two NUMA nodes, the CPUs of the other would be idle.

    Args:
        beside: a result of `cpus_beside`.
        num_ranks: number of ranks of the node with the same CPUs beside their GPUs.
    """
    if env.get("SLURM_CPU_BIND_TYPE", "none") not in ("", "none"):
        return
    near = set()
    for span in beside.split(","):
        if span:
            first, _, last = span.partition("-")
            near |= set(range(int(first), int(last or first) + 1))
    usable = os.sched_getaffinity(0)
    chosen = near & usable
    num_threads = num_ranks * torch.get_num_threads()
    if num_threads <= len(chosen) < len(usable):
        os.sched_setaffinity(0, chosen)
        log.info("bound to %d of %d CPUs, those beside its GPU", len(chosen), len(usable))
