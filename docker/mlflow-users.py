#!/usr/bin/env python3
"""Create the MLflow user of training containers, or set its password again.

Reads the secrets admin_password and train_password in $MLFLOW_SECRETS_DIR, and MLFLOW_TRACKING_URI. The user is no
administrator: it can create experiments and runs, and read those of others.
"""

import base64
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

NAME = "hpcdist"


def secret(name: str) -> str:
    path = Path(os.environ.get("MLFLOW_SECRETS_DIR", "/run/secrets"), name)
    try:
        return path.read_text().strip()
    except OSError as error:
        sys.exit(f"mlflow-users: the secret {path} cannot be read by uid {os.getuid()} ({error.strerror})")


def request(method: str, path: str, user: str, password: str, body: dict[str, str] | None = None) -> str:
    """Send a request to MLflow's users API and return the error, empty on success."""
    credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
    message = urllib.request.Request(  # noqa: S310 - the address is the administrator's own setting
        f"{os.environ['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/users/{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json", "Authorization": f"Basic {credentials}"},
        method=method,
    )
    try:
        with urllib.request.urlopen(message, timeout=60):  # noqa: S310
            return ""
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        return "exists" if "RESOURCE_ALREADY_EXISTS" in text else f"{error.code} {error.reason}"
    except OSError as error:
        return str(error)


own = (NAME, secret("train_password"))
if request("GET", f"get?username={NAME}", *own):
    admin = (os.environ.get("MLFLOW_AUTH_ADMIN_USERNAME", "admin"), secret("admin_password"))
    body = {"username": own[0], "password": own[1]}
    failure = request("POST", "create", *admin, body)
    if failure == "exists":
        failure = request("PATCH", "update-password", *admin, body)
    if failure:
        sys.exit(f"mlflow-users: user {NAME} cannot be created as {admin[0]}: {failure}")
print(f"mlflow-users: user {NAME} has the password in train_password")
