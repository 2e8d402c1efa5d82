"""A job as Slurm sees it, read from what its commands print. Pure functions."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import timedelta

#: States in which a job runs, may run, or is about to be put back into the queue.
ALIVE = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
    | {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
)
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
_NONE = ("", "(null)", "None", "None assigned", "N/A", "Unknown")
#: The fields that squeue and sacct are asked for.
SQUEUE_FIELDS = "%i|%T|%r|%V|%S|%e|%N|%l|%j"
SACCT_FIELDS = "JobID,JobName,State,ExitCode,Submit,Start,End,NodeList,Timelimit,MaxRSS"


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """A job as Slurm sees it. Times are seconds since the epoch."""

    id: str
    name: str = ""
    state: str  #: in Slurm's words: PENDING, RUNNING, COMPLETED, TIMEOUT, …
    reason: str = ""  #: why it waits (Priority, Resources, …), or what Slurm says of a failure
    submitted: float | None = None  #: of this life: a requeue counts as a submission
    started: float | None = None  #: of a job that waits: when Slurm expects to start it
    ended: float | None = None  #: of a job that runs: the end of its allocation
    exit_code: int = 0
    signal: int = 0
    nodes: str = ""
    restarts: int = 0
    time_limit: str = ""
    max_rss: str = ""  #: largest memory of a task, as sacct writes it
    earlier: tuple[str, ...] = ()  #: how the job's earlier lives ended, as far as accounting knows
    step_states: tuple[str, ...] = ()  #: of the last life's steps

    @property
    def alive(self) -> bool:
        """Whether it runs or will run."""
        return self.state in ALIVE

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def out_of_memory(self) -> bool:
        return "OUT_OF_MEMORY" in (self.state, *self.step_states)

    def queue_s(self, now: float) -> float | None:
        """Seconds that it has waited in the queue, in this life."""
        until = now if self.waiting else self.started
        return max(0.0, until - self.submitted) if until is not None and self.submitted is not None else None

    def sentence(self) -> str:
        """What became of it, in a few words."""
        if self.waiting:
            return f"job {self.id} waits" + (f" ({self.reason})" if self.reason else f" ({self.state})")
        where = f" on {self.nodes}" if self.nodes else ""
        if self.alive:
            return f"job {self.id} is {self.state}{where}"
        if self.state == "CANCELLED" and not self.nodes:
            return f"job {self.id} was cancelled in the queue"
        how = f" ({self.reason})" if self.reason else ""
        how += f" with exit code {self.exit_code}" if self.exit_code else ""
        how += f" by signal {self.signal}" if self.signal else ""
        return f"job {self.id} ended as {self.state}{how}{where}"

    def describe(self, now: float) -> str:
        """The sentence, and when: the expected start, or how long it waited."""
        parts = [self.sentence()]
        if self.waiting and self.started is not None and self.started > now:
            parts.append(f"expected to start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(self.started))}")
        if (waited := self.queue_s(now)) is not None:
            parts.append(f"{timedelta(seconds=round(waited))} in the queue")
        if self.restarts:
            parts.append(f"queued again {self.restarts} time{'s' * (self.restarts > 1)}")
        return ", ".join(parts)


def parse_facts(line: str) -> dict[str, str]:
    """Return the `Key=value` words that `scontrol --oneliner` prints; a value with spaces is cut at the first.

    Of a key that occurs twice the first value counts: free text (`SubmitLine=`, `Comment=`) comes last and may hold
    words of this form.
    """
    return dict(word.split("=", 1) for word in reversed(line.split()) if "=" in word)


def parse_time(text: str | None) -> float | None:
    """Slurm's local time (`2026-11-20T07:05:00`) in seconds since the epoch; None for Unknown and the like."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def number(text: str) -> int | None:
    """Return a count of up to 18 digits; None for anything else, such as `UNLIMITED`."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def parse_scontrol(text: str, job_id: str) -> JobInfo | None:
    """A job from `scontrol --oneliner show job`. Of a heterogeneous job's components the first one speaks for all."""
    records = [parse_facts(line) for line in text.splitlines() if "JobId=" in line]
    task = job_id.partition("_")[2]
    records = [facts for facts in records if not task or facts.get("ArrayTaskId") == task] or records
    if not records:
        return None
    facts = records[0]
    code, signal = _exit(facts.get("ExitCode", ""))
    state = facts.get("JobState", "UNKNOWN")
    return JobInfo(
        id=job_id,
        name=facts.get("JobName", ""),
        state=state,
        reason=_reason(state, facts.get("Reason", "")),
        submitted=parse_time(facts.get("SubmitTime")),
        started=parse_time(facts.get("StartTime")),
        ended=parse_time(facts.get("EndTime")),
        exit_code=code,
        signal=signal,
        nodes=",".join(filter(None, (_text(record.get("NodeList", "")) for record in records))),
        restarts=number(facts.get("Restarts", "0")) or 0,
        time_limit=_text(facts.get("TimeLimit", "")),
    )


