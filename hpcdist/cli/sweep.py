"""`--sweep`: the cells of a sweep one after the other on this machine, or as one job array on Slurm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hpcdist.cli.launch import comment
from hpcdist.cli.options import console
from hpcdist.cli.sweep_tables import say, show_choices, show_end
from hpcdist.errors import HpcdistError, TrackingError, UserMistake

if TYPE_CHECKING:
    from hpcdist.config.schema import Config
    from hpcdist.run.folder import RunDir
    from hpcdist.run.sweep import Sweep
    from hpcdist.run.sweep_cells import Choice
    from hpcdist.supervisor.plan import Plan

#: Who asks a run to stop when this process is told to end: see supervisor/supervisor.py.
_BY_SIGNAL = ("SIGINT", "SIGTERM", "SIGHUP", "signal")
LOOK_EVERY_S = 0.5
#: Interval of shipping.
SHIP_EVERY_S = 5.0


def check_options(sweep: Sequence[str] | None, parallelism: int | None, *, detach: bool) -> None:
    """Raise UserMistake for options that make no sense together."""
    if parallelism is not None and not sweep:
        raise UserMistake("--array-parallelism is for a job array: it needs --sweep")
    if detach and sweep:
        raise UserMistake("--detach is for a single run: leave a sweep in the background with nohup or tmux")


def read_sweep(config: str, overrides: Sequence[str], axes: Sequence[str], cluster: str | None = None) -> Sweep:
    """The sweep that a command line means, checked as a whole; nothing is made. Raises UserMistake."""
    from hpcdist.config.loading import load_config
    from hpcdist.run import create
    from hpcdist.run.sweep import make_sweep, parse_axes
    from hpcdist.run.sweep_folder import match

    def load(more: Sequence[str]) -> Config:
        loaded = load_config(config, [*overrides, *more], cluster=cluster)
        create.check_trainer(loaded, Path.cwd())
        return loaded

    return match(make_sweep(parse_axes(axes, overrides), load, create.label_of))


# --- on this machine


def run_sweep(sweep: Sweep, *, dry_run: bool) -> int:
    """Run what is left of a sweep here, one cell after the other; returns the exit code of the command.

    A cell that fails does not end the sweep; being told to end (Ctrl-C, `hpcdist stop SWEEP`) does, once the running
    cell has saved.
    """
    from hpcdist import logs
    from hpcdist.cli.render import show_plan
    from hpcdist.run import sweep_cells
    from hpcdist.supervisor.plan import Machine, make_plan
    from hpcdist.tracking.uri import choose_uri

    machine = Machine.inspect(os.environ)
    plans = {cell.name: make_plan(cell.config, machine) for cell in sweep.cells}
    first = sweep.cells[0]
    uri = choose_uri(os.environ, first.config.tracking.uri, Path(first.config.runs_dir))
    choices = sweep_cells.choose(sweep)
    show_plan(console(), first.config, plans[first.name], sweep.folder, uri, verbose=dry_run)
    show_choices(sweep, choices)
    if dry_run:
        return 0
    to_run = [choice for choice in choices if choice.runs]
    logs.configure()
    terminal = console()
    refused = False
    with _told_to_end() as told, sweep_cells.hold_sweep(sweep) as there:
        there.request.unlink(missing_ok=True)
        sweep_cells.prepare(to_run, there, Path.cwd(), launcher="local")
        for number, choice in enumerate(to_run, 1):
            if told or there.request.exists():
                break
            terminal.rule(f"cell {number} of {len(to_run)}: {choice.cell.label}", align="left", characters="-")
            try:
                _run_cell(choice, plans[choice.cell.name])
            except HpcdistError as error:
                refused = True
                terminal.print(f"{choice.run.name}: {error}", markup=False, highlight=False, soft_wrap=True)
            if _ended_by_signal(choice.run):
                break
    if any(choice.run.read_state().status == "created" for choice in to_run):
        _tell_parent(to_run[0])
    return show_end(sweep, choices) or int(refused)


def _run_cell(choice: Choice, plan: Plan) -> None:
    from hpcdist.cli.render import RunView
    from hpcdist.supervisor import local_run

    with RunView(console()) as view:
        state = local_run.supervise(choice.run, choice.cell.config, plan, view, os.environ)
        view.note(f"{state.status}: {state.reason}")


def _ended_by_signal(run: RunDir) -> bool:
    """Whether what ended the cell was meant for all of the sweep, unlike `hpcdist stop CELL`."""
    state = run.read_state()
    request = run.attempt(state.attempt).read_request() if state.attempt else None
    return request is not None and request.by in _BY_SIGNAL


@contextmanager
def _told_to_end() -> Iterator[list[str]]:
    """Signals that come between two cells end the sweep in order; within a cell its supervisor takes them."""
    told: list[str] = []

    def note(number: int, _frame: FrameType | None) -> None:
        told.append(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield told
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _tell_parent(choice: Choice) -> None:
    """Cells are left that nobody will run now: the sweep is over for MLflow, too."""
    from hpcdist.tracking.parent import Parent
    from hpcdist.tracking.uri import choose_uri

    config = choice.cell.config
    try:
        parent = Parent.of(choice.run, choose_uri(os.environ, config.tracking.uri, Path(config.runs_dir)))
        if parent is not None:
            parent.refresh()
    except TrackingError as error:
        print(f"MLflow does not know of the sweep's end yet: {error}")


# --- on Slurm


def submit_sweep(
    sweep: Sweep,
    flags: Mapping[str, str],
    ask: Callable[[Config], None],
    *,
    parallelism: int | None,
    dry_run: bool,
    test: bool,
    follow: bool,
) -> int:
    """Submit what is left of a sweep as one job array; returns the exit code of the command.

    Args:
        flags: sbatch flags of this submission alone.
        ask: looks whether Slurm would take a job of this config, before anything is made; raises UserMistake.
    """
    from hpcdist.run import sweep_cells
    from hpcdist.slurm.job_components import is_het
    from hpcdist.slurm.submit import submission

    if any(is_het(cell.config) for cell in sweep.cells):
        raise UserMistake(
            "Slurm has no job arrays of heterogeneous jobs: cluster.het=off places the roles in one allocation"
        )
    choices = sweep_cells.choose(sweep)
    to_run = [choice for choice in choices if choice.runs]
    show_choices(sweep, choices)
    if dry_run:
        if to_run:
            _show_script(sweep, to_run, flags, parallelism)
        return 0
    config = sweep.cells[0].config
    # Once, unless cells need different datasets: what is asked of Slurm is the same for all.
    for one in {repr(choice.cell.config.data): choice.cell.config for choice in to_run}.values():
        ask(one)
    if test:
        return 0
    if to_run:
        with sweep_cells.hold_sweep(sweep) as there:
            sweep_cells.prepare(to_run, there, Path.cwd(), launcher="slurm")
            try:
                jobs = submission.submit_array(config, there, [choice.run for choice in to_run], flags, parallelism)
            except BaseException:
                sweep_cells.discard([choice.run for choice in to_run if choice.is_new])
                raise
        print(f"{sweep.name} is job{'s' * (len(jobs) > 1)} {jobs[0]}{f' to {jobs[-1]}' * (len(jobs) > 1)}")
        print(_ship([choice.run for choice in to_run], config))
    return _follow(sweep, choices) if follow else 0


def _show_script(sweep: Sweep, to_run: Sequence[Choice], flags: Mapping[str, str], parallelism: int | None) -> None:
    from hpcdist.run.folder import RunDir
    from hpcdist.slurm.submit.batch_script import render
    from hpcdist.slurm.submit.checks import check_config

    config = to_run[0].cell.config
    # A single cell is an ordinary job.
    array = {"map_count": len(to_run), "array_parallelism": parallelism or len(to_run)} if len(to_run) > 1 else {}
    check_config(config, Path.cwd())
    script, _ = render(config, RunDir(sweep.folder), flags, **array)
    _, step = render(config, to_run[0].run)
    print(f"{script}\n# then, in the batch step of task 0 ({to_run[0].run.name}):\n{comment(step)}")


def _ship(runs: Sequence[RunDir], config: Config, *, close_lost: bool = False) -> str:
    """Let MLflow have what there is of some cells; a sentence."""
    from hpcdist.tracking.shipper import sync
    from hpcdist.tracking.uri import choose_uri

    try:
        uri = choose_uri(os.environ, config.tracking.uri, Path(config.runs_dir))
        for run in runs:
            sync(run, uri, close_dead=close_lost)
    except TrackingError as error:
        return f"not in MLflow yet: {error}"
    return f"MLflow: {len(runs)} cells shipped"


def _follow(sweep: Sweep, choices: Sequence[Choice]) -> int:
    """Show the cells' statuses until all are final, and ship them unless their jobs do."""
    from hpcdist.run.status import RunStatus, StatusWatch
    from hpcdist.tracking.uri import choose_uri, is_server

    config = sweep.cells[0].config
    ships = not is_server(choose_uri(os.environ, config.tracking.uri, Path(config.runs_dir)))
    watch = StatusWatch()
    statuses: dict[str, RunStatus] = {}
    shown: dict[str, str] = {}
    shipped: dict[str, object] = {}
    next_pass = 0.0
    while True:
        pending = [c for c in choices if not (c.run.name in statuses and statuses[c.run.name].final)]
        for choice, status in zip(pending, watch.poll([choice.run for choice in pending]), strict=True):
            statuses[choice.run.name] = status
            if shown.get(choice.run.name) != (text := f"{status.name} {status.reason}".strip()):
                shown[choice.run.name] = text
                say(f"{choice.cell.label}: {text}")
        is_over = all(status.final for status in statuses.values())
        if ships and (is_over or time.monotonic() >= next_pass):
            next_pass = time.monotonic() + SHIP_EVERY_S
            changed = [choice.run for choice in choices if shipped.get(choice.run.name) != _mark(choice.run)]
            shipped |= {run.name: _mark(run) for run in changed}
            if changed and (sentence := _ship(changed, config)).startswith("not"):
                say(sentence)
        if is_over:
            break
        time.sleep(LOOK_EVERY_S)
    if lost := [choice.run for choice in choices if statuses[choice.run.name].name == "lost"]:
        say(f"jobs ended before their supervisors recorded a status: {', '.join(run.name for run in lost)}")
        say(_ship(lost, config, close_lost=True))
    return show_end(sweep, choices) or int(bool(lost))


def _mark(run: RunDir) -> object:
    """Something that changes when there is more to ship."""
    return run.read_state(), sum(path.stat().st_size for path in run.journal.glob("*.jsonl"))
