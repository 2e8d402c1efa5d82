"""Sweeps (`--sweep`): the cells one after the other on this machine, or as one Slurm job array."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hpcdist.cli.sweep_tables import show_choices, show_end
from hpcdist.cli.terminal import console
from hpcdist.errors import HpcdistError, TrackingError, UserMistake
from hpcdist.logs import say

if TYPE_CHECKING:
    from hpcdist.config.schema import Config
    from hpcdist.run.folder import RunDir
    from hpcdist.run.sweep import Sweep
    from hpcdist.run.sweep_cells import Choice
    from hpcdist.supervisor.plan import Plan

POLL_S = 0.5
#: Interval between two uploads to MLflow.
UPLOAD_EVERY_S = 5.0


def check_options(sweep: Sequence[str] | None, parallelism: int | None, *, detach: bool) -> None:
    """Raise UserMistake for options that exclude each other."""
    if parallelism is not None and not sweep:
        raise UserMistake("--array-parallelism needs --sweep")
    if detach and sweep:
        raise UserMistake("--sweep and --detach exclude each other: run the sweep in the background with nohup or tmux")


def read_sweep(config: str, overrides: Sequence[str], axes: Sequence[str], cluster: str | None = None) -> Sweep:
    """Return the sweep of a command line, with all its configs checked. Raises UserMistake."""
    from hpcdist.config.loading import load_config
    from hpcdist.run import create
    from hpcdist.run.origin import load_origin
    from hpcdist.run.sweep import make_sweep, parse_axes
    from hpcdist.run.sweep_folder import match

    def load(more: Sequence[str]) -> Config:
        loaded = load_config(config, [*overrides, *more], cluster=cluster)
        create.check_trainer(loaded, Path.cwd())
        return loaded

    found = match(make_sweep(parse_axes(axes, overrides), load, create.label_of))
    return replace(found, origin=load_origin(config, [*overrides, *axes], cluster))


# --- on this machine


def run_sweep(sweep: Sweep, *, dry_run: bool) -> int:
    """Run the remaining cells of a sweep one after the other. Returns the exit code of the command.

    The sweep continues after a failed cell. Ctrl-C or `hpcdist stop SWEEP` ends it after the current cell has saved.
    """
    from hpcdist import logs
    from hpcdist.cli.render import show_plan
    from hpcdist.environments.torch_checks import require_torch
    from hpcdist.run import sweep_cells
    from hpcdist.supervisor.plan import Machine, make_plan
    from hpcdist.tracking.client.uri import resolve_uri

    for cell in sweep.cells:
        require_torch(cell.config, os.environ, on_slurm=False)
    machine = Machine.inspect(os.environ)
    plans = {cell.name: make_plan(cell.config, machine) for cell in sweep.cells}
    first = sweep.cells[0]
    uri = resolve_uri(first.config, os.environ)
    choices = sweep_cells.choose(sweep)
    show_plan(console(), first.config, plans[first.name], sweep.folder, uri, verbose=dry_run)
    show_choices(sweep, choices)
    if dry_run:
        return 0
    to_run = [choice for choice in choices if choice.runs]
    logs.configure()
    terminal = console()
    refused = False
    with _caught_signals() as signals, sweep_cells.hold_sweep(sweep) as folder:
        folder.request.unlink(missing_ok=True)
        sweep_cells.prepare(to_run, folder, Path.cwd(), launcher="local", origin=sweep.origin)
        for number, choice in enumerate(to_run, 1):
            if signals or folder.request.exists():
                break
            terminal.rule(f"cell {number} of {len(to_run)}: {choice.cell.label}", align="left", characters="-")
            try:
                _run_cell(choice, plans[choice.cell.name], uri)
            except HpcdistError as error:
                refused = True
                say(f"{choice.run.name}: {error}")
            if _ended_by_signal(choice.run):
                break
    if any(choice.run.read_state().status == "created" for choice in to_run):
        _close_parent_run(to_run[0].run, uri)
    return show_end(sweep, choices) or int(refused)


def _run_cell(choice: Choice, plan: Plan, uri: str) -> None:
    from hpcdist.cli.render import RunView
    from hpcdist.supervisor import local_run

    view = RunView(console())
    state = local_run.supervise(choice.run, choice.cell.config, plan, lambda: view, os.environ, tracking_uri=uri)
    view.note(state.sentence)


def _ended_by_signal(run: RunDir) -> bool:
    """Whether a signal to this process ended the cell, which ends the sweep; `hpcdist stop CELL` does not."""
    state = run.read_state()
    request = run.attempt(state.attempt).read_request() if state.attempt else None
    return request is not None and request.cause == "signal"


@contextmanager
def _caught_signals() -> Iterator[list[str]]:
    """Collect the names of signals that arrive between two cells; within a cell its supervisor handles them."""
    caught: list[str] = []

    def note(number: int, _frame: FrameType | None) -> None:
        caught.append(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _close_parent_run(run: RunDir, uri: str) -> None:
    """Record the end of an incomplete sweep in its MLflow parent run."""
    from hpcdist.tracking.pages.parent_run import ParentRun

    try:
        parent = ParentRun.of(run, uri)
        if parent is not None:
            parent.refresh()
    except TrackingError as error:
        say(f"the end of the sweep is not in MLflow yet: {error}")


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
        flags: Flags of sbatch for this submission alone.
        check: Checks a submission of this config before anything is written; raises UserMistake.
    """
    from hpcdist.run import sweep_cells
    from hpcdist.slurm.job_components import is_het
    from hpcdist.slurm.submit import submission
    from hpcdist.tracking.client.uri import resolve_uri

    if any(is_het(cell.config) for cell in sweep.cells):
        raise UserMistake(
            "Slurm does not support arrays of heterogeneous jobs: cluster.het=off places the roles in one allocation"
        )
    choices = sweep_cells.choose(sweep)
    to_run = [choice for choice in choices if choice.runs]
    show_choices(sweep, choices)
    if dry_run:
        if to_run:
            _show_script(sweep, to_run, flags, parallelism)
        return 0
    config = sweep.cells[0].config
    # One check is enough unless cells need different datasets: the requests to Slurm are the same.
    for one in {repr(choice.cell.config.data): choice.cell.config for choice in to_run}.values():
        check(one)
    if test:
        return 0
    uri = resolve_uri(config, os.environ)
    if to_run:
        with sweep_cells.hold_sweep(sweep) as folder:
            sweep_cells.prepare(to_run, folder, Path.cwd(), launcher="slurm", origin=sweep.origin)
            try:
                jobs = submission.submit_array(config, folder, [choice.run for choice in to_run], flags, parallelism)
            except BaseException:
                sweep_cells.discard([choice.run for choice in to_run if choice.why == "new"])
                raise
        say(f"{sweep.name} is job{'s' * (len(jobs) > 1)} {jobs[0]}{f' to {jobs[-1]}' * (len(jobs) > 1)}")
        say(_upload([choice.run for choice in to_run], uri) or f"{len(to_run)} cells uploaded to MLflow")
    return _follow(sweep, choices, uri) if follow else 0


