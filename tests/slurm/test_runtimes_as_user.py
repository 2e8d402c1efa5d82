"""The matrix runtime x fault as an ordinary user: an undisturbed run, a requeue and a killed rank with each runtime.

The nodes have what a cluster gives its users: a /dev/fuse for all users, subordinate ids for rootless podman, and a
docker socket of the user's group. Nothing of this machine changes: they are mounts in a node's own namespace.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import runtime_cases
from containers import Containers, mismatch, small_image
from runtime_cases import CASES, RuntimeCase, prepared
from slurm_cluster import DevCluster
from slurm_faults import Cell, FaultScene
from slurm_runs import ON_FOUR_RANKS, SlurmRuns, create_database

from hpcdist.devcluster import cluster, host
from hpcdist.devcluster import settings as devcluster_settings

pytestmark = [pytest.mark.faults, pytest.mark.parametrize("runtime", CASES, indirect=True, scope="module")]

#: An account of every Debian, without rights and without a home folder.
USER = pwd.getpwnam("daemon")
#: Python of this machine. That of the tests may be in root's home folder, which no user can enter.
PYTHON = Path("/usr/bin/python3")
_SET_USER = ("setpriv", f"--reuid={USER.pw_uid}", f"--regid={USER.pw_gid}", "--clear-groups")
#: Subordinate ids for rootless podman, as `useradd` gives them to a new user.
_SUB_IDS = f"{USER.pw_name}:100000:65536\n"
#: Give a node what a machine with udev and systemd has: a /dev/fuse for all users and /dev/mqueue.
_MOUNT = """
set -e
folder=$0 sub_ids=$1
mount -t tmpfs -o mode=755 user-devices "$folder"
cp -ax /dev/. "$folder"
chmod 0666 "$folder/fuse"
mkdir -p "$folder/mqueue"
mount -t mqueue mqueue "$folder/mqueue" && chmod 1777 "$folder/mqueue"
for below in pts shm; do mount --rbind "/dev/$below" "$folder/$below"; done
mount --rbind "$folder" /dev
mount --bind "$sub_ids" /etc/subuid
mount --bind "$sub_ids" /etc/subgid
"""


class UserRuns(SlurmRuns):
    """A folder of runs of `USER` on a dev cluster.

    Args:
        root: an empty folder that all users can enter; it will belong to the user.
        program: `hpcdist` of the user.
    """

    def __init__(self, root: Path, database: Path, cluster: DevCluster, program: Path) -> None:
        super().__init__(root, database, cluster)
        self.home, self.program = root, program
        #: Command in front of the user's commands: the one that enters the mounts of a node, if nodes have their own.
        self.enter: list[str] = []
        (root / "tmp").mkdir()
        give_to_user(root)

    def env(self, **more: str) -> dict[str, str]:
        own = {"HOME": str(self.home), "TMPDIR": str(self.home / "tmp")}
        return super().env(**own, USER=USER.pw_name, LOGNAME=USER.pw_name, **more)

    def as_user(self, *command: str) -> list[str]:
        """Return a command of the user, with the user's own folder of source code as the current one."""
        return [*self.enter, "env", f"--chdir={self.project}", *_SET_USER, *command]

    def start(self, *arguments: str, prefix: Sequence[str] = (), **env: str) -> subprocess.Popen[str]:
        return super().start(*arguments, prefix=[*self.as_user(), *prefix], **env)

    def run_as_user(self, *command: str) -> str:
        """Run any command as the user; return its output."""
        done = subprocess.run(self.as_user(*command), env=self.env(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def give_to_user(folder: Path) -> None:
    """Make the user the owner of a folder and of everything in it."""
    owner = f"{USER.pw_uid}:{USER.pw_gid}"
    subprocess.run(["chown", "--recursive", "--no-dereference", owner, str(folder)], check=True)


def user_program(folder: Path) -> Path:
    """Return a `hpcdist` that the user can run; without one, skip the test, or fail it where containers are required.

    Args:
        folder: an empty folder that all users can enter, for an environment of `PYTHON` with the packages of this one.
    """
    done = subprocess.run([str(PYTHON), "-m", "venv", "--without-pip", str(folder)], check=False)
    reason = f"`{PYTHON} -m venv` fails: sudo apt-get install python3-venv"
    if done.returncode == 0:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "packages.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        program = folder / "bin/hpcdist"
        program.write_text(f"#!{folder}/bin/python\nfrom hpcdist.cli.app import main\nmain()\n")
        program.chmod(0o755)
        check = [*_SET_USER, "env", f"HOME={folder}", str(program), "--version"]
        done = subprocess.run(check, cwd="/", capture_output=True, text=True, check=False)
        reason = (
            f"user {USER.pw_name} cannot run this checkout with {PYTHON}, which has to be of this Python's version:"
            f" make the checkout and its packages readable for all users (chmod -R go+rX): {done.stderr[-300:]}"
        )
    if done.returncode != 0:
        assert os.environ.get("HPCDIST_REQUIRE_CONTAINERS") != "1", reason
        pytest.skip(reason)
    return program


@contextmanager
def user_nodes(devcluster: DevCluster, folder: Path) -> Iterator[list[str]]:
    """Give the nodes what a user needs, in mounts of their own, for the duration of the block.

    Args:
        folder: an empty folder.

    Yields:
        The command that enters the mounts of the first node.
    """
    layout, settings = devcluster.layout, devcluster.settings
    cluster.up(layout, {"num_nodes": settings.num_nodes, "proctrack": settings.proctrack}, users=[USER.pw_name], env={})
    sub_ids = folder / "sub-ids"
    sub_ids.write_text(_SUB_IDS)
    (folder / "dev").mkdir()
    enter: list[str] = []
    try:
        for node in settings.nodes:
            cluster.kill_node(layout, node, keep_link=True)
            cluster.start_node(layout, node, own_mounts=True)
            pid = host.pid_of(layout, devcluster_settings.slurmd(node))
            there = ["nsenter", "--mount", f"--target={pid}"]
            subprocess.run([*there, "sh", "-c", _MOUNT, str(folder / "dev"), str(sub_ids)], check=True)
            enter = enter or there
        yield enter
    finally:
        devcluster.cancel_all()
        for node in settings.nodes:
            cluster.kill_node(layout, node, keep_link=True)
        devcluster.restore_nodes()


# --- Container runtimes of the matrix as an ordinary user starts them: with images and containers of the user.


@contextmanager
def prepared_for_user(case: str, containers: Containers, runs: UserRuns, folder: Path) -> Iterator[RuntimeCase]:
    """Prepare a runtime on the nodes for the user for the duration of the block.

    Args:
        folder: an empty folder that all users can enter.
    """
    ready = prepared(case, containers, runs, folder, group=str(USER.pw_gid))
    with ready as found, user_nodes(runs.cluster, folder) as runs.enter:
        found.restore()  # nodes that start again have no docker daemon
        if case == "podman":
            yield from _podman(found, containers, runs)
        elif case == "enroot-folder":  # enroot writes a lock file and mount points into it
            copy = runs.home / "image"
            subprocess.run(["cp", "--archive", str(small_image(containers).folder), str(copy)], check=True)
            give_to_user(copy)
            yield _with_image(found, copy)
        else:
            yield found


def _with_image(case: RuntimeCase, image: Path | str) -> RuntimeCase:
    key = "container.image="
    return replace(case, overrides=tuple(f"{key}{image}" if one.startswith(key) else one for one in case.overrides))


def _podman(case: RuntimeCase, containers: Containers, runs: UserRuns) -> Iterator[RuntimeCase]:
    """Yield rootless podman with a store in the user's home folder, which has the image."""
    settings = runs.home / ".config/containers"
    settings.mkdir(parents=True)
    (settings / "containers.conf").write_text(Path(containers.env["CONTAINERS_CONF"]).read_text())
    (settings / "storage.conf").write_text('[storage]\ndriver = "overlay"\n')
    give_to_user(settings.parent)

    def podman(*arguments: str) -> str:
        return runs.run_as_user("podman", *arguments)

    def left(run: Path) -> list[str]:
        """Return the names of a run's containers, and what is mounted in the namespace that podman keeps."""
        found = podman("ps", "--all", "--filter", f"label=hpcdist.run={run}", "--format", "{{.Names}}").split()
        places = [line.split()[4] for line in podman("unshare", "cat", "/proc/self/mountinfo").splitlines()]
        return [*found, *(place for place in places if place.endswith("/merged"))]

    image = small_image(containers)
    try:
        podman("import", str(image.tar), image.name)
        yield replace(_with_image(case, image.name), env={}, containers=left)
    finally:
        podman("rm", "--all", "--force")
        # Ends the process that keeps the user's namespaces between two commands.
        podman("system", "migrate")


# --- The matrix


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that all users can enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-user-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def user_runs(devcluster: DevCluster, open_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> UserRuns:
    program = user_program(open_folder / "python")
    database = create_database(tmp_path_factory.mktemp("empty") / "mlflow.db")
    home = open_folder / "home"
    home.mkdir()
    return UserRuns(home, database, devcluster, program)


@pytest.fixture(scope="module")
def user_control(user_runs: UserRuns) -> str:
    """Name of the control run: four ranks of the user on this machine, without Slurm, container and faults."""
    name = "control"
    for arguments in (("run", *user_runs.config(name, *ON_FOUR_RANKS)), ("sync", name)):
        code, output = user_runs.command(*arguments)
        assert code == 0, output
    return name


@pytest.fixture(scope="module")
def runtime(
    request: pytest.FixtureRequest, containers: Containers, user_runs: UserRuns, open_folder: Path, user_control: str
) -> Iterator[RuntimeCase]:
    """A runtime that is ready for the user on all nodes; its variables are set."""
    if (reason := mismatch() or runtime_cases.missing_program(request.param)) is not None:
        assert os.environ.get("HPCDIST_REQUIRE_CONTAINERS") != "1", reason
        pytest.skip(reason)
    folder = open_folder / request.param
    folder.mkdir()
    prepared = prepared_for_user(request.param, containers, user_runs, folder)
    with prepared as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.env.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture
def boxed(runtime: RuntimeCase, user_runs: UserRuns, user_control: str) -> Iterator[FaultScene]:
    """Fault injection for a run of the user whose ranks are in containers; teardown restores the cluster."""
    yield FaultScene(user_runs, runtime_cases.subject_of(runtime), user_control, Cell(fault="", trainer=runtime.name))
    user_runs.cluster.restore_nodes()
    runtime.restore()


def test_plain(boxed: FaultScene, runtime: RuntimeCase) -> None:
    runtime_cases.plain(boxed, runtime)


def test_requeue(boxed: FaultScene, runtime: RuntimeCase) -> None:
    runtime_cases.requeue(boxed, runtime)


def test_killed_rank(boxed: FaultScene, runtime: RuntimeCase) -> None:
    runtime_cases.killed_rank(boxed, runtime)
