"""`hpcdist server` on PostgreSQL with accounts: wrong passwords, other addresses than loopback, migration."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import HPCDIST, unused_port
from postgres_cluster import PostgresCluster, postgres_cluster

from hpcdist.run.folder import RunDir
from hpcdist.tracking.server.server_folder import ServerFolder
from hpcdist.tracking.server.server_process import members

#: Two minutes: `make faults` runs them.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


OLDER = Path(__file__).parents[1] / "support" / "older_database.py"
#: Migrations that the older database needs; 15 go back to an MLflow of 2024.
NUM_OLDER = 15


@dataclass(frozen=True)
class TeamServer:
    """A server started by the command, on a database of `cluster`."""

    folder: Path
    cluster: PostgresCluster
    store: str  #: URI with its password
    output: str  #: of `up`
    address: str


def hpcdist(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HPCDIST, *arguments], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeamServer]:
    root = tmp_path_factory.mktemp("team")
    folder, port = root / "server", str(unused_port())
    with postgres_cluster() as cluster:
        store = cluster.create_database()
        file = root / "store"
        file.write_text(store)
        file.chmod(0o600)
        options = ("--folder", str(folder), "--store", str(file), "--port", port, "--workers", "1")
        done = hpcdist("server", "up", *options, "--timeout", "600", cwd=root)
        assert done.returncode == 0, done.stdout + done.stderr
        try:
            yield TeamServer(folder, cluster, store, done.stdout, f"http://127.0.0.1:{port}")
        finally:
            ended = hpcdist("server", "down", "--folder", str(folder))
        assert ended.stdout.startswith("ended the server at http://127.0.0.1:"), ended.stderr
        record = ServerFolder(folder).read_record()
        assert record is not None
        assert members(record) == []
        status = hpcdist("server", "status", "--folder", str(folder))
        assert (status.returncode, "no server runs" in status.stdout) == (1, True)


def test_status_and_private_files(server: TeamServer) -> None:
    status = hpcdist("server", "status", "--folder", str(server.folder), "--json")
    assert status.returncode == 0, status.stdout + status.stderr
    facts = json.loads(status.stdout)
    assert (facts["health"], facts["address"], facts["experiments"]) == ("ok", server.address, 1)
    assert facts["store"].startswith("postgresql+psycopg2://mlflow:***@/mlflow?host=")
    again = hpcdist("server", "up", "--folder", str(server.folder), "--port", str(unused_port()))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert f"a server runs already: {server.address}" in again.stderr
    store_password = server.store.partition("://mlflow:")[2].partition("@")[0]
    secrets = [store_password, (server.folder / "admin_password").read_text().strip()]
    lines = [" ".join(process.cmdline()) for process in psutil.Process(facts["pid"]).children(recursive=True)]
    public = [*lines, " ".join(psutil.Process(facts["pid"]).cmdline()), server.output, status.stdout]
    assert lines
    assert not [secret for secret in secrets for text in public if secret in text]
    assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
    for name in ("admin_password", "flask_key", "store", "basic_auth.ini", "server.log"):
        assert stat.S_IMODE((server.folder / name).stat().st_mode) == 0o600, name


def test_run_with_a_wrong_password_arrives_once_after_its_correction(
    server: TeamServer, tmp_path: Path, runs_dir: Path
) -> None:
    account = hpcdist("server", "user", "ada", "--folder", str(server.folder))
    assert account.stdout.startswith(f"created the account ada: {server.folder}/users/ada"), account.stderr
    home = tmp_path / "home"
    saved = home / ".mlflow" / "credentials"
    saved.parent.mkdir(parents=True)
    shutil.copy(server.folder / "users" / "ada", saved)
    right = saved.read_text()
    saved.write_text(right.partition("mlflow_tracking_password")[0] + "mlflow_tracking_password = wrong\n")
    env = {"HOME": str(home), "HPCDIST_RUNS_DIR": str(runs_dir), "MLFLOW_TRACKING_URI": server.address}
    overrides = ("name=first", "stop.max_epochs=1", "launch.num_ranks=1", "tracking.drain_timeout_s=1")
    run = hpcdist("run", "ddp_digits", *overrides, cwd=tmp_path, **env)
    assert run.returncode == 0, run.stdout + run.stderr
    refused = f"MLflow at {server.address}: the server does not accept user ada with this password (401): check {saved}"
    folder = RunDir.open(runs_dir / "digits" / "first")
    failed = hpcdist("sync", "--all", **env)
    assert (failed.returncode, failed.stderr) == (1, f"first: {refused}\n")
    saved.write_text(right)
    for _ in range(2):
        done = hpcdist("sync", "--all", **env)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "1 run: 1 unchanged\n"
    run_id = json.loads(folder.mlflow.read_text())["run_id"]
    where = f"where run_uuid = '{run_id}'"
    rows, points = (
        server.cluster.sql(f"select {what} from metrics {where}", "mlflow")
        for what in ("count(*)", "count(distinct (key, step))")
    )
    assert int(rows) == int(points) > 20
    assert server.cluster.sql(f"select status from runs {where}", "mlflow") == "FINISHED"
    assert [*server.folder.glob(f"artifacts/*/{run_id}/artifacts/config.yaml")]
    password = right.rpartition(" = ")[2].strip()
    assert not [path for path in folder.path.rglob("*") if path.is_file() and password.encode() in path.read_bytes()]


def test_account_gets_a_new_password_and_can_be_removed(server: TeamServer) -> None:
    def account(*options: str) -> str:
        done = hpcdist("server", "user", "bob", "--folder", str(server.folder), *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert account().startswith("created the account bob: ")
    first = (server.folder / "users" / "bob").read_text()
    assert account().startswith("new password of the account bob: ")
    assert (server.folder / "users" / "bob").read_text() != first
    assert account("--remove") == "deleted the account bob\n"
    assert not (server.folder / "users" / "bob").exists()


def status_of(url: str, host: str = "") -> int:
    """Return the HTTP status of a request, which is sent with a name of the server in its header."""
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_server_on_all_addresses_warns_and_refuses_other_names(tmp_path: Path) -> None:
    folder, port = tmp_path / "server", str(unused_port())
    options = ("--folder", str(folder), "--port", port, "--workers", "1", "--timeout", "600")
    refused = hpcdist("server", "up", *options, "--host", "203.0.113.7")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"port {port} of 203.0.113.7 cannot be used (Cannot assign requested address)" in refused.stderr
    done = hpcdist("server", "up", *options, "--host", "0.0.0.0", "--allow-host", "mlflow.example.org")
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        warning = done.stdout.splitlines()[-1]
        assert warning.startswith("Passwords are not encrypted on the network: put a proxy with TLS in front of")
        record = ServerFolder(folder).read_record()
        assert record is not None
        assert f"MLflow {record.version} at http://{socket.gethostname()}:{port}, " in done.stdout
        addresses = [
            one.address for found in psutil.net_if_addrs().values() for one in found if one.family == socket.AF_INET
        ]
        for address in addresses:
            assert status_of(f"http://{address}:{port}/health") == 200, address
            experiments = f"http://{address}:{port}/api/2.0/mlflow/experiments/search?max_results=1"
            assert status_of(experiments) == 401, "without an account"
            assert status_of(experiments, "mlflow.example.org") == 401, "a name that is allowed"
            assert status_of(experiments, "attacker.example") == 403
        status = hpcdist("server", "status", "--folder", str(folder), "--json")
        assert json.loads(status.stdout)["health"] == "ok", status.stdout
    finally:
        ended = hpcdist("server", "down", "--folder", str(folder))
    assert ended.returncode == 0, ended.stderr


def test_older_database_is_migrated_after_consent(server: TeamServer, tmp_path: Path) -> None:
    cluster = server.cluster
    store = cluster.create_database("older")
    made = subprocess.run(
        [sys.executable, "-W", "ignore", OLDER, store, str(NUM_OLDER)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    before, newest = made.stdout.split()[-2:]
    experiment = "insert into experiments (name, artifact_location, lifecycle_stage) values ('kept', '/x', 'active')"
    cluster.sql(experiment, "older")
    file, folder = tmp_path / "store", tmp_path / "server"
    file.write_text(store)
    file.chmod(0o600)
    options = ("--folder", str(folder), "--store", str(file), "--port", str(unused_port()), "--workers", "1")
    dump = [cluster.binaries / "pg_dump", "-h", cluster.folder, "-U", "postgres", "older"]

    def content() -> str:
        env = {**os.environ, "PGPASSWORD": cluster.password}
        text = subprocess.run(dump, env=env, capture_output=True, text=True, check=True).stdout
        return "\n".join(line for line in text.splitlines() if "restrict" not in line)  # a random key of psql

    unchanged = content()
    refused = hpcdist("server", "up", *options)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    lines = refused.stderr.splitlines()
    assert lines[0].endswith(" has the schema of an older MLflow; nothing was changed.")
    assert lines[1] == f"migration of runs: revision {before} to {newest}"
    assert len([line for line in lines if line.startswith("  ")]) > NUM_OLDER, "and those of accounts"
    assert "Back up the database first (`pg_dump --format=custom --file=mlflow.dump DATABASE`)" in lines[-1]
    assert content() == unchanged

    done = hpcdist("server", "up", *options, "--timeout", "600", "--migrate")
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[: len(lines) - 2] == lines[1:-1]
        assert cluster.sql("select version_num from alembic_version", "older") == newest
        assert cluster.sql("select name from experiments order by name", "older").split() == ["Default", "kept"]
        status = hpcdist("server", "status", "--folder", str(folder), "--json")
        assert (json.loads(status.stdout)["health"], json.loads(status.stdout)["experiments"]) == ("ok", 2)
    finally:
        hpcdist("server", "down", "--folder", str(folder))
    password = store.partition("://older:")[2].partition("@")[0]
    assert password not in done.stdout + refused.stderr + (folder / "server.log").read_text()
