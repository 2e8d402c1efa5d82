"""The starts of a job in Slurm's accounting, parsed from the output of sacct. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpcdist.slurm.command_output import parse_count, parse_text, parse_time

#: Output fields requested of sacct.
START_FIELDS = "JobID,JobName,Submit,Start,End,NodeList,AllocCPUS,AllocTRES,ConsumedEnergyRaw,State"
_GPUS = re.compile(r"(?:^|,)gres/gpu=([0-9]{1,9})(?:,|$)")


@dataclass(frozen=True, kw_only=True)
class AccountedStart:
    """One start of a job in accounting. Times are seconds since the epoch."""

    name: str
    began: float
    ended: float | None  #: None while the job runs
    queue_s: float  #: time in the queue before this start; after a requeue, the time since the end of the start before
    nodes: str
    cores: int
    gpus: int
    energy_j: float | None  #: None if the cluster does not measure it
    state: str = ""  #: of this start, such as PREEMPTED or NODE_FAIL


def parse_starts(text: str, job_id: str) -> list[AccountedStart]:
    """Return the starts of a job from `sacct --duplicates`, oldest first.

    The components of a heterogeneous job start together and count as one start, and so do the sizes of a job that has
    lost nodes, with the nodes and cores of its begin. Times in which the job only waited are left out.
    """
    fields = START_FIELDS.split(",")
    found: list[AccountedStart] = []
    is_het = False
    for line in text.splitlines():
        values = line.split("|")
        if len(values) != len(fields):
            continue  # a line of another format
        row = dict(zip(fields, values, strict=True))
        if row["JobID"].partition("+")[0] == job_id and (start := _parse_start(row)) is not None:
            found.append(start)
            is_het = is_het or "+" in row["JobID"]
    found.sort(key=lambda start: start.began)
    # The sizes of a plain job may begin in the same second as well.
    return _with_requeues(_joined(found) if is_het else _without_resizes(found))


def _without_resizes(starts: Sequence[AccountedStart]) -> list[AccountedStart]:
    """Join the records of a job from which Slurm has removed a failed node: each size has its own."""
    found: list[AccountedStart] = []
    for start in starts:
        if found and found[-1].state == "RESIZING":
            energies = [one.energy_j for one in (found[-1], start) if one.energy_j is not None]
            energy_j = sum(energies) if energies else None
            found[-1] = replace(found[-1], ended=start.ended, energy_j=energy_j, state=start.state)
        else:
            found.append(start)
    return found


def _with_requeues(starts: Sequence[AccountedStart]) -> list[AccountedStart]:
    """Return the starts with the time in the queue since the end of the start before.

    Slurm submits a requeued job again when it has cleaned up all of its nodes, some seconds after the job's end.
    """
    found: list[AccountedStart] = []
    for start in starts:
        before = found[-1] if found else None
        # Slurm may give the id of an old job to another one.
        if before is not None and before.ended is not None and before.name == start.name:
            start = replace(start, queue_s=max(start.queue_s, start.began - before.ended))
        found.append(start)
    return found


def _parse_start(row: dict[str, str]) -> AccountedStart | None:
    began, submitted = parse_time(row["Start"]), parse_time(row["Submit"])
    cores = parse_count(row["AllocCPUS"]) or 0
    if began is None or not cores:
        return None
    gpus = _GPUS.search(row["AllocTRES"])
    # Slurm without an energy plugin reports 0.
    energy = parse_count(row["ConsumedEnergyRaw"]) or None
    return AccountedStart(
        name=row["JobName"],
        began=began,
        ended=parse_time(row["End"]),
        queue_s=max(0.0, began - submitted) if submitted is not None else 0.0,
        nodes=parse_text(row["NodeList"]),
        cores=cores,
        gpus=int(gpus[1]) if gpus else 0,
        energy_j=None if energy is None else float(energy),
        state=row["State"].partition(" ")[0],  # without `by UID`
    )


def _joined(starts: Sequence[AccountedStart]) -> list[AccountedStart]:
    """Join the components of a heterogeneous job, which start in the same second."""
    found: list[AccountedStart] = []
    for start in starts:
        if not found or start.began != found[-1].began:
            found.append(start)
            continue
        last = found[-1]
        ends = [one.ended for one in (last, start) if one.ended is not None]
        energies = [one.energy_j for one in (last, start) if one.energy_j is not None]
        found[-1] = replace(
            last,
            ended=max(ends) if len(ends) == 2 else None,
            nodes=",".join(filter(None, (last.nodes, start.nodes))),
            cores=last.cores + start.cores,
            gpus=last.gpus + start.gpus,
            energy_j=sum(energies) if energies else None,
        )
    return found
