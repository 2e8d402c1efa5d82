"""`hpcdist bench comm` over four nodes: what it measures, what MLflow gets, and that it names the node that is slow."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns

from hpcdist.bench.bottleneck import bottleneck
from hpcdist.bench.results import read_results
from hpcdist.devcluster.nodes import slow_node

FOUR_NODES = ("--cluster", "devcluster", "cluster.nodes=4", "cluster.tasks_per_node=1", "preflight=off")
SLOW = "n3"


@pytest.fixture
def whole_again(devcluster: DevCluster) -> Iterator[None]:
    yield
    slow_node(devcluster.layout, SLOW)
    devcluster.cancel_all()


def bench(runs: SlurmRuns, name: str, *more: str) -> str:
    keys = (
        f"name={name}",
        "experiment=digits",
        f"tracking.uri=sqlite:///{runs.database}",
        "comm.operations=[send_recv,ring_all_reduce,all_reduce,pairs]",
        "comm.max_bytes=64K",
        "comm.measure_s=0",
        "tracking.system_interval_s=0",
    )
    code, output = runs.command("bench", "comm", *FOUR_NODES, *keys, *more)
    assert code == 0, output
    return output


def test_four_nodes_and_then_one_of_them_slow(slurm_runs: SlurmRuns, devcluster: DevCluster, whole_again: None) -> None:
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
    assert f"bottleneck: {sentence}" in slurm_runs.attempt("bench-slow").log(0).read_text(), "a job that nobody follows"
    assert "compared with bench-healthy: " in output


def artifacts(runs: SlurmRuns, name: str) -> set[str]:
    """The files that MLflow has of the benchmark, of some size."""
    with sqlite3.connect(runs.database) as connection:
        (uri,) = connection.execute(
            "select artifact_uri from runs where run_uuid = ?", [runs.mlflow_id(name)]
        ).fetchone()
    connection.close()
    return {path.name for path in (Path(urlparse(uri).path) / "comm").iterdir() if path.stat().st_size > 0}
