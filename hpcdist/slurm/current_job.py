"""What Slurm says of the job that this process stands in, and asking it to queue the job again."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdist.errors import HpcdistError
from hpcdist.machine.timed_command import run_within
from hpcdist.slurm.job_info import parse_facts, parse_time
from hpcdist.slurm.nodelist import expand

#: Slurm's own commands go on trying for up to a minute when their controller is away.
ANSWER_S = 60.0


def job_id_of(env: Mapping[str, str]) -> str:
    """The id of the job around this process as all of Slurm's commands take it: `41`, or `41_2` for an array's task.

    A task has an id of its own in SLURM_JOB_ID, but the last one's is the array's, and asking for that means all tasks.
    Raises HpcdistError when there is no job.
    """
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    if not env.get("SLURM_JOB_ID"):
        raise HpcdistError("SLURM_JOB_ID is not set: this is for the inside of a Slurm job")
    return env["SLURM_JOB_ID"]


@dataclass(frozen=True, kw_only=True)
class CurrentJob:
    """A running job."""

    id: str
    restart_count: int
    end_time: float | None  #: seconds since the epoch; None without a time limit
    time_limit_min: float | None = None
    may_requeue: bool = True  #: whether the job was submitted so that `scontrol requeue` is taken
    partition: str = ""
    nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  #: nodes that it stays away from

    @classmethod
    def here(cls, env: Mapping[str, str]) -> CurrentJob:
        """The job around this process. Raises HpcdistError when there is none or `scontrol` does not answer."""
        job_id = job_id_of(env)
        records = job_records(job_id)
        facts = records[0] if records else {}
        ends = [end for record in records if (end := parse_time(record.get("EndTime"))) is not None]
        return cls(
            id=job_id,
            restart_count=_restarts(records),
            end_time=min(ends, default=None),
            time_limit_min=parse_minutes(facts.get("TimeLimit", "")),
            may_requeue=facts.get("Requeue") != "0",
            partition=facts.get("Partition", ""),
            nodes=_nodes(facts.get("NodeList")),
            excluded=_nodes(facts.get("ExcNodeList")),
        )

    def will_run_again(self) -> bool:
        """Whether Slurm has put the job back into the queue: a preemption or a lost node, not a cancellation."""
        return _restarts(job_records(self.id)) > self.restart_count

    def requeue(self, *, exclude: Sequence[str] = ()) -> None:
        """Put the job back into the queue; it may be there already, which is just as well.

        Slurm ends the batch step then. This process ignores its SIGTERM from here on, and has until SIGKILL.

        Args:
            exclude: nodes that the job shall not get again, besides those that it avoids already.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for scontrol, too
        try:
            _scontrol("requeue", self.id)
        except HpcdistError as error:
            # Of two requeues at once one wins, and the other is told that the job is pending.
            if "pending execution" not in str(error).lower():
                raise
        if exclude:
            # Only a job that waits can be told (Slurm 22.05).
            _scontrol("update", f"JobId={self.id}", f"ExcNodeList={','.join([*self.excluded, *exclude])}")

    def replaceable(self, nodes: Sequence[str], *, idle_only: bool) -> bool:
        """Whether the partition has enough nodes like the job's own to do without some of them.

        Args:
            idle_only: do not count nodes that are busy with other jobs.
        """
        usable = ("idle",) if idle_only else ("idle", "mix", "alloc", "comp")
        # sinfo's words: name, state, features, GPUs and the like, cores, memory
        listing = _run("sinfo", "--noheader", "--Node", f"--partition={self.partition}", "--format=%N|%t|%f|%G|%c|%m")
        found = [line.strip().split("|", 2) for line in listing.splitlines()]
        wanted = {kind for name, _, kind in found if name in self.nodes}
        left = [
            name
            for name, state, kind in found
            if (name in self.nodes or state in usable) and kind in wanted and name not in (*nodes, *self.excluded)
        ]
        return len(left) >= len(self.nodes)


