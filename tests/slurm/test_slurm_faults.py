"""Processes and nodes that die or hang without warning: at most the steps since the last checkpoint are lost."""

import errno
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import HOLD_STEP, LAST_STEP, wait_for
from http_servers import Server
from slurm_cluster import WAIT_S
from slurm_faults import FaultScene

from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.devcluster import node_faults
from hpcdist.host.json_files import read_json

#: A short timeout, but long enough for four ranks to import torch on two cores.
SHORT_TIMEOUT = "launch.hang_timeout_s=60"


@pytest.mark.faults
def test_stopped_rank_is_found_by_the_hang_timeout(scene: FaultScene) -> None:
    scene.submit_held("SIGSTOP of a rank", SHORT_TIMEOUT)
    victim = scene.pid_of(2)
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(victim).status() == psutil.STATUS_STOPPED, "the rank to stop")
    scene.release()
    scene.assert_recovered_from_checkpoint()
    log = scene.runs.job_log(scene.name)
    assert "rank 2 on n2 made no progress for launch.hang_timeout_s=60 s" in log, "not a rank that waits for it"
    assert "; rank 2 differs from the others: state stopped" in log
    attempt = scene.runs.attempt(scene.name)
    stacks = attempt.stacks_summary.read_text()
    # A stopped rank cannot write its own stack; the process state is recorded in its place.
    for rank, node in enumerate(("n1", "n1", "n2", "n2")):
        state = "state stopped" if rank == 2 else "state sleeping"
        assert re.search(rf"\n  rank {rank} on {node}, process \d+: {state}", stacks)
        assert attempt.flight(rank).exists() == (rank != 2)
        own = stacks.partition(f"\nstacks of rank {rank}:\n")[2].partition("\n\nstacks of rank")[0]
        assert ("ddp/train.py" in own) == (rank != 2)
    assert "no snapshot of" not in stacks
    assert scene.num_starts() == 1, "the same allocation"
    assert not psutil.pid_exists(victim)


@pytest.mark.slow
@pytest.mark.quick_fault
def test_killed_supervisor_is_restarted_by_the_batch_script(scene: FaultScene) -> None:
    """The new supervisor, in the same allocation, first kills the old ranks."""
    scene.submit_held("SIGKILL of the supervisor")
    supervisor = scene.runs.holder_pid(scene.name)
    assert "submitit.core._submit" in " ".join(psutil.Process(supervisor).cmdline())
    ranks = scene.wait_until_held()
    os.kill(supervisor, signal.SIGKILL)
    scene.assert_recovered_from_checkpoint()
    assert "the supervisor was killed (exit code 137): restarting it" in scene.runs.job_log(scene.name)
    assert (scene.num_starts(), scene.cell.attempts) == (1, 2)
    assert not any(psutil.pid_exists(rank) for rank in ranks), "ranks that were never released are killed"


@pytest.mark.faults
def test_job_fails_after_repeated_kills_of_the_supervisor(scene: FaultScene) -> None:
    scene.cell.fault = "SIGKILL of 4 supervisors"
    name = scene.name = f"{scene.subject.name}-supervisors-killed"
    job = scene.job = scene.runs.submit(name, *scene.subject.overrides)
    killed: list[int] = []
    for _ in range(4):

        def next_supervisor() -> int:
            pid = scene.runs.holder_pid(name)
            return pid if pid not in killed and psutil.pid_exists(pid) else 0

        killed.append(wait_for(next_supervisor, "the next supervisor"))
        os.kill(killed[-1], signal.SIGKILL)
    scene.cluster.wait_job_state(job, "FAILED")
    scene.runs.assert_no_process_left(name)
    assert scene.runs.state(name).status == "running", "no process was left to record the failure"
    scene.cluster.run("scontrol", "requeue", job)
    scene.start_now()
    scene.assert_recovered(max_lost_steps=scene.subject.interval)


