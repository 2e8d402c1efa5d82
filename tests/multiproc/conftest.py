"""Fixtures of tests with real processes. A start takes seconds, so each one serves many assertions."""

from pathlib import Path

import pytest
from hpcdist_runs import LAST_STEP, TRAINING, Runs

#: Overrides for a communication benchmark of two ranks that takes seconds.
SMALL_BENCHMARK = (
    *("comm.operations=[all_reduce,send_recv]", "comm.max_bytes=4K"),
    *("launch.device=cpu", "launch.num_ranks=2", "tracking.drain_timeout_s=200"),
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Runs:
    """The runs folder of all tests; each test uses unique run names."""
    return Runs(tmp_path_factory.mktemp("runs"), empty_database)


@pytest.fixture(scope="session")
def control_run(runs: Runs) -> str:
    """Name of an uninterrupted run."""
    name = "control"
    code, output = runs.command("run", *runs.config(name, *TRAINING, export=True))
    assert code == 0, output
    assert f"finished: trained {LAST_STEP} steps, 2 epochs" in output
    return name


@pytest.fixture(scope="session")
def benchmark(runs: Runs) -> tuple[str, str]:
    """Name and output of a run of `hpcdist bench comm`."""
    name = "benchmark"
    keys = (*SMALL_BENCHMARK, f"experiment={runs.experiment}", f"tracking.uri=sqlite:///{runs.database}")
    code, output = runs.command("bench", "comm", *keys, f"name={name}")
    assert code == 0, output
    return name, output