def job_ids(env: Mapping[str, str]) -> list[str]:
    """Ids of the job around this process: one for each component of a heterogeneous job, its leader first."""
    size = int(env.get("SLURM_HET_SIZE") or 0)
    return [env[f"SLURM_JOB_ID_HET_GROUP_{index}"] for index in range(size)] or [job_id_of(env)]


def why_no_het_jobs() -> str:
    """Why this cluster runs no heterogeneous jobs, empty where it does. Raises HpcdistError as `scontrol` does."""
    settings = dict(line.split("=", 1) for line in _scontrol("show", "config").splitlines() if "=" in line)
    facts = {name.strip(): value.strip() for name, value in settings.items()}
    if facts.get("SchedulerType", "sched/backfill") != "sched/backfill":
        return f"SchedulerType={facts['SchedulerType']}"
    if "disable_hetjob_steps" in facts.get("SchedulerParameters", ""):
        return "SchedulerParameters=disable_hetjob_steps"
    return ""


def node_features(nodes: Sequence[str]) -> dict[str, frozenset[str]]:
    """The features that each node has now. Raises HpcdistError when `scontrol` does not answer."""
    records = parse_records(_scontrol("show", "node", "--oneliner", ",".join(nodes)))
    return {
        facts["NodeName"]: frozenset(facts.get("ActiveFeatures", "").split(",")) - {"", "(null)"} for facts in records
    }


def job_records(job_id: str) -> list[dict[str, str]]:
    """What Slurm says of a job, by component, its leader first. Raises HpcdistError when `scontrol` does not answer."""
    return parse_records(_scontrol("show", "job", "--oneliner", job_id))


def parse_records(text: str) -> list[dict[str, str]]:
    """What `scontrol --oneliner` prints, a record a line: a heterogeneous job has one for each component."""
    return [parse_facts(line) for line in text.splitlines() if line.strip()]


def _restarts(records: Sequence[Mapping[str, str]]) -> int:
    """Slurm queues all components of a job again, or none."""
    return int(records[0].get("Restarts", "0")) if records else 0


def parse_minutes(text: str) -> float | None:
    """A time limit of Slurm's (`1-00:00:00`, `30:00`) in minutes; None for UNLIMITED and the like."""
    days, dash, clock = text.rpartition("-")
    try:
        parts = [int(part) for part in clock.split(":")]
        num_days = int(days) if dash else 0
    except ValueError:
        return None
    if len(parts) < 3 and not dash:
        parts = [0, *parts]  # minutes, or minutes and seconds
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return num_days * 1440 + hours * 60 + minutes + seconds / 60


def _nodes(text: str | None) -> tuple[str, ...]:
    return () if text in (None, "", "(null)") else tuple(expand(str(text)))


def _scontrol(*arguments: str) -> str:
    return _run("scontrol", *arguments)


def _run(*command: str) -> str:
    try:
        done = run_within(command, ANSWER_S)
    except FileNotFoundError as error:
        raise HpcdistError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise HpcdistError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def steps() -> dict[str, str] | None:
    """This job's steps that have not ended: names by id. None when Slurm does not answer."""
    # A step over several components is one step in each of them.
    jobs = ",".join(job_ids(os.environ))
    listing = run_within(["squeue", "--steps", f"--jobs={jobs}", "--noheader", "--format=%i %j"], ANSWER_S)
    if listing.returncode != 0:
        return None
    return dict(line.strip().partition(" ")[::2] for line in listing.stdout.splitlines())


def signal_steps(ids: Sequence[str], name: str) -> None:
    """Send a signal (`KILL`, `USR1`) to all tasks of some steps. One that has just ended is left alone."""
    if ids:
        run_within(["scancel", f"--signal={name}", *ids], ANSWER_S)


def rebooted_since(nodes: Sequence[str], since: float) -> list[str]:
    """The nodes that have booted after a time, as far as Slurm knows. Raises HpcdistError as `scontrol` does."""
    records = parse_records(_scontrol("show", "node", "--oneliner", ",".join(nodes)))
    return [facts["NodeName"] for facts in records if (parse_time(facts.get("BootTime")) or 0.0) > since]
