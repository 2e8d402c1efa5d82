"""Comparison of runs: what differs in config, code, environment and outcome."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from hpcdist.files.retry import retry
from hpcdist.review.charts import number
from hpcdist.review.drawing import duration
from hpcdist.review.facts import RunFacts, read_facts
from hpcdist.review.html_report import utc
from hpcdist.review.ledger import percent, read_ledger
from hpcdist.review.metric_charts import is_hidden
from hpcdist.review.run_sections import read_environment, text_of
from hpcdist.review.series import Series
from hpcdist.run.folder import RunDir

#: Shown for a value that a run does not have.
MISSING = "–"
#: Keys of the environment that other rows show.
_OWN_ENVIRONMENT = ("command", "code.", "git_", "slurm.")


def compare(
    runs: Mapping[str, RunDir], series: Mapping[str, Mapping[str, Series]]
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the rows in which runs differ: title of a section → name of a row → values in the order of the runs.

    Args:
        runs: by label.
        series: metrics of the runs by label.

    Raises RunFolderError if a run cannot be read, OSError if the file system fails.
    """
    facts = {label: read_facts(run) for label, run in runs.items()}
    compared = [_sections(run, facts[label], series[label]) for label, run in runs.items()]
    # A key that one run has set is compared with the default of the other.
    keys = dict.fromkeys(key for one in facts.values() for key in one.parameters if key != "name")
    found = {}
    for title in compared[0]:
        names = keys if title == "config" else dict.fromkeys(name for one in compared for name in one[title])
        rows = {name: tuple(one[title].get(name, MISSING) for one in compared) for name in names}
        if differing := {name: values for name, values in rows.items() if len(set(values)) > 1}:
            found[title] = differing
    return found


def _sections(run: RunDir, facts: RunFacts, series: Mapping[str, Series]) -> dict[str, dict[str, str]]:
    """Return the values of one run: title of a section → name of a row → value."""
    return {
        "config": {key: text_of(value) for key, value in {**facts.config, **facts.parameters}.items()},
        "code": _code(run, facts),
        "environment": _environment(run, facts),
        "outcome": _outcome(run, facts),
        "metrics": _metrics(facts, series),
    }


def _code(run: RunDir, facts: RunFacts) -> dict[str, str]:
    patch = run.path / "code.patch"
    try:
        content = retry(patch.read_bytes, patch)
    except FileNotFoundError:
        content = b""
    return {
        "commit": facts.git_commit or "none",
        "uncommitted changes": f"code.patch {hashlib.sha256(content).hexdigest()[:12]}" if content else "none",
        "folder": facts.cwd,
        "command": facts.command,
    }


def _environment(run: RunDir, facts: RunFacts) -> dict[str, str]:
    found = {key: text for key, text in read_environment(run).items() if not key.startswith(_OWN_ENVIRONMENT)}
    nodes = facts.attempts[-1].nodes if facts.attempts else ()
    return {**found, "nodes": text_of(", ".join(nodes)), "ranks": str(facts.state.world_size)}


def _outcome(run: RunDir, facts: RunFacts) -> dict[str, str]:
    ledger, state = read_ledger(run), facts.state
    lost = [attempt.steps_lost for attempt in facts.attempts]
    found = {
        "state": state.status,
        "reason": text_of(state.reason),
        "created": utc(state.created),
        "attempts": str(state.attempt),
        "steps lost": "not measured" if None in lost else str(sum(one or 0 for one in lost)),
    }
    if ledger.running_s:
        found["running"] = duration(ledger.running_s)
    if facts.best_value is not None and facts.best is not None:
        found[f"best {facts.monitor}"] = f"{number(facts.best_value)} at step {facts.best.step}"
    if ledger.allocated_s:
        found[f"{ledger.unit}-hours"] = number(ledger.allocated_s / 3600)
        found["goodput"] = percent(ledger.goodput, 1)
        found["in the queue"] = duration(ledger.queue_s)
    if ledger.energy_kwh is not None:
        found["energy"] = f"{number(ledger.energy_kwh)} kWh ({ledger.energy_of})"
    return found


def _metrics(facts: RunFacts, series: Mapping[str, Series]) -> dict[str, str]:
    """Return the last value of each metric, and the lowest of a loss or the best of the monitored metric."""
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
