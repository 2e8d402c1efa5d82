"""Rank, world size and role of this process, and rank 0's record of what an attempt trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from hpcdist.config.topology import Roles, Topology
from hpcdist.run.folder import Attempt
from hpcdist.run.records import DatasetRecord, TrainingRecord, write_training

# Rank, world size and role of this process.


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


# Rank 0's record of what an attempt trains: datasets, model size, and the step at which the attempt began.

log = logging.getLogger(__name__)


class TrainingNotes:
    """Writes `training.json` of an attempt at each change; does nothing on ranks other than 0."""

    def __init__(self, attempt: Attempt, *, is_main: bool) -> None:
        self._attempt = attempt
        self._is_main = is_main
        self._record = TrainingRecord()

    def begin(self, first_step: int) -> None:
        """Record the start of training: the number of steps that earlier attempts have done."""
        self._write(replace(self._record, first_step=first_step, began=time.time()))

    def add_dataset(self, dataset: DatasetRecord) -> None:
        """Record a dataset; a second one of the same name and split replaces the first."""
        others = [one for one in self._record.datasets if (one.name, one.split) != (dataset.name, dataset.split)]
        self._write(replace(self._record, datasets=(*others, dataset)))

    def set_num_parameters(self, num_parameters: int) -> None:
        """Record the number of the model's parameters."""
        self._write(replace(self._record, num_parameters=num_parameters))

    def _write(self, record: TrainingRecord) -> None:
        if not self._is_main or record == self._record:
            return
        self._record = record
        try:
            write_training(self._attempt, record)
        except OSError as error:
            log.warning("training.json of attempt %d cannot be written: %s", self._attempt.number, error.strerror)
