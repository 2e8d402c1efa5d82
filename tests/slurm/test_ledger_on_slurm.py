"""The ledger of a run with a killed rank, a preemption, a dead node and a second job equals Slurm's accounting."""

from __future__ import annotations

import csv
import io
import os
import signal
from collections.abc import Iterator

import pytest
from hpcdist_runs import HOLD_STEP, wait_for
from slurm_cluster import WAIT_S
from slurm_runs import NUM_RANKS, SlurmRuns

from hpcdist.devcluster import cluster as devcluster_cluster
from hpcdist.host.files import read_json
from hpcdist.review.ledger import Entry
from hpcdist.run.records import read_times

NAME = "three-faults"

pytestmark = pytest.mark.faults


@pytest.fixture
def runs(slurm_runs: SlurmRuns) -> Iterator[SlurmRuns]:
    yield slurm_runs
    slurm_runs.cluster.restore_nodes()


def wait_step(runs: SlurmRuns, attempt: int, step: int) -> None:
    """Wait until an attempt has done a number of steps."""
    beat = runs.attempt(NAME, attempt).beat(0)
    what = f"step {step} of attempt {attempt}"
    wait_for(lambda: int((read_json(beat) or {}).get("step", 0)) >= step, what, timeout_s=WAIT_S)


def cause_of(entry: Entry) -> str:
    return entry.cause


def test_ledger_of_a_run_with_three_faults_equals_accounting(runs: SlurmRuns) -> None:
    cluster = runs.cluster
    job = runs.submit_held(NAME, "stop.max_epochs=100000", "launch.hang_timeout_s=60")
    os.kill(int((runs.attempt(NAME).path / "held-3").read_text()), signal.SIGKILL)
    runs.release(NAME)
    wait_step(runs, 2, HOLD_STEP + 10)

    high = cluster.start_high_priority_job("--nodes=4")
    runs.wait_requeued(NAME)
    cluster.wait_job_state(high, "COMPLETED")
    runs.start_now(job)
    wait_for(lambda: read_times(runs.attempt(NAME, 3)), "the third attempt", timeout_s=WAIT_S)
    first = runs.state(NAME).attempt
    wait_step(runs, first, HOLD_STEP + 60)

    devcluster_cluster.kill_node(cluster.layout, "n2")
    cluster.wait_until(lambda: int(cluster.job(job)["Restarts"]) >= 2, "the job is queued again")
    if cluster.job(job)["JobState"] == "PENDING":
        runs.start_now(job)
    wait_for(lambda: runs.state(NAME).attempt > first, "another attempt", timeout_s=WAIT_S)
    wait_step(runs, runs.state(NAME).attempt, HOLD_STEP + 100)
    code, output = runs.command("stop", NAME)
    assert code == 0, output
    runs.wait_end(NAME, job)
    first_job_attempt = runs.state(NAME).attempt
    code, output = runs.command("resume", NAME, "--detach")
    assert code == 0, output
    second = runs.job_id(NAME)
    wait_for(lambda: runs.state(NAME).attempt > first_job_attempt, "the attempt of the second job", timeout_s=WAIT_S)
    wait_step(runs, first_job_attempt + 1, HOLD_STEP + 140)
    code, output = runs.command("stop", NAME)
    assert code == 0, output
    runs.wait_end(NAME, second)

    ledger = runs.ledger(NAME, job, second)
    causes = ledger.by(cause_of)
    assert set(causes) >= {"start", "compile", "data", "compute", "communication", "checkpoint", "redone", "down"}
    assert ledger.queue_s > 0
    assert {entry.node for entry in ledger.entries if entry.seconds} >= {"n1", "n2"}
    dead = [entry for entry in ledger.entries if entry.attempt == first and entry.node == "n2"]
    assert sum(entry.seconds for entry in dead if entry.cause == "down") > 0, "the dead node"
    assert {len(times.shares) for a in runs.run_dir(NAME).attempts() if (times := read_times(a))} == {2}
    assert sum(len(s.ranks) for s in read_times(runs.attempt(NAME)).shares.values()) == NUM_RANKS  # type: ignore[union-attr]

    code, output = runs.command("cost", NAME, "--csv", "--by", "user,month")
    (row,) = csv.DictReader(io.StringIO(output))
    assert float(row["allocated"]) * 3600 == pytest.approx(ledger.allocated_s, abs=0.01)
    code, output = runs.command("sync", NAME)
    assert code == 0, output
    logged = {key: value for key, _, value in runs.points(NAME) if key.startswith("usage/")}
    assert logged["usage/allocated"] * 3600 == pytest.approx(ledger.allocated_s, abs=0.01)
    assert logged["usage/redone"] * 3600 == pytest.approx(causes["redone"], abs=0.01)
    print({cause: round(seconds, 1) for cause, seconds in causes.items()}, ledger.allocated_s, ledger.queue_s)
