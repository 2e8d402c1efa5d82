"""The connection to MLflow: its settings, the client, and the translation of its exceptions.

Other modules import MLflow's names from here, since the settings must be in place before MLflow is imported.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdist.errors import RunFolderError, TrackingError, UserMistake
from hpcdist.host.lock import long_lock
from hpcdist.run.folder import make_database
from hpcdist.tracking.server_errors import explanation
from hpcdist.tracking.uri import is_server, redact_uri, require_private_credentials, sqlite_path

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
from requests.exceptions import RequestException  # noqa: E402
from sqlalchemy.exc import SQLAlchemyError  # noqa: E402

# The cyclic garbage collector would visit the objects of these modules again and again during an upload.
gc.freeze()

# The client logs responses that are not MLflow's; this module reports them in one line.
for _name in ("mlflow.exceptions", "mlflow.utils.rest_utils"):
    logging.getLogger(_name).setLevel(logging.ERROR)

__all__ = ["MlflowClient", "MlflowException", "entities", "is_unsupported", "open_client", "require_id", "translated"]

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
        raise TrackingError(f"MLflow at {redact_uri(uri)}: {cause or _reason(error)}") from error
    except _MALFORMED as error:
        raise TrackingError(
            f"MLflow at {redact_uri(uri)}: the response is not MLflow's ({type(error).__name__}: {_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    text = " ".join(redact_uri(str(error)[:10_000]).split())
    return f"{text[:300]}{'…' if len(text) > 300 else ''}"


def all_pages(search: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yield the results of all pages of a search of MlflowClient."""
    token = None
    while True:
        page = search(*args, page_token=token, **kwargs)
        yield from page
        if not (token := page.token):
            return


def is_unsupported(error: MlflowException) -> bool:
    """Return whether a request failed because the server or the store, such as an older MLflow, does not have it."""
    return error.error_code in ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "FEATURE_DISABLED") or (
        " error code 404 " in str(error)  # a page instead of MLflow's JSON
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
            raise TrackingError(f"MLflow at {redact_uri(uri)}: {error}") from error
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
