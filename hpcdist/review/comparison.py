"""The comparison of runs: results, configs, code, environments, and each logged value."""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from hpcdist.errors import duration, few, plural
from hpcdist.host.retry import retry
from hpcdist.review.description import setup_rows
from hpcdist.review.facts import RunFacts, lost_text, read_environment
from hpcdist.review.ledger import hours_text, read_ledger
from hpcdist.review.markdown import clock, text_of
from hpcdist.review.metric_series import SYSTEM_PREFIX, Series, median_speeds
from hpcdist.review.svg import number
from hpcdist.review.sweep_facts import SweepFacts
from hpcdist.review.uncertainty import ends, signed
from hpcdist.review.verdict import Verdict, judge
from hpcdist.run.folder import RunDir
from hpcdist.run.snapshot import read_code_files

#: Shown for a value that a run does not have.
MISSING = "–"
#: Title of the copied files, each of which is a row with the digests of its contents.
_FILES = "code files"
#: Limit of the files that are shown.
_MAX_FILES = 20
#: Shown digits of the digest of a file.
_DIGEST_DIGITS = 12
#: Keys of the environment that other rows show.
_OWN_ENVIRONMENT = ("command", "code.", "git_", "like.", "slurm.")


def compare(
    facts: Mapping[str, RunFacts], series: Mapping[str, Mapping[str, Series]]
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the rows in which runs differ: title of a section → name of a row → values in the order of the runs."""
    compared = [_sections(RunDir(run.folder), run, series[label]) for label, run in facts.items()]
    # A key that one run has set is compared with the default of the other.
    config_keys = dict.fromkeys(key for run in facts.values() for key in run.effective_values if key != "name")
    sections = {}
    for title in compared[0]:
        names = config_keys
        if title != "config":
            names = dict.fromkeys(name for run_sections in compared for name in run_sections[title])
        differing = {}
        for name in names:
            values = tuple(run_sections[title].get(name, MISSING) for run_sections in compared)
            if len(set(values)) > 1:
                differing[name] = values
        if title == _FILES:
            shown = _first_files(differing)
        else:
            # `roles {}` beside `roles.trainer` would be one change in two rows.
            shown = {name: values for name, values in differing.items() if not _has_subkey(name, differing)}
        if shown:
            sections[title] = shown
    return sections


def _first_files(differing: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the first rows of files, and one row with the number of the others."""
    rows = dict(sorted(differing.items())[:_MAX_FILES])
    num_others = len(differing) - len(rows)
    if num_others:
        num_runs = len(next(iter(rows.values())))
        rows[f"… and {plural(num_others, 'file')}"] = ("…",) * num_runs
    return rows


def _has_subkey(name: str, names: Iterable[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in names)


@dataclass(frozen=True, kw_only=True)
class ComparedValue:
    """A value of a run against that of the first run."""

    run: str
    metric: str
    value: float
    text: str  #: the value with its error
    delta: float | None = None  #: to the first value; None for the first one itself
    interval: tuple[float, float] | None = None  #: of 95 % of delta; None if it is unknown
    verdict: str = ""  #: see `Verdict`; empty without one
    method: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a table: metric, run, value, difference, its interval, and the verdict."""
        if self.delta is None:
            return self.metric, self.run, self.text, "", "", ""
        before = self.value - self.delta
        delta = signed(self.delta, self.interval)
        if before and not self.verdict:
            delta = f"{100 * self.delta / before:+.1f} %"
        return self.metric, self.run, self.text, delta, ends(self.interval), self.verdict


def compare_results(facts: Mapping[str, RunFacts], series: Mapping[str, Mapping[str, Series]]) -> list[ComparedValue]:
    """Return the best values of the first run's monitored metric, and the median speeds."""
    return [*_compare_best(facts), *_compare_speeds(series, base=next(iter(facts)))]


def _compare_best(facts: Mapping[str, RunFacts]) -> Iterator[ComparedValue]:
    first = next(iter(facts.values()))
    for label, run in facts.items():
        if run.best is None or run.monitor != first.monitor:
            continue
        value = ComparedValue(run=label, metric=f"best {run.monitor}", value=run.best_value, text=run.best_text)
        if run is not first and first.best is not None:
            value = _judged(value, judge(first.measured(), run.measured()))
        yield value


def _compare_speeds(series: Mapping[str, Mapping[str, Series]], base: str) -> Iterator[ComparedValue]:
    """Yield the median speeds of all runs, with their differences from the run `base`."""
    speeds = {label: median_speeds(by_key) for label, by_key in series.items()}
    for key in dict.fromkeys(key for medians in speeds.values() for key in medians):
        before = speeds[base].get(key)
        for label, medians in speeds.items():
            if key not in medians:
                continue
            median = medians[key]
            delta = None
            if before is not None and label != base:
                delta = median - before
            metric = f"{key}, median"
            yield ComparedValue(run=label, metric=metric, value=median, text=number(median), delta=delta)


def compare_settings(facts: SweepFacts) -> list[ComparedValue]:
    """Return the mean of each setting of a sweep over seeds, the best one first, and the verdicts against the best.

    If it is unknown whether higher or lower values are better, the means are not compared.
    """
    values = []
    for row in facts.rows:
        if row.ranked is None or not facts.has_seeds:
            continue
        mean = row.ranked.measured.mean
        value = ComparedValue(run=row.name, metric=f"mean {facts.monitor}", value=mean, text=row.value_text)
        if row.verdict is not None:
            value = _judged(value, row.verdict)
        values.append(value)
    return values


def _judged(value: ComparedValue, verdict: Verdict) -> ComparedValue:
    return replace(
        value,
        delta=verdict.delta,
        interval=verdict.interval,
        verdict=verdict.word,
        method=verdict.method,
    )


def _sections(run: RunDir, facts: RunFacts, series: Mapping[str, Series]) -> dict[str, dict[str, str]]:
    """Return the compared values of a run: title of a section → name of a row → value."""
    try:
        changes = retry(run.patch.read_bytes, run.patch)
    except FileNotFoundError:
        changes = b""
    patch = "none"
    if changes:
        patch = f"code.patch {hashlib.sha256(changes).hexdigest()[:_DIGEST_DIGITS]}"
    environment = {key: text for key, text in read_environment(run).items() if not key.startswith(_OWN_ENVIRONMENT)}
    environment["nodes"] = text_of(", ".join(facts.nodes))
    environment["ranks"] = str(facts.state.world_size)
    data = {}
    datasets = dict(setup_rows(facts)).get("Data")
    if datasets:
        data["datasets"] = "\n".join(datasets)
    config = {**facts.stored.values, **facts.effective_values}
    return {
        "config": {key: text_of(value) for key, value in config.items()},
        "code": {
            "commit": facts.git_commit or "none",
            "uncommitted changes": patch,
            "folder": facts.cwd,
            "command": facts.command,
        },
        _FILES: {name: digest[:_DIGEST_DIGITS] for name, digest in read_code_files(run).items()},
        "data": data,
        "environment": environment,
        "outcome": _outcome(run, facts),
        "metrics": _metrics(series),
    }


def _outcome(run: RunDir, facts: RunFacts) -> dict[str, str]:
    ledger = read_ledger(run)
    state = facts.state
    rows = {
        "state": state.status,
        "reason": text_of(state.reason),
        "created": clock(state.created),
        "attempts": str(state.attempt),
        "steps lost": lost_text(facts.attempts) or "not measured",
    }
    if ledger.running_s:
        rows["running"] = duration(ledger.running_s)
    if facts.best is not None:
        rows[f"best {facts.monitor}"] = facts.best_at_step
    if ledger.allocated_s:
        rows[f"{ledger.unit}-hours"] = hours_text(ledger.allocated_s)
        rows["goodput"] = ledger.goodput_text
        rows["in the queue"] = duration(ledger.queue_s)
    if ledger.energy_text:
        rows["energy"] = ledger.energy_text
    return rows


def _metrics(series: Mapping[str, Series]) -> dict[str, str]:
    """Return the last values; the best one of the primary metric is in the table of results."""
    rows = {}
    for key, points in sorted(series.items()):
        if not key.startswith(SYSTEM_PREFIX) and points.last is not None:
            rows[f"{key}, last"] = number(points.last)
    return rows


#: Logged values of one run: metric → step → value.
Values = Mapping[str, Mapping[int, float]]
#: Metrics that a sentence names.
_SHOWN = 6
#: Metrics that measure the machine or the time, which no run repeats exactly.
_MEASURED = ("system/*", "time/*", "usage/*", "comm/*", "pipeline/bubble", "pipeline/busy_s/*")
_MEASURED_END = re.compile(r"(^|_|/)(s|ms|us|ns|seconds?|sec|hours|time|runtime|latency|per_s|per_sec|per_second)$")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first step at which a metric differs; a value is None if that run has none at this step."""

    step: int
    key: str
    before: float | None
    after: float | None

    def __str__(self) -> str:
        return f"step {self.step}: {self.key} was {_value_text(self.before)}, is {_value_text(self.after)}"


@dataclass(frozen=True, kw_only=True)
class ValueComparison:
    num_values: int  #: compared values of the common metrics, also those that only one of the runs has
    num_steps: int  #: different steps with such values
    num_metrics: int
    num_differing: int
    differences: tuple[Difference, ...]  #: the first one of each differing metric, by step
    unshared: tuple[str, ...]  #: metrics that only one of the runs has logged

    @property
    def is_equal(self) -> bool:
        """Whether values were compared, and both runs have logged the same ones."""
        return self.num_values > 0 and not (self.num_differing or self.unshared)

    @property
    def sentence(self) -> str:
        """The result of the comparison, with the first difference."""
        if not self.num_values:
            return "nothing was compared: the runs have no common values"
        compared = f"{self.num_values:,} values of {plural(self.num_metrics, 'metric')} at {self.num_steps:,} steps"
        if self.differences:
            return f"the first difference is at {self.differences[0]}; {self.num_differing:,} of {compared} differ"
        if self.unshared:
            return f"only one of the runs has logged {few(self.unshared, _SHOWN)}"
        return f"no value differs: {compared}"


def _value_text(value: float | None) -> str:
    return "not logged" if value is None else repr(value)


def is_measured(key: str) -> bool:
    """Return whether a metric measures time, speed or the machine by its name."""
    return any(fnmatchcase(key, pattern) for pattern in _MEASURED) or bool(_MEASURED_END.search(key))


def compare_values(before: Values, after: Values) -> ValueComparison:
    """Compare the values of a run with those of an earlier run of the same training.

    A value that only one of the runs has is a difference.
    """
    first = {key: points for key, points in before.items() if not is_measured(key)}
    second = {key: points for key, points in after.items() if not is_measured(key)}
    num_values = 0
    num_differing = 0
    compared_steps: set[int] = set()
    differences = []
    common = sorted(first.keys() & second.keys())
    for key in common:
        first_points = first[key]
        second_points = second[key]
        shared = first_points.keys() & second_points.keys()
        unshared = first_points.keys() ^ second_points.keys()
        differing = {step for step in shared if not _equal(first_points[step], second_points[step])} | unshared
        num_values += len(shared | unshared)
        num_differing += len(differing)
        compared_steps |= shared | unshared
        if differing:
            step = min(differing)
            differences.append(
                Difference(step=step, key=key, before=first_points.get(step), after=second_points.get(step))
            )
    differences.sort(key=lambda difference: (difference.step, difference.key))
    return ValueComparison(
        num_values=num_values,
        num_steps=len(compared_steps),
        num_metrics=len(common),
        num_differing=num_differing,
        differences=tuple(differences),
        unshared=tuple(sorted(first.keys() ^ second.keys())),
    )


def _equal(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
