"""The part of `Context` that records metrics, datasets, artifacts and the final model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from hpcdist.rank.rank_info import RankInfo
from hpcdist.rank.telemetry.heartbeat import Heartbeat
from hpcdist.rank.telemetry.step_timing import StepTimer, clock_of
from hpcdist.rank.topology import Topology
from hpcdist.rank.training_notes import TrainingNotes
from hpcdist.review.figures import Figure, write_figure
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.run.training_record import Dataset
from hpcdist.tracking.journal.writer import JournalWriter


class ContextRecords(RankInfo):
    """Records of one rank; see `Context`, which adds stopping, collectives and checkpoints."""

    def __init__(
        self,
        topology: Topology,
        num_ranks_by_role: Mapping[str, int],
        *,
        run: RunDir,
        attempt: Attempt,
        device: torch.device,
        journal: JournalWriter,
        heartbeat: Heartbeat,
    ) -> None:
        super().__init__(topology, num_ranks_by_role)
        self.run = run
        self.attempt = attempt
        self.device = device
        self.timer = StepTimer(clock_of(device))
        self._journal = journal
        self._heartbeat = heartbeat
        self._notes = TrainingNotes(attempt, is_main=self.is_main)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step. Only rank 0 records; other ranks only note the step, for messages about them.

        The call writes to the run's journal and takes microseconds; a separate process sends the journal to MLflow.
        Values must be numbers in host memory: `float(tensor)` of a CUDA tensor waits for the GPU, so log only every
        few steps. `step` is the x-axis in MLflow.
        """
        if self.is_main:
            self._journal.log(metrics, step)
        self._heartbeat.note_logged(metrics if self.is_main else {}, step)

    def log_dataset(
        self, name: str, *, split: str = "train", num_samples: int | None = None, digest: str = "", source: str = ""
    ) -> None:
        """Declare a dataset that this run reads, for MLflow's column Dataset. Only rank 0 records.

        Args:
            name: name of the dataset, such as `mnist`.
            split: the part of the dataset, or its use: `train`, `test`.
            num_samples: number of samples in the split, over all ranks.
            digest: a hash of the content, at most 36 characters; equal digests mean equal data.
            source: where the data comes from, such as a folder or a URL.
        """
        self._notes.add_dataset(
            Dataset(name=name, split=split, num_samples=num_samples, digest=digest[:36], source=source)
        )

    def log_model_size(self, num_parameters: int) -> None:
        """Record the number of trainable parameters of the whole model. `wrap` does so for a model that it wraps.

        Only rank 0 records.
        """
        self._notes.set_num_parameters(num_parameters)

    def artifact(self, name: str) -> Path:
        """Return the path at which to write an artifact of the MLflow run, such as `samples/step-100.txt`.

        Write the file on one rank. It is uploaded while the run continues, and again after each change.
        """
        path = self.run.artifacts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def figure(self, name: str, figure: Figure) -> None:
        """Write a figure for the report of the run, such as a confusion matrix. Only rank 0 writes.

        It becomes the artifact `figures/<name>.json`; a later figure of the same name replaces it. The classes of
        figures are in `hpcdist.review.figures`. A figure that cannot be written is only logged.
        """
        if self.is_main:
            write_figure(self.run.artifacts, name, figure, self._heartbeat.step)

    def export_model(self, module: nn.Module, example: torch.Tensor) -> None:
        """Write the final model in MLflow's format, for `mlflow.pytorch.load_model`. Only rank 0 writes.

        `module` is the bare model (`wrapped.module`); it is moved to the CPU and set to evaluation mode. `example` is
        one input batch of at least two samples, from which MLflow infers the model's signature.
        """
        if self.is_main:
            self._heartbeat.doing = "exporting the final model"
            self._heartbeat.beat()
            from hpcdist.checkpoint.export import export_model  # imports MLflow

            with self.timer.account.phase("checkpoint"):
                export_model(module, example, self.run)
