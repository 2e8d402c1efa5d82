"""The matrix runtime x fault: every container runtime for real, on two nodes with two ranks each.

Each cell compares the run with an undisturbed one without a container, bit by bit, and checks that nothing outlives the
job. `make faults` prints the matrix. `make test` runs ranks that only count, with each runtime.

A fault is one row if it reaches the containers in its own way: signals, the end of one rank, of all steps, of a node.
A preemption sends the signals of a requeue; `hpcdist stop` and files of the run do not concern the runtime.
"""

import os
import pwd
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import runtime_cases
from containers import Containers, mismatch, small_image
from hpcdist_runs import HOLD_STEP, LAST_STEP
from runtime_cases import CASES, RuntimeCase, assert_inside, assert_nothing_left, prepared
from slurm_cluster import DevCluster
from slurm_faults import Cell, FaultScene
from slurm_runs import ON_FOUR_RANKS, SlurmRuns

from hpcdist.devcluster import cluster, cluster_processes, node_faults
from hpcdist.devcluster import settings as devcluster_settings
from hpcdist.host.json_files import read_json

#: One form of image of each runtime. The other forms differ in starts and mounts, which a requeue shows.
ONE_FORM = ("apptainer-sif", "enroot-sqsh", "pyxis")
#: The same as an ordinary user, on nodes with what a cluster gives its users: a /dev/fuse for all. Root starts and
#: mounts images in other ways, which the other rows show.
USER = ", user"
#: The cell of the requeue in `make slow`.
SLOW = f"apptainer-sif{USER}"


def runtimes(*cases: str, slow: str = "") -> pytest.MarkDecorator:
    def marks(case: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.quick_fault, pytest.mark.slow] if case == slow else [pytest.mark.faults]

    marked = [pytest.param(case, marks=marks(case)) for case in cases]
    return pytest.mark.parametrize("runtime", marked, indirect=True, scope="module")


# --- An ordinary user: runs that belong to the user, and nodes with the devices that a user needs, which are mounts in
# the node's own namespace.

#: An account of every Debian, without rights and without a home folder.
ACCOUNT = pwd.getpwnam("daemon")
#: Python of this machine. That of the tests may be in root's home folder, which no user can enter.
PYTHON = Path("/usr/bin/python3")
_SET_USER = ("setpriv", f"--reuid={ACCOUNT.pw_uid}", f"--regid={ACCOUNT.pw_gid}", "--clear-groups")
#: Give a node what a machine with udev has: a /dev/fuse for all users.
_MOUNT = """
set -e
folder=$0
mount -t tmpfs -o mode=755 user-devices "$folder"
cp -ax /dev/. "$folder"
chmod 0666 "$folder/fuse"
for below in pts shm; do mount --rbind "/dev/$below" "$folder/$below"; done
mount --rbind "$folder" /dev
"""


