"""`hpcdist server`: MLflow's tracking server for a team, and its accounts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdist.cli.options import Json, option
from hpcdist.errors import UserMistake

if TYPE_CHECKING:
    from hpcdist.tracking.server.server_folder import ServerFolder, ServerRecord

app = typer.Typer(
    name="server", no_args_is_help=True, help="Start and stop MLflow's tracking server for a team, with accounts."
)
_REPORT_S = 5.0
_LOG_LINES = 15

Folder = Annotated[
    Path | None, option("--folder", "DIR", "Folder of the server; by default ~/.local/share/hpcdist/server.")
]
AccountName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the account.")]


def _folder(path: Path | None) -> Path:
    from hpcdist.tracking.server.server_folder import default_folder

    return path.expanduser() if path is not None else default_folder(os.environ)


@app.command()
def up(
    folder: Folder = None,
    store: Annotated[
        str | None,
        option("--store", "URI|FILE", "Database without a password, or file with mode 0600 that holds its URI."),
    ] = None,
    host: Annotated[str, option("--host", "ADDRESS", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 5000,
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Processes that answer requests.")] = 2,
    allow_host: Annotated[
        list[str] | None,
        option("--allow-host", "NAME[:PORT]", "Another name of the machine, such as that of a proxy; repeatable."),
    ] = None,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Migrate the database of an older MLflow; back it up first.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Time limit of the start.")] = 300,
) -> None:
    """Start MLflow's server with accounts in the background.

    Without --store, the database is a sqlite file in the folder of the server. For PostgreSQL pass its URI once; the
    folder keeps it for later starts. The environment variable HPCDIST_SERVER_STORE may hold a URI with a password.

    Examples:

        hpcdist server up

        hpcdist server up --host 0.0.0.0 --store ~/mlflow-store
    """
    from hpcdist.files.lock import exclusive
    from hpcdist.tracking.server import database_schema, server_process
    from hpcdist.tracking.server.server_folder import ServerFolder

    place = ServerFolder.create(_folder(folder))
    with exclusive(place.lock):
        before = place.read_record()
        if before is not None and server_process.members(before):
            raise UserMistake(
                f"a server runs already: {before.address}, process {before.pid}; end it with `down` first"
            )
        server_process.require_free(host, port, "--port and --host")
        uri = place.choose_store(store, os.environ)
        schemas = database_schema.read_schemas(uri, os.environ)
        for line in database_schema.require_consent(schemas, uri, migrate):
            print(line, flush=True)
        database_schema.migrate(uri, os.environ)
        allowed = list(allow_host or [])
        record, process = server_process.start(
            place, uri, os.environ, host=host, port=port, workers=workers, allowed_hosts=allowed
        )
    _wait(place, record, process, port, timeout_s)
    print(f"MLflow {record.version} at {record.address}, process {record.pid}, database {record.store}")
    print(f"administrator: admin, password in {place.admin_password}")
    print("accounts: hpcdist server user NAME")
    if host not in server_process.LOOPBACK:
        print(
            "Passwords are not encrypted on the network: put a proxy with TLS in front of the server, or listen on"
            " 127.0.0.1 and use `ssh -L`."
        )


def _wait(
    place: ServerFolder, record: ServerRecord, process: subprocess.Popen[bytes], port: int, timeout_s: float
) -> None:
    """Wait until the server answers; on failure end it and raise ServerError with the end of its log."""
    from hpcdist.tracking.server import server_api, server_process
    from hpcdist.tracking.server.database_schema import ServerError

    began = shown = time.monotonic()
    try:
        while not (server_process.listens(record, port) and server_api.answers(record.address)):
            now = time.monotonic()
            if process.poll() is not None:
                raise ServerError(_with_log(place, f"the server exited with code {process.returncode}"))
            if now - began > timeout_s:
                raise ServerError(_with_log(place, f"the server does not answer after {timeout_s:g} s"))
            if now - shown >= _REPORT_S:
                shown = now
                print(f"waiting for the server: {now - began:.0f} s", flush=True)
            time.sleep(server_process.POLL_S)
    except BaseException:  # also after Ctrl-C
        server_process.end(record, print)
        raise


def _with_log(place: ServerFolder, text: str) -> str:
    log = place.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([f"{text}; the end of {place.log}:", *log])


@app.command()
def down(folder: Folder = None) -> None:
    """End the server of a folder. Clients keep their records until it runs again.

    Example:  hpcdist server down
    """
    from hpcdist.files.lock import exclusive
    from hpcdist.tracking.server import server_process

    place = _existing(folder)
    with exclusive(place.lock):
        record = place.read_record()
        if record is None or not server_process.end(record, print):
            print("no server runs")
            return
    print(f"ended the server at {record.address}, process {record.pid}")


@app.command()
def status(folder: Folder = None, as_json: Json = False) -> int:
    """Show address, database, version and health of the server. The exit code is 1 unless it answers.

    Example:  hpcdist server status --json
    """
    place = _existing(folder)
    facts = _facts(place)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        for key, value in facts.items():
            print(f"{key:12} {value}")
    return 0 if facts.get("health") == "ok" else 1


def _facts(place: ServerFolder) -> dict[str, Any]:
    """Return what `status` shows, by name."""
    from hpcdist.tracking.server import server_api, server_process
    from hpcdist.tracking.server.database_schema import ServerError

    record = place.read_record()
    facts: dict[str, Any] = {"folder": str(place.path)}
    if record is None or not (found := server_process.members(record)):
        return facts | {"health": "no server runs"}
    facts |= {"address": record.address, "store": record.store, "pid": record.pid, "processes": len(found)}
    facts |= {"since": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started)), "log": str(place.log)}
    if not server_api.answers(record.address):
        return facts | {"version": record.version, "health": f"does not answer: see {place.log}"}
    try:
        facts["version"] = server_api.server_version(record.address, place)
        facts["experiments"] = server_api.num_experiments(record.address, place)
    except ServerError as error:
        return facts | {"health": str(error)}
    return facts | {"health": "ok"}


@app.command()
def user(
    name: AccountName,
    folder: Folder = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete the account.")] = False,
) -> None:
    """Create an account with a generated password, or give an existing one a new password.

    The printed file has the format of ~/.mlflow/credentials, which MLflow and hpcdist read: hand it to the user over a
    private channel. The user can read all experiments, and change those of their own.

    Example:  hpcdist server user ada
    """
    from hpcdist.tracking.server import server_api, server_process

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", name):
        raise UserMistake(f"{name!r} is no name of an account: use letters, digits and . _ @ -")
    place = _existing(folder)
    record = place.read_record()
    if record is None or not server_process.members(record):
        raise UserMistake("no server runs: start it with `hpcdist server up`")
    if remove:
        server_api.remove_account(record.address, place, name)
        print(f"deleted the account {name}")
        return
    is_new = server_api.set_account(record.address, place, name)
    print(f"{'created the account' if is_new else 'new password of the account'} {name}: {place.users / name}")
    print(f"the user runs: install -D -m 600 FILE ~/.mlflow/credentials; export MLFLOW_TRACKING_URI={record.address}")


def _existing(folder: Path | None) -> ServerFolder:
    from hpcdist.tracking.server.server_folder import ServerFolder

    path = _folder(folder)
    if not (path / "server.json").exists():
        raise UserMistake(f"{path} holds no server: start one with `hpcdist server up`, or pass its --folder")
    return ServerFolder(path)
