"""`follow`, `status`, `explain` and `sync` for jobs on a real Slurm, with accounting and without."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, finish, wait_for
from http_servers import SECRET, Webhook, listening_webhook
from slurm_cluster import WAIT_S, DevCluster
from slurm_runs import NUM_RANKS, ON_FOUR_RANKS, TWO_COUNTING_RANKS, SlurmRuns

from hpcdist.devcluster import node_faults
from hpcdist.run.attempt_times import read_times

WAITING = "cluster.sbatch.begin=now+1hour"


@pytest.fixture
def without_accounting(tmp_path: Path) -> str:
    """A PATH with Slurm's commands except sacct."""
    for command in ("scontrol", "squeue", "scancel", "sbatch", "git", "sh"):
        (tmp_path / command).symlink_to(shutil.which(command) or command)
    return str(tmp_path)


class RunningCommand:
    """A running command and the lines that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []

    def until(self, start: str) -> str:
        """Wait for the next line with this beginning and return it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(start):
                return line.rstrip()
        raise AssertionError(f"no line {start!r} in {self.lines}")

    def interrupt(self) -> tuple[int, list[str]]:
        """Send SIGINT, then return the same as `end`."""
        self._process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> tuple[int, list[str]]:
        """Wait for the end; return the exit code and the remaining lines."""
        code, output = finish(self._process)
        return code, output.splitlines()


def start_submit(runs: SlurmRuns, name: str, *arguments: str) -> tuple[RunningCommand, str]:
    """Start `hpcdist submit` with --follow; return the command and the job id."""
    config = runs.config(name, *ON_FOUR_RANKS)
    following = RunningCommand(runs.start("submit", *config, *arguments, "--cluster", "devcluster"))
    return following, following.until(f"{name} is job ").split()[3].rstrip(":")


@pytest.mark.usefixtures("time_to_save")
def test_follow_shows_pending_reasons_a_requeue_and_the_end(slurm_runs: SlurmRuns, devcluster: DevCluster) -> None:
    name = "followed"
    following, job = start_submit(slurm_runs, name, *TWO_COUNTING_RANKS, WAITING, "--follow")
    assert ", expected to start at 20" in following.until(f"queued: job {job} waits (BeginTime)")
    devcluster.run("scontrol", "hold", job)
    following.until(f"queued: job {job} waits (JobHeld")
    devcluster.run("scontrol", "release", job)
    slurm_runs.start_now(job)
    following.until(f"running: job {job} on n[1-2]")
    slurm_runs.wait_step(name, 1, 1)
    devcluster.run("scontrol", "requeue", job)
    following.until("queued: requeued (everything saved (Slurm ends the job)); job ")
    slurm_runs.start_now(job)
    wait_for(slurm_runs.attempt(name, 2).beat(1).exists, "the ranks to start again", timeout_s=WAIT_S)
    code, output = slurm_runs.command("stop", name)
    assert code == 0, output
    code, lines = following.end()
    assert code == 0, lines
    assert lines[-1].startswith("stopped: everything saved (`hpcdist stop` by "), lines
    # `submit --follow` ships the records.
    assert slurm_runs.mlflow_status(name) == "KILLED"
    tags = slurm_runs.tags(name)
    assert (tags["hpcdist.slurm.job_id"], tags["hpcdist.slurm.starts"]) == (job, "2")
    assert float(tags["hpcdist.slurm.queue_s"]) >= 1
    slurm_runs.assert_no_process_left(name)


def test_stop_and_cancel_remove_a_pending_job_without_accounting(
    slurm_runs: SlurmRuns, devcluster: DevCluster, without_accounting: str
) -> None:
    env = {"PATH": without_accounting}
    for action, status in (("stop", "stopped"), ("cancel", "cancelled")):
        name = f"queue-{action}"
        job = slurm_runs.submit(name, WAITING)
        code, output = slurm_runs.command("status", name, **env)
        assert f"job {job} waits (BeginTime), expected to start at " in output
        code, output = slurm_runs.command(action, name, **env)
        again = f"`hpcdist resume {slurm_runs.run_dir(name).path}` submits it again"
        assert (code, output) == (0, f"job {job} of {name} was taken out of the queue; {again}\n")
        assert devcluster.job(job)["JobState"] == "CANCELLED"
        assert slurm_runs.state(name).status == status
    code, output = slurm_runs.command("runs", **env)
    assert "taken out of the queue" in output


