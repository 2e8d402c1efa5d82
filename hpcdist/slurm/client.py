"""The client of Slurm, the only module that runs scontrol, squeue, sacct, sinfo, scancel, sacctmgr and sbatch;
snapshots of a run's job, and the job that this process runs in.
"""

import logging
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple, Self

from hpcdist.config.slurm_notation import expand
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.time_limits import last_line, run_within
from hpcdist.slurm import output
from hpcdist.slurm.outer_job import without_outer_job
from hpcdist.slurm.output import AccountedStart, JobInfo, NodeState, Partition, SlurmError, parse_text, parse_time
from hpcdist.slurm.reservations import Reservation, parse_reservations

log = logging.getLogger(__name__)

# `submitit` calls sbatch for a submission; `hpcdist.job` starts steps with srun. Each function raises SlurmError
# without an answer.

#: Time limit of a query that a user waits for.
QUERY_TIMEOUT_S = 15.0
#: Time limit of commands inside a job, and of sbatch: Slurm's commands retry for up to a minute by themselves while the
#: controller restarts.
JOB_TIMEOUT_S = 60.0
#: Time for which a job repeats a query that it needs.
JOB_RETRY_S = 300.0
#: Pause between two tries of a command, and between two looks at the running steps. Slurm has no notification for the
#: end of a step.
_POLL_S = 0.2

#: The last error of Slurm's commands without slurm.conf, after those of their search for a controller by DNS.
_NO_CONFIG = "Could not establish a configuration source"
#: The message in place of this error.
NO_CONFIG = "Slurm's commands find no slurm.conf on this machine, nor a controller by DNS: use a login node"

#: Beginnings of the names of variables by which a user's shell changes the output of Slurm's commands.
_USER_SETTINGS = ("SACCT_", "SCONTROL_", "SINFO_", "SLURM_TIME_FORMAT", "SQUEUE_")
#: Programs that read variables of a job as options of the job or step that they start.
_STARTING = ("sbatch", "srun")
#: Limit of an unexpected output in an error message.
_SHOWN_CHARS = 100


def command_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for Slurm's commands in which their output does not depend on the user's settings."""
    without_settings = {name: value for name, value in env.items() if not name.startswith(_USER_SETTINGS)}
    return {**without_settings, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


def run(*command: str, timeout_s: float = QUERY_TIMEOUT_S, retry_s: float = 0.0, cwd: Path | None = None) -> str:
    """Run a command of Slurm and return its output; empty if the command names a job that Slurm does not know.

    Raises SlurmError.

    Args:
        timeout_s: time limit of one try.
        retry_s: time in which a failed command is repeated.
    """
    until = time.monotonic() + retry_s
    while True:
        try:
            return _run_once(command, timeout_s, cwd=cwd).stdout
        except SlurmError as error:
            if not error.installed or time.monotonic() > until:
                raise
        time.sleep(_POLL_S)


def _run_once(
    command: Sequence[str], timeout_s: float, *, stdin: str = "", cwd: Path | None = None
) -> CompletedProcess[str]:
    program = command[0]
    env = command_env(os.environ)
    if program in _STARTING:
        env = without_outer_job(env)
    try:
        done = run_within(command, timeout_s, env=env, stdin=stdin, cwd=cwd)
    except FileNotFoundError as error:
        raise SlurmError(f"{program} is not installed on this machine", installed=False) from error
    if done.returncode == 0:
        return done
    if done.returncode < 0:
        raise SlurmError(f"{program} did not answer within {timeout_s:g} s", timed_out=True, stderr=done.stderr)
    # For a cancelled task of an array of which other tasks remain, scontrol prints the second one, as its output.
    if "Invalid job id" in done.stderr or re.fullmatch(r"Job \S+ not found", done.stdout.strip()):
        return CompletedProcess(command, 0, "", "")
    if _NO_CONFIG in done.stderr:
        raise SlurmError(NO_CONFIG, stderr=done.stderr)
    reason = last_line(done.stderr).removeprefix(f"{program}: ") or f"exit code {done.returncode}"
    raise SlurmError(f"{program}: {reason}", stderr=done.stderr)


def query_job(job_id: str, *, history: bool = False) -> JobInfo | None:
    """Return the state of a job, or None if Slurm does not know the job (any more).

    The controller forgets a job a few minutes after its end. Accounting, if the cluster has it, knows older ones, and
    for `history` also memory and steps.
    """
    controller_error: SlurmError | None = None
    current: JobInfo | None = None
    try:
        current = output.parse_scontrol(run("scontrol", "--oneliner", "show", "job", job_id), job_id)
    except SlurmError as error:
        controller_error = error
    if current is not None and not history:
        return current
    past: JobInfo | None = None
    with suppress(SlurmError):  # a cluster without accounting: only the controller's answer counts
        text = run("sacct", f"--jobs={job_id}", "--duplicates", "-Pn", f"--format={output.SACCT_FIELDS}")
        past = output.parse_sacct(text, job_id)
    if current is not None and past is not None:
        return replace(current, step_states=past.step_states)
    if current is not None:
        return current
    if controller_error is None and past is not None and past.alive:
        # A job that the controller does not know has ended, even if accounting has not received its end.
        return None
    if controller_error is not None and past is None:
        raise controller_error
    return past


def accounted_starts(job_id: str) -> list[AccountedStart]:
    """Return all starts of a job in accounting, oldest first; raises SlurmError without accounting."""
    options = ("--duplicates", "--allocations", "-Pn", f"--format={output.START_FIELDS}")
    return output.parse_starts(run("sacct", f"--jobs={job_id}", *options), job_id)


def numeric_id(job_id: str) -> str:
    """Return the id of a job as `srun --jobid` takes it: for the task `41_2` of an array its own number."""
    if "_" not in job_id:
        return job_id
    text = run("squeue", "--noheader", "--format=%A", f"--jobs={job_id}").strip()
    if not text.isdecimal():
        raise SlurmError(f"squeue reports no number of job {job_id}: {text[:_SHOWN_CHARS]!r}")
    return text


def query_jobs(job_ids: Sequence[str]) -> dict[str, JobInfo]:
    """Return the jobs that are still in the queue, by id, with one command. Raises SlurmError without an answer."""
    if not job_ids:
        return {}
    text = run("squeue", "-h", "-r", "--states=all", f"--format={output.SQUEUE_FIELDS}", f"--jobs={','.join(job_ids)}")
    jobs = {}
    for job_id in job_ids:
        info = output.parse_squeue(text, job_id)
        if info is not None:
            jobs[job_id] = info
    return jobs


def job_record(job_id: str, *, retry_s: float = 0.0) -> dict[str, str]:
    """Return the controller's record of a job; empty if Slurm does not know the job."""
    text = run("scontrol", "show", "job", "--oneliner", job_id, timeout_s=JOB_TIMEOUT_S, retry_s=retry_s)
    return output.parse_record(text)


