"""The ended runs of an MLflow experiment by their best value: the rank of a run when it ends, the leaderboard.

Each run carries its result as the tag `hpcdist.result`, and one search finds all of them.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpcdist.errors import RunFolderError
from hpcdist.host.files import fill, write_atomic, write_json
from hpcdist.review import uncertainty
from hpcdist.review.comparison import NO_ERROR, verdict_of
from hpcdist.review.description import dataset_text
from hpcdist.review.facts import read_facts
from hpcdist.review.ledger import hours_text, read_ledger
from hpcdist.review.report import environment
from hpcdist.review.text import clock, escaped, link, run_page, table
from hpcdist.run.folder import RunDir, State
from hpcdist.run.records import Standing
from hpcdist.tracking.mlflow_client import MlflowRun, all_pages, entities, translated
from hpcdist.tracking.pages import NOTE_TAG, PARENT_TAG, below_text_of_user

RESULT_TAG = "hpcdist.result"
#: Only the newest runs of a larger experiment are ranked.
MAX_RUNS = 2000
_PAGE = 500
#: Rows in the description of the experiment.
_MAX_ROWS = 20
_COLUMNS = ("", "Run or setting", "Value", "Seeds", "Cost", "Started (UTC)")
#: Each repetition means that another run has ended in the same fraction of a second.
_MAX_WRITES = 10


@dataclass(frozen=True, kw_only=True)
class Result:
    metric: str
    mode: str  #: `max` or `min`
    value: float
    data: str  #: of the evaluation, see `dataset_text`; empty if unknown
    num_samples: int | None  #: of which the value is a proportion
    ended: float  #: seconds since the epoch
    allocated_s: float
    unit: str
    name: str = ""  #: of the run, or its setting
    run_id: str = ""
    started: float = 0.0
    folder: str = ""
    parent: str = ""  #: MLflow run of its sweep
    setting: str = ""  #: of a sweep over seeds; empty for a run of its own

    @property
    def kind(self) -> tuple[str, ...]:
        """Results of the same kind are comparable."""
        return self.metric, self.data, f"{'lowest' if self.mode == 'min' else 'highest'} is best"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run, or a setting of a sweep with all its seeds: best is a setting, never a seed."""

    results: tuple[Result, ...]  #: the best one first
    value: float  #: their mean

    @property
    def best(self) -> Result:
        return self.results[0]

    @property
    def order(self) -> tuple[float, float, str]:
        return self.value * (1 if self.best.mode == "min" else -1), self.best.ended, self.best.run_id

    @property
    def cells(self) -> tuple[str, ...]:
        """The value with its error, the number of seeds, the cost, and the start of the first run."""
        text = uncertainty.with_error(
            self.value, uncertainty.share_error(self.value, self.best.num_samples), f"{self.value:.6g}"
        )
        if len(self.results) > 1:
            text = uncertainty.mean_text([one.value for one in self.results])
        seeds = str(len(self.results)) if self.best.setting else ""
        hours = hours_text(sum(one.allocated_s for one in self.results))
        started = clock(min(one.started for one in self.results)).removesuffix(" UTC")
        return text, seeds, f"{hours} {self.best.unit}-hours", started


_kind = attrgetter("best.kind")


def update(opened: MlflowRun, run: RunDir, state: State) -> None:
    """Rank an ended run: write its `standing.json`, `leaderboard.html`, and the description of the experiment.

    Several runs may end at once, and MLflow has no compare-and-set. Each process writes its own result first, then
    searches and writes the description, and repeats both until the description needs no change.

    Raises TrackingError, RunFolderError if the folder of the run cannot be read, and OSError if it cannot be written.
    """
    facts, ledger = read_facts(run, state), read_ledger(run)
    if facts.best is None or state.ended is None:
        return
    data = uncertainty.evaluated_on(facts.monitor, facts.datasets)
    result = Result(
        metric=facts.monitor,
        mode=facts.monitor_mode,
        value=facts.best_value,
        data="" if data is None else dataset_text(data),
        num_samples=uncertainty.num_evaluated(facts.monitor, facts.best_value, facts.datasets),
        ended=state.ended,
        allocated_s=ledger.allocated_s,
        unit=ledger.unit,
    )
    opened.set_tags({RESULT_TAG: json.dumps({key: value for key, value in asdict(result).items() if value != ""})})
    for _ in range(_MAX_WRITES):
        with translated(opened.uri):
            search, only = opened.client.search_runs, f"tags.`{RESULT_TAG}` LIKE '%'"
            pages = all_pages(search, [opened.experiment_id], only, max_results=_PAGE)
            found = [one for one in map(_read, islice(pages, MAX_RUNS)) if one is not None]
            rows = make_rows(found)
            note = opened.client.get_experiment(opened.experiment_id).tags.get(NOTE_TAG, "")
            new = below_text_of_user(note, "", describe_experiment(rows, opened.experiment_id))
            if new == note:
                break
            opened.client.set_experiment_tag(opened.experiment_id, NOTE_TAG, new)
    page, tables = environment().get_template("leaderboard.html"), [list(rows) for _, rows in groupby(rows, _kind)]
    write_atomic(
        run.leaderboard,
        page.render(experiment=run.experiment, ended=clock(state.ended), columns=_COLUMNS, tables=tables),
    )
    standing = rank(make_rows(one for one in found if one.ended <= result.ended), opened.run_id, len(found) >= MAX_RUNS)
    if standing is not None:
        write_json(run.standing, asdict(standing))


