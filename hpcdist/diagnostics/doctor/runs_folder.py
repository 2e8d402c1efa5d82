"""The file system of the runs' folder: may this user write there, does it keep what the run folder relies on?"""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcdist.machine import storage
from hpcdist.machine.check import Check
from hpcdist.run.runs_dir import DATABASE, foreign_owner

GIB = 2**30
_LITTLE_SPACE = 2 * GIB
_FEW_FILES = 10_000
#: Enough to pass the caches of most file systems by, since each block is written through.
_TRIED_BYTES, _TRIED_S = 32 * 2**20, 2.0
#: A checkpoint of a gigabyte takes a minute below this.
_SLOW = 16 * 2**20
#: A clock that is further off misleads; mount options that round times do not come near.
_CLOCK_S = 10.0
_CHOOSE = "choose another: --runs-dir, or HPCDIST_RUNS_DIR"


def clock_offset(folder: Path) -> float:
    """Seconds that a folder's file server is ahead of this machine, by the time of a file that is made there."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
        before = time.time()
        os.utime(file.name)
        return os.stat(file.name).st_mtime - before


@dataclass(frozen=True, kw_only=True)
class Tries:
    """What is tried in a folder; tests put others in their place."""

    rename: Callable[[Path], str] = storage.rename_problem
    exclusive: Callable[[Path], str] = storage.exclusive_problem
    lock: Callable[[Path], str] = storage.lock_problem
    speed: Callable[[Path, int, float], float] = storage.write_speed
    clock: Callable[[Path], float] = clock_offset


def runs_folder(
    runs_dir: Path, *, on_cluster: bool = False, in_container: bool = False, tries: Tries | None = None
) -> list[Check]:
    """What is wrong with a folder that runs are, or will be, in.

    Nothing is made: a folder that is not there yet is tried by the nearest one above it.

    Args:
        on_cluster: whether Slurm's nodes have to see it.
        in_container: whether this process is in one, whose own layer goes with it.
    """
    tries = tries or Tries()
    place = storage.existing(runs_dir.absolute())
    kind, source = storage.mount_of(place)
    shown = f"{runs_dir.absolute()}" + ("" if runs_dir.exists() else " (made by the first run)")
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        text = f"{place} is on a file system that is mounted read-only ({kind}): a run would fail at once"
        return [Check(name="runs", level="failure", text=text, fix=f"`mount | grep {kind}` shows why; {_CHOOSE}")]
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        text = f"{place} belongs to {_owner(place)} and cannot be written by user {os.getuid()}: a run would fail"
        fix = "start the container with --user $(id -u):$(id -g); or " * in_container + _CHOOSE
        return [Check(name="runs", level="failure", text=text, fix=fix)]
    checks = [Check(name="runs", level="ok", text=shown)]
    checks += _privacy(runs_dir)
    if in_container and kind == "overlay" and is_with_the_root(place):
        text = "in the container's own layer: what is written there is gone with the container"
        fix = f"mount a folder: -v $PWD/runs:{runs_dir.absolute()}"
        checks.append(Check(name="file system", level="warning", text=text, fix=fix))
    else:
        checks.append(_shared(runs_dir, kind, source, on_cluster))
    checks.append(_space(place))
    if checks[-1].level != "failure":
        checks.append(_speed(place, tries))
    if checks[-1].level == "failure":
        return checks  # where nothing can be written the rest cannot be tried
    return [*checks, *_promises(place, tries), *_clock(tries.clock(place))]


def _privacy(runs_dir: Path) -> list[Check]:
    """Whether the folder and its database belong to this user alone."""
    database = runs_dir / DATABASE
    for path, what in ((runs_dir, "the folder"), (database, "the database")):
        if (owner := foreign_owner(path)) is not None:
            text = f"{what} {path} belongs to {owner}: a run is refused, since a folder of runs has one user"
            return [
                Check(name="owner", level="failure", text=text, fix=f"{_CHOOSE}; share results in a tracking server")
            ]
    checks = []
    if (mode := _mode(runs_dir)) & 0o022 and not mode & stat.S_ISVTX:
        text = f"group or others may write to {runs_dir} (mode {mode:04o}): they can replace what your runs execute"
        checks.append(Check(name="owner", level="warning", text=text, fix=f"chmod go-w {shlex.quote(str(runs_dir))}"))
    if (mode := _mode(database)) & 0o077:
        text = f"group or others may open {database} (mode {mode:04o}); the next run closes it"
        checks.append(Check(name="database", level="warning", text=text, fix=f"chmod 600 {shlex.quote(str(database))}"))
    return checks


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else 0


def is_with_the_root(place: Path) -> bool:
    """Whether nothing of its own is mounted there."""
    return place.stat().st_dev == Path("/").stat().st_dev


def _promises(place: Path, tries: Tries) -> list[Check]:
    """What the run folder relies on."""
    problems = [
        ("replacing", tries.rename(place), "readers may see half a file, and a restart may find no checkpoint"),
        ("making once", tries.exclusive(place), "two supervisors could take the same run"),
    ]
    broken = [
        Check(name=name, level="failure", text=f"{problem}: {meaning}", fix=f"{_CHOOSE}, on a POSIX file system")
        for name, problem, meaning in problems
        if problem
    ]
    if broken:
        return broken
    checks = [Check(name="files", level="ok", text="are replaced in one piece, and made once only")]
    if problem := tries.lock(place):
        text = f"locks do not work ({problem}): sqlite's database needs them, and `hpcdist` where two commands meet"
        fix = "keep MLflow elsewhere (tracking.uri); Lustre: mount with -o flock; NFS: is rpc.statd up?"
        checks.append(Check(name="locks", level="warning", text=text, fix=fix))
    return checks


def _clock(offset_s: float) -> list[Check]:
    if abs(offset_s) < _CLOCK_S:
        return []
    text = f"the file server's is {abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} this machine's"
    fix = "times of files mislead (`status`, `explain`): set both clocks by one time server (chronyc, timedatectl)"
    return [Check(name="clock", level="warning", text=text, fix=fix)]


def _owner(place: Path) -> str:
    try:
        return f"{place.owner()} ({place.stat().st_uid})"
    except KeyError:  # nobody whom this machine, or this image, knows by name
        return f"user {place.stat().st_uid}"


def _shared(runs_dir: Path, kind: str, source: str, on_cluster: bool) -> Check:
    text = f"{kind or 'of unknown type'}{f' ({source})' if source and source != kind else ''}"
    if kind not in storage.LOCAL:
        seen = "other machines may see it" if kind else "whether other machines see it cannot be told"
        return Check(name="file system", level="ok", text=f"{text}: {seen}")
    if not on_cluster:
        return Check(name="file system", level="ok", text=f"{text}, of this machine")
    private = any(runs_dir.resolve().is_relative_to(place) for place in storage.PRIVATE) or kind in storage.IN_MEMORY
    where = "each machine has its own" if private else "of this machine"
    fix = "on a shared one: --runs-dir, HPCDIST_RUNS_DIR; if the nodes do see it: cluster.shared_runs=true"
    return Check(name="file system", level="warning", text=f"{text}, {where}: Slurm's nodes must see it", fix=fix)


def _space(place: Path) -> Check:
    found = storage.space(place)
    text = f"{found['free'] / GIB:.1f} GiB free of {found['total'] / GIB:.1f}"
    files = found.get("free_files")
    if found["free"] == 0:
        return Check(name="space", level="failure", text=f"{text}: a run would fail", fix=f"remove old runs; {_CHOOSE}")
    if found["free"] < _LITTLE_SPACE:
        fix = f"remove old runs or checkpoints; {_CHOOSE}"
        return Check(name="space", level="warning", text=f"{text}: checkpoints may not fit", fix=fix)
    if files is not None and files < _FEW_FILES:
        text = f"{text}, but only {files} more files (inodes)"
        return Check(name="space", level="warning", text=text, fix=f"remove old runs, or ask for more; {_CHOOSE}")
    return Check(name="space", level="ok", text=text)


def _speed(place: Path, tries: Tries) -> Check:
    try:
        speed = tries.speed(place, _TRIED_BYTES, _TRIED_S)
    except OSError as error:
        text = f"a file of {_TRIED_BYTES // 2**20} MiB could not be written ({error.strerror}): checkpoints would fail"
        fix = f"full, read-only, or your quota is used up (`quota -s`, `df -h {place}`); {_CHOOSE}"
        return Check(name="writing", level="failure", text=text, fix=fix)
    text = f"{speed / 2**20:.0f} MiB/s, each block waited for"
    if speed < _SLOW:
        fix = "save less often (checkpoint.every_steps), or look for a faster file system"
        return Check(
            name="writing", level="note", text=f"{text}: a checkpoint of 1 GiB takes a minute or more", fix=fix
        )
    return Check(name="writing", level="ok", text=text)
