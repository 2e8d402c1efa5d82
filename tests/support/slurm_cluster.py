"""The dev cluster that tests use: how they speak with it, and why there may be none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcdist.devcluster import cluster, host
from hpcdist.devcluster.settings import Layout, Settings
from hpcdist.errors import DevClusterError

REQUIRE = "HPCDIST_REQUIRE_SLURM"
"""Set to 1, it turns the skip for want of a cluster into a failure: for machines that must have one."""


@dataclass(frozen=True)
class DevCluster:
    """The cluster under test, and how to speak with it."""

    layout: Layout
    settings: Settings
    hosts_before: str
    """/etc/hosts before the cluster came."""

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, **cluster.client_env(self.layout)}

    def run(self, *command: str, within_s: float = 120) -> str:
        """Run a command of Slurm's, or anything that needs SLURM_CONF; returns what it prints."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=within_s, check=False)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def hpcdist(self, *arguments: str, within_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run our command line as a user does."""
        command = [sys.executable, "-m", "hpcdist", *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=within_s, check=False)

    def sbatch(self, script: str, *options: str, output: Path | str = "/dev/null") -> str:
        """Submit a shell script; returns the job's id."""
        flags = ("--parsable", "--open-mode=append", f"--output={output}", *options)
        return self.run("sbatch", *flags, f"--wrap={script}").strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says, by key."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(self, condition: Callable[[], object], what: str, within_s: float = 60) -> None:
        """Look until a condition holds; fails with `what` when it does not in time."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}\n{self.run('squeue')}"
            time.sleep(0.1)

    def cancel_all(self) -> None:
        """End all jobs, and wait until the nodes are free again."""
        # By array and index: of a task's own number Slurm 22.05 may say "invalid JobId" once the last task has ended.
        if jobs := self.run("squeue", "--array", "--noheader", "--format=%i").split():
            self.run("scancel", *jobs)
        self.until(lambda: not self.run("squeue", "--noheader"), "all jobs are gone")


def missing_requirement(layout: Layout) -> str | None:
    """Why no cluster can be brought up here; None where one can."""
    try:
        host.require_root("up")
        host.require_commands()
        host.refuse_beside_slurm(layout)
        host.require_namespaces()
    except DevClusterError as error:
        return str(error)
    if cluster.status(layout).is_up:
        return "a dev cluster is up already, and may be in use: `hpcdist devcluster down` first"
    return None


@contextmanager
def dev_cluster(num_nodes: int) -> Iterator[DevCluster]:
    """A cluster for as long as the block lasts; skips the test where there can be none."""
    layout = Layout()
    if (reason := missing_requirement(layout)) is not None:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)
    cluster.down(layout)  # what a killed session has left
    before = host.HOSTS.read_text()
    try:
        yield DevCluster(layout, cluster.up(layout, {"num_nodes": num_nodes}, env={}), before)
    finally:
        cluster.down(layout)
