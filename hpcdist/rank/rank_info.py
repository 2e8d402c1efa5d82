"""Rank, world size and role of this process."""

from __future__ import annotations

from collections.abc import Mapping

from hpcdist.rank.roles import Roles
from hpcdist.rank.topology import Topology


class RankInfo:
    """The part of `Context` that describes this rank; it needs no connection to other ranks."""

    def __init__(self, topology: Topology, num_ranks_by_role: Mapping[str, int]) -> None:
        self.topology = topology
        self.roles = Roles.of(num_ranks_by_role, topology.world_size)

    @property
    def rank(self) -> int:
        """Rank of this process, 0 to `world_size` - 1."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return self.topology.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs metrics and writes checkpoints."""
        return self.topology.rank == 0

    @property
    def role(self) -> str:
        """Role of this rank: a key of the config's `roles`, or `trainer` in a run without roles."""
        return self.roles.of_rank(self.rank)[0]

    @property
    def role_index(self) -> int:
        """Index of this rank within its role, 0 to the number of ranks in the role - 1."""
        return self.roles.of_rank(self.rank)[1]

    @property
    def rpc_name(self) -> str:
        """Name of this rank in RPC, `role:index`."""
        return self.roles.name_of(self.rank)

    def ranks_of(self, role: str) -> range:
        """Return the ranks of a role, ordered by their index. Raises ConfigError if no rank has this role.

        Args:
            role: a key of the config's `roles`, or `trainer` in a run without roles.
        """
        return self.roles.ranks_of(role)
