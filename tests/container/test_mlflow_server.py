"""Tests of the image of the MLflow server on PostgreSQL: access, users, and a run that logs to it."""

import base64
import json
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from containers import UNKNOWN_UID, Containers
from hpcdist_runs import unused_port, wait_for
from postgres_cluster import postgres_cluster

#: The first test that needs an image builds it.
pytestmark = pytest.mark.timeout(1200)
BuildImage = Callable[[str], str]


def without_password(uri: str) -> tuple[str, str]:
    """Return a database URI without its password, and the password."""
    head, _, place = uri.rpartition("@")
    head, _, password = head.rpartition(":")
    return f"{head}@{place}", password


@dataclass(frozen=True)
class Server:
    uri: str
    name: str
    secrets: dict[str, str]
    folder: Path  #: folder of the secrets

    @property
    def admin(self) -> tuple[str, str]:
        return "admin", self.secrets["admin_password"]

    @property
    def training(self) -> tuple[str, str]:
        return "hpcdist", self.secrets["train_password"]

    def request(
        self,
        path: str,
        user: str = "",
        password: str = "",
        body: Mapping[str, object] | None = None,
        method: str | None = None,
    ) -> tuple[int, Any]:
        """Send a GET, or a POST if there is a body, and return status and answer."""
        request = urllib.request.Request(self.uri + path, method=method)
        if body:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if user:
            token = base64.b64encode(f"{user}:{password}".encode()).decode()
            request.add_header("Authorization", f"Basic {token}")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                content: bytes = answer.read()
                return answer.status, json.loads(content) if content[:1] == b"{" else content.decode()
        except urllib.error.HTTPError as error:
            return error.code, None


@pytest.fixture(scope="module")
def database(containers: Containers) -> Iterator[str]:
    """Start PostgreSQL, and yield the URI of a database with a password for its user."""
    del containers  # requested first: without containers, no database is needed
    port = unused_port()
    with postgres_cluster(tcp_port=port) as cluster:
        user = cluster.create_database().partition("@")[0]
        yield f"{user}@127.0.0.1:{port}/mlflow"


