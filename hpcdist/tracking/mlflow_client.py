"""The connection to MLflow: settings, client, exceptions as one line each, and the MLflow run of a run folder.

Other modules import MLflow's names from here, since the settings must be in place before MLflow is imported.
"""

import gc
import logging
import os
import re
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpcdist.config.redaction import redact_text
from hpcdist.errors import RunFolderError, TrackingError, UserMistake
from hpcdist.host.json_files import write_json
from hpcdist.host.locks import long_lock
from hpcdist.host.ownership import make_private, require_private
from hpcdist.run.attempt_times import began_of
from hpcdist.run.folder import RunDir, make_database, own_place, read_record
from hpcdist.run.mlflow_limits import MAX_PARAM, MAX_TAG, clean_name, cut_with_mark
from hpcdist.tracking.metric_point import Point
from hpcdist.tracking.uri import VARIABLES, credentials_file, is_server, read_credentials, sqlite_path, version_in

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
    # Otherwise it adds the `uv.lock` of the current folder to models.
    "MLFLOW_UV_AUTO_DETECT": "false",
}.items():
    os.environ.setdefault(_name, _value)

from google.protobuf.json_format import ParseError  # noqa: E402
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

log = logging.getLogger(__name__)

#: Exceptions of the client if the server, a proxy or the disk fails.
_FAILURES = (MlflowException, RequestException, SQLAlchemyError, OSError)
#: Exceptions of the client if a field of a response is missing or has another type, which the client does not check.
_MALFORMED = (ParseError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
#: Length of a reason in a message, and of the text of an exception that is searched for it: some contain whole pages.
_MAX_REASON = 300
_MAX_ERROR_TEXT = 10_000


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
    text = " ".join(redact_text(str(error)[:_MAX_ERROR_TEXT]).split())
    if len(text) > _MAX_REASON:
        return f"{text[:_MAX_REASON]}…"
    return text


def all_pages(search: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yield the results of all pages of a search of MLflow's client."""
    page = search(*args, page_token=None, **kwargs)
    yield from page
    while page.token:
        page = search(*args, page_token=page.token, **kwargs)
        yield from page


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
    if error.code in ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "FEATURE_DISABLED"):
        return True
    return " error code 404 " in str(error.__cause__)  # a page instead of MLflow's JSON


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
        credentials = credentials_file(os.environ)
        try:
            if credentials.exists():
                require_private(credentials)
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
_CODES: dict[str, int] = {
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "CUSTOMER_UNAUTHORIZED": HTTPStatus.UNAUTHORIZED,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "ENDPOINT_NOT_FOUND": HTTPStatus.NOT_FOUND,
    "REQUEST_LIMIT_EXCEEDED": HTTPStatus.TOO_MANY_REQUESTS,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "TEMPORARILY_UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
}
#: Answers of a server that does not have the address of a request.
_NOT_AN_API = frozenset(
    {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.GONE, HTTPStatus.NOT_IMPLEMENTED}
)
_CAUSES = {
    413: "the request is too large for the server or its proxy (413): raise the limit there, such as"
    " `client_max_body_size` of nginx",
    429: "the server accepts no more requests at the moment (429)",
    500: "the server has an internal error (500): see its log",
} | {status: f"the server is not available at the moment ({status})" for status in (502, 503, 504)}


def explanation(error: Exception, uri: str) -> str:
    """Return cause and fix of a failed request; empty if the error of MLflow's client itself says more."""
    text = str(error)[:_MAX_ERROR_TEXT]
    status = int(_CODES.get(str(getattr(error, "error_code", "")), 0))
    match = _STATUS.search(text)
    if match:
        status = int(next(filter(None, match.groups())))
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return _refused(status, text, uri)
    if status in _NOT_AN_API:
        return _unknown_request(status, uri)
    if status in _CAUSES:
        return _CAUSES[status]
    if "<" in text.partition(" Response body: ")[2][:200]:
        return (
            "The response is an HTML page: check that this is the address of an MLflow server, and not of a login page"
        )
    match = _UNREACHABLE.search(text)
    if match:
        reason = match[1] or "timeout"
        return f"the server cannot be reached ({reason}): check the address, and whether it runs"
    if "Exceeded 30 redirects" in text:
        return "the server redirects without end (redirects to a login page?): check that this is MLflow's address"
    return ""


def _unknown_request(status: int, uri: str) -> str:
    """Explain why a server does not know a request: it is not MLflow's, or has another version."""
    own, other = version("mlflow"), server_version(uri)
    if not other:
        return f"the server does not know MLflow's API ({status}): check the address, and its path if it has one"
    if other == own:
        return f"the server with MLflow {own}, like this client, does not know the request ({status}): see its log"
    return (
        f"the server has MLflow {other} and does not know a request of this client's MLflow {own} ({status}):"
        " install the same version on both sides"
    )


def _refused(status: int, text: str, uri: str) -> str:
    """Explain why a server refuses a request, by the credentials that the client has sent."""
    if "Invalid Host header" in text:
        host = urlsplit(uri).netloc.rpartition("@")[2]
        return (
            f"the server does not accept the host name {host} (403): its administrator allows it with"
            f" `--allowed-hosts {host}`"
        )
    try:
        credentials = read_credentials(uri, os.environ)
    except UserMistake as mistake:
        return str(mistake)
    if status == HTTPStatus.FORBIDDEN:
        user = f"user {credentials.user}" if credentials.user else "this user"
        return (
            f"{user} lacks the permission for the request (403): the owner of the experiment or an administrator"
            " grants EDIT"
        )
    if credentials.user:
        user, source = credentials.user, credentials.source
        return f"the server does not accept user {user} with this password (401): check {source}"
    if credentials.token:
        return (
            "the server does not accept the token in MLFLOW_TRACKING_TOKEN (401), which may have expired: set a new one"
        )
    return (
        f"the server needs a user and a password (401): set {VARIABLES}, or write them to ~/.mlflow/credentials"
        " with mode 0600"
    )


def server_version(uri: str) -> str:
    """Return the version of the MLflow server at a URI; empty if none answers.

    MLflow's client sends the request: a server with accounts answers none without credentials.
    """
    try:
        response = http_request(get_default_host_creds(uri), "/version", "GET", max_retries=0, timeout=5)
    except MlflowException:
        return ""
    if response.status_code != HTTPStatus.OK:
        return ""
    return version_in(response.text[:100])


UID_TAG = "hpcdist.run_uid"
#: Limits of one request to MLflow.
_MAX_METRICS, _MAX_TAGS = 1000, 100
#: Prefix of the tag with the new value of a parameter.
_CHANGED = "hpcdist.changed."


def clean_text(text: str) -> str:
    """Return text without passwords and without lone surrogates, which file names may contain."""
    return redact_text(text).encode(errors="replace").decode()


class MlflowRun:
    """The MLflow run of a run folder. All methods raise TrackingError if MLflow fails or rejects a request.

    They are idempotent: after a crash or a lost response, the same call leads to the same result.
    """

    def __init__(self, run: RunDir, uri: str) -> None:
        """Find or create the MLflow run; `mlflow.json` records its id."""
        self.uri = uri
        self.client = open_client(uri)
        self._folder = run
        self._reported_cuts: set[str] = set()
        saved = read_record(run.mlflow) or {}
        for key in ("run_uid", "run_id"):
            if not isinstance(saved.get(key, ""), str):
                raise TrackingError(f"{run.mlflow} is damaged: {key} cannot be {str(saved[key])[:40]!r}")
        if "run_uid" not in saved:
            # Written before the run is created: after a crash the run is found by this tag.
            saved["run_uid"] = uuid.uuid4().hex
            write_json(run.mlflow, saved, durable=True)
        with translated(uri):
            found = self._get(saved["run_id"]) if saved.get("run_id") else None
            if found is None and saved.get("run_id") and saved.get("uri") == redact_text(uri):
                raise TrackingError(
                    f"run {saved['run_id']} is no longer in MLflow at {redact_text(uri)}: restore its database, or"
                    f" remove {run.mlflow} to upload everything again as a new run"
                )
            if found is None:  # also if `mlflow.json` names a run of another store
                found = self._find_or_create(saved["run_uid"])
            self.start_ms = int(found.info.start_time or 0)
            self.run_id = require_id(found.info.run_id, "a run")
            self.experiment_id = require_id(found.info.experiment_id, "a run's experiment")
        ids = {"uri": redact_text(uri), "experiment_id": self.experiment_id, "run_id": self.run_id}
        if saved | ids != saved:
            write_json(run.mlflow, saved | ids, durable=True)

    def _find_or_create(self, uid: str) -> entities.Run:
        """Return the run with a tag UID_TAG, which an earlier process may have created."""
        experiment = self._experiment()
        same = self.client.search_runs([experiment], f"tags.`{UID_TAG}` = '{uid}'", max_results=1)
        if same:
            return same[0]
        start_ms = int(began_of(self._folder) * 1000)
        return self.client.create_run(experiment, start_ms, {UID_TAG: uid}, run_name=self._folder.name)

    def _get(self, run_id: str) -> entities.Run | None:
        """Return a run; None if it does not exist. Raises TrackingError if it or its experiment is deleted."""
        run = None
        with tolerated("RESOURCE_DOES_NOT_EXIST"):
            run = self.client.get_run(run_id)
        if run is None:
            return None
        # Together with an experiment MLflow deletes and restores its runs.
        self._require_undeleted(self.client.get_experiment(run.info.experiment_id))
        if run.info.lifecycle_stage == "deleted":
            raise TrackingError(
                f"run {run_id} is deleted in MLflow at {redact_text(self.uri)}: restore it with"
                f" `{self._command} runs restore --run-id {run_id}`"
            )
        return run

    def _require_undeleted(self, experiment: entities.Experiment) -> None:
        if experiment.lifecycle_stage == "deleted":
            raise TrackingError(
                f"experiment {experiment.name} is deleted in MLflow at {redact_text(self.uri)}: restore it with"
                f" `{self._command} experiments restore --experiment-id {experiment.experiment_id}`, or choose another"
                " `experiment` for a new run"
            )

    @property
    def _command(self) -> str:
        """MLflow's command line for this store: without the variable it would create a store of its own."""
        return f"MLFLOW_TRACKING_URI={shlex.quote(redact_text(self.uri))} mlflow"

    def _experiment(self) -> str:
        """Return the id of the experiment, which is created if it does not exist."""
        name = self._folder.experiment
        for _ in range(2):  # another process may create it at the same time
            experiment = self.client.get_experiment_by_name(name)
            if experiment is not None:
                self._require_undeleted(experiment)
                return require_id(experiment.experiment_id, "an experiment")
            with tolerated("RESOURCE_ALREADY_EXISTS"):
                location = self._artifact_location(name)
                return require_id(self.client.create_experiment(name, location), "an experiment")
        raise TrackingError(f"experiment {name} cannot be created in MLflow at {redact_text(self.uri)}")

    def _artifact_location(self, experiment: str) -> str | None:
        """Return a folder beside a local database; None for a server, which chooses the location itself."""
        if is_server(self.uri) or self.uri.startswith("databricks"):
            return None
        database = sqlite_path(self.uri)
        place = database.parent if database is not None else own_place(self._folder.path.parent.parent)
        folder = place / "mlartifacts"
        make_private(folder)  # it holds copies of private files
        return (folder.absolute() / experiment).as_uri()

    def log_points(self, points: Sequence[Point]) -> int:
        """Log points. Returns the number that MLflow rejects permanently, each with a warning."""
        metrics = [entities.Metric(*point) for point in points]
        num_rejected = 0
        for start in range(0, len(metrics), _MAX_METRICS):
            num_rejected += self._log_batch(metrics[start : start + _MAX_METRICS])
        return num_rejected

    def _log_batch(self, metrics: list[entities.Metric]) -> int:
        """Send one request, or several smaller ones if it is rejected. Returns the number of rejected metrics."""
        try:
            with translated(self.uri):
                self.client.log_batch(self.run_id, metrics=metrics, synchronous=True)
            return 0
        except TrackingError as error:
            # After 413, a request that is too large for the server or a proxy, its halves are sent.
            if len(metrics) == 1 or " error code 413 " not in str(error.__cause__):
                if error.code != "INVALID_PARAMETER_VALUE":
                    raise
                self.require_active()  # a deleted run gives the same error code
            if len(metrics) == 1:
                log.warning("metric %s of step %d is omitted: %s", metrics[0].key, metrics[0].step, error)
                return 1
            middle = len(metrics) // 2
            return self._log_batch(metrics[:middle]) + self._log_batch(metrics[middle:])

    def require_active(self) -> None:
        """Raise TrackingError if the run is deleted or no longer in MLflow."""
        with translated(self.uri):
            if self._get(self.run_id) is None:
                raise TrackingError(f"run {self.run_id} is no longer in MLflow at {redact_text(self.uri)}")

    def log_params(self, params: Mapping[str, str]) -> None:
        """Log parameters; since MLflow's are immutable, a changed one becomes a tag `hpcdist.changed.<key>`."""
        whole = {clean_name(key): clean_text(value) for key, value in params.items()}
        params = {key: self._cut("parameter", key, value, MAX_PARAM) for key, value in whole.items()}
        with translated(self.uri):
            data = self.client.get_run(self.run_id).data
            logged = data.params
            # Earlier versions cut values without a mark.
            params |= {key: value[:MAX_PARAM] for key, value in whole.items() if logged.get(key) == value[:MAX_PARAM]}
            new = [entities.Param(key, value) for key, value in params.items() if key not in logged]
            for start in range(0, len(new), _MAX_TAGS):
                self.client.log_batch(self.run_id, params=new[start : start + _MAX_TAGS], synchronous=True)
        has_tags = any(key.startswith(_CHANGED) for key in data.tags)
        changed = {}
        for key, value in params.items():
            first = logged.get(key, value)
            # Without such a tag nothing looks up its name, about which `clean_name` would warn.
            if has_tags or first != value:
                tag = f"{_CHANGED}{key}"
                if data.tags.get(clean_name(tag), first) != value:
                    changed[tag] = value
        self.set_tags(changed)

    def _cut(self, kind: str, key: str, value: str, limit: int) -> str:
        """Return a value as MLflow can store it; one that is too long has a mark, and a warning."""
        text = clean_text(value)
        if len(text) > limit and key not in self._reported_cuts:
            self._reported_cuts.add(key)
            log.warning("%s %s has %d characters and is cut to %d, the limit of MLflow", kind, key, len(text), limit)
        return cut_with_mark(text, limit)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; long values are cut, with a warning."""
        pairs = [entities.RunTag(clean_name(key), self._cut("tag", key, value, MAX_TAG)) for key, value in tags.items()]
        with translated(self.uri):
            for start in range(0, len(pairs), _MAX_TAGS):
                self.client.log_batch(self.run_id, tags=pairs[start : start + _MAX_TAGS], synchronous=True)

    def current(self) -> entities.Run:
        """Return the run as it is in MLflow now."""
        with translated(self.uri):
            return self.client.get_run(self.run_id)

    def delete_tag(self, key: str) -> None:
        """Delete a tag, unless it is already missing."""
        with translated(self.uri), tolerated("RESOURCE_DOES_NOT_EXIST"):
            self.client.delete_tag(self.run_id, key)

    def set_status(self, status: str, ended_ms: int | None) -> None:
        """Set MLflow's status; FINISHED, FAILED and KILLED come with an end time."""
        with translated(self.uri):
            if ended_ms is None:
                self.client.update_run(self.run_id, status=status)
            else:
                self.client.set_terminated(self.run_id, status, end_time=ended_ms)

    def upload(self, source: Path, target: str) -> None:
        """Upload a file as `target`, or the content of a folder into `target`."""
        with translated(self.uri):
            if source.is_dir():
                self.client.log_artifacts(self.run_id, str(source), target)
                return
            folder, _, name = target.rpartition("/")
            if name == source.name:
                self.client.log_artifact(self.run_id, str(source), folder or None)
                return
            with tempfile.TemporaryDirectory() as temporary:  # MLflow takes the name from the file
                path = shutil.copyfile(source, Path(temporary, name))
                self.client.log_artifact(self.run_id, str(path), folder or None)
