"""What is kept of a run, where it is shown, and how its ranks are started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import above, at_least, check, strings, variables


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every_steps: int | None = None
    """Save each so many optimizer steps, besides the save at the end of each epoch."""
    keep_last: int = 2
    """Newest checkpoints to keep; the best one is kept as well."""
    best: str = "eval/accuracy"
    """Metric that decides which checkpoint is the best."""
    best_mode: Literal["max", "min"] = "max"
    """Whether more or less of it is better."""

    def __post_init__(self) -> None:
        check(at_least(self, 1, "every_steps") + at_least(self, 2, "keep_last"))


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    uri: str = "${oc.env:MLFLOW_TRACKING_URI,''}"
    """MLflow server or database; empty means sqlite beside the runs, `<runs_dir>/mlflow.db`."""
    register_as: str | None = None
    """Register the final model under this name in MLflow's model registry."""
    log_every: int = 50
    """Optimizer steps between two points of the training metrics."""
    system_interval_s: float = 10.0
    """Seconds between two points of each node's system metrics; 0 turns them off."""
    drain_timeout_s: float = 60.0
    """How long the end of a run waits for MLflow to take what is left; `hpcdist sync` ships the rest."""
    tags: dict[str, str] = field(default_factory=dict)
    """More tags for the MLflow run."""

    def __post_init__(self) -> None:
        check(
            at_least(self, 1, "log_every")
            + at_least(self, 0, "system_interval_s", "drain_timeout_s")
            + strings(self, "tags")
        )


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    ranks: int = 0
    """Ranks on this machine; 0 means one per visible GPU, or two where there is none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; `auto` takes GPUs where there are any."""
    devices: dict[str, str] = field(default_factory=dict)
    """Device by role where it is not launch.device: `parameter_server: cpu` leaves the GPUs to the others."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective backend; `auto` is nccl where all ranks have GPUs, else gloo."""
    threads: int = 0
    """Processor threads per rank (OMP_NUM_THREADS); 0 shares the cores out evenly."""
    init_timeout_s: float = 120.0
    """How long the ranks may take to be started, and then to find each other."""
    hang_timeout_s: float = 1800.0
    """A run without progress for this long is taken for hung."""
    stop_grace_s: float = 120.0
    """How long ranks may take to save and leave when asked to stop."""
    max_restarts: int = 3
    """Failures answered by a restart from the newest checkpoint."""
    env: dict[str, str] = field(default_factory=dict)
    """More environment variables for the ranks; they win over hpcdist's own."""
    log_max_mb: float = 1000.0
    """Largest log of a rank, the supervisor or the shipper in MB; then its middle is removed. 0 means no limit."""
    code_max_mb: float = 50.0
    """Largest code snapshot in MB."""

    def __post_init__(self) -> None:
        check(
            at_least(self, 0, "ranks", "threads", "max_restarts", "log_max_mb")
            + above(self, 0, "init_timeout_s", "hang_timeout_s", "stop_grace_s", "code_max_mb")
            + strings(self, "env")
            + variables(self, "env")
            + [
                f"devices.{role} must be auto, cpu or cuda, got {device!r}"
                for role, device in self.devices.items()
                if device not in ("auto", "cpu", "cuda")
            ]
        )
