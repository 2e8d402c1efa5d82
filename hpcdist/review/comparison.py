"""The comparison of runs: results, configs, code, environments, and each logged value."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from hpcdist.errors import duration
from hpcdist.host.retry import retry
from hpcdist.review.charts import number
from hpcdist.review.description import setup_rows
from hpcdist.review.facts import RunFacts, Series, is_hidden, read_environment
from hpcdist.review.ledger import hours_text, read_ledger
from hpcdist.review.markdown import clock, text_of
from hpcdist.review.sweep_facts import SweepFacts
from hpcdist.review.uncertainty import ends, signed
from hpcdist.review.verdict import Verdict, judge
from hpcdist.run.folder import RunDir

#: Shown for a value that a run does not have.
MISSING = "–"
#: Keys of the environment that other rows show.
_OWN_ENVIRONMENT = ("command", "code.", "git_", "like.", "slurm.")


def compare(
    facts: Mapping[str, RunFacts], series: Mapping[str, Mapping[str, Series]]
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the rows in which runs differ: title of a section → name of a row → values in the order of the runs."""
    compared = [_sections(RunDir(one.folder), one, series[label]) for label, one in facts.items()]
    # A key that one run has set is compared with the default of the other.
    keys = dict.fromkeys(key for one in facts.values() for key in one.parameters if key != "name")
    found = {}
    for title in compared[0]:
        names = keys if title == "config" else dict.fromkeys(name for one in compared for name in one[title])
        rows = {name: tuple(one[title].get(name, MISSING) for one in compared) for name in names}
        differing = {name: values for name, values in rows.items() if len(set(values)) > 1}
        # `roles {}` beside `roles.trainer` would be one change in two rows.
        if shown := {
            name: pair for name, pair in differing.items() if not any(one.startswith(f"{name}.") for one in differing)
        }:
            found[title] = shown
    return found


_SPEED = re.compile(r"(?!system/|comm/).*(^|_|/)per_(s|sec|second)(?=, median|$)")


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
    base, first = next(iter(facts.items()))
    found = []
    for label, one in facts.items():
        if one.best is None or one.monitor != first.monitor:
            continue
        text = one.best_text(number(one.best_value))
        value = ComparedValue(run=label, metric=f"best {one.monitor}", value=one.best_value, text=text)
        if one is not first and first.best is not None:
            value = _judged(value, judge(first.measured(), one.measured()))
        found.append(value)
    speeds = dict.fromkeys(key for one in series.values() for key in sorted(one) if _SPEED.fullmatch(key))
    for key in speeds:
        known = {label: one[key].median for label, one in series.items() if key in one}
        medians = {label: median for label, median in known.items() if median is not None}
        before = medians.get(base)
        for label, median in medians.items():
            delta = None if before is None or label == base else median - before
            value = ComparedValue(run=label, metric=f"{key}, median", value=median, text=number(median), delta=delta)
            found.append(value)
    return found


def compare_settings(facts: SweepFacts) -> list[ComparedValue]:
    """Return the mean of each setting of a sweep over seeds, the best one first, and the verdicts against the best.

    If it is unknown whether higher or lower values are better, the means are not compared.
    """
    verdicts = facts.minus_best
    found = []
    for one in facts.settings:
        if one.mean is None:
            continue
        value = ComparedValue(run=one.label, metric=f"mean {facts.monitor}", value=one.mean, text=one.text)
        if one.label in verdicts:
            value = _judged(value, verdicts[one.label])
        found.append(value)
    return found


def _judged(value: ComparedValue, found: Verdict) -> ComparedValue:
    return replace(value, delta=found.delta, interval=found.interval, verdict=found.word, method=found.method)


def _sections(run: RunDir, facts: RunFacts, series: Mapping[str, Series]) -> dict[str, dict[str, str]]:
    try:
        changes = retry(run.patch.read_bytes, run.patch)
    except FileNotFoundError:
        changes = b""
    environment = {key: text for key, text in read_environment(run).items() if not key.startswith(_OWN_ENVIRONMENT)}
    nodes = facts.attempts[-1].nodes if facts.attempts else ()
    return {
        "config": {key: text_of(value) for key, value in {**facts.stored.values, **facts.parameters}.items()},
        "code": {
            "commit": facts.git_commit or "none",
            "uncommitted changes": f"code.patch {hashlib.sha256(changes).hexdigest()[:12]}" if changes else "none",
            "folder": facts.cwd,
            "command": facts.command,
        },
        "data": {"datasets": "\n".join(lines)} if (lines := dict(setup_rows(facts)).get("Data")) else {},
        "environment": {**environment, "nodes": text_of(", ".join(nodes)), "ranks": str(facts.state.world_size)},
        "outcome": _outcome(run, facts),
        "metrics": _metrics(facts, series),
    }


