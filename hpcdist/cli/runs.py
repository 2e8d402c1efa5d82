"""Commands on existing runs: list, show, follow, stop, save, profile."""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpcdist.cli import options
from hpcdist.cli.options import argument, console, named, option
from hpcdist.errors import UserMistake, plural
from hpcdist.host.log_files import say
from hpcdist.host.ownership import is_mine, require_mine

if TYPE_CHECKING:
    from hpcdist.run.rank_requests import LiveCommand
    from hpcdist.run.sweeps import SweepDir

app = typer.Typer()
#: Time between two looks at the results of a command: the ranks may be on other hosts, which report them by files.
_POLL_S = 0.5


@app.command()
def runs(
    experiment: options.Experiment = None,
    sort: Annotated[
        Literal["created", "best"],
        option("--sort", "COLUMN", "created: all runs, the newest last; best: results of ended runs, the best first."),
    ] = "created",
    as_json: options.Json = False,
    html: Annotated[
        Path | None,
        option("--html", "FILE", "Write a page on the runs of the last 4 weeks instead: hours by user and cause."),
    ] = None,
) -> None:
    """List runs with their best value of checkpoint.monitor, cost, start and duration, the newest last.

    With --sort best: the results of ended runs as in MLflow's table of an experiment, here over all experiments
    unless --experiment names one.

    Examples:
        hpcdist runs
        hpcdist runs --experiment digits --sort best
        hpcdist runs --html usage.html
    """
    from hpcdist.cli.ranked_runs import as_data, rank_runs, show_rankings
    from hpcdist.cli.run_views import read_rows, show_runs
    from hpcdist.run.lookup import list_runs

    folder = options.runs_dir()
    if html is not None:
        if as_json or sort != "created":
            raise UserMistake(f"--html {html} writes a page instead of a list: leave out --json and --sort")
        _write_page(html, folder, experiment)
        return
    all_runs, note = list_runs(folder)
    notes_on_all = [note] if note else []
    if sort == "best":
        ranked, notes = rank_runs(all_runs, experiment)
        notes += notes_on_all
        if as_json:
            say(json.dumps({"results": as_data(ranked), "notes": notes}, indent=2))
        else:
            show_rankings(console(), ranked, notes, folder)
        return
    rows, notes = read_rows(all_runs, experiment)
    notes += notes_on_all
    if as_json:
        say(json.dumps({"runs": rows, "notes": notes}, indent=2))
    else:
        show_runs(console(), rows, notes, folder)


def _write_page(path: Path, runs_dir: Path, experiment: str | None) -> None:
    """Write the page on the runs of all users, as far as this user can read them, and print its path."""
    from hpcdist.host.files import write_atomic
    from hpcdist.review.fleet import render_fleet
    from hpcdist.run.lookup import list_runs_of_all

    own, others, num_private = list_runs_of_all(runs_dir)
    others = [run for run in others if not run.path.is_symlink()]  # it may lead to a run that counts already
    runs = [run for run in (*own, *others) if experiment in (None, run.experiment)]
    note = ""
    if num_private:
        note = f"{plural(num_private, 'folder')} of other users cannot be read: their runs do not count."
    write_atomic(path.expanduser(), render_fleet(runs, time.time(), note))
    say(str(path))


@app.command()
def status(run: options.OptionalRunName = None, as_json: options.Json = False) -> None:
    """Show a run's state, the last step of each rank and the checkpoints, or the cells of a sweep.

    Examples:
        hpcdist status
        hpcdist status digits/first --json
    """
    from hpcdist.cli.run_views import read_status, show_status
    from hpcdist.run.lookup import resolve
    from hpcdist.run.sweeps import SweepDir

    folder = resolve(named(run), options.runs_dir())
    if isinstance(folder, SweepDir):
        from hpcdist.cli.sweep import show_cells

        if as_json:
            say(json.dumps(_read_sweep_status(folder), indent=2))
        else:
            show_cells(folder)
    elif as_json:
        say(json.dumps(read_status(folder), indent=2))
    else:
        show_status(console(), folder)


def _read_sweep_status(sweep: "SweepDir") -> dict[str, object]:
    """Return the settings of a sweep over seeds, and the statuses of the cells that have a folder."""
    from hpcdist.cli.run_views import read_status
    from hpcdist.review.sweep_facts import read_sweep_facts
    from hpcdist.tracking.series import read_last_values

    facts = read_sweep_facts(sweep, sweep.read_state(), read_last_values)
    cells = []
    for cell, run in zip(facts.cells, sweep.cells(), strict=True):
        if os.path.lexists(run.config):
            cells.append({"label": cell.label} | read_status(run))
    settings = []
    if facts.has_seeds:
        for row in facts.rows:
            num_cells = len(row.cells)
            settings.append({"label": row.name, "values": row.values, "num_cells": num_cells, "text": row.value_text})
    return {"sweep": sweep.name, "metric": facts.monitor, "settings": settings, "cells": cells}


