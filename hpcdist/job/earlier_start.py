"""The largest smaller request that would start now, for a job that would have to wait.

It asks Slurm only if a job has to wait, so that other submissions take no longer.
"""

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from hpcdist.config.schema import Config
from hpcdist.errors import TopologyError, UserMistake, local_time
from hpcdist.job import submit
from hpcdist.slurm import client
from hpcdist.slurm.output import SlurmError, parse_estimate
from hpcdist.slurm.placement import requested_cluster
from hpcdist.slurm.reservations import Reservation, first_in_the_way

#: A job with an expected start within this time starts now: the scheduler looks at new jobs about once a minute.
NOW_S = 60.0
#: Number of requests that are tried.
MAX_TRIES = 4
#: A job that is shorter than this number of its signal leads would mostly save and restart.
_LEADS = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """The size of a job: nodes, and minutes of its time limit."""

    nodes: int
    minutes: int


def must_wait(estimate: str, now: float) -> bool:
    """Return whether a job waits, by the text of `sbatch --test-only`; False if the text has no time."""
    start = parse_estimate(estimate)
    return start is not None and start - now > NOW_S


def reservation_in_the_way(config: Config, nodes: Collection[str], now: float) -> Reservation | None:
    """Return the reservation for which a job with this config must wait; None without one, or without an answer."""
    cluster = requested_cluster(config)
    if cluster.sbatch.get("reservation"):
        return None
    try:
        reservations = client.reservations()
    except (SlurmError, TopologyError):
        return None
    fewest = cluster.fewest_nodes + cluster.spare_nodes
    return first_in_the_way(reservations, nodes, fewest, 60 * cluster.time_limit_min, now)


def advice(config: Config, nodes: Collection[str], reservation: Reservation | None, now: float) -> str:
    """Return why a job waits and what would start now, as far as known; empty if nothing is known.

    Args:
        nodes: names of the nodes that the job may use.
    """
    limit = config.cluster.time_limit_min
    why = "the job would wait"
    if reservation is not None:
        why = f"the job needs {limit} min, and {reservation.sentence(nodes, now)}"
    found = _largest(config, _smaller(config, nodes, reservation, now))
    if found is not None:
        return f"{why}: with {_keys(config, found)} it would start now{_continuation(config, found)}"
    if reservation is not None:
        return f"{why}: it waits for the end at {local_time(reservation.end)}"
    return ""


def _smaller(config: Config, nodes: Collection[str], reservation: Reservation | None, now: float) -> list[Request]:
    """Return smaller requests, the largest first; of equal ones, first the one with all nodes."""
    limit = config.cluster.time_limit_min
    num_nodes = requested_cluster(config).nodes
    longest_min = limit - 1
    if reservation is not None:
        longest_min = min(longest_min, reservation.minutes_before(now))
    requests = {Request(nodes=num_nodes, minutes=min(limit // part, longest_min)) for part in (2, 4)}
    may_shrink = not config.cluster.roles and config.cluster.min_nodes is None
    if may_shrink:
        requests |= {Request(nodes=num_nodes // part, minutes=limit) for part in (2, 4)}
    if reservation is not None:
        requests.add(Request(nodes=num_nodes, minutes=longest_min))
        if may_shrink:
            others = set(nodes) - reservation.nodes
            requests.add(Request(nodes=min(num_nodes - 1, len(others)), minutes=limit))
    least_min = _LEADS * config.cluster.signal_lead_s / 60
    useful = [one for one in requests if one.nodes > 0 and one.minutes > least_min]
    return sorted(useful, key=lambda one: (one.nodes * one.minutes, one.nodes), reverse=True)


def _largest(config: Config, requests: list[Request]) -> Request | None:
    """Return the first request that would start now, by `sbatch --test-only`; None if none of them would."""
    for request in requests[:MAX_TRIES]:
        cluster = replace(config.cluster, time_limit_min=request.minutes)
        if not config.cluster.roles:
            cluster = replace(cluster, nodes=request.nodes)
        with suppress(UserMistake):  # Slurm rejects this one
            estimate = submit.estimate_start(replace(config, cluster=cluster))
            start = parse_estimate(estimate)
            if start is not None and start - time.time() <= NOW_S:
                return request
    return None


def _keys(config: Config, request: Request) -> str:
    """Return the overrides that make a request."""
    if request.minutes != config.cluster.time_limit_min:
        return f"cluster.time_limit_min={request.minutes}"
    return f"cluster.nodes={request.nodes}"


def _continuation(config: Config, request: Request) -> str:
    """Return the end of a sentence on the consequences of a smaller request."""
    if request.minutes == config.cluster.time_limit_min:
        if config.data.global_batch_size is None and not config.trainer.script:
            return ", with a smaller batch in each step unless data.global_batch_size is set"
        return ""
    if config.cluster.sbatch.get("requeue", "").lower() == "false":
        return ""
    if config.trainer.script:
        return ", and is requeued afterwards: a script continues from its own checkpoints"
    return ", and it continues by itself afterwards"
