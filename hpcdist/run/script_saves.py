"""What a stopped plain script has saved, and what its resume does. hpcdist knows the folder, but not the files."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpcdist.config.schema import script_name
from hpcdist.config.written import plain_tree
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.files import retry
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.run.saved_checkpoints import script_files


def script_of(run: RunDir) -> str:
    """Return the name of the run's plain script; empty if the run has a trainer, or its config cannot be read."""
    try:
        script = (plain_tree(run.effective_config).get("trainer") or {}).get("script")
    except (ConfigError, RunFolderError, AttributeError):
        return ""
    return script_name([str(word) for word in script]) if isinstance(script, list) else ""


def continuation(run: RunDir) -> str:
    """Return where `hpcdist resume` of a run continues."""
    if not (script := script_of(run)):
        return f"`hpcdist resume {run.name}` continues from the newest checkpoint"
    return f"`hpcdist resume {run.name}` {_start(script, script_files(run))}"


def how_stopped(run: RunDir, attempt: Attempt, script: Sequence[str], began: float) -> str:
    """Return how a run has stopped; of a plain script also what it has saved, and what a resume does.

    Args:
        script: `trainer.script`; empty for a trainer, which saves before it stops.
        began: begin of the attempt.
    """
    if not script:
        return "stopped with everything saved"
    ended = attempt.outcomes().get(0, {}).get("reason") or f"{script_name(script)} was ended by SIGTERM"
    saved = "saved nothing in hpcdist.checkpoint_dir()"
    files = retry.retry(lambda: script_files(run), run.checkpoints)
    if files and (at := (run.checkpoints / files[-1]).lstat().st_mtime) >= began:
        saved = f"saved {run.checkpoints.name}/{files[-1]} at {time.strftime('%H:%M:%S', time.localtime(at))}"
    return f"{ended} and {saved}; a resume {_start('it', files)}"


def _start(script: str, files: Sequence[str]) -> str:
    where = (
        "again, with its files in the run's checkpoints/"
        if files
        else "from the beginning, unless it has saved elsewhere"
    )
    return f"starts {script} {where}"
