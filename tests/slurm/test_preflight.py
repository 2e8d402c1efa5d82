"""The preflight on a real Slurm: it names the faulty node and a fix before the ranks start."""

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from hpcdist_runs import wait_for
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns

import hpcdist
from hpcdist.config.loading import load_config
from hpcdist.devcluster import cluster_processes, node_faults, settings
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run import create
from hpcdist.run.folder import State
from hpcdist.slurm.output import parse_settings
from hpcdist.trainers.comm.results import read_results

BAD = "n3"
#: Findings that depend on the load of the machine.
SPEEDS = ("disk", "network", "names")
ON_FOUR_NODES = ["cluster.nodes=4", "cluster.tasks_per_node=1", "preflight=on"]


class Faults:
    """Faults of a single node, which end with the test."""

    def __init__(self, devcluster: DevCluster, undo: ExitStack) -> None:
        self._layout = devcluster.layout
        self._undo = undo

    def on_node(self, *command: str) -> str:
        """Run a command with the network and the mounts of the bad node."""
        pid = cluster_processes.pid_of(self._layout, settings.slurmd(BAD))
        assert pid is not None
        line = ["nsenter", f"--target={pid}", "--mount", "--net", *command]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def _start_again(self, *, own_mounts: bool = False) -> None:
        node_faults.kill_node(self._layout, BAD, keep_link=True)
        node_faults.start_node(self._layout, BAD, own_mounts=own_mounts)

    def slow_link(self, rate_mbit: float) -> None:
        self._undo.callback(node_faults.slow_node, self._layout, BAD)
        node_faults.slow_node(self._layout, BAD, rate_mbit=rate_mbit)
        assert "tbf" in self.on_node("tc", "qdisc", "show", "dev", "eth0")

    def close_ports(self, ports: str) -> None:
        """Drop packets of new incoming connections, as a firewall does."""
        rules = (
            "table inet test { chain input { type filter hook input priority 0; policy accept;"
            f" tcp dport {ports} ct state new drop; }}; }}"
        )
        self._undo.callback(self.on_node, "nft", "delete", "table", "inet", "test")
        self.on_node("nft", rules)

    def slow_processor(self, share: float) -> None:
        """Limit the processor time of the node and of all steps that it starts."""
        group = Path("/sys/fs/cgroup/cpu/preflight-test")
        if not (group.parent / "cpu.cfs_quota_us").exists():
            pytest.skip("needs the cpu controller of cgroups version 1")
        group.mkdir(exist_ok=True)
        self._undo.callback(self._start_again)  # Slurm's daemon then belongs to the test's group again
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(round(100_000 * share)))
        pid = cluster_processes.pid_of(self._layout, settings.slurmd(BAD))
        (group / "cgroup.procs").write_text(str(pid))

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


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("closed ports", ("port: ", " cannot reach it: packets to it are dropped"), marks=pytest.mark.slow),
        ("slow link", ("network: ", " MB/s between the other nodes; ")),
    ],
)
def test_network_fault_fails_the_run_and_names_the_node(
    slurm_runs: SlurmRuns, faults: Faults, fault: str, words: tuple[str, ...]
) -> None:
    if fault == "slow link":
        faults.slow_link(20)
    elif shutil.which("nft") is None:
        pytest.skip("nft is not installed")
    else:
        faults.close_ports("32768-60999")
    name = fault.replace(" ", "-")
    reason = failed_state(slurm_runs, name, slurm_runs.submit(name, *ON_FOUR_NODES)).reason
    assert reason.startswith(f"preflight: {BAD}: ")
    assert all(word in reason for word in words)


@pytest.mark.faults
def test_slow_processor_is_named(slurm_runs: SlurmRuns, faults: Faults) -> None:
    faults.slow_processor(0.1)
    # The import of torch takes ten times as long there.
    job = slurm_runs.submit("slow-processor", *ON_FOUR_NODES, "launch.init_timeout_s=600")
    checks = preflight_result(slurm_runs, "slow-processor")["checks"]
    slurm_runs.cluster.run("scancel", job)
    found = [check for check in checks if check["name"] == "processor"]
    assert [check["node"] for check in found] == [BAD], checks
    assert "a computation on one core takes " in found[0]["text"]


