"""`hpcdist bench comm` on four nodes: measurements, MLflow artifacts, and detection of a slow node."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns

from hpcdist.bench.results import bottleneck, read_results
from hpcdist.devcluster.cluster import slow_node

FOUR_NODES = ("--cluster", "devcluster", "cluster.nodes=4", "cluster.tasks_per_node=1", "preflight=off")
SLOW = "n3"


@pytest.fixture
def restored_link(devcluster: DevCluster) -> Iterator[None]:
    """The slow node has its full bandwidth again after the test."""
    yield
    slow_node(devcluster.layout, SLOW)


def bench(runs: SlurmRuns, name: str, *more: str) -> str:
    keys = (
        f"name={name}",
        "experiment=digits",
        f"tracking.uri=sqlite:///{runs.database}",
        "comm.operations=[send_recv,ring_all_reduce,all_reduce,pairs]",
        "comm.max_bytes=64K",
        "tracking.system_interval_s=0",
    )
    code, output = runs.command("bench", "comm", *FOUR_NODES, *keys, *more)
    assert code == 0, output
    return output


@pytest.mark.faults
@pytest.mark.usefixtures("restored_link")
def test_report_names_the_slow_one_of_four_nodes(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    output = bench(slurm_runs, "bench-healthy")
    results = read_results(slurm_runs.run_dir("bench-healthy").artifacts)
    assert (results.nodes, results.partition, results.world_size) == (["n1", "n2", "n3", "n4"], "main", 4)
    assert {(pair.source, pair.target) for pair in results.pairs} == {
        (a, b) for a in range(4) for b in range(4) if a != b
    }
    assert "4 ranks on 4 nodes (n1, n2, n3, n4), gloo on cpu, partition main" in output
    assert f"{SLOW} is " not in output
    assert artifacts(slurm_runs, "bench-healthy") >= {
        "bandwidth.png", "latency.png", "pairs.png", "report.txt", "results.csv", "results.json",
    }  # fmt: skip

    slow_node(devcluster.layout, SLOW, rate_mbit=20)
    output = bench(slurm_runs, "bench-slow", "--compare", "bench-healthy")
    slow = read_results(slurm_runs.run_dir("bench-slow").artifacts)
    (sentence,) = bottleneck(slow)
    assert sentence.startswith(f"{SLOW} is ")
    assert "slower than the median pair in both directions (2." in sentence
    assert f"bottleneck: {sentence}" in output
    assert f"bottleneck: {sentence}" in slurm_runs.attempt("bench-slow").log(0).read_text()
    assert "compared with bench-healthy: " in output


def artifacts(runs: SlurmRuns, name: str) -> set[str]:
    """Return the names of the benchmark's non-empty artifacts in MLflow."""
    with sqlite3.connect(runs.database) as connection:
        (uri,) = connection.execute(
            "select artifact_uri from runs where run_uuid = ?", [runs.mlflow_id(name)]
        ).fetchone()
    connection.close()
    return {path.name for path in (Path(urlparse(uri).path) / "comm").iterdir() if path.stat().st_size > 0}
