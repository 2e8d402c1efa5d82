"""The folder of a tracking server: its credentials, its settings and the record of its process.

    admin_password      of MLflow's account `admin`, generated
    flask_key           key of the sign-up form's tokens, generated
    store               URI of the database, which may hold a password
    basic_auth.ini      configuration of MLflow's accounts, with the URI of the database
    users/NAME          credentials of an account, in the format of ~/.mlflow/credentials
    server.json         address, process and start of the last server
    server.log          output of the server
    mlflow.db           the database, unless another one is configured
    artifacts/          files of the runs, which the server stores and serves

The folder has mode 0700, and files with credentials have mode 0600.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcdist.config.redaction import redact_text
from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.files.atomic import read_json, write_json
from hpcdist.files.formats import fill
from hpcdist.files.private_file import read_private, write_private

ADMIN = "admin"
#: Variable with the URI of the database, for which a command line is no place.
STORE = "HPCDIST_SERVER_STORE"
_DATABASES = re.compile(r"(sqlite:///|(postgresql|mysql|mssql)(\+\w+)?://)")
_INI = """[mlflow]
default_permission = READ
database_uri = {uri}
admin_username = admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
"""


@dataclass(frozen=True, kw_only=True)
class ServerRecord:
    """The content of `server.json`: the last server that was started in a folder."""

    machine: str  #: host name of the machine
    pid: int
    started: float  #: start time of the process, seconds since the epoch; with `pid` it identifies the process
    address: str  #: such as http://127.0.0.1:5000
    store: str  #: URI of the database without its password
    version: str  #: of MLflow


class ServerFolder:
    """Paths and files in the folder of a tracking server."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.record = self.path / "server.json"
        self.log = self.path / "server.log"
        self.lock = self.path / ".lock"
        self.artifacts = self.path / "artifacts"
        self.ini = self.path / "basic_auth.ini"
        self.admin_password = self.path / "admin_password"
        self.flask_key = self.path / "flask_key"
        self.store = self.path / "store"
        self.users = self.path / "users"

    @classmethod
    def create(cls, path: Path) -> ServerFolder:
        """Make the folder and its generated credentials, if they are missing. Raises RunFolderError, UserMistake."""
        folder = cls(path)
        try:
            folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.path.stat().st_uid != os.geteuid():
                raise UserMistake(f"{folder.path} belongs to another user: choose a folder of your own with --folder")
            folder.path.chmod(0o700)
            for made in (folder.artifacts, folder.users):
                made.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UserMistake(f"{path} cannot be created ({error.strerror}): choose a folder with --folder") from error
        for file in (folder.admin_password, folder.flask_key):
            if not file.exists():
                write_private(file, secrets.token_urlsafe(24) + "\n")
        return folder

    def choose_store(self, option: str | None, env: Mapping[str, str]) -> str:
        """Return the URI of the database, and keep it for the next start.

        `option` is a URI without a password, or the path of a private file that holds the URI. Without it, the URI is
        that of the variable HPCDIST_SERVER_STORE, else that of the last start, else the sqlite file in the folder.
        """
        if option is not None and redact_text(option) != option:
            raise UserMistake(
                f"--store {redact_text(option)} holds a password, which other users can read in the list of processes:"
                f" set {STORE}, or write the URI to a file with mode 0600 and pass its path"
            )
        uri = option or env.get(STORE)
        if uri and not _DATABASES.match(uri):
            if "://" in uri:
                raise UserMistake(
                    f"{redact_text(uri)} is no database of MLflow: use postgresql+psycopg2://USER@HOST/DATABASE or"
                    " sqlite:////PATH/mlflow.db"
                )
            uri = read_private(Path(uri).expanduser())
            if not _DATABASES.match(uri):
                raise UserMistake(f"{option or STORE} must hold the URI of a database, such as postgresql+psycopg2://…")
        uri = uri or (read_private(self.store) if self.store.exists() else f"sqlite:///{self.path / 'mlflow.db'}")
        write_private(self.store, uri + "\n")
        # The file is read by configparser, to which % begins an interpolation.
        write_private(self.ini, _INI.format(uri=uri.replace("%", "%%")))
        return uri

    def read_record(self) -> ServerRecord | None:
        """Return the record of the last server; None if there was none. Raises RunFolderError if it is damaged."""
        found = read_json(self.record)
        if found is None and self.record.exists():
            raise RunFolderError(f"{self.record} is damaged: end the server with `kill`, then remove the file")
        return fill(ServerRecord, found, self.record) if found is not None else None

    def write_record(self, record: ServerRecord) -> None:
        """Write the record of the running server."""
        write_json(self.record, asdict(record), durable=True)


def default_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of a user's server."""
    home = env.get("XDG_DATA_HOME") or f"{env.get('HOME') or Path.home()}/.local/share"
    return Path(home, "hpcdist", "server")


def server_variables(folder: ServerFolder, store: str, allowed_hosts: str) -> dict[str, str]:
    """Return the environment variables of the server, which hold what other users must not read in its arguments."""
    return {
        "MLFLOW_BACKEND_STORE_URI": store,
        "MLFLOW_AUTH_CONFIG_PATH": str(folder.ini),
        "MLFLOW_AUTH_ADMIN_USERNAME": ADMIN,
        "MLFLOW_AUTH_ADMIN_PASSWORD": read_private(folder.admin_password),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": read_private(folder.flask_key),
        "MLFLOW_SERVER_ALLOWED_HOSTS": allowed_hosts,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # seven processes that runs do not need
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def environment_without_mlflow(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that configure an MLflow client or another server."""
    return {key: value for key, value in env.items() if not key.startswith(("MLFLOW_", STORE)) or "LOGGING" in key}
