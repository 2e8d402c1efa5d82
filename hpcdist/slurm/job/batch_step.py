"""The supervisor in the batch step of a job, on the first node of the allocation. Called by submitit."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist import logs
from hpcdist.config.loading import load_run_config
from hpcdist.config.schema import ClusterConfig
from hpcdist.config.written import secrets_of
from hpcdist.containers.rank_container import rank_container
from hpcdist.environments.rank_environment import rank_environment
from hpcdist.environments.torch_checks import require_torch
from hpcdist.errors import HpcdistError, LeaseLostError, UserMistake
from hpcdist.files import retry
from hpcdist.files.atomic import read_json
from hpcdist.files.ownership import require_trusted
from hpcdist.run import snapshot
from hpcdist.run.attempt import Attempt, Cause
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.folder_identity import VARIABLE, identity
from hpcdist.run.lease import Held, hold
from hpcdist.run.pending_config import settle
from hpcdist.run.saved_checkpoints import newest_step
from hpcdist.run.secret_file import kept
from hpcdist.run.slurm_job import record_job_start
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.current_job import CurrentJob
from hpcdist.slurm.job.slurm_launcher import SlurmLauncher
from hpcdist.slurm.job.srun import rank_env
from hpcdist.slurm.job_components import rank_table_lines
from hpcdist.supervisor.launcher import NodeChanges
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.supervisor.supervisor import Supervisor
from hpcdist.supervisor.watch import Allocation
from hpcdist.tracking.client.uri import is_server, resolve_uri

log = logging.getLogger(__name__)
#: Minimum time between the request for a requeue and the end of the batch step. A job that Slurm kills and starts
#: again within one second fails: slurmd refuses its new credential ("Job credential revoked"). The job cannot start
#: before its batch step has ended. Slurm delays most requeued jobs by 120 s, but `scontrol update StartTime=now` ends
#: that.
CREDENTIAL_S = 2.0


class JobLog:
    """Writes the events of a run to the job's log. Progress is not logged: it is in the heartbeat files.

    Args:
        run: record the job's nodes and queue time in this run's folder when the first ranks have been started. The
            query to Slurm takes a while, and the ranks import torch in the meantime.
    """

    def __init__(self, run: RunDir | None = None) -> None:
        self._run = run
        self._network: Path | None = None

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        """Log the start of an attempt, and record the job's start in the run folder."""
        self._network = attempt.network
        log.info("attempt %d: starting %d ranks, logs in %s", attempt.number, num_ranks, attempt.path)
        if self._run is not None:
            try:
                record_job_start(self._run, os.environ)
            except OSError as error:
                # The ranks have been started and must not be left alone because of a full disk.
                log.warning("the nodes and the queue time of this job are not recorded: %s", error)
            self._run = None

    def progress(self, beat: Mapping[str, Any]) -> None:
        """Log the result of the ranks' network check, once."""
        if self._network is None:
            return
        if (found := read_json(self._network)) is not None:
            log.info("preflight: %s", found["text"])
            for line in found["warnings"]:
                log.warning("preflight: %s", line)
        if found is not None or beat.get("step"):
            self._network = None

    def note(self, text: str) -> None:
        """Log a line."""
        log.info("%s", text)

    def output(self, text: str) -> None:
        """Ignore the output of a script, which is in its rank's log."""

    def failure(self, failure: Failure, path: Path) -> None:
        """Log a rank's failure with its traceback."""
        log.error("%s (full log: %s)\n%s", failure.sentence(), path, "".join(failure.traceback))


def supervise_in_job(run_dir: str) -> str:
    """Supervise a run from inside its job and return its final status, for `job_function`.

    It is called again, with the same arguments, each time that Slurm restarts the job. Raises HpcdistError if another
    job holds the run or the run failed: then Slurm marks the job as failed, and dependent jobs see it.
    """
    state = supervise(run_dir)
    if state.status == "failed":
        raise HpcdistError(state.reason)
    if state.status == "queued":
        time.sleep(CREDENTIAL_S)
    return state.sentence


def supervise(run_dir: str) -> State:
    """Supervise a run from inside its job; returns its last state."""
    # submitit has installed handlers that ignore SIGTERM and requeue the job at SIGUSR2.
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    # Slurm sends SIGUSR2 to the ranks ahead of the time limit. The supervisor knows the limit without it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    logs.configure()
    job = CurrentJob.from_env(os.environ)
    with retry.patient(retry.UNATTENDED_S), hold(run := _open(Path(run_dir)), job_id=job.id) as held:
        state = run.read_state()
        if _is_over(run, state, job):
            # Slurm may restart the job of a run that has just been stopped, and the batch script a supervisor that was
            # killed after it had recorded the end.
            log.info("the run has ended already: %s: %s", state.status, state.reason)
        else:
            try:
                state = _supervise(run, job, held)
            except LeaseLostError:
                raise
            except (HpcdistError, OSError) as error:
                # Before any attempt, for example if the nodes do not match the roles.
                state = replace(
                    run.read_state(),
                    status="failed",
                    reason=str(error),
                    ended=time.time(),
                    rejected=isinstance(error, UserMistake),
                )
                state = settle(run, state, newest_step(run) or 0)
                held.check()  # the state belongs to a supervisor that has taken over meanwhile
                run.write_state(state)
                log.error("%s: %s", state.status, state.reason)
    return state