@pytest.mark.faults
def test_second_job_of_a_held_run_fails_and_spares_the_first(scene: FaultScene) -> None:
    scene.submit_held("submitted twice")
    name, runs, devcluster = scene.name, scene.runs, scene.cluster
    again = runs.config(name, "cluster.tasks_per_node=2")
    code, output = runs.command("submit", *again, "--cluster", "devcluster")
    assert (code, "exists already: choose another `name`" in output) == (2, True), output
    # A second job submitted with sbatch itself fails because the first holds the run's lease.
    (script,) = (runs.run_dir(name).path / "submitit").glob("*_submission.sh")
    (pickle,) = (runs.run_dir(name).path / "submitit").glob("*_submitted.pkl")
    second = devcluster.run("sbatch", "--parsable", "--hold", str(script)).strip()
    pickle.with_name(f"{second}_submitted.pkl").write_bytes(pickle.read_bytes())
    devcluster.run("scontrol", "release", second)
    devcluster.wait_job_state(second, "FAILED")
    assert f"run {name} is held by process " in runs.job_log(name)
    assert runs.state(name).status == "running"
    scene.release()
    scene.assert_recovered(max_lost_steps=0)
    assert scene.cell.attempts == 1


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["n1", "n2"])
def test_dead_node_is_replaced_by_a_spare_node(scene: FaultScene, victim: str) -> None:
    """n1 is the batch host: the supervisor dies, too."""
    scene.submit_held("batch host dead" if victim == "n1" else "node dead for good", SHORT_TIMEOUT)
    assert scene.cluster.job(scene.job)["BatchHost"] == "n1"
    scene.kill_node(victim)
    scene.wait_restarted()
    scene.assert_recovered_from_checkpoint()
    assert victim not in scene.runs.hosts(scene.name, 2)
    # The supervisor excludes the node unless Slurm itself notices the failure first.
    is_excluded = "; lost n2, avoided from now on" in scene.runs.job_log(scene.name)
    assert scene.cluster.job(scene.job)["ExcNodeList"] == ("n2" if is_excluded else "(null)")


@pytest.mark.faults
def test_run_waits_for_the_dead_node_where_no_spare_exists(scene: FaultScene) -> None:
    others = scene.cluster.sbatch("sleep 3600", "--nodes=2", "--exclusive", "--nodelist=n3,n4")
    scene.cluster.wait_job_state(others, "RUNNING")
    scene.submit_held("node dead, comes back", SHORT_TIMEOUT)
    scene.kill_node("n2")
    scene.cluster.wait_until(lambda: scene.num_starts() == 2, "the job is queued again")
    node_faults.start_node(scene.cluster.layout, "n2")
    scene.wait_restarted()
    scene.assert_recovered_from_checkpoint()
    assert scene.runs.hosts(scene.name, 2) == ["n1", "n1", "n2", "n2"]


@pytest.mark.faults
def test_node_on_which_ranks_fail_twice_is_excluded(scene: FaultScene, tmp_path: Path) -> None:
    (tmp_path / "n2").touch()
    scene.submit("bad node", "trainer=gated:on_good_nodes", f"params.broken={tmp_path}", "cluster.exclude=n4")
    scene.cluster.wait_until(lambda: scene.num_starts() == 2, "the job is queued again")
    log = scene.runs.job_log(scene.name)
    assert "device lost" in log
    assert "; ranks on n2 have failed twice in a row, and on no other node: avoided from now on\n" in log
    assert set(scene.cluster.job(scene.job)["ExcNodeList"].split(",")) == {"n2", "n4"}, "n4: cluster.exclude"
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert scene.runs.hosts(scene.name, 3) == ["n1", "n1", "n3", "n3"]


