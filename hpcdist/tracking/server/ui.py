"""Start MLflow's UI for one user: a token of this start, and the command of the server that asks for it."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from hpcdist.errors import UserMistake
from hpcdist.files.private_file import write_private
from hpcdist.tracking.server import ui_gate

HOST = "127.0.0.1"
APP = "hpcdist-token"


def require_app() -> None:
    """Raise UserMistake when the installed package does not declare this token check to MLflow."""
    if all(point.module != ui_gate.__name__ for point in entry_points(group="mlflow.app", name=APP)):
        raise UserMistake(
            f"this installation of hpcdist does not declare the MLflow app {APP!r}, since it is older than its code:"
            " install it again (`pip install --editable .` in a checkout)"
        )


def listen(port: int) -> socket.socket:
    """Return a socket that listens; uvicorn accepts its connections later.

    From now on no other user can take the port, so that a link to it never gives the token to another server. Raises
    UserMistake when the port is taken.
    """
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise UserMistake(
            f"port {port} of {HOST} cannot be used ({error.strerror}): choose another one with --port"
        ) from error
    # Connections inherit it. asyncio does not set it, since uvicorn takes each descriptor for a Unix socket.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_token(port: int, env: Mapping[str, str]) -> tuple[str, Path]:
    """Make a token for this start; returns it and the file of mode 0600 that holds it for scripts.

    Raises UserMistake when the file cannot be written.
    """
    state = env.get("XDG_STATE_HOME") or f"{env.get('HOME') or Path.home()}/.local/state"
    path = Path(state, "hpcdist", "ui", f"{socket.gethostname()}-{port}.token")
    token = secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, token)
    except OSError as error:
        raise UserMistake(
            f"the token of the UI cannot be written to {path} ({error.strerror}):"
            " set XDG_STATE_HOME to a folder of your own"
        ) from error
    return token, path


def command(port: int) -> list[str]:
    """Return the command of the server, whose standard input is the listening socket."""
    options = ["--host", HOST, "--port", str(port), "--workers", "1", "--app-name", APP]
    # The log of requests would repeat the token, and the line on the start has an address without it.
    uvicorn = "--fd 0 --no-access-log --log-level warning"
    return [sys.executable, "-m", "mlflow", "server", *options, "--uvicorn-opts", uvicorn]


def variables(store: str, token_file: Path, link: str) -> dict[str, str]:
    """Return the environment variables of the server.

    The store is here and not in the command line, which all users can read and which may hold a password. MLflow's
    job processes are not needed to look at runs.
    """
    return {
        "MLFLOW_BACKEND_STORE_URI": store,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # No lines about its defaults and its own deprecated imports.
        "MLFLOW_REGISTRY_STORE_URI": store,
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
        ui_gate.TOKEN_FILE: str(token_file),
        ui_gate.LINK: link,
    }
