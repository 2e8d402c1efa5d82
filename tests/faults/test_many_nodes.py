"""32 ranks on 16 virtual nodes: more than any other test has, and more than fit on one level of srun's own tree."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest
from slurm_cluster import DevCluster, dev_cluster
from slurm_runs import SlurmRuns

NUM_NODES = 16
NUM_RANKS = 2 * NUM_NODES
#: 0.4 GiB a rank.
NEEDS_GIB = 14

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        psutil.virtual_memory().available < NEEDS_GIB * 2**30, reason=f"needs {NEEDS_GIB} GiB of memory"
    ),
]


@pytest.fixture(scope="module")
def sixteen_nodes() -> Iterator[DevCluster]:
    with dev_cluster(NUM_NODES) as cluster:
        yield cluster


def test_32_ranks_on_16_nodes_add_up_and_train(
    tmp_path_factory: pytest.TempPathFactory, sixteen_nodes: DevCluster
) -> None:
    root = tmp_path_factory.mktemp("many_nodes")
    code = "import sys; from hpcdist.tracking.mlflow_client import open_client; open_client(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, f"sqlite:///{root}/ready.db"], check=True)
    runs = SlurmRuns(root, root / "ready.db", sixteen_nodes)
    name = "many"
    job = runs.submit(
        name,
        "trainer=adding:train",
        f"cluster.nodes={NUM_NODES}",
        "data.batch_size=4",
        "stop.max_epochs=1",
        # 32 imports of torch on the few cores of this machine.
        "launch.init_timeout_s=600",
    )
    state = runs.wait_end(name, job, timeout_s=800)
    assert (state.status, state.attempt, state.world_size) == ("finished", 1, NUM_RANKS), (
        f"{state}\n{runs.job_log(name)}"
    )
    runs.assert_no_process_left(name)

    logs = [runs.attempt(name).log(rank).read_text() for rank in range(NUM_RANKS)]
    hosts = [match[1] for rank, log in enumerate(logs) if (match := re.search(rf" rank {rank} on (\S+):", log))]
    assert Counter(hosts) == {f"n{number}": 2 for number in range(1, NUM_NODES + 1)}
    code_, output = runs.command("sync", name)
    assert code_ == 0, output
    assert ("check/sum", 0, float(sum(range(NUM_RANKS)))) in runs.points(name)
