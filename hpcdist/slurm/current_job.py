"""The Slurm job that this process runs in: its limits and nodes, its steps, and its requeue."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcdist.errors import HpcdistError
from hpcdist.host.nodelist import expand
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.output import parse_count, parse_minutes, parse_text, parse_time

#: States of a job whose batch step keeps running.
_RUNNING = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")


def job_id_of(env: Mapping[str, str]) -> str:
    """Return the id of the current job as all commands of Slurm take it: `41`, or `41_2` for an array task.

    SLURM_JOB_ID is not usable in an array: the last task's is the id of the array, which addresses all tasks.
    """
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    if not env.get("SLURM_JOB_ID"):
        raise HpcdistError("SLURM_JOB_ID is not set: this command runs inside a Slurm job only")
    return env["SLURM_JOB_ID"]


def component_job_ids(env: Mapping[str, str]) -> list[str]:
    """Return the job ids of the current job's components, the leader first; a single one for a plain job."""
    size = int(env.get("SLURM_HET_SIZE") or 0)
    return [env[f"SLURM_JOB_ID_HET_GROUP_{index}"] for index in range(size)] or [job_id_of(env)]


@dataclass(frozen=True, kw_only=True)
class CurrentJob:
    id: str
    restart_count: int
    end_time: float | None  #: seconds since the epoch; None without a time limit
    time_limit_min: float | None = None
    may_requeue: bool = True  #: whether the job was submitted with `--requeue`
    partition: str = ""
    nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  #: nodes that the job must not get

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> CurrentJob:
        """Return the current job. Raises HpcdistError outside of a job, or if the controller does not answer."""
        job_id = job_id_of(env)
        records = client.job_records(job_id, retry_s=client.JOB_RETRY_S)
        if not records:
            raise HpcdistError(f"Slurm does not know job {job_id}, the one in SLURM_JOB_ID")
        leader = records[0]
        ends = [end for record in records if (end := parse_time(record.get("EndTime"))) is not None]
        return cls(
            id=job_id,
            restart_count=_restart_count(records),
            end_time=min(ends, default=None),
            time_limit_min=parse_minutes(leader.get("TimeLimit", "")),
            may_requeue=leader.get("Requeue") != "0",
            partition=leader.get("Partition", ""),
            nodes=_expand_nodes(leader.get("NodeList")),
            excluded=_expand_nodes(leader.get("ExcNodeList")),
        )

    def is_requeued(self) -> bool:
        """Return whether Slurm has requeued the job since (after a preemption or a node failure)."""
        return _restart_count(client.job_records(self.id)) > self.restart_count

    def is_ending(self) -> bool:
        """Return whether Slurm is ending the job before its time limit: a cancellation, a preemption or a requeue."""
        if self.end_time is not None and time.time() >= self.end_time:
            return False
        states = [record.get("JobState", "RUNNING") for record in client.job_records(self.id)]
        return bool(states) and states[0] not in _RUNNING

    def requeue(self, *, exclude: Sequence[str] = ()) -> None:
        """Requeue the job. From now on this process ignores SIGTERM, with which Slurm ends the batch step.

        Args:
            exclude: nodes that the job must not get again, in addition to `excluded`.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # scontrol inherits it
        client.requeue_job(self.id)
        if exclude:
            # Slurm 22.05 changes the excluded nodes of pending jobs only.
            client.exclude_nodes(self.id, [*self.excluded, *exclude])

    def replaceable(self, nodes: Sequence[str], *, idle_only: bool) -> bool:
        """Return whether the partition has enough nodes with the job's hardware without some of them."""
        usable = ("idle",) if idle_only else ("idle", "mixed", "allocated", "completing")
        states = client.node_states(partition=self.partition)
        hardware = {node.hardware for node in states if node.name in self.nodes}
        candidates = [
            node.name
            for node in states
            if (node.name in self.nodes or node.state in usable)
            and node.hardware in hardware
            and node.name not in (*nodes, *self.excluded)
        ]
        return len(candidates) >= len(self.nodes)


def _restart_count(records: Sequence[Mapping[str, str]]) -> int:
    """Return the number of requeues: Slurm requeues all components of a job or none."""
    return parse_count(records[0].get("Restarts", "0")) or 0 if records else 0


def _expand_nodes(text: str | None) -> tuple[str, ...]:
    nodes = parse_text(text)
    return tuple(expand(nodes)) if nodes else ()


def running_steps(*, retry_s: float = 0.0) -> dict[str, str]:
    # A step over several components is one step in each of them.
    return client.running_steps(component_job_ids(os.environ), retry_s=retry_s)


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
    try:
        client.signal_steps(step_ids, signal_name)
    except SlurmError:
        return


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
_POLL_EVERY_S = 0.2
_KILL_EVERY_S = 2.0


class UnkillableSteps(NamedTuple):
    """Steps that do not end."""

    reason: str  #: the first of them, and why it does not end
    nodes: tuple[str, ...] = ()  #: nodes on which ranks may have survived SIGKILL


def end_orphaned_steps(
    names: tuple[str, ...], kill_ranks: Callable[[], Sequence[str]], abandoned: Collection[str] = ()
) -> UnkillableSteps | None:
    """End the job's steps with names that begin with one of `names`; return the steps that do not end, or None.

    Args:
        kill_ranks: kills the run's ranks on every node without Slurm, and returns the nodes on which ranks may have
            survived. It is called if steps do not end in time.
        abandoned: names of steps that cannot end and do not matter.
    """
    steps = _end(names, END_S, abandoned)
    if not steps:
        return None
    nodes = tuple(kill_ranks())
    if nodes:
        steps = _end(names, UNKILLABLE_S, abandoned)
        nodes = tuple(kill_ranks()) if steps else ()
    if not steps:
        return None
    step_id, name = next(iter(steps.items()))
    why = f"ranks on {', '.join(nodes)} may survive SIGKILL" if nodes else "although none of its ranks is left"
    return UnkillableSteps(f"step {step_id} ({name}) does not end{':' if nodes else ','} {why}", nodes)


def _end(names: tuple[str, ...], limit_s: float, abandoned: Collection[str]) -> dict[str, str]:
    """Kill steps until none is left or the time is over; returns the steps that are left, names by id."""
    until = time.monotonic() + limit_s
    kill_at = 0.0
    while True:
        running = running_steps(retry_s=client.JOB_RETRY_S)
        steps = {step: name for step, name in running.items() if name.startswith(names) and name not in abandoned}
        now = time.monotonic()
        if not steps or now > until:
            return steps
        if now >= kill_at:
            signal_steps(sorted(steps), "KILL")
            kill_at = now + _KILL_EVERY_S
        time.sleep(_POLL_EVERY_S)  # Slurm has no notification for the end of a step
