"""32 ranks on 16 virtual nodes, which need two levels of srun's message tree."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slurm_cluster import dev_cluster, shared_folder
from slurm_runs import SlurmRuns

NUM_NODES = 16
NUM_RANKS = 2 * NUM_NODES
#: 0.4 GiB per rank.
NEEDS_GIB = 14

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        psutil.virtual_memory().available < NEEDS_GIB * 2**30, reason=f"needs {NEEDS_GIB} GiB of memory"
    ),
]


@pytest.fixture(scope="module")
def runs(empty_database: Path) -> Iterator[SlurmRuns]:
    with dev_cluster(NUM_NODES) as cluster, shared_folder() as root:
        yield SlurmRuns(root, empty_database, cluster)


def test_32_ranks_on_16_nodes_all_reduce_and_train(runs: SlurmRuns) -> None:
    name = "many"
    job = runs.submit(
        name,
        "trainer=gated:after_sum",
        f"cluster.nodes={NUM_NODES}",
        "data.batch_size=4",
        "stop.max_epochs=1",
        # 32 imports of torch on the few cores of this machine.
        "launch.init_timeout_s=600",
    )
    state = runs.wait_end(name, job)
    assert (state.status, state.attempt, state.world_size) == ("finished", 1, NUM_RANKS), (
        f"{state}\n{runs.job_log(name)}"
    )
    runs.assert_no_process_left(name)

    logs = [runs.attempt(name).log(rank).read_text() for rank in range(NUM_RANKS)]
    hosts = [match[1] for rank, log in enumerate(logs) if (match := re.search(rf" rank {rank} on (\S+):", log))]
    assert Counter(hosts) == {f"n{number}": 2 for number in range(1, NUM_NODES + 1)}
    code, output = runs.command("sync", name)
    assert code == 0, output
    assert ("check/sum", 0, float(sum(range(NUM_RANKS)))) in runs.points(name)
