"""The sections of a config on the training: trainer, model, data, optimizer, schedule, precision, stop, elastic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcdist.config.section import IS_PATH, ConfigSection, number
from hpcdist.config.trainer_declaration import default_trainer


def script_name(command: Sequence[str]) -> str:
    """Return the name of the file in `[script, argument, …]`, or of the module in `[-m, module, argument, …]`."""
    if not command:
        return ""
    if command[0] == "-m":
        return "".join(command[1:2])  # empty if the module is missing
    return Path(command[0]).name


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(ConfigSection):
    """The code that each rank runs. In YAML a plain string is short for `target`."""

    target: str = field(default_factory=default_trainer)
    """A shipped trainer, or a function of your own as `package.module:function`, called with (ctx, cfg)."""
    script: list[str] = field(default_factory=list)
    """Instead of `target`: a torchrun script and its arguments, `[train.py, --lr, 0.1]` or `[-m, package.module]`."""

    @property
    def script_file(self) -> Path | None:
        """The file of the script; None for a module, and without a script."""
        if not self.script or self.script[0] == "-m":
            return None
        return Path(self.script[0])

    @property
    def script_name(self) -> str:
        """The name of the script's file or module; empty without a script."""
        return script_name(self.script)

    def problems(self) -> list[str]:
        if self.script[:1] == ["-m"] and not _is_module_name(self.script_name):
            return [f"script needs a module after -m, as in [-m, package.module], got {self.script_name!r}"]
        if self.target.endswith(".py"):
            return [f"target is a trainer; for a script write trainer: {{script: [{self.target}]}}"]
        module, colon, function = self.target.partition(":")
        if colon and not (function.isidentifier() and _is_module_name(module)):
            return [f"target must look like package.module:function, got {self.target!r}"]
        return []


def _is_module_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


#: Endings of the files that `model.init_from` reads.
WEIGHT_SUFFIXES = (".pt", ".pth", ".safetensors")
#: A folder with this file is a model in Hugging Face's format.
HUGGING_FACE_CONFIG = "config.json"
#: A value that a config leaves to its user, as OmegaConf writes it.
NOT_SET = "???"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigSection):
    """The model, the weights it starts from, and how it is executed."""

    name: str = "simple_cnn"
    """`simple_cnn`, or one of torchvision's ResNets (`resnet18` … `resnet152`, `wide_resnet50_2`, …)."""
    channels_last: bool = False
    """Use the channels-last memory format: faster convolutions on GPUs, and on CPUs for large images."""
    compile: bool = False
    """Compile the model with torch.compile; the names in checkpoints do not change."""
    init_from: str = ""
    """Start from a `.pt`, `.pth` or `.safetensors` file, a Hugging Face folder, a checkpoint, a run or `models:/…`."""
    init_from_skip: list[str] = field(default_factory=list)
    """Patterns of the weights that `init_from` leaves out, such as `[fc.*]` for a new head."""

    def problems(self) -> list[str]:
        if self.init_from_skip and not self.init_from:
            return ["init_from_skip needs init_from: set it, or remove init_from_skip"]
        return []


@dataclass(frozen=True, kw_only=True)
class DataConfig(ConfigSection):
    """The dataset, and how its samples are divided into batches."""

    name: Literal["digits", "mnist", "fashion_mnist", "cifar10", "image_folder", "synthetic"] = "digits"
    """Dataset. `digits` is part of scikit-learn and needs no download."""
    root: str = field(default="${oc.env:HPCDIST_DATA_DIR,'~/.cache/hpcdist/data'}", metadata=IS_PATH)
    """Folder of the datasets; missing ones are downloaded to it. image_folder needs `train/` and `val/` or `test/`."""
    batch_size: int = number(64, least=1)
    """Training samples per rank and step, unless global_batch_size is set."""
    global_batch_size: int | None = number(None, least=1)
    """Training samples of an optimizer step on any number of ranks (see `elastic`); null: batch_size on each rank."""
    image_size: int | None = number(None, least=1)
    """Height and width of the images in pixels; null keeps those of the dataset (image_folder: 224)."""
    augment: bool = False
    """Augment training images by random crops and flips, which a resume reproduces."""
    num_workers: int = number(2, least=0)
    """Data loader processes per rank, for datasets beyond 1 GiB and augmented image folders; others are in memory."""
    num_samples: int = number(2048, least=1)
    """Training samples of the synthetic dataset; its test set is a fifth as large."""
    num_classes: int = number(10, least=2)
    """Classes of the synthetic dataset."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(ConfigSection):
    """The optimizer."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer, in its fused implementation."""
    lr: float = number(1e-3, above=0)
    """Peak learning rate."""
    weight_decay: float = number(0.0, least=0)
    """L2 penalty (adam, sgd) or decoupled weight decay (adamw)."""
    momentum: float = number(0.9, least=0)
    """Momentum of sgd."""
    max_grad_norm: float | None = number(None, above=0)
    """Maximum norm of the gradients, for clipping; null disables it."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(ConfigSection):
    """The learning rate over the steps."""

    name: Literal["constant", "cosine", "wsd"] = "constant"
    """Learning rate after the warmup: `cosine` falls to 0 at the last step, `wsd` falls linearly at the end only."""
    warmup_steps: int = number(0, least=0)
    """Optimizer steps of linear warmup."""
    decay_fraction: float = number(0.2, above=0, most=1)
    """Share of the steps in which `wsd` falls to 0."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Data types of the computations."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type of the forward pass under autocast; fp16 uses loss scaling and needs a GPU, fp32 uses TF32 there."""


@dataclass(frozen=True, kw_only=True)
class StopConfig(ConfigSection):
    """Rules that end the run; the first one that applies does."""

    max_epochs: int = number(3, least=1)
    """Number of passes over the training set."""
    max_steps: int | None = number(None, least=1)
    """Maximum number of optimizer steps; null means no limit."""
    patience: int | None = number(None, least=1)
    """Stop after this many evaluations without an improvement of `checkpoint.monitor`."""
    threshold: float | None = None
    """Stop when `checkpoint.monitor` reaches this value."""
    nan_losses: int | None = number(None, least=1)
    """End the run as failed after this many logged steps in a row with a NaN or infinite loss; null only warns."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(ConfigSection):
    """`data.global_batch_size` makes a run elastic; the keys of this section determine its details."""

    micro_batches: int | None = number(None, least=1)
    """Equal parts of the global batch that are computed one by one; null: the largest number of ranks of the config."""
    exact: bool = False
    """Sum gradients in an order that does not depend on the number of ranks: bit-equal weights on CPUs, slower."""


def division_problems(global_batch_size: int, num_micro_batches: int) -> list[str]:
    """Return the mistake in a global batch that cannot be divided into equal micro-batches."""
    if global_batch_size % num_micro_batches == 0:
        return []
    nearest = max(1, round(global_batch_size / num_micro_batches)) * num_micro_batches
    return [
        f"data.global_batch_size={global_batch_size} cannot be divided into {num_micro_batches} equal micro-batches:"
        f" use {nearest}, or set elastic.micro_batches to a divisor that is not less than the number of ranks"
    ]
