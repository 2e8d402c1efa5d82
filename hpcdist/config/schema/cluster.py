"""The section `cluster`: the resources that a run requests from Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcdist.config.schema.checks import MAX_PER_NODE, MAX_RANKS, at_least, at_most, check, flags, one_line, variables
from hpcdist.config.schema.environment import EnvironmentConfig


@dataclass(frozen=True, kw_only=True)
class RoleRequest:
    """Resources of one role's ranks that differ from those of `cluster`; null keeps the value of `cluster`."""

    nodes: int | None = None
    """Number of nodes for this role; null derives it from its number of ranks and tasks_per_node."""
    tasks_per_node: int | None = None
    """Ranks of this role on each of its nodes; null derives it from its number of ranks and nodes."""
    gpus_per_node: int | None = None
    """GPUs on each of its nodes; 0 also hides the GPUs of a shared machine from its ranks."""
    cpus_per_task: int | None = None
    """CPU cores per rank."""
    mem: str | None = None
    """Memory on each of its nodes."""
    partition: str | None = None
    """Partition of its nodes."""
    constraint: str | None = None
    """Required features of its nodes."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Additional options of sbatch for its component of a heterogeneous job, by their long names."""

    def problems(self) -> list[str]:
        """Return the mistakes by key. `ClusterConfig` reports them, because the role's name is known there only."""
        return (
            at_least(self, 1, "nodes", "tasks_per_node", "cpus_per_task")
            + at_least(self, 0, "gpus_per_node")
            + at_most(self, MAX_RANKS, "nodes")
            + at_most(self, MAX_PER_NODE, "tasks_per_node")
            + one_line(self, "mem", "partition", "constraint", "sbatch")
            + flags(self, "sbatch")
        )


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Resources to request from Slurm. `configs/cluster/NAME.yaml` holds a site's values for `--cluster NAME`."""

    partition: str | None = None
    """Slurm partition; null uses Slurm's default."""
    account: str | None = None
    """Slurm account to charge."""
    qos: str | None = None
    """Quality of service."""
    nodes: int = 1
    """Number of nodes. A range, `2-8`, also sets min_nodes."""
    min_nodes: int | None = None
    """Minimum number of nodes to start or continue; null requires all of them."""
    spare_nodes: int = 0
    """Additional nodes of the allocation that stay idle until they replace a failed node."""
    tasks_per_node: int = 1
    """Ranks on each node; with GPUs, usually one per GPU."""
    gpus_per_node: int = 0
    """GPUs on each node."""
    cpus_per_task: int = 1
    """CPU cores per rank."""
    mem: str | None = None
    """Memory per node in Slurm's notation, `64G`; null uses the partition's default."""
    time_limit_min: int = 60
    """Time limit of the job in minutes; a longer run saves a checkpoint, requeues itself and continues."""
    signal_lead_s: int = 120
    """Seconds before the end of the allocation at which the ranks are asked to save and exit."""
    max_requeues: int = 50
    """Maximum number of requeues for time limits and lost nodes."""
    constraint: str | None = None
    """Required node features (`sbatch --constraint`)."""
    exclude: str | None = None
    """Nodes to exclude (`sbatch --exclude`)."""
    shared_runs: bool = False
    """Skip the check that all nodes share `runs_dir`, whose file system type does not show it."""
    roles: dict[str, RoleRequest] = field(default_factory=dict)
    """Resources of single roles; roles without an entry use the values of this section."""
    het: bool | None = None
    """Submit a heterogeneous job instead of one allocation; null does so if roles request different hardware."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Additional options of sbatch by their long names: `mail-type: FAIL`, or `exclusive: true` without a value."""
    srun: dict[str, str] = field(default_factory=dict)
    """Additional options of srun, in the same form."""
    fork: bool = False
    """Import torch once per node, in a process that forks its ranks in all attempts (not for scripts or containers)."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job and its ranks. Secrets are not written to the batch script."""
    setup: list[str] = field(default_factory=list)
    """Shell commands at the start of the batch script, such as `module load cuda`, without the secrets of `env`."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    def __post_init__(self) -> None:
        check(
            at_least(self, 1, "nodes", "min_nodes", "tasks_per_node", "cpus_per_task", "time_limit_min")
            + at_least(self, 0, "spare_nodes", "gpus_per_node", "signal_lead_s", "max_requeues")
            + at_most(self, MAX_RANKS, "nodes", "spare_nodes")
            + at_most(self, MAX_PER_NODE, "tasks_per_node", "gpus_per_node")
            + self._range_problems()
            + one_line(self, "partition", "account", "qos", "mem", "constraint", "exclude", "sbatch", "srun")
            + flags(self, "sbatch", "srun")
            + variables(self, "env")
            + ["setup must not contain a NUL character" for line in self.setup if "\0" in line]
            + [f"environment.{line}" for line in self.environment.problems(self.time_limit_min)]
            + [f"roles.{role}.{line}" for role, request in self.roles.items() for line in request.problems()]
        )

    @property
    def outlives_nodes(self) -> bool:
        """Whether the run continues in its allocation after the loss of a node."""
        return self.spare_nodes > 0 or self.fewest_nodes < self.nodes

    @property
    def fewest_nodes(self) -> int:
        """The least number of nodes with which the run may start or continue."""
        return self.nodes if self.min_nodes is None else self.min_nodes

    def _range_problems(self) -> list[str]:
        if self.fewest_nodes <= self.nodes:
            return []
        return [f"min_nodes must be at most nodes={self.nodes}, got {self.min_nodes}"]
