"""The cells and settings of a sweep, the best of them, and the description of a sweep in Markdown for MLflow's UI."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.host.json_files import read_json
from hpcdist.review.description import fitted, setup_rows, setup_table, state_at, status_line
from hpcdist.review.facts import best_checkpoint, read_checkpoints, read_facts, readable
from hpcdist.review.markdown import escaped, link, run_page, table, with_code
from hpcdist.review.metric_series import LastValue, common_metric
from hpcdist.review.ranking import Measure, Placed, RankedRow, Ranking, ReadLastValues, Result, make_rows, measure_in
from hpcdist.review.uncertainty import LARGEST_VALUE
from hpcdist.review.verdict import Measured, Verdict
from hpcdist.run.folder import RunDir, State
from hpcdist.run.sweeps import REPETITION, SweepDir, checkpoint_config, setting_of
from hpcdist.run.training_record import DatasetRecord

#: Rows of the table that are tried until a description fits.
_KEPT_ROWS = (1000, 100, 60, 40, 20, 10, 5)
#: With one of these keys swept, cells are evaluated on different data.
_DATA_KEYS = frozenset({"data.name", "data.root", "data.num_samples", "data.num_classes"})


@dataclass(frozen=True, kw_only=True)
class CellFacts:
    name: str = ""  #: of the run
    values: dict[str, Any]  #: by swept key
    label: str
    status: str  #: that of its state file; `missing` or `unreadable` without one
    value: float | None = None  #: of the sweep's metric, see `SweepFacts`; None without one
    step: int | None = None  #: step of that value
    page: str = ""  #: address in MLflow's UI; empty before the cell is uploaded


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """A setting of a sweep, without seeds a single cell, as tables show it."""

    name: str
    cells: Sequence[CellFacts]
    ranked: RankedRow | None = None  #: None without a value
    placed: Placed | None = None  #: `ranked` among several rows with values; None if it is unknown which is best

    @property
    def values(self) -> Sequence[float]:
        """The values of its cells; empty without any."""
        return self.ranked.measured.values if self.ranked else ()

    @property
    def value_text(self) -> str:
        """Its value, of several seeds the mean with their standard deviation; empty without one."""
        return self.ranked.value_text if self.ranked else ""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict against the best row; None for the best one itself, and if it is unknown."""
        return self.placed.verdict if self.placed else None

    @property
    def against_best(self) -> str:
        """The verdict as text, `the best` for the best row; empty if there is none."""
        return self.placed.verdict_text if self.placed else ""

    @property
    def state(self) -> str:
        """`finished` for a single cell, and `1 failed, 2 finished` for several ones."""
        counts = Counter(cell.status for cell in self.cells)
        if counts.total() == 1:
            return next(iter(counts))
        return ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))


