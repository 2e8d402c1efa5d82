"""`hpcdist doctor` on a real Slurm: the report on the cluster and on the nodes of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns

from hpcdist.config.loading import load_config
from hpcdist.devcluster import cluster
from hpcdist.host.files import write_json
from hpcdist.run import create

DRAINED = "bad DIMM in slot 4"


@pytest.fixture
def grace_s(devcluster: DevCluster) -> Iterator[None]:
    cluster.set_grace_time(devcluster.layout, 7)
    yield
    cluster.set_grace_time(devcluster.layout, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("grace_s")
def test_report_describes_the_cluster(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    release = devcluster.run("scontrol", "--version").split()[1]
    code, report = slurm_runs.command("doctor")
    assert (code, "FAILURE" in report) == (0, False), report
    words = " ".join(report.split())
    for line in (
        f"ok controller hpcdist, Slurm {release}",
        "ok accounting root may use devcluster, root",
        "ok main 4 nodes; 8 cores, 32 GiB, 2 GPUs each; at most 1 day (default)",
        "ok high 4 nodes;",
        "`scancel` sends SIGTERM, and SIGKILL 5 s later (KillWait)",
        "preempted in main: SIGTERM, and SIGKILL 12 s later (GraceTime 7 + KillWait 5); Slurm requeues the run",
        "jobs in high are never preempted",
        "(preempt_send_user_signal is not set)",
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
    assert found["Nodes in Slurm", "n1"]["level"] == "ok"
    assert found["Node preflight", "preflight"]["text"].startswith("2 of 2 nodes answered")
    assert not list(run.path.glob(".doctor-*"))
