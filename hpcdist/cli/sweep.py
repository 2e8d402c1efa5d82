"""Sweeps (`--sweep`): their cells and tables of them, and sweeps on Slurm as one job array."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from hpcdist.cli.options import console, print_table
from hpcdist.config.schema import Config
from hpcdist.errors import RunFolderError, TrackingError, UserMistake
from hpcdist.host.files import short_path
from hpcdist.host.json_files import write_json
from hpcdist.host.log_files import say
from hpcdist.host.ownership import require_mine, require_trusted
from hpcdist.run import create, snapshot
from hpcdist.run.config_change import change_config
from hpcdist.run.config_origin import Origin, load_origin
from hpcdist.run.create import create_run
from hpcdist.run.folder import ENDED, RunDir, State, StopRequest
from hpcdist.run.lease import hold, holder
from hpcdist.run.status import RunStatus, StatusWatch, author_of, end, keep_job, query_jobs, status_of
from hpcdist.run.sweeps import Cell, Sweep, SweepDir, make_sweep, mark, match, parse_axes, sweep_of, write_sweep
from hpcdist.slurm.client import JobSnapshot


def show_choices(sweep: Sweep, choices: Sequence["Choice"]) -> None:
    num = sum(choice.runs for choice in choices)
    say(f"sweep {sweep.name}: {len(choices)} cells, {num} to run, in {short_path(sweep.folder.parent)}")
    for index, choice in enumerate(choice for choice in choices if choice.runs):
        say(f"  {index}: {choice.cell.label} ({choice.why})  {choice.run.name}")
    for choice in choices:
        if not choice.runs:
            say(f"  -: {choice.cell.label} ({choice.why})")


def show_end(sweep: Sweep, choices: Sequence["Choice"]) -> int:
    """Print the final table of a sweep. Returns the exit code of the command."""
    names = show_cells(SweepDir(sweep.folder), [choice.run.name for choice in choices])
    if set(names) != {"finished"}:
        say("run the same command again for missing and failed cells")
    if {"failed", "lost", "unreadable"} & set(names):
        return 1
    return 130 if "cancelled" in names else 0


def show_cells(sweep: SweepDir, only: Sequence[str] = ()) -> list[str]:
    """Print the status, last step and best value of cells, and the settings of a sweep over seeds.

    Returns the statuses. By default all cells are shown, else those with the names in `only`.
    """
    from hpcdist.review.facts import last_beat
    from hpcdist.review.sweep_facts import read_sweep_facts

    facts = read_sweep_facts(sweep, sweep.read_state())
    value = f"{'best' if facts.is_best else 'last'} {facts.monitor}"
    names, rows = [], []
    for cell in facts.cells:
        if only and cell.name not in only:
            continue
        run, name, reason = RunDir(sweep.path.parent / cell.name), cell.status, "not started yet"
        try:
            if name != "missing":
                now = status_of(run)
                name, reason = now.name, now.reason
        except (RunFolderError, OSError) as error:
            name, reason = "unreadable", str(error)
        names.append(name)
        numbers = ["" if cell.metric is None else f"{cell.metric:.6g}"] if facts.monitor else []
        rows.append((cell.label, name, str(last_beat(run).get("step", "")), *numbers, reason))
    head = ("cell", "status", "step", *([value] if facts.monitor else []), "reason")
    print_table(console(), head, rows, title=sweep.name, num_whole=1)
    if any(one.values for one in facts.settings):
        settings = [(one.label, one.text, str(one.num_cells)) for one in facts.settings]
        print_table(console(), ("setting", value, "cells"), settings, title="mean ± s.d. (n seeds)")
    if facts.best is not None and facts.beside_next:
        say(f"best {'setting' if facts.settings else 'cell'}: {facts.best.label}, {facts.beside_next}")
    counts = Counter(names)
    say(f"sweep {sweep.name}: {', '.join(f'{number} {name}' for name, number in sorted(counts.items()))}")
    return names


def read_sweep(config: str, overrides: Sequence[str], axes: Sequence[str], cluster: str | None = None) -> Sweep:
    """Return the sweep of a command line, with all its configs checked. Raises UserMistake."""
    from hpcdist.config.loading import load_config

    def load(more: Sequence[str]) -> Config:
        loaded = load_config(config, [*overrides, *more], cluster=cluster)
        create.check_trainer(loaded, Path.cwd())
        return loaded

    found = match(make_sweep(parse_axes(axes, overrides), load, create.label_of))
    return replace(found, origin=load_origin(config, [*overrides, *axes], cluster))


# --- on Slurm


def submit_sweep(
    sweep: Sweep,
    flags: Mapping[str, str],
    check: Callable[[Config], None],
    *,
    parallelism: int | None,
    dry_run: bool,
    test: bool,
    follow: bool,
) -> int:
    """Submit the remaining cells of a sweep as one job array. Returns the exit code of the command."""
    from hpcdist.job import submit
    from hpcdist.job.submit_checks import check_config
    from hpcdist.supervisor.children import ship_in_background
    from hpcdist.tracking.uri import resolve_uri

    choices = choose(sweep)
    to_run = [choice for choice in choices if choice.runs]
    show_choices(sweep, choices)
    config = sweep.cells[0].config
    if dry_run:
        if to_run:
            # A single cell is an ordinary job.
            is_array = len(to_run) > 1
            array = {"map_count": len(to_run), "array_parallelism": parallelism or len(to_run)} if is_array else {}
            first = to_run[0]
            check_config(first.cell.config, Path.cwd())
            script, _ = submit.render(config, RunDir(sweep.folder), flags, **array)
            _, step = submit.render(first.cell.config, first.run)
            say(f"{script}\n# then, in the batch step of task 0 ({first.run.name}):\n{submit.commented(step)}")
        return 0
    # One check is enough unless cells need different datasets: the requests to Slurm are the same.
    for one in {repr(choice.cell.config.data): choice.cell.config for choice in to_run}.values():
        check(one)
    if test:
        return 0
    uri = resolve_uri(config, os.environ)
    if to_run:
        folder = write_sweep(sweep)
        with hold(folder):
            prepare(to_run, folder, Path.cwd(), launcher="slurm", origin=sweep.origin)
            try:
                jobs = submit.submit_array(config, folder, [choice.run for choice in to_run], flags, parallelism)
            except BaseException:
                for choice in to_run:
                    if choice.why == "new":
                        shutil.rmtree(choice.run.path)
                raise
        say(f"{sweep.name} is job{'s' * (len(jobs) > 1)} {jobs[0]}{f' to {jobs[-1]}' * (len(jobs) > 1)}")
        if not follow:
            say(ship_in_background([choice.run for choice in to_run], config, os.environ))
    return _follow(sweep, choices, uri) if follow else 0


def _upload(runs: Sequence[RunDir], uri: str, *, close_lost: bool = False) -> str:
    """Upload the records of some cells to MLflow. Returns why that failed, or ""."""
    from hpcdist.tracking.sync_runs import sync

    try:
        for run in runs:
            sync(run, uri, close_dead=close_lost)
    except TrackingError as error:
        return f"not in MLflow yet: {error}"
    return ""


def _follow(sweep: Sweep, choices: Sequence["Choice"], uri: str) -> int:
    """Show the statuses of the cells until all are final, and upload them unless their jobs do."""
    from hpcdist.tracking.uri import is_server

    watch = StatusWatch()
    statuses: dict[str, RunStatus] = {}
    shown: dict[str, str] = {}
    uploaded: dict[str, object] = {}
    next_upload = 0.0
    while True:
        pending = [c for c in choices if not (c.run.name in statuses and statuses[c.run.name].final)]
        for choice, status in zip(pending, watch.poll([choice.run for choice in pending]), strict=True):
            statuses[choice.run.name] = status
            if shown.get(choice.run.name) != (text := f"{status.name} {status.reason}".strip()):
                shown[choice.run.name] = text
                say(f"{choice.cell.label}: {text}")
        has_ended = all(status.final for status in statuses.values())
        if not is_server(uri) and (has_ended or time.monotonic() >= next_upload):
            next_upload = time.monotonic() + 5.0
            changed = [choice.run for choice in choices if uploaded.get(choice.run.name) != _version(choice.run)]
            uploaded |= {run.name: _version(run) for run in changed}
            if problem := _upload(changed, uri):
                say(problem)
        if has_ended:
            break
        time.sleep(0.5)
    if lost := [choice.run for choice in choices if statuses[choice.run.name].name == "lost"]:
        say(f"no longer in the queue, without a recorded end: {', '.join(run.name for run in lost)}")
        say(_upload(lost, uri, close_lost=True) or f"{len(lost)} cells uploaded to MLflow")
    return show_end(sweep, choices) or int(bool(lost))


def _version(run: RunDir) -> object:
    """Return a value that changes when there is more to upload."""
    return run.read_state(), sum(path.stat().st_size for path in run.journal.glob("*.jsonl"))


# Which cells must run, and their folders.


@dataclass(frozen=True, kw_only=True)
class Choice:
    cell: Cell
    run: RunDir
    runs: bool
    why: str  #: status of the cell: new, failed, finished, running …


def choose(sweep: Sweep) -> list[Choice]:
    """Select the cells that are new, failed, stopped or lost. Raises RunFolderError for folders of other runs."""
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
    """Return whether an existing cell must run, and its status; `job` is None for a local run."""
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
                with hold(choice.run):
                    change_config(choice.run, choice.cell.config)
                    if choice.why == "failed":
                        taken = snapshot.take(choice.cell.config, choice.run, cwd)
                        snapshot.write_environment(choice.run, taken, launcher=launcher)
                    if launcher == "local":
                        keep_job(choice.run)
                        # The job is over, and `resume` would submit it again.
                        (choice.run.path / "slurm.json").unlink(missing_ok=True)
            mark(choice.run, folder, choice.cell)
    except BaseException:
        for run in made:
            shutil.rmtree(run.path)
        raise


def end_sweep(sweep: SweepDir, action: Literal["stop", "cancel"]) -> list[str]:
    """Stop or cancel all cells of a sweep, and start no more. Returns a message for each cell that had not ended."""
    active = holder(sweep) is not None
    if active:
        # Before the request to the running cell: its end would start the next one.
        write_json(sweep.request, asdict(StopRequest(action=action, cause="user", by=author_of(action))))
    messages = []
    for cell in sweep.cells():
        if not os.path.lexists(cell.path / "state.json"):
            continue
        try:
            if cell.read_state().status in ENDED:
                continue
            if holder(cell) is None and not cell.slurm.exists():
                messages += [f"{cell.name} will not be started"] * active
                continue
            require_mine(cell.path, action)
            messages.append(end(cell, action))
        except UserMistake as mistake:
            messages.append(str(mistake))
    if not messages:
        raise UserMistake(f"no cell of sweep {sweep.name} runs or waits ({sweep.read_state().reason})")
    return messages