# --- Faults of Slurm itself: reboots that it does not notice, killed slurmstepds, restarts of its daemons.


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("n2", marks=[pytest.mark.quick_fault, pytest.mark.slow]),
        pytest.param("n1", marks=pytest.mark.faults),
    ],
)
def test_job_is_requeued_after_unnoticed_node_reboot(scene: FaultScene, victim: str) -> None:
    """Slurm does not notice the reboot and keeps the step, so that the nodes are busy for the next attempt.

    n1 is the batch host: the supervisor dies, too; Slurm misses the batch step and requeues the job.
    """
    scene.submit_held("batch host reboots within seconds" if victim == "n1" else "node reboots within seconds")
    node_faults.kill_node(scene.cluster.layout, victim)
    node_faults.start_node(scene.cluster.layout, victim)
    if victim == "n2":
        assert "ranks-001" in scene.steps(), "Slurm has noticed the reboot"
    scene.release()
    scene.wait_restarted()
    scene.assert_recovered_from_checkpoint()
    assert (scene.num_starts(), scene.cell.attempts) == (2, 2)
    if victim == "n2":
        message = " (ranks-001) does not end, although none of its ranks is left\n"
        assert message in scene.runs.job_log(scene.name)
        assert scene.cluster.job(scene.job)["ExcNodeList"] == "(null)", "n2 is not excluded"


@pytest.mark.faults
def test_run_finishes_after_slurmstepd_is_killed(scene: FaultScene) -> None:
    """The ranks continue, but srun is not informed of their end."""
    scene.submit_held("SIGKILL of a slurmstepd")
    scene.kill_stepd("n2")
    scene.release()
    scene.assert_recovered(max_lost_steps=0)
    assert (scene.num_starts(), scene.cell.attempts) == (1, 1)
    assert "srun waits for ranks that have ended" in scene.runs.job_log(scene.name)


@pytest.mark.faults
def test_orphaned_ranks_are_killed_before_the_job_restarts(scene: FaultScene) -> None:
    """Without their slurmstepd, ranks receive no signals from Slurm and survive their job: the supervisor kills them.

    They are never released, so the end of their peers does not end them.
    """
    scene.submit_held("slurmstepd killed, then a rank")
    orphans = [scene.pid_of(2), scene.pid_of(3)]
    scene.kill_stepd("n2")
    os.kill(scene.pid_of(1), signal.SIGKILL)
    scene.wait_restarted()
    assert not any(psutil.pid_exists(pid) for pid in orphans)
    scene.assert_recovered_from_checkpoint()
    assert " (ranks-001) does not end, although none of its ranks is left\n" in scene.runs.job_log(scene.name)


@pytest.mark.faults
@pytest.mark.parametrize("daemon", ["slurmd-n2", "slurmctld"])
def test_restart_of_slurm_daemon_does_not_affect_the_run(scene: FaultScene, daemon: str) -> None:
    scene.submit_held(f"{daemon} is restarted")
    before = scene.kill_daemon(daemon)
    scene.start_daemon(daemon)
    assert scene.pid_of_daemon(daemon) not in (None, before)
    scene.release()
    scene.assert_recovered(max_lost_steps=0)
    assert (scene.num_starts(), scene.cell.attempts) == (1, 1)


@pytest.mark.faults
def test_ranks_killed_during_a_slurmctld_outage_restart_after_it(scene: FaultScene) -> None:
    scene.submit_held("rank killed without slurmctld")
    scene.kill_daemon("slurmctld")
    os.kill(scene.pid_of(3), signal.SIGKILL)
    scene.release()
    # The first failure may be that of a rank that has lost its connection to the killed one.
    wait_for(lambda: " ERROR rank " in scene.runs.job_log(scene.name), "the failure", timeout_s=WAIT_S)
    scene.start_daemon("slurmctld")
    # In the next start of the job if the controller has missed the end of the step, whose processors stay in use.
    scene.assert_recovered_from_checkpoint()
    assert scene.cell.attempts == 2, scene.runs.job_log(scene.name)


# --- Interruptions that Slurm announces with a signal: requeue, time limit, preemption. No step is lost.


