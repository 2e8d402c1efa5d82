"""Make a database with the schema of an older MLflow: `python older_database.py URI NUMBER`.

NUMBER migrations of runs are left out, and those of accounts after the first one. Prints the revision of the database
and that of the installed MLflow. It runs in a process of its own, because MLflow and alembic change global settings.
"""

from __future__ import annotations

import sys
from typing import Any

import sqlalchemy
from alembic import command
from alembic.script import ScriptDirectory
from mlflow.server.auth.db import utils as accounts
from mlflow.store.db import utils as runs
from mlflow.store.tracking.dbmodels.initial_models import Base

FIRST_OF_ACCOUNTS = "8606fa83a998"


def main(uri: str, number: int) -> None:
    """Create the tables."""
    mlflow_runs: Any = runs  # its functions have no types
    engine = sqlalchemy.create_engine(uri)
    Base.metadata.create_all(engine)
    config = mlflow_runs._get_alembic_config(uri)
    revisions = list(ScriptDirectory.from_config(config).iterate_revisions("heads", "base"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revisions[number].revision)
    accounts.migrate(engine, FIRST_OF_ACCOUNTS)
    print(revisions[number].revision, revisions[0].revision)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