class UserRuns(SlurmRuns):
    """A folder of runs of `ACCOUNT` on a dev cluster.

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
        return super().env(**own, USER=ACCOUNT.pw_name, LOGNAME=ACCOUNT.pw_name, **more)

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
    owner = f"{ACCOUNT.pw_uid}:{ACCOUNT.pw_gid}"
    subprocess.run(["chown", "--recursive", "--no-dereference", owner, str(folder)], check=True)


def user_program(folder: Path) -> Path:
    """Return a `hpcdist` that the user can run; without one, skip the test, or fail it where containers are required.

    Args:
        folder: an empty folder that all users can enter, for an environment of `PYTHON` with the packages of this one.
    """
    done = subprocess.run([str(PYTHON), "-m", "venv", "--without-pip", str(folder)], text=True, check=False)
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
            f"user {ACCOUNT.pw_name} cannot run this checkout with {PYTHON}, which has to be of this Python's version:"
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
    cluster.up(
        layout, {"num_nodes": settings.num_nodes, "proctrack": settings.proctrack}, users=[ACCOUNT.pw_name], env={}
    )
    (folder / "dev").mkdir()
    enter: list[str] = []
    try:
        for node in settings.nodes:
            node_faults.kill_node(layout, node, keep_link=True)
            node_faults.start_node(layout, node, own_mounts=True)
            pid = cluster_processes.pid_of(layout, devcluster_settings.slurmd(node))
            there = ["nsenter", "--mount", f"--target={pid}"]
            subprocess.run([*there, "sh", "-c", _MOUNT, str(folder / "dev")], check=True)
            enter = enter or there
        yield enter
    finally:
        devcluster.cancel_all()
        for node in settings.nodes:
            node_faults.kill_node(layout, node, keep_link=True)
        devcluster.restore_nodes()


@contextmanager
def prepared_for_user(case: str, containers: Containers, runs: UserRuns, folder: Path) -> Iterator[RuntimeCase]:
    """Prepare a runtime on the nodes for the user for the duration of the block.

    Args:
        folder: an empty folder that all users can enter.
    """
    with prepared(case, containers, runs) as found, user_nodes(runs.cluster, folder) as runs.enter:
        if case == "enroot-folder":  # enroot writes a lock file and mount points into it
            copy = runs.home / "image"
            subprocess.run(["cp", "--archive", str(small_image(containers).folder), str(copy)], check=True)
            give_to_user(copy)
            overrides = [one for one in found.overrides if not one.startswith("container.image=")]
            found = replace(found, overrides=(f"container.image={copy}", *overrides))
        yield found


# --- The matrix


@pytest.fixture(scope="module")
def user_runs(devcluster: DevCluster, empty_database: Path) -> Iterator[UserRuns]:
    """Runs of the user, in a folder that all users can enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-user-", dir=devcluster_settings.STATE.parent))
    folder.chmod(0o755)
    program = user_program(folder / "python")
    (folder / "home").mkdir()
    yield UserRuns(folder / "home", empty_database, devcluster, program)
    shutil.rmtree(folder)


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
    request: pytest.FixtureRequest,
    containers: Containers,
    slurm_runs: SlurmRuns,
) -> Iterator[RuntimeCase]:
    """A runtime that is ready on all nodes; its variables are set."""
    case, as_user, _ = request.param.partition(USER)
    if (reason := mismatch()) is not None:
        pytest.skip(reason)
    if (reason := runtime_cases.missing_program(case)) is not None:
        assert os.environ.get("HPCDIST_REQUIRE_CONTAINERS") != "1", reason
        pytest.skip(reason)
    if as_user:
        runs = request.getfixturevalue("user_runs")
        request.getfixturevalue("user_control")
        folder = runs.home.parent / case
        folder.mkdir()
        ready = prepared_for_user(case, containers, runs, folder)
    else:
        ready = prepared(case, containers, slurm_runs)
    with ready as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.env.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture
def boxed(request: pytest.FixtureRequest, runtime: RuntimeCase) -> Iterator[FaultScene]:
    """Fault injection for a run with ranks in containers; teardown restores the cluster."""
    owner = "user" if request.node.callspec.params["runtime"].endswith(USER) else "slurm"
    runs, control = (request.getfixturevalue(f"{owner}_{what}") for what in ("runs", "control"))
    yield FaultScene(runs, runtime_cases.subject_of(runtime), control, Cell(fault="", trainer=runtime.name))
    runs.cluster.set_grace_time(0)
    runs.cluster.restore_nodes()
    runtime.restore()


