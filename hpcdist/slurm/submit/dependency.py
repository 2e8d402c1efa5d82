"""What a submission waits for: `--dependency` of sbatch, where a run's name may stand for its job."""

from __future__ import annotations

import re
from pathlib import Path

from hpcdist.errors import UserMistake
from hpcdist.run.lookup import resolve_run
from hpcdist.run.slurm_job import job_of

KINDS = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok", "singleton")
_JOB = re.compile(r"\d+(_(\d+|\*))?")
#: Kinds that a run's end, as it is known already, has made impossible. Slurm forgets jobs and then lets these start.
_NEVER = {"afterok": "failed", "aftercorr": "failed", "afternotok": "finished"}


def resolve(text: str, runs_dir: Path) -> str:
    """The dependency with job ids in place of runs: `afterok:first` becomes `afterok:4711`.

    Raises UserMistake for what is no dependency, for a run that was never submitted, and for one whose end rules it
    out; RunFolderError where no run has such a name.
    """
    return "".join(
        part if part in (",", "?") else _one(part, text, runs_dir) for part in re.split(r"([,?])", text.strip())
    )


def _one(part: str, text: str, runs_dir: Path) -> str:
    kind, *names = part.split(":")
    if kind not in KINDS or bool(names) == (kind == "singleton") or not all(names):
        raise UserMistake(
            f"--dependency {text}: {part!r} is none: write afterok:RUN or afterok:JOB"
            f" (or {', '.join(name for name in KINDS if name != 'afterok')})"
        )
    return ":".join([kind, *(_job(kind, name, runs_dir) for name in names)])


def _job(kind: str, name: str, runs_dir: Path) -> str:
    # `after:JOB+MINUTES`
    name, plus, minutes = name.partition("+")
    if _JOB.fullmatch(name):
        return f"{name}{plus}{minutes}"
    run = resolve_run(name, runs_dir)
    job = job_of(run)
    if job is None:
        raise UserMistake(f"--dependency {kind}:{name}: run {run.name} was never submitted to Slurm")
    status = run.read_state().status
    if status == _NEVER.get(kind):
        raise UserMistake(f"--dependency {kind}:{name}: run {run.name} is {status}: this would never start")
    return f"{job.id}{plus}{minutes}"
