"""The keys of a config; `launch_schema.py` and the packages of the trainers have the other sections.

The sections are frozen dataclasses that need only the standard library. `config/loading.py` fills them from YAML and
the command line. The string under a field is its documentation (`hpcdist config --schema`).
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from hpcdist.config.launch_schema import (
    IS_PATH,
    MAX_RANKS,
    CheckpointConfig,
    ClusterConfig,
    ConfigSection,
    ContainerConfig,
    LaunchConfig,
    NotifyConfig,
    PreflightConfig,
    TrackingConfig,
    number,
    one_line,
)
from hpcdist.errors import ConfigError

# The declaration of a shipped trainer, through which the packages above this one use it. The declarations import no
# torch.

#: A check of a whole `Config`, whose module imports this one.
Check = Callable[[Any], list[str]]


def _no_problems(config: object) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A shipped trainer: the attribute `TRAINER` of its package. Its `train` module holds `train(ctx, cfg)`."""

    section: type | None = None
    """The dataclass of its own config section; the key of the section is the trainer's name."""
    shared_sections: tuple[str, ...] = ()
    """The sections for several trainers that this one reads: some of model, data, optim, schedule and precision."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Its roles in rank order, each with an example of a count; empty if it has none."""
    single_roles: tuple[str, ...] = ()
    """The roles that have exactly one rank."""
    is_elastic: bool = False
    """Whether the trainer supports `data.global_batch_size`."""
    check: Check = _no_problems
    """Return the mistakes in a config of this trainer that no section can detect alone."""
    check_host: Check = _no_problems
    """Return the problems that only the host of the supervisor can detect, such as missing files."""
    fixed_keys: tuple[str, ...] = ()
    """The keys that a resume cannot change, because they determine the content of a checkpoint."""
    module_key: str = ""
    """A key of its section that may be `module:name`, with a module of the user's own; empty if there is none."""
    charts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Its charts in the report of a run: title → the metrics in the chart, where `*` stands for any text."""
    is_benchmark: bool = False
    """Whether a run ends with a report for `hpcdist bench show` instead of final metrics, and saves no checkpoints."""


def trainer_names() -> tuple[str, ...]:
    """Return the names of the shipped trainers in the order of the documentation; the first one is the default."""
    return cast("tuple[str, ...]", importlib.import_module("hpcdist.trainers").NAMES)


def default_trainer() -> str:
    return trainer_names()[0]


@functools.cache
def find_trainer(name: str) -> Trainer | None:
    """Return the declaration of a shipped trainer, or None if `name` is not the name of one."""
    if name not in trainer_names():
        return None
    return cast(Trainer, importlib.import_module(f"hpcdist.trainers.{name}").TRAINER)


def trainer_sections() -> dict[str, type]:
    found = {name: find_trainer(name) for name in trainer_names()}
    return {name: trainer.section for name, trainer in found.items() if trainer and trainer.section}


def shared_sections() -> set[str]:
    """Return the keys of the sections that several shipped trainers read."""
    trainers = (find_trainer(name) for name in trainer_names())
    return {section for trainer in trainers if trainer for section in trainer.shared_sections}


def unused_sections(trainer: str) -> set[str]:
    """Return the keys of the sections that a shipped trainer does not read; none for any other code."""
    declared = find_trainer(trainer)
    if declared is None:
        return set()
    return {*trainer_names(), *shared_sections()} - {trainer, *declared.shared_sections}


def script_name(command: Sequence[str]) -> str:
    """Return the name of the file in `[script, argument, …]`, or of the module in `[-m, module, argument, …]`."""
    return "".join(command[1:2]) if command and command[0] == "-m" else Path(*command[:1]).name


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
        return Path(self.script[0]) if self.script and self.script[0] != "-m" else None

    @property
    def script_name(self) -> str:
        """The name of the script's file or module; empty without a script."""
        return script_name(self.script)

    def problems(self) -> list[str]:
        if self.script[:1] == ["-m"] and not all(part.isidentifier() for part in self.script_name.split(".")):
            return [f"script needs a module after -m, as in [-m, package.module], got {self.script_name!r}"]
        if self.target.endswith(".py"):
            return [f"target is a trainer; for a script write trainer: {{script: [{self.target}]}}"]
        module, colon, function = self.target.partition(":")
        if colon and not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            return [f"target must look like package.module:function, got {self.target!r}"]
        return []


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and how it is executed."""

    name: str = "simple_cnn"
    """`simple_cnn`, or one of torchvision's ResNets (`resnet18` … `resnet152`, `wide_resnet50_2`, …)."""
    channels_last: bool = False
    """Use the channels-last memory format: faster convolutions on GPUs, and on CPUs for large images."""
    compile: bool = False
    """Compile the model with torch.compile; the names in checkpoints do not change."""


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

    name: Literal["constant", "cosine"] = "constant"
    """Learning-rate schedule after the warmup; `cosine` falls to 0 at the last step of the run."""
    warmup_steps: int = number(0, least=0)
    """Optimizer steps of linear warmup."""


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


