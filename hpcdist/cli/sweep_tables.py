"""Tables of a sweep: the planned cells, and their status and metrics."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcdist.cli.terminal import console
from hpcdist.files.short_path import short_path
from hpcdist.logs import say

if TYPE_CHECKING:
    from hpcdist.run.folder import RunDir
    from hpcdist.run.sweep import Sweep
    from hpcdist.run.sweep_cells import Choice


def show_choices(sweep: Sweep, choices: Sequence[Choice]) -> None:
    """Print the cells of a sweep and which of them run now."""
    num = sum(choice.runs for choice in choices)
    say(f"sweep {sweep.name}: {len(choices)} cells, {num} to run, in {short_path(sweep.folder.parent)}")
    for index, choice in enumerate([choice for choice in choices if choice.runs]):
        say(f"  {index}: {choice.cell.label} ({choice.why})  {choice.run.name}")
    for choice in choices:
        if not choice.runs:
            say(f"  -: {choice.cell.label} ({choice.why})")


def show_end(sweep: Sweep, choices: Sequence[Choice]) -> int:
    """Print the final table of a sweep. Returns the exit code of the command."""
    cells = [(choice.cell.label, choice.run) for choice in choices]
    names = show_cells(sweep.name, cells, sweep.cells[0].config.checkpoint.monitor)
    if set(names) != {"finished"}:
        say("run the same command again for missing and failed cells")
    if {"failed", "lost", "unreadable"} & set(names):
        return 1
    return 130 if "cancelled" in names else 0


def show_cells(title: str, cells: Sequence[tuple[str, RunDir]], best: str) -> list[str]:
    """Print a table of cells with status and newest metric. Returns the status of each cell.

    Args:
        cells: Label and run folder of each cell; the folder may not exist yet.
        best: The metric that selects the best checkpoint.
    """
    from rich.markup import escape
    from rich.table import Column, Table

    from hpcdist.errors import RunFolderError
    from hpcdist.review.attempts import last_beat
    from hpcdist.review.sweep_description import common_metric
    from hpcdist.run.status import status_of

    beats = [last_beat(run) for _, run in cells]
    metric = common_metric([beat.get("metrics", {}) for beat in beats], best)
    table = Table(Column("cell", no_wrap=True), "status", "step", *([metric] if metric else []), "reason", title=title)
    names = []
    for (label, run), beat in zip(cells, beats, strict=True):
        try:
            exists = os.path.lexists(run.path / "state.json")
            name = status_of(run).name if exists else "missing"
            reason = run.read_state().reason if exists else "not started yet"
        except (RunFolderError, OSError) as error:
            name, reason = "unreadable", str(error)
        names.append(name)
        value = beat.get("metrics", {}).get(metric)
        number = "" if value is None else f"{value:.6g}"
        numbers = [number] if metric else []
        table.add_row(escape(label), names[-1], str(beat.get("step", "")), *numbers, escape(reason))
    console().print(table)
    counts = Counter(names)
    say(f"sweep {title}: {', '.join(f'{number} {name}' for name, number in sorted(counts.items()))}")
    return names
