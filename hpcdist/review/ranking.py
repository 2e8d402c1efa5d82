"""Results of runs and their order, for the table of MLflow and of `hpcdist runs --sort best`, and for sweeps."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby

from hpcdist.host.json_files import read_json
from hpcdist.review.description import dataset_text
from hpcdist.review.facts import RunFacts, logged_result, read_facts, readable
from hpcdist.review.ledger import cost_of, price_of, read_ledger
from hpcdist.review.metric_series import LastValue
from hpcdist.review.uncertainty import evaluated_on, mean_text, share_error, with_error
from hpcdist.review.verdict import Measured, Verdict, judge
from hpcdist.run.config_origin import is_generated
from hpcdist.run.folder import RunDir, State
from hpcdist.run.sweeps import named_setting, sweep_of

#: Returns the last values of a run by metric: `read_last_values` of `hpcdist.tracking.series`.
ReadLastValues = Callable[[RunDir], Mapping[str, LastValue]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run, ended unless it is a cell of a sweep: its best value, of which metric and data, its cost."""

    metric: str  #: empty without a result, as of a run that failed early: only its cost counts
    mode: str  #: `max`, `min`, or empty if it is unknown which values are better
    value: float = 0.0
    is_last: bool = False  #: whether the value is the last one that was logged, not the best one of a checkpoint
    data: str  #: of the evaluation, see `dataset_text`; empty if unknown
    num_samples: int | None  #: of which the value is a proportion
    ended: float  #: seconds since the epoch
    allocated_s: float
    unit: str
    price_per_hour: str = ""
    step: int | None = None  #: of the value; None if it is not recorded
    status: str = ""  #: with which the run ended
    name: str = ""  #: of the run, or its setting
    run_id: str = ""  #: in MLflow; empty before the run is uploaded
    folder: str = ""
    parent: str = ""  #: the sweep: its MLflow run, or its folder
    setting: str = ""  #: of a sweep over seeds; empty for a run of its own

    @property
    def kind(self) -> tuple[str, ...]:
        """Results of the same kind are comparable."""
        rule = "lowest is best" if self.mode == "min" else "highest is best"
        which = "last value" if self.is_last else ""
        return self.metric, which, self.data, rule

    @property
    def sort_value(self) -> float:
        """The value with the sign by which the best result comes first."""
        return self.value if self.mode == "min" else -self.value

    @property
    def price(self) -> tuple[str, float, str] | None:
        """The price as `price_of` returns it; None without a price per hour."""
        return price_of(self.price_per_hour, self.allocated_s)


def read_result(run: RunDir, state: State, read_last: ReadLastValues) -> Result:
    """Return the result of an ended run from its folder. Raises RunFolderError if the folder is damaged."""
    facts = read_facts(run, state)
    ledger = read_ledger(run)
    sweep = sweep_of(run)
    setting = ""
    if sweep is not None:
        setting = named_setting(sweep, (read_json(run.path / "cell.json") or {}).get("values"))
    without_value = Result(
        metric="",
        mode=facts.monitor_mode,
        status=state.status,
        data=_data_of(facts.monitor, facts),
        num_samples=None,
        ended=state.ended or 0.0,
        allocated_s=ledger.allocated_s,
        unit=ledger.unit,
        price_per_hour=ledger.price_per_hour,
        name=setting or run.name,
        run_id=facts.run_id,
        folder=str(run.path),
        parent="" if sweep is None else str(sweep.path),
        setting=setting,
    )
    if facts.best is None:
        return _with_last_value(without_value, run, facts, read_last)
    return replace(
        without_value,
        metric=facts.monitor,
        value=facts.best_value,
        step=facts.best.step,
        num_samples=facts.num_evaluated,
    )


def _data_of(metric: str, facts: RunFacts) -> str:
    data = evaluated_on(metric, facts.datasets)
    return "" if data is None else dataset_text(data)


def _with_last_value(result: Result, run: RunDir, facts: RunFacts, read_last: ReadLastValues) -> Result:
    logged = logged_result(facts, partial(read_last, run))
    if logged is None:
        return result
    metric, mode, last = logged
    data = _data_of(metric, facts)
    return replace(result, metric=metric, mode=mode, value=last.value, is_last=True, data=data, step=last.step)