def cancel_job(job_id: str, *, pending_only: bool = False) -> None:
    """Cancel a job, a running one only without `pending_only`. A job that has ended is not changed."""
    options = ["--state=PENDING"] if pending_only else []
    try:
        run("scancel", *options, job_id)
    except SlurmError:
        # Only the answer may have been lost.
        job = query_job(job_id)
        if job is not None and job.alive:
            raise


def jobs_named(name: str, *, retry_s: float) -> list[str]:
    """Return the ids of this user's jobs with a name that are in the queue or run; those of an array have one id."""
    text = run("squeue", "--me", "-h", f"--name={name}", "--format=%A", retry_s=retry_s)
    return sorted(set(text.split()))


def requeue_job(job_id: str) -> None:
    """Return a running job to the queue; a pending one is not changed. Raises SlurmError if Slurm refuses."""
    try:
        run("scontrol", "requeue", job_id, timeout_s=JOB_TIMEOUT_S)
    except SlurmError as error:
        # Of two requests at the same time, Slurm refuses the second.
        if "pending execution" not in error.stderr.lower():
            raise


def settings() -> dict[str, str]:
    """Return the settings of the cluster, by their names in slurm.conf."""
    return output.parse_settings(run("scontrol", "show", "config"))


def cluster_name() -> str:
    """Return the name of the cluster; empty if Slurm does not say."""
    return settings().get("ClusterName", "")


def partitions() -> list[Partition]:
    """Return all partitions with their nodes, hidden ones included, with two commands that run at the same time."""
    commands = (
        ("scontrol", "show", "partition", "--oneliner", "--all"),
        ("sinfo", "--all", "--noheader", f"--format={output.PARTITION_FORMAT}"),
    )
    with ThreadPoolExecutor() as pool:
        return output.parse_partitions(*pool.map(lambda command: run(*command), commands))


def reservation_times(name: str) -> tuple[float | None, float | None]:
    """Return begin and end of a reservation (seconds since the epoch); None if Slurm does not say."""
    record = output.parse_record(run("scontrol", "show", "reservation", name, "--oneliner"))
    return parse_time(record.get("StartTime")), parse_time(record.get("EndTime"))


def reservations() -> list[Reservation]:
    """Return all reservations of nodes that are active or begin later."""
    return parse_reservations(run("scontrol", "--oneliner", "show", "reservation"))


