"""What Slurm says of the job that this process stands in, and asking it to queue the job again."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hpcdist.cluster.job_facts import parse_facts, parse_time
from hpcdist.errors import HpcdistError


@dataclass(frozen=True, kw_only=True)
class Job:
    """A running job."""

    id: str
    restart_count: int
    end_time: float | None  #: seconds since the epoch; None without a time limit
    time_limit_min: float | None = None
    may_requeue: bool = True  #: whether the job was submitted so that `scontrol requeue` is taken

    @classmethod
    def here(cls, env: Mapping[str, str]) -> Job:
        """The job around this process. Raises HpcdistError when there is none or `scontrol` does not answer."""
        job_id = env.get("SLURM_JOB_ID")
        if not job_id:
            raise HpcdistError("SLURM_JOB_ID is not set: this is for the inside of a Slurm job")
        facts = parse_facts(_scontrol("show", "job", "--oneliner", job_id))
        return cls(
            id=job_id,
            restart_count=int(facts.get("Restarts", "0")),
            end_time=parse_time(facts.get("EndTime")),
            time_limit_min=parse_minutes(facts.get("TimeLimit", "")),
            may_requeue=facts.get("Requeue") != "0",
        )

    def will_run_again(self) -> bool:
        """Whether Slurm has put the job back into the queue: a preemption or a lost node, not a cancellation."""
        facts = parse_facts(_scontrol("show", "job", "--oneliner", self.id))
        return int(facts.get("Restarts", "0")) > self.restart_count

    def requeue(self) -> None:
        """Put the job back into the queue; it may be there already, which is just as well."""
        try:
            _scontrol("requeue", self.id)
        except HpcdistError as error:
            # Of two requeues at once one wins, and the other is told that the job is pending.
            if "pending execution" not in str(error).lower():
                raise


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


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise HpcdistError(f"scontrol {' '.join(arguments)}: {error}") from error
    if done.returncode != 0:
        raise HpcdistError(f"scontrol {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