@dataclass(frozen=True, kw_only=True)
class RankedRow:
    """A run, or a setting of a sweep with all its seeds: the best row is a setting, never a seed."""

    results: tuple[Result, ...]  #: the best one first
    measured: Measured = field(compare=False)  #: without per-sample results

    @property
    def best_result(self) -> Result:
        return self.results[0]

    @property
    def name(self) -> str:
        """The name of the run or setting."""
        return self.best_result.name

    @property
    def short_name(self) -> str:
        """The name without a generated part: `lr=0.1` of `lr=0.1 (ddp-20261122-121700-1a2b)`."""
        short, _, rest = self.name.removesuffix(")").rpartition(" (")
        if short and is_generated(rest):
            return short
        return self.name

    @property
    def order(self) -> tuple[float, float, str]:
        """The key by which the best row comes first; means of equal values differ by the rounding of floats."""
        mean = float(f"{self.measured.mean:.12g}")
        return mean if self.best_result.mode == "min" else -mean, self.best_result.ended, self.best_result.run_id

    @property
    def value_text(self) -> str:
        """The value with its error, of several seeds the mean with their standard deviation."""
        if len(self.results) > 1:
            return mean_text(self.measured.values)
        value = self.best_result.value
        text = with_error(value, share_error(value, self.best_result.num_samples), f"{value:.6g}")
        if self.best_result.setting:
            text += " (n=1)"
        return text

    @property
    def steps_text(self) -> str:
        """The step of the value, or those of all seeds, as `138` or `90 to 138`; empty if none is recorded."""
        known = {result.step for result in self.results if result.step is not None}
        if not known:
            return ""
        lowest, highest = min(known), max(known)
        if lowest == highest:
            return f"{lowest:,}"
        return f"{lowest:,} to {highest:,}"

    @property
    def state(self) -> str:
        """The statuses with which the runs ended."""
        return ", ".join(sorted({result.status for result in self.results if result.status}))

    @property
    def cost(self) -> str:
        """The allocated hours of all runs, with their price if it is known."""
        return cost_of(self.results)


#: Returns the values of a row, with the per-sample results of a single run if its folder is at hand.
Measure = Callable[[RankedRow], Measured]


def measure_in(folder_of: Callable[[Result], RunDir | None]) -> Measure:
    """Return a `Measure` that reads each row once.

    Args:
        folder_of: returns the folder of a run; None if it is not on this machine.
    """

    @cache
    def measure(row: RankedRow) -> Measured:
        if row.best_result.setting:
            return row.measured
        run = folder_of(row.best_result)
        if run is None:
            return row.measured
        facts = readable(lambda: read_facts(run))
        if facts is None or facts.best is None:
            return row.measured
        if (facts.monitor, facts.best_value) != (row.best_result.metric, row.best_result.value):
            return row.measured
        return facts.measured()

    return measure


def make_rows(results: Iterable[Result]) -> list[RankedRow]:
    """Return the runs and settings, the best of each kind first; the kind with most rows comes first.

    The order depends on the results alone. The verdicts also need the folders of the runs, see `measure_in`.
    """
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        if result.metric:
            row = (result.setting, result.parent) if result.setting else (result.run_id, result.folder)
            groups.setdefault((*row, *result.kind), []).append(result)
    rows = []
    for group in groups.values():
        group.sort(key=lambda result: (result.sort_value, result.ended, result.run_id))
        measured = Measured(values=tuple(result.value for result in group), mode=group[0].mode)
        rows.append(RankedRow(results=tuple(group), measured=measured))
    counts = Counter(row.best_result.kind for row in rows)
    return sorted(rows, key=lambda row: (-counts[row.best_result.kind], row.best_result.kind, row.order))


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A row with its place among comparable rows."""

    place: int  #: equal values share a place
    row: RankedRow
    verdict: Verdict | None  #: against the best row; None for the best row itself

    @property
    def verdict_text(self) -> str:
        """The verdict as text; `the best` for the best row."""
        if self.verdict is None:
            return "the best"
        return self.verdict.text


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Comparable rows, the best one first."""

    rows: Sequence[RankedRow]
    measure: Measure = field(compare=False)

    @property
    def title(self) -> str:
        """The metric, the data of the evaluation, and which value is best."""
        return " · ".join(part for part in self.rows[0].best_result.kind if part)

    @property
    def beside_next(self) -> str:
        """`within noise of B`: the best row against the next one; empty without it."""
        if len(self.rows) <= 1:
            return ""
        best, second = self.rows[:2]
        return judge(base=self.measure(second), other=self.measure(best)).beside(second.short_name)

    def placed(self, limit: int | None = None) -> list[Placed]:
        """Return the first `limit` rows, by default all, with their places and verdicts."""
        values = [row.order[0] for row in self.rows]
        best = self.rows[0]
        shown = []
        for row in self.rows[:limit]:
            verdict = None
            if row is not best:
                verdict = judge(base=self.measure(best), other=self.measure(row))
            shown.append(Placed(place=1 + bisect_left(values, row.order[0]), row=row, verdict=verdict))
        return shown


def rankings(results: Iterable[Result], measure: Measure) -> list[Ranking]:
    """Return the rankings of all kinds of results; the kind with most rows comes first."""
    groups = groupby(make_rows(results), lambda row: row.best_result.kind)
    return [Ranking(rows=list(rows), measure=measure) for _, rows in groups]
