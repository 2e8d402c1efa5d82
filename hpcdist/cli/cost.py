"""`hpcdist cost`: GPU-hours and core-hours of runs by cause."""

from __future__ import annotations

import csv
import io
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli import completion
from hpcdist.cli.options import RUNS, RunsDir, argument, flag, named, option
from hpcdist.cli.terminal import console
from hpcdist.errors import HpcdistError, RunFolderError, UserMistake
from hpcdist.logs import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcdist.review.cost import Cost, Group
    from hpcdist.run.folder import RunDir

app = typer.Typer()

_Name = Annotated[
    str | None,
    argument(
        "RUN|EXPERIMENT",
        "Name of a run, a sweep or an experiment; by default the newest run, with --by all runs.",
        completion.runs,
    ),
]


@app.command()
def cost(
    name: _Name = None,
    by: Annotated[str | None, option("--by", "GROUPS", "Groups: user, month, experiment, run, or several.")] = None,
    as_csv: Annotated[bool, flag("--csv", "Print CSV with all causes, in hours.")] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Show the allocated GPU-hours, or core-hours of runs without GPUs, by cause.

    Examples:

        hpcdist cost

        hpcdist cost digits

        hpcdist cost --by user,month --csv
    """
    from hpcdist.review.cost import costs
    from hpcdist.run.slurm_job import update_job_starts

    groups = _groups(by or "run")
    if name is None and by is None:
        name = named(None, runs_dir)
    runs, notes = _chosen(name, runs_dir)
    for run in runs:
        with suppress(HpcdistError, OSError):  # a folder of another user, or a damaged one
            update_job_starts(run)
    found, without, problems = costs(runs, groups)
    if problems and not found:
        raise RunFolderError(problems[0])
    if as_csv:
        _write_csv(found, groups)
    else:
        _show(found, groups)
    if without:
        names = ", ".join(run.name for run in without[:3]) + ", …" * (len(without) > 3)
        notes.append(f"{len(without)} runs without a ledger are left out, such as runs that have not started: {names}")
    for note in (*notes, *problems):
        say(note, error=True)


def _groups(by: str) -> list[Group]:
    from hpcdist.review.cost import GROUPS

    chosen = [group for group in GROUPS if group in by.split(",")]
    if unknown := [word for word in by.split(",") if word not in GROUPS]:
        raise UserMistake(f"--by {by}: {unknown[0]!r} is not one of {', '.join(GROUPS)}")
    return chosen


def _chosen(name: str | None, runs_dir: Path) -> tuple[list[RunDir], list[str]]:
    """Return the runs that a name stands for, and notes on runs that cannot be read."""
    from hpcdist.run.lookup import list_runs, resolve
    from hpcdist.run.sweep_folder import SweepDir

    listing = list_runs(runs_dir)
    chosen = [run for run in listing.runs if name in (None, run.experiment)]
    if name is None or chosen:
        return chosen, [listing.note] if listing.note else []
    found = resolve(name, runs_dir)
    return ([run for run in found.cells() if run.config.is_file()] if isinstance(found, SweepDir) else [found]), []


def _show(found: Mapping[tuple[str, ...], Cost], groups: Sequence[Group]) -> None:
    if not found:
        say("no runs with a ledger")
    elif len(found) == 1:
        ((key, one),) = found.items()
        _show_one(" ".join(key[:-1]), one)
    else:
        _show_groups(found, groups)


def _show_one(title: str, one: Cost) -> None:
    """Print one line for each cause."""
    from rich.table import Column, Table

    say(title)
    table = Table("cause", Column(f"{one.unit}-hours", justify="right"), Column("%", justify="right"))
    for cause, hours in one.hours.items():
        table.add_row(cause, _hours(hours), f"{hours / one.allocated:.1%}")
    table.add_section()
    table.add_row("allocated", _hours(one.allocated), "100.0%")
    console().print(table)
    say(f"goodput: {_goodput(one)}, in the queue: {_hours(one.queue_hours)} h", end="")
    say("" if one.energy_kwh is None else f", energy: {one.energy_kwh:.3g} kWh")


def _show_groups(found: Mapping[tuple[str, ...], Cost], groups: Sequence[Group]) -> None:
    """Print one line for each group, with the largest losses if the terminal has no room for all causes."""
    from rich.markup import escape
    from rich.table import Column, Table

    out = console()
    causes = [cause for cause in _causes() if any(one.hours[cause] for one in found.values())]
    is_wide = out.width >= 140
    has_energy = any(one.energy_kwh is not None for one in found.values())
    names = [*(causes if is_wide else ["largest losses"]), "queue", *["kWh"] * has_energy]
    columns = [Column(name, justify="right", overflow="fold") for name in ("hours", "goodput", *names)]
    # Cells of a sweep differ at the end of their names, so names are folded and not cut.
    table = Table(*(Column(group, overflow="fold") for group in groups), Column("unit", no_wrap=True), *columns)
    for key, one in found.items():
        cells = [*map(escape, key), _hours(one.allocated), _goodput(one)]
        cells += [_hours(one.hours[cause]) for cause in causes] if is_wide else [_losses(one)]
        cells.append(_hours(one.queue_hours))
        if has_energy:
            cells.append("" if one.energy_kwh is None else f"{one.energy_kwh:.3g}")
        table.add_row(*cells)
    out.print(table)


def _losses(one: Cost) -> str:
    """Return the two causes other than compute with the most hours."""
    others = sorted((hours, cause) for cause, hours in one.hours.items() if cause != "compute" and hours > 0)
    return ", ".join(f"{cause} {hours / one.allocated:.0%}" for hours, cause in reversed(others[-2:]))


def _goodput(one: Cost) -> str:
    return "not measured" if one.goodput is None else f"{one.goodput:.1%}"


def _hours(hours: float) -> str:
    return f"{hours:.2f}" if hours >= 1 or hours == 0 else f"{hours:.2g}"


def _write_csv(found: Mapping[tuple[str, ...], Cost], groups: Sequence[Group]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*groups, "unit", "runs", "allocated", "goodput", *_causes(), "queue", "energy_kwh"])
    for key, one in found.items():
        values = [*one.hours.values(), one.queue_hours]
        goodput = "" if one.goodput is None else f"{one.goodput:.6f}"
        energy = "" if one.energy_kwh is None else f"{one.energy_kwh:.6f}"
        numbers = (f"{value:.6f}" for value in values)
        writer.writerow([*key, one.num_runs, f"{one.allocated:.6f}", goodput, *numbers, energy])
    say(text.getvalue(), end="")


def _causes() -> tuple[str, ...]:
    from hpcdist.review.causes import CAUSES

    return CAUSES
