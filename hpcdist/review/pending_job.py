"""The limit or the reservation that keeps a job in the queue, in numbers, from Slurm."""

from collections.abc import Sequence

from hpcdist.config.slurm_notation import expand
from hpcdist.errors import TopologyError
from hpcdist.slurm import client
from hpcdist.slurm.output import JobInfo, Partition, SlurmError, parse_count, parse_minutes
from hpcdist.slurm.reservations import clock, first_in_the_way

#: Beginnings of Slurm's reasons for which a reservation may be the cause.
_MAY_BE_RESERVED = ("ReqNodeNotAvail", "Resources", "Priority", "Nodes_required", "Nodes required")


def in_numbers(job: JobInfo, now: float) -> tuple[str, str] | None:
    """Return the limit or reservation for which a pending job waits, and what to do; None for other reasons.

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
        return cause, f"wait for the end of the reservation at {clock(reservation.end)}"
    shorter = f"`scontrol update JobId={job.id} TimeLimit={before}`"
    return cause, f"{shorter} lets it end before that (the run requeues itself); otherwise wait"
