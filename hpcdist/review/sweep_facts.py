"""The cells and settings of a sweep, the best of them, and the description of a sweep in Markdown for MLflow's UI."""

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.host.json_files import read_json
from hpcdist.review.description import cost_text, fitted, setup_rows, setup_table, state_at, status_line
from hpcdist.review.facts import (
    best_checkpoint,
    is_hidden,
    is_read,
    last_beat,
    ranked,
    read_checkpoints,
    read_facts,
    readable,
)
from hpcdist.review.ledger import Ledger
from hpcdist.review.markdown import escaped, link, run_page, table, with_code
from hpcdist.review.uncertainty import LARGEST_VALUE, mean_text
from hpcdist.review.verdict import OTHER_DATA, Measured, Verdict, judge
from hpcdist.run.folder import RunDir, State
from hpcdist.run.sweeps import REPETITION, SweepDir, checkpoint_config, setting_of, text_of

#: Rows of cells that are tried until a description fits.
_KEPT_CELLS = (1000, 100, 60, 40, 20, 10, 5)
#: With one of these keys swept, cells are evaluated on different data.
_DATA_KEYS = frozenset({"data.name", "data.root", "data.num_samples", "data.num_classes"})


@dataclass(frozen=True, kw_only=True)
class CellFacts:
    name: str = ""  #: of the run
    values: dict[str, Any]  #: by swept key
    label: str
    status: str  #: that of its state file; `missing` or `unreadable` without one
    metric: float | None = None  #: best value of the monitored metric, or last value of another one
    step: int | None = None  #: step of that value
    page: str = ""  #: address in MLflow's UI; empty before the cell is uploaded


@dataclass(frozen=True, kw_only=True)
class SettingFacts:
    """The cells of a sweep that differ by their seed only."""

    label: str
    values: tuple[float, ...]  #: of the metric, one for each cell that has it
    num_cells: int

    @property
    def mean(self) -> float | None:
        """The mean of the values; None without any."""
        if not self.values:
            return None
        return statistics.fmean(self.values)

    @property
    def text(self) -> str:
        """The mean with the standard deviation, see `mean_text`."""
        return mean_text(self.values)


