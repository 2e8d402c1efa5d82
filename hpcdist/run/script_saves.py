"""What a stopped plain script has saved, and what its resume does. hpcdist knows the folder, but not the files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hpcdist.config.schema import script_name
from hpcdist.config.written import plain_tree
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir


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
    return f"`hpcdist resume {run.name}` {_start(run, script)}"


def how_stopped(run: RunDir, attempt: Attempt, script: Sequence[str], began: float) -> str:
    """Return how a run has stopped; of a plain script also what it has saved, and what a resume does.

    Args:
        script: `trainer.script`; empty for a trainer, which saves before it stops.
        began: begin of the attempt.
    """
    if not script:
        return "stopped with everything saved"
    ended = attempt.outcomes().get(0, {}).get("reason") or f"{script_name(script)} was ended by SIGTERM"
    newest = _newest_file(run)
    saved = "saved nothing in hpcdist.checkpoint_dir()"
    if newest is not None and newest[0] >= began:
        saved = f"saved {newest[1].relative_to(run.path)} at {time.strftime('%H:%M:%S', time.localtime(newest[0]))}"
    return f"{ended} and {saved}; a resume {_start(run, 'it')}"


def _start(run: RunDir, script: str) -> str:
    if _newest_file(run) is None:
        return f"starts {script} from the beginning, unless it has saved elsewhere"
    return f"starts {script} again, with its files in the run's {run.checkpoints.name}/"


def _newest_file(run: RunDir) -> tuple[float, Path] | None:
    """Return time and path of the newest file in `hpcdist.checkpoint_dir()`; None without one."""
    try:
        files = [(path.stat().st_mtime, path) for path in run.checkpoints.rglob("*") if path.is_file()]
    except OSError:  # the script removes files
        return None
    return max(files, default=None)
