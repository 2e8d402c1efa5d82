"""Checks of the folder of runs and of MLflow's store."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sqlite3
import stat
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPException
from importlib import metadata
from pathlib import Path

from hpcdist.config.redaction import redact_text
from hpcdist.errors import RunFolderError, UserMistake, shortened
from hpcdist.host import storage
from hpcdist.host.files import require_safe, user_of
from hpcdist.host.machine import Check, failure, note, ok, space_checks, warning
from hpcdist.run.folder import DATABASE, own_place
from hpcdist.tracking.links import web_address
from hpcdist.tracking.uri import VARIABLES, read_credentials, sqlite_path, version_in

# Checks of the folder of runs: permissions, space, speed, and the file operations that run folders need.

GIB = 2**30
#: Each block is synced, so caches do not hide the speed.
_TEST_BYTES, _TEST_S = 32 * 2**20, 2.0
#: At this speed, a checkpoint of 1 GiB takes a minute.
_SLOW = 16 * 2**20
_CHOOSE = "set another folder by --runs-dir or HPCDIST_RUNS_DIR"


def folder_checks(runs_dir: Path, *, on_cluster: bool = False, in_container: bool = False) -> list[Check]:
    """Check the folder of runs without creating it: if it does not exist, its nearest existing parent is tested."""
    place = storage.existing(runs_dir.absolute())
    kind, source = storage.mount_of(place)
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        text = f"{place} is on a file system that is mounted read-only ({kind}): a run would fail at once"
        return [failure("runs", text, f"`mount | grep {kind}` shows why; {_CHOOSE}")]
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        text = f"{place} belongs to {user_of(place.stat().st_uid)} and cannot be written by user {os.getuid()}: a run"
        fix = "start the container with --user $(id -u):$(id -g); or " * in_container + _CHOOSE
        return [failure("runs", f"{text} would fail", fix)]
    checks = [ok("runs", f"{runs_dir.absolute()}" + ("" if runs_dir.exists() else " (the first run creates it)"))]
    database = own_place(runs_dir) / DATABASE
    try:
        require_safe(database)
        mode = stat.S_IMODE(database.stat().st_mode) if database.exists() else 0
        if mode & 0o077:
            text = f"group or others may open {database} (mode {mode:04o}); the next run restricts it to its owner"
            checks.append(warning("database", text, f"chmod 600 {shlex.quote(str(database))}"))
    except RunFolderError as error:
        text, _, fix = str(error).partition(": ")
        checks.append(failure("owner", text, fix))
    if in_container and kind == "overlay" and is_in_container_layer(place):
        text = "in the container's own layer, which is deleted with the container"
        checks.append(warning("file system", text, f"mount a folder: -v $PWD/runs:{runs_dir.absolute()}"))
    else:
        checks.append(_shared(runs_dir, kind, source, on_cluster))
    found = storage.space(place)
    text = f"{found['free'] / GIB:.1f} GiB free of {found['total'] / GIB:.1f}"
    space = [*space_checks({"folder": place, **found})] or [ok("disk", text)]
    if all(check.level != "failure" for check in space):
        space.append(_speed(place))
    if any(check.level == "failure" for check in space):
        return checks + space  # the remaining tests need to write files
    return [*checks, *space, *_file_operations(place)]


def is_in_container_layer(place: Path) -> bool:
    return place.stat().st_dev == Path("/").stat().st_dev


def _file_operations(place: Path) -> list[Check]:
    """Test the file operations that run folders rely on."""
    broken = []
    if problem := storage.rename_problem(place):
        text = f"{problem}: readers may see partial files, and a restart may find no checkpoint"
        broken.append(failure("replacing", text, f"{_CHOOSE}, on a POSIX file system"))
    if problem := storage.exclusive_problem(place):
        text = f"{problem}: two supervisors could take the same run"
        broken.append(failure("making once", text, f"{_CHOOSE}, on a POSIX file system"))
    if broken:
        return broken
    checks = [ok("files", "atomic replacement and exclusive creation work")]
    if problem := storage.lock_problem(place):
        text = f"locks do not work ({problem}): sqlite's database and concurrent `hpcdist` commands need them"
        fix = "set another MLflow store (tracking.uri); Lustre: mount with -o flock; NFS: check rpc.statd"
        checks.append(warning("locks", text, fix))
    return checks


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


# Checks of the MLflow store: reachable, and with the schema of the installed MLflow. Nothing is created.

#: A server on the same continent answers faster.
SERVER_TIMEOUT_S = 3.0
#: Exceptions of a request: no connection, an invalid address of a redirect, or a response that is not HTTP.
_FAILURES = (OSError, ValueError, HTTPException)
_LATER = "training continues, and `hpcdist sync` delivers its metrics later"
_REVISION = re.compile(r"^(down_revision|revision) = (?:['\"](\w+)['\"]|None)", re.MULTILINE)


def store_checks(uri: str, env: Mapping[str, str], file_system: str = "") -> list[Check]:
    """Check whether a run's metrics would arrive in the store."""
    shown = redact_text(uri)
    try:
        checks = [ok("client", f"MLflow {metadata.version('mlflow')}")]
    except metadata.PackageNotFoundError:
        checks = [warning("client", f"mlflow is not installed; {_LATER}", "`pip install mlflow`")]
    if (database := sqlite_path(uri)) is not None:
        return [*checks, *_sqlite(shown, database, file_system)]
    if uri.startswith(("http://", "https://")):
        return [*checks, _server(uri, env)]
    if "://" not in uri or uri.startswith("file:"):
        text = f"{shown} is a file store, which MLflow does not support since 3.13: {_LATER}"
        fix = "unset MLFLOW_TRACKING_URI for a database in the folder of runs, or set a server or sqlite:////path/mlflow.db"
        return [*checks, warning("store", text, fix)]
    return [*checks, note("store", f"{shown}: doctor cannot check this kind of store")]


