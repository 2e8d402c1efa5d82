"""The table of an experiment's ended runs in its description in MLflow, the best one first.

Each run carries its result as the tag `hpcdist.result`, and one search finds all of them.
"""

import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path

from hpcdist.errors import RunFolderError, plural
from hpcdist.host.json_files import fill, parse_json, read_json
from hpcdist.review.facts import readable
from hpcdist.review.ledger import cost_of
from hpcdist.review.markdown import clock, escaped, link, one_line, run_page, table, with_code
from hpcdist.review.ranking import Measure, Placed, RankedRow, Ranking, Result, measure_in, rankings, read_result
from hpcdist.review.uncertainty import LARGEST_VALUE, LEGEND
from hpcdist.review.verdict import LEGEND as VERDICT_LEGEND
from hpcdist.run.folder import RunDir, State
from hpcdist.tracking.mlflow_client import MlflowRun, all_pages, entities, translated
from hpcdist.tracking.parent_run import PARENT_TAG
from hpcdist.tracking.run_page import NOTE_TAG, as_tracking_error, below_text_of_user
from hpcdist.tracking.series import read_last_values

log = logging.getLogger(__name__)
RESULT_TAG = "hpcdist.result"
#: Only the newest runs of a larger experiment are compared.
MAX_RUNS = 2000
_PAGE = 500
#: Rows in the description of the experiment.
_MAX_ROWS = 10
_COLUMNS = ("Place", "Run or setting", "Value", "Against the best", "At step", "State", "Cost", "Report")
#: Fields of a result that MLflow has in a place of their own, see `_read`.
_NOT_IN_TAG = ("name", "run_id", "folder", "parent", "setting")
_RULE = "A setting of a sweep over seeds counts with their mean, never with its best seed"
_NO_RESULT = (
    "A result is the best value of `checkpoint.monitor` at a checkpoint, or the last value of it, or else of a loss,"
    " that a finished run has logged: by `ctx.log`, `hpcdist.log` or MLflow, or in event files of TensorBoard, csv logs"
    " or lines that match `tracking.stdout_metrics`."
    " `hpcdist compare A B` compares the metrics of two runs."
)
#: The last repetition only reads. Each further one means that another run has ended in the same fraction of a second,
#: or that a process on a machine without these run folders has written its verdicts.
_MAX_WRITES = 10


def _folder_beside(run: RunDir, result: Result) -> RunDir | None:
    """Return the folder of a result if it is beside that of `run`."""
    other = RunDir(run.path.parent / Path(result.folder).name)
    ids = readable(lambda: read_json(other.mlflow)) or {}
    if not result.run_id or ids.get("run_id") != result.run_id:
        return None
    return other


def update(opened: MlflowRun, run: RunDir, state: State) -> None:
    """Write the result of an ended run as a tag, and the table in the description of its experiment.

    Several runs may end at once, and MLflow has no compare-and-set. Each process writes its own result first, then
    searches and writes the description, and repeats both until the description needs no change.

    Raises TrackingError.
    """
    with as_tracking_error():
        result = read_result(run, state, read_last_values)
    left_out = set(_NOT_IN_TAG)
    if not result.metric:
        left_out |= {"value", "step"}
    content = {key: value for key, value in asdict(result).items() if value != "" and key not in left_out}
    opened.set_tags({RESULT_TAG: json.dumps(content)})
    measure = measure_in(partial(_folder_beside, run))
    for _ in range(_MAX_WRITES):
        with translated(opened.uri):
            with_result = f"tags.`{RESULT_TAG}` LIKE '%'"
            pages = all_pages(opened.client.search_runs, [opened.experiment_id], with_result, max_results=_PAGE)
            readings = [_read(mlflow_run) for mlflow_run in islice(pages, MAX_RUNS)]
            results = [other for other in readings if other is not None]
            if not results:
                return
            note = opened.client.get_experiment(opened.experiment_id).tags.get(NOTE_TAG, "")
            text = describe_experiment(run.experiment, results, opened.experiment_id, measure)
            new = below_text_of_user(note, text)
            if new == note:
                return
            opened.client.set_experiment_tag(opened.experiment_id, NOTE_TAG, new)


def _read(run: entities.Run) -> Result | None:
    """Return the result of a run; None, with a line in the log, if its tag is of another program, or cut off."""
    info, tags = run.info, run.data.tags
    setting = tags.get("hpcdist.setting", "")
    if setting == tags.get("hpcdist.run.sweep", ""):
        setting = ""  # without seeds, the cells of a sweep are runs of their own
    known = {
        "name": setting or info.run_name or info.run_id,
        "run_id": info.run_id,
        "folder": tags.get("hpcdist.folder", ""),
        "parent": tags.get(PARENT_TAG, ""),
        "setting": setting,
    }
    try:
        content = parse_json(tags[RESULT_TAG])
        if not isinstance(content, dict):
            raise RunFolderError(f"{RESULT_TAG} is damaged: it holds no keys and values")
        result = fill(Result, {"data": "", "metric": "", **content, **known}, Path(RESULT_TAG))
        _check(result)
    except (ValueError, RecursionError, RunFolderError) as error:
        _note_left_out(info.run_id, one_line(str(error), 200))
        return None
    if abs(result.value) > LARGEST_VALUE:
        return replace(result, metric="")
    return result


