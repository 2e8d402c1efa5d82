"""Every key of a config: its type, its default and its meaning, each in exactly one place.

Plain frozen dataclasses, so that a rank needs nothing but this file to know what it was asked for. `config.py`
fills them from YAML and the command line. The line under a field is its documentation (`hpcdist config --schema`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal


def _check(problems: list[str]) -> None:
    """Raise one ValueError with a line a mistake; config.py puts the section's name in front of each."""
    if problems:
        raise ValueError("\n".join(problems))


def _at_least(section: object, low: float, *names: str) -> list[str]:
    values = {name: getattr(section, name) for name in names}
    return [
        f"{name} must be >= {low:g}, got {value}"
        for name, value in values.items()
        if value is not None and not value >= low
    ]


def _above(section: object, low: float, *names: str) -> list[str]:
    values = {name: getattr(section, name) for name in names}
    return [
        f"{name} must be > {low:g}, got {value}"
        for name, value in values.items()
        if value is not None and not value > low
    ]


def _strings(section: object, name: str) -> list[str]:
    return [
        f"{name}.{key} must be a string, got {value!r}"
        for key, value in getattr(section, name).items()
        if not isinstance(value, str)
    ]


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What each rank runs. In YAML a plain string is short for `target`."""

    target: str = "ddp"
    """A shipped trainer (`ddp`), or your own as `package.module:function`, called with (ctx, cfg)."""
    script: list[str] = field(default_factory=list)
    """Instead of `target`: an unchanged torchrun-style script and its arguments, `[train.py, --lr, "0.1"]`."""

    def __post_init__(self) -> None:
        module, colon, function = self.target.partition(":")
        if colon and not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ValueError(f"target must look like package.module:function, got {self.target!r}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = "simple_cnn"
    """`simple_cnn`, or one of torchvision's ResNets (`resnet18` … `resnet152`, `wide_resnet50_2`, …)."""
    channels_last: bool = False
    """Keep images and weights in NHWC order: faster convolutions on GPUs and on CPUs with large images."""
    sync_batch_norm: bool = False
    """Batch normalisation over the batches of all ranks (GPUs only)."""
    compile: bool = False
    """Compile the model with torch.compile; checkpoints stay free of its prefixes."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    name: Literal["digits", "mnist", "fashion_mnist", "cifar10", "image_folder", "synthetic"] = "digits"
    """The dataset. `digits` needs no download: it comes with scikit-learn."""
    root: str = "${oc.env:HPCDIST_DATA_DIR,'~/.cache/hpcdist/data'}"
    """Folder that holds the datasets, in torchvision's layout (for image_folder: `train/` and `val/` or `test/`)."""
    download: bool = True
    """Download what is missing under `root`, once per node."""
    batch_size: int = 64
    """Training samples per rank and micro-batch."""
    eval_batch_size: int = 256
    """Test samples per rank and batch."""
    image_size: int | None = None
    """Side of the square images in pixels; null keeps the dataset's own (image_folder: 224)."""
    augment: bool = False
    """Random crops and flips of training images; the same ones again after a resume."""
    preload: Literal["auto", "always", "never"] = "auto"
    """Hold the whole set in memory as one tensor; `auto` does so up to 1 GiB."""
    num_workers: int = 2
    """Loader processes per rank, for sets that are not preloaded."""
    num_samples: int = 2048
    """Training samples of the synthetic set; its test set has a fifth of them."""
    num_classes: int = 10
    """Classes of the synthetic set."""

    def __post_init__(self) -> None:
        _check(
            _at_least(self, 1, "batch_size", "eval_batch_size", "image_size", "num_samples")
            + _at_least(self, 0, "num_workers")
            + _at_least(self, 2, "num_classes")
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    name: Literal["adam", "adamw", "sgd"] = "adam"
    """The optimizer; its fused implementation is used."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.0
    """L2 penalty (adam, sgd) or decoupled decay (adamw)."""
    momentum: float = 0.9
    """Momentum of sgd."""
    clip_norm: float | None = None
    """Clip the gradient's total norm to this; null leaves it alone."""
    accumulate: int = 1
    """Micro-batches per optimizer step; gradients are exchanged in the last one only."""

    def __post_init__(self) -> None:
        _check(
            _above(self, 0, "lr", "clip_norm")
            + _at_least(self, 0, "weight_decay", "momentum")
            + _at_least(self, 1, "accumulate")
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    name: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; `cosine` ends at the last step of the run."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    final_factor: float = 0.0
    """Where `cosine` ends, as a part of `optim.lr`."""

    def __post_init__(self) -> None:
        _check(_at_least(self, 0, "warmup_steps", "final_factor"))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the forward pass under autocast; fp16 scales the loss and needs a GPU."""
    tf32: bool = True
    """Allow TF32 in fp32 products on GPUs that have it."""


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """When the run is over. The first rule that holds ends it."""

    epochs: int = 3
    """Passes over the training set."""
    steps: int | None = None
    """At most this many optimizer steps."""
    patience: int | None = None
    """End after this many evaluations without a better `checkpoint.best`."""
    threshold: float | None = None
    """End once `checkpoint.best` has reached this value."""

    def __post_init__(self) -> None:
        _check(_at_least(self, 1, "epochs", "steps", "patience"))


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
        _check(_at_least(self, 1, "every_steps") + _at_least(self, 2, "keep_last"))


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
        _check(
            _at_least(self, 1, "log_every")
            + _at_least(self, 0, "system_interval_s", "drain_timeout_s")
            + _strings(self, "tags")
        )


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    ranks: int = 0
    """Ranks on this machine; 0 means one per visible GPU, or two where there is none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; `auto` takes GPUs where there are any."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective backend; `auto` is nccl on GPUs and gloo on CPUs."""
    threads: int = 0
    """Processor threads per rank (OMP_NUM_THREADS); 0 shares the cores out evenly."""
    init_timeout_s: float = 120.0
    """How long the ranks may take to find each other."""
    hang_timeout_s: float = 1800.0
    """A run without progress for this long is taken for hung."""
    stop_grace_s: float = 120.0
    """How long ranks may take to save and leave when asked to stop."""
    max_restarts: int = 3
    """Failures answered by a restart from the newest checkpoint."""
    env: dict[str, str] = field(default_factory=dict)
    """More environment variables for the ranks; they win over hpcdist's own."""
    code_max_mb: float = 50.0
    """Largest code snapshot in MB."""

    def __post_init__(self) -> None:
        _check(
            _at_least(self, 0, "ranks", "threads", "max_restarts")
            + _above(self, 0, "init_timeout_s", "hang_timeout_s", "stop_grace_s", "code_max_mb")
            + _strings(self, "env")
        )


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What is asked of Slurm. `configs/cluster/NAME.yaml` holds a site's values for `--cluster NAME`."""

    partition: str | None = None
    """Slurm partition; null leaves the choice to Slurm."""
    account: str | None = None
    """Account that the job is charged to."""
    qos: str | None = None
    """Quality of service."""
    nodes: int = 1
    """Number of nodes."""
    tasks_per_node: int = 1
    """Ranks on each node; with GPUs usually one per GPU."""
    gpus_per_node: int = 0
    """GPUs on each node."""
    cpus_per_task: int = 1
    """Cores for each rank."""
    mem: str | None = None
    """Memory per node as Slurm writes it, `64G`; null leaves the partition's default."""
    time_min: int = 60
    """Time limit in minutes; a run that needs longer saves, requeues itself and goes on."""
    signal_lead_s: int = 120
    """How long before the end of the allocation the ranks are asked to save and leave."""
    max_requeues: int = 50
    """Trips through the queue, for time limits and lost nodes, before the run is ended."""
    constraint: str | None = None
    """Node features, as `sbatch --constraint` takes them."""
    exclude: str | None = None
    """Nodes to stay away from."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Any further flag of sbatch by its long name: `mail-type: FAIL`."""
    srun: dict[str, str] = field(default_factory=dict)
    """Any further flag of srun by its long name."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for the job, ranks included."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that the batch script runs first, such as `module load cuda`."""

    def __post_init__(self) -> None:
        _check(
            _at_least(self, 1, "nodes", "tasks_per_node", "cpus_per_task", "time_min")
            + _at_least(self, 0, "gpus_per_node", "signal_lead_s", "max_requeues")
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
        _check(problems + _at_least(self, 0, "seed"))


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


def describe(section: type = Config, prefix: str = "") -> list[tuple[str, str, Any, str]]:
    """Every key as (path, type, default, documentation), from the source of these dataclasses."""
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    documentation: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for statement, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotations[statement.target.id] = ast.unparse(statement.annotation)
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                documentation[statement.target.id] = str(following.value.value)
    rows: list[tuple[str, str, Any, str]] = []
    for key in fields(section):
        default = key.default if not callable(key.default_factory) else key.default_factory()
        if hasattr(default, "__dataclass_fields__"):
            rows += describe(type(default), f"{prefix}{key.name}.")
        else:
            rows.append((prefix + key.name, annotations[key.name], default, documentation.get(key.name, "")))
    return rows