@app.command()
def logs(
    run: options.OptionalRunName = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Rank; the one that failed first by default, else 0.")
    ] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Attempt; the last one by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
) -> None:
    """Print the log of a rank: unchanged into a pipe or file, as plain text on a terminal.

    Examples:
        hpcdist logs --rank 1
        hpcdist logs digits/first -f
        hpcdist logs digits/first | less -R
    """
    from hpcdist.cli.run_views import stream_log
    from hpcdist.run.lookup import resolve_run

    folder = resolve_run(named(run), options.runs_dir())
    for text in stream_log(folder, rank, attempt, follow=follow):
        say(text, end="", raw=not sys.stdout.isatty())


@app.command()
def follow(run: options.OptionalRunName = None) -> int:
    """Show a run's state and progress until it ends; Ctrl-C leaves it running.

    Examples:
        hpcdist follow
        hpcdist follow digits/first && ./evaluate.sh
    """
    from hpcdist.cli.run_views import follow_to_end
    from hpcdist.config.loading import load_run_config
    from hpcdist.run.kept_secrets import kept
    from hpcdist.run.lookup import resolve_run
    from hpcdist.run.status import status_of

    folder = resolve_run(named(run), options.runs_dir())
    if status_of(folder).name == "created":
        raise UserMistake(f"run {folder.name} was never started: `{folder.resume_command}` starts it")
    env: Mapping[str, str] = {}
    if is_mine(folder.path):  # the config of another user must not receive the caller's secrets
        env = {**kept(folder), **os.environ}
    config = load_run_config(folder.config, [], env, require_secrets=False)
    return follow_to_end(folder, config)


@app.command()
def stop(
    run: Annotated[
        str | None,
        argument("RUN", "Name, prefix or folder; by default the newest run that runs or waits.", options.runs),
    ] = None,
) -> None:
    """Save a checkpoint and stop a run, or remove it from the queue; of a sweep, all its cells.

    `hpcdist resume` continues the run from the checkpoint. A plain script gets SIGTERM and may then save.

    Example:  hpcdist stop
    """
    _end(named(run, active=True), "stop")


@app.command()
def cancel(run: options.RunName) -> None:
    """End a run at once, without a last checkpoint; of a sweep, all its cells.

    Steps since the newest checkpoint are lost.

    Example:  hpcdist cancel ddp-2026
    """
    _end(run, "cancel")


def _end(name: str, action: Literal["stop", "cancel"]) -> None:
    from hpcdist.run.lookup import resolve
    from hpcdist.run.status import end
    from hpcdist.run.sweeps import SweepDir

    folder = resolve(name, options.runs_dir())
    require_mine(folder.path, action)
    if isinstance(folder, SweepDir):
        from hpcdist.cli.sweep import end_sweep

        say("\n".join(end_sweep(folder, action)))
    else:
        say(end(folder, action))


@app.command()
def save(run: options.RunName) -> int:
    """Save a checkpoint while the run continues, and wait until it is on disk.

    Example:  hpcdist save ddp-2026
    """
    from hpcdist.run.lease import user_name
    from hpcdist.run.rank_requests import LiveCommand

    return _send(run, LiveCommand(action="save", by=user_name()))


@app.command()
def profile(
    run: options.RunName,
    steps: Annotated[int, option("--steps", "N", "Training steps to profile.")] = 10,
    ranks: Annotated[str, option("--ranks", "RANKS", "Ranks to profile, separated by commas.")] = "0",
) -> int:
    """Profile some steps of a running run with torch.profiler, and wait for the traces.

    The run continues; its steps take longer during the profile. The traces, one for each rank, are artifacts of the
    run. Open them at https://ui.perfetto.dev.

    Examples:
        hpcdist profile ddp-2026
        hpcdist profile ddp-2026 --steps 10 --ranks 0,3
    """
    from hpcdist.run.rank_requests import parse_ranks, profile_command

    return _send(run, profile_command(steps, parse_ranks(ranks, "--ranks")))


def _send(name: str, command: "LiveCommand") -> int:
    """Send a command to an own run, wait for its results and print them. Returns the exit code."""
    from hpcdist.run.lease import holder
    from hpcdist.run.lookup import resolve_run
    from hpcdist.run.rank_requests import outcome_of, send_command

    run = resolve_run(name, options.runs_dir())
    require_mine(run.path, command.action)
    attempt, number = send_command(run, command)
    while True:
        state = run.read_state()
        is_over = state.attempt != attempt.number or state.status != "running" or holder(run) is None
        outcome = outcome_of(attempt, number, command.ranks, is_over=is_over, folder=str(run.path))
        if outcome is not None:
            lines, all_obeyed = outcome
            say("\n".join(lines))
            return 0 if all_obeyed else 1
        time.sleep(_POLL_S)