def _read(run: entities.Run) -> Result | None:
    """Return the result of a run; None if its tag is of another program, or cut off."""
    info, tags = run.info, run.data.tags
    setting, sweep = (tags.get(f"hpcdist.{name}", "") for name in ("setting", "run.sweep"))
    known = {
        "name": setting * (setting != sweep) or info.run_name or info.run_id,
        "run_id": info.run_id,
        "started": (info.start_time or 0) / 1000,
        "folder": tags.get("hpcdist.folder", ""),
        "parent": tags.get(PARENT_TAG, ""),
        # A sweep without seeds has its name as the tag of all its cells, which are runs of their own.
        "setting": setting if setting != sweep else "",
    }
    try:
        found = fill(Result, {"data": "", **json.loads(tags[RESULT_TAG]), **known}, Path(RESULT_TAG))
    except (ValueError, TypeError, RecursionError, RunFolderError):
        return None
    return found if abs(found.value) <= uncertainty.LARGEST_VALUE else None


def make_rows(results: Iterable[Result]) -> list[Row]:
    """Return the runs and settings, the best of each kind first; the kind with most rows comes first.

    The order depends on the results alone, so that all processes write the same description.
    """
    groups: dict[tuple[str, ...], list[Result]] = {}
    for one in results:
        same = (one.setting, one.parent) if one.setting else (one.run_id,)
        groups.setdefault((*same, *one.kind), []).append(one)
    rows = []
    for group in groups.values():
        group.sort(key=lambda one: Row(results=(one,), value=one.value).order)
        rows.append(Row(results=tuple(group), value=statistics.fmean(one.value for one in group)))
    counts = Counter(row.best.kind for row in rows)
    return sorted(rows, key=lambda row: (-counts[row.best.kind], row.best.kind, row.order))


def rank(rows: Sequence[Row], run_id: str, is_partial: bool) -> Standing | None:
    """Return the rank of the run, or of its setting, among the comparable rows; None if it has no row."""
    own = next((row for row in rows if any(one.run_id == run_id for one in row.results)), None)
    if own is None:
        return None
    others = [row for row in rows if row is not own and row.best.kind == own.best.kind]
    compared: dict[str, Any] = {}
    if others:
        before, interval = others[0], None
        first, second = ([one.value for one in row.results] for row in (before, own))
        sizes = before.best.num_samples, own.best.num_samples
        # The best one is chosen among all: each of the others could have been the compared one.
        if len(first) > 1 and len(second) > 1:
            interval = uncertainty.mean_interval(first, second, len(others))
        elif len(first) == len(second) and sizes[0] and sizes[1]:
            interval = uncertainty.difference_interval(before.value, sizes[0], own.value, sizes[1], len(others))
        compared = {
            "before": before.best.name,
            "before_run_id": before.best.run_id,
            "before_folder": before.best.folder,
        }
        compared |= {"before_value": before.value, "difference": own.value - before.value}
        compared |= {"interval": list(interval or ()), "verdict": verdict_of(interval) if interval else NO_ERROR}
    return Standing(
        run_id=run_id,
        ended=next(one.ended for one in own.results if one.run_id == run_id),
        metric=own.best.metric,
        value=own.value,
        setting=own.best.setting,
        num_values=len(own.results),
        rank=1 + sum(row.order[0] < own.order[0] for row in others),
        number=1 + len(others),
        num_others=len(rows) - len(others) - 1,
        is_partial=is_partial,
        **compared,
    )


def describe_experiment(rows: Sequence[Row], experiment_id: str) -> str:
    """Return the leaderboard in Markdown, with _MAX_ROWS rows in all."""
    # MLflow shows this line alone until a click.
    best, plural = rows[0], "s" * (len(rows) != 1)
    parts = [
        f"**{escaped(f'Best {best.best.metric}: {best.cells[0]}, {best.best.name}')}** ({len(rows)} result{plural})"
    ]
    for kind, group in groupby(rows[:_MAX_ROWS], _kind):
        lines = []
        for number, row in enumerate(group, 1):
            page = run_page(experiment_id, row.best.parent if row.best.setting else row.best.run_id)
            lines.append((str(number), link(row.best.name, page), *row.cells))
        parts += [f"**{escaped(' · '.join(filter(None, kind)), 600)}**", table(_COLUMNS, lines)]
    newest = max((one for row in rows for one in row.results), key=lambda one: (one.ended, one.run_id))
    page = run_page(experiment_id, newest.run_id, "leaderboard.html")
    more = f"{len(rows) - _MAX_ROWS} more in " * (len(rows) > _MAX_ROWS)
    return "\n\n".join([*parts, f"{more}{link('leaderboard.html', page)}"])