@dataclass(frozen=True, kw_only=True)
class SweepFacts:
    """A sweep and its cells in the order of `sweep.json`."""

    state: State
    keys: tuple[str, ...]
    monitor: str  #: the metric of the cells; empty if they have logged none
    monitor_mode: str  #: max, min, or empty if it is unknown which values are better
    cells: tuple[CellFacts, ...]
    is_best: bool = True  #: whether values are the best ones of checkpoints, not the last ones that ranks have logged
    folder: Path | None = None  #: of the experiment, with the folders of the cells

    @property
    def by_setting(self) -> dict[str, SettingFacts]:
        """The settings by label; without seeds, each cell is a setting."""
        metrics: dict[str, list[float | None]] = {}
        for cell in self.cells:
            metrics.setdefault(setting_of(cell.values), []).append(cell.metric)
        settings = {}
        for label, values in metrics.items():
            usable = tuple(filter(_is_usable, values))
            settings[label] = SettingFacts(label=label, values=usable, num_cells=len(values))
        return settings

    @property
    def ranked_settings(self) -> tuple[SettingFacts, ...]:
        """The settings, without seeds the cells: the best one first if that is known, those without a value last."""
        return tuple(sorted(self.by_setting.values(), key=lambda setting: self._rank(setting.mean)))

    @property
    def settings(self) -> tuple[SettingFacts, ...]:
        """`ranked_settings` of a sweep over seeds; empty without seeds."""
        if REPETITION not in self.keys:
            return ()
        return self.ranked_settings

    @property
    def ranked_cells(self) -> list[CellFacts]:
        """The cells from the best to the worst if that is known, those without a value last."""
        return sorted(self.cells, key=lambda cell: self._rank(cell.metric))

    def _rank(self, value: float | None) -> tuple[bool, float]:
        """Return the key by which to sort values: better ones first, missing ones last."""
        return value is None, self.sign * (value or 0.0)

    @property
    def best(self) -> SettingFacts | None:
        """The best setting, without seeds the best cell; None if it is unknown."""
        known = [setting for setting in self.by_setting.values() if setting.values]
        if not known or not self.sign:
            return None
        return min(known, key=lambda setting: self._rank(setting.mean))

    @property
    def against_best(self) -> dict[str, Verdict]:
        """The verdicts on the other settings, without seeds the cells, against the best one; empty if it is unknown."""
        best = self.best
        if best is None:
            return {}
        others = [setting for setting in self.by_setting.values() if setting.values and setting != best]
        measured = self._measured(best)
        return {setting.label: self._judge(measured, self._measured(setting)) for setting in others}

    @property
    def setting_rows(self) -> list[tuple[str, str, str, str]]:
        """A row for each of `settings`: label, mean with deviation, verdict against the best one, number of cells."""
        verdicts = {label: verdict.text for label, verdict in self.against_best.items()}
        if self.best is not None and verdicts:
            verdicts[self.best.label] = "the best"
        rows = []
        for setting in self.settings:
            rows.append((setting.label, setting.text, verdicts.get(setting.label, ""), str(setting.num_cells)))
        return rows

    def _judge(self, first: Measured, second: Measured) -> Verdict:
        if not _DATA_KEYS.isdisjoint(self.keys):
            return Verdict(delta=second.mean - first.mean, word=OTHER_DATA)
        return judge(first, second)

    def _measured(self, setting: SettingFacts) -> Measured:
        """Return the values of a setting; of a cell of a sweep without seeds with its per-sample results."""
        if REPETITION not in self.keys and self.is_best and self.folder is not None:
            cell = next(cell for cell in self.cells if setting_of(cell.values) == setting.label)
            facts = readable(partial(read_facts, RunDir(self.folder / cell.name)))
            if facts is not None and facts.best is not None:
                return facts.measured()
        return Measured(values=setting.values, mode=self.monitor_mode)

    @property
    def beside_next(self) -> str:
        """`within noise of lr=0.2`: the best setting or cell against the next one; empty if there is none."""
        known = [setting for setting in self.by_setting.values() if setting.values]
        if not self.sign or len(known) <= 1:
            return ""
        best, following = sorted(known, key=lambda setting: self._rank(setting.mean))[:2]
        return self._judge(self._measured(following), self._measured(best)).beside(following.label)

    @property
    def sign(self) -> float:
        """The factor by which lower values are better; 0 if that is unknown."""
        return {"min": 1.0, "max": -1.0}.get(self.monitor_mode, 0.0)


def _is_usable(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) <= LARGEST_VALUE  # not NaN