@pytest.mark.faults
def test_follow_reports_the_job_state_of_a_killed_supervisor(slurm_runs: SlurmRuns) -> None:
    name = "followed-killed"
    following, job = start_submit(slurm_runs, name, *HOLD_OVERRIDES, "--follow")
    following.until(f"running: job {job} on n[1-2]")
    slurm_runs.wait_until_held(name, NUM_RANKS)
    code, lines = following.interrupt()
    message = f"run {name} continues: `hpcdist follow {name}` shows it again, `hpcdist stop` stops it"
    assert (code, lines[-1], slurm_runs.state(name).status) == (130, message, "running"), lines
    following = RunningCommand(slurm_runs.start("follow", name))
    following.until(f"running: job {job} on n[1-2]")
    supervisor = psutil.Process(slurm_runs.holder_pid(name))
    shell = supervisor.parent()
    assert shell is not None
    shell.kill()  # the batch script would restart the supervisor
    supervisor.kill()
    code, lines = following.end()
    assert code == 1, lines
    assert lines[-1].startswith(f"failed: job {job} ended as FAILED"), lines
    assert lines[-1].endswith(" on n[1-2]")
    assert slurm_runs.mlflow_status(name) == "FAILED"
    code, output = slurm_runs.command("explain", name)
    assert (code, len(output.splitlines()) <= 5) == (0, True)
    assert f"\nslurm:    job {job} ended as FAILED" in output
    slurm_runs.assert_no_process_left(name)


def test_explain_shows_why_a_run_was_rejected(slurm_runs: SlurmRuns, tmp_path: Path) -> None:
    name = "rejected"
    one_rank = ("cluster.nodes=1", "cluster.tasks_per_node=1", "launch.num_ranks=1")
    missing = ("data.name=mnist", f"data.root={tmp_path}/nowhere")
    waiting, job = start_submit(slurm_runs, name, *one_rank, *missing, "--follow")
    code, lines = waiting.end()
    assert code == 2, lines
    slurm_runs.wait_end(name, job)  # the run ends before its job
    code, output = slurm_runs.command("explain", name)
    rows = {key: text.strip() for key, _, text in (line.partition(":") for line in output.splitlines())}
    assert rows["cause"] == "the configuration cannot run on these nodes"
    assert f"{tmp_path}/nowhere" in rows["evidence"] + rows["status"]
    assert rows["slurm"].startswith(f"job {job} ended as ")


# --- Notifications of a Slurm job reach a real HTTP server once each, and nothing shows the address of the webhook.


NAME = "notified"


@pytest.fixture
def webhook(devcluster: DevCluster) -> Iterator[Webhook]:
    """Listen on the address at which the nodes reach this machine."""
    with listening_webhook(devcluster.settings.addresses[devcluster.settings.host]) as server:
        yield server


