"""Groups of ranks: all ranks, and partitions of them into groups that communicate at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcdist.errors import ConfigError

WORLD = "world"


@dataclass(frozen=True, kw_only=True)
class Team:
    """The group of this rank in one partition of all ranks.

    Attributes:
        name: name of the partition, such as `world` or `halves`; its groups communicate at the same time.
        ranks: global ranks of this group.
        largest: number of ranks in the largest group of the partition.
        group: the process group; None if this rank is alone in its group.
        device: device of the tensors.
        backend: backend of the process group.
    """

    name: str
    ranks: tuple[int, ...]
    largest: int
    group: dist.ProcessGroup | None
    device: torch.device
    backend: str

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Index of this rank in its group."""
        return self.ranks.index(dist.get_rank())

    def neighbour(self, steps: int) -> int:
        """Return the global rank that is `steps` positions to the right in the ring of the group."""
        return self.ranks[(self.index + steps) % self.size]


def cuts(nodes: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return partitions of all ranks by name. Each has at least two groups, and each rank is in exactly one group.

    Args:
        nodes: node name by rank.
    """
    ranks = list(range(len(nodes)))
    by_node = {name: [rank for rank in ranks if nodes[rank] == name] for name in dict.fromkeys(nodes)}
    found = {}
    if len(by_node) > 1:
        found["within nodes"] = list(by_node.values())
        most = max(map(len, by_node.values()))
        # One rank of each node, as used by data parallelism over nodes and hybrid sharding.
        found["across nodes"] = [[part[i] for part in by_node.values() if i < len(part)] for i in range(most)]
    found["halves"] = [ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]]
    found["even and odd"] = [ranks[::2], ranks[1::2]]
    kept: dict[str, list[list[int]]] = {}
    for name, groups in found.items():
        groups = [group for group in groups if group]
        if 1 < len(groups) < len(ranks) and not any(sorted(groups) == sorted(other) for other in kept.values()):
            kept[name] = groups
    return kept


def choose_backend(wanted: str, device: torch.device) -> tuple[str, torch.device]:
    """Return the backend to measure and the device of its tensors: this rank's device for NCCL, otherwise the CPU.

    Args:
        wanted: name of the backend, or `auto` for that of the default group.
        device: device of this rank.

    Raises ConfigError if the backend is not available.
    """
    backend = dist.get_backend() if wanted == "auto" else wanted
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(["comm.backend=nccl needs GPUs, and none is visible here: use comm.backend=gloo"])
    if backend == "mpi" and not dist.is_mpi_available():
        raise ConfigError(
            ["comm.backend=mpi needs a torch that was built with MPI, and this one was not: use comm.backend=gloo"]
        )
    return backend, device if backend == "nccl" else torch.device("cpu")


def make_teams(
    nodes: Sequence[str], backend: str, device: torch.device, timeout: timedelta, *, with_groups: bool
) -> dict[str, Team]:
    """Create the process groups and return this rank's team of each partition. Call it on every rank.

    Raises ConfigError if MPI has a different number of ranks.
    """
    rank, everyone = dist.get_rank(), list(range(len(nodes)))

    def make(ranks: list[int]) -> dist.ProcessGroup | None:
        # `new_group` must be called on every rank for every group.
        made = dist.new_group(ranks, backend=backend, timeout=timeout)
        return made if isinstance(made, dist.ProcessGroup) else None

    world = dist.group.WORLD if dist.get_backend() == backend else make(everyone)
    if backend == "mpi" and dist.get_world_size(world) != len(everyone):
        raise ConfigError(
            [
                f"comm.backend=mpi: MPI sees {dist.get_world_size(world)} of {len(everyone)} ranks: submit the run to"
                " a Slurm whose srun starts MPI programs (srun --mpi=list), or use comm.backend=gloo"
            ]
        )
    teams = {}
    for name, groups in ({WORLD: [everyone]} | (cuts(nodes) if with_groups else {})).items():
        made = [world if name == WORLD else (make(ranks) if len(ranks) > 1 else None) for ranks in groups]
        mine = next(index for index, ranks in enumerate(groups) if rank in ranks)
        teams[name] = Team(
            name=name,
            ranks=tuple(groups[mine]),
            largest=max(map(len, groups)),
            group=made[mine],
            device=device,
            backend=backend,
        )
    return teams
