"""Which cells of a sweep are to run, and making them ready for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcdist.errors import RunFolderError
from hpcdist.files.ownership import require_trusted
from hpcdist.run import snapshot
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.lease import hold, holder
from hpcdist.run.status import job_of
from hpcdist.run.sweep import Cell, Sweep
from hpcdist.run.sweep_folder import SweepDir, mark, sweep_of, write_sweep
from hpcdist.slurm import client
from hpcdist.slurm.client import SlurmError
from hpcdist.supervisor.pending_config import propose
from hpcdist.supervisor.start import create_run


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A cell, its folder, and whether it is to run now."""

    cell: Cell
    run: RunDir
    runs: bool
    why: str  #: how it stands: new, failed, finished, running …
    is_new: bool


def choose(sweep: Sweep) -> list[Choice]:
    """Look which cells are missing, have failed, were stopped or have lost their job. Changes nothing.

    Raises RunFolderError when a cell's name is taken by a run that is none of this sweep's.
    """
    runs = [RunDir(sweep.folder.parent / cell.name) for cell in sweep.cells]
    jobs = {run.name: job.id for run in runs if (job := job_of(run)) is not None}
    queued = queued_jobs(list(jobs.values()))
    found = []
    for cell, run in zip(sweep.cells, runs, strict=True):
        if _is_new(run, sweep):
            found.append(Choice(cell=cell, run=run, runs=True, why="new", is_new=True))
            continue
        require_trusted(run.path, "run --sweep")
        job_id = jobs.get(run.name)
        in_queue = None if job_id is None else "UNKNOWN" if queued is None else queued.get(job_id)
        runs_now, why = verdict(run.read_state(), held=holder(run) is not None, in_queue=in_queue)
        found.append(Choice(cell=cell, run=run, runs=runs_now, why=why, is_new=False))
    return found


def queued_jobs(job_ids: Sequence[str]) -> dict[str, str] | None:
    """The state, by job id, of those jobs that Slurm has not done with; None when it cannot be asked."""
    try:
        return {job: facts.state for job, facts in client.query_jobs(job_ids).items() if facts.alive}
    except SlurmError:
        return None


def _is_new(run: RunDir, sweep: Sweep) -> bool:
    """Whether the cell is still to be made, perhaps once more: whoever makes one may be killed in between."""
    if not run.path.exists():
        return True
    if not (run.path / "state.json").exists():
        raise RunFolderError(f"{run.path} is there and holds no run: remove it, or choose another `name`")
    of = sweep_of(run)
    if of is not None and of.name == sweep.name:
        return False
    state = run.read_state()
    if holder(run) is None and state.status == "created" and state.attempt == 0:
        return True
    raise RunFolderError(f"{run.path} is a run of its own, no cell of sweep {sweep.name}: choose another `name`")


def verdict(state: State, *, held: bool, in_queue: str | None) -> tuple[bool, str]:
    """Whether a cell that exists is to run, and how it stands.

    Args:
        held: a supervisor is at work on it.
        in_queue: its job's state; None when it has none any more, UNKNOWN when Slurm does not answer.
    """
    if state.status == "finished":
        return False, "finished"
    if held:
        return False, "running"
    ended = state.status in ENDED
    if in_queue is not None and not (ended and in_queue in ("COMPLETING", "UNKNOWN")):
        return False, f"queued ({in_queue.lower()})"
    if ended:
        return True, state.status
    return True, "not started" if state.status == "created" else "lost"


@contextmanager
def at_work(sweep: Sweep) -> Iterator[SweepDir]:
    """Hold the sweep while its cells are made, or run one after the other. Raises RunFolderError when it is held."""
    there = write_sweep(sweep)
    if (other := holder(there)) is not None:
        raise RunFolderError(
            f"sweep {sweep.name} is in the hands of process {other['pid']} of {other['user']} on {other['host']}:"
            " wait for its end"
        )
    with hold(there):
        yield there


def make_ready(choices: Sequence[Choice], there: SweepDir, cwd: Path, *, launcher: str) -> None:
    """Make the folders of new cells, and give the others their config of today. All or none of the new ones.

    A cell that has failed gets the code as it is now, since that is what was mended; one that was stopped or lost
    goes on with the code that it was started with.
    """
    made: list[RunDir] = []
    try:
        for choice in choices:
            if choice.is_new:
                shutil.rmtree(choice.run.path, ignore_errors=True)
                made.append(create_run(choice.cell.config, cwd, launcher=launcher))
            else:
                _renew(choice, cwd, launcher)
            mark(choice.run, there, choice.cell)
    except BaseException:
        discard(made)
        raise


def _renew(choice: Choice, cwd: Path, launcher: str) -> None:
    run = choice.run
    with hold(run):
        propose(run, choice.cell.config)
        if choice.why == "failed":
            snapshot.write_environment(run, snapshot.take(choice.cell.config, run, cwd), launcher=launcher)
        if launcher == "local":
            (run.path / "slurm.json").unlink(missing_ok=True)  # its job is over, and `resume` would submit it again


def discard(runs: Sequence[RunDir]) -> None:
    """Remove cells that were made for nothing."""
    for run in runs:
        shutil.rmtree(run.path)
