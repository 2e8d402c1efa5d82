"""Schema of an MLflow database: which migrations it needs, and their execution.

    python -P -m hpcdist.tracking.server.database_schema inspect|migrate      the URI in HPCDIST_SERVER_STORE

The database holds two schemas, each with its own table of the revision: that of runs and that of accounts. Those of the
installed MLflow are read from the source of its migrations, because importing MLflow takes seconds. A database server
is asked in a child process, since a driver may hang.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Container, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.config.redaction import redact_text
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.machine.installation import install_command
from hpcdist.tracking.client.uri import sqlite_path
from hpcdist.tracking.server.server_folder import STORE, environment_without_mlflow

INSPECT_S = 120.0
#: Each schema with the table of its revision and the folder of its migrations in MLflow.
_SCHEMAS = {
    "runs": ("alembic_version", "store/db_migrations/versions"),
    "accounts": ("alembic_version_auth", "server/auth/db/migrations/versions"),
}
_REVISION = re.compile(r"^(down_revision|revision) = (?:['\"](\w+)['\"]|None)", re.MULTILINE)
_TITLE = re.compile(r'\A"""(.*)')
#: Packages of the drivers whose modules have other names.
_DRIVERS = {"MySQLdb": "mysqlclient"}


class ServerError(HpcdistError):
    """The tracking server or its database failed; another attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """One of the two schemas of a database."""

    name: str  #: `runs` or `accounts`
    found: str  #: revision; empty without tables
    wanted: str  #: revision of the installed MLflow; empty without one
    pending: tuple[str, ...] = ()  #: first line of each migration, in order
    is_newer: bool = False  #: whether a newer MLflow has written it


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A migration of the installed MLflow."""

    before: str  #: the revision that it migrates; empty for the first
    title: str


def read_schemas(store: str, env: Mapping[str, str], limit_s: float = INSPECT_S) -> list[Schema]:
    """Return the schemas of a database, without a change of it; none if it is a file that does not exist.

    Args:
        limit_s: time limit of a database server.

    Raises:
        ServerError: the database cannot be queried.
        UserMistake: its driver is not installed.
    """
    path = sqlite_path(store)
    if path is None:
        found = json.loads(_in_child("inspect", store, env, limit_s))
    elif path.exists():
        found = _read_sqlite(path)
    else:
        return []  # connecting would create an empty file
    return [_schema(name, found.get(name, "")) for name in _SCHEMAS]


def migrations(name: str, folder: Path | None = None) -> dict[str, Migration]:
    """Return the migrations to a schema of the installed MLflow by revision; none without MLflow."""
    if folder is None:
        spec = importlib.util.find_spec("mlflow")
        if spec is None or spec.origin is None:
            return {}
        folder = Path(spec.origin).parent / _SCHEMAS[name][1]
    found = {}
    for path in folder.glob("*.py"):
        text = path.read_text()
        names = dict(_REVISION.findall(text))
        if "revision" in names:
            title = _TITLE.match(text)
            found[names["revision"]] = Migration(
                before=names.get("down_revision", ""), title=title[1].strip('" ') if title else ""
            )
    return found


def _schema(name: str, found: str) -> Schema:
    known = migrations(name)
    if found and found not in known:
        return Schema(name=name, found=found, wanted=_newest(known), is_newer=bool(known))
    pending: list[str] = []
    step = wanted = _newest(known)
    while step not in ("", found):
        pending.append(f"{step}: {known[step].title}")
        step = known[step].before
    return Schema(name=name, found=found, wanted=wanted, pending=tuple(reversed(pending)))


def _newest(known: Mapping[str, Migration]) -> str:
    migrated = {one.before for one in known.values()}
    return next((revision for revision in known if revision not in migrated), "")


def _read_sqlite(path: Path) -> dict[str, str]:
    # Not read-only: a killed process may have left a journal, which must be rolled back before a query.
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
            return _revisions(tables, lambda query: (connection.execute(query).fetchone() or ("",))[0])
    except sqlite3.Error as error:
        raise ServerError(f"{path} cannot be read ({error})") from error


