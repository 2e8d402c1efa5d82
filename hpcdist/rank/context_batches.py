"""The part of `Context` with which a trainer divides its training set over a changing number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from hpcdist.config.schema import Config
from hpcdist.errors import ConfigError
from hpcdist.rank.checkpointing import RankCheckpoints
from hpcdist.rank.context_records import ContextRecords
from hpcdist.rank.elastic.division import Division, SavedDivision, divide
from hpcdist.rank.elastic.loader import MicroBatchLoader
from hpcdist.rank.elastic.micro_batches import MicroBatch, MicroBatches, sum_over_ranks
from hpcdist.rank.topology import Topology


class ContextBatches(ContextRecords):
    """Micro-batches of an elastic run. `Context` inherits from it."""

    _checkpoints: RankCheckpoints

    def __init__(self, config: Config, topology: Topology, **records: Any) -> None:
        super().__init__(topology, config.roles, **records)
        self.config = config
        self._has_stepped = False
        self._micro_batches: dict[int, MicroBatches] = {}

    def division(self, num_samples: int) -> Division:
        """Return the division of a training set of `num_samples` for `data.global_batch_size`.

        Its `steps_per_epoch` is the number of optimizer steps in an epoch. Raises ConfigError if the run is not
        elastic, the global batch cannot be divided for this number of ranks, or the restored checkpoint was saved with
        another division.
        """
        return self._batches_of(num_samples).division

    def micro_batches(self, model: DistributedDataParallel, step: int, num_samples: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of a step of an elastic run. Call it on every rank.

            for micro in ctx.micro_batches(model, step, len(x)):
                loss = F.mse_loss(model(x[micro.indices]), y[micro.indices])
                (loss * micro.weight).backward()
            optimizer.step()

        The loop must not be left early: at its end, the gradients of the model are those of the mean loss over the
        global batch, equal on all ranks, and replace earlier gradients. Random numbers that are drawn inside the loop
        follow from seed, step and micro-batch. A rank may have no micro-batch in the last step of an epoch.

        Args:
            model: a model from `wrap`.
            step: number of steps done; the epoch and the position in it follow from it.
            num_samples: number of samples in the training set.

        Raises ConfigError like `division`.
        """
        return self._batches_of(num_samples).of_step(model, step)

    def loader(self, dataset: Dataset[Any], **options: Any) -> MicroBatchLoader:
        """Return a loader of the micro-batches of an elastic run, with torch's DataLoader.

            loader = ctx.loader(dataset, num_workers=4)
            while step < total_steps and not stop:
                for micro, (x, y) in loader.of_step(model, step):
                    loss = F.mse_loss(model(x.to(ctx.device)), y.to(ctx.device))
                    (loss * micro.weight).backward()
                optimizer.step()
                step += 1

        The rules of `micro_batches` apply. Random numbers that the dataset draws for a sample follow from (seed, epoch,
        sample). So a resumed run continues exactly, on any number of ranks and with any number of workers.

        Args:
            dataset: the training set; it must have a length.
            **options: arguments of DataLoader, such as `num_workers` and `collate_fn`, except those of the order and
                of the batch size.
        """
        return MicroBatchLoader(dataset, lambda: self._batches_of(len(dataset)), options)  # type: ignore[arg-type]

    def _batches_of(self, num_samples: int) -> MicroBatches:
        if num_samples not in self._micro_batches:
            saved = self._checkpoints.division
            # A trainer may divide further training sets later.
            if saved is not None and not self._micro_batches and (problems := saved.problems(self.config, num_samples)):
                raise ConfigError(problems)
            division = divide(self.config, num_samples, self.rank, self.world_size, saved)
            self._checkpoints.division = SavedDivision(
                num_micro_batches=division.num_micro_batches,
                global_batch_size=division.global_batch_size,
                num_samples=tuple(sorted({num_samples, *(saved.num_samples if saved is not None else ())})),
            )
            self._micro_batches[num_samples] = MicroBatches(division, exact=self.config.elastic.exact)
        return self._micro_batches[num_samples]

    def _forget_division(self) -> None:
        """Divide the training set anew, because a restored checkpoint determines the number of micro-batches."""
        self._micro_batches.clear()

    def _ddp_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of DistributedDataParallel for a model of this run."""
        if self.config.data.global_batch_size is None:
            return dict(options)
        return {**options, "static_graph": False}  # not every backward pass exchanges gradients

    def _set_reduction(self, model: DistributedDataParallel) -> None:
        """Leave the exchange of buffers, and that of gradients in part, to `MicroBatches`."""
        if self.config.data.global_batch_size is None:
            return
        model.broadcast_buffers = False
        if not self.config.elastic.exact:
            model.register_comm_hook(None, sum_over_ranks)

    def _log_world_size(self, step: int) -> None:
        """Log the number of ranks of an elastic run at the first step of an attempt, and then regularly."""
        if self.config.data.global_batch_size is None or not self.is_main:
            return
        if not self._has_stepped or step % self.config.tracking.log_every_steps == 0:
            self._journal.log({"world_size": self.world_size}, step)
        self._has_stepped = True
