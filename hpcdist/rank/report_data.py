"""`ctx.report`: datasets, figures, artifacts and per-sample results that a trainer records for reviewers of a run."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from hpcdist.errors import TrainerError
from hpcdist.rank.process_group import Groups
from hpcdist.run.figures import Figure, write_figure
from hpcdist.run.folder import RunDir
from hpcdist.run.samples import MAX_RESULTS, npy
from hpcdist.run.training_record import DatasetRecord, TrainingNotes

log = logging.getLogger(__name__)


class ReportData:
    """Datasets, size of the model, figures, artifacts and per-sample results of a run. `Context` creates it.

    Args:
        notes: the file with facts about the training, which only rank 0 writes.
        monitor: the metric by which the best checkpoint is kept.
        step: returns the number of steps done.
        waiting: returns a block; its time counts as waiting for other ranks.
    """

    def __init__(
        self,
        run: RunDir,
        notes: TrainingNotes,
        groups: Groups,
        *,
        is_main: bool,
        monitor: str,
        step: Callable[[], int],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._run = run
        self._notes = notes
        self._groups = groups
        self._is_main = is_main
        self._monitor = monitor
        self._step = step
        self._waiting = waiting
        self._samples = b""  #: per-sample results that the next save with the monitored metric keeps

    def log_dataset(
        self, name: str, *, split: str = "train", num_samples: int | None = None, digest: str = "", source: str = ""
    ) -> None:
        """Declare a dataset that this run reads, for MLflow's column Dataset. Only rank 0 records.

        Args:
            name: name of the dataset, such as `mnist`.
            split: the part of the dataset, or its use: `train`, `test`.
            num_samples: number of samples in the split, over all ranks.
            digest: a hash of the content, at most 36 characters; equal digests mean equal data in the same order.
            source: where the data comes from, such as a folder or a URL.
        """
        self._notes.add_dataset(
            DatasetRecord(name=name, split=split, num_samples=num_samples, digest=digest[:36], source=source)
        )

    def log_model_size(self, num_parameters: int) -> None:
        """Record on rank 0 the number of trainable parameters of the whole model; `wrap` does so for its model."""
        self._notes.set_num_parameters(num_parameters)

    def artifact(self, name: str) -> Path:
        """Return the path at which to write an artifact of the MLflow run, such as `samples/step-100.txt`.

        Write the file on one rank. It is uploaded while the run continues, and again after each change.
        """
        path = self._run.artifacts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def figure(self, name: str, figure: Figure) -> None:
        """Write a figure for the report of the run, such as a confusion matrix. Only rank 0 writes.

        It becomes the artifact `figures/<name>.json`; a later figure of the same name replaces it. The classes of
        figures are in `hpcdist.run.figures`. A figure that cannot be written is only logged.
        """
        if self._is_main:
            write_figure(self._run.artifacts, name, figure, self._step())

    def log_samples(self, metric: str, values: Sequence[float] | Tensor, indices: Sequence[int] | Tensor) -> None:
        """Keep the result of each evaluated sample, with which `hpcdist compare` pairs two runs. Call it on every rank.

        The next `save` with the metric `checkpoint.monitor` writes them to `samples.npy` of the checkpoint, one byte
        per sample if all are 0 or 1, else four. `compare` also needs the digest of the dataset, see `log_dataset`.

        Args:
            metric: the mean of all results, such as `eval/accuracy`; any other than `checkpoint.monitor` is ignored.
            values: results of this rank's samples, [n]: whether each is correct, or a number such as its loss.
            indices: positions of these samples in the dataset, int [n], 0 to 999,999; TrainerError if they do not fit.
                Samples of several ranks, such as the padding of a DistributedSampler, count once.
        """
        if metric != self._monitor:
            return
        positions = torch.as_tensor(indices).cpu().long()
        results = torch.as_tensor(values).detach().cpu().float()
        bounds: list[int] = []  # the smallest and the largest position; none without samples
        if positions.numel():
            bounds = [int(position) for position in positions.aminmax()]
        has_one_each = positions.ndim == 1 and positions.shape == results.shape
        if not has_one_each or any(bound not in range(MAX_RESULTS) for bound in bounds):
            given = f"{list(results.shape)} values and {list(positions.shape)} indices"
            raise TrainerError(
                f"ctx.report.log_samples: {given} from {' to '.join(map(str, bounds))}:"
                f" pass a value and an index, 0 to {MAX_RESULTS - 1:,}, for each sample"
            )
        with self._waiting():
            gathered = self._groups.gather((positions, results))
        self._samples = b""
        if self._is_main:  # only rank 0 gets the parts of all ranks
            in_order = _in_order(gathered)
            if in_order:
                self._samples = npy(in_order)

    def take_samples(self, metrics: Mapping[str, float]) -> bytes:
        """Return the per-sample results for a checkpoint with these metrics; empty without the monitored one."""
        if self._monitor not in metrics:
            return b""
        samples = self._samples
        self._samples = b""
        return samples


def _in_order(parts: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Return the per-sample results of all ranks in the order of the dataset; empty if a sample has none."""
    indices = torch.cat([rank_indices for rank_indices, _ in parts])
    values = torch.cat([rank_values for _, rank_values in parts])
    num_samples = 0
    if len(indices):
        num_samples = int(indices.max()) + 1
    results = torch.full((num_samples,), math.nan)
    results[indices] = values  # a sample of several ranks keeps one of its results
    if not bool(results.isfinite().all()):
        log.warning("results of ctx.report.log_samples are not kept: some samples have none, or none that is finite")
        return []
    return results.tolist()
