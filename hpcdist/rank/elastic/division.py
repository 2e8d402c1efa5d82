"""Division of a training set into global batches, micro-batches, and shares of the ranks."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpcdist.config.schema import Config, division_problems, largest_world_size
from hpcdist.errors import ConfigError
from hpcdist.rank.roles import share_of


@dataclass(frozen=True, kw_only=True)
class Division:
    """Which samples belong to which micro-batch, and which micro-batches to this rank.

    The order of the samples is a function of (seed, epoch), and their division one of the global batch and the number
    of micro-batches. Only `share` depends on the number of ranks. The last global batch of an epoch is smaller if the
    training set is no multiple of it: its last micro-batch may be smaller, and further ones are left out. The last
    micro-batch takes one sample more instead of leaving a single one, on which batch normalisation cannot train.
    """

    num_samples: int
    global_batch_size: int
    num_micro_batches: int
    seed: int
    rank: int
    world_size: int

    @property
    def micro_batch_size(self) -> int:
        """Number of samples of a full micro-batch."""
        return self.global_batch_size // self.num_micro_batches

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches of an epoch; the last one may be smaller."""
        return math.ceil(self._num_in_epoch / self.num_micro_batches)

    @property
    def _num_in_epoch(self) -> int:
        """Number of micro-batches with samples in an epoch."""
        size = self.micro_batch_size
        leaves_one = size > 1 and self.num_samples > 1 and self.num_samples % size == 1
        return self.num_samples // size if leaves_one else math.ceil(self.num_samples / size)

    def _begin(self, step_in_epoch: int, number: int) -> int:
        """Return the place of a micro-batch's first sample in the order of the epoch."""
        before = step_in_epoch * self.num_micro_batches + number
        return before * self.micro_batch_size if before < self._num_in_epoch else self.num_samples

    def batch_size(self, step_in_epoch: int) -> int:
        """Return the number of samples of a global batch."""
        return self._begin(step_in_epoch + 1, 0) - self._begin(step_in_epoch, 0)

    def num_filled(self, step_in_epoch: int) -> int:
        """Return the number of micro-batches with samples in a global batch."""
        return min(self.num_micro_batches, self._num_in_epoch - step_in_epoch * self.num_micro_batches)

    def share(self, step_in_epoch: int, rank: int | None = None) -> range:
        """Return the numbers of the micro-batches of a rank, by default of this one; empty if none has samples.

        Shares are contiguous, and their sizes differ by at most one before empty micro-batches are left out.
        """
        rank = self.rank if rank is None else rank
        end = self.num_filled(step_in_epoch)
        share = share_of(rank, self.world_size, self.num_micro_batches)
        return range(min(share.start, end), min(share.stop, end))

    def order(self, epoch: int) -> Tensor:
        """Return the order of all samples in an epoch, int64 [num_samples]. Do not change it: it is kept."""
        if epoch not in self._orders:
            self._orders.clear()
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._orders[epoch] = torch.randperm(self.num_samples, generator=generator)
        return self._orders[epoch]

    @functools.cached_property
    def _orders(self) -> dict[int, Tensor]:
        """The order of the last epoch that was asked for, by epoch."""
        return {}

    def samples(self, order: Tensor, step_in_epoch: int, number: int) -> Tensor:
        """Return the samples of a micro-batch, int64 [n], in the order of its epoch."""
        return order[self._begin(step_in_epoch, number) : self._begin(step_in_epoch, number + 1)]

    def rank_samples(self, epoch: int, first_step: int = 0) -> list[Tensor]:
        """Return the samples of each of this rank's micro-batches from a step of the epoch on, int64 [n] each."""
        order = self.order(epoch)
        return [
            self.samples(order, step, number)
            for step in range(first_step, self.steps_per_epoch)
            for number in self.share(step)
        ]


@dataclass(frozen=True, kw_only=True)
class SavedDivision:
    """The division with which a checkpoint was saved: it determines the samples of each step."""

    num_micro_batches: int
    global_batch_size: int | None = None  #: None in checkpoints of an hpcdist that did not save it
    num_samples: tuple[int, ...] = ()  #: of all training sets of the trainer

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SavedDivision | None:
        """Return the division in the state of a rank; None if the run was not elastic."""
        if state.get("num_micro_batches") is None:
            return None
        return cls(
            num_micro_batches=state["num_micro_batches"],
            global_batch_size=state.get("global_batch_size"),
            num_samples=tuple(state.get("num_samples") or ()),
        )

    def problems(self, config: Config, num_samples: int) -> list[str]:
        """Return the differences of a config and a training set from this division."""
        problems = []
        batch_size, number = config.data.global_batch_size, config.elastic.micro_batches
        if self.global_batch_size not in (None, batch_size):
            problems.append(
                f"data.global_batch_size={batch_size}, but the checkpoint was saved with {self.global_batch_size}:"
                " set that, or start a new run"
            )
        if number not in (None, self.num_micro_batches):
            problems.append(
                f"elastic.micro_batches={number}, but the checkpoint was saved with {self.num_micro_batches}:"
                " set that, or start a new run"
            )
        if self.num_samples and num_samples not in self.num_samples:
            problems.append(
                f"the training set has {num_samples} samples, but the checkpoint was saved with"
                f" {' and '.join(map(str, self.num_samples))}: use the same data, or start a new run"
            )
        return problems


def divide(
    config: Config, num_samples: int, rank: int, world_size: int, saved: SavedDivision | None = None
) -> Division:
    """Return the division of a training set.

    Args:
        saved: the division of the run's checkpoint. Its number of micro-batches holds unless the config sets one.

    Raises ConfigError if the run is not elastic, or the global batch cannot be divided.
    """
    batch_size = config.data.global_batch_size
    if batch_size is None:
        raise ConfigError(["data.global_batch_size is not set: micro-batches need it, such as 256"])
    default = saved.num_micro_batches if saved is not None else max(world_size, largest_world_size(config))
    number = config.elastic.micro_batches or default
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
