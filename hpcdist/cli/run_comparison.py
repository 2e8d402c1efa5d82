"""`hpcdist compare`: what differs between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli import completion
from hpcdist.cli.options import RUNS, Json, RunsDir, argument
from hpcdist.cli.terminal import console
from hpcdist.errors import UserMistake
from hpcdist.logs import say

if TYPE_CHECKING:
    from hpcdist.run.folder import RunDir

app = typer.Typer()

ComparedRuns = Annotated[list[str], argument("RUN", "Names of two or more runs, or their folders.", completion.runs)]


@app.command()
def compare(
    runs: ComparedRuns,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Show what differs between runs in config, code, environment and outcome; equal rows are left out.

    Example:  hpcdist compare ddp-2026a ddp-2026b
    """
    from hpcdist.review.comparison import compare
    from hpcdist.tracking.journal.metric_series import read_series

    named = _labelled(runs, runs_dir)
    found = compare(named, {label: read_series(run) for label, run in named.items()})
    if as_json:
        say(json.dumps({"runs": list(named), "differences": found}, indent=2))
    else:
        _show(list(named), found)


def _labelled(names: Sequence[str], runs_dir: Path) -> dict[str, RunDir]:
    """Return the named runs by their shortest unique label. Raises UserMistake for fewer than two runs."""
    from hpcdist.run.lookup import resolve_run

    found = {run.path.resolve(): run for run in (resolve_run(name, runs_dir) for name in names)}
    if len(found) < 2:
        (run,) = found.values()
        raise UserMistake(f"only {run.name} is given: name a second run to compare it with")
    for label in (
        lambda run: run.name,
        lambda run: f"{run.experiment}/{run.name}",
        lambda run: str(run.path),
    ):
        labelled = {label(run): run for run in found.values()}
        if len(labelled) == len(found):
            break
    return labelled


def _show(labels: Sequence[str], differences: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not differences:
        say("the runs do not differ")
    for title, rows in differences.items():
        table = Table(title=title, title_justify="left")
        table.add_column("", overflow="fold")
        for label in labels:
            table.add_column(escape(label), overflow="fold")
        for name, values in rows.items():
            table.add_row(escape(name), *map(escape, values))
        console().print(table)
