"""What Slurm says of a job: asked sparingly, of whichever of its commands is there and answers.

`scontrol` (else `squeue`) knows jobs that wait, run, or ended a few minutes ago; `sacct` knows the others, where
accounting is set up and reachable.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpcdist.errors import HpcdistError
from hpcdist.slurm.job_info import SACCT_FIELDS, SQUEUE_FIELDS, JobInfo, parse_sacct, parse_scontrol, parse_squeue

#: Slurm's own commands go on trying for up to a minute when their controller is away.
ANSWER_WITHIN_S = 10.0


class SlurmUnavailableError(HpcdistError):
    """No command of Slurm's is here, or none of them answers. `installed` tells which."""

    def __init__(self, message: str, *, installed: bool) -> None:
        super().__init__(message)
        self.installed = installed


def ask(job_id: str, *, history: bool = False) -> JobInfo | None:
    """What Slurm knows of a job, or None when it does not know it (any more).

    Args:
        history: ask accounting in any case: it alone knows memory, steps and earlier lives.

    Raises SlurmUnavailableError when nobody could be asked.
    """
    away: SlurmUnavailableError | None = None
    facts = None
    try:
        facts = _ask_controller(job_id)
    except SlurmUnavailableError as error:
        away = error
    if facts is not None and not history:
        return facts
    try:
        past = parse_sacct(
            answer("sacct", f"--jobs={job_id}", "--duplicates", "-Pn", f"--format={SACCT_FIELDS}"), job_id
        )
    except SlurmUnavailableError:
        # Without accounting the controller's word is all there is.
        past = None
    if facts is not None:
        if past is None:
            return facts
        return replace(facts, max_rss=past.max_rss, earlier=past.earlier, step_states=past.step_states)
    if away is None:
        # What the controller does not know is over, whatever accounting has not been told.
        return past if past is not None and not past.alive else None
    if past is None:
        raise away
    return past


def ask_many(job_ids: Sequence[str]) -> dict[str, JobInfo]:
    """What the queue knows of some jobs, in one call; those that it has forgotten are left out.

    Raises SlurmUnavailableError when it does not answer.
    """
    if not job_ids:
        return {}
    text = answer("squeue", "-h", "-r", "--states=all", f"--format={SQUEUE_FIELDS}", f"--jobs={','.join(job_ids)}")
    return {job: facts for job in job_ids if (facts := parse_squeue(text, job)) is not None}


def cancel(job_id: str, *, waiting_only: bool = False) -> None:
    """Take a job out of the queue, or end it where it runs. One that is over already is left alone.

    Raises SlurmUnavailableError when nobody could be asked or Slurm refuses.
    """
    answer("scancel", *(["--state=PENDING"] if waiting_only else []), job_id)


def _ask_controller(job_id: str) -> JobInfo | None:
    try:
        return parse_scontrol(answer("scontrol", "--oneliner", "show", "job", job_id), job_id)
    except SlurmUnavailableError as error:
        if error.installed:
            raise
        return parse_squeue(
            answer("squeue", "-h", "-r", "--states=all", f"--format={SQUEUE_FIELDS}", f"-j{job_id}"), job_id
        )


def answer(*command: str) -> str:
    """What a command of Slurm's prints; nothing where it says that there is no such job.

    Raises SlurmUnavailableError when it is not here, fails, or is silent for too long.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # names of jobs need not be UTF-8
            timeout=ANSWER_WITHIN_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmUnavailableError(f"no {command[0]} here", installed=False) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailableError(f"{command[0]} gave no answer in {ANSWER_WITHIN_S:g} s", installed=True) from error
    if done.returncode == 0:
        return done.stdout
    if "Invalid job id" in done.stderr:
        return ""
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    raise SlurmUnavailableError(f"{command[0]}: {said[-1].removeprefix(f'{command[0]}: ')}", installed=True)


@dataclass(frozen=True, kw_only=True)
class JobRef:
    """Which job a run was submitted as. Ids begin anew on another cluster, and where one is set up again."""

    id: str
    name: str = ""  #: Slurm's name for it, where it is known
    cluster: str = ""  #: Slurm's name of the cluster, where it is known


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """One look at a job: what Slurm said, or why it could not be asked."""

    facts: JobInfo | None = None  #: None also where Slurm does not know the job (any more)
    away: str = ""  #: why nobody could be asked
    installed: bool = True  #: whether Slurm's commands are here at all

    @property
    def dead(self) -> bool:
        """Whether Slurm says that the job neither runs nor will run."""
        return not self.away and (self.facts is None or not self.facts.alive)


def look_at(job: JobRef, *, history: bool = False) -> JobSnapshot:
    """One look at a job, now. One of the same id that is another's does not count."""
    try:
        facts = ask(job.id, history=history)
        if facts is not None and (not job.name or facts.name == job.name):
            return JobSnapshot(facts=facts)
        if job.cluster and (here := cluster_name()) != job.cluster:
            return JobSnapshot(away=f"job {job.id} is on cluster {job.cluster}, this is {here}")
        return JobSnapshot()
    except SlurmUnavailableError as error:
        return JobSnapshot(away=str(error), installed=error.installed)


def cluster_name() -> str:
    """The name of this host's cluster. Raises SlurmUnavailableError when nobody answers."""
    found = re.search(r"^ClusterName\s*= (.+)$", answer("scontrol", "show", "config"), re.MULTILINE)
    return found[1].strip() if found else ""
