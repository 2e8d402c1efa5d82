"""The class `Config` with all keys of a config, and the checks that involve several sections.

The classes of its sections are in the other `…_schema.py` beside this file, and in the packages of the trainers. All
are frozen dataclasses that need only the standard library. `config/loading.py` fills them from YAML and the command
line. The string under a field is its documentation (`hpcdist config --schema`).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.config.cluster_schema import ClusterConfig, ContainerConfig
from hpcdist.config.launch_schema import LaunchConfig, NotifyConfig, PreflightConfig
from hpcdist.config.record_schema import CheckpointConfig, TrackingConfig
from hpcdist.config.section import IS_PATH, MAX_RANKS, ConfigSection, number, one_line
from hpcdist.config.trainer_declaration import Trainer, default_trainer, find_trainer, shared_sections, trainer_names
from hpcdist.config.training_schema import (
    DataConfig,
    ElasticConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    ScheduleConfig,
    StopConfig,
    TrainerConfig,
    division_problems,
)
from hpcdist.errors import ConfigError

#: Keys of the section `model` that each trainer of a model reads, even if it reads no other key of this section.
INITIAL_WEIGHT_KEYS = ("model.init_from", "model.init_from_skip")


def unused_sections(trainer: str) -> set[str]:
    """Return the keys of the sections that a shipped trainer does not read; none for any other code.

    The section `model` may be among them although its INITIAL_WEIGHT_KEYS are read: see `is_unused`.
    """
    declared = find_trainer(trainer)
    if declared is None:
        return set()
    sections = {*trainer_names(), *shared_sections()}
    return sections - {trainer, *declared.shared_sections}


def is_unused(trainer: str, key: str) -> bool:
    """Return whether a shipped trainer does not read a dotted key of the config; False for any other code."""
    declared = find_trainer(trainer)
    if declared is not None and key in declared.unread_keys:
        return True
    if declared is not None and key in INITIAL_WEIGHT_KEYS:
        return declared.is_benchmark  # it trains no model
    return key.partition(".")[0] in unused_sections(trainer)


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
    """Number of ranks by role, in rank order; empty gives all ranks the role trainer. A single role may have a multiple
    of its ranks (`launch.num_ranks`, or the nodes), for replicas."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    sections: dict[str, Any] = field(default_factory=dict)
    """The sections of trainers, by key: the section of the shipped trainer in use, and those in the file."""
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
        problems = []
        for key, value in (("experiment", self.experiment), ("name", self.name)):
            if value and not _is_folder_name(value):
                problems.append(f"{key} must be a plain folder name (letters, digits, '.', '_', '-'), got {value!r}")
        if not self.experiment:
            problems.append("experiment must not be empty")
        for role, count in self.roles.items():
            if not ROLE_NAME.fullmatch(role):
                problems.append(
                    f"roles: {role!r} is not a valid role name: use letters, digits and '_', starting with a letter"
                )
            if count < 1:
                problems.append(f"roles.{role} must be >= 1, got {count}")
        # runs_dir becomes a line of the batch script, which a newline in it would break.
        return problems + one_line(self, "runs_dir")

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.runs_dir) / self.experiment / self.name

    @property
    def compiled_folder(self) -> Path:
        """The folder that keeps compiled code of all runs."""
        if self.launch.cache_dir:
            return Path(self.launch.cache_dir)
        return Path(self.runs_dir) / ".hpcdist-compiled"

    def section(self, kind: type[S]) -> S:
        """Return the section of a trainer, such as `cfg.section(RlConfig)`.

        Raises ConfigError if this config has no such section.
        """
        for section in self.sections.values():
            if isinstance(section, kind):
                return section
        raise ConfigError(f"the config of trainer {self.trainer.target} has no section of type {kind.__name__}")


def _is_folder_name(text: str) -> bool:
    return text[0].isalnum() and all(char.isalnum() or char in "._-" for char in text)


def to_tree(config: Config) -> dict[str, Any]:
    """Return a config as plain containers: the keys and values of its YAML."""
    tree: dict[str, Any] = {}
    for name, value in asdict(config).items():
        if name == "sections":
            tree |= value
        elif name not in NO_KEYS:
            tree[name] = value
    return tree


