"""The run folder, the folders of its attempts, and the folder of runs above."""

import errno
import os
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from other_user import folder_for_all_users

from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.errors import RunFolderError
from hpcdist.host import ownership
from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run import folder as runs_dir_module
from hpcdist.run import lease
from hpcdist.run.create import create_run
from hpcdist.run.folder import IDENTITY_VARIABLE, RunDir, StopRequest, identity, require_same
from hpcdist.run.lookup import find_unfinished

# --- Run folders and atomic files


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")

    def disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, disk_full)
    with pytest.raises(OSError, match="No space left") as failed:
        write_atomic(path, "new", durable=True)
    assert str(failed.value) == f"[Errno 28] No space left on device: '{path}'"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_create_reports_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    message = r"cannot be created \(.+\): set `runs_dir` to a folder that you can write$"
    with pytest.raises(RunFolderError, match=message):
        RunDir.create(tmp_path / "runs" / "exp" / "first")
    assert (tmp_path / "runs").read_text() == "a file"


@pytest.mark.parametrize("content", ["{}", "{", '{"cause": "ada"}', '{"action": "stop", "by": "growth"}'])
def test_damaged_request_file_is_a_request_to_stop(runs_dir: Path, content: str) -> None:
    attempt = RunDir.create(runs_dir / "exp" / "first").new_attempt()
    attempt.request.write_text(content)
    assert attempt.read_request() == StopRequest(action="stop", cause="user", by="unreadable request file")


def test_request_reaches_an_attempt_that_starts_meanwhile(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(runs_dir / "exp" / "first")
    states = [replace(run.read_state(), attempt=number) for number in (1, 2, 2)]
    for _ in range(2):
        run.new_attempt()
    monkeypatch.setattr(run, "read_state", lambda: states.pop(0))
    run.send_request(StopRequest(cause="user", by="ada"))
    assert [(read_json(run.attempt(number).request) or {}).get("by") for number in (1, 2)] == ["ada", "ada"]
    assert states == []


# --- Processes of a run refuse a folder that another user has put in the place of the run folder.
REPLACED = "has been replaced by another one"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    run.config.write_text("trainer: evil:train\n")
    return run


def test_identity_stays_with_the_folder(run: RunDir, tmp_path: Path) -> None:
    env = {IDENTITY_VARIABLE: identity(run.path)}
    assert identity(run.path) == env[IDENTITY_VARIABLE]
    assert (run.path / "identity").stat().st_mode & 0o777 == 0o600
    moved = run.path.rename(tmp_path / "moved")
    require_same(moved, env)
    require_same(tmp_path / "missing", {})
    with pytest.raises(RunFolderError, match="has been moved or deleted since this run was started: move it back"):
        require_same(tmp_path / "missing", env)
    (moved / "identity").write_text("damaged")
    with pytest.raises(RunFolderError, match=REPLACED):
        require_same(moved, env)
    assert identity(moved) != env[IDENTITY_VARIABLE]


@pytest.mark.parametrize("kind", ["missing", "link to the file", "other run", "pipe"])
def test_another_folder_cannot_have_the_identity(run: RunDir, tmp_path: Path, kind: str) -> None:
    env = {IDENTITY_VARIABLE: identity(run.path)}
    old = run.path.rename(tmp_path / "old")
    run.path.mkdir()
    if kind == "link to the file":
        (run.path / "identity").symlink_to(old / "identity")
    elif kind == "other run":
        identity(run.path)
    elif kind == "pipe":
        os.mkfifo(run.path / "identity")
    with pytest.raises(RunFolderError, match=REPLACED) as found:
        require_same(run.path, env)
    assert found.value.exit_code == 2


#: Puts another folder in the place of the run folder.
SWAP = "import os\nos.rename({run!r}, {old!r})\nos.rename({planted!r}, {run!r})\n"


@pytest.mark.processes
@pytest.mark.parametrize(("module", "code"), [("rank.worker", 2), ("rank.parent", 0), ("tracking.shipper", 2)])
def test_each_process_checks_the_folder_at_its_start(run: RunDir, tmp_path: Path, module: str, code: int) -> None:
    """The folder is swapped before the process starts; that of the parent of ranks while it imports torch."""
    env = {
        **os.environ,
        IDENTITY_VARIABLE: identity(run.path),
        "HPCDIST_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }
    env |= {f"HPCDIST_{name}": "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK")}
    env |= {f"HPCDIST_{name}": "1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NUM_NODES", "ATTEMPT", "JOB_ID")}
    env |= {"HPCDIST_MASTER_ADDR": "127.0.0.1", "HPCDIST_MASTER_PORT": "1", "PYTHONPATH": str(tmp_path)}
    planted = shutil.copytree(run.path, tmp_path / "planted", ignore=shutil.ignore_patterns("identity"))
    swap = SWAP.format(run=str(run.path), old=str(tmp_path / "old"), planted=str(planted))
    (tmp_path / "evil.py").write_text("raise SystemExit('planted')\n")
    (tmp_path / "torch.py").write_text(swap)
    if module != "rank.parent":
        exec(swap)
    command, request = [sys.executable, "-m", f"hpcdist.{module}", str(run.path)], ""
    if module == "rank.parent":
        command += ["all", "fork", "60", sys.executable, "-c", "print('planted')"]
        request = '{"start": 1, "rank": 0, "env": {}}\n'
    done = subprocess.run(command, env=env, input=request, capture_output=True, text=True, check=False)
    # The parent starts no rank, and reports why.
    errors = done.stdout if module == "rank.parent" else done.stderr
    assert (done.returncode, REPLACED in errors) == (code, True), done.stderr
    assert "planted" not in done.stderr
    assert {path.name for path in run.path.iterdir()} == {
        "attempts", "checkpoints", "config.yaml", "journal", "state.json",
    }  # fmt: skip