def node_states(*, partition: str = "", names: Sequence[str] = ()) -> list[NodeState]:
    """Return the states of the nodes of a partition, of the nodes with some names, or of all nodes."""
    chosen = []
    if partition:
        chosen.append(f"--partition={partition}")
    if names:
        chosen.append(f"--nodes={','.join(names)}")
    return output.parse_node_states(run("sinfo", "--noheader", "--Node", *chosen, f"--format={output.NODE_FORMAT}"))


def failed_nodes(names: Sequence[str], since: float) -> list[str]:
    """Return the nodes that are down or do not respond now, or have booted after a time (seconds since the epoch)."""
    failed = {node.name for node in node_states(names=names) if node.has_failed}
    records = run("scontrol", "show", "node", "--oneliner", ",".join(names), timeout_s=JOB_TIMEOUT_S)
    failed |= {name for name, booted in output.parse_boot_times(records).items() if booted > since}
    return [name for name in names if name in failed]


def user_accounts(user: str, *, cluster: str = "") -> list[str]:
    """Return the accounts of a user, on one cluster or on all of them. Raises SlurmError without accounting."""
    chosen = [f"user={user}"]
    if cluster:
        chosen.append(f"cluster={cluster}")
    return sorted(set(_sacctmgr("show", "assoc", *chosen, "format=account")))


def qos_names() -> list[str]:
    """Return the names of all QOS. Raises SlurmError without accounting."""
    return sorted(set(_sacctmgr("show", "qos", "format=name")))


def _sacctmgr(*arguments: str) -> list[str]:
    return run("sacctmgr", "--noheader", "--parsable2", *arguments).split()


def estimate_start(script: str) -> str:
    """Return sbatch's estimate of the start of a job.

    Raises SlurmError if Slurm refuses it, and UserMistake if this machine belongs to no cluster.
    """
    try:
        text = _run_once(["sbatch", "--test-only"], JOB_TIMEOUT_S, stdin=script).stderr  # sbatch prints it there
    except SlurmError as error:
        if _NO_CONFIG in error.stderr:
            raise UserMistake(f"{NO_CONFIG}, or show the script with --dry-run") from error
        raise
    # Slurm gives the id to no job, and the time in seconds; see `command_env`.
    text = re.sub(r"\bJob \d+ to start", "the job would start", text)
    return re.sub(r"(?<=would start at )\d+\b(?!-)", lambda match: _local_time(int(match[0])), text)


def _local_time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def srun_option_error(name: str, value: str | bool) -> str | None:
    """Return the reason why srun cannot parse an option; None if it can, or cannot be run.

    Args:
        value: True for an option without a value.
    """
    option = f"--{name}" if value is True else f"--{name}={value}"
    try:
        # --help ends the program after the options before it are parsed; it does not contact the controller.
        run("srun", option, "--help")
    except SlurmError as error:
        if error.stderr and not error.timed_out and _NO_CONFIG not in error.stderr:
            lines = [line for line in error.stderr.splitlines() if not line.startswith("Try ")]
            return "; ".join(line.removeprefix("srun: ").removeprefix("error: ") for line in lines)
    return None


@dataclass(frozen=True, kw_only=True)
class JobRef:
    """The job that a run was submitted as. Ids are unique within one installation of a cluster only."""

    id: str
    name: str = ""  #: Slurm's name of the job, if known
    cluster: str = ""  #: Slurm's name of the cluster, if known


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """The state of a job at one time, or the reason why Slurm did not answer."""

    info: JobInfo | None = None  #: None also if Slurm does not know the job (any more)
    error: str = ""  #: why Slurm did not answer
    installed: bool = True  #: whether Slurm's commands exist on this machine

    @property
    def is_over(self) -> bool:
        """Whether the job neither runs nor will run, by Slurm's answer."""
        return not self.error and (self.info is None or not self.info.alive)


def take_snapshot(job: JobRef, *, history: bool = False) -> JobSnapshot:
    """Query a job; see `query_job`. A job with the same id but another name is another job, and is ignored."""
    try:
        info = query_job(job.id, history=history)
        if info is not None and (not job.name or info.name == job.name):
            return JobSnapshot(info=info)
        if not job.cluster:
            return JobSnapshot()
        this_cluster = cluster_name()
        if this_cluster == job.cluster:
            return JobSnapshot()
        return JobSnapshot(error=f"job {job.id} is on cluster {job.cluster}, this is {this_cluster}")
    except SlurmError as error:
        return JobSnapshot(error=str(error), installed=error.installed)


# --- the job that this process runs in: its limits and nodes, its steps, and its requeue

