"""The ended runs of an MLflow experiment by their best value: the rank of a run when it ends, the leaderboard in the
description of the experiment, and `leaderboard.html`.

Each run carries its result as the tag `hpcdist.result`, and one search finds all of them.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path

from hpcdist.errors import RunFolderError
from hpcdist.host.files import fill, write_atomic, write_json
from hpcdist.review.comparison import NO_ERROR, verdict_of
from hpcdist.review.description import SettingFacts
from hpcdist.review.facts import RunFacts, read_facts
from hpcdist.review.ledger import Ledger, hours_text, read_ledger
from hpcdist.review.report import environment
from hpcdist.review.text import clock, escaped, link, run_page, table
from hpcdist.review.uncertainty import (
    LARGEST_VALUE,
    difference_interval,
    evaluated_on,
    mean_interval,
    num_evaluated,
    share_error,
    with_error,
)
from hpcdist.run.folder import RunDir, State
from hpcdist.run.records import Standing
from hpcdist.tracking.mlflow_client import MlflowRun, all_pages, entities, translated
from hpcdist.tracking.pages import NOTE_TAG, PARENT_TAG, below_text_of_user

RESULT_TAG = "hpcdist.result"
#: Only the newest runs of a larger experiment are ranked.
MAX_RUNS = 2000
_PAGE = 500
#: Rows in the description of the experiment, and in `leaderboard.html`.
_MAX_ROWS, _MAX_HTML_ROWS = 20, 1000
#: Each repetition means that another run has ended in the same fraction of a second.
_MAX_WRITES = 10


@dataclass(frozen=True, kw_only=True)
class Result:
    """The content of the tag of an ended run. Results with the same metric, mode and data are comparable."""

    metric: str
    mode: str  #: `max` or `min`
    value: float
    data: str = ""  #: the evaluation data for display, such as `digits (test, 364 samples)`; empty if unknown
    data_id: str = ""  #: digest of the data, or name and size without one
    num_samples: int | None = None  #: of which the value is a proportion
    ended: float  #: seconds since the epoch
    allocated_s: float
    unit: str

    @property
    def kind(self) -> tuple[str, ...]:
        return self.metric, self.mode, self.data_id

    @property
    def condition(self) -> str:
        """Text after the metric: `on digits (test, 364 samples), highest is best`."""
        return f"{f' on {self.data}' if self.data else ''}, {'lowest' if self.mode == 'min' else 'highest'} is best"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run, or a setting of a sweep with all its seeds: best is a setting, never a seed."""

    name: str
    setting: str  #: empty for a run
    runs: tuple[tuple[Result, entities.Run], ...]  #: the best one first
    sign: float

    @property
    def first(self) -> Result:
        return self.runs[0][0]

    @property
    def run_id(self) -> str:
        return str(self.runs[0][1].info.run_id)

    @property
    def page_id(self) -> str:
        """The MLflow run whose page shows the row: of a setting the parent run of its sweep."""
        return str(self.runs[0][1].data.tags.get(PARENT_TAG) or self.run_id) if self.setting else self.run_id

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(result.value for result, _ in self.runs)

    @property
    def value(self) -> float:
        return statistics.fmean(self.values)

    @property
    def text(self) -> str:
        if len(self.runs) > 1:
            return SettingFacts(label=self.name, values=self.values, num_cells=len(self.runs)).text
        error = share_error(self.value, self.first.num_samples)
        return with_error(self.value, error, f"{self.value:.6g}")

    @property
    def cells(self) -> tuple[str, ...]:
        """The value with its error, the number of seeds, the cost, and the start of the first run."""
        return self.text, str(len(self.runs)) if self.setting else "", self.cost, self.started

    @property
    def cost(self) -> str:
        units = {result.unit for result, _ in self.runs}
        total = hours_text(sum(result.allocated_s for result, _ in self.runs))
        return f"{total} {units.pop()}-hours" if len(units) == 1 else ""

    @property
    def started(self) -> str:
        return clock(min(run.info.start_time for _, run in self.runs) / 1000).removesuffix(" UTC")


def result_of(facts: RunFacts, ledger: Ledger) -> Result | None:
    """Return the result of an ended run; None if it has none."""
    value, ended = facts.best_value, facts.state.ended
    if value is None or ended is None:
        return None
    data, text, id_ = evaluated_on(facts.monitor, facts.datasets), "", ""
    if data is not None:
        number = "" if data.num_samples is None else f", {data.num_samples:,} samples"
        text, id_ = f"{data.name} ({data.split}{number})", data.digest or f"{data.name} {data.num_samples}"
    return Result(
        metric=facts.monitor,
        mode=facts.monitor_mode,
        value=value,
        data=text,
        data_id=id_,
        num_samples=num_evaluated(facts.monitor, value, facts.datasets),
        ended=ended,
        allocated_s=ledger.allocated_s,
        unit=ledger.unit,
    )


