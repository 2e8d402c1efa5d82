"""Sentences on the step at which a resumed run continues."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

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
    if newest is None:
        newest = 0
        place = "starting at step 0, since there is no checkpoint"
    else:
        place = f"resuming at step {newest}"
    num_lost = lost_steps(done_step(before), newest)
    if not num_lost:
        return place
    # The sentence names the steps, because the last heartbeat of a killed rank may be older than its last step.
    if num_lost == 1:
        return f"{place}, 1 step lost (step {newest + 1})"
    return f"{place}, {num_lost} steps lost ({newest + 1} to {newest + num_lost})"


def nothing_saved(run: RunDir, script: Sequence[str]) -> str:
    """Return a clause that says that a restart would begin at zero; empty if the run has saved something."""
    if script:
        if script_files(run):
            return ""
        return f"{script_name(script)} has saved nothing in hpcdist.checkpoint_dir()"
    if newest_step(run) is not None:
        return ""
    return "there is no checkpoint (checkpoint.every_steps)"


def script_of(run: RunDir) -> str:
    """Return the name of the run's plain script; empty if the run has a trainer, or its config cannot be read."""
    try:
        return read_stored(run.config).config.trainer.script_name
    except (ConfigError, RunFolderError):
        return ""


def continuation(run: RunDir) -> str:
    """Return a clause with the command that continues a run, and the point from which it continues."""
    script = script_of(run)
    if not script:
        return f"`{run.resume_command}` continues from the newest checkpoint"
    return f"`{run.resume_command}` {_start(script, script_files(run))}"


def how_stopped(run: RunDir, attempt: Attempt, script: Sequence[str], began: float) -> str:
    """Return how a run has stopped; for a script also the files that it has saved, and the effect of a resume.

    Args:
        began: begin of the attempt, in seconds since the epoch; older files do not count as saved.
    """
    if not script:
        return "everything saved"
    outcome = attempt.outcomes().get(0, {})
    ended = outcome.get("reason") or f"{script_name(script)} was ended by SIGTERM"
    files = retry.retry(lambda: script_files(run), run.checkpoints)
    newest = _newest_since(run.checkpoints, files, began)
    saved = "saved nothing in hpcdist.checkpoint_dir()"
    if newest:
        saved = f"saved {run.checkpoints.name}/{newest}"
    return f"{ended} and {saved}; a resume {_start('it', files)}"


def _newest_since(folder: Path, files: Sequence[str], began: float) -> str:
    """Return the newest of `files` (oldest first) that still exists; empty if it is older than `began`."""
    for name in reversed(files):
        with suppress(FileNotFoundError):  # the script, or its user, has deleted it after the listing
            if (folder / name).lstat().st_mtime >= began:
                return name
            return ""
    return ""


def _start(script: str, files: Sequence[str]) -> str:
    if files:
        return f"starts {script} again, with its files in the run's checkpoints/"
    return f"starts {script} from the beginning, unless it has saved elsewhere"
