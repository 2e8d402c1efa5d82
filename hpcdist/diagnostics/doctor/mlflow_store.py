"""Checks of the MLflow store: reachable, and with the schema of the installed MLflow. Nothing is created.

    python -P -m hpcdist.diagnostics.doctor.mlflow_store      reads a URI from stdin, prints the revision of its schema

The migrations of the installed MLflow are read from their source, because importing MLflow takes seconds. A database
server is asked in a child process, since a driver may hang.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Container, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException
from importlib import metadata
from pathlib import Path

from hpcdist.config.redaction import redact_text
from hpcdist.errors import HpcdistError, UserMistake, shortened
from hpcdist.machine import storage
from hpcdist.machine.check import Check, note, ok, warning
from hpcdist.machine.installation import install_command
from hpcdist.tracking.client.credentials import VARIABLES, Credentials, read_credentials
from hpcdist.tracking.client.server_errors import version_in
from hpcdist.tracking.client.uri import sqlite_path
from hpcdist.tracking.pages.links import web_address

#: A server on the same continent answers faster.
SERVER_TIMEOUT_S = 3.0
DATABASE_TIMEOUT_S = 15.0
#: Exceptions of a request: no connection, an invalid address of a redirect, or a response that is not HTTP.
_FAILURES = (OSError, ValueError, HTTPException)
_LATER = "training continues, and `hpcdist sync` delivers its metrics later"
_TABLE = "alembic_version"
_REVISION = re.compile(r"^(down_revision|revision) = (?:['\"](\w+)['\"]|None)", re.MULTILINE)
#: Packages of the drivers whose modules have other names.
_DRIVERS = {"MySQLdb": "mysqlclient"}


@dataclass(frozen=True, kw_only=True)
class MlflowStore:
    """The store of a run that is started on this machine.

    Attributes:
        uri: with its password.
        shown: the URI without its password.
        database: the file of a sqlite database.
    """

    uri: str
    shown: str
    database: Path | None


def store_checks(found: MlflowStore, env: Mapping[str, str], file_system: str = "") -> list[Check]:
    """Check whether a run's metrics would arrive in the store.

    Args:
        env: environment with MLflow's user and password.
        file_system: type of the network file system of a sqlite database, else empty.
    """
    checks = _client()
    if found.database is not None:
        return [*checks, *_sqlite(found, env, found.database, file_system)]
    if found.uri.startswith(("http://", "https://")):
        return [*checks, *_server(found, env)]
    if re.match(r"(postgresql|mysql|mssql)(\+\w+)?://", found.uri):
        fix = "check host, port, user and database in the URI; an MLflow server (tracking.uri=http://…) is safer"
        return [*checks, _schema(found, env, fix)]
    if "://" not in found.uri or found.uri.startswith("file:"):
        text = f"{found.shown} is a file store, which MLflow does not support since 3.13: {_LATER}"
        fix = "unset MLFLOW_TRACKING_URI for a database in the folder of runs, or set a server or sqlite:////path/mlflow.db"
        return [*checks, warning("store", text, fix)]
    return [*checks, note("store", f"{found.shown}: doctor cannot check this kind of store")]


def _client() -> list[Check]:
    try:
        return [ok("client", f"MLflow {metadata.version('mlflow')}")]
    except metadata.PackageNotFoundError:
        return [warning("client", f"mlflow is not installed; {_LATER}", "`pip install mlflow`")]


# --- a server


def _server(found: MlflowStore, env: Mapping[str, str]) -> list[Check]:
    try:
        credentials = read_credentials(found.uri, env)
    except UserMistake as mistake:
        return [warning("server", str(mistake))]
    root, headers = web_address(found.uri), credentials.headers()
    is_up = False
    try:
        _get(f"{root}/health", {})
        is_up = True
        _get(f"{root}/api/2.0/mlflow/experiments/search?max_results=1", headers)
        version = version_in(_get(f"{root}/version", headers)) or "of an unknown version"
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return [_refused(found, credentials, error.code)]
        if is_up:
            text = f"{found.shown} is up, but does not list experiments (answer {error.code}): {_LATER}"
            return [warning("server", text, "see the server's log")]
        text = f"{found.shown} answers {error.code}, so it is no MLflow server or has an error: {_LATER}"
        fix = f"`curl {found.shown}/health` should print OK; if MLflow has a path prefix, add it to the URI"
        return [warning("server", text, fix)]
    except _FAILURES as error:
        if is_up:
            text = f"{found.shown} is up, but did not list experiments ({_reason(error)}): {_LATER}"
            return [warning("server", text, "see the server's log, and its database")]
        text = f"{found.shown} cannot be reached ({_reason(error)}): {_LATER}"
        fix = "start it, or set tracking.uri or MLFLOW_TRACKING_URI; behind a proxy set no_proxy"
        return [warning("server", text, fix)]
    return [ok("server", f"{found.shown} answers, MLflow {version}")]


def _reason(error: Exception) -> str:
    text = " ".join(str(getattr(error, "reason", error)).split())
    return shortened(text or type(error).__name__, 200)


def _get(url: str, headers: Mapping[str, str]) -> str:
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 (http or https, by the caller)
    with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as answer:  # noqa: S310
        return str(answer.read(10_000).decode(errors="replace"))


def _refused(found: MlflowStore, own: Credentials, code: int) -> Check:
    if not own.user and not own.token:
        text = f"{found.shown} requires a user and a password (answer {code}): {_LATER}"
        return warning("server", text, f"export {VARIABLES}")
    return warning(
        "server", f"{found.shown} refuses {own.user or 'the token'} (answer {code}): {_LATER}", f"check {own.source}"
    )


# --- databases


def _sqlite(found: MlflowStore, env: Mapping[str, str], path: Path, file_system: str) -> list[Check]:
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
    return [*checks, _schema(found, env, "restore a backup, or set another store for new runs (tracking.uri)")]


def _schema(found: MlflowStore, env: Mapping[str, str], fix: str) -> Check:
    """Compare a database's schema with that of the installed MLflow; `fix` is advice if it cannot be read."""
    try:
        schema = read_schema(found.uri, env, DATABASE_TIMEOUT_S)
    except UserMistake as mistake:
        return warning("database", f"{found.shown}: {mistake}; {_LATER}")
    except DatabaseError as error:
        return warning("database", f"{error}: {_LATER}", fix)
    if not schema.found:
        return ok("database", f"{found.shown} is empty; the first run creates its tables")
    if schema.is_newer:
        text = f"{found.shown} has the schema {schema.found} of a newer MLflow than the installed one"
        return warning("database", f"{text}; {_LATER}", "`pip install --upgrade mlflow`")
    if behind := schema.num_pending:
        text = f"{found.shown} has the schema of an older MLflow, {behind} step{'s' * (behind > 1)} behind: {_LATER}"
        return warning("database", text, f"copy the database as a backup, then `mlflow db upgrade {found.shown}`")
    return ok("database", f"{found.shown}, its schema is up to date")


