"""Schema of a tracking server's database: which migrations it needs, and their execution.

    python -P -m hpcdist.tracking.server.database_schema inspect|migrate      the URI in HPCDIST_SERVER_STORE

It runs in a process of its own: imports of MLflow and alembic take seconds, and a driver may hang. The database holds
two schemas, each with its own table of the revision: that of runs and that of accounts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcdist.config.redaction import redact_text
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.tracking.server.server_folder import STORE, environment_without_mlflow
from hpcdist.tracking.uri import sqlite_path

INSPECT_S = 120.0


class ServerError(HpcdistError):
    """The tracking server or its database failed; another attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """One of the two schemas of a database."""

    name: str  #: `runs` or `accounts`
    found: str  #: revision; empty without tables
    wanted: str  #: revision of the installed MLflow
    pending: tuple[str, ...] = ()  #: first line of each migration, in order
    is_newer: bool = False  #: whether a newer MLflow has written it


def read_schemas(store: str, env: Mapping[str, str]) -> list[Schema]:
    """Return the schemas of a database, without a change of it. Raises ServerError if it cannot be queried."""
    path = sqlite_path(store)
    if path is not None and not path.exists():
        return []  # connecting would create an empty file
    found = json.loads(_in_child("inspect", store, env, INSPECT_S))
    return [Schema(**{**one, "pending": tuple(one["pending"])}) for one in found]


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
        raise UserMistake(f"the package {missing[1]} is not installed: `pip install 'hpcdist[server]'`")
    reason = next((line for line in reversed(lines) if "Error" in line and "sqlalche.me" not in line), "")
    raise ServerError(f"{shown} cannot be used: {redact_text(reason or ' '.join(lines[-1:]))[:300]}")


# --- in the child process


def _inspect(store: str) -> list[dict[str, Any]]:
    import sqlalchemy

    engine = sqlalchemy.create_engine(store)
    with engine.connect() as connection:
        tables = set(sqlalchemy.inspect(connection).get_table_names())
        revisions = {
            table: connection.execute(sqlalchemy.text(f"select version_num from {table}")).scalar()  # noqa: S608
            for table in ("alembic_version", "alembic_version_auth")
            if table in tables
        }
    # MLflow 3.5 and older wrote the tables of accounts without a revision.
    if "users" in tables and "alembic_version_auth" not in tables:
        from mlflow.server.auth.db.utils import INITIAL_REVISION

        revisions["alembic_version_auth"] = INITIAL_REVISION
    engine.dispose()
    return [
        _schema("runs", revisions.get("alembic_version") or "", "store/db_migrations"),
        _schema("accounts", revisions.get("alembic_version_auth") or "", "server/auth/db/migrations"),
    ]


def _schema(name: str, found: str, folder: str) -> dict[str, Any]:
    from importlib.util import find_spec
    from pathlib import Path

    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util.exc import CommandError

    spec = find_spec("mlflow")
    assert spec is not None
    assert spec.origin is not None
    config = Config()
    config.set_main_option("script_location", str(Path(spec.origin).parent / folder).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    (head,) = scripts.get_heads()
    try:
        steps = [] if found == head else list(scripts.iterate_revisions(head, found or "base"))
    except CommandError:  # an unknown revision
        return {"name": name, "found": found, "wanted": head, "pending": [], "is_newer": True}
    pending = [f"{step.revision}: {(step.doc or '').strip()}" for step in reversed(steps)]
    return {"name": name, "found": found, "wanted": head, "pending": pending}


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
