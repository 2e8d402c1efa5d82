"""The supervisor of a job: in the batch step that submitit starts, or in a batch script written by the user (`hpcdist
in-job`).
"""

import logging
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.loading import load_run_config
from hpcdist.config.schema import Config
from hpcdist.config.slurm_notation import expand_tasks
from hpcdist.config.written import secrets_of
from hpcdist.containers.spec import rank_container
from hpcdist.environments.rank_environment import rank_environment
from hpcdist.environments.torch_check import require_torch
from hpcdist.errors import ConfigError, HpcdistError, LeaseLostError, RunFolderError, UserMistake
from hpcdist.host import log_files, retry
from hpcdist.host.json_files import read_json, write_json
from hpcdist.host.ownership import require_trusted
from hpcdist.job.launcher import SlurmLauncher
from hpcdist.job.srun import exposed_secrets, rank_env
from hpcdist.run import create, snapshot
from hpcdist.run.config_origin import Origin
from hpcdist.run.folder import ENDED, IDENTITY_VARIABLE, Attempt, RunDir, State, identity, read_record
from hpcdist.run.kept_secrets import kept
from hpcdist.run.lease import Held, hold
from hpcdist.run.script_ranks import find_spawn
from hpcdist.run.status import record_job_start
from hpcdist.slurm.client import CurrentJob
from hpcdist.slurm.output import SlurmError, parse_gpus
from hpcdist.slurm.placement import rank_table_lines
from hpcdist.supervisor.ending import continues_after_requeue
from hpcdist.supervisor.protocols import NodeChanges
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.supervisor.supervisor import Supervisor
from hpcdist.supervisor.watch import Allocation
from hpcdist.tracking.uri import is_server, resolve_uri
from hpcdist.tracking.weight_source import find_weights

log = logging.getLogger(__name__)


class JobLog:
    """Writes the events of a run to the job's log. Progress is not logged: it is in the heartbeat files."""

    def __init__(self, run: RunDir | None = None) -> None:
        #: Run that gets the record of the job's nodes and queue time; None if it has it already.
        self._run = run
        #: File with the result of the collective check of this attempt; None if nothing is left to be logged.
        self._network: Path | None = None

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        """Log the begin of an attempt. With the first one, record the job's nodes and queue time."""
        self._network = attempt.network
        log.info("attempt %d: starting %d ranks, logs in %s", attempt.number, num_ranks, attempt.path)
        if self._run is not None:
            # The query to Slurm takes a while: the ranks import torch in the meantime.
            try:
                record_job_start(self._run, os.environ)
            except OSError as error:
                # The ranks have been started and must not be left alone because of a full disk.
                log.warning("the nodes and the queue time of this job are not recorded: %s", error)
            self._run = None

    def progress(self, beat: Mapping[str, Any]) -> None:
        """Log the result of the collective check, once."""
        if self._network is None:
            return
        report = read_json(self._network)
        if report is not None:
            log.info("preflight: %s", report["text"])
            for line in report["warnings"]:
                log.warning("preflight: %s", line)
        if report is not None or beat.get("step"):
            self._network = None

    def note(self, text: str) -> None:
        log.info("%s", text)

    def output(self, text: str) -> None:
        """Ignore the output of a script, which is in its rank's log."""

    def failure(self, failure: Failure, path: Path) -> None:
        log.error("%s (full log: %s)\n%s", failure.sentence(), path, "".join(failure.traceback))


