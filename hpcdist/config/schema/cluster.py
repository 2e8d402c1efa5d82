"""What is asked of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcdist.config.schema.checks import at_least, check, flags, one_line, strings, variables


@dataclass(frozen=True, kw_only=True)
class RoleRequest:
    """What a role's ranks ask of Slurm where it differs from the rest of `cluster`; null takes the value from there."""

    nodes: int | None = None
    """Number of nodes for this role; null follows from its count of ranks and tasks_per_node."""
    tasks_per_node: int | None = None
    """Ranks of this role on each of its nodes; null follows from its count of ranks and nodes."""
    gpus_per_node: int | None = None
    """GPUs on each of its nodes; 0 also keeps its ranks off the GPUs of a machine that has some."""
    cpus_per_task: int | None = None
    """Cores for each of its ranks."""
    mem: str | None = None
    """Memory on each of its nodes."""
    partition: str | None = None
    """Partition of its nodes."""
    constraint: str | None = None
    """Features of its nodes."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Further flags of sbatch for its component of a heterogeneous job, by their long names."""

    def problems(self) -> list[str]:
        """Mistakes, by key; the cluster's section tells them, since only it knows the role's name."""
        return (
            at_least(self, 1, "nodes", "tasks_per_node", "cpus_per_task")
            + at_least(self, 0, "gpus_per_node")
            + strings(self, "sbatch")
            + one_line(self, "mem", "partition", "constraint", "sbatch")
            + flags(self, "sbatch")
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
    shared_runs: bool = False
    """All nodes see `runs_dir`, though its file system's type does not say so: spares the check at submission."""
    roles: dict[str, RoleRequest] = field(default_factory=dict)
    """What single roles ask for where it differs; roles without an entry get what is asked for here."""
    het: bool | None = None
    """Heterogeneous job, or one allocation for all roles; null: the first where they ask for different hardware."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Any further flag of sbatch by its long name: `mail-type: FAIL`; `exclusive: true` for one without a value."""
    srun: dict[str, str] = field(default_factory=dict)
    """Any further flag of srun by its long name, in the same way."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for the job, ranks included. Secrets among them are never in the batch script."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that the batch script runs first, such as `module load cuda`; they see no secrets of `env`."""

    def __post_init__(self) -> None:
        check(
            at_least(self, 1, "nodes", "tasks_per_node", "cpus_per_task", "time_min")
            + at_least(self, 0, "gpus_per_node", "signal_lead_s", "max_requeues")
            + one_line(self, "partition", "account", "qos", "mem", "constraint", "exclude", "sbatch", "srun")
            + flags(self, "sbatch", "srun")
            + variables(self, "env")
            + ["setup must not hold a NUL character" for line in self.setup if "\0" in line]
            + [f"roles.{role}.{line}" for role, request in self.roles.items() for line in request.problems()]
        )
