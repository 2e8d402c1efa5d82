"""`hpcdist server` without a running server: choice of the database, migrations, and processes of old records."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcdist.cli import server as command
from hpcdist.errors import UserMistake
from hpcdist.files.private_file import write_private
from hpcdist.tracking.server import server_process
from hpcdist.tracking.server.database_schema import Schema, ServerError, migrate, read_schemas, require_consent
from hpcdist.tracking.server.server_folder import ServerFolder, ServerRecord

pytestmark = pytest.mark.processes
OLDER = Path(__file__).parents[3] / "support" / "older_database.py"


@pytest.fixture
def folder(tmp_path: Path) -> ServerFolder:
    return ServerFolder.create(tmp_path / "server")


def test_database_is_that_of_option_variable_or_last_start(folder: ServerFolder, tmp_path: Path) -> None:
    own = f"sqlite:///{folder.path}/mlflow.db"
    assert folder.choose_store(None, {}) == own
    saved = tmp_path / "store"
    write_private(saved, "postgresql+psycopg2://mlflow:s%3cret@db/mlflow\n")
    assert folder.choose_store(str(saved), {}) == "postgresql+psycopg2://mlflow:s%3cret@db/mlflow"
    assert folder.choose_store(None, {}) == "postgresql+psycopg2://mlflow:s%3cret@db/mlflow"
    assert "database_uri = postgresql+psycopg2://mlflow:s%%3cret@db/mlflow\n" in folder.ini.read_text()
    assert folder.choose_store(None, {"HPCDIST_SERVER_STORE": own}) == own
    assert folder.choose_store("postgresql://mlflow@db/mlflow", {"HPCDIST_SERVER_STORE": own}).startswith("postgresql:")
    password = folder.admin_password.read_text()
    assert ServerFolder.create(folder.path).admin_password.read_text() == password


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("postgresql://ada:s3cret@db/mlflow", r"ada:\*\*\*@db/mlflow holds a password.*set HPCDIST_SERVER_STORE, or"),
        ("http://mlflow", "http://mlflow is no database of MLflow: use postgresql"),
        ("{tmp}/none", "none cannot be read: No such file"),
        ("{tmp}/open", "has mode 0644, so that other users can read the credentials in it: `chmod 600"),
        ("{tmp}/empty", "is empty"),
        ("{tmp}/other", "must hold the URI of a database"),
    ],
)
def test_mistakes_in_the_database(folder: ServerFolder, tmp_path: Path, store: str, message: str) -> None:
    for name, text, mode in (("open", "sqlite:///x", 0o644), ("empty", "", 0o600), ("other", "hello", 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    with pytest.raises(UserMistake, match=message) as caught:
        folder.choose_store(store.format(tmp=tmp_path), {})
    assert "s3cret" not in str(caught.value)


@pytest.mark.timeout(900)  # four processes import MLflow, and two migrate a database
@pytest.mark.slow
def test_migration_is_announced_before_it_happens(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    store = f"sqlite:///{path}"
    assert read_schemas(store, os.environ) == []
    assert not path.exists(), "a query creates no database"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", OLDER, store, "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    before, head = done.stdout.split()[-2:]
    schemas = read_schemas(store, os.environ)
    assert [(one.name, one.found, bool(one.pending)) for one in schemas] == [
        ("runs", before, True),
        ("accounts", "8606fa83a998", True),
    ]
    with pytest.raises(UserMistake) as caught:
        require_consent(schemas, store, consent=False)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{store} has the schema of an older MLflow; nothing was changed."
    assert lines[1] == f"migration of runs: revision {before} to {head}"
    assert lines[2].startswith(f"  {head}: ")
    assert f"`cp {path} {path}.backup` while no server runs" in lines[-1]
    assert require_consent(schemas, store, consent=True) == lines[1:-1]
    migrate(store, os.environ)
    after = read_schemas(store, os.environ)
    assert [one.pending for one in after] == [(), ()]
    assert require_consent(after, store, consent=False) == []
    newer = Schema(name="runs", found="ffff", wanted=head, is_newer=True)
    with pytest.raises(UserMistake, match=r"has the schema ffff \(runs\) of a newer MLflow than the installed one"):
        require_consent([newer], store, consent=True)


def test_unusable_database_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ServerError, match=r"postgresql\+psycopg2://ada:\*\*\*@127\.0\.0\.1:1/x cannot be used: .*refused"
    ):
        read_schemas("postgresql+psycopg2://ada:s3cret@127.0.0.1:1/x", os.environ)
    path = tmp_path / "mlflow.db"
    path.write_text("no database")
    with pytest.raises(ServerError, match="file is not a database"):
        read_schemas(f"sqlite:///{path}", os.environ)


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        ("psycopg2", r"`pip install '\.\[server\]'` in a checkout of hpcdist"),
        ("MySQLdb", "`pip install mysqlclient`"),
        ("pymssql", "`pip install pymssql`"),
    ],
)
def test_missing_driver_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch, module: str, fix: str) -> None:
    done = subprocess.CompletedProcess([], 1, "", f"ModuleNotFoundError: No module named '{module}'\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserMistake, match=rf"^the package {module} is not installed: {fix}$"):
        read_schemas("postgresql://ada@db/x", {})
    with pytest.raises(UserMistake, match=r"`pip install '\.\[server\]'` in a checkout of hpcdist$"):
        migrate("postgresql://ada@db/x", {})


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own."""
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_old_record_does_not_end_another_process(other: subprocess.Popen[bytes]) -> None:
    record = ServerRecord(
        machine=socket.gethostname(),
        pid=other.pid,
        started=psutil.Process(other.pid).create_time() - 100,
        address="http://127.0.0.1:5000",
        store="",
        version="3",
    )
    assert not server_process.end(record, print)
    assert other.poll() is None
    with pytest.raises(UserMistake, match="the server was started on n9: run the command there"):
        server_process.end(replace(record, machine="n9"), print)
    mine = replace(record, started=record.started + 100)
    assert [process.pid for process in server_process.members(mine)] == [other.pid]
    assert server_process.end(mine, print)
    assert not server_process.end(mine, print)
    assert other.wait(60) == -15


