"""Failed requests to an MLflow server in one line each: cause and fix; the version of MLflow there."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from urllib.parse import urlsplit

from hpcdist.errors import UserMistake
from hpcdist.tracking.uri import VARIABLES, read_credentials

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


def explanation(error: Exception, uri: str) -> str:
    """Return cause and fix of a failed request; empty if the error itself says more.

    Args:
        error: exception of MLflow's client.
    """
    text = str(error)[:10_000]
    status = status_of(error)
    if status == 401:
        return _unauthenticated(uri)
    if status == 403:
        return _forbidden(text, uri)
    if status in _NOT_AN_API:
        return _no_endpoint(status, uri)
    if status == 413:
        return (
            "the request is too large for the server or its proxy (413): raise the limit there, such as"
            " `client_max_body_size` of nginx"
        )
    if status == 429:
        return "the server accepts no more requests at the moment (429)"
    if status in (502, 503, 504):
        return f"the server is not available at the moment ({status})"
    if status == 500:
        return "the server has an internal error (500): see its log"
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


def version_in(answer: str) -> str:
    """Return the version in an answer of `/version`; empty for another page, such as that of a login."""
    text = answer.strip()
    return text if re.fullmatch(r"[0-9]+\.[0-9]+[\w.]{0,30}", text) else ""


def server_version(uri: str) -> str:
    """Return the version of the MLflow server at a URI; empty if none answers. Imports MLflow.

    MLflow's client sends the request: a server with accounts answers none without credentials.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    try:
        response = http_request(get_default_host_creds(uri), "/version", "GET", max_retries=0, timeout=5)
    except MlflowException:
        return ""
    return version_in(response.text[:100]) if response.status_code == 200 else ""
