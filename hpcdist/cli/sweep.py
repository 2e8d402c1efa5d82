"""Sweeps (`--sweep`): their cells and tables of them, and sweeps on Slurm as one job array."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from hpcdist.cli.options import INTERRUPTED, console
from hpcdist.cli.tables import print_table
from hpcdist.config.schema import Config
from hpcdist.errors import RunFolderError, TrackingError, UserMistake, plural
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
from hpcdist.run.weight_files import SharedWeights, WeightSource
from hpcdist.slurm.client import JobSnapshot
from hpcdist.tracking.weight_source import find_weights

#: Time between two looks at the statuses of cells.
_POLL_S = 0.5
#: Time between two uploads of cells to a database.
_UPLOAD_EVERY_S = 5.0


def show_choices(sweep: Sweep, choices: Sequence["Choice"]) -> None:
    """Print the cells to run, numbered as the tasks of a job array, and then the other cells."""
    to_run = [choice for choice in choices if choice.runs]
    num_cells = plural(len(choices), "cell")
    say(f"sweep {sweep.name}: {num_cells}, {len(to_run)} to run, in {short_path(sweep.folder.parent)}")
    for index, choice in enumerate(to_run):
        say(f"  {index}: {choice.cell.label} ({choice.why})  {choice.run.name}")
    for choice in choices:
        if not choice.runs:
            say(f"  -: {choice.cell.label} ({choice.why})")


def show_end(sweep: Sweep, choices: Sequence["Choice"]) -> int:
    """Print the final table of a sweep. Returns the exit code of the command."""
    statuses = set(show_cells(SweepDir(sweep.folder), [choice.run.name for choice in choices]))
    if statuses != {"finished"}:
        say("run the same command again for missing and failed cells")
    if {"failed", "lost", "unreadable"} & statuses:
        return 1
    if "cancelled" in statuses:
        return INTERRUPTED
    return 0


def show_cells(sweep: SweepDir, only: Sequence[str] = ()) -> list[str]:
    """Print the status, last step and best value of cells, and the settings of a sweep over seeds.

    Returns the statuses. By default all cells are shown, else those with the names in `only`.
    """
    from hpcdist.review.facts import last_beat
    from hpcdist.review.sweep_facts import read_sweep_facts
    from hpcdist.tracking.series import read_last_values

    facts = read_sweep_facts(sweep, sweep.read_state(), read_last_values)
    statuses: list[str] = []
    rows = []
    for cell in facts.cells:
        if only and cell.name not in only:
            continue
        run = RunDir(sweep.path.parent / cell.name)
        status, reason = _status_of_cell(run, cell.status)
        statuses.append(status)
        step = last_beat(run).get("step", cell.step)
        row = [cell.label, status, "" if step is None else str(step)]
        if facts.monitor:
            row.append("" if cell.value is None else f"{cell.value:.6g}")
        rows.append([*row, reason])
    head = ["cell", "status", "step"]
    if facts.monitor:
        head.append(facts.value_title)
    print_table(console(), [*head, "reason"], rows, title=sweep.name, num_whole=1)
    if facts.has_seeds and facts.ranking.rows:
        columns = ("setting", facts.value_title, "against the best", "cells")
        settings = [(row.name, row.value_text, row.against_best, str(len(row.cells))) for row in facts.rows]
        print_table(console(), columns, settings, title="mean ± s.d. (n seeds)")
    if facts.best is not None and facts.beside_next:
        kind = "setting" if facts.has_seeds else "cell"
        say(f"best {kind}: {facts.best.name}, {facts.beside_next}")
    counts = sorted(Counter(statuses).items())
    say(f"sweep {sweep.name}: {', '.join(f'{number} {status}' for status, number in counts)}")
    return statuses


def _status_of_cell(run: RunDir, status: str) -> tuple[str, str]:
    """Return the status of a cell, with that of its job, and the reason.

    Args:
        status: the status in the records of the sweep; `missing` if the cell has no folder.
    """
    if status == "missing":
        return status, "not started yet"
    try:
        now = status_of(run)
    except (RunFolderError, OSError) as error:
        return "unreadable", str(error)
    return now.name, now.reason


def read_sweep(config: str, overrides: Sequence[str], axes: Sequence[str], cluster: str | None = None) -> Sweep:
    """Return the sweep of a command line, with all its configs checked. Raises UserMistake."""
    from hpcdist.config.loading import load_config

    def load(more: Sequence[str]) -> Config:
        loaded = load_config(config, [*overrides, *more], cluster=cluster)
        create.check_trainer(loaded, Path.cwd())
        return loaded

    sweep = match(make_sweep(parse_axes(axes, overrides), load, create.label_of))
    return replace(sweep, origin=load_origin(config, [*overrides, *axes], cluster))


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
    """Submit the remaining cells of a sweep as one job array. Returns the exit code of the command.

    Args:
        flags: flags of sbatch for this submission only.
        check: checks the submission of a cell; raises UserMistake.
        parallelism: number of cells that run at a time; by default all.
    """
    from hpcdist.supervisor.children import ship_in_background
    from hpcdist.tracking.uri import resolve_uri

    choices = choose(sweep)
    to_run = [choice for choice in choices if choice.runs]
    show_choices(sweep, choices)
    config = sweep.cells[0].config
    if dry_run:
        if to_run:
            _show_scripts(sweep, to_run, flags, parallelism)
        return 0
    # One check is enough unless cells need different datasets: the requests to Slurm are the same.
    config_by_data = {repr(choice.cell.config.data): choice.cell.config for choice in to_run}
    for config_of_cell in config_by_data.values():
        check(config_of_cell)
    if test:
        return 0
    uri = resolve_uri(config, os.environ)
    if to_run:
        _submit(sweep, to_run, flags, parallelism)
        if not follow:
            say(ship_in_background([choice.run for choice in to_run], config, os.environ))
    if follow:
        return _follow(sweep, choices, uri)
    return 0


def _show_scripts(sweep: Sweep, to_run: Sequence["Choice"], flags: Mapping[str, str], parallelism: int | None) -> None:
    """Print the batch script of a sweep, and the command in the batch step of its first cell."""
    from hpcdist.job import submit
    from hpcdist.job.submit_checks import check_config

    array = {}
    if len(to_run) > 1:  # a single cell is an ordinary job
        array = {"map_count": len(to_run), "array_parallelism": parallelism or len(to_run)}
    first = to_run[0]
    check_config(first.cell.config, Path.cwd())
    script, _ = submit.render(sweep.cells[0].config, RunDir(sweep.folder), flags, **array)
    _, step = submit.render(first.cell.config, first.run)
    shown = submit.shown_step(first.cell.config, step)
    say(f"{script}\n# then, in the batch step of task 0 ({first.run.name}):\n{shown}")


def _submit(sweep: Sweep, to_run: Sequence["Choice"], flags: Mapping[str, str], parallelism: int | None) -> None:
    """Create the folders of cells and submit them. On errors the folders of new cells are removed."""
    from hpcdist.job import submit

    runs = [choice.run for choice in to_run]
    folder = write_sweep(sweep)
    with hold(folder):
        prepare(to_run, folder, Path.cwd(), launcher="slurm", origin=sweep.origin)
        try:
            jobs = submit.submit_array(sweep.cells[0].config, folder, runs, flags, parallelism)
        except BaseException:
            for choice in to_run:
                if choice.why == "new":
                    shutil.rmtree(choice.run.path)
            raise
    if len(jobs) == 1:
        say(f"{sweep.name} is job {jobs[0]}")
    else:
        say(f"{sweep.name} is jobs {jobs[0]} to {jobs[-1]}")


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
    pending = list(choices)
    statuses: dict[str, RunStatus] = {}
    shown: dict[str, str] = {}
    uploaded: dict[str, object] = {}
    next_upload = 0.0
    while True:
        for choice, status in zip(pending, watch.poll([choice.run for choice in pending]), strict=True):
            name = choice.run.name
            statuses[name] = status
            text = f"{status.name} {status.reason}".strip()
            if shown.get(name) != text:
                shown[name] = text
                say(f"{choice.cell.label}: {text}")
        pending = [choice for choice in pending if not statuses[choice.run.name].final]
        if not is_server(uri) and (not pending or time.monotonic() >= next_upload):
            next_upload = time.monotonic() + _UPLOAD_EVERY_S
            changed = [choice.run for choice in choices if uploaded.get(choice.run.name) != _version(choice.run)]
            uploaded |= {run.name: _version(run) for run in changed}
            problem = _upload(changed, uri)
            if problem:
                say(problem)
        if not pending:
            break
        time.sleep(_POLL_S)
    lost = [choice.run for choice in choices if statuses[choice.run.name].name == "lost"]
    if lost:
        say(f"no longer in the queue, without a recorded end: {', '.join(run.name for run in lost)}")
        problem = _upload(lost, uri, close_lost=True)
        say(problem or f"{len(lost)} cells uploaded to MLflow")
    code = show_end(sweep, choices)
    if code == 0 and lost:
        return 1
    return code


def _version(run: RunDir) -> object:
    """Return a value that changes when there is more to upload."""
    return run.read_state(), sum(path.stat().st_size for path in run.journal.glob("*.jsonl"))


# Which cells must run, and their folders.


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The decision whether a cell of a sweep is started."""

    cell: Cell
    run: RunDir
    runs: bool  #: whether the cell is started
    why: str  #: status of the cell: new, failed, finished, running …
    weights: WeightSource | None = None  #: what `model.init_from` of a new cell names


