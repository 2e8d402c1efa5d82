"""Division of a training set into global batches, micro-batches, and shares of the ranks."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdist.config.schema import Config, division_problems, largest_world_size
from hpcdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Division:
    """Which samples belong to which micro-batch, and which micro-batches to this rank.

    The order of the samples is a function of (seed, epoch), and their division one of the global batch and the number
    of micro-batches. Only `share` depends on the number of ranks. The last global batch of an epoch is smaller if the
    training set is no multiple of it: its last micro-batch may be smaller, and further ones are left out.
    """

    num_samples: int
    global_batch_size: int
    num_micro_batches: int
    seed: int
    rank: int
    world_size: int

    @property
    def micro_batch_size(self) -> int:
        return self.global_batch_size // self.num_micro_batches

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_samples / self.global_batch_size)

    def batch_size(self, step_in_epoch: int) -> int:
        """Return the number of samples of a global batch."""
        return min(self.global_batch_size, self.num_samples - step_in_epoch * self.global_batch_size)

    def num_filled(self, step_in_epoch: int) -> int:
        """Return the number of micro-batches with samples in a global batch."""
        return math.ceil(self.batch_size(step_in_epoch) / self.micro_batch_size)

    def share(self, step_in_epoch: int, rank: int | None = None) -> range:
        """Return the numbers of the micro-batches of a rank, by default of this one; empty if none has samples.

        Shares are contiguous, and their sizes differ by at most one before empty micro-batches are left out.
        """
        rank = self.rank if rank is None else rank
        end = self.num_filled(step_in_epoch)
        low, high = (self.num_micro_batches * edge // self.world_size for edge in (rank, rank + 1))
        return range(min(low, end), min(high, end))

    def order(self, epoch: int) -> Tensor:
        """Return the order of all samples in an epoch, int64 [num_samples]."""
        return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self.seed + epoch))

    def samples(self, order: Tensor, step_in_epoch: int, number: int) -> Tensor:
        """Return the samples of a micro-batch, int64 [n], in the order of its epoch."""
        begin = step_in_epoch * self.global_batch_size + number * self.micro_batch_size
        end = step_in_epoch * self.global_batch_size + self.batch_size(step_in_epoch)
        return order[begin : min(begin + self.micro_batch_size, end)]

    def rank_samples(self, epoch: int, first_step: int = 0) -> Tensor:
        """Return the samples of this rank's micro-batches from a step of the epoch on, int64 [n].

        All micro-batches but the last one have `micro_batch_size` samples.
        """
        order = self.order(epoch)
        parts = [
            self.samples(order, step, number)
            for step in range(first_step, self.steps_per_epoch)
            for number in self.share(step)
        ]
        return torch.cat(parts) if parts else order[:0]


def divide(config: Config, num_samples: int, rank: int, world_size: int, saved: int | None = None) -> Division:
    """Return the division of a training set.

    Args:
        saved: number of micro-batches of the run's checkpoint, which holds unless the config sets one.

    Raises ConfigError if the run is not elastic, or the global batch cannot be divided.
    """
    batch_size = config.data.global_batch_size
    if batch_size is None:
        raise ConfigError(["data.global_batch_size is not set: micro-batches need it, such as 256"])
    number = config.elastic.micro_batches or saved or max(world_size, largest_world_size(config))
    problems = division_problems(batch_size, number)
    if world_size > number:
        problems.append(
            f"{world_size} ranks are more than the {number} micro-batches of a global batch (elastic.micro_batches):"
            " use fewer ranks"
        )
    if config.elastic.min_ranks is not None and world_size < config.elastic.min_ranks:
        problems.append(f"{world_size} ranks are fewer than elastic.min_ranks={config.elastic.min_ranks}: use more")
    if problems:
        raise ConfigError(problems)
    return Division(
        num_samples=num_samples,
        global_batch_size=batch_size,
        num_micro_batches=number,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
    )


def micro_batch_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of the random numbers of a micro-batch; `number` -1 is for the time after a step."""
    digest = hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
