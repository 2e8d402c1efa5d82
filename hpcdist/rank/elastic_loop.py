"""`ctx.elastic`: the micro-batches of a run with `data.global_batch_size`, for the loop of a trainer."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from hpcdist.config.schema import Config
from hpcdist.config.trainer_declaration import find_trainer
from hpcdist.errors import ConfigError
from hpcdist.rank.micro_batches import BatchDivision, MicroBatch, MicroBatchLoader, SavedDivision, divide, micro_batches


class Elastic:
    """Divides global batches among the ranks. `Context` creates it.

    Args:
        fitted: the number of micro-batches that `launch.fit_batch` has found, if any.

    Attributes:
        is_on: whether the run has `data.global_batch_size`; without it the methods raise ConfigError.
        is_of_trainer: whether the trainer divides the global batches itself, without these methods.
    """

    def __init__(self, config: Config, rank: int, world_size: int, fitted: int | None = None) -> None:
        self.is_on = config.data.global_batch_size is not None
        trainer = find_trainer(config.trainer.target)
        self.is_of_trainer = trainer is not None and trainer.divides_batches
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._fitted = fitted
        self._divisions: dict[int, BatchDivision] = {}
        self._saved: SavedDivision | None = None  #: which a checkpoint holds, once known

    @property
    def num_micro_batches(self) -> int | None:
        """The number of micro-batches; None before the first `division`, and if the run is not elastic."""
        for division in self._divisions.values():
            return division.num_micro_batches
        return None

    def restore(self, saved: SavedDivision | None) -> None:
        """Take the number of micro-batches of a checkpoint."""
        self._saved = saved
        self._divisions.clear()

    def saved_state(self) -> dict[str, Any]:
        """Return the division as a checkpoint holds it; empty if the run is not elastic."""
        if self._saved is None:
            return {}
        return asdict(self._saved)

    def division(self, num_samples: int) -> BatchDivision:
        """Return the division of a training set of `num_samples` for `data.global_batch_size`.

        Its `steps_per_epoch` is the number of optimizer steps in an epoch. Raises ConfigError if the run is not
        elastic, the global batch cannot be divided for this number of ranks, or the restored checkpoint was saved with
        another division.
        """
        if num_samples in self._divisions:
            return self._divisions[num_samples]
        saved = self._saved
        sizes = {num_samples}  # of all training sets
        if saved is not None:
            sizes.update(saved.num_samples)
            # Only the first training set is compared: a trainer may divide further ones later.
            if not self._divisions:
                problems = saved.problems(self._config, num_samples, self._fitted)
                if problems:
                    raise ConfigError(*problems)
        division = divide(self._config, num_samples, self._rank, self._world_size, saved, self._fitted)
        self._saved = SavedDivision(
            num_micro_batches=division.num_micro_batches,
            global_batch_size=division.global_batch_size,
            num_samples=tuple(sorted(sizes)),
        )
        self._divisions[num_samples] = division
        return division

    def micro_batches(self, model: DistributedDataParallel, step: int, num_samples: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of a step of an elastic run. Call it on every rank.

            for micro in ctx.elastic.micro_batches(model, step, len(x)):
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
        return micro_batches(self.division(num_samples), model, step, exact=self._config.elastic.exact)

    def loader(self, dataset: Dataset[Any], **options: Any) -> MicroBatchLoader:
        """Return a loader of the micro-batches of an elastic run, with torch's DataLoader.

            loader = ctx.elastic.loader(dataset, num_workers=4)
            for step in ctx.steps(total_steps, model=model, optimizer=optimizer):
                for micro, (x, y) in loader.of_step(model, step):
                    loss = F.mse_loss(model(x.to(ctx.device)), y.to(ctx.device))
                    (loss * micro.weight).backward()
                optimizer.step()

        The rules of `micro_batches` apply. Random numbers that the dataset draws for a sample follow from (seed, epoch,
        sample). So a resumed run continues exactly, on any number of ranks and with any number of workers.

        Args:
            dataset: the training set; it must have a length.
            **options: arguments of DataLoader, such as `num_workers` and `collate_fn`, except those of the order and
                of the batch size.
        """
        size = len(dataset)  # type: ignore[arg-type]
        return MicroBatchLoader(dataset, lambda: self.division(size), options, exact=self._config.elastic.exact)