@pytest.mark.faults  # `test_watching.py` follows a requeued run that equals the control run
def test_requeued_job_resumes_at_the_last_step(scene: FaultScene) -> None:
    scene.submit_held("two requeues at once")  # have the effect of one
    command = ["scontrol", "requeue", scene.job]
    both = [subprocess.Popen(command, env=scene.cluster.env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    scene.release()
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) in ([0, 0], [0, 1]), errors
    assert scene.wait_queued() == "everything saved (Slurm ends the job)"
    assert HOLD_STEP <= scene.runs.checkpoint_steps(scene.name)[-1] < LAST_STEP, "stopped in the middle"
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert (scene.num_starts(), scene.cell.attempts, scene.cell.restarts) == (2, 2, 0)


@pytest.mark.faults
def test_job_saves_and_requeues_itself_ahead_of_the_time_limit(scene: FaultScene) -> None:
    """The ranks are held until they are asked to stop; only the time limit causes that.

    Slurm's signal may arrive up to a minute before the supervisor's request, even before the ranks are held.
    """
    scene.submit("time limit", *scene.subject.overrides, "cluster.time_limit_min=2", "cluster.signal_lead_s=60")
    assert scene.cluster.job(scene.job)["TimeLimit"] == "00:02:00"
    reason = scene.wait_queued()
    assert reason.partition("(")[2] in ("time limit)", "the ranks received a stop signal)")
    assert 0 < scene.runs.checkpoint_steps(scene.name)[-1] < LAST_STEP
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert scene.num_starts() == 2


@pytest.mark.faults
def test_ranks_save_on_slurms_signal(scene: FaultScene) -> None:
    scene.submit_held("USR2 ahead of the limit")
    scene.cluster.run("scancel", "--signal=USR2", scene.job)
    scene.release()
    assert scene.wait_queued() == "everything saved (the ranks received a stop signal)"
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)


@pytest.mark.faults
@pytest.mark.parametrize("grace_s", [0, 20])
def test_preempted_job_saves_and_resumes(scene: FaultScene, grace_s: int) -> None:
    scene.cluster.set_grace_time(grace_s)
    scene.submit_held(f"preemption, grace {grace_s}")
    high = scene.cluster.start_high_priority_job("--nodes=4")
    scene.runs.wait_stop_request(scene.name)
    scene.release()
    scene.wait_queued()
    assert scene.runs.checkpoint_steps(scene.name)[-1] >= HOLD_STEP
    scene.cluster.wait_job_state(high, "COMPLETED")
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert scene.num_starts() == 2


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["USR2 during import", "requeue during import"])
def test_stop_signal_before_the_process_group_loses_no_step(scene: FaultScene, fault: str) -> None:
    """The ranks receive the signal during their imports, before they have anything to save."""
    scene.submit(fault, "trainer=held_import:train")
    scene.wait_until_held()
    if fault.startswith("USR2"):
        scene.cluster.run("scancel", "--signal=USR2", scene.job)
        scene.release()
        assert scene.wait_queued() == "everything saved (the ranks received a stop signal)"
        assert scene.runs.checkpoint_steps(scene.name)[-1] < 20, "stopped at one of the first steps"
    else:
        # Slurm kills the ranks after KillWait (5 s) unless they have ended by then: both outcomes are valid.
        scene.cluster.run("scontrol", "requeue", scene.job)
        scene.release()
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)
    assert scene.num_starts() == 2


@pytest.mark.faults
def test_requeue_before_signal_handlers_exist_kills_the_ranks(scene: FaultScene) -> None:
    """Ranks that have not imported anything yet die of SIGTERM and lose nothing."""
    before_all = scene.runs.project / "before_all"
    before_all.mkdir(exist_ok=True)
    hook = f"sys.path.insert(0, {str(scene.runs.project)!r})\n    import held_import\n"
    (before_all / "sitecustomize.py").write_text(f"import sys\nif 'hpcdist.rank.worker' in sys.orig_argv:\n    {hook}")
    path = f"{before_all}:{scene.runs.no_mlflow}:{scene.runs.project}"
    scene.submit("requeue before any import", f"launch.env.PYTHONPATH={path}")
    scene.wait_until_held()
    scene.cluster.run("scontrol", "requeue", scene.job)
    assert "no rank was started at all: " in (reason := scene.wait_queued())
    assert "DUE TO JOB REQUEUE" in reason
    scene.start_now()
    scene.assert_recovered(max_lost_steps=0)


