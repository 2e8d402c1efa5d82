"""`--dependency` of sbatch with names of runs in the place of job ids."""

from __future__ import annotations

import re
from pathlib import Path

from hpcdist.errors import UserMistake
from hpcdist.run.lookup import resolve_run
from hpcdist.run.slurm_job import job_of

KINDS = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok", "singleton")
_JOB = re.compile(r"\d+(_(\d+|\*))?")
#: Final status that a dependency of a kind can never meet. Slurm would start the job once it has forgotten the run's.
_NEVER = {"afterok": "failed", "aftercorr": "failed", "afternotok": "finished"}


def resolve(text: str, runs_dir: Path) -> str:
    """Return a dependency with names of runs replaced by job ids: `afterok:first` becomes `afterok:4711`.

    Raises UserMistake for a malformed dependency, for a run that was never submitted, and for a run with a final
    status that rules the dependency out; RunFolderError for an unknown run.
    """
    return "".join(
        part if part in (",", "?") else _resolve_part(part, text, runs_dir)
        for part in re.split(r"([,?])", text.strip())
    )


def _resolve_part(part: str, text: str, runs_dir: Path) -> str:
    kind, *names = part.split(":")
    if kind not in KINDS or bool(names) == (kind == "singleton") or not all(names):
        raise UserMistake(
            f"--dependency {text}: {part!r} is not a dependency: write afterok:RUN or afterok:JOB"
            f" (or {', '.join(name for name in KINDS if name != 'afterok')})"
        )
    return ":".join([kind, *(_job_id(kind, name, runs_dir) for name in names)])


def _job_id(kind: str, name: str, runs_dir: Path) -> str:
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
        raise UserMistake(f"--dependency {kind}:{name}: run {run.name} is {status}: the job would never start")
    return f"{job.id}{plus}{minutes}"
