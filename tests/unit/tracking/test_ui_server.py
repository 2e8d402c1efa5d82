"""The token of `hpcdist ui` and its check; tests/browser tests the server itself."""

import asyncio
import hmac
import json
import os
import socket
import stat
import subprocess
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hpcdist_runs import unused_port

from hpcdist.errors import UserMistake
from hpcdist.tracking import ui
from hpcdist.tracking.ui import Scope, TokenGate

TOKEN = "s3cret"
COOKIE = ("cookie", f"other=1; hpcdist-ui-5000={TOKEN}")
HOST = ("host", "127.0.0.1:5000")


class Server:
    """A server behind the token check that counts its requests."""

    def __init__(self) -> None:
        self.reached = 0

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        self.reached += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"runs"})


def request(
    *headers: tuple[str, str], path: str = "/api/2.0/mlflow/runs/search", query: str = "", kind: str = "http"
) -> Any:
    """Send one request. Returns status, headers, body and the number of requests that reached the server."""
    server, sent = Server(), []

    async def send(message: Scope) -> None:
        sent.append(message)

    async def receive() -> Scope:
        raise AssertionError("the token check read the body")

    scope = {
        "type": kind,
        "path": path,
        "query_string": query.encode(),
        "server": ("127.0.0.1", 5000),
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }
    asyncio.run(TokenGate(server, TOKEN)(scope, receive, send))
    if kind != "http":
        return sent, server.reached
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"].decode(), server.reached


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", "Bearer ")],
        [("authorization", TOKEN)],
        [("authorization", "Bearer \xff\xfe")],
        [("cookie", "hpcdist-ui-5000=")],
        [("cookie", f"hpcdist-ui-5001={TOKEN}")],
        [("cookie", "hpcdist-ui-5000")],
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/", "/health", "/graphql"])
def test_requests_without_the_token_are_rejected(headers: list[tuple[str, str]], path: str) -> None:
    status, found, body, reached = request(*headers, path=path)
    assert (status, reached) == (401, 0)
    assert found[b"www-authenticate"] == b"Bearer"
    assert json.loads(body) == {"error_code": "UNAUTHENTICATED", "message": ui.HELP}


def test_browser_without_the_token_gets_a_help_page() -> None:
    status, found, body, _ = request(("accept", "text/html,*/*"), path="/", query="token=of-an-earlier-start")
    assert status == 401
    assert found[b"content-type"].startswith(b"text/html")
    assert "open the link that `hpcdist ui` printed when it started: each start makes a new token" in body
    assert "earlier" not in request(path="/", query=f"token={TOKEN}")[2]


def test_link_sets_a_cookie_and_opens_the_page_of_its_fragment() -> None:
    status, found, body, reached = request(path="/", query=f"token={TOKEN}")
    assert (status, reached) == (200, 0)
    assert 'location.replace("/" + location.hash)' in body
    # MLflow would open the panel of its assistant; tests/browser shows that it does not.
    assert "mlflow.assistant" in body
    assert "mlflow.workflowType" in body
    assert TOKEN not in body
    assert found[b"set-cookie"] == f"hpcdist-ui-5000={TOKEN}; Path=/; HttpOnly; SameSite=Strict".encode()
    assert found[b"cache-control"] == b"no-store"
    assert request(path="/api/2.0/mlflow/runs/search", query=f"token={TOKEN}")[0] == 401


@pytest.mark.parametrize("header", [COOKIE, ("authorization", f"Bearer {TOKEN}"), ("authorization", f"bearer {TOKEN}")])
def test_requests_with_the_token_are_passed_on(header: tuple[str, str]) -> None:
    assert request(header)[0::2] == (200, "runs")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("origin", "http://127.0.0.1:5000")], 200),
        ([("origin", "http://127.0.0.1:6000")], 403),  # another port may belong to another user
        ([("origin", "null")], 403),
        ([("sec-fetch-site", "same-origin"), ("sec-fetch-mode", "cors")], 200),
        ([("sec-fetch-site", "same-site"), ("sec-fetch-mode", "no-cors")], 403),
        ([("sec-fetch-site", "none"), ("sec-fetch-mode", "navigate")], 200),
        ([("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")], 200),  # a link in an e-mail
    ],
    ids=str,
)
def test_cookie_is_rejected_for_pages_of_other_servers(headers: list[tuple[str, str]], status: int) -> None:
    response = request(HOST, COOKIE, *headers)
    assert response[0] == status
    if status == 403:
        assert json.loads(response[2])["message"] == ui.FOREIGN_ORIGIN
        assert response[3] == 0


