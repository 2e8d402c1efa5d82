"""MLflow's UI for one user: its server on 127.0.0.1, which answers only requests with the token of this start."""

import hmac
import html
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdist.errors import UserMistake
from hpcdist.host.log_files import say
from hpcdist.host.ownership import write_private

if TYPE_CHECKING:
    from starlette.requests import Request

# The token check in front of MLflow's server, in the process of this server.
#
# MLflow loads `create_app` as an app plugin (entry point `mlflow.app`, name `hpcdist-token`). Every request, for pages,
# API and artifacts alike, must carry the token of this start: as a cookie, which the printed link sets, or as
# `Authorization: Bearer TOKEN`, which MLflow's client sends for `MLFLOW_TRACKING_TOKEN`. The link is printed when
# MLflow has started; `hpcdist ui` has made the listening socket before.

#: Environment variables that `hpcdist ui` sets for the server: the path of the file that holds the token, and the link
#: that is printed when MLflow has started.
TOKEN_FILE = "HPCDIST_UI_TOKEN_FILE"  # noqa: S105 - the name of a variable
LINK = "HPCDIST_UI_LINK"
#: The page of the printed link. Its script opens the page of MLflow that the fragment of the link names. Before that,
#: it sets two keys of MLflow 3.17: that it has opened the panel of its assistant, which it otherwise does on the first
#: visit of a browser, and that its pages are those for training, not those for LLM applications.
_ENTRY = """<!doctype html><title>hpcdist ui</title><script>
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
localStorage.setItem("mlflow.workflowType_v1", '"machine_learning"');
location.replace("/" + location.hash);
</script><noscript>MLflow's UI needs JavaScript.</noscript>"""
HELP = (
    "This server needs its token. In a browser, open the link that `hpcdist ui` printed when it started: each start"
    " makes a new token, and links and cookies of an earlier start are refused. In a script, set MLFLOW_TRACKING_TOKEN"
    " to the content of the file that `hpcdist ui` named."
)
#: Headers of the answers that hpcdist gives itself.
_PRIVATE = {"cache-control": "no-store", "referrer-policy": "no-referrer"}
#: Code with which the server closes a websocket that it does not accept (RFC 6455).
_POLICY_VIOLATION = 1008
FOREIGN_ORIGIN = "This request comes from a page of another server; its cookie is not accepted."

# Types of ASGI, the interface between uvicorn and applications.
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def create_app() -> "TokenGate":
    """Return MLflow's server behind the token check; called by uvicorn in the server process."""
    from mlflow.server.fastapi_app import app

    token = Path(os.environ[TOKEN_FILE]).read_text().strip()
    return TokenGate(app, token, os.environ.get(LINK, ""))