def test_requeued_job_excludes_a_node_with_another_version(
    slurm_runs: SlurmRuns, faults: Faults, tmp_path: Path
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
        *("preflight=on", "preflight.on_failure=exclude"),
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
    shipped = json.loads((slurm_runs.run_dir(name).journal / "sent-files.json").read_text())
    assert set(shipped["artifacts"]) >= {"preflight.json", "preflight.txt", "network.json"}


# --- `hpcdist doctor` on a real Slurm: the report on the cluster and on the nodes of a run.


DRAINED = "bad DIMM in slot 4"


@pytest.fixture
def grace_s(devcluster: DevCluster) -> Iterator[None]:
    devcluster.set_grace_time(7)
    yield
    devcluster.set_grace_time(0)


@pytest.mark.slow
@pytest.mark.usefixtures("grace_s")
def test_report_describes_the_cluster(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    release = devcluster.run("scontrol", "--version").split()[1]
    plugin = parse_settings(devcluster.run("scontrol", "show", "config"))["TopologyPlugin"]
    code, report = slurm_runs.command("doctor")
    assert (code, "FAILURE" in report) == (0, False), report
    words = " ".join(report.split())
    for line in (
        f"ok controller hpcdist, Slurm {release}",
        "ok accounting root may use devcluster, root",
        "ok main 4 nodes; 8 cores, 32 GiB, 2 GPUs each; at most 1-00:00:00 (default)",
        "ok high 4 nodes;",
        f"ok topology {plugin}",
        "`scancel` sends SIGTERM, and SIGKILL 5 s later (KillWait)",
        "preempted in main: SIGTERM, and SIGKILL 12 s later (GraceTime 7 + KillWait 5); Slurm requeues the run",
        "jobs in high are never preempted",
    ):
        assert line in words, report


@pytest.fixture
def drained(devcluster: DevCluster) -> Iterator[str]:
    devcluster.run("scontrol", "update", "nodename=n2", "state=drain", f"reason={DRAINED}")
    yield "n2"
    devcluster.cancel_all()
    devcluster.run("scontrol", "update", "nodename=n2", "state=resume")


def test_report_on_a_run_shows_drained_nodes(
    slurm_runs: SlurmRuns, devcluster: DevCluster, request: pytest.FixtureRequest
) -> None:
    """The job only sleeps: the report does not depend on ranks."""
    project = slurm_runs.project
    config = load_config("ddp_digits", ["name=examined", f"runs_dir={slurm_runs.folder}", "cluster.nodes=2"])
    run = create.create_run(config, project)
    job = devcluster.sbatch("sleep 600", "--nodes=2", "--job-name=digits/examined", f"--chdir={project}")
    write_json(run.path / "slurm.json", {"job_id": job, "job_name": "digits/examined", "cluster": "hpcdist"})
    run.write_state(replace(run.read_state(), status="running"))
    devcluster.wait_job_state(job, "RUNNING")
    request.getfixturevalue("drained")
    code, text = slurm_runs.command("doctor", "examined", "--json")
    assert code == 0, text
    found: dict[tuple[str, str], dict[str, Any]] = {
        (check["section"], check["name"]): check for check in json.loads(text)["checks"]
    }
    assert found["Run", "state"]["text"].startswith(f"running; job {job} is RUNNING on n[1-2]")
    drained = found["Nodes in Slurm", "n2"]
    assert (drained["level"], drained["node"]) == ("warning", "n2")
    assert drained["text"].startswith("draining, since 20")
    assert drained["text"].endswith(f"{DRAINED!r} by root")
    assert found["Nodes in Slurm", "others"]["text"].startswith("1 ")
    assert found["Node preflight", "preflight"]["text"].startswith("2 of 2 nodes answered")
    assert not list(run.path.glob(".doctor-*"))


# --- `hpcdist bench comm` on four nodes: measurements and MLflow artifacts.


FOUR_NODES = ("--cluster", "devcluster", "cluster.nodes=4", "cluster.tasks_per_node=1", "preflight=off")


@pytest.mark.faults
def test_benchmark_of_four_nodes_is_reported(slurm_runs: SlurmRuns) -> None:
    name = "bench-healthy"
    keys = (
        f"name={name}",
        "experiment=digits",
        f"tracking.uri=sqlite:///{slurm_runs.database}",
        "comm.operations=[send_recv,all_reduce]",
        "comm.max_bytes=64K",
        "tracking.system_interval_s=0",
    )
    code, output = slurm_runs.command("bench", "comm", *FOUR_NODES, *keys)
    assert code == 0, output
    results = read_results(slurm_runs.run_dir(name).artifacts)
    assert (results.nodes, results.partition, results.world_size) == (["n1", "n2", "n3", "n4"], "main", 4)
    assert {row.operation for row in results.rows} == {"send_recv", "all_reduce"}
    assert "4 ranks on 4 nodes (n1, n2, n3, n4), gloo on cpu, partition main" in output
    assert artifacts(slurm_runs, name) >= {"report.txt", "results.json"}


def artifacts(runs: SlurmRuns, name: str) -> set[str]:
    """Return the names of the benchmark's non-empty artifacts in MLflow."""
    with sqlite3.connect(runs.database) as connection:
        (uri,) = connection.execute(
            "select artifact_uri from runs where run_uuid = ?", [runs.mlflow_id(name)]
        ).fetchone()
    connection.close()
    return {path.name for path in (Path(urlparse(uri).path) / "comm").iterdir() if path.stat().st_size > 0}
