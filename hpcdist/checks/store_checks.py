"""Checks of MLflow's store for `hpcdist doctor`: whether a run's metrics would arrive in it."""

import os
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

from hpcdist.config.redaction import redact_text
from hpcdist.errors import UserMistake, shortened
from hpcdist.host import storage
from hpcdist.host.check_result import Check, note, ok, warning
from hpcdist.host.versions import version_of
from hpcdist.tracking.uri import VARIABLES, Credentials, read_credentials, sqlite_path, version_in, web_address

#: A server on the same continent answers faster.
SERVER_TIMEOUT_S = 3.0
_LATER = "training continues, and `hpcdist sync` delivers its metrics later"


def store_checks(uri: str, env: Mapping[str, str]) -> list[Check]:
    """Check whether a run's metrics would arrive in the store; nothing is created."""
    shown = redact_text(uri)
    checks = [ok("client", f"MLflow {version_of('mlflow')}")]
    if not version_of("mlflow"):
        checks = [warning("client", f"mlflow is not installed; {_LATER}", "`pip install mlflow`")]
    database = sqlite_path(uri)
    if database is not None:
        return [*checks, _sqlite(shown, database)]
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
    root = web_address(uri)
    headers = credentials.headers()
    shown = redact_text(uri)
    is_up = False
    try:
        _get(f"{root}/health", {})
        is_up = True
        _get(f"{root}/api/2.0/mlflow/experiments/search?max_results=1", headers)
        version = version_in(_get(f"{root}/version", headers)) or "of an unknown version"
    except (OSError, ValueError, HTTPException) as error:  # also an invalid address of a redirect, or no HTTP
        return _server_problem(error, shown, credentials, is_up=is_up)
    return ok("server", f"{shown} answers, MLflow {version}")


def _server_problem(error: Exception, shown: str, credentials: Credentials, *, is_up: bool) -> Check:
    """Explain a failed request to a server.

    Args:
        shown: URI of the server without its password.
        is_up: whether the server has answered at `/health`.
    """
    code = error.code if isinstance(error, urllib.error.HTTPError) else None
    if code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        if not (credentials.user or credentials.token):
            text = f"{shown} requires a user and a password (answer {code}): {_LATER}"
            return warning("server", text, f"export {VARIABLES}")
        who = credentials.user or "the token"
        return warning("server", f"{shown} refuses {who} (answer {code}): {_LATER}", f"check {credentials.source}")
    if code:
        reason = f"answer {code}"
    else:
        words = " ".join(str(getattr(error, "reason", error)).split())
        reason = shortened(words or type(error).__name__, 200)
    if is_up:
        text = f"{shown} is up, but does not list experiments ({reason}): {_LATER}"
        return warning("server", text, "see the server's log, and its database")
    if code:
        text = f"{shown} answers {code}, so it is not an MLflow server, or it has an error: {_LATER}"
        fix = f"`curl {shown}/health` should print OK; if MLflow has a path prefix, add it to the URI"
        return warning("server", text, fix)
    text = f"{shown} cannot be reached ({reason}): {_LATER}"
    fix = "start it, or set tracking.uri or MLFLOW_TRACKING_URI; behind a proxy set no_proxy"
    return warning("server", text, fix)


def _get(url: str, headers: Mapping[str, str]) -> str:
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 (http or https, by the caller)
    with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as answer:  # noqa: S310
        return str(answer.read(10_000).decode(errors="replace"))


def _sqlite(uri: str, path: Path) -> Check:
    folder = storage.existing(path.parent)
    if not path.exists() and os.access(folder, os.W_OK):
        return ok("database", f"{path} does not exist; the first run creates it")
    if not os.access(path, os.W_OK) or not os.access(folder, os.W_OK):
        text = f"{path} or its folder cannot be written by this user: {_LATER}"
        fix = f"`ls -ld {folder} {path}`; set tracking.uri to a folder of your own"
        return warning("database", text, fix)
    try:
        # Not read-only: a killed process may have left a journal, which must be rolled back before a query.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as connection:
            connection.execute("select 1 from sqlite_master").fetchone()
    except sqlite3.Error as error:
        fix = "restore a backup, or set another store for new runs (tracking.uri)"
        return warning("database", f"{path} cannot be read ({error}): {_LATER}", fix)
    return ok("database", f"{uri} can be read")
