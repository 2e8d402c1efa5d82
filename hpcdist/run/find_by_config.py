"""Find the unfinished run of a config: `hpcdist run CONFIG --resume`, and containers that are started again."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from hpcdist.config.loading import load_run_config
from hpcdist.config.schema import Config
from hpcdist.config.written import to_yaml
from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.host.files import require_trusted
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import is_held
from hpcdist.run.lookup import find_runs

log = logging.getLogger(__name__)


def find_unfinished(config: Config) -> RunDir | None:
    """Return the newest local run that was started with the same config and was stopped, or died, before its end.

    Finished, failed and cancelled runs do not count, and neither do runs that a live supervisor holds. Takes up to a
    minute if it is uncertain whether a supervisor in another container is alive.
    """
    found: list[tuple[float, RunDir]] = []
    for run in find_runs(Path(config.runs_dir)):
        if run.experiment != config.experiment or run.slurm.exists():
            continue
        try:
            state = run.read_state()
            require_trusted(run.path, "run --resume")
        except (RunFolderError, OSError) as error:
            log.warning("run %s is not resumed: %s", run.name, error)
            continue
        if state.status in ("stopped", "running") and _has_config(run, config):
            found.append((state.created, run))
    for _, run in sorted(found, key=lambda item: -item[0]):
        if run.environment.is_file() and not is_held(run):
            return run
    return None


def _has_config(run: RunDir, config: Config) -> bool:
    """Return whether a run was started with a config; names are compared only if the config sets one."""
    if config.name not in ("", run.name):
        return False
    try:
        theirs = load_run_config(run.config, [], {}, require_secrets=False)
    except UserMistake:  # written by another version of hpcdist
        return False
    return to_yaml(theirs) == to_yaml(replace(config, name=run.name))
