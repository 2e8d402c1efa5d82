"""The table of an experiment's ended runs in its description in MLflow, the best one first.

Each run carries its result as the tag `hpcdist.result`, and one search finds all of them.
"""

import json
import logging
import shlex
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import groupby, islice
from pathlib import Path

from hpcdist.errors import RunFolderError, plural
from hpcdist.host.json_files import fill, parse_json, read_json
from hpcdist.review.description import dataset_text
from hpcdist.review.facts import read_facts, readable
from hpcdist.review.ledger import cost_of, price_of, read_ledger
from hpcdist.review.markdown import clock, escaped, link, one_line, run_page, table, with_code
from hpcdist.review.uncertainty import LARGEST_VALUE, LEGEND, evaluated_on, mean_text, share_error, with_error
from hpcdist.review.verdict import LEGEND as VERDICT_LEGEND
from hpcdist.review.verdict import Measured, judge
from hpcdist.run.config_origin import is_generated
from hpcdist.run.folder import RunDir, State
from hpcdist.tracking.mlflow_client import MlflowRun, all_pages, entities, translated
from hpcdist.tracking.parent_run import PARENT_TAG
from hpcdist.tracking.run_page import NOTE_TAG, as_tracking_error, below_text_of_user

log = logging.getLogger(__name__)
RESULT_TAG = "hpcdist.result"
#: Only the newest runs of a larger experiment are compared.
MAX_RUNS = 2000
_PAGE = 500
#: Rows in the description of the experiment.
_MAX_ROWS = 20
_COLUMNS = ("Place", "Run or setting", "Value", "At step", "Seeds", "Ranks", "State", "Cost", "Started (UTC)")
_RULE = "A setting of a sweep over seeds counts with their mean, never with its best seed"
#: Each repetition means that another run has ended in the same fraction of a second.
_MAX_WRITES = 10


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of an ended run: its best value, of which metric and data, and its cost."""

    metric: str  #: empty without a result, as of a run that failed early: only its cost counts
    mode: str  #: `max` or `min`
    value: float = 0.0
    data: str  #: of the evaluation, see `dataset_text`; empty if unknown
    num_samples: int | None  #: of which the value is a proportion
    ended: float  #: seconds since the epoch
    allocated_s: float
    unit: str
    price_per_hour: str = ""
    step: int = 0  #: of the value; 0 if it is not recorded, as the next two
    ranks: int = 0
    status: str = ""  #: with which the run ended
    name: str = ""  #: of the run, or its setting
    run_id: str = ""
    started: float = 0.0
    folder: str = ""
    parent: str = ""  #: MLflow run of its sweep
    setting: str = ""  #: of a sweep over seeds; empty for a run of its own

    @property
    def kind(self) -> tuple[str, ...]:
        """Results of the same kind are comparable."""
        rule = "lowest is best" if self.mode == "min" else "highest is best"
        return self.metric, self.data, rule

    @property
    def sort_value(self) -> float:
        """The value with the sign by which the best result comes first."""
        return self.value if self.mode == "min" else -self.value

    @property
    def price(self) -> tuple[str, float, str] | None:
        """The price as `price_of` returns it; None without a price per hour."""
        return price_of(self.price_per_hour, self.allocated_s)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run, or a setting of a sweep with all its seeds: the best row is a setting, never a seed."""

    results: tuple[Result, ...]  #: the best one first
    measured: Measured = field(compare=False)  #: without per-sample results

    @property
    def best(self) -> Result:
        return self.results[0]

    @property
    def short_name(self) -> str:
        """The name without a generated part: `lr=0.1` of `lr=0.1 (ddp-20261122-121700-1a2b)`."""
        short, _, rest = self.best.name.removesuffix(")").rpartition(" (")
        if short and is_generated(rest):
            return short
        return self.best.name

    @property
    def run_id(self) -> str:
        """The MLflow run that stands for the row: the sweep of a setting, otherwise the run itself."""
        return self.best.parent if self.best.setting else self.best.run_id

    @property
    def order(self) -> tuple[float, float, str]:
        """The key by which the best row comes first; means of equal values differ by the rounding of floats."""
        mean = float(f"{self.measured.mean:.12g}")
        return mean if self.best.mode == "min" else -mean, self.best.ended, self.best.run_id

    @property
    def cells(self) -> tuple[str, ...]:
        """The value with its error and step, the number of seeds, ranks, state, cost, start of the first run."""
        value = self.best.value
        text = with_error(value, share_error(value, self.best.num_samples), f"{value:.6g}")
        if len(self.results) > 1:
            text = mean_text(self.measured.values)
        step = _span([result.step for result in self.results])
        seeds = str(len(self.results)) if self.best.setting else ""
        ranks = _span([result.ranks for result in self.results])
        started = clock(min(result.started for result in self.results)).removesuffix(" UTC")
        return text, step, seeds, ranks, self.state, cost_of(self.results), started

    @property
    def state(self) -> str:
        """The statuses with which the runs ended."""
        return ", ".join(sorted({result.status for result in self.results if result.status}))


