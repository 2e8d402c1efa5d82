"""The section `elastic`: a run that may start, restart and resume on different numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpcdist.config.schema.checks import at_least, check
from hpcdist.config.schema.declaration import find_trainer

if TYPE_CHECKING:
    from hpcdist.config.schema.run import Config


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """`data.global_batch_size` makes a run elastic; the keys of this section determine its details."""

    min_ranks: int | None = None
    """Smallest number of ranks of the run; then fewer visible GPUs than launch.num_ranks suffice on this machine."""
    micro_batches: int | None = None
    """Equal parts of the global batch that are computed one by one; null: the largest number of ranks of the config."""
    exact: bool = False
    """Sum gradients in an order that does not depend on the number of ranks: bit-equal weights on CPUs, slower."""
    grow: Literal["restart", "never"] = "restart"
    """When nodes return to an allocation: restart on them after the next checkpoint, or only at a requeue."""

    def __post_init__(self) -> None:
        check(at_least(self, 1, "min_ranks", "micro_batches"))


def largest_world_size(config: Config) -> int:
    """Return the largest number of ranks that a config requests, on this machine or from Slurm; at least 1."""
    return max(1, config.launch.num_ranks, config.cluster.nodes * config.cluster.tasks_per_node)


def elastic_problems(config: Config) -> list[str]:
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


def division_problems(global_batch_size: int, num_micro_batches: int) -> list[str]:
    """Return the mistake in a global batch that cannot be divided into equal micro-batches."""
    if global_batch_size % num_micro_batches == 0:
        return []
    nearest = max(1, round(global_batch_size / num_micro_batches)) * num_micro_batches
    return [
        f"data.global_batch_size={global_batch_size} cannot be divided into {num_micro_batches} equal micro-batches:"
        f" use {nearest}, or set elastic.micro_batches to a divisor that is not less than the number of ranks"
    ]
