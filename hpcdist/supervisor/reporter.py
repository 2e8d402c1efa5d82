"""Reporters receive the events of a supervised run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hpcdist.run.attempt import Attempt
from hpcdist.run.attempt_times import reached_before
from hpcdist.run.folder import RunDir
from hpcdist.run.pending_config import adopt
from hpcdist.run.saved_checkpoints import newest_step, resume_point
from hpcdist.supervisor.restart_policy import Failure


class Reporter(Protocol):
    """Receives the events of a run, such as `RunView` in `cli/render.py`, which shows them to a user."""

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        """An attempt begins."""

    def progress(self, beat: Mapping[str, Any]) -> None:
        """A heartbeat of a rank has arrived."""

    def note(self, text: str) -> None:
        """The supervisor has a message for the user."""

    def output(self, text: str) -> None:
        """A script or an own trainer has printed lines."""

    def failure(self, failure: Failure, log: Path) -> None:
        """An attempt has failed; `log` is that of the first failed rank."""


class AdoptingReporter:
    """Forwards all events, notes where an attempt continues, and adopts the pending config at the first completed step.

    Args:
        is_script: a plain script has no steps: its first output counts as one.
    """

    def __init__(self, run: RunDir, report: Reporter, *, is_script: bool = False) -> None:
        self._is_script = is_script
        self._run = run
        self._report = report
        self._pending = run.next_config.is_file()
        self.first_step = newest_step(run) or 0

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        self.first_step = newest_step(self._run) or 0
        self._report.attempt(attempt, num_ranks)
        if attempt.number > 1:
            self._report.note(resume_point(self._run, reached_before(attempt), is_script=self._is_script))

    def progress(self, beat: Mapping[str, Any]) -> None:
        self._progressed(beat.get("step", 0) > self.first_step)
        self._report.progress(beat)

    def note(self, text: str) -> None:
        self._report.note(text)

    def output(self, text: str) -> None:
        self._progressed(self._is_script)
        self._report.output(text)

    def failure(self, failure: Failure, log: Path) -> None:
        self._report.failure(failure, log)

    def _progressed(self, has_step: bool) -> None:
        if self._pending and has_step:
            adopt(self._run)
            self._pending = False


def log_of(attempt: Attempt, failure: Failure) -> Path:
    """Return the log file with the details of a failure."""
    if failure.kind == "unfit":
        return attempt.preflight.with_suffix(".txt")
    srun = attempt.path / "srun.log"  # on Slurm only
    return srun if failure.kind == "not_started" and srun.exists() else attempt.log(failure.rank)