@dataclass(frozen=True, kw_only=True)
class SweepFacts:
    """A sweep and its cells in the order of `sweep.json`."""

    state: State
    keys: tuple[str, ...]
    monitor: str  #: the metric of the cells; empty if they have logged none
    monitor_mode: str  #: max, min, or empty if it is unknown which values are better
    cells: tuple[CellFacts, ...]
    is_last: bool = False  #: whether values are the last ones that were logged, not the best ones of checkpoints
    folder: Path | None = None  #: of the experiment, with the folders of the cells

    @cached_property
    def ranking(self) -> Ranking:
        """The settings that have a value, without seeds the cells: the best one first if that is known."""
        results = []
        for cell in self.cells:
            value = self.result_of(cell)
            if value is None:
                continue
            label = setting_of(cell.values)
            result = Result(
                metric=self.monitor,
                mode=self.monitor_mode,
                value=value,
                step=cell.step,
                status=cell.status,
                name=label,
                setting=label if self.has_seeds else "",
                folder=cell.name,
                data="",
                num_samples=None,
                ended=0.0,
                allocated_s=0.0,
                unit="",
            )
            results.append(result)
        return Ranking(rows=make_rows(results), measure=self._measure)

    def result_of(self, cell: CellFacts) -> float | None:
        """Return the value with which a cell counts; None without one.

        As in `logged_result`, a last value counts only of a finished cell, since another one may have ended anywhere.
        """
        if self.is_last and cell.status != "finished":
            return None
        if cell.value is None or not abs(cell.value) <= LARGEST_VALUE:  # NaN included
            return None
        return cell.value

    def _measure(self, row: RankedRow) -> Measured:
        """Return the values of a row; those of a cell with its per-sample results."""
        measured = self._read(row)
        if measured.data is None and not _DATA_KEYS.isdisjoint(self.keys):  # each setting has data of its own
            return replace(measured, data=DatasetRecord(name=row.name))
        return measured

    @cached_property
    def _read(self) -> Measure:
        return measure_in(self._folder_of)

    def _folder_of(self, result: Result) -> RunDir | None:
        if self.folder is None or self.is_last:
            return None
        return RunDir(self.folder / result.folder)

    @property
    def value_title(self) -> str:
        """The metric with the kind of its values: `best eval/accuracy` or `last val/loss`; `Value` without a metric."""
        if not self.monitor:
            return "Value"
        return f"{'last' if self.is_last else 'best'} {self.monitor}"

    @property
    def has_seeds(self) -> bool:
        """Whether cells differ by their seed, so that settings are compared instead of cells."""
        return REPETITION in self.keys

    @property
    def best(self) -> RankedRow | None:
        """The best setting, without seeds the best cell; None if it is unknown."""
        if not self.monitor_mode or not self.ranking.rows:
            return None
        return self.ranking.rows[0]

    @property
    def beside_next(self) -> str:
        """`within noise of lr=0.2`: the best setting or cell against the next one; empty if there is none."""
        if self.best is None:
            return ""
        return self.ranking.beside_next

    @cached_property
    def rows(self) -> Sequence[SweepRow]:
        """A row for each setting, without seeds for each cell: the best one first, those without a value last."""
        cells: dict[str, list[CellFacts]] = {}
        for cell in self.cells:
            cells.setdefault(setting_of(cell.values), []).append(cell)
        ranked = {row.name: row for row in self.ranking.rows}
        placed: dict[str, Placed] = {}
        if self.best is not None and len(ranked) > 1:
            placed = {each.row.name: each for each in self.ranking.placed()}
        names = dict.fromkeys([*ranked, *cells])
        return [
            SweepRow(name=name, cells=cells[name], ranked=ranked.get(name), placed=placed.get(name)) for name in names
        ]

    @property
    def ranked_cells(self) -> list[CellFacts]:
        """The cells from the best to the worst if that is known, those that do not count last."""
        sign = {"min": 1.0, "max": -1.0}.get(self.monitor_mode, 0.0)

        def place(cell: CellFacts) -> tuple[bool, float]:
            value = self.result_of(cell)
            if value is None:
                return True, 0.0
            return False, sign * value

        return sorted(self.cells, key=place)


def read_sweep_facts(sweep: SweepDir, state: State, read_last: ReadLastValues) -> SweepFacts:
    """Return the facts of a sweep. Raises RunFolderError if `sweep.json` cannot be read."""
    content = sweep.read()
    runs = [RunDir(sweep.path.parent / cell["name"]) for cell in content["cells"]]
    monitor = checkpoint_config(runs)
    cells = [_read_cell(run, cell, monitor) for run, cell in zip(runs, content["cells"], strict=True)]
    metric = monitor.monitor
    mode = str(monitor.monitor_mode)
    is_last = all(cell.value is None for cell in cells)
    if is_last:  # no evaluated checkpoints, as in runs of scripts
        logged = [readable(partial(read_last, run)) or {} for run in runs]
        of_finished = [values for cell, values in zip(cells, logged, strict=True) if cell.status == "finished"]
        metric, mode = common_metric(of_finished or logged, metric, mode)
        cells = [_with_last_value(cell, values, metric) for cell, values in zip(cells, logged, strict=True)]
    return SweepFacts(
        state=state,
        keys=tuple(content["keys"]),
        monitor=metric,
        monitor_mode=mode,
        cells=tuple(cells),
        is_last=is_last,
        folder=sweep.path.parent,
    )