def _check(result: Result) -> None:
    """Raise RunFolderError for values that no run has: whoever may write to an experiment may set its tags."""
    if result.mode not in ("max", "min"):
        raise RunFolderError(f"{RESULT_TAG} is damaged: mode cannot be {result.mode[:40]!r}")
    if result.num_samples is None:
        return
    if result.num_samples < 1:
        raise RunFolderError(f"{RESULT_TAG} is damaged: num_samples cannot be {result.num_samples}")
    if not 0 <= result.value <= 1:
        raise RunFolderError(f"{RESULT_TAG} is damaged: value cannot be {result.value}, which is no proportion")


@cache  # each run that ends would repeat the warning
def _note_left_out(run_id: str, reason: str) -> None:
    log.warning("the MLflow run %s is left out of the experiment's table: %s", run_id, reason)


def describe_experiment(experiment: str, results: Sequence[Result], experiment_id: str, measure: Measure) -> str:
    """Return the best result in one line and a table for each kind of results in Markdown, with _MAX_ROWS in all.

    Without a result, the number of runs and their cost.

    Args:
        results: at least one, see `Result`; those of some or all runs may have no value.
    """
    ranked = rankings(results, measure)
    if not ranked:
        return f"No run has a result · {escaped(_total(results))}\n\n{with_code(_NO_RESULT, 600)}"
    num_rows = sum(len(ranking.rows) for ranking in ranked)
    parts = [_headline(ranked[0], num_rows, experiment_id)]
    num_left = _MAX_ROWS
    for ranking in ranked:
        lines = [_cells(placed, experiment_id) for placed in ranking.placed(num_left)]
        if not lines:
            break
        num_left -= len(lines)
        parts += [f"**{escaped(ranking.title, 600)}**", table(_COLUMNS, lines)]
    command = f"hpcdist runs --experiment {shlex.quote(experiment)} --sort best"
    text = (
        f"`{command}` lists all results, `hpcdist compare A B` compares two runs,"
        " and `hpcdist compare SWEEP` the settings of a sweep."
    )
    if num_rows > _MAX_ROWS:
        text = f"{plural(num_rows - _MAX_ROWS, 'more result')}: {text}"
    parts.append(with_code(text, 1000))
    legend = "".join(f"{sentence}. " for sentence in (_total(results), _RULE, LEGEND, VERDICT_LEGEND))
    parts.append(escaped(legend, 1000))
    return "\n\n".join(parts)


def _cells(placed: Placed, experiment_id: str) -> list[str]:
    """Return the cells of a row; the columns are _COLUMNS."""
    row = placed.row
    name = link(row.name, run_page(experiment_id, _run_id(row)))
    report = link("report", run_page(experiment_id, _run_id(row), "report.html"))
    return [str(placed.place), name, row.value_text, placed.verdict_text, row.steps_text, row.state, row.cost, report]


def _run_id(row: RankedRow) -> str:
    """Return the MLflow run that stands for a row: the sweep of a setting, otherwise the run itself."""
    return row.best_result.parent if row.best_result.setting else row.best_result.run_id


def _headline(ranking: Ranking, num_rows: int, experiment_id: str) -> str:
    """Return the best result, its verdict and the number of results. MLflow shows this line alone until a click.

    Its list of experiments shows the source of the first words, so that they have no marks of Markdown.
    """
    best = ranking.rows[0]
    page = link(best.short_name, run_page(experiment_id, _run_id(best)))
    words = f"Best {escaped(best.best_result.metric)}: {best.value_text}, **{page}**"
    if best.state not in ("", "finished"):
        words += f" ({escaped(best.state)})"
    verdict = ranking.beside_next
    if verdict:
        words += f", {escaped(verdict)}"
    return f"{words} · {plural(num_rows, 'result')}"


def _total(results: Sequence[Result]) -> str:
    """Return the number of ended runs and their cost, as of the end of the last one.

    The time of the page itself would make it differ between processes that end at once.
    """
    ended = max(result.ended for result in results)
    words = f"{plural(len(results), 'ended run')} until {clock(ended)}"
    num_without = sum(not result.metric for result in results)
    if 0 < num_without < len(results):
        words += f", {num_without} of them without a result"
    cost = cost_of(results)
    if cost:
        words += f", together: {cost}"
    num_priced = sum(result.price is not None for result in results)
    if cost and 0 < num_priced < len(results):
        words += f" (price of {num_priced})"
    return words