def test_websockets_are_closed_and_lifespan_events_passed_on() -> None:
    sent, reached = request(COOKIE, kind="websocket")
    assert (sent, reached) == ([{"type": "websocket.close", "code": 1008}], 0)
    assert request(kind="lifespan")[1] == 1


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, ...]] = []

    def unequal(*pair: bytes) -> bool:
        compared.append(pair)
        return False

    monkeypatch.setattr(hmac, "compare_digest", unequal)
    assert request(COOKIE)[0] == 401
    assert compared == [(TOKEN.encode(), TOKEN.encode())]


def test_make_token_writes_a_new_token_to_a_private_file(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    first, file = ui.make_token(5000, env)
    file.chmod(0o644)
    second, same = ui.make_token(5000, env)
    assert file == same
    assert first != second == file.read_text()
    assert len(second) >= 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert ui.make_token(5001, {"HOME": str(tmp_path)})[1].is_relative_to(tmp_path / ".local/state/hpcdist/ui")


def test_unwritable_token_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserMistake, match=r"token of the UI cannot be written to .*/file/.*: set XDG_STATE_HOME to"):
        ui.make_token(5000, {"XDG_STATE_HOME": str(tmp_path / "file")})


def test_app_is_declared_to_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    ui.require_app()
    older = EntryPoint("hpcdist-token", "hpcdist.former_module:create_app", "mlflow.app")
    for declared in ((), (older,)):
        monkeypatch.setattr(ui, "entry_points", lambda declared=declared, **_: declared)
        with pytest.raises(UserMistake, match=r"does not declare the MLflow app 'hpcdist-token'.*: install it again"):
            ui.require_app()


def test_command_line_contains_neither_token_nor_store(tmp_path: Path) -> None:
    _, file = ui.make_token(5000, {"XDG_STATE_HOME": str(tmp_path)})
    store = "postgresql://me:pw@db/mlflow"
    variables = ui.variables(store, file, "http://127.0.0.1:5000/?token=x")
    assert (variables["MLFLOW_BACKEND_STORE_URI"], variables["HPCDIST_UI_TOKEN_FILE"]) == (store, str(file))
    command = " ".join(ui.command(5000))
    assert "--app-name hpcdist-token" in command
    assert "--no-access-log" in command, "the log of requests would repeat the token"
    assert not any(secret in command for secret in (store, file.read_text()))


@pytest.mark.processes
def test_server_does_not_import_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('the wrong module')")
    env = {**os.environ, **ui.variables("sqlite://", tmp_path, "")}
    command = [*ui.command(5000)[:3], "--version"]
    done = subprocess.run(command, env=env, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "mlflow, version " in done.stdout


def test_used_port_is_refused() -> None:
    with socket.create_server((ui.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserMistake, match=f"port {port} of 127.0.0.1 cannot be used .*: choose another one with"):
            ui.listen(port)


#: Try to listen on a port with each option that lets sockets share one; prints how often it worked.
TAKE = """
import socket, sys
taken = 0
for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as mine:
            mine.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                mine.bind((host, int(sys.argv[1])))
                mine.listen()
                taken += 1
            except OSError:
                pass
print(taken)
"""


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_take_the_port_before_mlflow_listens() -> None:
    def take(port: int) -> str:
        command = ["python3", "-c", TAKE, str(port)]
        return subprocess.run(command, user=65534, cwd="/", check=True, capture_output=True, text=True).stdout.strip()

    port = unused_port()
    assert take(port) == "4", "the attack works on a free port"
    with ui.listen(port):
        assert take(port) == "0"