def _span(numbers: Sequence[int]) -> str:
    """Return `138`, or `90 to 138` for several numbers; empty if none is recorded."""
    known = {number for number in numbers if number}
    if not known:
        return ""
    lowest, highest = min(known), max(known)
    if lowest == highest:
        return f"{lowest:,}"
    return f"{lowest:,} to {highest:,}"


Measure = Callable[[Row], Measured]


def _measure(run: RunDir, row: Row) -> Measured:
    """Return the values of a row, with the per-sample results of a run whose folder is beside that of `run`."""
    if row.best.setting:
        return row.measured
    other = _run_beside(run, row.best)
    if other is None:
        return row.measured
    facts = readable(lambda: read_facts(other))
    if facts is None or facts.best is None:
        return row.measured
    if (facts.monitor, facts.best_value) != (row.best.metric, row.best.value):
        return row.measured
    return facts.measured()


def _run_beside(run: RunDir, result: Result) -> RunDir | None:
    """Return the run of a result if its folder is beside that of `run`."""
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
        result = _result_of(run, state)
    left_out = {"started"}
    if not result.metric:
        left_out.add("value")
    content = {key: value for key, value in asdict(result).items() if value != "" and key not in left_out}
    opened.set_tags({RESULT_TAG: json.dumps(content)})
    measure = cache(partial(_measure, run))
    for _ in range(_MAX_WRITES):
        with translated(opened.uri):
            with_result = f"tags.`{RESULT_TAG}` LIKE '%'"
            pages = all_pages(opened.client.search_runs, [opened.experiment_id], with_result, max_results=_PAGE)
            readings = [_read(mlflow_run) for mlflow_run in islice(pages, MAX_RUNS)]
            results = [other for other in readings if other is not None]
            rows = make_rows(results)
            if not rows:
                return
            note = opened.client.get_experiment(opened.experiment_id).tags.get(NOTE_TAG, "")
            text = describe_experiment(run.experiment, rows, results, opened.experiment_id, measure)
            new = below_text_of_user(note, text)
            if new == note:
                return
            opened.client.set_experiment_tag(opened.experiment_id, NOTE_TAG, new)


def _result_of(run: RunDir, state: State) -> Result:
    """Return the result of an ended run from its folder."""
    facts = read_facts(run, state)
    ledger = read_ledger(run)
    data = evaluated_on(facts.monitor, facts.datasets)
    without_value = Result(
        metric="",
        mode=facts.monitor_mode,
        ranks=state.world_size,
        status=state.status,
        data="" if data is None else dataset_text(data),
        num_samples=None,
        ended=state.ended or 0.0,
        allocated_s=ledger.allocated_s,
        unit=ledger.unit,
        price_per_hour=ledger.price_per_hour,
    )
    if facts.best is None:
        return without_value
    return replace(
        without_value,
        metric=facts.monitor,
        value=facts.best_value,
        step=facts.best.step,
        num_samples=facts.num_evaluated,
    )


