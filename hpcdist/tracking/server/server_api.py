"""Requests to a tracking server as its administrator: health, version, experiments and accounts."""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from hpcdist.files.private_file import read_private, write_private
from hpcdist.tracking.client.credentials import Credentials
from hpcdist.tracking.client.server_version import version_in
from hpcdist.tracking.server.database_schema import ServerError
from hpcdist.tracking.server.server_folder import ADMIN, ServerFolder

TIMEOUT_S = 30.0
_API = "/api/2.0/mlflow"
_PAGE = 1000


def answers(address: str) -> bool:
    """Return whether /health of a server answers."""
    try:
        with _direct().open(f"{address}/health", timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


def server_version(address: str, folder: ServerFolder) -> str:
    """Return the version of MLflow that answers. Raises ServerError."""
    return version_in(_send("GET", address, "/version", folder).decode(errors="replace")) or "unknown"


def num_experiments(address: str, folder: ServerFolder) -> int:
    """Return the number of experiments that are not deleted. Raises ServerError."""
    total, token = 0, ""
    while True:
        body = {"max_results": _PAGE, **({"page_token": token} if token else {})}
        found = _json("POST", address, f"{_API}/experiments/search", folder, body)
        total += len(found.get("experiments") or [])
        token = str(found.get("next_page_token") or "")
        if not token:
            return total


def set_account(address: str, folder: ServerFolder, name: str) -> bool:
    """Create an account with a generated password, or give an existing one a new password.

    The credentials are in the file `users/NAME` afterwards. Returns whether the account is new. Raises ServerError.
    """
    body = {"username": name, "password": secrets.token_urlsafe(18)}
    is_new = True
    try:
        _json("POST", address, f"{_API}/users/create", folder, body)
    except ServerError as error:
        if "RESOURCE_ALREADY_EXISTS" not in str(error):
            raise
        is_new = False
        _json("PATCH", address, f"{_API}/users/update-password", folder, body)
    password = body["password"]
    write_private(
        folder.users / name,
        f"[mlflow]\nmlflow_tracking_username = {name}\nmlflow_tracking_password = {password}\n",
    )
    return is_new


def remove_account(address: str, folder: ServerFolder, name: str) -> None:
    """Delete an account, with its permissions. Raises ServerError."""
    _json("DELETE", address, f"{_API}/users/delete", folder, {"username": name})
    (folder.users / name).unlink(missing_ok=True)


def _direct() -> urllib.request.OpenerDirector:
    """Return an opener without a proxy: the server runs on this machine."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _json(
    method: str, address: str, path: str, folder: ServerFolder, body: Mapping[str, object] | None = None
) -> dict[str, Any]:
    raw = _send(method, address, path, folder, body)
    try:
        found = json.loads(raw or b"{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError(f"{address}{path} does not answer with JSON: see the server's log {folder.log}")
    return found


def _send(
    method: str, address: str, path: str, folder: ServerFolder, body: Mapping[str, object] | None = None
) -> bytes:
    own = Credentials(user=ADMIN, password=read_private(folder.admin_password))
    headers = {**own.headers(), "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(address + quote(path), data, headers, method=method)  # noqa: S310 (own server)
    try:
        with _direct().open(request, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ServerError(
                f"{address} refuses the account admin with the password in {folder.admin_password}: the password was"
                " changed in the server; write the present one to the file"
            ) from error
        text = error.read(2000).decode(errors="replace")
        raise ServerError(f"{address}{path} answers {error.code}: {' '.join(text.split())[:300]}") from error
    except (OSError, HTTPException) as error:
        raise ServerError(f"{address} does not answer: {getattr(error, 'reason', error)}") from error
