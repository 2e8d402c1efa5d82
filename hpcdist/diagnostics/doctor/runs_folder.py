"""Checks of the folder of runs: permissions, space, speed, and the file operations that run folders need."""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
import time
from pathlib import Path

from hpcdist.errors import RunFolderError
from hpcdist.files.ownership import require_safe
from hpcdist.machine import storage
from hpcdist.machine.check import Check, failure, note, ok, warning
from hpcdist.run.runs_dir import DATABASE, own_place

GIB = 2**30
_LITTLE_SPACE = 2 * GIB
_FEW_FILES = 10_000
#: Each block is synced, so caches do not hide the speed.
_TEST_BYTES, _TEST_S = 32 * 2**20, 2.0
#: At this speed, a checkpoint of 1 GiB takes a minute.
_SLOW = 16 * 2**20
#: Far above the rounding of time stamps by mount options.
_CLOCK_S = 10.0
_CHOOSE = "set another folder by --runs-dir or HPCDIST_RUNS_DIR"


def clock_offset(folder: Path) -> float:
    """Return the seconds by which the file server's clock is ahead, from the time stamp of a new file."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
        before = time.time()
        os.utime(file.name)
        return os.stat(file.name).st_mtime - before


def folder_checks(runs_dir: Path, *, on_cluster: bool = False, in_container: bool = False) -> list[Check]:
    """Check the folder of runs without creating it: if it does not exist, its nearest existing parent is tested.

    Args:
        on_cluster: whether Slurm's nodes must see the folder.
        in_container: whether this process runs in a container, whose own layer is not kept.
    """
    place = storage.existing(runs_dir.absolute())
    kind, source = storage.mount_of(place)
    shown = f"{runs_dir.absolute()}" + ("" if runs_dir.exists() else " (the first run creates it)")
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        text = f"{place} is on a file system that is mounted read-only ({kind}): a run would fail at once"
        return [failure("runs", text, f"`mount | grep {kind}` shows why; {_CHOOSE}")]
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        text = f"{place} belongs to {_owner(place)} and cannot be written by user {os.getuid()}: a run would fail"
        fix = "start the container with --user $(id -u):$(id -g); or " * in_container + _CHOOSE
        return [failure("runs", text, fix)]
    checks = [ok("runs", shown)]
    checks += _privacy(runs_dir)
    if in_container and kind == "overlay" and is_in_container_layer(place):
        text = "in the container's own layer, which is deleted with the container"
        checks.append(warning("file system", text, f"mount a folder: -v $PWD/runs:{runs_dir.absolute()}"))
    else:
        checks.append(_shared(runs_dir, kind, source, on_cluster))
    checks.append(_space(place))
    if checks[-1].level != "failure":
        checks.append(_speed(place))
    if checks[-1].level == "failure":
        return checks  # the remaining tests need to write files
    return [*checks, *_file_operations(place), *_clock(clock_offset(place))]


def _privacy(runs_dir: Path) -> list[Check]:
    """Check that only this user can write to the folder and its database."""
    database = own_place(runs_dir) / DATABASE
    try:
        require_safe(database)
    except RunFolderError as error:
        text, _, fix = str(error).partition(": ")
        return [failure("owner", text, fix)]
    if (mode := _mode(database)) & 0o077:
        text = f"group or others may open {database} (mode {mode:04o}); the next run restricts it to its owner"
        return [warning("database", text, f"chmod 600 {shlex.quote(str(database))}")]
    return []


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else 0


def is_in_container_layer(place: Path) -> bool:
    """Return whether a path is on the root file system instead of a mount of its own."""
    return place.stat().st_dev == Path("/").stat().st_dev


def _file_operations(place: Path) -> list[Check]:
    """Test the file operations that run folders rely on."""
    problems = [
        (
            "replacing",
            storage.rename_problem(place),
            "readers may see partial files, and a restart may find no checkpoint",
        ),
        ("making once", storage.exclusive_problem(place), "two supervisors could take the same run"),
    ]
    broken = [
        failure(name, f"{problem}: {meaning}", f"{_CHOOSE}, on a POSIX file system")
        for name, problem, meaning in problems
        if problem
    ]
    if broken:
        return broken
    checks = [ok("files", "atomic replacement and exclusive creation work")]
    if problem := storage.lock_problem(place):
        text = f"locks do not work ({problem}): sqlite's database and concurrent `hpcdist` commands need them"
        fix = "set another MLflow store (tracking.uri); Lustre: mount with -o flock; NFS: check rpc.statd"
        checks.append(warning("locks", text, fix))
    return checks


def _clock(offset_s: float) -> list[Check]:
    if abs(offset_s) < _CLOCK_S:
        return []
    text = f"the file server's clock is {abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} this machine's"
    fix = "file times are misleading (`status`, `explain`): synchronise both clocks (chronyc, timedatectl)"
    return [warning("clock", text, fix)]


def _owner(place: Path) -> str:
    try:
        return f"{place.owner()} ({place.stat().st_uid})"
    except KeyError:  # the uid has no name on this machine or in this image
        return f"user {place.stat().st_uid}"


def _shared(runs_dir: Path, kind: str, source: str, on_cluster: bool) -> Check:
    text = f"{kind or 'of unknown type'}{f' ({source})' if source and source != kind else ''}"
    if kind not in storage.LOCAL:
        seen = "other machines may see it" if kind else "unknown whether other machines see it"
        return ok("file system", f"{text}: {seen}")
    if not on_cluster:
        return ok("file system", f"{text}, of this machine")
    private = any(runs_dir.resolve().is_relative_to(place) for place in storage.PRIVATE) or kind in storage.IN_MEMORY
    where = "each machine has its own" if private else "of this machine"
    fix = "set a shared folder by --runs-dir or HPCDIST_RUNS_DIR; if the nodes see this one: cluster.shared_runs=true"
    return warning("file system", f"{text}, {where}: Slurm's nodes must see it", fix)


def _space(place: Path) -> Check:
    found = storage.space(place)
    text = f"{found['free'] / GIB:.1f} GiB free of {found['total'] / GIB:.1f}"
    files = found.get("free_files")
    if found["free"] == 0:
        return failure("space", f"{text}: a run would fail", f"remove old runs; {_CHOOSE}")
    if found["free"] < _LITTLE_SPACE:
        return warning("space", f"{text}: checkpoints may not fit", f"remove old runs or checkpoints; {_CHOOSE}")
    if files is not None and files < _FEW_FILES:
        text = f"{text}, but only {files} more files (inodes)"
        return warning("space", text, f"remove old runs, or raise the quota; {_CHOOSE}")
    return ok("space", text)


def _speed(place: Path) -> Check:
    try:
        speed = storage.write_speed(place, _TEST_BYTES, _TEST_S)
    except OSError as error:
        text = f"a file of {_TEST_BYTES // 2**20} MiB could not be written ({error.strerror}): checkpoints would fail"
        fix = f"disk full, read-only, or quota exceeded (`quota -s`, `df -h {place}`); {_CHOOSE}"
        return failure("writing", text, fix)
    text = f"{speed / 2**20:.0f} MiB/s with each block synced"
    if speed < _SLOW:
        fix = "save less often (checkpoint.every_steps), or use a faster file system"
        return note("writing", f"{text}: a checkpoint of 1 GiB takes a minute or more", fix)
    return ok("writing", text)