def parse_squeue(text: str, job_id: str) -> JobInfo | None:
    """A job from squeue's lines of the fields that this module asks for."""
    for line in text.splitlines():
        if line.count("|") < 8:
            continue  # no line of the format that was asked for
        own, state, reason, submitted, started, ended, nodes, limit, name = line.split("|", 8)
        if own in (job_id, f"{job_id}+0"):
            return JobInfo(
                id=job_id,
                name=name,
                state=state,
                reason=_reason(state, reason),
                submitted=parse_time(submitted),
                started=parse_time(started),
                ended=parse_time(ended),
                nodes=_text(nodes),
                time_limit=_text(limit),
            )
    return None


def parse_sacct(text: str, job_id: str) -> JobInfo | None:
    """A job from `sacct --duplicates`: its last life, with the ends of those before it. Steps give memory alone."""
    lives: list[tuple[dict[str, str], list[dict[str, str]]]] = []
    for line in text.splitlines():
        fields = SACCT_FIELDS.split(",")
        if line.count("|") < len(fields) - 1:
            continue  # no line of the format that was asked for
        row = dict(zip(fields, line.split("|"), strict=False))
        own, dot, _ = row["JobID"].partition(".")
        if own not in (job_id, f"{job_id}+0"):
            continue
        if not dot:
            lives.append((row, []))
        elif lives:
            lives[-1][1].append(row)
    if not lives:
        return None
    row, steps = lives[-1]
    code, signal = _exit(row["ExitCode"])
    return JobInfo(
        id=job_id,
        name=row["JobName"],
        state=_state(row["State"]),
        submitted=parse_time(row["Submit"]),
        started=parse_time(row["Start"]),
        ended=parse_time(row["End"]),
        exit_code=code,
        signal=signal,
        nodes=_text(row["NodeList"]),
        restarts=len(lives) - 1,
        time_limit=_text(row["Timelimit"]),
        max_rss=max((step.get("MaxRSS", "") for step in steps), key=_bytes, default=""),
        earlier=tuple(_state(life["State"]) for life, _ in lives[:-1]),
        step_states=tuple(_state(step["State"]) for step in steps),
    )


def _text(value: str) -> str:
    return "" if value in _NONE else value


def _reason(state: str, text: str) -> str:
    """Why it waits or failed; the reason that a cancelled or finished job had waited for tells nothing."""
    plain = ("NonZeroExitCode", "NodeDown", "TimeLimit", "OutOfMemory")
    return _text(text) if state in WAITING or (state in ("FAILED", "BOOT_FAIL") and text not in plain) else ""


def _state(text: str) -> str:
    """`CANCELLED by 1000` and `CANCELLED+` are CANCELLED."""
    return text.split()[0].rstrip("+") if text.split() else "UNKNOWN"


def _exit(text: str) -> tuple[int, int]:
    """Exit code and signal of `3:0`."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _bytes(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMGT]?)", text)
    return float(match[1]) * 1024 ** " KMGT".index(match[2] or " ") if match else -1.0
