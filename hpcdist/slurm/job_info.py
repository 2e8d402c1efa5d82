"""The state of a job, parsed from the output of scontrol, squeue and sacct. Pure functions."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import timedelta

from hpcdist.slurm.command_output import parse_count, parse_records, parse_text, parse_time

#: States of jobs that run, will run, or are about to return to the queue.
ALIVE = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
    | {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
)
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
#: Reasons that repeat the state or the exit code of a failed job.
_REDUNDANT_REASONS = ("NonZeroExitCode", "NodeDown", "TimeLimit", "OutOfMemory")
#: Output fields requested of squeue and sacct.
SQUEUE_FIELDS = "%i|%T|%r|%V|%S|%e|%N|%l|%j"
SACCT_FIELDS = "JobID,JobName,State,ExitCode,Submit,Start,End,NodeList,Timelimit,MaxRSS"


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """The state of a job. Times are seconds since the epoch."""

    id: str
    name: str = ""
    state: str  #: Slurm's name: PENDING, RUNNING, COMPLETED, TIMEOUT, …
    reason: str = ""  #: why the job is pending (Priority, Resources, …) or has failed
    submitted: float | None = None  #: time of the submission or of the last requeue
    started: float | None = None  #: of a pending job: the expected start
    ended: float | None = None  #: of a running job: the end of its allocation
    exit_code: int = 0
    signal: int = 0
    nodes: str = ""
    restarts: int = 0
    time_limit: str = ""
    max_rss: str = ""  #: largest memory of a task, as sacct prints it
    earlier: tuple[str, ...] = ()  #: final states of the job before each requeue, from accounting
    step_states: tuple[str, ...] = ()  #: states of the steps since the last requeue

    @property
    def alive(self) -> bool:
        """Whether the job runs or will run."""
        return self.state in ALIVE

    @property
    def waiting(self) -> bool:
        """Whether the job is in the queue."""
        return self.state in WAITING

    @property
    def out_of_memory(self) -> bool:
        """Whether the job or a step of it has exceeded its memory."""
        return "OUT_OF_MEMORY" in (self.state, *self.step_states)

    def queue_s(self, now: float) -> float | None:
        """Return the seconds in the queue since the submission or the last requeue; None if unknown."""
        until = now if self.waiting else self.started
        return max(0.0, until - self.submitted) if until is not None and self.submitted is not None else None

    def sentence(self) -> str:
        """Return the state, with the reason and the nodes, as a sentence."""
        if self.waiting:
            return f"job {self.id} waits ({self.reason or self.state})"
        nodes = f" on {self.nodes}" if self.nodes else ""
        if self.alive:
            return f"job {self.id} is {self.state}{nodes}"
        if self.state == "CANCELLED" and not self.nodes:
            return f"job {self.id} was cancelled in the queue"
        details = f" ({self.reason})" if self.reason else ""
        details += f" with exit code {self.exit_code}" if self.exit_code else ""
        details += f" by signal {self.signal}" if self.signal else ""
        return f"job {self.id} ended as {self.state}{details}{nodes}"

    def describe(self, now: float) -> str:
        """Return the sentence with the expected start, the time in the queue and the number of requeues."""
        parts = [self.sentence()]
        if self.waiting and self.started is not None and self.started > now:
            parts.append(f"expected to start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(self.started))}")
        if (queue_s := self.queue_s(now)) is not None:
            parts.append(f"{timedelta(seconds=round(queue_s))} in the queue")
        if self.restarts:
            parts.append(f"requeued {self.restarts} time{'s' * (self.restarts > 1)}")
        return ", ".join(parts)


def parse_scontrol(text: str, job_id: str) -> JobInfo | None:
    """Return a job from `scontrol --oneliner show job`; of a heterogeneous job the first component with all nodes."""
    records = [record for record in parse_records(text) if "JobId" in record]
    task = job_id.partition("_")[2]
    records = [record for record in records if not task or record.get("ArrayTaskId") == task] or records
    if not records:
        return None
    first = records[0]
    code, signal = _parse_exit(first.get("ExitCode", ""))
    state = first.get("JobState", "UNKNOWN")
    return JobInfo(
        id=job_id,
        name=first.get("JobName", ""),
        state=state,
        reason=_parse_reason(state, first.get("Reason", "")),
        submitted=parse_time(first.get("SubmitTime")),
        started=parse_time(first.get("StartTime")),
        ended=parse_time(first.get("EndTime")),
        exit_code=code,
        signal=signal,
        nodes=",".join(filter(None, (parse_text(record.get("NodeList")) for record in records))),
        restarts=parse_count(first.get("Restarts", "0")) or 0,
        time_limit=parse_text(first.get("TimeLimit")),
    )


def parse_squeue(text: str, job_id: str) -> JobInfo | None:
    """Return a job from lines of squeue with SQUEUE_FIELDS."""
    for line in text.splitlines():
        if line.count("|") < 8:
            continue  # a line of another format
        found_id, state, reason, submitted, started, ended, nodes, limit, name = line.split("|", 8)
        if found_id in (job_id, f"{job_id}+0"):
            return JobInfo(
                id=job_id,
                name=name,
                state=state,
                reason=_parse_reason(state, reason),
                submitted=parse_time(submitted),
                started=parse_time(started),
                ended=parse_time(ended),
                nodes=parse_text(nodes),
                time_limit=parse_text(limit),
            )
    return None


def parse_sacct(text: str, job_id: str) -> JobInfo | None:
    """Return a job from `sacct --duplicates`: its last start, the final states of earlier ones, and its steps."""
    starts: list[tuple[dict[str, str], list[dict[str, str]]]] = []
    for line in text.splitlines():
        fields = SACCT_FIELDS.split(",")
        if line.count("|") < len(fields) - 1:
            continue  # a line of another format
        row = dict(zip(fields, line.split("|"), strict=False))
        found_id, dot, _ = row["JobID"].partition(".")
        if found_id not in (job_id, f"{job_id}+0"):
            continue
        if not dot and starts and starts[-1][0]["State"].startswith("RESIZING"):
            # The job has lost a node: each size has a row, but it is one start.
            starts[-1] = ({**row, "Start": starts[-1][0]["Start"]}, starts[-1][1])
        elif not dot:
            starts.append((row, []))
        elif starts:
            starts[-1][1].append(row)
    if not starts:
        return None
    row, steps = starts[-1]
    code, signal = _parse_exit(row["ExitCode"])
    return JobInfo(
        id=job_id,
        name=row["JobName"],
        state=_parse_state(row["State"]),
        submitted=parse_time(row["Submit"]),
        started=parse_time(row["Start"]),
        ended=parse_time(row["End"]),
        exit_code=code,
        signal=signal,
        nodes=parse_text(row["NodeList"]),
        restarts=len(starts) - 1,
        time_limit=parse_text(row["Timelimit"]),
        max_rss=max((step.get("MaxRSS", "") for step in steps), key=_num_bytes, default=""),
        earlier=tuple(_parse_state(start["State"]) for start, _ in starts[:-1]),
        step_states=tuple(_parse_state(step["State"]) for step in steps),
    )


def _parse_reason(state: str, text: str) -> str:
    """Return the reason of a pending or failed job; a cancelled or completed job keeps the one it was pending for."""
    meaningful = state in WAITING or (state in ("FAILED", "BOOT_FAIL") and text not in _REDUNDANT_REASONS)
    return parse_text(text) if meaningful else ""


def _parse_state(text: str) -> str:
    """Return the state: CANCELLED for `CANCELLED by 1000` and `CANCELLED+`."""
    return text.split()[0].rstrip("+") if text.split() else "UNKNOWN"


def _parse_exit(text: str) -> tuple[int, int]:
    """Return exit code and signal of `3:0`."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _num_bytes(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMGT]?)", text)
    return float(match[1]) * 1024 ** " KMGT".index(match[2] or " ") if match else -1.0