def choose(sweep: Sweep) -> list[Choice]:
    """Select the cells that are new, failed, stopped or lost.

    Raises RunFolderError for folders of other runs, and ConfigError if `model.init_from` of a new cell names nothing.
    """
    runs = [RunDir(sweep.folder.parent / cell.name) for cell in sweep.cells]
    snapshots = query_jobs(runs)
    choices = []
    found: dict[str, SharedWeights | None] = {}
    for cell, run in zip(sweep.cells, runs, strict=True):
        must_run, why, weights = True, "new", None
        if _is_new(run, sweep):
            source = cell.config.model.init_from
            if source not in found:
                found[source] = _shared_weights(cell.config)
            weights = found[source]
        else:
            require_trusted(run.path, "run --sweep")
            must_run, why = verdict(run.read_state(), held=holder(run) is not None, job=snapshots.get(run.path))
        choices.append(Choice(cell=cell, run=run, runs=must_run, why=why, weights=weights))
    return choices


def _shared_weights(config: Config) -> SharedWeights | None:
    """Return the weights that `model.init_from` names; None without any."""
    source = find_weights(config, os.environ)
    if source is None:
        return None
    return SharedWeights(source)


def _is_new(run: RunDir, sweep: Sweep) -> bool:
    """Return whether a cell must be created, also if an earlier command was killed while it created the cell."""
    if not run.path.exists():
        return True
    if not (run.path / "state.json").exists():
        raise RunFolderError(f"{run.path} exists and holds no run: remove it, or choose another `name`")
    owner = sweep_of(run)
    if owner is not None and owner.name == sweep.name:
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
    has_ended = state.status in ENDED
    if job is not None and not job.is_over:
        job_state = job.info.state if job.info is not None else "UNKNOWN"
        is_ending = has_ended and job_state in ("COMPLETING", "UNKNOWN")
        if not is_ending:
            return False, f"queued ({job_state.lower()})"
    if has_ended:
        return True, state.status
    if state.status == "created":
        return True, "not started"
    return True, "lost"


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
                run = create_run(choice.cell.config, cwd, launcher=launcher, origin=origin, weights=choice.weights)
                made.append(run)
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
            if holder(cell) is None and not cell.slurm.exists():  # created, but not started
                if active:
                    messages.append(f"{cell.name} will not be started")
                continue
            require_mine(cell.path, action)
            messages.append(end(cell, action))
        except UserMistake as mistake:
            messages.append(str(mistake))
    if not messages:
        raise UserMistake(f"no cell of sweep {sweep.name} runs or waits ({sweep.read_state().sentence})")
    return messages
