"""What is trained, on what, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import above, at_least, check
from hpcdist.config.schema.declaration import default_trainer
from hpcdist.config.schema.paths import IS_PATH


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What each rank runs. In YAML a plain string is short for `target`."""

    target: str = field(default_factory=default_trainer)
    """A shipped trainer, or your own as `package.module:function`, called with (ctx, cfg)."""
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
    root: str = field(default="${oc.env:HPCDIST_DATA_DIR,'~/.cache/hpcdist/data'}", metadata=IS_PATH)
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
        check(
            at_least(self, 1, "batch_size", "eval_batch_size", "image_size", "num_samples")
            + at_least(self, 0, "num_workers")
            + at_least(self, 2, "num_classes")
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
        check(
            above(self, 0, "lr", "clip_norm")
            + at_least(self, 0, "weight_decay", "momentum")
            + at_least(self, 1, "accumulate")
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
        check(at_least(self, 0, "warmup_steps", "final_factor"))


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
        check(at_least(self, 1, "epochs", "steps", "patience"))