#: States of a job in which its batch step keeps running.
_BATCH_STEP_CONTINUES = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
#: States of a node (`sinfo`'s long names) that a requeued job may get at once, and that it may get later.
_IDLE = ("idle",)
_IN_USE = ("mixed", "allocated", "completing")


def job_id_of(env: Mapping[str, str]) -> str:
    """Return the id of the current job as all commands of Slurm take it: `41`, or `41_2` for an array task."""
    # SLURM_JOB_ID of the last task is the id of the array, which addresses all tasks.
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    if not env.get("SLURM_JOB_ID"):
        raise HpcdistError("SLURM_JOB_ID is not set: this command runs inside a Slurm job only")
    return env["SLURM_JOB_ID"]


@dataclass(frozen=True, kw_only=True)
class CurrentJob:
    """The job that this process runs in, as the controller knew it at the time of `from_env`."""

    id: str
    restart_count: int
    end_time: float | None  #: seconds since the epoch; None without a time limit
    time_limit_min: float | None = None
    may_requeue: bool = True  #: whether the job was submitted with `--requeue`
    partition: str = ""
    nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  #: nodes that the job must not get

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Return the current job. Raises HpcdistError outside of a job, or if the controller does not answer."""
        job_id = job_id_of(env)
        record = job_record(job_id, retry_s=JOB_RETRY_S)
        if not record:
            raise HpcdistError(f"Slurm does not know job {job_id}, the one in SLURM_JOB_ID")
        return cls(
            id=job_id,
            restart_count=_restart_count(record),
            end_time=parse_time(record.get("EndTime")),
            time_limit_min=output.parse_minutes(record.get("TimeLimit", "")),
            may_requeue=record.get("Requeue") != "0",
            partition=record.get("Partition", ""),
            nodes=_expand_nodes(record.get("NodeList")),
            excluded=_expand_nodes(record.get("ExcNodeList")),
        )

    def allocated(self) -> tuple[str, ...]:
        """Return the nodes that belong to the job now; empty if Slurm does not say."""
        return _expand_nodes(job_record(self.id).get("NodeList"))

    def is_requeued(self) -> bool:
        """Return whether Slurm has requeued the job since this start of it (after a preemption or a node failure)."""
        return _restart_count(job_record(self.id)) > self.restart_count

    def is_ending(self) -> bool:
        """Return whether Slurm is ending the job before its time limit: a cancellation, a preemption or a requeue."""
        if self.end_time is not None and time.time() >= self.end_time:
            return False
        state = job_record(self.id).get("JobState")
        return state is not None and state not in _BATCH_STEP_CONTINUES

    def requeue(self, *, exclude: Sequence[str] = ()) -> None:
        """Requeue the job, and ask Slurm to start it without the nodes `exclude`.

        This process ignores SIGTERM from now on, so that it can still write the state of the run. Raises SlurmError if
        Slurm refuses the requeue.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # scontrol inherits it
        try:
            requeue_job(self.id)
        except SlurmError:
            # Only the answer may have been lost.
            if not self.is_requeued():
                raise
        if exclude:
            # Slurm 22.05 changes the excluded nodes of pending jobs only.
            nodes = ",".join([*self.excluded, *exclude])
            try:
                run("scontrol", "update", f"JobId={self.id}", f"ExcNodeList={nodes}", timeout_s=JOB_TIMEOUT_S)
            except SlurmError as error:
                # The job is requeued nevertheless. Only administrators may change one that Slurm itself expedites.
                log.warning("the job may get %s again: %s", ", ".join(exclude), error)

    def release_other_nodes(self) -> None:
        """Give back all nodes but the one of the batch step. Nodes that Slurm refuses to take stay with the job."""
        this_node = os.environ.get("SLURMD_NODENAME", "")
        if not this_node or len(self.nodes) == 1:
            return
        command = ("scontrol", "update", f"JobId={self.id}", f"NodeList={this_node}")
        try:
            # scontrol writes scripts with the variables of the smaller job to its folder. They are not used.
            with tempfile.TemporaryDirectory() as folder:
                run(*command, timeout_s=JOB_TIMEOUT_S, cwd=Path(folder))
        except (SlurmError, OSError) as error:
            log.warning("the other nodes stay with the job until its end: %s", error)

    def replaceable(self, nodes: Sequence[str], *, idle_only: bool) -> bool:
        """Return whether the partition has enough nodes with the job's hardware if the job does not get `nodes`.

        Args:
            idle_only: count idle nodes and the job's own nodes only, not those that other jobs use now.
        """
        usable = _IDLE if idle_only else (*_IDLE, *_IN_USE)
        excluded = {*nodes, *self.excluded}
        states = node_states(partition=self.partition)
        hardware = {node.hardware for node in states if node.name in self.nodes}
        num_candidates = 0
        for node in states:
            is_available = node.name in self.nodes or node.state in usable
            if is_available and node.hardware in hardware and node.name not in excluded:
                num_candidates += 1
        return num_candidates >= len(self.nodes)


