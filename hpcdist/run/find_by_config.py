"""Starting the same command again: a container that was stopped and is started anew goes on with its run."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from hpcdist.config.loading import load_run_config
from hpcdist.config.schema import Config
from hpcdist.config.written import to_yaml
from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.files.ownership import require_trusted
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import is_held
from hpcdist.run.lookup import find_runs

log = logging.getLogger(__name__)


def unfinished(config: Config) -> RunDir | None:
    """The newest run that was started with the same config and stopped, or died, before its end.

    A finished, failed or cancelled run is left alone, and so is one that is held: then None is returned, and the
    caller starts another. Takes up to a minute when it is not clear whether a holder in another container lives.
    """
    found: list[tuple[float, RunDir]] = []
    for run in find_runs(Path(config.runs_dir)):
        if run.experiment != config.experiment or run.slurm.exists():
            continue
        try:
            state = run.read_state()
            require_trusted(run.path, "run --again")
        except (RunFolderError, OSError) as error:
            log.warning("run %s is not gone on with: %s", run.name, error)
            continue
        if state.status in ("stopped", "running") and _same(run, config):
            found.append((state.created, run))
    for _, run in sorted(found, key=lambda item: -item[0]):
        if run.environment.is_file() and not is_held(run):
            return run
    return None


def _same(run: RunDir, config: Config) -> bool:
    """Whether a run was started with a config, its name aside unless the config chooses one."""
    if config.name not in ("", run.name):
        return False
    try:
        theirs = load_run_config(run.effective_config, [], {}, require_secrets=False)
    except UserMistake:  # of another version of hpcdist
        return False
    return to_yaml(theirs) == to_yaml(replace(config, name=run.name))
