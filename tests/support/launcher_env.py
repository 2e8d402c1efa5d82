"""Environment variables of launchers, for tests of topologies.

The variables of Slurm are as srun 22.05 sets them on three nodes, without those that hpcdist does not read.
"""

from typing import Any

from hpcdist.config.topology import Topology

Env = dict[str, str]


def printed(text: str) -> Env:
    """Return variables as `env` prints them."""
    return dict(word.split("=") for word in text.split())


OWN = printed(
    """
    HPCDIST_RANK=3 HPCDIST_WORLD_SIZE=4 HPCDIST_LOCAL_RANK=1 HPCDIST_LOCAL_WORLD_SIZE=2 HPCDIST_NODE_RANK=1
    HPCDIST_NUM_NODES=2 HPCDIST_MASTER_ADDR=n1 HPCDIST_MASTER_PORT=20500 HPCDIST_JOB_ID=17 HPCDIST_ATTEMPT=2
    """
)
#: Rank 1 of `srun -N3 -n5`.
STEP = printed(
    """
    SLURM_JOB_ID=42 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=5
    SLURM_STEP_NODELIST=n[1-3] SLURM_STEP_TASKS_PER_NODE=3,1(x2)
    """
)
#: The shell of `sbatch -n1`.
BATCH = printed("SLURM_JOB_ID=14 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0")


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


def layout(topology: Topology) -> tuple[int, ...]:
    """Return rank, world size, local rank, local world size, node rank and number of nodes."""
    return (
        topology.rank,
        topology.world_size,
        topology.local_rank,
        topology.local_world_size,
        topology.node_rank,
        topology.num_nodes,
    )


def topology_of(rank: int, world_size: int, num_nodes: int = 1, **changes: Any) -> Topology:
    """Return the topology of a rank; the nodes have equal numbers of consecutive ranks."""
    per_node = world_size // num_nodes
    fields: dict[str, Any] = {
        "local_rank": rank % per_node,
        "local_world_size": per_node,
        "node_rank": rank // per_node,
        "master_addr": "127.0.0.1",
        "master_port": 1,
        "launcher": "hpcdist",
        "job_id": "test",
        "attempt": 1,
    }
    return Topology(rank=rank, world_size=world_size, num_nodes=num_nodes, **fields | changes)
