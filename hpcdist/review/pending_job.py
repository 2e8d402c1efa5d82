"""Why a job waits in the queue: the meaning of Slurm's reason, and the limit or the reservation behind it."""

import re
from collections.abc import Sequence

from hpcdist.config.slurm_notation import expand
from hpcdist.errors import TopologyError, local_time
from hpcdist.slurm import client
from hpcdist.slurm.output import JobInfo, Partition, SlurmError, parse_count, parse_minutes
from hpcdist.slurm.reservations import first_in_the_way

#: Beginnings of Slurm's reasons for which a reservation may be the cause.
_MAY_BE_RESERVED = ("ReqNodeNotAvail", "Resources", "Priority", "Nodes_required", "Nodes required")
_LESS_FIX = "wait, or request fewer nodes or a shorter cluster.time_limit_min"
#: Slurm's reasons for a pending job: meaning, and how to shorten the wait.
WAITING = {
    "Priority": ("jobs of higher priority run first", _LESS_FIX),
    "Resources": ("no suitable nodes are free", _LESS_FIX),
    "BeginTime": ("its requested start time is in the future, or Slurm has just requeued it", "wait"),
    "Dependency": ("it waits for another job", "wait; `scontrol show job` names it"),
    "DependencyNeverSatisfied": ("the job that it depends on has failed", "cancel it and submit it again"),
    "JobHeldUser": ("the user holds it", "`scontrol release` releases it"),
    "JobHeldAdmin": ("an administrator holds it", "contact the administrators"),
    "PartitionTimeLimit": ("the partition allows less time", "reduce cluster.time_limit_min and submit again"),
    "PartitionNodeLimit": ("the partition allows fewer nodes", "reduce cluster.nodes and submit again"),
    "PartitionDown": ("the partition is down", "wait, or set another cluster.partition"),
    "ReqNodeNotAvail, Reserved for maintenance": (
        "a maintenance begins before the job could end",
        "reduce cluster.time_limit_min to end before it: the job then starts now (a run requeues itself); else wait",
    ),
    "ReqNodeNotAvail": ("requested nodes are down or reserved", "wait, or relax cluster.constraint or cluster.exclude"),
    "Nodes required for job are DOWN": (
        "too few suitable nodes are up and not reserved",
        "wait, or request fewer nodes; `sinfo -R` shows why nodes are down",
    ),
    "Reservation": (
        "its reservation has not begun, or is in use",
        "wait; `scontrol show reservation` shows its begin and its nodes",
    ),
    "PartitionConfig": ("the partition never has enough such nodes", "reduce cluster.nodes and submit again"),
    "JobArrayTaskLimit": ("the sweep's limit of parallel cells is reached", "wait, or raise --array-parallelism"),
    "launch failed requeued held": ("its start failed on a node, so Slurm holds it", "`scontrol release` retries it"),
}


def why_waiting(job: JobInfo, now: float) -> tuple[str, str]:
    """Return why a pending job with a reason of Slurm waits, and how to shorten the wait, which may be empty.

    Args:
        now: seconds since the epoch.
    """
    numbers = _in_numbers(job, now)
    if numbers is not None:
        return numbers
    # `ReqNodeNotAvail,_UnavailableNodes:n[1-2]`, by squeue with spaces
    words = re.sub(r",\s*", ", ", job.reason.replace("_", " "))
    meaning, fix = WAITING.get(words) or WAITING.get(words.partition(",")[0]) or ("", "")
    if not meaning and job.reason.startswith(("Assoc", "QOS")):
        meaning = "a limit of the account or quality of service is reached"
        fix = "wait, or request fewer resources"
    if not meaning:
        return job.reason, fix
    return f"{meaning} ({job.reason})", fix


def _in_numbers(job: JobInfo, now: float) -> tuple[str, str] | None:
    """Return the limit or reservation for which a pending job waits, and a fix; None for other reasons.

    It is also None if Slurm does not answer.
    """
    is_time_limit = job.reason == "PartitionTimeLimit"
    if not is_time_limit and not job.reason.startswith(_MAY_BE_RESERVED):
        return None
    try:
        record = client.job_record(job.id)
        limit_min = parse_minutes(record.get("TimeLimit", ""))
        names = record.get("Partition", "").split(",")
        partitions = [partition for partition in client.partitions() if partition.name in names]
        if limit_min is None:
            return None
        if is_time_limit:
            return _of_time_limit(job, limit_min, partitions)
        num_nodes = parse_count(record.get("NumNodes", "").partition("-")[0])
        return _of_reservation(job, limit_min, num_nodes or 1, partitions, now)
    except (SlurmError, TopologyError):
        return None


def _of_time_limit(job: JobInfo, limit_min: float, partitions: Sequence[Partition]) -> tuple[str, str] | None:
    limits = [parse_minutes(partition.facts.get("MaxTime", "")) for partition in partitions]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    cause = f"the job asks for {limit_min:g} min, and its partition allows {max(known):g} ({job.reason})"
    return cause, f"reduce cluster.time_limit_min to {max(known):g} and submit again"


def _of_reservation(
    job: JobInfo, limit_min: float, num_nodes: int, partitions: Sequence[Partition], now: float
) -> tuple[str, str] | None:
    nodes: set[str] = set()
    for partition in partitions:
        for group in partition.nodes:
            if group.usable:
                nodes.update(expand(group.names))
    reservation = first_in_the_way(client.reservations(), nodes, num_nodes, 60 * limit_min, now)
    if reservation is None:
        return None
    cause = f"the job needs {limit_min:g} min, and {reservation.sentence(nodes, now)} ({job.reason})"
    before = reservation.minutes_before(now)
    if before <= 0:
        return cause, f"wait for the end of the reservation at {local_time(reservation.end)}"
    shorter = f"`scontrol update JobId={job.id} TimeLimit={before}`"
    return cause, f"{shorter} lets it end before that (the run requeues itself); otherwise wait"