class TokenGate:
    """An ASGI application that passes on to `app` only the requests that carry `token`, and prints `link`."""

    def __init__(self, app: App, token: str, link: str = "") -> None:
        self._app = app
        self._token = token
        self._link = link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # one call, from the start to the end of the server

            async def announce(message: Scope) -> None:
                await send(message)
                if message["type"] == "lifespan.startup.complete" and self._link:
                    say(f"review in MLflow: {self._link}")

            await self._app(scope, receive, announce)
        elif scope["type"] != "http":  # MLflow has no websockets
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> App:
        """Return the app that answers a request: MLflow's server, the page that sets the cookie, or a refusal."""
        from starlette.requests import Request  # which comes with MLflow's server
        from starlette.responses import HTMLResponse

        request = Request(scope)
        # With the port: browsers send a cookie of 127.0.0.1 to all of its ports.
        _, port = scope["server"]
        cookie = f"hpcdist-ui-{port}"
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scope["path"] == "/" and self._is_token(request.query_params.get("token", "")):
            # The printed link: set the cookie, and open the address without the token.
            headers = {"set-cookie": f"{cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"}
            return HTMLResponse(_ENTRY, headers=_PRIVATE | headers)
        # A page of another server can make a browser send the cookie, but not this header.
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return self._app
        if not self._is_token(request.cookies.get(cookie, "")):
            return _refusal(request, HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED", HELP)
        if _is_foreign(request):
            return _refusal(request, HTTPStatus.FORBIDDEN, "PERMISSION_DENIED", FOREIGN_ORIGIN)
        return self._app

    def _is_token(self, offered: str) -> bool:
        """Compare in constant time, so that the time of an answer does not show how much of a token is right."""
        return bool(offered) and hmac.compare_digest(offered.encode(), self._token.encode())


def _is_foreign(request: "Request") -> bool:
    """Return whether the page that sent the request belongs to another server, such as another port of 127.0.0.1.

    For a browser all ports of a host are one site, so SameSite does not cover this.
    """
    headers = request.headers
    origin = headers.get("origin")
    if origin:
        return origin != f"http://{headers.get('host')}"
    # Browsers send no origin with requests that only read. A link on another page may lead here.
    site = headers.get("sec-fetch-site", "none")
    return site not in ("same-origin", "none") and headers.get("sec-fetch-mode") != "navigate"


def _refusal(request: "Request", status: int, code: str, message: str) -> App:
    """Return the answer that refuses a request: a page for a browser, otherwise an error in MLflow's format."""
    from starlette.responses import HTMLResponse, JSONResponse

    headers = dict(_PRIVATE)
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if "text/html" in request.headers.get("accept", ""):
        page = f"<!doctype html><title>hpcdist ui</title><h1>hpcdist ui</h1><p>{html.escape(message)}</p>"
        return HTMLResponse(page, status, headers)
    return JSONResponse({"error_code": code, "message": message}, status, headers)


# The start of the server by `hpcdist ui`: its socket, its token, its command and its environment.

HOST = "127.0.0.1"
#: Name of the entry point that leads MLflow to `create_app`.
APP = "hpcdist-token"


def require_app() -> None:
    """Raise UserMistake when the installed package does not declare this token check to MLflow."""
    if all(point.module != __name__ for point in entry_points(group="mlflow.app", name=APP)):
        raise UserMistake(
            f"this installation of hpcdist does not declare the MLflow app {APP!r}, since it is older than its code:"
            " install it again (`pip install --editable .` in a checkout)"
        )


def listen(port: int) -> socket.socket:
    """Return a socket that listens; uvicorn accepts its connections later.

    From now on no other user can take the port, so that a link to it never gives the token to another server.
    """
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise UserMistake(
            f"port {port} of {HOST} cannot be used ({error.strerror}): choose another one with --port"
        ) from error
    # The connections inherit it. Without it, answers in several parts wait for acknowledgements. asyncio does not set
    # it, since uvicorn treats a descriptor that it is given as a Unix socket.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_token(port: int, env: Mapping[str, str]) -> tuple[str, Path]:
    """Make a token for this start; returns it and the file of mode 0600 that holds it for scripts."""
    home = env.get("HOME") or Path.home()
    state = env.get("XDG_STATE_HOME") or f"{home}/.local/state"
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
    """Return the command of the server. Its standard input is the listening socket."""
    options = ["--host", HOST, "--port", str(port), "--workers", "1", "--app-name", APP]
    # The log of requests would show the token, and the line about the start would show an address without it.
    uvicorn = "--fd 0 --no-access-log --log-level warning"
    return [sys.executable, "-m", "mlflow", "server", *options, "--uvicorn-opts", uvicorn]


def start_uploads(runs_dir: Path, env: Mapping[str, str]) -> None:
    """Start the process that uploads new records until this process, which becomes the server, ends."""
    subprocess.Popen(
        [sys.executable, "-P", "-m", "hpcdist.tracking.ui_uploads", str(runs_dir), str(os.getpid())],
        env=dict(env),
        stdin=subprocess.DEVNULL,
    )


def variables(store: str, token_file: Path, link: str) -> dict[str, str]:
    """Return the environment variables of the server, in addition to those of this process."""
    return {
        "MLFLOW_BACKEND_STORE_URI": store,  # not in the command line, which all users can read
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # No lines about its defaults and its own deprecated imports.
        "MLFLOW_REGISTRY_STORE_URI": store,
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
        "PYTHONSAFEPATH": "1",  # MLflow must not import a click.py of the current folder
        TOKEN_FILE: str(token_file),
        LINK: link,
    }