# --- Temporary faults of services that a run depends on: the tracking server and the disk.


DOWN_S = 60.0
#: Minimum duration of a step, so that the run outlasts the outage.
STEP_S = 0.9


@pytest.fixture
def server(scene: FaultScene, tmp_path: Path) -> Iterator[Server]:
    """A server that the nodes can reach, with the database that also holds the control run."""
    server = Server(tmp_path, scene.runs.database, host=scene.cluster.settings.addresses[scene.cluster.settings.host])
    server.start()
    yield server
    server.kill()


@pytest.mark.faults
def test_tracking_server_outage_loses_no_record(scene: FaultScene, server: Server) -> None:
    hold_at = 4
    slow_steps = ["trainer=gated:train", f"params.hold_at={hold_at}", f"params.pace_s={STEP_S}"]
    scene.submit("MLflow server down 60 s", *slow_steps, f"tracking.uri={server.uri}")
    scene.wait_until_held()
    mlflow = scene.runs.run_dir(scene.name).mlflow
    wait_for(lambda: "run_id" in (read_json(mlflow) or {}), "the run in MLflow")
    wait_for(lambda: scene.runs.points(scene.name), "points in MLflow")
    server.kill()
    down = time.monotonic()
    scene.release()
    # Training does not wait for the server.
    scene.wait_step(hold_at + math.ceil(DOWN_S / STEP_S) + 2)
    assert not server.answers()
    assert time.monotonic() - down >= DOWN_S
    assert scene.runs.state(scene.name).status == "running"
    server.start()
    scene.assert_recovered(max_lost_steps=0, sync=False)
    shipped = (scene.runs.run_dir(scene.name).path / "shipper.log").read_text()
    assert "records stay in the journal until" in shipped
    assert "is available again: no records were lost" in shipped
    assert scene.cell.attempts == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[list[Path]]:
    """A list of mount points to which the test adds; they are unmounted afterwards."""
    folders: list[Path] = []
    yield folders
    for folder in folders:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill a file system completely; return the file that fills it."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017  (the expected error)
    assert os.statvfs(folder).f_bavail == 0
    return ballast


@pytest.mark.faults
def test_resume_continues_a_run_that_failed_with_a_full_disk(scene: FaultScene, small_disk: list[Path]) -> None:
    runs = scene.runs
    scene.submit("disk full during save", *scene.subject.overrides, "--begin=now+1hour")
    checkpoints = runs.run_dir(scene.name).checkpoints
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", checkpoints], check=True)
    small_disk.append(checkpoints)
    scene.start_now()
    scene.wait_until_held()
    ballast = fill(checkpoints)
    scene.release()

    state = runs.wait_end(scene.name, scene.job)
    scene.cell.starts, scene.cell.attempts = scene.num_starts(), state.attempt
    assert state.status == "failed"
    assert "CheckpointError" not in state.reason
    assert f"checkpoint of step 60 could not be written to {checkpoints}: No space left on device" in state.reason
    assert "older checkpoints are unchanged" in state.reason
    assert "\n" not in state.reason
    assert state.attempt == 2, "the same failure twice ends the run"
    assert {path.name for path in checkpoints.iterdir()} == {"ballast", "step-00000040", "step-00000045"}
    newest = CheckpointStore(checkpoints).latest()
    assert newest is not None
    assert newest.step == scene.subject.last_save
    code, output = runs.command("sync", scene.name)
    assert code == 0, output
    assert runs.mlflow_status(scene.name) == "FAILED"

    ballast.unlink()
    code, output = runs.command("resume", scene.name, "--detach")
    assert code == 0, output
    scene.job, scene.earlier_jobs = runs.job_id(scene.name), (scene.job,)
    # Training goes on until the next save, while the failed one is tried again.
    scene.assert_recovered(max_lost_steps=2 * scene.subject.interval)
