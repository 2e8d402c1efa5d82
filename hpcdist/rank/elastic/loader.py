"""The micro-batches of an elastic run, read from a dataset by torch's DataLoader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from hpcdist.rank.elastic.division import Division, micro_batch_seed
from hpcdist.rank.elastic.micro_batches import MicroBatch, MicroBatches
from hpcdist.rank.seeding import seed_everything


class MicroBatchLoader:
    """Reads the samples of this rank's micro-batches; `Context.loader` creates it."""

    def __init__(self, dataset: Dataset[Any], batches: Callable[[], MicroBatches], options: dict[str, Any]) -> None:
        self._dataset = dataset
        self._batches = batches
        self._options = options
        self._data: Iterator[Any] = iter(())
        self._next_step = -1

    def of_step(self, model: DistributedDataParallel, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches of a step with their data; see `Context.loader`."""
        batches = self._batches()
        if step != self._next_step:
            self._data = iter(self._from_step(batches.division, step))
        self._next_step = step + 1
        for micro in batches.of_step(model, step):
            batch = next(self._data)
            # Without workers, reading has seeded the generators of this process.
            seed_everything(micro_batch_seed(batches.division.seed, step, micro.number))
            yield micro, batch

    def _from_step(self, division: Division, step: int) -> DataLoader[Any]:
        """Return a loader for this step and all later ones, so that workers read ahead and live on between epochs."""
        epoch, first_step = divmod(step, division.steps_per_epoch)
        micro_batches = (
            [(each, index) for index in samples.tolist()]
            for each in itertools.count(epoch)
            for samples in division.rank_samples(each, first_step if each == epoch else 0)
        )
        # A generator of its own: without it the loader draws a seed from the global one.
        options = {"generator": torch.Generator(), **self._options}
        return DataLoader(_SeededSamples(self._dataset, division.seed), batch_sampler=micro_batches, **options)


class _SeededSamples(Dataset[Any]):
    """A dataset whose random numbers, such as those of augmentation, follow from (seed, epoch, sample)."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_everything(micro_batch_seed(self._seed, -1 - epoch, index))  # no step is negative
        return self._dataset[index]
