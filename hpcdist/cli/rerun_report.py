"""Comparison of a rerun with its original, for `hpcdist rerun`."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.log_files import say
from hpcdist.review.comparison import RerunResult, Values, compare_values, data_differences, image_differences
from hpcdist.review.facts import read_facts
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.records import read_rerun, write_rerun
from hpcdist.tracking.points import read_values

if TYPE_CHECKING:
    from hpcdist.tracking.recorded_run import RecordedRun

#: Differing metrics that are printed.
_SHOWN = 8


def compare_rerun(recorded: RecordedRun, made: RunDir, *, tolerance: float, ignore: Collection[str]) -> RerunResult:
    """Compare the values of a rerun that has ended with those of the recorded run.

    Raises TrackingError if the recorded run is read from MLflow and that fails.
    """
    facts, after = read_facts(made), read_values(made)
    values = compare_values(
        recorded.values(),
        after,
        until=None if facts.state.status == "finished" else _last_step(made, facts.state, after),
        exact=recorded.folder is not None,
        tolerance=tolerance,
        ignore=ignore,
    )
    notes = data_differences(recorded.datasets, facts.datasets) + image_differences(recorded.image_digest, facts)
    if facts.state.status not in ("finished", "stopped"):
        notes.append(f"the rerun is {facts.state.status}: values after its last step are not compared")
    if tolerance:
        notes.append(f"values with a relative difference of at most {tolerance:g} count as equal (--tolerance)")
    if ignore:
        notes.append(f"metrics not compared: {', '.join(sorted(ignore))} (--ignore)")
    return RerunResult(values=values, notes=tuple(notes))


def _last_step(made: RunDir, state: State, values: Values) -> int:
    """Return the last step that a run has reported, or logged if it has reported none."""
    beat = made.attempt(state.attempt).read_beat(0) if state.attempt else None
    return (beat or {}).get("step") or max((step for points in values.values() for step in points), default=0)


def compare_again(
    made: RunDir, runs_dir: Path, scratch: Path, *, tolerance: float, ignore: Collection[str]
) -> RerunResult:
    """Compare a rerun with the original that its folder names. Raises UserMistake if it is no rerun, or has not ended.

    Args:
        scratch: an existing folder for files from MLflow.
    """
    from hpcdist.tracking.recorded_run import find_recorded

    record = read_rerun(made)
    if record is None:
        raise UserMistake(f"run {made.name} is not a rerun: `hpcdist compare` compares any runs")
    if (status := made.read_state().status) not in ENDED:
        raise UserMistake(f"run {made.name} is {status}: compare it when it has ended (`hpcdist follow {made.name}`)")
    folder = Path(record.folder) if record.folder else None
    name = str(folder) if folder is not None and folder.is_dir() else record.run_id
    if not name:
        raise UserMistake(f"the original of run {made.name} is gone: {record.folder} does not exist")
    env = {**os.environ, **({"MLFLOW_TRACKING_URI": record.uri} if record.uri else {})}
    return compare_rerun(find_recorded(name, runs_dir, env, scratch), made, tolerance=tolerance, ignore=ignore)


def report(made: RunDir, result: RerunResult) -> int:
    """Print the result of a comparison, and add it to the run folder and to MLflow. Returns the exit code."""
    values = result.values
    for note in result.notes:
        say(note)
    for difference in values.differences[1 : _SHOWN + 1]:
        say(f"also differs from {difference}")
    if values.measured:
        say(f"not compared, since they measure time or hardware: {', '.join(values.measured)}")
    say(result.sentence)
    record = read_rerun(made)
    if record is not None:
        write_rerun(made, replace(record, result="; ".join([result.sentence, *result.notes])))
        _upload(made)
    return 0 if result.is_equal else 1


def _upload(made: RunDir) -> None:
    """Update the description in MLflow, which contains the result."""
    from hpcdist.tracking.sync_runs import sync_run

    try:
        sync_run(made, os.environ)
    except (HpcdistError, OSError) as error:
        say(f"the result is not in MLflow yet ({error}): `hpcdist sync {made.name}` uploads it")