S = TypeVar("S")
#: Texts by the keys that lead to the value that contains them.
SecretTexts = dict[tuple[str, ...], tuple[str, ...]]
#: The text of a value, `1.10` of 1.1, by the keys that lead to it; indexes of lists are keys as well.
ParamTexts = dict[tuple[str, ...], str]
#: Fields of a config that are no keys.
NO_KEYS = ("secret_texts", "param_texts")
#: A role name is part of RPC names, config keys and log lines.
ROLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Config(ConfigSection):
    """One distributed training run."""

    experiment: str = "hpcdist"
    """MLflow experiment, and name of the folder of its runs."""
    name: str = ""
    """Name of the run; empty generates one from the trainer, the time and random characters."""
    runs_dir: str = field(default="${oc.env:HPCDIST_RUNS_DIR,runs}", metadata=IS_PATH)
    """Folder of all runs; on a cluster, on a file system that all nodes share."""
    seed: int = number(0, least=0)
    """Seed of weights, shuffling, augmentation and dropout; each rank, or micro-batch, derives its own from it."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    roles: dict[str, int] = field(default_factory=dict)
    """Number of ranks by role, in rank order; empty gives all ranks the role trainer."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    sections: dict[str, Any] = field(default_factory=dict)
    """The sections of trainers, by key: that of the shipped trainer that runs, and those that the file contains."""
    stop: StopConfig = field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    params: dict[str, Any] = field(default_factory=dict)
    """Keys of a trainer of your own, which it may declare as a dataclass: `train(ctx, cfg, params: MyParams)`."""
    secret_texts: SecretTexts = field(default_factory=dict, repr=False, compare=False)
    """No key: the secrets in values that are not secrets by key or form, such as `a ${oc.env:MY_TOKEN}`."""
    param_texts: ParamTexts = field(default_factory=dict, repr=False, compare=False)
    """No key: the texts of values of `params`, while the types that the trainer declares are not known."""

    def problems(self) -> list[str]:
        problems = [
            f"{name} must be a plain folder name (letters, digits, '.', '_', '-'), got {value!r}"
            for name, value in (("experiment", self.experiment), ("name", self.name))
            if value and not (value[0].isalnum() and all(char.isalnum() or char in "._-" for char in value))
        ]
        if not self.experiment:
            problems.append("experiment must not be empty")
        for role, count in self.roles.items():
            if not ROLE_NAME.fullmatch(role):
                problems.append(
                    f"roles: {role!r} is not a valid role name: use letters, digits and '_', starting with a letter"
                )
            if count < 1:
                problems.append(f"roles.{role} must be >= 1, got {count}")
        # runs_dir becomes a line of the batch script.
        return problems + one_line(self, "runs_dir")

    @property
    def folder(self) -> Path:
        return Path(self.runs_dir) / self.experiment / self.name

    def section(self, kind: type[S]) -> S:
        """Return the section of a trainer, such as `cfg.section(RlConfig)`.

        Raises ConfigError if this config has no such section.
        """
        for section in self.sections.values():
            if isinstance(section, kind):
                return section
        raise ConfigError(f"the config of trainer {self.trainer.target} has no section of type {kind.__name__}")


def to_tree(config: Config) -> dict[str, Any]:
    """Return a config as plain containers: the keys and values of its YAML."""
    tree: dict[str, Any] = {}
    for name, value in asdict(config).items():
        if name not in NO_KEYS:
            tree |= value if name == "sections" else {name: value}
    return tree


def role_device(config: Config, role: str) -> str:
    """Return the device of a role: `auto`, `cpu` or a type of GPU.

    A role that requests no GPUs of the cluster, while others do, uses the CPU on every machine.
    """
    if role in config.launch.devices:
        return config.launch.devices[role]
    asked = {
        name: config.cluster.gpus_per_node if request.gpus_per_node is None else request.gpus_per_node
        for name, request in config.cluster.roles.items()
    }
    own = config.cluster.roles.get(role)
    gpus = asked.get(role, config.cluster.gpus_per_node)
    if gpus == 0 and (any(asked.values()) or (own is not None and own.gpus_per_node == 0)):
        return "cpu"
    return config.launch.device


