"""A folder of runs belongs to one user; two users share results in a tracking server."""

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
from hpcdist.run import runs_dir as owned
from hpcdist.run.folder import RunDir

ADA, BOB = 1234, 1235
CHECKOUT = Path(__file__).resolve().parents[3]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_a_run_makes_is_the_users_alone(tmp_path: Path) -> None:
    old = os.umask(0o002)  # the default of Debian and of Red Hat
    try:
        RunDir.create(tmp_path / "runs" / "exp" / "first")
        owned.make_database(tmp_path / "runs" / "mlflow.db")
    finally:
        os.umask(old)
    assert mode(tmp_path / "runs") == 0o700
    assert mode(tmp_path / "runs" / "exp") == 0o700
    assert mode(tmp_path / "runs" / "mlflow.db") == 0o600


def test_a_folder_that_is_there_keeps_its_mode_and_an_older_database_is_closed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o750)
    database = tmp_path / "runs" / "mlflow.db"
    with sqlite3.connect(database) as connection:
        connection.execute("create table points (value)")
    database.chmod(0o644)
    RunDir.create(tmp_path / "runs" / "exp" / "first")
    owned.make_database(database)
    assert (mode(tmp_path / "runs"), mode(database)) == (0o750, 0o600)
    with sqlite3.connect(database) as connection:
        assert connection.execute("select count(*) from points").fetchone() == (0,)


def test_a_folder_of_root_may_be_used_and_one_of_a_third_user_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uid 1234 in the image, where /runs belongs to root; no user has that number here."""
    me = os.getuid()
    RunDir.create(tmp_path / "runs" / "exp" / "first")
    monkeypatch.setattr(os, "geteuid", lambda: 987654)
    if me == 0:
        assert owned.foreign_owner(tmp_path) is None
    monkeypatch.setattr(Path, "stat", lambda path, **_: os.stat_result((0o40755, 1, 1, 1, 987653, 0, 0, 0, 0, 0)))
    with pytest.raises(
        RunFolderError,
        match=r"^runs_dir /elsewhere belongs to user 987653, not to user 987654: set `runs_dir` to a folder of your"
        r" own, such as '\$\{oc.env:HOME\}/runs', and share results through a tracking server \(`tracking.uri`\);"
        r" start a container as the folder's owner with `--user \$\(id -u\):\$\(id -g\)`$",
    ):
        owned.require_own(Path("/elsewhere"), "runs_dir")
    assert owned.foreign_owner(Path("/elsewhere/missing")) is not None
    monkeypatch.undo()
    assert owned.foreign_owner(tmp_path / "missing") is None


# --- with two users


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that all users may enter, which pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-users-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def python() -> list[str]:
    """A Python that other users may start, with the packages of this one."""
    if os.getuid() != 0:
        pytest.skip("only root can act as two other users")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    path = os.pathsep.join([str(CHECKOUT), *(folder for folder in sys.path if folder.endswith("-packages"))])
    for program in (sys.executable, f"/usr/bin/python{version}"):
        command = ["env", f"PYTHONPATH={path}", program]
        ask = [*command, "-c", "import hpcdist.run.folder"]
        if not subprocess.run(ask, user=ADA, group=ADA, cwd="/", capture_output=True, check=False).returncode:
            return command
    pytest.skip(f"no Python {version} that other users may start: {sys.executable} is in a private folder")


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
    print("made")
except HpcdistError as error:
    print(error)
"""


def act(python: list[str], user: int, run: Path, uri: str = "", umask: int = 0o022) -> str:
    """Make a run, perhaps with its MLflow run, as a user; the last line of what is printed."""
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
def test_the_second_user_of_a_folder_is_refused_before_anything_is_made(python: list[str], place: Path) -> None:
    (place / "ada").mkdir()
    os.chown(place / "ada", ADA, ADA)
    runs = place / "ada" / "runs"
    store = f"sqlite:///{runs}/mlflow.db"
    assert act(python, ADA, runs / "exp" / "first", store, umask=0o002) == "made"
    assert {path.name: mode(path) for path in [runs, *runs.iterdir()]} == {
        "runs": 0o700,
        "exp": 0o700,
        "mlflow.db": 0o600,
        "mlflow.db.lock": 0o600,
        "mlartifacts": 0o700,
    }
    for user, name in ((BOB, f"user {BOB}"), (0, "user root")):
        said = act(python, user, runs / "exp" / "second", store)
        assert said.startswith(f"runs_dir {runs} belongs to user {ADA}, not to {name}: set `runs_dir` to a folder of")
    runs.chmod(0o777)  # nor where the modes would let him
    assert act(python, BOB, runs / "other" / "second").startswith(f"runs_dir {runs} belongs to user {ADA}")
    assert sorted(path.name for path in runs.iterdir()) == ["exp", "mlartifacts", "mlflow.db", "mlflow.db.lock"]
    # Another user's database is refused wherever the runs are.
    (place / "bob").mkdir()
    os.chown(place / "bob", BOB, BOB)
    assert act(python, BOB, place / "bob" / "runs" / "exp" / "first", store).startswith(
        f"the database {runs}/mlflow.db belongs"
    )


@pytest.mark.processes
def test_a_folder_that_root_opened_to_all_has_one_user_by_experiment_and_database(
    python: list[str], place: Path
) -> None:
    """As /runs in the image: whoever comes first has the database, and each experiment one user."""
    runs = place / "scratch"
    runs.mkdir()
    runs.chmod(0o1777)
    assert act(python, ADA, runs / "exp" / "first") == "made"
    assert act(python, BOB, runs / "exp" / "second").startswith(
        f"the folder of the experiment {runs}/exp belongs to user {ADA}"
    )
    assert act(python, BOB, runs / "other" / "second") == "made"
    database = runs / "mlflow.db"
    database.touch(mode=0o600)
    os.chown(database, ADA, ADA)
    assert act(python, BOB, runs / "third" / "second").startswith(f"the database {database} belongs to user {ADA}")
    assert not (runs / "third").exists()


@pytest.mark.processes
def test_two_users_with_folders_of_their_own_share_an_experiment_in_a_server(
    python: list[str], place: Path, tmp_path: Path
) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        for user, name in ((ADA, "ada"), (BOB, "bob")):
            (place / name).mkdir(mode=0o700)
            os.chown(place / name, user, user)
            assert act(python, user, place / name / "runs" / "digits" / "first", server.uri) == "made"
        with sqlite3.connect(tmp_path / "mlflow.db") as database:
            rows = database.execute(
                "select e.name, t.value from runs r join experiments e using (experiment_id)"
                " join tags t using (run_uuid) where t.key = 'owner' order by t.value"
            ).fetchall()
        assert rows == [("digits", "ada"), ("digits", "bob")]
    finally:
        server.kill()