def _restart_count(record: Mapping[str, str]) -> int:
    return output.parse_count(record.get("Restarts", "0")) or 0


def _expand_nodes(text: str | None) -> tuple[str, ...]:
    nodes = parse_text(text)
    if not nodes:
        return ()
    return tuple(expand(nodes))


def running_steps(*, retry_s: float = 0.0) -> dict[str, str]:
    """Return the steps of the current job that have not ended: names by step id."""
    command = ("squeue", "--steps", f"--jobs={job_id_of(os.environ)}", "--noheader", "--format=%i %j")
    text = run(*command, timeout_s=JOB_TIMEOUT_S, retry_s=retry_s)
    steps = {}
    for line in text.splitlines():
        step_id, _, name = line.strip().partition(" ")
        steps[step_id] = name
    return steps


def signal_named_steps(step_name: str, signal_name: str) -> bool:
    """Send a signal (`KILL`, `USR1`) to the current job's steps of a name; returns whether there is such a step."""
    try:
        step_ids = [step_id for step_id, name in running_steps().items() if name == step_name]
    except SlurmError:
        return False
    signal_steps(step_ids, signal_name)
    return bool(step_ids)


def signal_steps(step_ids: Sequence[str], signal_name: str) -> None:
    """Send a signal to all tasks of steps. Steps that have just ended, and a controller that is down, are ignored."""
    if step_ids:
        with suppress(SlurmError):
            run("scancel", f"--signal={signal_name}", *step_ids, timeout_s=JOB_TIMEOUT_S)


# Ending steps of this job that an earlier supervisor or attempt has left running.
#
# Slurm 22.05 loses track of a step when a node reboots before Slurm notices its failure, or when a slurmstepd is
# killed: the step keeps its processors, and neither `scancel` nor a time limit ends it, only the end of the job or its
# requeue (seen on the dev cluster). A new step that needs the same processors then waits forever. Ranks continue after
# the end of their slurmstepd, even after the end of the job, because Slurm cannot signal them any more.

#: A step ends within this time after its tasks are killed.
END_S = 10.0
#: Processes that wait for a device or a file system take longer. Slurm's UnkillableStepTimeout is 60 s as well.
UNKILLABLE_S = 60.0
#: Interval in which steps that have not ended are killed again.
_KILL_EVERY_S = 2.0


class UnkillableSteps(NamedTuple):
    reason: str  #: the first of them, and why it does not end
    nodes: tuple[str, ...] = ()  #: nodes on which ranks may have survived SIGKILL


def end_orphaned_steps(
    names: tuple[str, ...], kill_ranks: Callable[[], Sequence[str]], abandoned: Collection[str] = ()
) -> UnkillableSteps | None:
    """End the job's steps with names that begin with one of `names`; return the steps that do not end, or None.

    If steps do not end in time, `kill_ranks` kills the run's ranks without Slurm, and returns the nodes on which ranks
    may have survived. Steps with names in `abandoned` do not matter.
    """
    steps = _end(names, END_S, abandoned)
    if not steps:
        return None
    nodes = tuple(kill_ranks())
    if nodes:
        steps = _end(names, UNKILLABLE_S, abandoned)
        if steps:
            nodes = tuple(kill_ranks())
    if not steps:
        return None
    step_id, name = next(iter(steps.items()))
    reason = f"step {step_id} ({name}) does not end"
    if nodes:
        reason += f": ranks on {', '.join(nodes)} may survive SIGKILL"
    else:
        reason += ", although none of its ranks is left"
    return UnkillableSteps(reason, nodes)


def _end(names: tuple[str, ...], limit_s: float, abandoned: Collection[str]) -> dict[str, str]:
    """Kill steps until none is left or the time is over; returns the steps that are left, names by id."""
    until = time.monotonic() + limit_s
    kill_at = 0.0
    while True:
        running = running_steps(retry_s=JOB_RETRY_S)
        steps = {step: name for step, name in running.items() if name.startswith(names) and name not in abandoned}
        now = time.monotonic()
        if not steps or now > until:
            return steps
        if now >= kill_at:
            signal_steps(sorted(steps), "KILL")
            kill_at = now + _KILL_EVERY_S
        time.sleep(_POLL_S)
