"""Find runs and sweeps: all in a folder, one by its name, or the unfinished one of a config."""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.errors import RunFolderError, UserMistake, plural, suggestion
from hpcdist.host.ownership import is_mine, require_trusted
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import holder, is_held
from hpcdist.run.status import job_of
from hpcdist.run.sweeps import SweepDir

log = logging.getLogger(__name__)
#: Limit of the characters of a name or path: a longer text is a mistake, such as pasted output.
_MAX_LENGTH = 1024
#: Number of matching runs that a message names.
_MAX_LISTED = 5


def list_runs(runs_dir: Path) -> tuple[list[RunDir], str]:
    """Return all runs of the current user by name, and a note on folders of other users, which are not read.

    The note is empty if there are none.
    """
    runs, others, num_private = list_runs_of_all(runs_dir)
    note = ""
    if others or num_private:
        folders = plural(len(others) + num_private, "run folder")
        note = f"{folders} of other users skipped: `hpcdist status RUN` shows one by its name"
    return runs, note


def list_runs_of_all(runs_dir: Path) -> tuple[list[RunDir], list[RunDir], int]:
    """Return the runs of the current user, those of other users, and the number of folders that only others can read.

    The runs are ordered by name.
    """
    own: list[RunDir] = []
    others: list[RunDir] = []
    num_private = 0
    for folder in _folders(runs_dir):
        runs = own if is_mine(folder) else others
        if _is_run(folder):
            runs.append(RunDir(folder))
        elif runs is others and not os.access(folder, os.X_OK):
            num_private += 1
    return own, others, num_private


def find_runs(runs_dir: Path) -> list[RunDir]:
    """Return all runs of the current user by name."""
    return list_runs(runs_dir)[0]


def resolve(text: str, runs_dir: Path) -> RunDir:
    """Return a run or sweep by its folder, `experiment/name`, name, or a unique prefix of its name.

    Runs of the current user take precedence over those of other users.
    """
    if not text.strip():
        raise RunFolderError("the name of the run is empty: `hpcdist runs` lists all names")
    if len(text) > _MAX_LENGTH or not text.isprintable():
        raise RunFolderError(f"{text[:40]!r}… is not a name of a run: `hpcdist runs` lists all names")
    path = os.path.abspath(text)  # keeps symbolic links, so that messages show the path that the user gave
    if ".." in Path(text).parts:
        path = os.path.realpath(text)
    given = _open(Path(path))
    if given is not None:
        return given
    runs = []
    for folder in _folders(runs_dir):
        run = _open(folder)
        if run is not None:
            runs.append(run)
    matches = _matches(text, runs)
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(_full_name(run) for run in matches[:_MAX_LISTED])
        kind = "runs"
        if all(isinstance(run, SweepDir) for run in matches):
            kind = "sweeps"
        raise RunFolderError(f"{text!r} matches {len(matches)} {kind} ({names}): write more of the name, or the folder")
    if Path(text).is_dir() and ("/" in text or text in (".", "..")):
        raise RunFolderError(f"{text!r} holds no run (no state.json and config.yaml in it): `hpcdist runs` lists runs")
    if text.startswith(("/", "./", "../", "~")):
        raise RunFolderError(f"no such folder: {text}")
    known = [run.name for run in runs] + [_full_name(run) for run in runs]
    hint = suggestion(text, known, "`hpcdist runs` lists them")
    raise RunFolderError(f"no run {text!r} under {runs_dir.absolute()}: {hint}")


def _full_name(run: RunDir) -> str:
    return f"{run.experiment}/{run.name}"


def _matches(text: str, runs: list[RunDir]) -> list[RunDir]:
    """Return the runs of this name, else those with this prefix; in each case, the user's own if there are any.

    Args:
        text: `experiment/name`, the name, or a prefix of the name.
    """
    by_name = [run for run in runs if text in (run.name, _full_name(run))]
    by_prefix = [run for run in runs if run.name.startswith(text)]
    matches = by_name or by_prefix
    return [run for run in matches if is_mine(run.path)] or matches


def newest(runs_dir: Path, *, active: bool = False) -> RunDir:
    """Return the user's newest run or sweep, without the cells of sweeps. Raises RunFolderError if there is none.

    Args:
        active: whether only runs and sweeps that run or wait count.
    """
    runs: dict[float, RunDir] = {}
    for folder in _folders(runs_dir):
        if not is_mine(folder) or os.path.lexists(folder / "cell.json"):
            continue
        run = _open(folder)
        if run is None:
            continue
        with suppress(RunFolderError, OSError):
            if not active or _is_active(run):
                runs[run.read_state().created] = run
    if not runs:
        kind = ""
        if active:
            kind = " runs or waits"
        raise RunFolderError(
            f"no run in {runs_dir.absolute()}{kind}: name one, or set HPCDIST_RUNS_DIR to the folder of all runs"
        )
    return runs[max(runs)]


def _is_active(run: RunDir) -> bool:
    """Return whether a run or sweep waits or runs; not if its supervisor was killed on this machine."""
    status = run.read_state().status
    if status == "running" and not isinstance(run, SweepDir) and job_of(run) is None:
        return holder(run) is not None
    return status in ("queued", "running")


def resolve_run(text: str, runs_dir: Path) -> RunDir:
    """Return a run like `resolve`. Raises RunFolderError for a sweep."""
    run = resolve(text, runs_dir)
    if isinstance(run, SweepDir):
        cells = [cell.name for cell in run.cells()]
        raise RunFolderError(f"{run.name} is a sweep: name one of its cells ({', '.join(cells[:3])}, …)")
    return run


def find_unfinished(config: Config) -> RunDir | None:
    """Return the newest local run that was started with the same config and was stopped, or died, before its end.

    Takes up to a minute if it is uncertain whether a supervisor in another container is alive.
    """
    candidates: list[tuple[float, RunDir]] = []
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
            candidates.append((state.created, run))
    for _, run in sorted(candidates, key=lambda candidate: -candidate[0]):
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
    if os.path.lexists(folder / "sweep.json"):
        return SweepDir(folder)
    return None


def _is_run(folder: Path) -> bool:
    """Return whether a folder holds the two files of a run; damaged files count, so that commands report them."""
    return os.path.lexists(folder / "state.json") and os.path.lexists(folder / "config.yaml")


def _folders(folder: Path, depth: int = 2) -> Iterator[Path]:
    """Yield the folders `depth` levels below a folder, in the order of their names."""
    with suppress(OSError), os.scandir(os.path.abspath(folder)) as entries:
        for below in sorted(Path(entry) for entry in entries if os.path.isdir(entry)):
            if depth > 1:
                yield from _folders(below, depth - 1)
            else:
                yield below