def _show_script(sweep: Sweep, to_run: Sequence[Choice], flags: Mapping[str, str], parallelism: int | None) -> None:
    from hpcdist.run.folder import RunDir
    from hpcdist.slurm.submit.batch_script import commented, render
    from hpcdist.slurm.submit.submission_checks import check_config

    config = to_run[0].cell.config
    # A single cell is an ordinary job.
    array = {"map_count": len(to_run), "array_parallelism": parallelism or len(to_run)} if len(to_run) > 1 else {}
    check_config(config, Path.cwd())
    script, _ = render(config, RunDir(sweep.folder), flags, **array)
    _, step = render(config, to_run[0].run)
    say(f"{script}\n# then, in the batch step of task 0 ({to_run[0].run.name}):\n{commented(step)}")


def _upload(runs: Sequence[RunDir], uri: str, *, close_lost: bool = False) -> str:
    """Upload the records of some cells to MLflow. Returns why that failed, or ""."""
    from hpcdist.tracking.shipping.shipper import sync

    try:
        for run in runs:
            sync(run, uri, close_dead=close_lost)
    except TrackingError as error:
        return f"not in MLflow yet: {error}"
    return ""


def _follow(sweep: Sweep, choices: Sequence[Choice], uri: str) -> int:
    """Show the statuses of the cells until all are final, and upload them unless their jobs do."""
    from hpcdist.run.status import RunStatus, StatusWatch
    from hpcdist.tracking.client.uri import is_server

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
            next_upload = time.monotonic() + UPLOAD_EVERY_S
            changed = [choice.run for choice in choices if uploaded.get(choice.run.name) != _version(choice.run)]
            uploaded |= {run.name: _version(run) for run in changed}
            if problem := _upload(changed, uri):
                say(problem)
        if has_ended:
            break
        time.sleep(POLL_S)
    if lost := [choice.run for choice in choices if statuses[choice.run.name].name == "lost"]:
        say(f"no longer in the queue, without a recorded end: {', '.join(run.name for run in lost)}")
        say(_upload(lost, uri, close_lost=True) or f"{len(lost)} cells uploaded to MLflow")
    return show_end(sweep, choices) or int(bool(lost))


def _version(run: RunDir) -> object:
    """Return a value that changes when there is more to upload."""
    return run.read_state(), sum(path.stat().st_size for path in run.journal.glob("*.jsonl"))