def _server(uri: str, env: Mapping[str, str]) -> Check:
    try:
        credentials = read_credentials(uri, env)
    except UserMistake as mistake:
        return warning("server", str(mistake))
    root, headers, shown = web_address(uri), credentials.headers(), redact_text(uri)
    is_up = False
    try:
        _get(f"{root}/health", {})
        is_up = True
        _get(f"{root}/api/2.0/mlflow/experiments/search?max_results=1", headers)
        version = version_in(_get(f"{root}/version", headers)) or "of an unknown version"
    except _FAILURES as error:
        code = error.code if isinstance(error, urllib.error.HTTPError) else None
        if code in (401, 403) and not (credentials.user or credentials.token):
            text = f"{shown} requires a user and a password (answer {code}): {_LATER}"
            return warning("server", text, f"export {VARIABLES}")
        if code in (401, 403):
            text = f"{shown} refuses {credentials.user or 'the token'} (answer {code}): {_LATER}"
            return warning("server", text, f"check {credentials.source}")
        words = " ".join(str(getattr(error, "reason", error)).split())
        reason = f"answer {code}" if code else shortened(words or type(error).__name__, 200)
        if is_up:
            text = f"{shown} is up, but does not list experiments ({reason}): {_LATER}"
            return warning("server", text, "see the server's log, and its database")
        if code:
            text = f"{shown} answers {code}, so it is no MLflow server or has an error: {_LATER}"
            fix = f"`curl {shown}/health` should print OK; if MLflow has a path prefix, add it to the URI"
            return warning("server", text, fix)
        text = f"{shown} cannot be reached ({reason}): {_LATER}"
        fix = "start it, or set tracking.uri or MLFLOW_TRACKING_URI; behind a proxy set no_proxy"
        return warning("server", text, fix)
    return ok("server", f"{shown} answers, MLflow {version}")


def _get(url: str, headers: Mapping[str, str]) -> str:
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 (http or https, by the caller)
    with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as answer:  # noqa: S310
        return str(answer.read(10_000).decode(errors="replace"))


def _sqlite(uri: str, path: Path, file_system: str) -> list[Check]:
    checks = []
    if file_system:
        text = f"{path} is on {file_system}, which several machines may write to: sqlite's locks are unreliable there"
        checks.append(note("database", text, "use a server (tracking.uri) if several users or jobs log at a time"))
    folder = storage.existing(path.parent)
    if not path.exists() and os.access(folder, os.W_OK):
        return [*checks, ok("database", f"{path} does not exist; the first run creates it")]
    if not os.access(path, os.W_OK) or not os.access(folder, os.W_OK):
        text = f"{path} or its folder cannot be written by this user: {_LATER}"
        fix = f"`ls -ld {folder} {path}`; set tracking.uri to a folder of your own"
        return [*checks, warning("database", text, fix)]
    try:
        # Not read-only: a killed process may have left a journal, which must be rolled back before a query.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as connection:
            has_schema = connection.execute("select 1 from sqlite_master where name = 'alembic_version'").fetchone()
            row = connection.execute("select version_num from alembic_version").fetchone() if has_schema else None
    except sqlite3.Error as error:
        fix = "restore a backup, or set another store for new runs (tracking.uri)"
        return [*checks, warning("database", f"{path} cannot be read ({error}): {_LATER}", fix)]
    return [*checks, _schema(uri, str(row[0]) if row else "")]


def _schema(shown: str, found: str) -> Check:
    """Compare the revision of a database's schema with that of the installed MLflow."""
    if not found:
        return ok("database", f"{shown} is empty; the first run creates its tables")
    before = migrations()
    if before and found not in before:
        text = f"{shown} has the schema {found} of a newer MLflow than the installed one"
        return warning("database", f"{text}; {_LATER}", "`pip install --upgrade mlflow`")
    if found in before.values():
        text = f"{shown} has the schema of an older MLflow: {_LATER}"
        return warning("database", text, f"copy the database as a backup, then `mlflow db upgrade {shown}`")
    return ok("database", f"{shown}, its schema is up to date")


def migrations(folder: Path | None = None) -> dict[str, str]:
    """Return the revisions of the installed MLflow, each with the one before it; none without MLflow."""
    if folder is None:
        spec = importlib.util.find_spec("mlflow")
        if spec is None or spec.origin is None:
            return {}
        folder = Path(spec.origin).parent / "store" / "db_migrations" / "versions"
    found = [dict(_REVISION.findall(path.read_text())) for path in folder.glob("*.py")]
    return {one["revision"]: one.get("down_revision", "") for one in found if "revision" in one}