def read_sweep_facts(sweep: SweepDir, state: State) -> SweepFacts:
    """Return the facts of a sweep. Raises RunFolderError if `sweep.json` cannot be read."""
    content = sweep.read()
    runs = [RunDir(sweep.path.parent / cell["name"]) for cell in content["cells"]]
    monitor = checkpoint_config(runs)
    cells = [_read_cell(run, cell, monitor) for run, cell in zip(runs, content["cells"], strict=True)]
    metric = monitor.monitor
    mode = str(monitor.monitor_mode)
    is_best = any(cell.metric is not None for cell in cells)
    if not is_best:  # no evaluated checkpoints, as in runs of scripts
        beats = [last_beat(run) for run in runs]
        metric = common_metric([beat.get("metrics", {}) for beat in beats], monitor.monitor)
        if metric != monitor.monitor:
            mode = "min" if "loss" in metric else ""
        cells = [_with_last_value(cell, beat, metric) for cell, beat in zip(cells, beats, strict=True)]
    return SweepFacts(
        state=state,
        keys=tuple(content["keys"]),
        monitor=metric,
        monitor_mode=mode,
        cells=tuple(cells),
        is_best=is_best,
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
    metric = None
    step = None
    if best is not None:
        metric = best.metrics[monitor.monitor]
        step = best.step
    return CellFacts(
        name=run.name,
        values=cell["values"],
        label=cell["label"],
        status=status,
        metric=metric,
        step=step,
        page=run_page(str(ids.get("experiment_id", "")), str(ids.get("run_id", ""))),
    )


def _with_last_value(cell: CellFacts, beat: Mapping[str, Any], metric: str) -> CellFacts:
    """Return a cell with the last value of a metric that rank 0 has sent with its heartbeat."""
    value = beat.get("metrics", {}).get(metric)
    step = beat.get("metric_steps", {}).get(metric)
    return replace(cell, metric=value, step=step)


def common_metric(logged: Sequence[Mapping[str, float]], monitor: str) -> str:
    """Return the metric by which to compare runs: the monitored one, or else one that most of them have logged."""
    counts = Counter(key for metrics in logged for key in metrics if is_read(key) and not is_hidden(key))
    if monitor in counts:
        return monitor
    most = [key for key, count in counts.items() if count == max(counts.values())]
    return next(iter(ranked(most, monitor)), "")


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
    ledger: Ledger,
    setup: Sequence[tuple[str, Sequence[str]]] = (),
    *,
    cost: str = "",
    report: str = "",
    max_chars: int,
    now: float | None = None,
) -> str:
    """Return the description of a sweep, at most `max_chars` long: the worst cells are left out first.

    Args:
        ledger: of all cells together.
        setup: of the first cell; other cells may differ in it by the swept keys.
    """

    when = time.time() if now is None else now

    def sections(num_kept: int) -> Iterator[str]:
        yield from _sweep_sections(facts, cost, report, num_kept, state_at(facts.state, when))
        if setup:
            yield f"### Setup of {escaped(facts.cells[0].label, 100)}\n\n" + setup_table(setup)
        if ledger.entries:
            yield "### Cost\n\n" + cost_text(ledger)

    return fitted(sections, _KEPT_CELLS, max_chars)


def _sweep_sections(facts: SweepFacts, cost: str, report: str, num_kept: int, as_of: str) -> Iterator[str]:
    yield status_line(facts.state)
    settings = facts.settings if facts.monitor else ()
    if facts.best is not None:
        yield _best_line(facts, facts.best, has_settings=bool(settings))
    parts = []
    if cost:
        parts.append(f"Cost: {with_code(cost, 300)}")
    if report:
        parts.append(link("report.html", report))
    if parts:
        yield " · ".join(parts)
    yield as_of
    if settings and settings[0].values:
        columns = ("Setting", f"{facts.monitor}: mean ± s.d. (n seeds)", "Against the best", "Cells")
        yield table(columns, facts.setting_rows[:num_kept])
    yield _cell_table(facts, num_kept)


def _best_line(facts: SweepFacts, best: SettingFacts, *, has_settings: bool) -> str:
    kind = "setting"
    text = best.text
    if not has_settings:
        kind = "cell"
        text = text.removesuffix(" (n=1)")
    page = next((cell.page for cell in facts.ranked_cells if cell.label == best.label), "")
    direction = "lowest" if facts.monitor_mode == "min" else "highest"
    title = link(escaped(best.label, 100), page)
    line = f"Best {kind}: {title} with **{escaped(facts.monitor)} = {text}** ({direction} is best)"
    beside_next = facts.beside_next
    if beside_next:
        line += f", {escaped(beside_next)}"
    return line


def _cell_table(facts: SweepFacts, num_kept: int) -> str:
    """Return a row for each cell, the best first."""
    cells = facts.ranked_cells
    head = ["Run", *facts.keys]
    if facts.monitor:
        head += [facts.monitor, "Step"]
    head.append("State")
    rows = []
    for cell in cells[:num_kept]:
        row: list[str] = [link(escaped(cell.label, 100), cell.page)]
        row += [escaped(text_of(cell.values.get(key)), 60) for key in facts.keys]
        if facts.monitor:
            row.append("" if cell.metric is None else f"{cell.metric:.6g}")
            row.append("" if cell.step is None else f"{cell.step:,}")
        row.append(cell.status)
        rows.append(row)
    text = table(head, rows)
    left_out = len(cells) - num_kept
    if left_out > 0:
        text += f"\n\n{left_out} more cells"
    return text
