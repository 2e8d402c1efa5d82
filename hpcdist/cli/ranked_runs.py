"""Output of `hpcdist runs --sort best`: the results of ended runs and settings, the best one first."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from hpcdist.cli.options import wrapped
from hpcdist.cli.tables import print_table, print_without_lines
from hpcdist.errors import RunFolderError, plural
from hpcdist.review.ranking import Placed, RankedRow, Ranking, Result, measure_in, rankings, read_result
from hpcdist.review.uncertainty import LARGEST_VALUE, LEGEND
from hpcdist.review.verdict import LEGEND as VERDICT_LEGEND
from hpcdist.run.folder import ENDED, RunDir
from hpcdist.tracking.series import read_last_values

_COLUMNS = ("place", "run or setting", "value", "against the best", "at step", "state", "cost")
#: Columns of a terminal from which on the table has lines.
_MIN_WIDE = 120


def rank_runs(runs: Iterable[RunDir], experiment: str | None = None) -> tuple[list[Ranking], list[str]]:
    """Return the rankings of the ended runs, and notes on the other runs.

    Args:
        experiment: only the runs of this experiment; None for all.
    """
    results: list[Result] = []
    notes: list[str] = []
    num_live = 0
    num_without = 0
    for run in runs:
        if experiment not in (None, run.experiment):
            continue
        try:
            state = run.read_state()
            if state.status not in ENDED:
                num_live += 1
                continue
            result = read_result(run, state, read_last_values)
        except (RunFolderError, OSError) as error:
            notes.append(f"{run.experiment}/{run.name} is not listed: {error}")
            continue
        if result.metric and abs(result.value) <= LARGEST_VALUE:
            results.append(result)
        else:
            num_without += 1
    if num_live:
        notes.append(f"{plural(num_live, 'run')} not ended")
    if num_without:
        notes.append(f"{plural(num_without, 'ended run')} without a result")
    return rankings(results, measure_in(lambda result: RunDir(Path(result.folder)))), notes


def as_data(ranked: Iterable[Ranking]) -> list[dict[str, Any]]:
    """Return the rows of all rankings as JSON data: value, verdict against the best, and the runs of each row."""
    return [_row_data(ranking, placed) for ranking in ranked for placed in ranking.placed()]


def _row_data(ranking: Ranking, placed: Placed) -> dict[str, Any]:
    row = placed.row
    return {
        "kind": ranking.title,
        "place": placed.place,
        "name": _name(row),
        "metric": row.best_result.metric,
        "mode": row.best_result.mode,
        "value": row.measured.mean,
        "text": row.value_text,
        "against_best": None if placed.verdict is None else asdict(placed.verdict),
        "cost": row.cost,
        "runs": [
            {"folder": result.folder, "value": result.value, "step": result.step, "status": result.status}
            for result in row.results
        ],
    }


def _name(row: RankedRow) -> str:
    experiment = Path(row.best_result.folder).parent.name
    return f"{experiment}/{row.name}"


def show_rankings(console: Console, ranked: Sequence[Ranking], notes: Sequence[str], runs_dir: Path) -> None:
    """Print a table for each kind of results, and the notes of `rank_runs`."""
    if not ranked:
        notes = [f"no results under {runs_dir.absolute()}", *notes]
    for ranking in ranked:
        rows = [_cells(placed) for placed in ranking.placed()]
        if console.width >= _MIN_WIDE:
            print_table(console, _COLUMNS, rows, title=ranking.title, num_whole=2)
        else:
            console.print(escape(ranking.title), highlight=False, soft_wrap=True)
            joined = [(f"{place}. {name}", *others) for place, name, *others in rows]
            print_without_lines(console, [_COLUMNS[1:], *joined])
    if ranked:
        notes = [*notes, LEGEND, VERDICT_LEGEND]
    for note in notes:
        console.print(escape(wrapped(console, note, 4)), highlight=False, soft_wrap=True)


def _cells(placed: Placed) -> list[str]:
    """Return the cells of a row; the columns are _COLUMNS."""
    row = placed.row
    return [str(placed.place), _name(row), row.value_text, placed.verdict_text, row.steps_text, row.state, row.cost]