@pytest.mark.faults
def test_each_event_of_a_job_is_reported_once(slurm_runs: SlurmRuns, devcluster: DevCluster, webhook: Webhook) -> None:
    runs = slurm_runs
    arguments = [*ON_FOUR_RANKS, *HOLD_OVERRIDES, "stop.max_epochs=100000", "notify.webhook=${oc.env:MY_HOOK}"]
    shown = []
    for option in (["--dry-run"], []):
        submit = ["submit", *runs.config(NAME, *arguments), "--cluster", "devcluster", *option]
        code, output = runs.command(*submit, MY_HOOK=webhook.url)
        assert code == 0, output
        shown.append(output)
    job = runs.job_id(NAME)
    runs.wait_until_held(NAME, NUM_RANKS)
    shown += [devcluster.run("scontrol", "show", "job", "-dd", job), subprocess.check_output(["ps", "axww"], text=True)]
    shown.append(devcluster.run("scontrol", "write", "batch_script", job, "-"))
    assert runs.run_dir(NAME).secrets.stat().st_mode & 0o777 == 0o600
    os.kill(int((runs.attempt(NAME).path / "held-3").read_text()), signal.SIGKILL)
    runs.release(NAME)
    runs.wait_step(NAME, 2, HOLD_STEP + 10)
    devcluster.run("scontrol", "requeue", job)
    runs.wait_requeued(NAME)
    wait_for(lambda: len(webhook.bodies) >= 3, "the event of the requeue")
    runs.start_now(job)
    wait_for(lambda: runs.attempt(NAME, 3).path.exists(), "the third attempt", timeout_s=WAIT_S)
    runs.wait_step(NAME, 3, HOLD_STEP + 20)
    assert runs.command("stop", NAME)[0] == 0
    runs.wait_end(NAME, job)
    wait_for(lambda: len(webhook.bodies) >= 5, "the event of the end")

    assert [(body["event"], body["attempt"], body["status"]) for body in webhook.bodies] == [
        ("started", 1, "running"),
        ("restarted", 2, "running"),
        ("requeued", 2, "queued"),
        ("started", 3, "running"),
        ("ended", 3, "stopped"),
    ]
    assert {body["run"] for body in webhook.bodies} == {f"digits/{NAME}"}
    restart, requeue, end = (webhook.bodies[index]["reason"] for index in (1, 2, 4))
    assert restart.startswith("rank 3 on n2 was killed by SIGKILL")
    assert requeue.startswith("everything saved (Slurm ends")
    assert end.startswith("everything saved (`hpcdist stop` by ")
    assert webhook.bodies[-1]["mlflow_run_id"] == runs.mlflow_id(NAME)

    code, output = runs.command("sync", NAME)
    assert code == 0, output
    folder = runs.run_dir(NAME)
    paths = [path for path in folder.path.rglob("*") if path.is_file() and path != folder.secrets]
    shown += [output, runs.job_log(NAME), runs.param(NAME, "notify.webhook"), *runs.tags(NAME).values()]
    shown += [path.read_text(errors="replace") for path in paths]
    shown.append((devcluster.layout.logs / "slurmctld.log").read_text(errors="replace"))
    assert len(paths) > 20
    assert [text for text in shown if SECRET in text] == []


# --- The ledger of a run with a killed rank, a preemption, a dead node and a second job equals Slurm's accounting.


LEDGER_RUN = "three-faults"


@pytest.fixture
def runs(slurm_runs: SlurmRuns) -> Iterator[SlurmRuns]:
    yield slurm_runs
    slurm_runs.cluster.restore_nodes()


