"""The description of a sweep in MLflow: the best cell, and a table of the cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcdist.config.launch_schema import CheckpointConfig
from hpcdist.errors import RunFolderError
from hpcdist.host.files import read_json
from hpcdist.review.charts import is_hidden, is_read, ranked
from hpcdist.review.facts import best_checkpoint, last_beat, read_checkpoints
from hpcdist.review.text import escaped, link, run_page, table
from hpcdist.run.folder import RunDir, State
from hpcdist.run.sweeps import SweepDir, text_of

_KEPT_CELLS = (1000, 100, 60, 40, 20, 10, 5)


@dataclass(frozen=True, kw_only=True)
class CellFacts:
    """One cell of a sweep."""

    values: dict[str, Any]  #: by swept key
    label: str
    status: str  #: that of its state file; `missing` or `unreadable` without one
    metric: float | None = None  #: best value of the monitored metric, or last value of another one
    step: int | None = None  #: step of that value
    page: str = ""  #: address in MLflow's UI; empty before the cell is uploaded


@dataclass(frozen=True, kw_only=True)
class SweepFacts:
    """A sweep and its cells in the order of `sweep.json`."""

    state: State
    keys: tuple[str, ...]
    monitor: str  #: the metric of the cells; empty if they have logged none
    monitor_mode: str  #: max, min, or empty if it is unknown which values are better
    cells: tuple[CellFacts, ...]


def read_sweep_facts(sweep: SweepDir, state: State) -> SweepFacts:
    """Return the facts of a sweep. Raises RunFolderError if `sweep.json` cannot be read."""
    content = sweep.read()
    runs = [RunDir(sweep.path.parent / cell["name"]) for cell in content["cells"]]
    monitor = sweep.checkpoint_config()
    cells = [_read_cell(run, cell, monitor) for run, cell in zip(runs, content["cells"], strict=True)]
    metric, mode = monitor.monitor, str(monitor.monitor_mode)
    if all(cell.metric is None for cell in cells):  # no evaluated checkpoints, as in runs of scripts
        beats = [last_beat(run) for run in runs]
        metric = common_metric([beat.get("metrics", {}) for beat in beats], monitor.monitor)
        mode = mode if metric == monitor.monitor else "min" if "loss" in metric else ""
        cells = [
            replace(cell, metric=beat.get("metrics", {}).get(metric), step=beat.get("metric_steps", {}).get(metric))
            for cell, beat in zip(cells, beats, strict=True)
        ]
    return SweepFacts(state=state, keys=tuple(content["keys"]), monitor=metric, monitor_mode=mode, cells=tuple(cells))


def common_metric(logged: Sequence[Mapping[str, float]], monitor: str) -> str:
    """Return the metric by which to compare runs: the monitored one, or else one that most of them have logged.

    Args:
        logged: the metrics of each run.
    """
    counts = Counter(key for metrics in logged for key in metrics if is_read(key) and not is_hidden(key))
    most = [key for key, count in counts.items() if count == max(counts.values())]
    return monitor if monitor in counts else next(iter(ranked(most, monitor)), "")


def describe_sweep(facts: SweepFacts, *, max_chars: int) -> str:
    """Return the description of a sweep, at most `max_chars` long: the worst cells are left out first."""
    text = ""
    for num_kept in _KEPT_CELLS:
        text = "\n\n".join(_sections(facts, num_kept))
        if len(text) <= max_chars:
            return text
    return text[: max(0, max_chars - 2)].rpartition("\n")[0] + "\n…"


def _sections(facts: SweepFacts, num_kept: int) -> Iterator[str]:
    state = facts.state
    yield escaped(state.sentence, 1000).replace(state.status, f"**{state.status}**", 1)
    cells = _ordered(facts)
    if cells and cells[0].metric is not None and facts.monitor_mode:
        best = cells[0]
        yield (
            f"Best cell: {_titled(best)} with **{escaped(facts.monitor)} = {best.metric:.6g}** at step {best.step:,}"
            f" ({'lowest' if facts.monitor_mode == 'min' else 'highest'} is best)"
        )
    head = ("Run", *map(escaped, facts.keys), *([escaped(facts.monitor), "Step"] if facts.monitor else []), "State")
    rows = [_row(cell, facts) for cell in cells[:num_kept]]
    left_out = len(cells) - num_kept
    yield table(head, rows) + (f"\n\n{left_out} more cells" if left_out > 0 else "")


def _ordered(facts: SweepFacts) -> Sequence[CellFacts]:
    """Return the cells from the best to the worst if that is known, those without a value last."""
    sign = {"min": 1.0, "max": -1.0}.get(facts.monitor_mode, 0.0)
    return sorted(facts.cells, key=lambda cell: (cell.metric is None, sign * (cell.metric or 0.0)))


def _row(cell: CellFacts, facts: SweepFacts) -> list[str]:
    numbers = ["" if cell.metric is None else f"{cell.metric:.6g}", "" if cell.step is None else f"{cell.step:,}"]
    return [
        _titled(cell),
        *(escaped(text_of(cell.values.get(key)), 60) for key in facts.keys),
        *(numbers if facts.monitor else []),
        cell.status,
    ]


def _titled(cell: CellFacts) -> str:
    return link(escaped(cell.label, 100), cell.page) if cell.page else escaped(cell.label, 100)


def _read_cell(run: RunDir, cell: dict[str, Any], monitor: CheckpointConfig) -> CellFacts:
    best = best_checkpoint(read_checkpoints(run), monitor)
    status: str
    try:
        ids = read_json(run.mlflow) or {}
        status = run.read_state().status if (run.path / "state.json").exists() else "missing"
    except (RunFolderError, OSError):
        ids, status = {}, "unreadable"
    return CellFacts(
        values=cell["values"],
        label=cell["label"],
        status=status,
        metric=None if best is None else best.metrics[monitor.monitor],
        step=None if best is None else best.step,
        page=run_page(str(ids.get("experiment_id", "")), str(ids.get("run_id", ""))),
    )