def update(opened: MlflowRun, run: RunDir, state: State) -> None:
    """Rank an ended run: write its `standing.json`, `leaderboard.html`, and the description of the experiment.

    Several runs may end at once, and MLflow has no compare-and-set. Each process writes its own result first, then
    searches and writes the description, and repeats both until the description needs no change.

    Raises TrackingError, RunFolderError if the folder of the run cannot be read, and OSError if it cannot be written.
    """
    result = result_of(read_facts(run, state), read_ledger(run))
    if result is None:
        return
    opened.set_tags({RESULT_TAG: json.dumps(asdict(result))})
    for _ in range(_MAX_WRITES):
        with translated(opened.uri):
            search = all_pages(
                opened.client.search_runs,
                [opened.experiment_id],
                f"tags.`{RESULT_TAG}` LIKE '%'",
                max_results=_PAGE,
            )
            found = list(islice(search, MAX_RUNS + 1))
            experiment = opened.client.get_experiment(opened.experiment_id)
            rows, note = read_rows(found[:MAX_RUNS]), experiment.tags.get(NOTE_TAG, "")
            new = below_text_of_user(note, "", describe_experiment(rows, opened.experiment_id))
            if new == note:
                break
            opened.client.set_experiment_tag(opened.experiment_id, NOTE_TAG, new)
    page = environment().get_template("leaderboard.html")
    groups = [list(islice(group, _MAX_HTML_ROWS)) for _, group in groupby(rows, lambda row: row.first.kind)]
    write_atomic(run.leaderboard, page.render(experiment=run.experiment, ended=clock(result.ended), groups=groups))
    earlier = read_rows(found[:MAX_RUNS], until=result.ended)
    standing = rank(earlier, opened.run_id, result.ended, is_partial=len(found) > MAX_RUNS)
    if standing is not None:
        write_json(run.standing, asdict(standing))


def read_rows(found: Iterable[entities.Run], until: float = float("inf")) -> list[Row]:
    """Return the runs and settings with a result, the best of each kind first; the kind with most rows comes first.

    The order depends on the results alone, so that all processes write the same description.
    """
    groups: dict[tuple[str, ...], list[tuple[Result, entities.Run]]] = {}
    for run in found:
        tags = run.data.tags
        try:
            result = fill(Result, json.loads(tags[RESULT_TAG]), Path(RESULT_TAG))
        except (ValueError, TypeError, RecursionError, RunFolderError):
            continue  # of another program, or cut off
        if abs(result.value) <= LARGEST_VALUE and result.ended <= until:
            # A sweep without seeds has its name as the tag of all its cells, which are runs of their own.
            setting = tags.get("hpcdist.setting", "")
            is_run = setting == tags.get("hpcdist.run.sweep", "")
            key = ("", run.info.run_id) if is_run else (setting, tags.get(PARENT_TAG, ""))
            groups.setdefault((*key, *result.kind), []).append((result, run))
    rows = []
    for (setting, *_), runs in groups.items():
        sign = -1.0 if runs[0][0].mode == "min" else 1.0
        best_first = sorted(runs, key=lambda one: (-sign * one[0].value, one[0].ended, one[1].info.run_id))
        name = setting or str(best_first[0][1].info.run_name or best_first[0][1].info.run_id)
        rows.append(Row(name=name, setting=setting, runs=tuple(best_first), sign=sign))
    counts = Counter(row.first.kind for row in rows)
    return sorted(
        rows,
        key=lambda row: (-counts[row.first.kind], row.first.kind, -row.sign * row.value, row.first.ended, row.run_id),
    )


def rank(rows: Iterable[Row], run_id: str, ended: float, *, is_partial: bool) -> Standing | None:
    """Return the rank of the run, or of its setting, among the comparable rows; None if it has no row."""
    rows = list(rows)
    own = next((row for row in rows if any(run.info.run_id == run_id for _, run in row.runs)), None)
    if own is None:
        return None
    others = [row for row in rows if row is not own and row.first.kind == own.first.kind]
    standing = Standing(
        run_id=run_id,
        ended=ended,
        metric=own.first.metric,
        value=own.value,
        setting=own.setting,
        num_values=len(own.runs),
        rank=1 + sum(row.sign * row.value > own.sign * own.value for row in others),
        number=1 + len(others),
        num_others=len(rows) - len(others) - 1,
        is_partial=is_partial,
    )
    if not others:
        return standing
    best = others[0]
    interval, numbers = None, (best.first.num_samples, own.first.num_samples)
    # The best one is chosen among all: each of the others could have been the compared one.
    if len(own.runs) > 1 and len(best.runs) > 1:
        interval = mean_interval(best.values, own.values, len(others))
    elif len(own.runs) == len(best.runs) and numbers[0] and numbers[1]:
        interval = difference_interval(best.value, numbers[0], own.value, numbers[1], len(others))
    return replace(
        standing,
        before=best.name,
        before_run_id=best.run_id,
        before_folder=best.runs[0][1].data.tags.get("hpcdist.folder", ""),
        before_value=best.value,
        difference=own.value - best.value,
        interval=list(interval or ()),
        verdict=verdict_of(interval) if interval else NO_ERROR,
    )


def describe_experiment(rows: Sequence[Row], experiment_id: str) -> str:
    """Return the leaderboard in Markdown, with _MAX_ROWS rows in all."""
    left, parts = _MAX_ROWS, []
    for _, group in groupby(rows, lambda row: row.first.kind):
        ranked = list(group)
        shown, left = ranked[:left], max(0, left - len(ranked))
        if shown:
            best, head = shown[0].first, ("", "Run or setting", "Value", "Seeds", "Cost", "Started (UTC)")
            lines = [
                (str(number), link(row.name, run_page(experiment_id, row.page_id)), *row.cells)
                for number, row in enumerate(shown, 1)
            ]
            parts.append(f"**{escaped(best.metric)}**{escaped(best.condition)}\n\n{table(head, lines)}")
    newest = max((one for row in rows for one in row.runs), key=lambda one: (one[0].ended, one[1].info.run_id))[1]
    page = run_page(experiment_id, newest.info.run_id, "leaderboard.html")
    more = f"{len(rows) - _MAX_ROWS} more in " * (len(rows) > _MAX_ROWS)
    return "\n\n".join(["### Leaderboard", *parts, f"{more}{link('leaderboard.html', page)}"])
