"""Roles on different nodes of one allocation: placement, and restarts after a killed rank and after a dead node."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hpcdist_runs import assert_states_equal
from slurm_cluster import DevCluster, slurm_release
from slurm_runs import SlurmRuns

from hpcdist.devcluster import node_faults
from hpcdist.host.json_files import read_json
from hpcdist.slurm.output import parse_settings

STEPS, SAVED_AT, HOLD_STEP = 40, 20, 25
NUM_RANKS = 5
ROLES = [
    "trainer=roles:train",
    f"params.steps={STEPS}",
    "checkpoint.every_steps=10",
    "roles.server=1",
    "roles.worker=4",
    "launch.devices.worker=cpu",  # the dev cluster's GPUs are not real
]
#: One node for the server, two nodes with GPUs for the workers.
PLACED = ["cluster.roles.server.gpus_per_node=0", "cluster.gpus_per_node=2"]


@pytest.fixture(autouse=True)
def restored_nodes(devcluster: DevCluster) -> Iterator[None]:
    yield
    devcluster.restore_nodes()


@pytest.fixture(scope="module")
def control(slurm_runs: SlurmRuns) -> str:
    """Name of the control run: five ranks on this machine, without Slurm and without faults."""
    name = "roles-control"
    code, output = slurm_runs.command("run", *slurm_runs.config(name, *ROLES))
    assert code == 0, output
    assert "roles       rank  role        device\n            0     server:0    cpu\n" in output
    assert "            1-4   worker:0-3  cpu\n" in output
    return name


def submit_held(runs: SlurmRuns, name: str, *overrides: str) -> tuple[str, str]:
    """Submit a run and wait until all ranks are held; return the job id and the output of `submit`."""
    arguments = runs.config(name, *ROLES, f"params.hold_at={HOLD_STEP}", *overrides)
    code, output = runs.command("submit", *arguments, "--cluster", "devcluster")
    assert code == 0, output
    runs.wait_until_held(name, NUM_RANKS)
    return runs.job_id(name), output


def placement(runs: SlurmRuns, name: str, attempt: int = 1) -> list[list[Any]]:
    """Return rank, name, role, role index, host and local rank of each rank, as recorded by the ranks."""
    return list((read_json(runs.attempt(name, attempt).path / "placement.json") or {})["ranks"])


def expected_placement(server: str, *workers: str) -> list[list[Any]]:
    rows: list[list[Any]] = [[0, "server:0", "server", 0, server, 0]]
    return rows + [[1 + i, f"worker:{i}", "worker", i, workers[i // 2], i % 2] for i in range(4)]


def table_of(runs: SlurmRuns, name: str) -> list[str]:
    """Return the lines of the rank tables in the job's log, without times and headers."""
    lines = [line.partition(" INFO ")[2] for line in runs.job_log(name).splitlines()]
    return [" ".join(line.split()) for line in lines if "server:" in line or "worker:" in line]


def assert_recovered(runs: SlurmRuns, name: str, job: str, control: str, resumed_at: int) -> None:
    """Assert that the second attempt resumed at a step and that the results equal those of the control run."""
    state = runs.wait_end(name, job)
    assert (state.status, state.attempt) == ("finished", 2), f"{state}\n{runs.job_log(name)}"
    assert runs.resumed_at(name, 2) == resumed_at
    code, output = runs.command("sync", name)
    assert code == 0, output
    assert runs.checkpoint_steps(name)[-1] == STEPS
    assert_states_equal(runs.final_state(name), runs.final_state(control))
    points = sorted(point for point in runs.points(name) if point[0] == "train/norm")
    assert points == sorted(point for point in runs.points(control) if point[0] == "train/norm")
    assert len(points) == STEPS
    assert runs.mlflow_status(name) == "FINISHED"
    runs.assert_no_process_left(name)


@pytest.mark.slow
def test_killed_rank_restarts_on_its_node(slurm_runs: SlurmRuns, devcluster: DevCluster, control: str) -> None:
    """srun places the ranks by a file (`--distribution=arbitrary`)."""
    name = "roles-rank-killed"
    job, output = submit_held(slurm_runs, name, *PLACED)
    assert "0     server:0    cpu     1 node × 1, partition main\n" in output
    assert "1-4   worker:0-3  cpu     2 nodes × 2, 2 GPUs each, partition main\n" in output
    assert devcluster.job(job)["NumNodes"] == "3"
    assert table_of(slurm_runs, name) == ["0 server:0 cpu n1", "1-2 worker:0-1 cpu n2", "3-4 worker:2-3 cpu n3"]
    os.kill(int((slurm_runs.attempt(name).path / "held-3").read_text()), signal.SIGKILL)
    slurm_runs.release(name)
    assert_recovered(slurm_runs, name, job, control, SAVED_AT)
    assert devcluster.job(job)["Restarts"] == "0"
    assert "rank 3 (worker:2) on n3 was killed by SIGKILL, last heartbeat at step " in slurm_runs.job_log(name)
    for attempt in (1, 2):
        assert placement(slurm_runs, name, attempt) == expected_placement("n1", "n2", "n3")


@pytest.mark.faults
def test_roles_are_placed_if_slurm_prefers_idle_nodes(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    """With CR_LLN the nodes of an allocation may have another order."""
    if slurm_release() < (23, 11):
        pytest.skip("this Slurm reads SelectTypeParameters at its start only")
    name = "roles-least-loaded"
    keys = ["roles.worker=2", "cluster.roles.server.nodes=1", "cluster.roles.worker.nodes=1"]
    with devcluster.setting("SelectTypeParameters", "CR_Core,CR_LLN"):
        settings = parse_settings(devcluster.run("scontrol", "show", "config"))
        assert settings["SelectTypeParameters"] == "CR_CORE,CR_LLN"
        code, output = slurm_runs.command("submit", *slurm_runs.config(name, *ROLES, *keys), "--cluster", "devcluster")
        assert code == 0, output
        state = slurm_runs.wait_end(name, slurm_runs.job_id(name))
    assert state.status == "finished", f"{state}\n{slurm_runs.job_log(name)}"
    server, *workers = placement(slurm_runs, name, state.attempt)
    assert (server[2], server[5]) == ("server", 0)
    assert [(row[2], row[5]) for row in workers] == [("worker", 0), ("worker", 1)]
    assert {row[4] for row in workers}.isdisjoint({server[4]})


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["n1", "n3"])
def test_job_restarts_without_its_dead_node(
    slurm_runs: SlurmRuns, devcluster: DevCluster, control: str, victim: str
) -> None:
    """n1 is the batch host and the server's node, n3 is a worker node. If n1 dies, the supervisor dies, too."""
    name = f"roles-dead-{victim}"
    job, _ = submit_held(slurm_runs, name, *PLACED)
    node_faults.kill_node(devcluster.layout, victim)
    slurm_runs.release(name)
    slurm_runs.wait_restarted(job)
    assert_recovered(slurm_runs, name, job, control, SAVED_AT)
    assert victim not in {row[4] for row in placement(slurm_runs, name, 2)}