@pytest.fixture(scope="module")
def server(
    containers: Containers, image: BuildImage, database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Start the image like compose.yaml: not as root, with secrets in private files."""
    db_uri, db_password = without_password(database)
    folder = tmp_path_factory.mktemp("secrets")
    values = {
        "db_password": db_password,
        "admin_password": secrets.token_urlsafe(12),
        "train_password": secrets.token_urlsafe(12),
        "flask_key": secrets.token_hex(16),
    }
    for name, value in values.items():
        (folder / name).write_text(value)
        (folder / name).chmod(0o600)
        os.chown(folder / name, UNKNOWN_UID, UNKNOWN_UID)
    folder.chmod(0o711)
    port, name = unused_port(), f"hpcdist-test-mlflow-{os.getpid()}"
    containers.podman(
        "run", "--detach", "--name", name, "--user", f"{UNKNOWN_UID}:{UNKNOWN_UID}",
        "--volume", f"{folder}:/run/secrets:ro",
        "--env", f"DB_URI={db_uri}",
        "--env", f"MLFLOW_PORT={port}", "--env", "MLFLOW_WORKERS=1",
        image("mlflow"),
    )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}", name, values, folder)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                if server.request("/health")[0] == 200:
                    break
            except OSError:
                running = containers.podman("inspect", "--format", "{{.State.Running}}", name).strip()
                assert running == "true", containers.try_podman("logs", name)
                assert time.monotonic() < deadline, containers.try_podman("logs", name)
                time.sleep(0.2)
        yield server
    finally:
        containers.try_podman("rm", "--force", "--volumes", "--time", "5", name)


def test_server_requires_the_password(server: Server) -> None:
    path = "/api/2.0/mlflow/experiments/search?max_results=5"
    assert server.request(path)[0] == 401
    assert server.request(path, "admin", "wrong")[0] == 401
    status, answer = server.request(path, "admin", server.secrets["admin_password"])
    assert status == 200
    assert answer["experiments"][0]["name"] == "Default"


def test_server_processes_show_no_secret_and_are_not_root(containers: Containers, server: Server) -> None:
    listing = containers.podman("top", server.name, "huser", "args")
    assert "mlflow server" in listing
    assert {line.split()[0] for line in listing.splitlines()[1:]} == {str(UNKNOWN_UID)}
    public = listing + containers.podman("inspect", server.name)
    assert not [value for value in server.secrets.values() if value in public]

    def is_healthy() -> bool:  # within 4 s, which a busy machine may exceed
        return containers.try_podman("healthcheck", "run", server.name).returncode == 0

    wait_for(is_healthy, "the server to answer the health check of its image")


def test_missing_secret_is_an_error_of_one_line(containers: Containers, image: BuildImage) -> None:
    done = containers.try_podman("run", "--rm", image("mlflow"))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == (
        "mlflow-server: the secret /run/secrets/db_password is missing, empty or not readable for uid 1000"
    )


@pytest.fixture(scope="module")
def user(containers: Containers, image: BuildImage, server: Server) -> tuple[str, str]:
    """Create the training user twice like the service in compose.yaml, and return name and password."""
    # After a change of the secret, the user exists with another password.
    former = {"username": "hpcdist", "password": secrets.token_urlsafe(12)}
    assert server.request("/api/2.0/mlflow/users/create", *server.admin, former)[0] == 200
    for _ in range(2):
        output = containers.podman(
            "run", "--rm", "--user", f"{UNKNOWN_UID}:{UNKNOWN_UID}", "--volume", f"{server.folder}:/run/secrets:ro",
            "--env", f"MLFLOW_TRACKING_URI={server.uri}", "--entrypoint", "mlflow-users", image("mlflow"),
        )  # fmt: skip
        assert output == "mlflow-users: user hpcdist has the password in train_password\n"
    return server.training


def test_training_user_is_created_and_failures_are_one_line(
    containers: Containers, image: BuildImage, server: Server, user: tuple[str, str], tmp_path: Path
) -> None:
    command = (
        "run", "--rm", "--user", f"{UNKNOWN_UID}:{UNKNOWN_UID}", "--volume", f"{tmp_path}:/run/secrets:ro",
        "--env", f"MLFLOW_TRACKING_URI={server.uri}", "--entrypoint", "mlflow-users", image("mlflow"),
    )  # fmt: skip
    tmp_path.chmod(0o755)
    done = containers.try_podman(*command)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        f"mlflow-users: the secret /run/secrets/train_password cannot be read by uid {UNKNOWN_UID}"
        " (No such file or directory)"
    )
    (tmp_path / "train_password").write_text("another-" + server.secrets["train_password"])
    (tmp_path / "admin_password").write_text("wrong")
    done = containers.try_podman(*command)
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert error == "mlflow-users: user hpcdist cannot be created as admin: 401 Unauthorized"
    user_delete = "/api/2.0/mlflow/users/delete"
    assert server.request(user_delete, *server.admin, {"username": "hpcdist"}, method="DELETE")[0] == 200
    with_secrets = [word.replace(f"{tmp_path}:", f"{server.folder}:") for word in command]
    assert containers.podman(*with_secrets) == "mlflow-users: user hpcdist has the password in train_password\n"
    assert server.request("/api/2.0/mlflow/experiments/search?max_results=5", *user)[0] == 200


def test_training_user_cannot_change_experiments_of_others(server: Server, user: tuple[str, str]) -> None:
    api = "/api/2.0/mlflow"
    status, created = server.request(f"{api}/experiments/create", *server.admin, {"name": "of the administrator"})
    assert status == 200
    number = created["experiment_id"]
    assert server.request(f"{api}/experiments/get?experiment_id={number}", *user)[0] == 200
    assert server.request(f"{api}/experiments/delete", *user, {"experiment_id": number})[0] == 403
    assert server.request(f"{api}/runs/create", *user, {"experiment_id": number})[0] == 403
    status, created = server.request(f"{api}/runs/create", *server.admin, {"experiment_id": number})
    assert status == 200
    command = {"run_id": created["run"]["info"]["run_id"], "key": "hpcdist.command", "value": "stop"}
    assert server.request(f"{api}/runs/set-tag", *user, command)[0] == 403, "commands need the permission EDIT"
    mallory = {"username": "mallory", "password": "long-enough-for-mlflow"}
    assert server.request(f"{api}/users/create", *user, mallory)[0] == 403
    status, created = server.request(f"{api}/experiments/create", *user, {"name": "of training"})
    assert status == 200
    assert server.request(f"{api}/runs/create", *user, {"experiment_id": created["experiment_id"]})[0] == 200
