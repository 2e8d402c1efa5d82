"""Sweeps on this machine (`hpcdist run --sweep`): one cell after the other."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from hpcdist.cli.options import console
from hpcdist.cli.run_views import RunView, show_plan
from hpcdist.cli.sweep import Choice, choose, prepare, show_choices, show_end
from hpcdist.environments.torch_check import require_torch
from hpcdist.errors import HpcdistError, TrackingError
from hpcdist.host import log_files
from hpcdist.host.log_files import say
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold
from hpcdist.run.script_ranks import find_spawn
from hpcdist.run.sweeps import Sweep, write_sweep
from hpcdist.supervisor.local_launcher import LocalLauncher, supervise_locally
from hpcdist.supervisor.plan import Machine, Plan, make_plan
from hpcdist.supervisor.signals import SignalRequests
from hpcdist.tracking.parent_run import ParentRun
from hpcdist.tracking.uri import resolve_uri


def run_sweep(sweep: Sweep, *, dry_run: bool) -> int:
    """Run the remaining cells of a sweep one after the other. Returns the exit code of the command.

    The sweep continues after a failed cell. Ctrl-C or `hpcdist stop SWEEP` ends it after the current cell has saved.
    """
    for cell in sweep.cells:
        require_torch(cell.config, os.environ, on_slurm=False)
    machine = Machine.inspect(os.environ)
    plans = {}
    for cell in sweep.cells:
        plans[cell.name] = make_plan(cell.config, machine, find_spawn(cell.config, [Path.cwd()]))
    first = sweep.cells[0]
    uri = resolve_uri(first.config, os.environ)
    choices = choose(sweep)
    show_plan(console(), first.config, plans[first.name], sweep.folder, uri, verbose=dry_run)
    show_choices(sweep, choices)
    if dry_run:
        return 0
    to_run = [choice for choice in choices if choice.runs]
    log_files.drop_undelivered_output()
    log_files.configure()
    terminal = console()
    has_refused = False
    folder = write_sweep(sweep)
    signals = SignalRequests()  # between two cells; within a cell its supervisor handles them
    with signals.handled(), hold(folder), _Launchers(to_run, plans) as launchers:
        folder.request.unlink(missing_ok=True)
        prepare(to_run, folder, Path.cwd(), launcher="local", origin=sweep.origin)
        for index, choice in enumerate(to_run):
            if signals.request() or folder.request.exists():
                break
            terminal.rule(f"cell {index + 1} of {len(to_run)}: {choice.cell.label}", align="left", characters="-")
            try:
                launchers.supervise(index, uri)
            except HpcdistError as error:
                has_refused = True
                say(f"{choice.run.name}: {error}")
            if _was_signalled(choice.run):
                break
    if any(choice.run.read_state().status == "created" for choice in to_run):
        _close_parent_run(to_run[0].run, uri)
    code = show_end(sweep, choices)
    if code == 0 and has_refused:
        return 1
    return code


def _was_signalled(run: RunDir) -> bool:
    """Return whether a signal to this process ended a cell, which ends the sweep; `hpcdist stop CELL` does not."""
    attempt = run.read_state().attempt
    if not attempt:
        return False
    request = run.attempt(attempt).read_request()
    return request is not None and request.cause == "signal"


class _CellView(RunView):
    """Output during a cell; calls `on_progress` at each heartbeat."""

    def __init__(self, terminal: Console, on_progress: Callable[[], None]) -> None:
        super().__init__(terminal)
        self._on_progress = on_progress

    def progress(self, beat: Mapping[str, Any]) -> None:
        self._on_progress()
        super().progress(beat)


class _Launchers:
    """The launchers of a sweep's cells on this machine.

    While a cell trains, the parent of the next cell's ranks starts and imports torch. A cell has its own parent,
    because cells may differ in code, environment variables and trainer.
    """

    def __init__(self, choices: Sequence[Choice], plans: Mapping[str, Plan]) -> None:
        self._choices = choices
        self._plans = plans
        self._started: dict[int, LocalLauncher] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self._started.values():
            launcher.close()

    def supervise(self, index: int, uri: str) -> None:
        """Supervise a cell until its end. Raises HpcdistError if it is refused."""
        view = _CellView(console(), on_progress=lambda: self._start_parent(index + 1))
        choice = self._choices[index]
        state = supervise_locally(
            choice.run,
            choice.cell.config,
            self._plans[choice.cell.name],
            lambda: view,
            os.environ,
            tracking_uri=uri,
            launcher=self._started.get(index),
        )
        view.note(state.sentence)

    def _start_parent(self, index: int) -> None:
        """Start the parent of a cell's ranks once; the start of the cell reports errors."""
        if index in self._started or index == len(self._choices):
            return
        choice = self._choices[index]
        with suppress(HpcdistError, OSError):
            launcher = LocalLauncher.of(choice.run, choice.cell.config, self._plans[choice.cell.name], os.environ)
            self._started[index] = launcher
            launcher.start_parent()


def _close_parent_run(run: RunDir, uri: str) -> None:
    """Record the end of an incomplete sweep in its MLflow parent run."""
    try:
        parent = ParentRun.of(run, uri)
        if parent is not None:
            parent.refresh()
    except TrackingError as error:
        say(f"the end of the sweep is not in MLflow yet: {error}")
