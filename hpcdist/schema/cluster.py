"""What is asked of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcdist.schema.checks import at_least, check


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
    sbatch: dict[str, str] = field(default_factory=dict)
    """Any further flag of sbatch by its long name: `mail-type: FAIL`; `exclusive: true` for one without a value."""
    srun: dict[str, str] = field(default_factory=dict)
    """Any further flag of srun by its long name, in the same way."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for the job, ranks included."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that the batch script runs first, such as `module load cuda`."""

    def __post_init__(self) -> None:
        check(
            at_least(self, 1, "nodes", "tasks_per_node", "cpus_per_task", "time_min")
            + at_least(self, 0, "gpus_per_node", "signal_lead_s", "max_requeues")
        )
