"""The scripts of benchmarks/ that submit jobs, in their smallest size on the dev cluster of these tests."""

import pytest
from benchmark_scripts import SMALLEST_JOBS, assert_has_figures, json_of
from slurm_cluster import DevCluster


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST_JOBS)
def test_script_prints_every_figure_of_a_job(devcluster: DevCluster, name: str) -> None:
    """The script uses the cluster that is up, and leaves it so."""
    assert_has_figures(name, json_of(name, *SMALLEST_JOBS[name]))
    assert devcluster.run("sinfo", "--noheader")