def _read(run: entities.Run) -> Result | None:
    """Return the result of a run; None, with a line in the log, if its tag is of another program, or cut off."""
    info, tags = run.info, run.data.tags
    setting = tags.get("hpcdist.setting", "")
    if setting == tags.get("hpcdist.run.sweep", ""):
        setting = ""  # without seeds, the cells of a sweep are runs of their own
    known = {
        "name": setting or info.run_name or info.run_id,
        "run_id": info.run_id,
        "started": (info.start_time or 0) / 1000,
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


def make_rows(results: Iterable[Result]) -> list[Row]:
    """Return the runs and settings, the best of each kind first; the kind with most rows comes first.

    The order depends on the results alone, so that all processes write the same description.
    """
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        if result.metric:
            row = (result.setting, result.parent) if result.setting else (result.run_id,)
            groups.setdefault((*row, *result.kind), []).append(result)
    rows = []
    for group in groups.values():
        group.sort(key=lambda result: (result.sort_value, result.ended, result.run_id))
        measured = Measured(values=tuple(result.value for result in group), mode=group[0].mode)
        rows.append(Row(results=tuple(group), measured=measured))
    counts = Counter(row.best.kind for row in rows)
    return sorted(rows, key=lambda row: (-counts[row.best.kind], row.best.kind, row.order))


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    return [list(group) for _, group in groupby(rows, lambda row: row.best.kind)]


def placed(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """Return comparable rows, the best one first, with their places; equal values share a place."""
    values = [row.order[0] for row in rows]
    return [(1 + bisect_left(values, row.order[0]), row) for row in rows]


def beside_next(rows: Sequence[Row], measure: Measure) -> str:
    """Return `within noise of the next one (B)`: the best of comparable rows against the next one; empty without it."""
    if len(rows) <= 1:
        return ""
    best, second = rows[:2]
    return judge(measure(second), measure(best)).beside(f"the next one ({second.short_name})")


def describe_experiment(
    experiment: str, rows: Sequence[Row], results: Sequence[Result], experiment_id: str, measure: Measure
) -> str:
    """Return the best result in one line and the table in Markdown, with _MAX_ROWS rows in all."""
    groups = _groups(rows)
    verdicts = [beside_next(group, measure) for group in groups]
    parts = [_headline(rows, experiment_id, verdicts[0])]
    num_left = _MAX_ROWS
    for group, verdict in zip(groups, verdicts, strict=True):
        shown = placed(group)[:num_left]
        num_left -= len(shown)
        if not shown:
            break
        kind = [part for part in group[0].best.kind if part]
        if verdict:
            kind.append(f"the best: {verdict}")
        lines = []
        for place, row in shown:
            name = link(row.best.name, run_page(experiment_id, row.run_id))
            lines.append((str(place), name, *row.cells))
        parts += [f"**{escaped(' · '.join(kind), 600)}**", table(_COLUMNS, lines)]
    sentences = [_total(results), _RULE, LEGEND]
    if any(verdicts):
        sentences.append(VERDICT_LEGEND)
    parts.append(escaped("".join(f"{sentence}. " for sentence in sentences), 1000))
    command = f"hpcdist runs --experiment {shlex.quote(experiment)} --sort best"
    text = f"`{command}` lists all runs, `hpcdist compare A B` compares any two; each run has a report.html."
    num_others = len(rows) - _MAX_ROWS
    if num_others > 0:
        text = f"{plural(num_others, 'more result')}: {text}"
    parts.append(with_code(text, 1000))
    return "\n\n".join(parts)


def _headline(rows: Sequence[Row], experiment_id: str, verdict: str) -> str:
    """Return the best result, its verdict and the number of results. MLflow shows this line alone until a click."""
    best = rows[0]
    page = link(best.short_name, run_page(experiment_id, best.run_id))
    words = f"**Best {escaped(best.best.metric)}: {escaped(best.cells[0])}, {page}**"
    if best.state not in ("", "finished"):
        words += f" ({escaped(best.state)})"
    if verdict:
        words += f", {escaped(verdict)}"
    return f"{words} · {plural(len(rows), 'result')}"


def _total(results: Sequence[Result]) -> str:
    """Return the number of ended runs and their cost."""
    words = plural(len(results), "ended run")
    num_without = sum(not result.metric for result in results)
    if num_without:
        words += f", {num_without} of them without a result"
    cost = cost_of(results)
    if cost:
        words += f", together: {cost}"
    num_priced = sum(result.price is not None for result in results)
    if cost and 0 < num_priced < len(results):
        words += f" (price of {num_priced})"
    return words