def cross_check(config: Config) -> list[str]:
    """Return the mistakes that involve several sections, each with its fix."""
    problems = []
    if config.container.runtime != "none" and config.cluster.environment.kind != "none":
        problems.append(
            f"cluster.environment.kind={config.cluster.environment.kind} and container.runtime="
            f"{config.container.runtime} exclude each other: set one of them to none"
        )
    if config.trainer.script and config.trainer.target != default_trainer():
        problems.append("trainer.script and trainer.target exclude each other: remove one of them")
    if not config.trainer.script:
        problems += _trainer_problems(config)
    nodes, tasks = config.cluster.nodes, config.cluster.tasks_per_node
    for keys, ranks in (("cluster.nodes × tasks_per_node", nodes * tasks), ("roles", sum(config.roles.values()))):
        if ranks > MAX_RANKS:
            problems.append(f"{keys}: a run has at most {MAX_RANKS} ranks, got {ranks}")
    problems += _elastic_problems(config)
    if config.launch.device == "cpu" and config.precision.dtype == "fp16":
        problems.append("precision.dtype=fp16 needs a GPU, but launch.device=cpu: use precision.dtype=bf16")
    if "trainer" in config.cluster.roles and not config.roles:
        problems.append("cluster.roles.trainer: `roles` is empty: set its number of ranks, such as roles.trainer=2")
    known = list(config.roles) or ["trainer"]
    for section, named in (("cluster.roles", config.cluster.roles), ("launch.devices", config.launch.devices)):
        problems += [
            f"{section}.{role}: no such role, `roles` has {', '.join(known)}" for role in set(named) - set(known)
        ]
    return problems


def _trainer_problems(config: Config) -> list[str]:
    name = config.trainer.target
    trainer = find_trainer(name)
    if trainer is None:
        return []
    problems = []
    if trainer.roles and (
        tuple(config.roles) != tuple(trainer.roles) or any(config.roles[role] != 1 for role in trainer.single_roles)
    ):
        got = ", ".join(f"{role}: {count}" for role, count in config.roles.items()) or "none"
        needed = ", then ".join(f"one {role}" if role in trainer.single_roles else f"{role}s" for role in trainer.roles)
        example = ", ".join(f"{role}: {count}" for role, count in trainer.roles.items())
        problems.append(f"roles: trainer {name} needs {needed}, got {got}: set roles='{{{example}}}'")
    return problems + trainer.check(config)


def largest_world_size(config: Config) -> int:
    """Return the largest number of ranks that a config requests, on this machine or from Slurm; at least 1."""
    return max(1, config.launch.num_ranks, config.cluster.nodes * config.cluster.tasks_per_node)


def _elastic_problems(config: Config) -> list[str]:
    elastic, batch_size = config.elastic, config.data.global_batch_size
    problems = []
    if batch_size is None:
        if elastic.exact or elastic.micro_batches is not None:
            key = "exact" if elastic.exact else "micro_batches"
            problems.append(f"elastic.{key} needs data.global_batch_size: set it, such as data.global_batch_size=256")
        return problems
    if config.trainer.script:
        problems.append("data.global_batch_size is not for scripts, which divide their batches themselves: remove it")
    trainer = find_trainer(config.trainer.target)
    if trainer is not None and not trainer.is_elastic:
        return [*problems, f"data.global_batch_size is not for trainer {config.trainer.target}: remove it"]
    if config.roles:
        problems.append(
            "roles and data.global_batch_size exclude each other, because all ranks share the micro-batches: remove one"
        )
    if elastic.micro_batches is not None and elastic.micro_batches < largest_world_size(config):
        problems.append(
            f"elastic.micro_batches={elastic.micro_batches} is less than the {largest_world_size(config)} ranks of the"
            " config: raise it, or use fewer ranks"
        )
    # Without a number in the config, a checkpoint may hold one, which the ranks check (`rank/elastic.py`).
    return problems + (division_problems(batch_size, elastic.micro_batches) if elastic.micro_batches else [])


def new_run_problems(config: Config, num_ranks: int = 0) -> list[str]:
    """Return the mistake in the division of the global batch of a new run without `elastic.micro_batches`.

    A run with a checkpoint keeps the number of micro-batches of its first start instead.
    """
    batch_size = config.data.global_batch_size
    if batch_size is None or config.elastic.micro_batches is not None:
        return []
    return division_problems(batch_size, max(num_ranks, largest_world_size(config)))