@pytest.mark.parametrize("runtime", ONE_FORM, indirect=True, scope="module")
def test_counting(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """One rank a node, and no training: the starts are most of the time."""
    counting = ("trainer=counting:train", "params.until=20", "cluster.tasks_per_node=1", "launch.num_ranks=2")
    boxed.submit("counting", "preflight=on", *runtime.overrides, *counting)
    state = boxed.runs.wait_end(boxed.name, boxed.job)
    assert (state.status, state.reason, state.attempt) == ("finished", "counted to 20", 1), state
    assert boxed.runs.checkpoint_steps(boxed.name) == [20]
    assert (read_json(boxed.runs.run_dir(boxed.name).container) or {})["runtime"] == runtime.runtime
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@runtimes(*(f"{case}{USER}" for case in CASES), slow=SLOW)
@pytest.mark.usefixtures("time_to_save")
def test_requeue(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("requeue")
    assert_inside(boxed, boxed.runs.rank_processes(boxed.name))
    boxed.cluster.run("scontrol", "requeue", boxed.job)
    boxed.release()
    boxed.wait_queued()
    assert HOLD_STEP <= boxed.runs.checkpoint_steps(boxed.name)[-1] < LAST_STEP
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    boxed.start_now()
    boxed.assert_recovered(max_lost_steps=0)
    assert (boxed.num_starts(), boxed.cell.attempts, boxed.cell.restarts) == (2, 2, 0)
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@runtimes(*ONE_FORM)
def test_signal_of_the_time_limit(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """Slurm sends it to the tasks ahead of the limit, and the processes of a runtime must not die of it."""
    boxed.submit_held("signal of the time limit")
    assert_inside(boxed, boxed.runs.rank_processes(boxed.name))
    boxed.cluster.run("scancel", "--signal=USR2", boxed.job)
    boxed.release()
    assert boxed.wait_queued().endswith("(the ranks received a stop signal)")
    assert HOLD_STEP <= boxed.runs.checkpoint_steps(boxed.name)[-1] < LAST_STEP
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    boxed.start_now()
    boxed.assert_recovered(max_lost_steps=0)
    assert boxed.num_starts() == 2


@runtimes(*ONE_FORM)
def test_killed_rank(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("killed rank")
    boxed.runs.rank_processes(boxed.name)[3].kill()
    boxed.release()
    boxed.assert_recovered_from_checkpoint()
    assert "rank 3 on n2 was killed by SIGKILL, last heartbeat at step " in boxed.runs.job_log(boxed.name)
    assert (boxed.num_starts(), boxed.cell.attempts, boxed.cell.restarts) == (1, 2, 1)
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@runtimes("pyxis")
def test_killed_supervisor(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """The new supervisor first kills the old ranks, which were never released, and removes what pyxis has left."""
    boxed.submit_held("killed supervisor")
    old = boxed.runs.rank_processes(boxed.name).values()
    os.kill(boxed.runs.holder_pid(boxed.name), signal.SIGKILL)
    boxed.assert_recovered_from_checkpoint()
    assert (boxed.num_starts(), boxed.cell.attempts) == (1, 2)
    assert not any(process.is_running() for process in old)
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@runtimes("pyxis")
def test_dead_node(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("dead node", "launch.hang_timeout_s=60")
    boxed.kill_node("n2")
    boxed.wait_restarted()
    boxed.assert_recovered_from_checkpoint()
    hosts = boxed.runs.hosts(boxed.name, 2)
    assert "n2" not in hosts
    # With linuxproc, Slurm's SIGKILL also ends pyxis' removal on n1. If the job does not get n1 again, only the epilog
    # of an administrator can repeat it (slurm/containers.md).
    is_killed = boxed.cluster.settings.proctrack == "linuxproc" and "n1" not in hosts
    assert_nothing_left(runtime, boxed.runs, boxed.name, lost=("n1", "n2") if is_killed else ("n2",))


@runtimes("apptainer-sif")
def test_mounted_image_survives_signals(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """apptainer mounts the .sif of an ordinary user with squashfuse_ll, a process of the step that Slurm may signal.

    proctrack/linuxproc signals all processes of a step; the signals are sent here, whatever the cluster uses.
    """
    # With --userns root's image is mounted like that of an ordinary user.
    key, _, flags = runtime.overrides[-1].partition("=[")
    assert key == "container.extra_args"
    boxed.submit_held("signals to mounts", f"{key}=['--userns',{flags}")
    mounts = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "squashfuse_ll"]
    assert len(mounts) == 4
    for number in (signal.SIGUSR2, signal.SIGTERM):
        for process in mounts:
            process.send_signal(number)
    boxed.cluster.run("scontrol", "requeue", boxed.job)
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in mounts)
    boxed.release()
    boxed.wait_queued()
    assert HOLD_STEP <= boxed.runs.checkpoint_steps(boxed.name)[-1] < LAST_STEP
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    boxed.start_now()
    boxed.assert_recovered(max_lost_steps=0)
    assert_nothing_left(runtime, boxed.runs, boxed.name)
