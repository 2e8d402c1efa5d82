"""The sections that several trainers share: model, data, optimizer, schedule, precision and stop rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcdist.config.schema.checks import above, at_least, check
from hpcdist.config.schema.declaration import default_trainer
from hpcdist.config.schema.paths import IS_PATH


def script_name(command: Sequence[str]) -> str:
    """Return the name of the file in `[script, argument, …]`, or of the module in `[-m, module, argument, …]`."""
    return "".join(command[1:2]) if command and command[0] == "-m" else Path(*command[:1]).name


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The code that each rank runs. In YAML a plain string is short for `target`."""

    target: str = field(default_factory=default_trainer)
    """A shipped trainer, or a function of your own as `package.module:function`, called with (ctx, cfg)."""
    script: list[str] = field(default_factory=list)
    """Instead of `target`: a torchrun script and its arguments, `[train.py, --lr, 0.1]` or `[-m, package.module]`."""

    @property
    def script_file(self) -> Path | None:
        """The file of the script; None for a module, and without a script."""
        return Path(self.script[0]) if self.script and self.script[0] != "-m" else None

    @property
    def script_name(self) -> str:
        """The name of the script's file or module; empty without a script."""
        return script_name(self.script)

    def __post_init__(self) -> None:
        if self.script[:1] == ["-m"] and not all(part.isidentifier() for part in self.script_name.split(".")):
            raise ValueError(f"script needs a module after -m, as in [-m, package.module], got {self.script_name!r}")
        if self.target.endswith(".py"):
            raise ValueError(f"target is a trainer; for a script write trainer: {{script: [{self.target}]}}")
        module, colon, function = self.target.partition(":")
        if colon and not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ValueError(f"target must look like package.module:function, got {self.target!r}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and how it is executed."""

    name: str = "simple_cnn"
    """`simple_cnn`, or one of torchvision's ResNets (`resnet18` … `resnet152`, `wide_resnet50_2`, …)."""
    channels_last: bool = False
    """Use the channels-last memory format: faster convolutions on GPUs, and on CPUs for large images."""
    sync_batch_norm: bool = False
    """Synchronize batch normalisation over all ranks (GPUs only)."""
    compile: bool = False
    """Compile the model with torch.compile; the names in checkpoints do not change."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset, and how its samples are divided into batches."""

    name: Literal["digits", "mnist", "fashion_mnist", "cifar10", "image_folder", "synthetic"] = "digits"
    """Dataset. `digits` is part of scikit-learn and needs no download."""
    root: str = field(default="${oc.env:HPCDIST_DATA_DIR,'~/.cache/hpcdist/data'}", metadata=IS_PATH)
    """Folder of the datasets, in torchvision's layout (for image_folder: `train/` and `val/` or `test/`)."""
    download: bool = True
    """Download a missing dataset to `root`, once per node."""
    batch_size: int = 64
    """Training samples per rank and micro-batch, unless global_batch_size is set."""
    global_batch_size: int | None = None
    """Training samples of an optimizer step on any number of ranks (see `elastic`); null: batch_size on each rank."""
    eval_batch_size: int = 256
    """Test samples per rank and batch."""
    image_size: int | None = None
    """Height and width of the images in pixels; null keeps those of the dataset (image_folder: 224)."""
    augment: bool = False
    """Augment training images by random crops and flips, which a resume reproduces."""
    preload: Literal["auto", "always", "never"] = "auto"
    """Keep the whole dataset in memory as one tensor; `auto` does so up to 1 GiB."""
    num_workers: int = 2
    """Data loader processes per rank, for datasets that are not preloaded."""
    num_samples: int = 2048
    """Training samples of the synthetic dataset; its test set is a fifth as large."""
    num_classes: int = 10
    """Classes of the synthetic dataset."""

    def __post_init__(self) -> None:
        check(
            at_least(self, 1, "batch_size", "global_batch_size", "eval_batch_size", "image_size", "num_samples")
            + at_least(self, 0, "num_workers")
            + at_least(self, 2, "num_classes")
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer, in its fused implementation."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.0
    """L2 penalty (adam, sgd) or decoupled weight decay (adamw)."""
    momentum: float = 0.9
    """Momentum of sgd."""
    max_grad_norm: float | None = None
    """Maximum norm of the gradients, for clipping; null disables it."""
    grad_accum_steps: int = 1
    """Micro-batches per optimizer step; gradients are reduced after the last one only."""

    def __post_init__(self) -> None:
        check(
            above(self, 0, "lr", "max_grad_norm")
            + at_least(self, 0, "weight_decay", "momentum")
            + at_least(self, 1, "grad_accum_steps")
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps."""

    name: Literal["constant", "cosine"] = "constant"
    """Learning-rate schedule after the warmup; `cosine` ends at the last step of the run."""
    warmup_steps: int = 0
    """Optimizer steps of linear warmup."""
    min_lr_factor: float = 0.0
    """Final learning rate of `cosine`, as a fraction of `optim.lr`."""

    def __post_init__(self) -> None:
        check(at_least(self, 0, "warmup_steps", "min_lr_factor"))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Data types of the computations."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type of the forward pass under autocast; fp16 uses loss scaling and needs a GPU."""
    tf32: bool = True
    """Allow TF32 for fp32 matrix products and convolutions on GPUs that support it."""


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """Rules that end the run; the first one that applies does."""

    max_epochs: int = 3
    """Number of passes over the training set."""
    max_steps: int | None = None
    """Maximum number of optimizer steps; null means no limit."""
    patience: int | None = None
    """Stop after this many evaluations without an improvement of `checkpoint.monitor`."""
    threshold: float | None = None
    """Stop when `checkpoint.monitor` reaches this value."""
    pause_at_step: int | None = None
    """Save and stop after this step, like `hpcdist stop`; unlike `max_steps`, it does not change the schedule."""

    nan_losses: int | None = None
    """End the run as failed after this many NaN or infinite values of a loss in a row; null only warns."""

    def __post_init__(self) -> None:
        check(at_least(self, 1, "max_epochs", "max_steps", "patience", "pause_at_step", "nan_losses"))