def test_workers_that_outlive_the_server_are_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 1000 & echo $! > {pid_file}; exec sleep 1000"
    leader = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    try:
        started = psutil.Process(leader.pid).create_time()
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert leader.poll() is None
        worker = psutil.Process(int(pid_file.read_text()))
    finally:
        leader.kill()
        leader.wait()
    record = ServerRecord(
        machine=socket.gethostname(), pid=leader.pid, started=started, address="", store="", version="3"
    )
    assert server_process.end(record, print)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_start_that_fails_ends_with_the_log(
    folder: ServerFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: ServerFolder, *_: Any, **__: Any) -> tuple[ServerRecord, subprocess.Popen[bytes]]:
        place.log.write_text("".join(f"line {number}\n" for number in range(100)) + "Address already in use\n")
        process = subprocess.Popen(["false"], start_new_session=True)
        started = psutil.Process(process.pid).create_time()
        record = ServerRecord(
            machine=socket.gethostname(), pid=process.pid, started=started, address="http://x", store="", version="3"
        )
        return record, process

    monkeypatch.setattr(server_process, "start", fail)
    migrated: list[str] = []
    monkeypatch.setattr("hpcdist.tracking.server.database_schema.migrate", lambda store, env: migrated.append(store))
    with pytest.raises(ServerError) as caught:
        command.up(folder=folder.path, port=free_port())
    lines = str(caught.value).splitlines()
    assert lines[0] == f"the server exited with code 1; the end of {folder.log}:"
    assert (len(lines), lines[-1]) == (16, "Address already in use")
    assert migrated == [f"sqlite:///{folder.path}/mlflow.db"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_used_port_and_foreign_folder_are_mistakes(folder: ServerFolder, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            UserMistake, match=rf"port {port} of 127\.0\.0\.1 cannot be used \(Address already in use\)"
        ):
            server_process.require_free("127.0.0.1", port, "--port")
    # An address for documentation (RFC 5737), which no machine has.
    with pytest.raises(
        UserMistake, match=r"port 5000 of 203\.0\.113\.7 cannot be used \(.+\): choose others with --port"
    ):
        server_process.require_free("203.0.113.7", 5000, "--port and --host")
    with pytest.raises(UserMistake, match="holds no server: start one with `hpcdist server up`, or pass its --folder"):
        command.down(folder=tmp_path)
    with pytest.raises(UserMistake, match="is no name of an account"):
        command.user("../ada", folder=tmp_path)
    shutil.rmtree(folder.path)
    folder.path.write_text("")
    with pytest.raises(UserMistake, match="cannot be created"):
        ServerFolder.create(folder.path)
