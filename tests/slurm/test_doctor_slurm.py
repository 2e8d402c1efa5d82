"""`hpcdist doctor` on a real Slurm: what a newcomer reads there, and what it says of a run's nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from slurm_cluster import DevCluster
from slurm_runs import SlurmRuns

from hpcdist.devcluster import cluster


@pytest.fixture(autouse=True)
def as_it_was(devcluster: DevCluster) -> Iterator[None]:
    yield
    devcluster.cancel_all()
    devcluster.run("scontrol", "update", "nodename=n2", "state=resume")
    cluster.set_grace_time(devcluster.layout, 0)


def test_doctor_on_a_cluster_and_of_a_run(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    cluster.set_grace_time(devcluster.layout, 7)
    code, page = slurm_runs.command("doctor")
    assert (code, "FAILURE" in page) == (0, False), page
    words = " ".join(page.split())
    for said in (
        "ok controller hpcdist, Slurm 22.",
        "ok accounting root may charge devcluster, root",
        "ok main 4 nodes; 8 cores, 32 GiB, 2 GPUs each; at most 1-00:00:00 (default)",
        "ok high 4 nodes;",
        "`scancel` sends SIGTERM, and SIGKILL 5 s later (KillWait)",
        "preempted in main: SIGTERM, and SIGKILL 12 s later (GraceTime 7 + KillWait 5); Slurm puts the run back",
        "jobs in high are never preempted",
        "(no preempt_send_user_signal)",
        "ok 2 ranks, gloo import",
    ):
        assert said in words, page
    name = "examined"
    job = slurm_runs.submit_held(name)
    devcluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=bad DIMM in slot 4")
    code, text = slurm_runs.command("doctor", name, "--json")
    found = {(check["section"], check["name"]): check for check in json.loads(text)["checks"]}
    assert code == 0, text
    assert found["Run", "state"]["text"].startswith(f"running; job {job} is RUNNING on n[1-2]")
    drained = found["Nodes, by Slurm", "n2"]
    assert drained["level"] == "warning"
    assert drained["text"].startswith("draining, since 20")
    assert drained["text"].endswith("'bad DIMM in slot 4' by root")
    assert found["Nodes, by Slurm", "n1"]["level"] == "ok"
    assert found["Nodes, looked at", "preflight"]["text"].startswith("2 of 2 nodes answered")
    assert found["Preflight", "result"]["text"].endswith("on 2 nodes")
