"""Ownership and modes of the folder of runs and its database, also with two users."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_server import Server

from hpcdist.errors import RunFolderError
from hpcdist.host import files
from hpcdist.run import folder as runs_dir_module
from hpcdist.run.folder import RunDir

ADA, BOB = 1234, 1235
CHECKOUT = Path(__file__).resolve().parents[3]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_folders_and_database_are_private(tmp_path: Path) -> None:
    old = os.umask(0o002)  # the default of Debian and of Red Hat
    try:
        RunDir.create(tmp_path / "runs" / "exp" / "first")
        runs_dir_module.make_database(tmp_path / "runs" / "mlflow.db")
    finally:
        os.umask(old)
    assert mode(tmp_path / "runs") == 0o700
    assert mode(tmp_path / "runs" / "exp") == 0o700
    assert mode(tmp_path / "runs" / "mlflow.db") == 0o600


def test_existing_folder_keeps_its_mode_and_database_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o750)
    database = tmp_path / "runs" / "mlflow.db"
    with sqlite3.connect(database) as connection:
        connection.execute("create table points (value)")
    database.chmod(0o644)
    RunDir.create(tmp_path / "runs" / "exp" / "first")
    runs_dir_module.make_database(database)
    assert (mode(tmp_path / "runs"), mode(database)) == (0o750, 0o600)
    with sqlite3.connect(database) as connection:
        assert connection.execute("select count(*) from points").fetchone() == (0,)


def test_folder_of_root_is_accepted_and_of_another_user_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image, where /runs belongs to root and hpcdist runs as a user without a name."""
    me = os.getuid()
    RunDir.create(tmp_path / "runs" / "exp" / "first")
    monkeypatch.setattr(os, "geteuid", lambda: 987654)
    if me == 0:
        files.require_safe(tmp_path)
    owned = os.stat_result((0o40755, 1, 1, 1, 987653, 0, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda path, **_: owned)
    with pytest.raises(
        RunFolderError,
        match=r"^/ belongs to user 987653, not to user 987654: set `runs_dir` to a folder of your"
        r" own, such as '\$\{oc.env:HOME\}/runs', and share results through a tracking server \(`tracking.uri`\);"
        r" start a container as the folder's owner with `--user \$\(id -u\):\$\(id -g\)`; if you trust the group root,"
        r" set HPCDIST_TRUSTED_GROUPS=root$",
    ):
        files.require_safe(Path("/elsewhere"))


# --- two users


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Yield a folder that all users can enter, unlike pytest's temporary folders."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-users-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def python() -> list[str]:
    """Return a Python command that other users can execute, with the packages of this one."""
    if os.getuid() != 0:
        pytest.skip("only root can act as two other users")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    path = os.pathsep.join([str(CHECKOUT), *(folder for folder in sys.path if folder.endswith("-packages"))])
    for program in (sys.executable, f"/usr/bin/python{version}"):
        command = ["env", f"PYTHONPATH={path}", program]
        check = [*command, "-c", "import hpcdist.run.folder"]
        if not subprocess.run(check, user=ADA, group=ADA, cwd="/", capture_output=True, check=False).returncode:
            return command
    pytest.skip(f"no Python {version} that other users can execute: {sys.executable} is in a private folder")


CREATE_AND_LOG = """
import sys
from pathlib import Path
from hpcdist.errors import HpcdistError
from hpcdist.run.folder import RunDir
try:
    run = RunDir.create(Path(sys.argv[1]))
    if len(sys.argv) > 2:
        from hpcdist.tracking.mlflow_run import MlflowRun
        MlflowRun(run, sys.argv[2]).set_tags({"owner": run.path.parts[-4]})
    print("created")
except HpcdistError as error:
    print(error)
"""


def create_as(python: list[str], user: int, run: Path, uri: str = "", umask: int = 0o022) -> str:
    """Create a run, and its MLflow run if `uri` is given, as a user. Returns the last printed line."""
    done = subprocess.run(
        [*python, "-c", CREATE_AND_LOG, str(run), *filter(None, [uri])],
        user=user,
        group=user,
        extra_groups=[],
        umask=umask,
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "USER": str(user), "MLFLOW_DISABLE_TELEMETRY": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.processes
def test_second_user_of_a_folder_is_rejected_before_any_change(python: list[str], shared_folder: Path) -> None:
    (shared_folder / "ada").mkdir()
    os.chown(shared_folder / "ada", ADA, ADA)
    runs = shared_folder / "ada" / "runs"
    store = f"sqlite:///{runs}/mlflow.db"
    assert create_as(python, ADA, runs / "exp" / "first", store, umask=0o002) == "created"
    assert {path.name: mode(path) for path in [runs, *runs.iterdir()]} == {
        "runs": 0o700,
        "exp": 0o700,
        "mlflow.db": 0o600,
        "mlflow.db.lock": 0o600,
        "mlartifacts": 0o700,
    }
    for user, name in ((BOB, f"user {BOB}"), (0, "root")):
        message = create_as(python, user, runs / "exp" / "second", store)
        assert message.startswith(f"{runs.parent} belongs to user {ADA}, not to {name}: set `runs_dir` to a folder of")
    runs.chmod(0o777)  # also if the mode permits it
    assert create_as(python, BOB, runs / "other" / "second").startswith(f"{runs.parent} belongs to user {ADA}")
    assert sorted(path.name for path in runs.iterdir()) == ["exp", "mlartifacts", "mlflow.db", "mlflow.db.lock"]
    # The database of another user is rejected for runs in any folder.
    (shared_folder / "bob").mkdir()
    os.chown(shared_folder / "bob", BOB, BOB)
    assert create_as(python, BOB, shared_folder / "bob" / "runs" / "exp" / "first", store).startswith(
        f"{runs.parent} belongs to user {ADA}"
    )


@pytest.mark.processes
def test_shared_folder_of_root_has_one_user_per_experiment(python: list[str], shared_folder: Path) -> None:
    """As /runs in the image: each user has a database, and each experiment belongs to one user."""
    runs = shared_folder / "scratch"
    runs.mkdir()
    runs.chmod(0o1777)
    assert create_as(python, ADA, runs / "exp" / "first") == "created"
    assert create_as(python, BOB, runs / "exp" / "second").startswith(f"{runs}/exp belongs to user {ADA}")
    assert create_as(python, BOB, runs / "other" / "second") == "created"
    assert {path.name: mode(path) for path in runs.iterdir()} == {
        "exp": 0o700, "other": 0o700, f".hpcdist-{ADA}": 0o700, f".hpcdist-{BOB}": 0o700,
    }  # fmt: skip


@pytest.mark.processes
def test_root_outside_of_a_user_namespace_is_root(python: list[str]) -> None:
    code = "import pathlib, hpcdist.host.files as found; print(found.require_safe(pathlib.Path('/usr')))"
    command = ["unshare", "-U", f"--map-user={ADA}", *python, "-c", code]
    done = subprocess.run(command, user=ADA, group=ADA, capture_output=True, text=True, check=False, cwd="/")
    if "unshare failed" in done.stderr:
        pytest.skip("the kernel allows users no namespace")
    assert (done.stdout, done.stderr) == ("None\n", "")


@pytest.mark.processes
@pytest.mark.slow
def test_two_users_share_an_experiment_on_a_server(python: list[str], shared_folder: Path, tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        for user, name in ((ADA, "ada"), (BOB, "bob")):
            (shared_folder / name).mkdir(mode=0o700)
            os.chown(shared_folder / name, user, user)
            assert create_as(python, user, shared_folder / name / "runs" / "digits" / "first", server.uri) == "created"
        with sqlite3.connect(tmp_path / "mlflow.db") as database:
            rows = database.execute(
                "select e.name, t.value from runs r join experiments e using (experiment_id)"
                " join tags t using (run_uuid) where t.key = 'owner' order by t.value"
            ).fetchall()
        assert rows == [("digits", "ada"), ("digits", "bob")]
    finally:
        server.kill()