def role_device(config: Config, role: str) -> str:
    """Return the device of a role: `auto`, `cpu` or a type of GPU.

    A role that gets no GPUs on the cluster, while other roles do, uses the CPU on every machine. If no role gets GPUs
    there, the config may not be for a cluster: then only a 0 in the request of the role itself counts.
    """
    if role in config.launch.devices:
        return config.launch.devices[role]
    shared_gpus = config.cluster.gpus_per_node  # of roles without a number of their own
    gpus_of_roles: dict[str, int] = {}
    for name, request in config.cluster.roles.items():
        gpus_of_roles[name] = shared_gpus
        if request.gpus_per_node is not None:
            gpus_of_roles[name] = request.gpus_per_node
    if gpus_of_roles.get(role, shared_gpus) > 0:
        return config.launch.device
    role_request = config.cluster.roles.get(role)
    requests_none = role_request is not None and role_request.gpus_per_node == 0
    if requests_none or any(gpus_of_roles.values()):
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
    elif config.model.init_from:
        problems.append("model.init_from is not for scripts, which load their weights themselves: remove it")
    num_ranks_by_keys = {
        "cluster.nodes × tasks_per_node": config.cluster.nodes * config.cluster.tasks_per_node,
        "roles": sum(config.roles.values()),
    }
    for keys, num_ranks in num_ranks_by_keys.items():
        if num_ranks > MAX_RANKS:
            problems.append(f"{keys}: a run has at most {MAX_RANKS} ranks, got {num_ranks}")
    problems += _elastic_problems(config)
    if config.launch.device == "cpu" and config.precision.dtype == "fp16":
        problems.append("precision.dtype=fp16 needs a GPU, but launch.device=cpu: use precision.dtype=bf16")
    if "trainer" in config.cluster.roles and not config.roles:
        problems.append("cluster.roles.trainer: `roles` is empty: set its number of ranks, such as roles.trainer=2")
    known = list(config.roles) or ["trainer"]
    for section, by_role in (("cluster.roles", config.cluster.roles), ("launch.devices", config.launch.devices)):
        for role in set(by_role) - set(known):
            problems.append(f"{section}.{role}: no such role, `roles` has {', '.join(known)}")
    return problems


def _trainer_problems(config: Config) -> list[str]:
    name = config.trainer.target
    trainer = find_trainer(name)
    if trainer is None:
        return []
    problems = []
    if trainer.roles and not _has_roles(config, trainer):
        got = ", ".join(f"{role}: {count}" for role, count in config.roles.items()) or "none"
        needed = []
        for role in trainer.roles:
            if role in trainer.single_roles:
                needed.append(f"one {role}")
            else:
                needed.append(f"{role}s")
        example = ", ".join(f"{role}: {count}" for role, count in trainer.roles.items())
        problems.append(f"roles: trainer {name} needs {', then '.join(needed)}, got {got}: set roles='{{{example}}}'")
    return problems + trainer.check(config)


def _has_roles(config: Config, trainer: Trainer) -> bool:
    """Return whether a config has the roles of its trainer, in their order."""
    if tuple(config.roles) != tuple(trainer.roles):
        return False
    return all(config.roles[role] == 1 for role in trainer.single_roles)


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
        if config.launch.fit_batch:
            problems.append(
                "launch.fit_batch=true needs an elastic run: set data.global_batch_size, such as"
                " data.global_batch_size=256, or launch.fit_batch=false"
            )
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
    if trainer is not None and trainer.divides_batches:
        return problems
    if elastic.micro_batches is not None and elastic.micro_batches < largest_world_size(config):
        problems.append(
            f"elastic.micro_batches={elastic.micro_batches} is less than the {largest_world_size(config)} ranks of the"
            " config: raise it, or use fewer ranks"
        )
    # Without a number in the config, a checkpoint may hold one, which the ranks check (`rank/micro_batches.py`).
    if elastic.micro_batches is not None:
        problems += division_problems(batch_size, elastic.micro_batches)
    return problems


def new_run_problems(config: Config, num_ranks: int = 0) -> list[str]:
    """Return the mistakes in the number of ranks of a new run: of its trainer, and of an elastic run's global batch.

    A run with a checkpoint keeps the number of micro-batches of its first start instead.

    Args:
        num_ranks: 0 if it is not known yet.
    """
    trainer = None
    if not config.trainer.script:
        trainer = find_trainer(config.trainer.target)
    if trainer is not None and num_ranks:
        problems = trainer.check_ranks(config, num_ranks)
        if problems:
            return problems
    batch_size = config.data.global_batch_size
    if batch_size is None or config.elastic.micro_batches is not None:
        return []
    if trainer is not None and trainer.divides_batches:
        return []
    return division_problems(batch_size, max(num_ranks, largest_world_size(config)))
