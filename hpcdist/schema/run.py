"""The whole config of a run, and what only shows in its sections together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcdist.schema.checks import at_least, check
from hpcdist.schema.cluster import ClusterConfig
from hpcdist.schema.running import CheckpointConfig, LaunchConfig, TrackingConfig
from hpcdist.schema.training import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    ScheduleConfig,
    StopConfig,
    TrainerConfig,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """One distributed training run."""

    experiment: str = "hpcdist"
    """MLflow experiment, and folder of its runs."""
    name: str = ""
    """Name of the run; empty makes one of the trainer, the time and chance."""
    runs_dir: str = "${oc.env:HPCDIST_RUNS_DIR,runs}"
    """Where run folders are made; on a cluster a file system that all nodes share."""
    seed: int = 0
    """Seeds weights, shuffling, augmentation and dropout; each rank derives its own from it."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    params: dict[str, Any] = field(default_factory=dict)
    """Free keys for a trainer of your own; logged like all others."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a plain folder name (letters, digits, '.', '_', '-'), got {value!r}"
            for name, value in (("experiment", self.experiment), ("name", self.name))
            if value and not (value[0].isalnum() and all(char.isalnum() or char in "._-" for char in value))
        ]
        if not self.experiment:
            problems.append("experiment must not be empty")
        check(problems + at_least(self, 0, "seed"))


def cross_check(config: Config) -> list[str]:
    """Mistakes that no section can see alone, each with its fix."""
    problems = []
    if config.trainer.script and config.trainer.target != "ddp":
        problems.append("trainer.script and trainer.target exclude each other: remove one of them")
    if config.launch.device == "cpu":
        if config.launch.backend == "nccl":
            problems.append("launch.backend=nccl needs GPUs, but launch.device=cpu: use launch.backend=gloo")
        if config.precision.dtype == "fp16":
            problems.append("precision.dtype=fp16 needs a GPU, but launch.device=cpu: use precision.dtype=bf16")
        if config.model.sync_batch_norm:
            problems.append("model.sync_batch_norm needs GPUs, but launch.device=cpu: set it to false")
    return problems