def _open(path: Path) -> RunDir:
    run = RunDir.open(path)
    require_trusted(run.path, "submit")
    return run


def _supervise(run: RunDir, job: CurrentJob, held: Held) -> State:
    # Slurm passes the environment of the submitting shell; values recorded for the run take precedence.
    config = load_run_config(run.effective_config, [], {**os.environ, **kept(run)})
    env = {**os.environ, **secrets_of(config), **config.cluster.env, VARIABLE: identity(run.path)}
    code = snapshot.code_state(run)
    cwd = Path(code.cwd) if Path(code.cwd).is_dir() else run.path
    uri = resolve_uri(config, env)
    import_path = snapshot.import_path(code, run)
    box = rank_container(config, run, cwd=cwd, root=Path(code.root) if Path(code.root).is_dir() else cwd)
    for_ranks = env | rank_env(config)
    if box is not None:
        # Paths of the host's packages are not valid in the image.
        for_ranks["PYTHONPATH"] = rank_env(config).get("PYTHONPATH", "")
    environment = rank_environment(config, run, for_ranks)
    if environment is not None:
        for_ranks, import_path = dict(environment.env), [*import_path, environment.import_path]
    require_torch(config, for_ranks, on_slurm=True)
    launcher = SlurmLauncher(
        run, config, job, env=for_ranks, import_path=import_path, cwd=cwd, box=box, environment=environment
    )
    for line in rank_table_lines(launcher.sized, launcher.used_nodes):
        log.info("%s", line)
    with launcher:
        return Supervisor(
            run,
            config,
            launcher,
            JobLog(run),
            # SQLite is not safe on a shared file system: `follow` or `sync` on the login node ships the run.
            tracking_uri=uri if is_server(uri) else None,
            env=env,
            check_lease=held.check,
            job=SupervisedJob(run, config.cluster, job, launcher),
        ).run()


@dataclass(frozen=True)
class SupervisedJob:
    """The job of a run, as `supervisor.Job`."""

    run: RunDir
    config: ClusterConfig
    current: CurrentJob
    launcher: SlurmLauncher

    @property
    def allocation(self) -> Allocation | None:
        """Time limit of the ranks, if there is one."""
        end = self.current.end_time
        return Allocation(end - self.config.signal_lead_s, end) if end is not None else None

    @property
    def nodes(self) -> NodeChanges | None:
        """Changes of the nodes between attempts; None if the run is not elastic."""
        return self.launcher.elastic

    def is_ending(self) -> bool:
        """Return whether Slurm is ending the job.

        With proctrack/cgroup, Slurm sends SIGTERM at a requeue, a preemption or a cancellation to the ranks, but not to
        the batch step. With proctrack/linuxproc, the supervisor has received it.
        """
        try:
            return self.current.is_ending()
        except SlurmError as error:
            log.warning("the state of the job is unknown: %s", error)
            return False

    def requeue(self, state: State) -> State:
        """Requeue the job if the run continues that way. Returns the state to record."""
        cause = _stop_cause(self.run, state)
        if cause == "preemption" and state.status in ("stopped", "failed") and self.current.is_requeued():
            # Slurm has requeued the job itself. Ranks without time to save continue from the newest checkpoint.
            return _log_end(replace(state, status="queued", ended=None))
        # There is no request if a node failed, or if Slurm's signal ahead of the time limit reached the ranks before
        # the supervisor's request.
        if state.status != "stopped" or cause not in (None, "time_limit"):
            return _log_end(state)
        if self.current.restart_count >= self.config.max_requeues:
            reason = f"{state.reason}; cluster.max_requeues={self.config.max_requeues} is reached"
            return _log_end(replace(state, status="failed", reason=reason))
        try:
            self.current.requeue(exclude=self.launcher.avoid)
        except HpcdistError as error:
            # For example a batch script without `#SBATCH --requeue`. The checkpoint is saved.
            log.error("Slurm does not requeue the job; continue with `hpcdist resume %s`", self.run.name)
            return _log_end(replace(state, reason=f"{state.reason}; Slurm does not requeue the job ({error})"))
        return _log_end(replace(state, status="queued", ended=None))


def _log_end(state: State) -> State:
    log.info("%s", f"requeued: {state.reason}" if state.status == "queued" else state.sentence)
    return state


def _stop_cause(run: RunDir, state: State) -> Cause | None:
    """Return the cause of the request to end the run in its last attempt, or None."""
    request = run.attempt(state.attempt).read_request()
    return request.cause if request is not None and request.ends_run else None


def _is_over(run: RunDir, state: State, job: CurrentJob) -> bool:
    """Return whether a run has ended by itself or at a user's request, and not with its allocation."""
    if state.status not in ENDED:
        return False
    by_slurm = _stop_cause(run, state) in ("preemption", "time_limit", None)
    return not (job.restart_count > 0 and state.status in ("stopped", "failed") and by_slurm)
