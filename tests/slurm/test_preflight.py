"""The preflight on a real Slurm: it names the faulty node and a fix before the ranks start."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hpcdist_runs import wait_for
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns

import hpcdist
from hpcdist.devcluster import cluster, host, settings
from hpcdist.host.files import read_json
from hpcdist.run.folder import State

BAD = "n3"
#: Findings that depend on the load of the machine.
SPEEDS = ("disk", "network", "names")
ON_FOUR_NODES = ["cluster.nodes=4", "cluster.tasks_per_node=1"]


class Faults:
    """Faults of a single node, which end with the test."""

    def __init__(self, devcluster: DevCluster, undo: ExitStack) -> None:
        self._layout = devcluster.layout
        self._undo = undo

    def on_node(self, *command: str) -> str:
        """Run a command with the network and the mounts of the bad node."""
        pid = host.pid_of(self._layout, settings.slurmd(BAD))
        assert pid is not None
        line = ["nsenter", f"--target={pid}", "--mount", "--net", *command]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def _start_again(self, *, own_mounts: bool = False) -> None:
        cluster.kill_node(self._layout, BAD, keep_link=True)
        cluster.start_node(self._layout, BAD, own_mounts=own_mounts)

    def slow_link(self, rate_mbit: float) -> None:
        self._undo.callback(cluster.slow_node, self._layout, BAD)
        cluster.slow_node(self._layout, BAD, rate_mbit=rate_mbit)
        assert "tbf" in self.on_node("tc", "qdisc", "show", "dev", "eth0")

    def close_ports(self, ports: str) -> None:
        """Drop incoming packets, as a firewall does."""
        rules = (
            "table inet test { chain input { type filter hook input priority 0; policy accept;"
            f" tcp dport {ports} drop; }}; }}"
        )
        self._undo.callback(self.on_node, "nft", "delete", "table", "inet", "test")
        self.on_node("nft", rules)

    def mount(self, target: Path, *options: str) -> None:
        self._undo.callback(self._start_again)
        self._start_again(own_mounts=True)
        self.on_node("mount", *options, str(target))
        assert str(target) in self.on_node("findmnt", "--noheadings", str(target))
        assert subprocess.run(["findmnt", str(target)], stdout=subprocess.DEVNULL, check=False).returncode != 0


@pytest.fixture
def faults(devcluster: DevCluster) -> Iterator[Faults]:
    """Remove the faults and cancel all jobs after the test."""
    with ExitStack() as undo:
        try:
            yield Faults(devcluster, undo)
        finally:
            devcluster.cancel_all()


def preflight_result(runs: SlurmRuns, name: str, attempt: int = 1) -> dict[str, Any]:
    return wait_for(lambda: read_json(runs.attempt(name, attempt).preflight), "the preflight") or {}


def failed_state(runs: SlurmRuns, name: str, job: str) -> State:
    """Return the last state of a run that fails before its ranks start."""
    state = runs.wait_end(name, job)
    assert (state.status, state.attempt, state.restarts, state.rejected) == ("failed", 1, 0, False), state
    assert not list(runs.attempt(name).path.glob("rank-*.log")), "ranks were started"
    assert runs.cluster.job(job)["JobState"] == "FAILED"
    assert state.reason in runs.job_log(name)
    return state


@pytest.mark.slow
def test_full_disk_fails_the_run_and_names_the_node(slurm_runs: SlurmRuns, faults: Faults) -> None:
    job = slurm_runs.submit("full-disk", *ON_FOUR_NODES, "cluster.sbatch.begin=now+1hour")
    folder = slurm_runs.run_dir("full-disk").checkpoints
    faults.mount(folder, "-t", "tmpfs", "-o", "size=1m", "full")
    faults.on_node("dd", "if=/dev/zero", f"of={folder}/filler", "bs=4k", "count=256")
    slurm_runs.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    reason = failed_state(slurm_runs, "full-disk", job).reason
    assert reason.startswith(f"preflight: {BAD}: ")
    assert str(folder) in reason
    code, output = slurm_runs.command("follow", "full-disk")
    assert code == 1, output
    assert reason in output


@pytest.mark.slow
def test_closed_port_fails_the_run_and_names_the_node(slurm_runs: SlurmRuns, faults: Faults) -> None:
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed")
    faults.close_ports("20480-32767")
    job = slurm_runs.submit("closed-port", *ON_FOUR_NODES)
    reason = failed_state(slurm_runs, "closed-port", job).reason
    assert reason.startswith(f"preflight: {BAD}: ")
    assert "port" in reason


def test_slow_link_fails_the_run_and_names_the_node(slurm_runs: SlurmRuns, faults: Faults) -> None:
    faults.slow_link(20)
    job = slurm_runs.submit("slow-link", *ON_FOUR_NODES)
    reason = failed_state(slurm_runs, "slow-link", job).reason
    assert reason.startswith(f"preflight: {BAD}: network: ")
    assert " MB/s between the other nodes; " in reason


def test_requeued_job_excludes_a_node_with_another_version(
    slurm_runs: SlurmRuns, faults: Faults, tmp_path: Path, slurm_files: Callable[[str], set[str]]
) -> None:
    """The preflight of the second attempt, on healthy nodes, has no findings."""
    name = "excluded"
    source = Path(hpcdist.__file__)
    other = tmp_path / "__init__.py"
    other.write_text(source.read_text().replace(f'"{hpcdist.__version__}"', '"0.0.7"') + "# another one\n")
    faults.mount(source, "--bind", str(other))
    job = slurm_runs.submit(
        *(name, "cluster.nodes=3", "cluster.tasks_per_node=1", "launch.num_ranks=3"),
        *("trainer=counting:train", "params.until=5"),
        "preflight.on_failure=exclude",
    )
    state = slurm_runs.wait_requeued(name)
    assert state.reason.startswith(f"preflight: {BAD}: version: hpcdist 0.0.7, "), state.reason
    assert f" have {hpcdist.__version__}; " in state.reason
    assert state.reason.endswith(f"; {BAD} avoided from now on"), state.reason
    slurm_runs.start_now(job)
    state = slurm_runs.wait_end(name, job)
    assert (state.status, state.attempt, state.restarts) == ("finished", 2, 0), slurm_runs.job_log(name)
    assert slurm_runs.cluster.job(job)["ExcNodeList"] == BAD
    second = preflight_result(slurm_runs, name, 2)
    assert second["nodes"] == ["n1", "n2", "n4"]
    # On a busy machine a node may seem slow, which is a warning only.
    findings = [check for check in second["checks"] if check["level"] not in ("ok", "note")]
    assert [check for check in findings if check["level"] == "failure" or check["name"] not in SPEEDS] == []
    log = slurm_runs.job_log(name)
    assert "preflight: all-reduce over gloo of 3 ranks on 3 nodes is correct: " in log
    code, output = slurm_runs.command("sync", name)
    assert code == 0, output
    assert slurm_files(name) >= {"preflight.json", "preflight.txt", "network.json"}


@pytest.fixture
def slurm_files(slurm_runs: SlurmRuns) -> Callable[[str], set[str]]:
    """Return a function that lists the artifacts of a run in MLflow."""

    def files(name: str) -> set[str]:
        shipped = json.loads((slurm_runs.run_dir(name).journal / "sent-files.json").read_text())
        return set(shipped["artifacts"])

    return files