def supervise_job(run_dir: str) -> State:
    """Supervise a run in the batch step of its job until it ends or the job is requeued; returns its last state.

    An error before the first attempt is recorded as the end of the run. Raises RunFolderError if the run does not
    exist or another job holds it, and LeaseLostError if another supervisor takes it over.
    """
    # submitit has installed handlers that ignore SIGTERM and requeue the job at SIGUSR2. `Supervisor` sets its own.
    for number in (signal.SIGTERM, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    # Slurm sends SIGUSR2 to the ranks ahead of the time limit. The supervisor knows the limit without it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    log_files.configure()
    job = CurrentJob.from_env(os.environ)
    with retry.patient(retry.UNATTENDED_S):
        run = RunDir.open(Path(run_dir))
        require_trusted(run.path, "submit")
        with hold(run, job_id=job.id) as held:
            state = run.read_state()
            if _is_over(run, state, job):
                # Slurm may restart the job of a run that has just been stopped, and the batch script a supervisor that
                # was killed after it had recorded the end.
                log.info("the run has ended already: %s: %s", state.status, state.reason)
                return state
            try:
                return _supervise(run, job, held)
            except LeaseLostError:
                raise
            except (HpcdistError, OSError) as error:
                # Before any attempt, for example if the nodes do not match the roles.
                state = held.fail_start(error, rejected=isinstance(error, UserMistake))
                log.error("%s: %s", state.status, state.reason)
                return state


def _supervise(run: RunDir, job: CurrentJob, held: Held) -> State:
    """Supervise a run with its own config, code and environment, which its folder holds. Returns its last state."""
    # Slurm passes the environment of the submitting shell; values recorded for the run take precedence.
    config = load_run_config(run.config, [], {**os.environ, **kept(run)})
    env = {**os.environ, **secrets_of(config), **config.cluster.env, IDENTITY_VARIABLE: identity(run.path)}
    code = snapshot.code_state(run)
    # The folders of the submitting machine, if the nodes have them, too. The code itself is in the run folder.
    cwd = Path(code.cwd)
    if not cwd.is_dir():
        cwd = run.path
    root = Path(code.root)
    if not root.is_dir():
        root = cwd
    uri = resolve_uri(config, env)
    additional_env = rank_env(config)
    for_ranks = env | additional_env
    box = rank_container(config, run, for_ranks, cwd=cwd, root=root)
    if box is not None:
        for line in box.inherited.notes:
            log.info("%s", line)
        # Paths of the host's packages are not valid in the image.
        for_ranks["PYTHONPATH"] = additional_env.get("PYTHONPATH", "")
    environment = rank_environment(config, run, for_ranks)
    import_path = [*snapshot.import_path(code, run), *environment.import_path]
    require_torch(config, environment.env, on_slurm=True)
    launcher = SlurmLauncher(run, config, job, environment, import_path=import_path, cwd=cwd, box=box)
    for line in rank_table_lines(launcher.nodes.sized(config), launcher.nodes.used.names):
        log.info("%s", line)
    # SQLite is not safe on a shared file system: `follow` or `sync` on the login node ships the run.
    tracking_uri = None
    if is_server(uri):
        tracking_uri = uri
    with launcher:
        supervisor = Supervisor(
            run,
            config,
            launcher,
            JobLog(run),
            tracking_uri=tracking_uri,
            env=env,
            check_lease=held.check,
            job=SupervisedJob(config.cluster, job, launcher),
        )
        return supervisor.run()


@dataclass(frozen=True)
class SupervisedJob:
    """The job of a run, as `supervisor.Job`."""

    config: ClusterConfig
    current: CurrentJob
    launcher: SlurmLauncher

    @property
    def allocation(self) -> Allocation | None:
        """The time limit of the job, and `cluster.signal_lead_s` before it; None without a time limit."""
        end = self.current.end_time
        if end is None:
            return None
        return Allocation(stop_at=end - self.config.signal_lead_s, end=end)

    @property
    def nodes(self) -> NodeChanges:
        return self.launcher.nodes

    @property
    def restart_count(self) -> int:
        return self.current.restart_count

    def is_ending(self) -> bool:
        """Return whether Slurm is ending the job; False if Slurm does not answer.

        With proctrack/cgroup, Slurm sends SIGTERM at a requeue, a preemption or a cancellation to the ranks, but not to
        the batch step. With proctrack/linuxproc, the supervisor has received it.
        """
        return self._ask(self.current.is_ending)

    def is_requeued(self) -> bool:
        """Return whether Slurm has requeued the job since this start of it; False if Slurm does not answer."""
        return self._ask(self.current.is_requeued)

    def requeue(self) -> None:
        """Requeue the job, without the nodes that the launcher avoids. Raises SlurmError if Slurm refuses."""
        self.current.requeue(exclude=self.launcher.avoid)

    def release_nodes(self) -> None:
        """End the ranks' steps, and give back all nodes but the supervisor's."""
        self.launcher.close()
        self.current.release_other_nodes()

    def _ask(self, question: Callable[[], bool]) -> bool:
        try:
            return question()
        except SlurmError as error:
            # The state must be recorded. If Slurm has requeued the job after all, its next start continues the run.
            log.warning("the state of the job is unknown: %s", error)
            return False


def _is_over(run: RunDir, state: State, job: CurrentJob) -> bool:
    """Return whether a run has ended and must not be continued by this start of the job.

    A run is not over if it is queued, or `running` in the files of a supervisor that was killed.
    """
    if job.restart_count > 0:
        request = run.attempt(state.attempt).read_request()
        cause = request.cause if request is not None else None
        if continues_after_requeue(state.status, cause):
            return False
    return state.status in ENDED


# `hpcdist in-job`: the supervisor in a job with a batch script written by the user, such as `slurm/run.sbatch`.
#
# The `#SBATCH` lines of the script are the request, so the config's `cluster` section is taken from the job.


def run_in_job(config: Config, env: Mapping[str, str], cwd: Path, origin: Origin | None = None) -> State:
    """Supervise the run that the first start of the current job creates; returns its last state."""
    try:
        job = CurrentJob.from_env(env)
    except HpcdistError as error:
        raise ConfigError(f"{error}: use `sbatch slurm/run.sbatch CONFIG`, or `hpcdist submit CONFIG`") from error
    if not job.may_requeue:
        why = "without `#SBATCH --requeue` the run saves at the time limit and ends"
        log.warning("Slurm will not requeue this job: %s", why)
    if not config.name:
        # The same name after a requeue.
        config = replace(config, name=f"{create.label_of(config)}-job{job.id}")
    run = RunDir(Path(config.runs_dir) / config.experiment / config.name)
    record = read_record(run.slurm) or {}
    if record.get("job_id") != job.id:
        run = _create_in_job(run, config, env, cwd, job, origin)
    return supervise_job(str(run.path))


def _create_in_job(
    run: RunDir, config: Config, env: Mapping[str, str], cwd: Path, job: CurrentJob, origin: Origin | None
) -> RunDir:
    """Create the folder of a run in the first start of its job; `run` is the planned folder."""
    # Without `run.slurm`, the job was killed while it created this folder. Only this job uses its name.
    if run.name.endswith(f"-job{job.id}") and run.path.is_dir() and not run.slurm.exists():
        shutil.rmtree(run.path)
    cluster = cluster_from_job(config.cluster, env, job.time_limit_min)
    if cluster.outlives_nodes:  # Slurm does not show whether a job has the flag
        log.info(
            "cluster.min_nodes and cluster.spare_nodes need `#SBATCH --no-kill` in the batch script: without it"
            " Slurm kills the job when it notices a failed node"
        )
    config = replace(config, cluster=cluster)
    create.check_trainer(config, cwd, num_ranks=cluster.nodes * cluster.tasks_per_node)
    problems = exposed_secrets(config)
    spawn = find_spawn(config, [cwd])
    if spawn is not None:
        problems += spawn.problems(config, cluster)
    if problems:
        raise ConfigError(*problems)
    try:
        weights = find_weights(config, env)
        run = create.create_run(config, cwd, launcher="slurm", origin=origin, weights=weights)
    except RunFolderError as error:
        raise RunFolderError(f"{error} (or leave `name` out: then each job creates a new run)") from error
    # Last: with this file the folder is complete, and a requeued job continues with it.
    write_json(run.slurm, {"job_id": job.id}, durable=True)
    return run


def cluster_from_job(cluster: ClusterConfig, env: Mapping[str, str], time_limit_min: float | None) -> ClusterConfig:
    """Return the section `cluster` with the job's values, from Slurm's variables, in place of the config's.

    Raises ConfigError if the job's request does not fit a run, such as different numbers of tasks on its nodes.
    """
    if int(env.get("SLURM_HET_SIZE") or 0) > 1:
        fix = "request one allocation for all roles, and place them by cluster.roles"
        raise ConfigError(f"the job is heterogeneous (`#SBATCH hetjob`), and a run needs one allocation: {fix}")
    # Without --ntasks-per-node only the second variable is set; it may be the number of processors.
    tasks_text = env.get("SLURM_NTASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"]
    tasks = set(expand_tasks(tasks_text))
    if len(tasks) != 1:
        raise ConfigError(
            f"{tasks_text} tasks per node: request the same number for each node, with `#SBATCH --ntasks-per-node=N`"
        )
    num_nodes = int(env["SLURM_JOB_NUM_NODES"]) - cluster.spare_nodes
    if cluster.min_nodes is not None:
        # A job with a range of nodes may get more of them after a requeue.
        num_nodes = max(cluster.nodes, num_nodes)
    # Slurm sets these variables only if the script requests GPUs.
    gpus_text = env.get("SLURM_GPUS_PER_NODE") or env.get("SLURM_GPUS_ON_NODE") or "0"
    gpu_type, gpus = parse_gpus(gpus_text)
    minutes = cluster.time_limit_min
    if time_limit_min:
        minutes = int(time_limit_min)
    return replace(
        cluster,
        partition=env.get("SLURM_JOB_PARTITION"),
        account=env.get("SLURM_JOB_ACCOUNT"),
        qos=env.get("SLURM_JOB_QOS"),
        nodes=num_nodes,
        tasks_per_node=tasks.pop(),
        cpus_per_task=int(env.get("SLURM_CPUS_PER_TASK", "1")),
        gpus_per_node=gpus,
        gpu_type=gpu_type,
        mem=env.get("SLURM_MEM_PER_NODE"),
        time_limit_min=minutes,
    )
