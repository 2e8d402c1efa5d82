"""The supervisor in a job's batch step: what submitit calls on the first node of the allocation."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcdist import logs
from hpcdist.config.loading import load_run_config
from hpcdist.config.written import secrets_of
from hpcdist.containers.rank_container import rank_container
from hpcdist.errors import HpcdistError, LeaseLostError, UserMistake
from hpcdist.files import retry
from hpcdist.files.atomic import read_json
from hpcdist.files.ownership import require_trusted
from hpcdist.run import snapshot
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.lease import Held, hold
from hpcdist.run.pending_config import newest_step, settle
from hpcdist.run.secret_file import kept
from hpcdist.run.slurm_job import record_job_start
from hpcdist.slurm.current_job import CurrentJob
from hpcdist.slurm.job.slurm_launcher import SlurmLauncher
from hpcdist.slurm.job.srun import rank_env
from hpcdist.slurm.job_components import rank_table_lines
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.supervisor.supervisor import Supervisor
from hpcdist.supervisor.watch import Allocation
from hpcdist.tracking.uri import is_server, resolve_uri

log = logging.getLogger(__name__)
TIME_LIMIT = "time limit"
#: Who asks for a stop when Slurm sends SIGTERM: to the supervisor of an attempt, or before there is one.
_BY_SIGTERM = ("SIGTERM", "signal")


class JobLog:
    """Tells the job's log how the run goes. Progress is in the heartbeats, for whoever follows.

    Args:
        life: the run whose folder is to say where this life of its job runs, once the first ranks are under way:
            Slurm's answer takes a while, and they have torch to import.
    """

    def __init__(self, life: RunDir | None = None) -> None:
        self._life = life
        self._network: Path | None = None

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        self._network = attempt.network
        log.info("attempt %d: starting %d ranks, logs in %s", attempt.number, num_ranks, attempt.path)
        if self._life is not None:
            try:
                record_job_start(self._life, os.environ)
            except OSError as error:
                # A full disk is no reason to leave ranks that have just been started.
                log.warning("it is not noted where this job runs: %s", error)
            self._life = None

    def progress(self, beat: Mapping[str, Any]) -> None:
        """What the ranks have found of the network, once: a line a second for weeks is no use to anyone."""
        if self._network is None:
            return
        if (found := read_json(self._network)) is not None:
            log.info("preflight: %s", found["text"])
            for line in found["warnings"]:
                log.warning("preflight: %s", line)
        if found is not None or beat.get("step"):
            self._network = None

    def note(self, text: str) -> None:
        log.info("%s", text)

    def output(self, text: str) -> None:
        """Nothing: what a plain script prints is in its rank's log."""

    def failure(self, failure: Failure, path: Path) -> None:
        log.error("%s (whole log: %s)\n%s", failure.sentence(), path, "".join(failure.traceback))


def supervise_in_job(run_dir: str) -> str:
    """What submitit calls: supervise a run from inside its Slurm job; returns the last state's sentence.

    Called anew, with the same pickle, each time that Slurm starts the job again. Raises HpcdistError when the run
    is held by another job or ended as failed, which makes Slurm show the job as failed: others may depend on it.
    """
    state = supervise(run_dir)
    if state.status == "failed":
        raise HpcdistError(state.reason)
    return f"{state.status}: {state.reason}"


def supervise(run_dir: str) -> State:
    """Supervise a run from inside its Slurm job; returns its last state."""
    # submitit has set handlers of its own: it would leave SIGTERM alone and requeue at SIGUSR2 by itself.
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    # At the time limit Slurm tells the ranks, a while ahead. The supervisor knows the time without it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    logs.configure()
    job = CurrentJob.from_env(os.environ)
    with retry.patient(retry.UNATTENDED_S), hold(run := _open(Path(run_dir)), job_id=job.id) as held:
        state = run.read_state()
        if _is_over(run, state, job):
            # Slurm may start a job again whose run someone has just stopped, the batch script one whose supervisor
            # was killed after its last word.
            log.info("nothing is left to do: %s: %s", state.status, state.reason)
        else:
            try:
                state = _supervise(run, job, held)
            except LeaseLostError:
                raise
            except (HpcdistError, OSError) as error:
                # Before any attempt, such as nodes that are not what the roles need: the run waits for nothing more.
                state = replace(
                    run.read_state(),
                    status="failed",
                    reason=str(error),
                    ended=time.time(),
                    rejected=isinstance(error, UserMistake),
                )
                state = settle(run, state, newest_step(run) or 0)
                run.write_state(state)
                log.error("%s: %s", state.status, state.reason)
    return state


