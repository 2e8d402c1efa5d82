"""Find runs and sweeps: all in a folder, one by its name, or the unfinished one of a config."""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.errors import RunFolderError, UserMistake, suggestion
from hpcdist.host.ownership import is_mine, require_trusted
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import is_held
from hpcdist.run.sweeps import SweepDir

log = logging.getLogger(__name__)


def list_runs(runs_dir: Path) -> tuple[list[RunDir], str]:
    """Return all runs of the current user by name, and a note on folders of other users, which are not read."""
    runs, num_others = [], 0
    for folder in _folders(runs_dir):
        if not is_mine(folder):
            num_others += _is_run(folder) or not os.access(folder, os.X_OK)
        elif _is_run(folder):
            runs.append(RunDir(folder))
    others = f"{num_others} run folder{'s' * (num_others > 1)} of other users"
    return runs, f"{others} skipped: `hpcdist status RUN` shows one by its name" if num_others else ""


def find_runs(runs_dir: Path) -> list[RunDir]:
    return list_runs(runs_dir)[0]


def resolve(text: str, runs_dir: Path) -> RunDir:
    """Return a run or sweep by its folder, `experiment/name`, name, or a unique prefix of its name.

    Runs of the current user take precedence over those of other users.
    """
    if not text.strip():
        raise RunFolderError("the name of the run is empty: `hpcdist runs` lists all names")
    if len(text) > 1024 or not text.isprintable():
        raise RunFolderError(f"{text[:40]!r}… is not a name of a run: `hpcdist runs` lists all names")
    # `abspath` keeps symbolic links, so that messages show the path that the user gave.
    path = Path(os.path.realpath(text) if ".." in Path(text).parts else os.path.abspath(text))
    if (given := _open(path)) is not None:
        return given
    found = [one for folder in _folders(runs_dir) if (one := _open(folder)) is not None]
    own = [one for one in found if is_mine(one.path)]
    exact = [one for one in found if text in (one.name, f"{one.experiment}/{one.name}")]
    matches = (
        [one for one in exact if one in own]
        or exact
        or [one for one in own if one.name.startswith(text)]
        or [one for one in found if one.name.startswith(text)]
    )
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(f"{one.experiment}/{one.name}" for one in matches[:5])
        kind = "sweeps" if all(isinstance(one, SweepDir) for one in matches) else "runs"
        raise RunFolderError(f"{text!r} matches {len(matches)} {kind} ({names}): write more of the name, or the folder")
    if Path(text).is_dir() and ("/" in text or text in (".", "..")):
        raise RunFolderError(f"{text!r} holds no run (no state.json and config.yaml in it): `hpcdist runs` lists runs")
    known = [one.name for one in found] + [f"{one.experiment}/{one.name}" for one in found]
    hint = suggestion(text, known, "`hpcdist runs` lists them")
    raise RunFolderError(f"no run {text!r} under {runs_dir.absolute()}: {hint}")


def newest(runs_dir: Path, *, active: bool = False) -> RunDir:
    """Return the user's newest run or sweep, no cell; with `active`, of those that run or wait."""
    found: dict[float, RunDir] = {}
    for folder in _folders(runs_dir):
        run = _open(folder) if is_mine(folder) and not os.path.lexists(folder / "cell.json") else None
        with suppress(RunFolderError, OSError):
            if run is not None and (not active or run.read_state().status in ("queued", "running")):
                found[run.read_state().created] = run
    if not found:
        kind = " runs or waits" if active else ""
        raise RunFolderError(
            f"no run in {runs_dir.absolute()}{kind}: name one, or set HPCDIST_RUNS_DIR to the folder of all runs"
        )
    return found[max(found)]


def resolve_run(text: str, runs_dir: Path) -> RunDir:
    found = resolve(text, runs_dir)
    if isinstance(found, SweepDir):
        cells = [cell.name for cell in found.cells()]
        raise RunFolderError(f"{found.name} is a sweep: name one of its cells ({', '.join(cells[:3])}, …)")
    return found


def find_unfinished(config: Config) -> RunDir | None:
    """Return the newest local run that was started with the same config and was stopped, or died, before its end.

    Takes up to a minute if it is uncertain whether a supervisor in another container is alive.
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
    from hpcdist.config.loading import load_run_config
    from hpcdist.config.written import to_yaml

    if config.name not in ("", run.name):
        return False
    with suppress(UserMistake):  # written by another version of hpcdist
        theirs = load_run_config(run.config, [], {}, require_secrets=False)
        return to_yaml(theirs) == to_yaml(replace(config, name=run.name))
    return False


def _open(folder: Path) -> RunDir | None:
    if _is_run(folder):
        return RunDir(folder)
    return SweepDir(folder) if os.path.lexists(folder / "sweep.json") else None


def _is_run(folder: Path) -> bool:
    """Return whether a folder holds the two files of a run; damaged files count, so that commands report them."""
    return os.path.lexists(folder / "state.json") and os.path.lexists(folder / "config.yaml")


def _folders(folder: Path, depth: int = 2) -> Iterator[Path]:
    with suppress(OSError), os.scandir(os.path.abspath(folder)) as entries:
        for below in sorted(Path(entry) for entry in entries if os.path.isdir(entry)):
            yield from _folders(below, depth - 1) if depth > 1 else [below]
