"""Checks of the folder of runs for `hpcdist doctor`: its owner, file system, free space, speed and locks."""

import os
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

from hpcdist.checks.node_facts import GIB, space_checks
from hpcdist.errors import RunFolderError
from hpcdist.host import storage
from hpcdist.host.check_result import Check, failure, note, ok, warning
from hpcdist.host.ownership import require_safe, user_of
from hpcdist.run.folder import DATABASE, own_place

#: Each block is synced, so caches do not hide the speed.
_TEST_BYTES, _TEST_S = 32 * 2**20, 2.0
#: With a lower speed, a checkpoint of 1 GiB takes a minute or more.
_SLOW_BYTES_S = 16 * 2**20
_CHOOSE = "set HPCDIST_RUNS_DIR to another folder"


def folder_checks(runs_dir: Path, *, on_cluster: bool = False, in_container: bool = False) -> list[Check]:
    """Check the folder of runs without creating it: if it does not exist, its nearest existing parent is tested."""
    place = storage.existing(runs_dir.absolute())
    kind, source = storage.mount_of(place)
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        text = f"{place} is on a file system that is mounted read-only ({kind}): a run would fail at once"
        return [failure("runs", text, f"`mount | grep {kind}` shows why; {_CHOOSE}")]
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        owner = user_of(place.stat().st_uid)
        text = f"{place} belongs to {owner} and cannot be written by user {os.getuid()}: a run would fail"
        if in_container:
            return [failure("runs", text, f"start the container with --user $(id -u):$(id -g); or {_CHOOSE}")]
        return [failure("runs", text, _CHOOSE)]
    text = f"{runs_dir.absolute()}"
    if not runs_dir.exists():
        text += " (the first run creates it)"
    checks = [ok("runs", text)]
    checks += _owner_checks(own_place(runs_dir) / DATABASE)
    if in_container and kind == "overlay" and is_in_container_layer(place):
        text = "in the container's own layer, which is deleted with the container"
        checks.append(warning("file system", text, f"mount a folder: -v $PWD/runs:{runs_dir.absolute()}"))
    else:
        checks.append(_shared(runs_dir, kind, source, on_cluster))
    found = storage.space(place)
    text = f"{found['free'] / GIB:.1f} GiB free of {found['total'] / GIB:.1f}"
    checks += list(space_checks({"folder": place, **found})) or [ok("disk", text)]
    # The tests of speed and locks write files.
    if not _has_failure(checks, "disk"):
        checks.append(_speed(place))
        if not _has_failure(checks, "writing"):
            checks.append(_locks(place))
    return checks


def _has_failure(checks: Sequence[Check], name: str) -> bool:
    return any(check.level == "failure" and check.name == name for check in checks)


def _owner_checks(database: Path) -> list[Check]:
    """Report a database in the folder of runs that other users may replace or open."""
    try:
        require_safe(database)
        mode = stat.S_IMODE(database.stat().st_mode) if database.exists() else 0
    except RunFolderError as error:
        text, _, fix = str(error).partition(": ")
        return [failure("owner", text, fix)]
    if not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return []
    text = f"group or others may open {database} (mode {mode:04o}); the next run restricts it to its owner"
    return [warning("database", text, f"chmod 600 {shlex.quote(str(database))}")]


def is_in_container_layer(place: Path) -> bool:
    """Return whether a path is on the root file system, which in a container is the container's own layer."""
    return place.stat().st_dev == Path("/").stat().st_dev


def _locks(place: Path) -> Check:
    problem = storage.lock_problem(place)
    if problem:
        text = f"do not work ({problem}): sqlite's database and concurrent `hpcdist` commands need them"
        fix = "set another MLflow store (tracking.uri); Lustre: mount with -o flock; NFS: check rpc.statd"
        return warning("locks", text, fix)
    return ok("locks", "exclude other processes of this machine")


def _shared(runs_dir: Path, kind: str, source: str, on_cluster: bool) -> Check:
    file_system = kind or "of unknown type"
    if source and source != kind:
        file_system += f" ({source})"
    if kind not in storage.LOCAL:
        seen = "other machines may see it" if kind else "unknown whether other machines see it"
        return ok("file system", f"{file_system}: {seen}")
    if not on_cluster:
        return ok("file system", f"{file_system}, of this machine")
    is_private = any(runs_dir.resolve().is_relative_to(place) for place in storage.PRIVATE)
    where = "each machine has its own" if is_private or kind in storage.IN_MEMORY else "of this machine"
    fix = "set HPCDIST_RUNS_DIR to a shared folder, unless the nodes see this one"
    return warning("file system", f"{file_system}, {where}: Slurm's nodes must see it", fix)


def _speed(place: Path) -> Check:
    try:
        speed = storage.write_speed(place, _TEST_BYTES, _TEST_S)
    except OSError as error:
        text = f"a file of {_TEST_BYTES // 2**20} MiB could not be written ({error.strerror}): checkpoints would fail"
        fix = f"disk full, read-only, or quota exceeded (`quota -s`, `df -h {place}`); {_CHOOSE}"
        return failure("writing", text, fix)
    text = f"{speed / 2**20:.0f} MiB/s with each block synced"
    if speed < _SLOW_BYTES_S:
        fix = "save less often (checkpoint.every_steps), or use a faster file system"
        return note("writing", f"{text}: a checkpoint of 1 GiB takes a minute or more", fix)
    return ok("writing", text)
