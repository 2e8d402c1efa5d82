"""Select the cells of a sweep that must run, and prepare their folders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcdist.errors import RunFolderError
from hpcdist.files.ownership import require_trusted
from hpcdist.run import snapshot
from hpcdist.run.create import create_run
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.lease import hold, holder
from hpcdist.run.origin import Origin
from hpcdist.run.pending_config import propose
from hpcdist.run.slurm_job import keep_job
from hpcdist.run.status import query_jobs
from hpcdist.run.sweep import Cell, Sweep
from hpcdist.run.sweep_folder import SweepDir, mark, sweep_of, write_sweep
from hpcdist.slurm.job_snapshot import JobSnapshot


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A cell, its folder, and whether it must run now."""

    cell: Cell
    run: RunDir
    runs: bool
    why: str  #: status of the cell: new, failed, finished, running …


def choose(sweep: Sweep) -> list[Choice]:
    """Select the cells that are new, failed, stopped or lost. Changes nothing.

    Raises:
        RunFolderError: the folder of a cell belongs to a run outside this sweep.
    """
    runs = [RunDir(sweep.folder.parent / cell.name) for cell in sweep.cells]
    snapshots = query_jobs(runs)
    found = []
    for cell, run in zip(sweep.cells, runs, strict=True):
        runs_now, why = True, "new"
        if not _is_new(run, sweep):
            require_trusted(run.path, "run --sweep")
            runs_now, why = verdict(run.read_state(), held=holder(run) is not None, job=snapshots.get(run.path))
        found.append(Choice(cell=cell, run=run, runs=runs_now, why=why))
    return found


def _is_new(run: RunDir, sweep: Sweep) -> bool:
    """Return whether a cell must be created, also if an earlier command was killed while it created the cell."""
    if not run.path.exists():
        return True
    if not (run.path / "state.json").exists():
        raise RunFolderError(f"{run.path} exists and holds no run: remove it, or choose another `name`")
    of = sweep_of(run)
    if of is not None and of.name == sweep.name:
        return False
    state = run.read_state()
    if holder(run) is None and state.status == "created" and state.attempt == 0:
        return True
    raise RunFolderError(f"{run.path} is a run outside of sweep {sweep.name}: choose another `name`")


def verdict(state: State, *, held: bool, job: JobSnapshot | None) -> tuple[bool, str]:
    """Return whether an existing cell must run, and its status.

    Args:
        held: a supervisor holds the cell.
        job: snapshot of its Slurm job; None for a local run.
    """
    if state.status == "finished":
        return False, "finished"
    if held:
        return False, "running"
    ended = state.status in ENDED
    if job is not None and not job.is_over:
        in_queue = job.info.state if job.info is not None else "UNKNOWN"
        if not (ended and in_queue in ("COMPLETING", "UNKNOWN")):
            return False, f"queued ({in_queue.lower()})"
    if ended:
        return True, state.status
    return True, "not started" if state.status == "created" else "lost"


@contextmanager
def hold_sweep(sweep: Sweep) -> Iterator[SweepDir]:
    """Create the sweep's folder and hold its lease. Raises RunFolderError if another process holds it."""
    folder = write_sweep(sweep)
    with hold(folder):
        yield folder


def prepare(
    choices: Sequence[Choice], folder: SweepDir, cwd: Path, *, launcher: str, origin: Origin | None = None
) -> None:
    """Create the folders of new cells, and write the current config to the others. On errors no new folder remains.

    A failed cell gets the current code, which presumably fixes the failure. A stopped or lost cell continues with the
    code that it was started with.
    """
    made: list[RunDir] = []
    try:
        for choice in choices:
            if choice.why == "new":
                shutil.rmtree(choice.run.path, ignore_errors=True)
                made.append(create_run(choice.cell.config, cwd, launcher=launcher, origin=origin))
            else:
                _renew(choice, cwd, launcher)
            mark(choice.run, folder, choice.cell)
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
            keep_job(run)
            (run.path / "slurm.json").unlink(missing_ok=True)  # the job is over, and `resume` would submit it again


def discard(runs: Sequence[RunDir]) -> None:
    """Remove the folders of cells that were created but not submitted."""
    for run in runs:
        shutil.rmtree(run.path)