def _outcome(run: RunDir, facts: RunFacts) -> dict[str, str]:
    ledger, state = read_ledger(run), facts.state
    lost = [attempt.steps_lost for attempt in facts.attempts]
    found = {
        "state": state.status,
        "reason": text_of(state.reason),
        "created": clock(state.created),
        "attempts": str(state.attempt),
        "steps lost": "not measured" if None in lost else str(sum(one or 0 for one in lost)),
    }
    if ledger.running_s:
        found["running"] = duration(ledger.running_s)
    if facts.best is not None:
        found[f"best {facts.monitor}"] = f"{facts.best_text(number(facts.best_value))} at step {facts.best.step}"
    if ledger.allocated_s:
        found[f"{ledger.unit}-hours"] = hours_text(ledger.allocated_s)
        found["goodput"] = ledger.goodput_text
        found["in the queue"] = duration(ledger.queue_s)
    if ledger.energy_text:
        found["energy"] = ledger.energy_text
    return found


def _metrics(facts: RunFacts, series: Mapping[str, Series]) -> dict[str, str]:
    found = {}
    for key, one in sorted(series.items()):
        if is_hidden(key) or one.last is None or one.lowest is None or one.highest is None:
            continue
        found[f"{key}, last"] = number(one.last)
        is_monitored = key == facts.monitor
        if "loss" in key.lower() or (is_monitored and facts.monitor_mode == "min"):
            found[f"{key}, lowest"] = number(one.lowest)
        elif is_monitored:
            found[f"{key}, highest"] = number(one.highest)
    return found


#: Logged values of one run: metric → step → value.
Values = Mapping[str, Mapping[int, float]]
#: Metrics that a sentence names.
_SHOWN = 6
#: Metrics that measure the machine or the time, which no run repeats exactly.
_MEASURED = ("attempt", "system/*", "time/*", "usage/*", "comm/*", "pipeline/bubble", "pipeline/busy_s/*")
_MEASURED_END = re.compile(r"(^|_|/)(s|ms|us|ns|seconds?|sec|hours|time|runtime|latency|per_s|per_sec|per_second)$")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first step at which a metric differs; a value is None if that run has none at this step."""

    step: int
    key: str
    before: float | None
    after: float | None

    def __str__(self) -> str:
        texts = ["not logged" if value is None else repr(value) for value in (self.before, self.after)]
        return f"step {self.step}: {self.key} was {texts[0]}, is {texts[1]}"


@dataclass(frozen=True, kw_only=True)
class ValueComparison:
    num_values: int  #: compared pairs of values
    num_steps: int  #: different steps with compared values
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
        if not self.num_values:
            return "nothing was compared: the runs have no common values"
        compared = f"{self.num_values:,} values of {self.num_metrics} metrics at {self.num_steps:,} steps"
        if self.differences:
            return f"the first difference is at {self.differences[0]}; {self.num_differing:,} of {compared} differ"
        if self.unshared:
            names, left_out = ", ".join(self.unshared[:_SHOWN]), len(self.unshared) - _SHOWN
            return f"only one of the runs has logged {names}" + (f" and {left_out} more" if left_out > 0 else "")
        return f"no value differs: {compared}"


def is_measured(key: str) -> bool:
    """Return whether a metric measures time, speed or the machine by its name."""
    return any(fnmatchcase(key, pattern) for pattern in _MEASURED) or bool(_MEASURED_END.search(key))


def compare_values(before: Values, after: Values) -> ValueComparison:
    """Compare the values of a run with those of an earlier run of the same training.

    A value that only one of the runs has is a difference.
    """
    measured = sorted(key for key in {*before, *after} if is_measured(key))
    first = {key: points for key, points in before.items() if key not in measured}
    second = {key: points for key, points in after.items() if key not in measured}
    num_values, num_differing = 0, 0
    steps: set[int] = set()
    found = []
    common = sorted(first.keys() & second.keys())
    for key in common:
        one, other = first[key], second[key]
        shared = one.keys() & other.keys()
        unshared = one.keys() ^ other.keys()
        differing = {step for step in shared if not _equal(one[step], other[step])} | unshared
        num_values += len(shared)
        num_differing += len(differing)
        steps |= shared
        if differing:
            step = min(differing)
            found.append(Difference(step=step, key=key, before=one.get(step), after=other.get(step)))
    return ValueComparison(
        num_values=num_values,
        num_steps=len(steps),
        num_metrics=len(common),
        num_differing=num_differing,
        differences=tuple(sorted(found, key=lambda one: (one.step, one.key))),
        unshared=tuple(sorted(first.keys() ^ second.keys())),
    )


def _equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