def _read_cell(run: RunDir, cell: Mapping[str, Any], monitor: CheckpointConfig) -> CellFacts:
    """Return the facts of a cell with its best checkpoint.

    Args:
        cell: its entry in `sweep.json`.
    """
    best = best_checkpoint(read_checkpoints(run), monitor)
    ids = readable(lambda: read_json(run.mlflow)) or {}
    state = readable(run.read_state)
    if state is not None:
        status: str = state.status
    elif (run.path / "state.json").exists():
        status = "unreadable"
    else:
        status = "missing"
    value = None
    step = None
    if best is not None:
        value = best.metrics[monitor.monitor]
        step = best.step
    return CellFacts(
        name=run.name,
        values=cell["values"],
        label=cell["label"],
        status=status,
        value=value,
        step=step,
        page=run_page(str(ids.get("experiment_id", "")), str(ids.get("run_id", ""))),
    )


def _with_last_value(cell: CellFacts, logged: Mapping[str, LastValue], metric: str) -> CellFacts:
    """Return a cell with the last value of a metric, if it has logged that one."""
    last = logged.get(metric)
    if last is None:
        return cell
    return replace(cell, value=last.value, step=last.step)


#: Rows of `setup_rows` that a sweep shows of its first cell.
_OF_SWEEP = ("Config", "Trainer", "Model", "Data", "Code", "Image", "CPU", "Versions")


def sweep_setup(facts: SweepFacts, sweep: SweepDir) -> list[tuple[str, list[str]]]:
    """Return the setup of the first cell without its name, folder and ranks; empty if it cannot be read."""
    cell = readable(lambda: read_facts(RunDir(sweep.path.parent / facts.cells[0].name)))
    if cell is None:
        return []
    return [(name, lines) for name, lines in setup_rows(cell) if name in _OF_SWEEP]


def describe_sweep(
    facts: SweepFacts,
    setup: Sequence[tuple[str, Sequence[str]]] = (),
    *,
    cost: str = "",
    report: str = "",
    max_chars: int,
    now: float | None = None,
) -> str:
    """Return the description of a sweep, at most `max_chars` long: the worst settings are left out first.

    Its cost by cause is in the report, and each cell is a run of its own below it in MLflow.

    Args:
        setup: of the first cell; other cells may differ in it by the swept keys.
    """

    when = time.time() if now is None else now

    def sections(num_kept: int) -> Iterator[str]:
        yield from _sweep_sections(facts, cost, report, num_kept, state_at(facts.state, when))
        if setup:
            yield f"### Setup of {escaped(facts.cells[0].label, 100)}\n\n" + setup_table(setup)

    return fitted(sections, _KEPT_ROWS, max_chars)


def _sweep_sections(facts: SweepFacts, cost: str, report: str, num_kept: int, as_of: str) -> Iterator[str]:
    yield status_line(facts.state)
    if facts.best is not None:
        yield _best_line(facts, facts.best)
    parts = []
    if cost:
        parts.append(f"Cost: {with_code(cost, 300)}")
    if report:
        parts.append(link("report.html", report))
    if parts:
        yield " · ".join(parts)
    yield as_of
    yield _table(facts, num_kept)


def _best_line(facts: SweepFacts, best: RankedRow) -> str:
    kind = "setting" if facts.has_seeds else "cell"
    page = next((cell.page for cell in facts.cells if cell.label == best.name), "")
    direction = "lowest" if facts.monitor_mode == "min" else "highest"
    title = link(escaped(best.name, 100), page)
    metric = facts.value_title if facts.is_last else facts.monitor
    line = f"Best {kind}: {title} with **{escaped(metric)} = {best.value_text}** ({direction} is best)"
    beside_next = facts.beside_next
    if beside_next:
        line += f", {escaped(beside_next)}"
    return line


def _table(facts: SweepFacts, num_kept: int) -> str:
    """Return the first rows of a sweep as a table."""
    pages = {cell.label: cell.page for cell in facts.cells}
    rows = []
    for row in facts.rows:
        title = link(escaped(row.name, 100), pages.get(row.name, ""))
        steps = row.ranked.steps_text if row.ranked else ""
        rows.append((title, row.value_text, row.against_best, steps, row.state))
    first = "Setting" if facts.has_seeds else "Run"
    text = table((first, facts.value_title, "Against the best", "At step", "State"), rows[:num_kept])
    left_out = len(rows) - num_kept
    if left_out > 0:
        text += f"\n\n{left_out} more"
    return text
