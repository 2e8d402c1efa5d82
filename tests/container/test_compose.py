"""Tests of docker/compose.yaml as podman-compose reads it: ports, secrets and dependencies."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from containers import CHECKOUT

SERVICES = ("db", "mlflow", "mlflow-users", "train", "train-cpu")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of docker/ after compose-init.sh."""
    folder = tmp_path_factory.mktemp("compose")
    shutil.copytree(CHECKOUT / "docker", folder / "docker", ignore=shutil.ignore_patterns("secrets", ".env"))
    subprocess.run(["bash", folder / "docker" / "compose-init.sh"], check=True, capture_output=True, umask=0o022)
    return folder


@pytest.fixture(scope="module")
def services(checkout: Path) -> dict[str, Any]:
    """Return the services with substituted variables."""
    command = [sys.executable, "-m", "podman_compose", "--file", str(checkout / "docker" / "compose.yaml")]
    profiles = ["--profile", "train", "--profile", "train-cpu"]
    done = subprocess.run([*command, *profiles, "config"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return found


def test_all_services_are_defined(services: dict[str, Any]) -> None:
    assert sorted(services) == sorted(SERVICES)


def test_ports_are_published_on_this_machine_alone(services: dict[str, Any]) -> None:
    published = [str(port) for service in services.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:5000:5000"]
    assert not [name for name, service in services.items() if service.get("network_mode") == "host"]


def test_secrets_are_private_files_and_not_in_the_configuration(services: dict[str, Any], checkout: Path) -> None:
    files = {path.name: path for path in (checkout / "docker" / "secrets").iterdir()}
    assert sorted(files) == ["admin_password", "db_password", "flask_key", "mlflow_credentials", "train_password"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    assert len({path.read_text() for path in files.values()}) == 5
    configuration = yaml.safe_dump(services)
    assert not [path for path in files.values() if path.read_text() in configuration]
    for name in ("mlflow", "mlflow-users", "train", "train-cpu"):
        assert services[name]["user"] == f"{os.getuid()}:{os.getgid()}"


def test_training_receives_the_password_of_its_user_alone(services: dict[str, Any], checkout: Path) -> None:
    secrets = {path.name: path.read_text() for path in (checkout / "docker" / "secrets").iterdir()}
    for name in ("train", "train-cpu"):
        (secret,) = services[name]["secrets"]
        assert (secret["source"], secret["target"]) == ("mlflow_credentials", "/home/hpcdist/.mlflow/credentials")
        assert services[name]["depends_on"]["mlflow-users"]["condition"] == "service_completed_successfully"
    assert secrets["mlflow_credentials"] == (
        f"[mlflow]\nmlflow_tracking_username = hpcdist\nmlflow_tracking_password = {secrets['train_password']}\n"
    )
    assert services["mlflow-users"]["secrets"] == ["admin_password", "train_password"]
    assert services["mlflow-users"]["depends_on"]["mlflow"]["condition"] == "service_healthy"


def test_second_init_keeps_the_secrets(checkout: Path) -> None:
    before = {path.name: path.read_text() for path in (checkout / "docker" / "secrets").iterdir()}
    subprocess.run(["bash", checkout / "docker" / "compose-init.sh"], check=True, capture_output=True)
    assert before == {path.name: path.read_text() for path in (checkout / "docker" / "secrets").iterdir()}


def test_training_waits_for_a_healthy_server_and_has_time_to_save(services: dict[str, Any]) -> None:
    assert services["mlflow"]["depends_on"]["db"]["condition"] == "service_healthy"
    assert services["db"]["healthcheck"]["test"][1] == "pg_isready"
    for name in ("train", "train-cpu"):
        service = services[name]
        assert service["depends_on"]["mlflow"]["condition"] == "service_healthy"
        assert service["stop_grace_period"] == "3m"
        assert service["ipc"] == "host"
    (device,) = services["train"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["gpu"])
    assert "resources" not in (services["train-cpu"].get("deploy") or {})