def _open(path: Path) -> RunDir:
    run = RunDir.open(path)
    require_trusted(run.path, "submit")
    return run


def _supervise(run: RunDir, job: CurrentJob, held: Held) -> State:
    # Slurm hands on the environment of the submitting shell; what the run was given counts for more.
    config = load_run_config(run.effective_config, [], {**os.environ, **kept(run)})
    env = {**os.environ, **secrets_of(config), **config.cluster.env}
    code = snapshot.code_state(run)
    cwd = Path(code.cwd) if Path(code.cwd).is_dir() else run.path
    uri = resolve_uri(config, env)
    import_path = snapshot.import_path(code, run)
    box = rank_container(config, run, cwd=cwd, root=Path(code.root) if Path(code.root).is_dir() else cwd)
    for_ranks = env | rank_env(config)
    if box is not None:
        # The host's packages are not the image's.
        for_ranks["PYTHONPATH"] = rank_env(config).get("PYTHONPATH", "")
    launcher = SlurmLauncher(run, config, job, env=for_ranks, import_path=import_path, cwd=cwd, box=box)
    lead_s = config.cluster.signal_lead_s
    for line in rank_table_lines(config, launcher.nodes):
        log.info("%s", line)
    with launcher:
        return Supervisor(
            run,
            config,
            launcher,
            JobLog(life=run),
            # sqlite on a shared file system is unsafe; whoever follows the run on the login node ships it.
            tracking_uri=uri if is_server(uri) else None,
            env=env,
            allocation=Allocation(end - lead_s, TIME_LIMIT, end) if (end := job.end_time) is not None else None,
            check_lease=held.check,
            conclude=lambda state: _after(run, job, state, launcher.avoid, config.cluster.max_requeues),
        ).run()


def _after(run: RunDir, job: CurrentJob, state: State, avoid: Sequence[str], max_requeues: int) -> State:
    """Queue the job again where that is how the run goes on; returns the state that everyone is to see."""
    asked_by = _asked_by(run, state)
    if asked_by in _BY_SIGTERM and state.status in ("stopped", "failed") and job.is_requeued():
        # Slurm starts it again by itself. Ranks that had no time to save go on from the newest checkpoint.
        return _told(replace(state, status="queued", ended=None))
    # Nobody has asked for a stop where a node is lost, or where Slurm, ahead of the time limit, was quicker to signal
    # the ranks than the supervisor to ask them.
    if state.status != "stopped" or asked_by not in (None, TIME_LIMIT):
        return _told(state)
    if job.restart_count >= max_requeues:
        reason = f"{state.reason}; cluster.max_requeues={max_requeues} is used up"
        return _told(replace(state, status="failed", reason=reason))
    try:
        job.requeue(exclude=avoid)
    except HpcdistError as error:
        # Such as that of a script without `#SBATCH --requeue`: nothing is lost, but somebody has to go on.
        log.error("Slurm does not queue the job again; `hpcdist resume %s` goes on", run.name)
        return _told(replace(state, reason=f"{state.reason}; Slurm does not queue it again ({error})"))
    return _told(replace(state, status="queued", ended=None))


def _told(state: State) -> State:
    log.info("%s: %s", "queued again" if state.status == "queued" else state.status, state.reason)
    return state


def _asked_by(run: RunDir, state: State) -> str | None:
    """Who has asked the last attempt to stop or end."""
    request = run.attempt(state.attempt).read_request()
    return None if request is None else request.by


def _is_over(run: RunDir, state: State, job: CurrentJob) -> bool:
    """Whether a run has ended by itself or by someone's wish, rather than because its allocation did."""
    if state.status not in ENDED:
        return False
    by_slurm = _asked_by(run, state) in (*_BY_SIGTERM, TIME_LIMIT, None)
    return not (job.restart_count > 0 and state.status in ("stopped", "failed") and by_slurm)