def _revisions(tables: Container[str], query: Callable[[str], object]) -> dict[str, str]:
    """Return the revision of each schema that has one; `query` returns the first value of a query."""
    found = {
        name: str(query(f"select version_num from {table}") or "")  # noqa: S608
        for name, (table, _) in _SCHEMAS.items()
        if table in tables
    }
    # MLflow 3.5 and older wrote the tables of accounts without a revision: the first one.
    if "users" in tables and "accounts" not in found:
        found["accounts"] = next((one for one, it in migrations("accounts").items() if not it.before), "")
    return found


def require_consent(schemas: list[Schema], store: str, consent: bool) -> list[str]:
    """Return the lines that announce the migration of a database, none without one.

    Raises UserMistake when a newer MLflow has written it, or when it must be migrated without `consent`.
    """
    for schema in schemas:
        if schema.is_newer:
            raise UserMistake(
                f"{redact_text(store)} has the schema {schema.found} ({schema.name}) of a newer MLflow than the"
                " installed one: `pip install --upgrade mlflow`"
            )
    old = [schema for schema in schemas if schema.found and schema.pending]
    lines = []
    for schema in old:
        lines.append(f"migration of {schema.name}: revision {schema.found} to {schema.wanted}")
        lines += [f"  {text}" for text in schema.pending]
    if old and not consent:
        raise UserMistake(
            "\n".join(
                [
                    f"{redact_text(store)} has the schema of an older MLflow; nothing was changed.",
                    *lines,
                    f"Back up the database first ({_backup(store)}), then repeat the command with --migrate. An older"
                    " MLflow cannot use the database afterwards.",
                ]
            )
        )
    return lines


def migrate(store: str, env: Mapping[str, str]) -> None:
    """Create the tables of a database, or migrate them to the installed MLflow. Raises ServerError."""
    _in_child("migrate", store, env, None)


def _backup(store: str) -> str:
    path = sqlite_path(store)
    if path is not None:
        return f"`cp {path} {path}.backup` while no server runs"
    return "`pg_dump --format=custom --file=mlflow.dump DATABASE`" if store.startswith("postgresql") else "a dump"


def _in_child(action: str, store: str, env: Mapping[str, str], limit_s: float | None) -> str:
    """Run this module in a child process and return its standard output."""
    shown = redact_text(store)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-m", __name__, action],
            env={**environment_without_mlflow(env), STORE: store},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServerError(f"{shown} did not answer within {limit_s:g} s: check its server and the firewall") from None
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in done.stderr.replace(store, shown).splitlines() if line.strip()]
    if missing := re.search(r"No module named '(\w+)'", done.stderr):
        of_server = action != "inspect" or missing[1] == "psycopg2"
        fix = install_command("server") if of_server else f"`pip install {_DRIVERS.get(missing[1], missing[1])}`"
        raise UserMistake(f"the package {missing[1]} is not installed: {fix}")
    reason = next((line for line in reversed(lines) if "Error" in line and "sqlalche.me" not in line), "")
    raise ServerError(f"{shown} cannot be used: {redact_text(reason or ' '.join(lines[-1:]))[:300]}")


# --- in the child process


def _inspect(store: str) -> dict[str, str]:
    import sqlalchemy

    engine = sqlalchemy.create_engine(store)
    with engine.connect() as connection:
        tables = set(sqlalchemy.inspect(connection).get_table_names())
        found = _revisions(tables, lambda query: connection.execute(sqlalchemy.text(query)).scalar())
    engine.dispose()
    return found


def _migrate(store: str) -> None:
    from mlflow.server.auth.db import utils as accounts
    from mlflow.store.db import utils

    runs: Any = utils  # its functions have no types
    if store.startswith("sqlite:///"):
        runs._make_parent_dirs_if_sqlite(store)
    engine = runs.create_sqlalchemy_engine_with_retry(store)
    if runs._get_schema_version(engine) is None:
        runs._safe_initialize_tables(engine)
    else:
        runs._upgrade_db(engine)
    accounts.migrate_if_needed(engine, "head")
    engine.dispose()


def main() -> None:
    """Inspect or migrate the database in HPCDIST_SERVER_STORE."""
    os.umask(0o077)  # a new sqlite database is private
    store = os.environ.pop(STORE)
    if sys.argv[1] == "inspect":
        print(json.dumps(_inspect(store)))
    else:
        _migrate(store)


if __name__ == "__main__":
    main()
