"""One dev cluster for all tests of this folder: a real Slurm of four nodes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from slurm_cluster import DevCluster, why_not

from hpcdist.devcluster import cluster, host
from hpcdist.devcluster.settings import Layout

REQUIRE = "HPCDIST_REQUIRE_SLURM"
"""Set to 1, it turns the skip for want of a cluster into a failure: for machines that must have one."""


@pytest.fixture(scope="session")
def devcluster() -> Iterator[DevCluster]:
    layout = Layout()
    if (reason := why_not(layout)) is not None:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)
    cluster.down(layout)  # what a killed session has left
    before = host.HOSTS.read_text()
    try:
        yield DevCluster(layout, cluster.up(layout, {"num_nodes": 4}, env={}), before)
    finally:
        cluster.down(layout)
