"""The matrix runtime x fault: every container runtime for real, on two nodes with two ranks each.

Each cell compares the run with an undisturbed one without a container, bit by bit, and checks that nothing outlives the
job. `make faults` prints the matrix. `make test` runs podman's requeue, and ranks that only count with other runtimes.
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

from hpcdist.devcluster import cluster, host
from hpcdist.devcluster import settings as devcluster_settings
from hpcdist.host.files import read_json

#: One form of image of each runtime: the others differ in starts and mounts, which `cells` and killed ranks show.
ONE_FORM = ("podman", "docker", "apptainer-sif", "charliecloud", "enroot-sqsh", "pyxis")
#: The same as an ordinary user, on nodes with what a cluster gives its users: a /dev/fuse for all, subordinate ids for
#: rootless podman, and a docker socket of the user's group.
USER = ", user"
every_runtime = pytest.mark.parametrize("runtime", ONE_FORM, indirect=True, scope="module")


def cells(*, slow: tuple[str, ...]) -> pytest.MarkDecorator:
    """Return the parameters of a test for all runtimes, also as a user, of which some run in `make slow`."""

    def marks(case: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.quick_fault, pytest.mark.slow] if case in slow else [pytest.mark.faults]

    marked = [pytest.param(case, marks=marks(case)) for case in (*CASES, *(f"{case}{USER}" for case in CASES))]
    return pytest.mark.parametrize("runtime", marked, indirect=True, scope="module")


# --- An ordinary user: runs that belong to the user, and nodes with the devices that a user needs, which are mounts in
# the node's own namespace.

#: An account of every Debian, without rights and without a home folder.
ACCOUNT = pwd.getpwnam("daemon")
#: Python of this machine. That of the tests may be in root's home folder, which no user can enter.
PYTHON = Path("/usr/bin/python3")
_SET_USER = ("setpriv", f"--reuid={ACCOUNT.pw_uid}", f"--regid={ACCOUNT.pw_gid}", "--clear-groups")
#: Subordinate ids for rootless podman, as `useradd` gives them to a new user.
_SUB_IDS = f"{ACCOUNT.pw_name}:100000:65536\n"
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
    ready = prepared(case, containers, runs, folder, group=str(ACCOUNT.pw_gid))
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
    tmp_path_factory: pytest.TempPathFactory,
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
        ready = prepared(case, containers, slurm_runs, tmp_path_factory.mktemp(case))
    with ready as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.env.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture
def boxed(request: pytest.FixtureRequest, runtime: RuntimeCase) -> Iterator[FaultScene]:
    """Fault injection for a run whose ranks are in containers; teardown restores the cluster."""
    owner = "user" if request.node.callspec.params["runtime"].endswith(USER) else "slurm"
    runs, control = (request.getfixturevalue(f"{owner}_{what}") for what in ("runs", "control"))
    yield FaultScene(runs, runtime_cases.subject_of(runtime), control, Cell(fault="", trainer=runtime.name))
    runs.cluster.set_grace_time(0)
    runs.cluster.restore_nodes()
    runtime.restore()


@every_runtime
def test_counting(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """Ranks that only count start in a third of the time."""
    boxed.submit("counting", *runtime.overrides, "trainer=counting:train", "params.until=20")
    state = boxed.runs.wait_end(boxed.name, boxed.job)
    assert (state.status, state.reason, state.attempt) == ("finished", "counted to 20", 1), state
    assert boxed.runs.checkpoint_steps(boxed.name) == [20]
    assert (read_json(boxed.runs.run_dir(boxed.name).container) or {})["runtime"] == runtime.runtime
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@cells(slow=("charliecloud", "enroot-sqsh", "pyxis"))
def test_plain(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit("plain", *runtime.overrides)
    boxed.assert_recovered(max_lost_steps=0)
    assert boxed.cell.attempts == 1
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@cells(slow=("podman", "docker", "apptainer-sif"))
def test_requeue(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("requeue")
    assert_inside(boxed, boxed.runs.rank_processes(boxed.name))
    with boxed.cluster.setting("KillWait", 30):
        boxed.cluster.run("scontrol", "requeue", boxed.job)
        boxed.release()
        boxed.wait_queued()
    assert HOLD_STEP <= boxed.runs.checkpoint_steps(boxed.name)[-1] < LAST_STEP
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    boxed.start_now()
    boxed.assert_recovered(max_lost_steps=0)
    assert (boxed.num_starts(), boxed.cell.attempts, boxed.cell.restarts) == (2, 2, 0)
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@pytest.mark.faults
@every_runtime
def test_preemption(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """With a grace time; without one the signals are those of a requeue."""
    boxed.cluster.set_grace_time(20)
    with boxed.cluster.setting("KillWait", 30):
        boxed.submit_held("preemption")
        high = boxed.cluster.start_high_priority_job("--nodes=4")
        boxed.runs.wait_stop_request(boxed.name)
        boxed.release()
        boxed.wait_queued()
    assert boxed.runs.checkpoint_steps(boxed.name)[-1] >= HOLD_STEP
    boxed.cluster.wait_job_state(high, "COMPLETED")
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    boxed.start_now()
    boxed.assert_recovered(max_lost_steps=0)
    assert boxed.num_starts() == 2


@pytest.mark.faults
@every_runtime
def test_time_limit(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """The ranks are held until they are asked to stop; only the time limit causes that."""
    boxed.submit("time limit", *boxed.subject.overrides, "cluster.time_limit_min=3", "cluster.signal_lead_s=60")
    assert boxed.wait_queued().partition("(")[2] in ("time limit)", "the ranks received a stop signal)")
    assert 0 < boxed.runs.checkpoint_steps(boxed.name)[-1] < LAST_STEP
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    boxed.start_now()
    boxed.assert_recovered(max_lost_steps=0)
    assert boxed.num_starts() == 2


@pytest.mark.faults
@every_runtime
def test_stop_command(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("hpcdist stop")
    code, output = boxed.runs.command("stop", boxed.name)
    assert code == 0, output
    assert boxed.runs.wait_end(boxed.name, boxed.job).status == "stopped"
    assert boxed.runs.checkpoint_steps(boxed.name)[-1] >= HOLD_STEP
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    code, output = boxed.runs.command("resume", boxed.name, "--detach")
    assert code == 0, output
    boxed.job, boxed.earlier_jobs = boxed.runs.job_id(boxed.name), (boxed.job,)
    boxed.assert_recovered(max_lost_steps=0)


@pytest.mark.faults
@pytest.mark.parametrize("runtime", CASES, indirect=True, scope="module")
def test_killed_rank(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("killed rank")
    boxed.runs.rank_processes(boxed.name)[3].kill()
    boxed.release()
    boxed.assert_recovered_from_checkpoint()
    assert "rank 3 on n2 was killed by SIGKILL, last heartbeat at step " in boxed.runs.job_log(boxed.name)
    assert (boxed.num_starts(), boxed.cell.attempts, boxed.cell.restarts) == (1, 2, 1)
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@pytest.mark.faults
@every_runtime
def test_killed_supervisor(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """The new supervisor first kills the old ranks, which were never released."""
    boxed.submit_held("killed supervisor")
    old = boxed.runs.rank_processes(boxed.name).values()
    os.kill(boxed.runs.holder_pid(boxed.name), signal.SIGKILL)
    boxed.assert_recovered_from_checkpoint()
    assert (boxed.num_starts(), boxed.cell.attempts) == (1, 2)
    assert not any(process.is_running() for process in old)
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@pytest.mark.faults
@every_runtime
def test_dead_node(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("dead node", "launch.hang_timeout_s=60")
    boxed.kill_node("n2")
    boxed.wait_restarted()
    boxed.assert_recovered_from_checkpoint()
    hosts = boxed.runs.hosts(boxed.name, 2)
    assert "n2" not in hosts
    # With linuxproc, Slurm's SIGKILL also ends pyxis' removal on n1. If the job does not get n1 again, only the epilog
    # of an administrator can repeat it (slurm/containers.md).
    is_killed = runtime.name == "pyxis" and boxed.cluster.settings.proctrack == "linuxproc" and "n1" not in hosts
    assert_nothing_left(runtime, boxed.runs, boxed.name, lost=("n1", "n2") if is_killed else ("n2",))


@pytest.mark.faults
@pytest.mark.parametrize("runtime", ["apptainer-sif"], indirect=True, scope="module")
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