# --- the schema of a database


class DatabaseError(HpcdistError):
    """The database cannot be queried; another attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The schema of a database."""

    found: str  #: revision; empty without tables
    num_pending: int = 0  #: migrations to the schema of the installed MLflow
    is_newer: bool = False  #: whether a newer MLflow has written it


def read_schema(store: str, env: Mapping[str, str], limit_s: float) -> Schema:
    """Return the schema of a database, without a change of it.

    Args:
        store: URI; a sqlite database must exist, since connecting would create an empty file.
        limit_s: time limit of a database server.

    Raises:
        DatabaseError: the database cannot be queried.
        UserMistake: its driver is not installed.
    """
    path = sqlite_path(store)
    found = _read_sqlite(path) if path is not None else _ask_child(store, env, limit_s)
    before = migrations()
    if found and found not in before:
        return Schema(found=found, is_newer=bool(before))
    num_pending, step = 0, next((one for one in before if one not in before.values()), "")
    while step not in ("", found):
        num_pending, step = num_pending + 1, before[step]
    return Schema(found=found, num_pending=num_pending)


def migrations(folder: Path | None = None) -> dict[str, str]:
    """Return the revisions of the installed MLflow, each with the one before it; none without MLflow."""
    if folder is None:
        spec = importlib.util.find_spec("mlflow")
        if spec is None or spec.origin is None:
            return {}
        folder = Path(spec.origin).parent / "store" / "db_migrations" / "versions"
    found = [dict(_REVISION.findall(path.read_text())) for path in folder.glob("*.py")]
    return {one["revision"]: one.get("down_revision", "") for one in found if "revision" in one}


def _read_sqlite(path: Path) -> str:
    # Not read-only: a killed process may have left a journal, which must be rolled back before a query.
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
            return _revision(tables, lambda query: (connection.execute(query).fetchone() or ("",))[0])
    except sqlite3.Error as error:
        raise DatabaseError(f"{path} cannot be read ({error})") from error


def _revision(tables: Container[str], query: Callable[[str], object]) -> str:
    """Return the revision of the schema; `query` returns the first value of a query."""
    return str(query(f"select version_num from {_TABLE}") or "") if _TABLE in tables else ""  # noqa: S608


def _ask_child(store: str, env: Mapping[str, str], limit_s: float) -> str:
    """Return the revision of a database server's schema, from this module in a child process."""
    shown = redact_text(store)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-m", __name__],
            env=env,
            input=store,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DatabaseError(f"{shown} did not answer within {limit_s:g} s: check its server and the firewall") from None
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in done.stderr.replace(store, shown).splitlines() if line.strip()]
    if missing := re.search(r"No module named '(\w+)'", done.stderr):
        driver = _DRIVERS.get(missing[1], missing[1])
        fix = install_command("server") if driver == "psycopg2" else f"`pip install {driver}`"
        raise UserMistake(f"the package {missing[1]} is not installed: {fix}")
    reason = next((line for line in reversed(lines) if "Error" in line and "sqlalche.me" not in line), "")
    raise DatabaseError(f"{shown} cannot be used: {redact_text(reason or ' '.join(lines[-1:]))[:300]}")


def main() -> None:
    """Print the revision of the database whose URI is on stdin: other users can read arguments."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(sys.stdin.read())
    with engine.connect() as connection:
        tables = set(sqlalchemy.inspect(connection).get_table_names())
        print(_revision(tables, lambda query: connection.execute(sqlalchemy.text(query)).scalar()), end="")
    engine.dispose()


if __name__ == "__main__":
    main()
