"""Sentences on the step at which a resumed run continues."""

from collections.abc import Sequence

from hpcdist.config.training_schema import script_name
from hpcdist.config.written import read_stored
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.host import retry
from hpcdist.run.checkpoint_files import newest_step, script_files
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.reached_steps import done_step, lost_steps


def resume_point(run: RunDir, before: Attempt, script: Sequence[str] = ()) -> str:
    """Return a sentence on where the attempt after `before` continues, with the steps of `before` that are lost."""
    if script:
        return _start(script_name(script), script_files(run))
    newest = newest_step(run)
    at = "starting at step 0, since there is no checkpoint" if newest is None else f"resuming at step {newest}"
    first = newest or 0
    lost = lost_steps(done_step(before), first)
    if not lost:
        return at
    # The range, because the last heartbeat of a killed rank may be older.
    if lost == 1:
        return f"{at}, 1 step lost (step {first + 1})"
    return f"{at}, {lost} steps lost ({first + 1} to {first + lost})"


def script_of(run: RunDir) -> str:
    """Return the name of the run's plain script; empty if the run has a trainer, or its config cannot be read."""
    try:
        return read_stored(run.config).config.trainer.script_name
    except (ConfigError, RunFolderError):
        return ""


def continuation(run: RunDir) -> str:
    if not (script := script_of(run)):
        return f"`{run.resume_command}` continues from the newest checkpoint"
    return f"`{run.resume_command}` {_start(script, script_files(run))}"


def how_stopped(run: RunDir, attempt: Attempt, script: Sequence[str], began: float) -> str:
    """Return how a run has stopped; of a script also what it has saved since `began`, and the effect of a resume."""
    if not script:
        return "everything saved"
    ended = attempt.outcomes().get(0, {}).get("reason") or f"{script_name(script)} was ended by SIGTERM"
    saved = "saved nothing in hpcdist.checkpoint_dir()"
    files = retry.retry(lambda: script_files(run), run.checkpoints)
    if files and (newest := run.checkpoints / files[-1]).lstat().st_mtime >= began:
        saved = f"saved {run.checkpoints.name}/{newest.name}"
    return f"{ended} and {saved}; a resume {_start('it', files)}"


def _start(script: str, files: Sequence[str]) -> str:
    again, anew = "again, with its files in the run's checkpoints/", "from the beginning, unless it has saved elsewhere"
    return f"starts {script} {again if files else anew}"
