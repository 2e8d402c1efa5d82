"""The connection to MLflow: its settings, the client, and the translation of its exceptions into one line each.

Other modules import MLflow's names from here, since the settings must be in place before MLflow is imported.
"""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpcdist.config.redaction import redact_text
from hpcdist.errors import RunFolderError, TrackingError, UserMistake
from hpcdist.host.lock import long_lock
from hpcdist.run.folder import make_database
from hpcdist.tracking.uri import (
    VARIABLES,
    is_server,
    read_credentials,
    require_private_credentials,
    sqlite_path,
    version_in,
)

# Settings that MLflow reads when it is imported or used. Retries of MLflow are off: they block for minutes
# and may create a run twice. The shipper retries instead.
for _name, _value in {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    # Transfers of files are retried five times, and would wait for as long as the server asks.
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "600",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # At the end of a run MLflow prints links with the tracking URI, password included.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}.items():
    os.environ.setdefault(_name, _value)

from google.protobuf.json_format import ParseError  # type: ignore[import-untyped]  # noqa: E402
from mlflow import MlflowClient, entities  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.utils.credentials import get_default_host_creds  # noqa: E402
from mlflow.utils.rest_utils import http_request  # noqa: E402
from requests.exceptions import RequestException  # noqa: E402
from sqlalchemy.exc import SQLAlchemyError  # noqa: E402

# The cyclic garbage collector would visit the objects of these modules again and again during an upload.
gc.freeze()

# The client logs responses that are not MLflow's; this module reports them in one line.
for _name in ("mlflow.exceptions", "mlflow.utils.rest_utils"):
    logging.getLogger(_name).setLevel(logging.ERROR)

__all__ = ["MlflowClient", "MlflowException", "entities", "open_client"]

#: Exceptions of the client if the server, a proxy or the disk fails.
_FAILURES = (MlflowException, RequestException, SQLAlchemyError, OSError)
#: Exceptions of the client if a field of a response is missing or has another type, which the client does not check.
_MALFORMED = (ParseError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


@contextmanager
def translated(uri: str) -> Iterator[None]:
    """Turn each failure of MLflow, its server or its disk into a TrackingError of one line."""
    try:
        yield
    except _FAILURES as error:
        cause = explanation(error, uri) if is_server(uri) else ""
        code = str(getattr(error, "error_code", ""))
        raise TrackingError(f"MLflow at {redact_text(uri)}: {cause or _reason(error)}", code=code) from error
    except _MALFORMED as error:
        raise TrackingError(
            f"MLflow at {redact_text(uri)}: the response is not MLflow's ({type(error).__name__}: {_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    text = " ".join(redact_text(str(error)[:10_000]).split())
    return f"{text[:300]}{'…' if len(text) > 300 else ''}"


def all_pages(search: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yield the results of all pages of a search of MlflowClient."""
    token = None
    while True:
        page = search(*args, page_token=token, **kwargs)
        yield from page
        if not (token := page.token):
            return


@contextmanager
def tolerated(code: str) -> Iterator[None]:
    """End the block at an exception of MLflow with this error code."""
    try:
        yield
    except MlflowException as error:
        if error.error_code != code:
            raise


def is_unsupported(error: TrackingError) -> bool:
    """Return whether a request failed because the server or the store, such as an older MLflow, does not have it."""
    return error.code in ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "FEATURE_DISABLED") or (
        " error code 404 " in str(error.__cause__)  # a page instead of MLflow's JSON
    )


def require_id(value: object, kind: str) -> str:
    """Return an id from a response, in which it may be missing: an empty object parses as any response."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{kind} without an id")
    return value


def open_client(uri: str) -> MlflowClient:
    """Return a client of a store that is ready for use.

    The tables of a new sqlite database are created under a lock, since MLflow does not support concurrent creation.
    Raises TrackingError if the store cannot be reached, if it is a database of another user, or if other users can read
    the file with the credentials of a server.
    """
    database = sqlite_path(uri)
    if is_server(uri):
        try:
            require_private_credentials(os.environ)
        except UserMistake as error:
            raise TrackingError(f"MLflow at {redact_text(uri)}: {error}") from error
    with translated(uri):
        if database is None:
            return _connected(uri)
        try:
            make_database(database)
        except RunFolderError as error:
            raise TrackingError(str(error)) from error
        with long_lock(database.with_name(f"{database.name}.lock"), mode=0o600):
            if not database.stat().st_size:
                _create_tables(database)
            return _connected(uri)


def _create_tables(database: Path) -> None:
    """Create the tables of a new sqlite database in another file, then give it the name of the database.

    MLflow cannot continue with the tables of a process that was killed while it created them.
    """
    new = database.with_name(f".{database.name}.{os.uname().nodename}.{os.getpid()}")
    for suffix in ("", "-journal", "-wal", "-shm"):  # of a killed process with the same id, as in a container
        new.with_name(new.name + suffix).unlink(missing_ok=True)
    make_database(new)
    try:
        client = _connected(f"sqlite:///{new}")
        client._tracking_client.store.engine.dispose()
        if not database.stat().st_size:  # otherwise a program without this lock has created them meanwhile
            new.replace(database)
    finally:
        new.unlink(missing_ok=True)


def _connected(uri: str) -> MlflowClient:
    """Return a client after a first request, which creates the tables of a new database."""
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    client.search_experiments(max_results=1)
    return client


# Failed requests to a server: cause and fix in one line; the version of MLflow there.

_STATUS = re.compile(
    r"failed with error code (\d{3}) |too many (\d{3}) error responses|^(\d{3}) (?:Client|Server) Error"
)
_UNREACHABLE = re.compile(
    r"(?:NewConnectionError|NameResolutionError|ConnectTimeoutError|timed out).*?(?:\[Errno -?\d+\] ([\w ]+)|$)",
    re.DOTALL,
)
#: Error codes of MLflow's JSON answers that a server or gateway gives independently of the content of the request.
_CODES = {
    "UNAUTHENTICATED": 401,
    "CUSTOMER_UNAUTHORIZED": 401,
    "PERMISSION_DENIED": 403,
    "ENDPOINT_NOT_FOUND": 404,
    "REQUEST_LIMIT_EXCEEDED": 429,
    "RESOURCE_EXHAUSTED": 429,
    "TEMPORARILY_UNAVAILABLE": 503,
}
_NOT_AN_API = frozenset({404, 405, 410, 501})
_CAUSES = {
    413: "the request is too large for the server or its proxy (413): raise the limit there, such as"
    " `client_max_body_size` of nginx",
    429: "the server accepts no more requests at the moment (429)",
    500: "the server has an internal error (500): see its log",
} | {status: f"the server is not available at the moment ({status})" for status in (502, 503, 504)}


def explanation(error: Exception, uri: str) -> str:
    """Return cause and fix of a failed request; empty if the error of MLflow's client itself says more."""
    text = str(error)[:10_000]
    status = status_of(error)
    if status == 401:
        return _unauthenticated(uri)
    if status == 403:
        return _forbidden(text, uri)
    if status in _NOT_AN_API:
        return _no_endpoint(status, uri)
    if status in _CAUSES:
        return _CAUSES[status]
    body = text.partition(" Response body: ")[2]
    if "<" in body[:200]:
        return (
            "The response is an HTML page: check that this is the address of an MLflow server, and not of a login page"
        )
    if found := _UNREACHABLE.search(text):
        return f"the server cannot be reached ({found[1] or 'timeout'}): check the address, and whether it runs"
    if "Exceeded 30 redirects" in text:
        return "the server redirects without end (redirects to a login page?): check that this is MLflow's address"
    return ""


def status_of(error: Exception) -> int:
    """Return the HTTP status of a failed request; 0 if it is unknown, or an error about the request's content."""
    code = _CODES.get(str(getattr(error, "error_code", "")), 0)
    found = _STATUS.search(str(error)[:10_000])
    return int(next(filter(None, found.groups()))) if found else code


def _unauthenticated(uri: str) -> str:
    try:
        own = read_credentials(uri, os.environ)
    except UserMistake as mistake:
        return str(mistake)
    if own.user:
        return f"the server does not accept user {own.user} with this password (401): check {own.source}"
    if own.token:
        return (
            "the server does not accept the token in MLFLOW_TRACKING_TOKEN (401), which may have expired: set a new one"
        )
    return (
        f"the server needs a user and a password (401): set {VARIABLES}, or write them to ~/.mlflow/credentials"
        " with mode 0600"
    )


def _forbidden(text: str, uri: str) -> str:
    if "Invalid Host header" in text:
        host = urlsplit(uri).netloc.rpartition("@")[2]
        return (
            f"the server does not accept the host name {host} (403): its administrator allows it with"
            f" `--allowed-hosts {host}`"
        )
    try:
        user = read_credentials(uri, os.environ).user
    except UserMistake:
        user = ""
    return (
        f"{f'user {user}' if user else 'this user'} lacks the permission for the request (403): the owner of the"
        " experiment or an administrator grants EDIT"
    )


def _no_endpoint(status: int, uri: str) -> str:
    own, found = version("mlflow"), server_version(uri)
    if not found:
        return f"the server does not know MLflow's API ({status}): check the address, and its path if it has one"
    if found == own:
        return f"the server with MLflow {found}, like this client, does not know the request ({status}): see its log"
    return (
        f"the server has MLflow {found} and does not know a request of this client's MLflow {own} ({status}): install"
        " the same version on both sides"
    )


def server_version(uri: str) -> str:
    """Return the version of the MLflow server at a URI; empty if none answers.

    MLflow's client sends the request: a server with accounts answers none without credentials.
    """
    try:
        response = http_request(get_default_host_creds(uri), "/version", "GET", max_retries=0, timeout=5)
    except MlflowException:
        return ""
    return version_in(response.text[:100]) if response.status_code == 200 else ""