# --- Ownership and modes of the folder of runs and its database, also with two users

ADA, BOB = 1234, 1235

CHECKOUT = Path(__file__).resolve().parents[3]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_folders_and_the_database_are_private(
    tmp_path: Path,
) -> None:
    old = os.umask(0o002)  # the default of Debian and of Red Hat
    try:
        RunDir.create(tmp_path / "runs" / "exp" / "first")
    finally:
        os.umask(old)
    assert (mode(tmp_path / "runs"), mode(tmp_path / "runs" / "exp")) == (0o700, 0o700)
    (tmp_path / "runs").chmod(0o750)
    database = tmp_path / "runs" / "mlflow.db"
    with sqlite3.connect(database) as connection:
        connection.execute("create table points (value)")
    database.chmod(0o644)
    RunDir.create(tmp_path / "runs" / "exp" / "second")
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
        ownership.require_safe(tmp_path)
    owned = os.stat_result((0o40755, 1, 1, 1, 987653, 0, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda path, **_: owned)
    with pytest.raises(
        RunFolderError,
        match=r"^/ belongs to user 987653, not to user 987654: set `runs_dir` to a folder of your"
        r" own, such as '\$\{oc.env:HOME\}/runs', and share results through a tracking server \(`tracking.uri`\);"
        r" start a container as the folder's owner with `--user \$\(id -u\):\$\(id -g\)`; if you trust the group root,"
        r" set HPCDIST_TRUSTED_GROUPS=root$",
    ):
        ownership.require_safe(Path("/elsewhere"))


# --- two users
@pytest.fixture
def shared_folder() -> Iterator[Path]:
    with folder_for_all_users() as folder:
        yield folder


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
        from hpcdist.tracking.mlflow_client import MlflowRun
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
    code = "import pathlib, hpcdist.host.ownership as found; print(found.require_safe(pathlib.Path('/usr')))"
    command = ["unshare", "-U", f"--map-user={ADA}", *python, "-c", code]
    done = subprocess.run(command, user=ADA, group=ADA, capture_output=True, text=True, check=False, cwd="/")
    if "unshare failed" in done.stderr:
        pytest.skip("the kernel allows users no namespace")
    assert (done.stdout, done.stderr) == ("None\n", "")


# --- Search for the unfinished run of a config.


Make = Callable[..., RunDir]


@pytest.fixture
def config(runs_dir: Path) -> Config:
    return load_config("ddp_digits", [f"runs_dir={runs_dir}", "tracking.tags={api_token: hidden}"])


@pytest.fixture
def make_run(config: Config, tmp_path: Path) -> Make:
    def make_run(name: str, status: Any, *, created: float = 1.0, **changes: Any) -> RunDir:
        run = create_run(replace(config, name=name, **changes), tmp_path)
        run.write_state(replace(run.read_state(), status=status, created=created))
        return run

    return make_run


def write_container_lease(run: RunDir, *, renewed: float) -> None:
    """Write the lease of another container with this host's name, as with `--network=host`."""
    facts = {"host": socket.gethostname(), "processes": "pid:[1]", "pid": 7, "started": 1.0, "user": "ada"}
    write_json(run.lease, {**facts, "job_id": None, "acquired": renewed, "renewed": renewed})


@pytest.mark.processes
def test_newest_unfinished_run_without_a_holder_is_found(config: Config, make_run: Make) -> None:
    make_run("old", "stopped", created=1)
    make_run("killed", "running", created=2)
    make_run("other", "stopped", created=3, seed=1)
    for status in ("finished", "failed", "cancelled", "created", "queued"):
        make_run(status, status, created=4)
    write_json(make_run("queued-once", "stopped", created=4).slurm, {"job_id": "1"})
    make_run("unreadable", "stopped", created=4).config.write_text("no_such_key: 1\n")
    with lease.hold(make_run("busy", "running", created=5)):
        for name, expected in (("", "killed"), ("old", "old"), ("none", None)):
            found = find_unfinished(replace(config, name=name))
            assert (found.name if found is not None else None) == expected


@pytest.mark.processes
@pytest.mark.parametrize("renewed", [True, False])
def test_run_with_a_fresh_lease_of_another_container_is_skipped(
    config: Config, make_run: Make, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    run, now = make_run("killed", "running"), time.time()
    write_container_lease(run, renewed=now - 9)

    def sleep(seconds: float) -> None:
        if renewed:
            write_container_lease(run, renewed=now)
        else:
            monkeypatch.setattr(time, "time", lambda: now + lease.STALE_S)

    monkeypatch.setattr(time, "sleep", sleep)
    assert (find_unfinished(config) is None) == renewed
