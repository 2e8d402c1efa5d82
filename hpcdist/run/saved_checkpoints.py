"""What a run has saved, and where its resume continues; neither reads tensors nor imports torch.

hpcdist knows the folder in which a plain script saves, but not the files.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpcdist.config.schema import script_name
from hpcdist.config.written import plain_tree
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.files import retry
from hpcdist.files.atomic import read_json
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir

#: Written last: a checkpoint without it is incomplete.
MANIFEST_FILE = "manifest.json"
_FOLDER = re.compile(r"step-([0-9]{8,18})")


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder; None if the name is not one of a checkpoint."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def complete_checkpoints(run: RunDir) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint with a manifest, oldest first; no content is read."""
    manifests = retry.retry(lambda: list(run.checkpoints.glob(f"step-*/{MANIFEST_FILE}")), run.checkpoints)
    return sorted((step, path.parent) for path in manifests if (step := step_of(path.parent)) is not None)


def script_files(run: RunDir) -> list[str]:
    """Return the names of the files and folders that a script has saved in the folder, the newest last."""
    found = []
    for path in run.checkpoints.glob("[!.]*"):
        with suppress(FileNotFoundError):  # the script has just removed it
            found += [(path.lstat().st_mtime_ns, path.name)] if step_of(path) is None else []
    return [name for _, name in sorted(found)]


def newest_step(run: RunDir) -> int | None:
    """Return the step of the newest checkpoint with a readable manifest, or None; hashes are not verified.

    Raises RunFolderError if a newer hpcdist has written it, OSError if the file system fails.
    """
    for step, folder in reversed(complete_checkpoints(run)):
        if read_json(folder / MANIFEST_FILE) is not None:
            return step
    return None


def resume_point(run: RunDir, reached: int, *, is_script: bool = False) -> str:
    """Return a sentence on where the next attempt of a run continues.

    Args:
        reached: last step that earlier attempts have done.
        is_script: whether the files in the folder are those of a script, which decides itself what it loads.
    """
    if is_script:
        names, done = script_files(run), f" (after step {reached})" if reached else ""
        if not names:
            return f"the script starts again{done}, without a file in {run.checkpoints.name}/"
        saved = _time_of(run.checkpoints / names[-1])
        return f"the script starts again{done}; its newest file in {run.checkpoints.name}/ is {names[-1]} of {saved}"
    step = newest_step(run)
    at = "starting at step 0, since there is no checkpoint"
    if step is not None:
        at = f"resuming at step {step}, checkpoint of {_time_of(run.checkpoints / folder_name(step) / MANIFEST_FILE)}"
    lost = max(0, reached - (step or 0))
    return at + (f", {lost} step{'s' * (lost != 1)} lost" if lost else "")


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
        return "everything saved"
    ended = attempt.outcomes().get(0, {}).get("reason") or f"{script_name(script)} was ended by SIGTERM"
    saved = "saved nothing in hpcdist.checkpoint_dir()"
    files = retry.retry(lambda: script_files(run), run.checkpoints)
    if files and (newest := run.checkpoints / files[-1]).lstat().st_mtime >= began:
        saved = f"saved {run.checkpoints.name}/{newest.name} at {_time_of(newest)}"
    return f"{ended} and {saved}; a resume {_start('it', files)}"


def _start(script: str, files: Sequence[str]) -> str:
    again, anew = "again, with its files in the run's checkpoints/", "from the beginning, unless it has saved elsewhere"
    return f"starts {script} {again if files else anew}"


def _time_of(path: Path) -> str:
    """Return when a file was written, with the date if that was not today."""
    written = time.localtime(os.lstat(path).st_mtime)
    is_today = written[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", written)
