"""Schema of an MLflow database, compared with that of the installed MLflow.

    python -P -m hpcdist.tracking.server.database_schema      reads a URI from stdin, prints the revision

The migrations of the installed MLflow are read from their source, because importing MLflow takes seconds. A database
server is asked in a child process, since a driver may hang.
"""

from __future__ import annotations

import importlib.util
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Container, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hpcdist.config.redaction import redact_text
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.machine.installation import install_command
from hpcdist.tracking.client.uri import sqlite_path

_TABLE = "alembic_version"
_REVISION = re.compile(r"^(down_revision|revision) = (?:['\"](\w+)['\"]|None)", re.MULTILINE)
#: Packages of the drivers whose modules have other names.
_DRIVERS = {"MySQLdb": "mysqlclient"}


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