@pytest.mark.faults
def test_ledger_of_a_run_with_three_faults_equals_accounting(runs: SlurmRuns) -> None:
    cluster = runs.cluster
    job = runs.submit_held(LEDGER_RUN, "stop.max_epochs=100000", "launch.hang_timeout_s=60")
    os.kill(int((runs.attempt(LEDGER_RUN).path / "held-3").read_text()), signal.SIGKILL)
    runs.release(LEDGER_RUN)
    runs.wait_step(LEDGER_RUN, 2, HOLD_STEP + 10)

    high = cluster.start_high_priority_job("--nodes=4")
    runs.wait_requeued(LEDGER_RUN)
    cluster.wait_job_state(high, "COMPLETED")
    runs.start_now(job)
    wait_for(lambda: read_times(runs.attempt(LEDGER_RUN, 3)), "the third attempt", timeout_s=WAIT_S)
    first = runs.state(LEDGER_RUN).attempt
    runs.wait_step(LEDGER_RUN, first, HOLD_STEP + 60)

    node_faults.kill_node(cluster.layout, "n2")
    cluster.wait_until(lambda: int(cluster.job(job)["Restarts"]) >= 2, "the job is queued again")
    if cluster.job(job)["JobState"] == "PENDING":
        runs.start_now(job)
    wait_for(lambda: runs.state(LEDGER_RUN).attempt > first, "another attempt", timeout_s=WAIT_S)
    runs.wait_step(LEDGER_RUN, runs.state(LEDGER_RUN).attempt, HOLD_STEP + 100)
    code, output = runs.command("stop", LEDGER_RUN)
    assert code == 0, output
    runs.wait_end(LEDGER_RUN, job)
    first_job_attempt = runs.state(LEDGER_RUN).attempt
    code, output = runs.command("resume", LEDGER_RUN, "--detach")
    assert code == 0, output
    second = runs.job_id(LEDGER_RUN)
    wait_for(
        lambda: runs.state(LEDGER_RUN).attempt > first_job_attempt, "the attempt of the second job", timeout_s=WAIT_S
    )
    runs.wait_step(LEDGER_RUN, first_job_attempt + 1, HOLD_STEP + 140)
    code, output = runs.command("stop", LEDGER_RUN)
    assert code == 0, output
    runs.wait_end(LEDGER_RUN, second)

    ledger = runs.ledger(LEDGER_RUN, job, second)
    causes = ledger.seconds
    assert set(causes) >= {"start", "compile", "data", "compute", "communication", "checkpoint", "redone", "down"}
    assert ledger.queue_s > 0
    assert {entry.node for entry in ledger.entries if entry.seconds} >= {"n1", "n2"}
    # Before the requeue, the supervisor may have tried another attempt on the dead node.
    dead = [entry for entry in ledger.entries if entry.attempt >= first and entry.node == "n2"]
    assert sum(entry.seconds for entry in dead if entry.cause == "down") > 0, "the dead node"
    assert {len(times.shares) for a in runs.run_dir(LEDGER_RUN).attempts() if (times := read_times(a))} == {2}
    last = read_times(runs.attempt(LEDGER_RUN))
    assert last is not None
    num_ranks = sum(len(share.ranks) for share in last.shares.values())
    assert num_ranks == NUM_RANKS

    code, output = runs.command("sync", LEDGER_RUN)
    assert code == 0, output
    logged = {key: value for key, _, value in runs.points(LEDGER_RUN) if key.startswith("usage/")}
    assert logged["usage/allocated_hours"] * 3600 == pytest.approx(ledger.allocated_s, rel=1e-3)
    assert logged["usage/goodput"] == pytest.approx(ledger.goodput, rel=1e-3)
    print({cause: round(seconds, 1) for cause, seconds in causes.items()}, ledger.allocated_s, ledger.queue_s)


# --- Detection of a slow node on a real Slurm.


@pytest.mark.faults
def test_only_the_slow_one_of_four_nodes_is_reported(slurm_runs: SlurmRuns) -> None:
    name = "uneven"
    job = slurm_runs.submit(
        name,
        "trainer=uneven:train",
        "params.forward_s=0.04",
        "params.slow_host=n3",
        "cluster.nodes=4",
        "cluster.tasks_per_node=1",
        "tracking.log_every_steps=50",
        # `submit` ships records until there are no new ones.
        "tracking.system_interval_s=10",
    )
    attempt = slurm_runs.attempt(name)
    wait_for(attempt.straggler_events, "the straggler's line", timeout_s=WAIT_S)
    assert slurm_runs.command("stop", name)[0] == 0
    slurm_runs.wait_end(name, job)

    lines = attempt.straggler_events()
    assert {(line["name"], line["event"], line["rank"]) for line in lines} == {("n3", "slow", 2)}
    text = lines[0]["text"]
    found = re.match(r"n3 is (\d+) % slower than the median node \(compute ", text)
    assert found is not None, text
    assert int(found[1]) >= 20
    assert " s, and the others wait for it" in text
    assert text in slurm_runs.job_log(name)

    code, output = slurm_runs.command("sync", name)
    assert code == 0, output
    points = {key: value for key, _, value in slurm_runs.points(name)}
    assert {
        f"time/nodes_{kind}/{part}_s" for kind in ("min", "mean", "max") for part in ("step", "data", "compute")
    } <= points.keys()
    assert points["time/nodes_max/compute_s"] >= 1.2 * points["time/nodes_min/compute_s"]
    assert text in slurm_runs.command("explain", name)[1]
