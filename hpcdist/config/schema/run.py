"""The whole config of a run, and the checks that involve several sections."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.config.schema.checks import MAX_RANKS, at_least, check, one_line
from hpcdist.config.schema.cluster import ClusterConfig
from hpcdist.config.schema.container import ContainerConfig
from hpcdist.config.schema.declaration import default_trainer, find_trainer
from hpcdist.config.schema.elastic import ElasticConfig, division_problems
from hpcdist.config.schema.launching import CheckpointConfig, LaunchConfig, TrackingConfig
from hpcdist.config.schema.notification import NotifyConfig
from hpcdist.config.schema.paths import IS_PATH
from hpcdist.config.schema.preflight import PreflightConfig
from hpcdist.config.schema.training import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    ScheduleConfig,
    StopConfig,
    TrainerConfig,
)
from hpcdist.errors import ConfigError

S = TypeVar("S")
#: Texts by the keys that lead to the value that contains them.
SecretTexts = dict[tuple[str, ...], tuple[str, ...]]
#: A role name is part of RPC names, config keys and log lines.
ROLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One distributed training run."""

    experiment: str = "hpcdist"
    """MLflow experiment, and name of the folder of its runs."""
    name: str = ""
    """Name of the run; empty generates one from the trainer, the time and random characters."""
    runs_dir: str = field(default="${oc.env:HPCDIST_RUNS_DIR,runs}", metadata=IS_PATH)
    """Folder of all runs; on a cluster, on a file system that all nodes share."""
    seed: int = 0
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

    def __post_init__(self) -> None:
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
        check(problems + at_least(self, 0, "seed") + one_line(self, "runs_dir"))

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.runs_dir) / self.experiment / self.name

    def section(self, kind: type[S]) -> S:
        """Return the section of a trainer, such as `cfg.section(RlConfig)`.

        Raises ConfigError if this config has no such section.
        """
        for section in self.sections.values():
            if isinstance(section, kind):
                return section
        raise ConfigError([f"the config of trainer {self.trainer.target} has no section of type {kind.__name__}"])


def to_tree(config: Config) -> dict[str, Any]:
    """Return a config as plain containers: the keys and values of its YAML."""
    tree: dict[str, Any] = {}
    for name, value in asdict(config).items():
        if name != "secret_texts":
            tree |= value if name == "sections" else {name: value}
    return tree


def role_device(config: Config, role: str) -> str:
    """Return the device of a role: `auto`, `cpu` or `cuda`.

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
    if config.container.runtime == "charliecloud" and any(mount.endswith(":ro") for mount in config.container.mounts):
        problems.append("container.mounts: charliecloud has no read-only mounts: leave out ':ro'")
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
    if config.launch.device == "cpu":
        if config.launch.backend == "nccl":
            problems.append("launch.backend=nccl needs GPUs, but launch.device=cpu: use launch.backend=gloo")
        if config.precision.dtype == "fp16":
            problems.append("precision.dtype=fp16 needs a GPU, but launch.device=cpu: use precision.dtype=bf16")
        if config.model.sync_batch_norm:
            problems.append("model.sync_batch_norm needs GPUs, but launch.device=cpu: set it to false")
    elif config.launch.backend == "nccl":
        without = [role for role in config.roles if role_device(config, role) == "cpu"]
        if without:
            problems.append(f"launch.backend=nccl needs GPUs for all ranks, but {without[0]} has none: use gloo")
    if "trainer" in config.cluster.roles and not config.roles:
        problems.append("cluster.roles.trainer: `roles` is empty: set its number of ranks, such as roles.trainer=2")
    known = list(config.roles) or ["trainer"]
    for section, named in (("cluster.roles", config.cluster.roles), ("launch.devices", config.launch.devices)):
        problems += [
            f"{section}.{role}: no such role, `roles` has {', '.join(known)}" for role in set(named) - set(known)
        ]
    return problems


def _trainer_problems(config: Config) -> list[str]:
    """Return the mistakes in a config that concern its shipped trainer; none for a trainer of the user's own."""
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
    if trainer.instead_of_accumulation and config.optim.grad_accum_steps != 1:
        problems.append(
            f"optim.grad_accum_steps={config.optim.grad_accum_steps} is not for trainer {name}:"
            f" use {trainer.instead_of_accumulation}"
        )
    return problems + trainer.check(config)


def largest_world_size(config: Config) -> int:
    """Return the largest number of ranks that a config requests, on this machine or from Slurm; at least 1."""
    return max(1, config.launch.num_ranks, config.cluster.nodes * config.cluster.tasks_per_node)


def _elastic_problems(config: Config) -> list[str]:
    """Return the mistakes in the keys of elastic runs, each with its fix."""
    elastic, batch_size = config.elastic, config.data.global_batch_size
    problems = []
    if config.launch.num_ranks and elastic.min_ranks is not None and config.launch.num_ranks < elastic.min_ranks:
        problems.append(
            f"launch.num_ranks={config.launch.num_ranks} is less than elastic.min_ranks={elastic.min_ranks}:"
            " change one of them"
        )
    fewest = config.cluster.fewest_nodes * config.cluster.tasks_per_node
    if config.cluster.min_nodes is not None and elastic.min_ranks is not None and fewest < elastic.min_ranks:
        problems.append(
            f"cluster.min_nodes={config.cluster.min_nodes} allows {fewest} ranks, fewer than"
            f" elastic.min_ranks={elastic.min_ranks}: change one of them"
        )
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
    if config.optim.grad_accum_steps != 1:
        problems.append(
            f"optim.grad_accum_steps={config.optim.grad_accum_steps} and data.global_batch_size exclude each other:"
            " set elastic.micro_batches instead"
        )
    if config.model.sync_batch_norm:
        problems.append(
            "model.sync_batch_norm normalises over the ranks, and data.global_batch_size over micro-batches on any"
            " number of ranks: set model.sync_batch_norm=false"
        )
    if config.roles:
        problems.append(
            "roles and data.global_batch_size exclude each other, because all ranks share the micro-batches: remove one"
        )
    if elastic.micro_batches is not None and elastic.micro_batches < largest_world_size(config):
        problems.append(
            f"elastic.micro_batches={elastic.micro_batches} is less than the {largest_world_size(config)} ranks of the"
            " config: raise it, or use fewer ranks"
        )
    # Without a number in the config, a checkpoint may hold one, which the ranks check (`rank/elastic/division.py`).
    return problems + (division_problems(batch_size, elastic.micro_batches) if elastic.micro_batches else [])


def new_run_problems(config: Config, num_ranks: int = 0) -> list[str]:
    """Return the mistake in the division of the global batch of a new run without `elastic.micro_batches`.

    A run with a checkpoint keeps the number of micro-batches of its first start instead.

    Args:
        num_ranks: number of ranks with which the run starts; 0 if it is not known.
    """
    batch_size = config.data.global_batch_size
    if batch_size is None or config.elastic.micro_batches is not None:
        return []
    return division_problems(batch_size, max(num_ranks, largest_world_size(config)))
