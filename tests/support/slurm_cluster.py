"""The dev cluster of the tests: start it, run Slurm's commands on it, wait for jobs."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import pytest
from hpcdist_runs import wait_for
from session_locks import lock_in_turn

from hpcdist.devcluster import cluster, cluster_processes, cluster_status, host, node_faults
from hpcdist.devcluster.settings import STATE, Layout, Settings
from hpcdist.errors import DevClusterError

WAIT_S = 800.0
"""Time limit of waits: long enough for a busy machine with few cores, on which ranks take a minute to start."""
REQUIRE = "HPCDIST_REQUIRE_SLURM"
"""If set to 1, tests that need a dev cluster fail instead of being skipped on machines that cannot start one."""

TURN = Path("/run/hpcdist-tests.lock")
"""Locked by the test session that uses the dev cluster, until it ends; names the cluster that a session has started."""

OWNER = "root"
"""Owner of the dev cluster of the tests, which call `cluster.up` without SUDO_USER."""

PROCTRACK = "HPCDIST_PROCTRACK"
"""How the dev cluster of the tests signals processes: `linuxproc`, the default, or `cgroup`."""


@dataclass(frozen=True)
class DevCluster:
    layout: Layout
    settings: Settings
    hosts_before: str
    """Contents of /etc/hosts before the cluster was started."""

    @property
    def env(self) -> dict[str, str]:
        """Without SUDO_USER: the cluster belongs to OWNER."""
        env = {name: value for name, value in os.environ.items() if name != "SUDO_USER"}
        return {**env, **cluster_status.client_env(self.layout)}

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """Run a command with SLURM_CONF set and return its standard output."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def hpcdist(
        self, *arguments: str, timeout_s: float = 120, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of hpcdist; `env`: further variables."""
        command = [sys.executable, "-m", "hpcdist", *arguments]
        full = {**self.env, **(env or {})}
        return subprocess.run(command, env=full, capture_output=True, text=True, timeout=timeout_s, check=False)

    def sbatch(self, script: str, *options: str, output: Path | str = "/dev/null") -> str:
        """Submit a shell script and return its job id."""
        flags = ("--parsable", "--open-mode=append", f"--output={output}", *options)
        return self.run("sbatch", *flags, f"--wrap={script}").strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, condition: Callable[[], object], description: str, timeout_s: float = WAIT_S) -> None:
        """Wait until a condition is true; a timeout fails with the description and the queue."""
        try:
            wait_for(condition, description, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.run('squeue')}") from error

    def wait_job_state(self, job_id: str, *states: str) -> None:
        """Wait until a job is in one of the states."""
        self.wait_until(lambda: self.job(job_id)["JobState"] in states, f"job {job_id} is {' or '.join(states)}")

    def start_high_priority_job(self, *options: str) -> str:
        """Submit a short job that preempts jobs of partition main; return its job id."""
        return self.sbatch("true", "--partition=high", "--exclusive", *options)

    @contextmanager
    def setting(self, name: str, value: object) -> Iterator[None]:
        """Change a key of slurm.conf for the duration of the block."""
        conf = self.layout.slurm_conf
        before = conf.read_text()
        try:
            conf.write_text(re.sub(rf"(?m)^{name}=.*$", f"{name}={value}", before))
            self.run("scontrol", "reconfigure")
            yield
        finally:
            conf.write_text(before)
            self.run("scontrol", "reconfigure")

    def time_to_save(self) -> AbstractContextManager[None]:
        """Return a block in which Slurm kills a job 30 s after its signal, as by default, and not after 5 s.

        On a busy machine, ranks and supervisor need more than 5 s to save, to end and to record that. A job must start
        in the block: srun reads the setting, and gives up soon after that time.
        """
        return self.setting("KillWait", 30)

    def set_grace_time(self, seconds: int) -> None:
        """Set the grace time of preempted jobs in the partition `main` until the next `up`."""
        self.run("scontrol", "update", "PartitionName=main", f"GraceTime={seconds}")

    def node_members(self) -> dict[str, list[int]]:
        """Return the process ids of each node that is up."""
        namespaces = cluster_processes.mounted_namespaces(self.layout)
        return {
            name: cluster_processes.members([namespaces[name]]) for name in self.settings.nodes if name in namespaces
        }

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until the queue is empty."""
        # --array: once the last task of an array has ended, Slurm 22.05 rejects the ids of the other tasks.
        if jobs := self.run("squeue", "--array", "--noheader", "--format=%i").split():
            self.run("scancel", *jobs)
        self.wait_until(lambda: not self.run("squeue", "--noheader"), "the queue is empty")

    def restart(self) -> None:
        """Start the cluster again after `cluster.down`."""
        start_cluster(self.layout, asdict(self.settings))

    def restore_nodes(self) -> None:
        """Cancel all jobs, start the nodes that are down, and wait until all nodes are idle."""
        self.cancel_all()
        for name in cluster_status.status(self.layout).dead:
            node_faults.start_node(self.layout, name.removeprefix("slurmd-"))
        self.wait_until(
            lambda: {node.state for node in cluster_status.status(self.layout).nodes} == {"idle"}, "all nodes are idle"
        )


@cache
def take_turn() -> IO[str]:
    """Wait until no other test session of this machine uses the dev cluster. Needs root, as the dev cluster does.

    Returns the locked file; the lock ends with this process.
    """
    file = TURN.open("a")
    lock_in_turn(file)
    return file


def start_cluster(layout: Layout, changes: Mapping[str, Any]) -> Settings:
    """Start a dev cluster and note in TURN that it belongs to a test session."""
    settings = cluster.up(layout, changes, env={})
    TURN.write_text(identity(layout))
    return settings


def identity(layout: Layout) -> str:
    """Return what distinguishes a dev cluster from an earlier or later one at the same place."""
    found = layout.settings_file.stat()
    return f"{found.st_ino} {found.st_mtime_ns}"


def is_left_over(layout: Layout) -> bool:
    """Return whether a test session has started the dev cluster; since it is this one's turn, it was killed."""
    return TURN.exists() and TURN.read_text() == identity(layout)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Make a folder for runs outside of /tmp: `submit` refuses /tmp, which each machine of a cluster has for itself."""
    with TemporaryDirectory(prefix="hpcdist-tests-", dir=STATE.parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


def slurm_release() -> tuple[int, ...]:
    """Return the release of the installed Slurm, such as (26, 5)."""
    version = subprocess.check_output(["slurmctld", "-V"], text=True).split()[1]
    return tuple(int(number) for number in version.split(".")[:2])


def missing_requirement(layout: Layout) -> str | None:
    """Return the reason why this machine cannot start a dev cluster; None if it can."""
    try:
        host.require_root(layout, "up")
        cluster.require_own(layout, OWNER)
        host.require_commands()
        host.refuse_beside_slurm(layout)
        host.require_namespaces()
    except DevClusterError as error:
        return str(error)
    if cluster_status.status(layout).is_up and not is_left_over(layout):
        return "a dev cluster is running and may be in use: run `hpcdist devcluster down` first"
    return None


@contextmanager
def dev_cluster(num_nodes: int) -> Iterator[DevCluster]:
    """Run a dev cluster for the duration of the block; skip the test on machines that cannot start one."""
    layout = Layout()
    if (reason := missing_requirement(layout)) is not None:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)
    cluster.down(layout)  # remains of a killed test session
    before = host.HOSTS.read_text()
    try:
        changes = {"num_nodes": num_nodes, "proctrack": os.environ.get(PROCTRACK, "linuxproc")}
        yield DevCluster(layout, start_cluster(layout, changes), before)
    finally:
        cluster.down(layout)
