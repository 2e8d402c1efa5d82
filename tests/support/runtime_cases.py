"""Container runtimes of the matrix runtime x fault: what each one needs on this machine, and what it must not leave."""

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from containers import CHECKOUT, RUNTIMES, STORE, Containers, SmallImage, mount_flags, small_image
from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, LAST_STEP, wait_for
from slurm_cluster import WAIT_S, DevCluster
from slurm_faults import DDP, FaultScene, Subject
from slurm_runs import SlurmRuns

from hpcdist.devcluster import cluster as devcluster_cluster
from hpcdist.devcluster import settings as devcluster_settings
from hpcdist.host.machine import CAP_SYS_RESOURCE, has_capability

# --- A docker daemon on every node of the dev cluster, as on a real one, and a client that uses the node's own daemon

#: Leaves out limits that root may not raise, which would fail every start in a container like CI's.
RUNC = CHECKOUT / "hpcdist/devcluster/runc_within_limits.sh"
#: After the failure of one node a job may start on any two of the others.
NODES = ("n1", "n2", "n3", "n4")


@dataclass(frozen=True)
class DockerNodes:
    cluster: DevCluster
    image: SmallImage
    folder: Path
    group: str = "root"  #: group of users who may use the daemons

    @property
    def bin(self) -> Path:
        """The folder with the client `docker`; on a machine that is no node it speaks to n1's daemon."""
        return self.folder / "bin"

    def data(self, node: str) -> Path:
        """Return the folder in which a node's daemon keeps and mounts images."""
        return self.folder / node / "data"

    def write_client(self) -> None:
        self.bin.mkdir()
        client = self.bin / "docker"
        client.write_text(
            "#!/bin/sh\n"
            f"socket={self.folder}/$(hostname).sock\n"
            f'[ -S "$socket" ] || socket={self.folder}/n1.sock\n'
            f'DOCKER_HOST=unix://$socket exec {shutil.which("docker")} "$@"\n'
        )
        client.chmod(0o755)

    def docker(self, node: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "DOCKER_HOST": f"unix://{self.folder}/{node}.sock"}
        return subprocess.run(["docker", *arguments], env=env, capture_output=True, text=True, check=False, timeout=120)

    def start_all(self) -> None:
        """Start the daemons that do not run, and import the image where it is missing."""
        for node in NODES:
            if not self._runs(node):
                self._start(node)
            if self.docker(node, "image", "inspect", self.image.name).returncode != 0:
                done = self.docker(node, "import", str(self.image.tar), self.image.name)
                assert done.returncode == 0, done.stderr

    def _start(self, node: str) -> None:
        at = self.folder / node
        for left in (at.with_suffix(".sock"), at.with_suffix(".pid")):
            left.unlink(missing_ok=True)
        self._unmount(at)
        # As /run after a reboot: its containerd.pid may be that of a zombie, for which dockerd would wait.
        shutil.rmtree(at / "exec", ignore_errors=True)
        daemon = [
            "dockerd", f"--host=unix://{at}.sock", f"--group={self.group}", f"--pidfile={at}.pid",
            f"--data-root={self.data(node)}",
            f"--exec-root={at}/exec", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false",
            "--bridge=none", "--storage-driver=overlay2", f"--add-runtime=here={RUNC}", "--default-runtime=here",
        ]  # fmt: skip
        with at.with_suffix(".log").open("ab") as log:
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node, *daemon]
            command = ["setsid", "--fork", *devcluster_settings.inside(self.cluster.layout, node, named)]
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
        try:
            wait_for(lambda: self.docker(node, "version").returncode == 0, "dockerd to answer", timeout_s=60)
        except AssertionError as error:
            lines = at.with_suffix(".log").read_text().splitlines()[-5:]
            raise AssertionError(f"dockerd of {node} does not answer: {lines}") from error

    def _runs(self, node: str) -> bool:
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pid = int((self.folder / f"{node}.pid").read_text())
            return b"dockerd" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    def containers(self, run: Path) -> list[str]:
        """Return the names of a run's containers, including stopped ones; the daemon of a dead node has none."""
        found = []
        for node in filter(self._runs, NODES):
            done = self.docker(node, "ps", "--all", "--filter", f"label=hpcdist.run={run}", "--format", "{{.Names}}")
            assert done.returncode == 0, f"docker ps on {node}: {done.stderr}"
            found += done.stdout.split()
        return found

    @staticmethod
    def _unmount(folder: Path) -> None:
        """Remove what a killed daemon has left mounted below a folder."""
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (place := line.split()[4]).startswith(f"{folder}/"):
                subprocess.run(["umount", "--lazy", place], check=False)

    def stop(self) -> None:
        """Stop all daemons and remove what killed ones left mounted."""
        stopped = []  # all at once: each one takes 10 s to end
        for node in NODES:
            with suppress(FileNotFoundError, ProcessLookupError, ValueError):
                pid = int((self.folder / f"{node}.pid").read_text())
                os.kill(pid, signal.SIGTERM)
                stopped.append(Path(f"/proc/{pid}/cmdline"))
        wait_for(lambda: not any(path.exists() for path in stopped), "the daemons to end", timeout_s=60)
        self._unmount(self.folder)
        for node in NODES:
            shutil.rmtree(self.folder / node, ignore_errors=True)


@contextmanager
def docker_nodes(cluster: DevCluster, image: SmallImage, folder: Path, group: str = "root") -> Iterator[DockerNodes]:
    """Run a daemon with the image on every node of `NODES` for the duration of the block."""
    found = DockerNodes(cluster, image, folder, group)
    found.write_client()
    try:
        found.start_all()
        yield found
    finally:
        found.stop()


# --- Container runtimes of the matrix runtime x fault: what each one needs on this machine, and what it must not leave

#: enroot's state of all nodes, see scripts/runtimes/enroot.sh.
ENROOT_STATE = Path("/tmp/enroot-state")
PYXIS = RUNTIMES / "pyxis/spank_pyxis.so"
#: Nothing of a container is left on a node this long after its job.
REMOVAL_TIMEOUT_S = 30.0
#: Processes of a node that outlive jobs. `containerd-shim` is one per container and is not among them.
_DAEMONS = ("slurmd", "slurmstepd", "dockerd", "containerd")
#: Beginnings of the types of file systems that squashfuse, squashfuse_ll and fuse-overlayfs mount.
_IMAGE_MOUNTS = ("fuse.squash", "fuse.fuse-overlayfs")


@dataclass(frozen=True)
class RuntimeCase:
    """A runtime with one form of image, ready to use on the nodes of the dev cluster."""

    name: str
    overrides: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)  #: of whoever submits; it reaches the job
    #: Return the names of the containers of a run folder, including stopped ones; empty where the step owns them.
    containers: Callable[[Path], list[str]] = lambda _: []
    #: Start again what a dead node has lost beside slurmd, and remove what its disk has kept.
    restore: Callable[[], None] = lambda: None
    #: Return the folder of a node in which its daemon mounts images; None if there is no such daemon.
    mounts_of: Callable[[str], Path | None] = lambda _: None
    #: Mounts of this machine that other sessions have made.
    earlier_mounts: frozenset[str] = frozenset()

    @property
    def runtime(self) -> str:
        return self.name.partition("-")[0]


_APPTAINER, _ENROOT = str(RUNTIMES / "apptainer/bin/apptainer"), str(RUNTIMES / "enroot/bin/enroot")
#: The programs that each case needs.
_PROGRAMS = {
    "podman": ["podman"],
    "docker": ["dockerd", "docker"],
    "apptainer-folder": [_APPTAINER],
    "apptainer-sif": [_APPTAINER, "mksquashfs"],
    "charliecloud": ["ch-run"],
    "enroot-folder": [_ENROOT],
    "enroot-sqsh": [_ENROOT, "mksquashfs", "squashfuse"],
    "pyxis": [_ENROOT, str(PYXIS), "mksquashfs"],
}
CASES = tuple(_PROGRAMS)


def missing_program(case: str) -> str | None:
    """Return the reason why a runtime cannot be used on this machine; None if it can."""
    missing = [name for name in _PROGRAMS[case] if shutil.which(name) is None and not Path(name).is_file()]
    return f"{', '.join(missing)} not found: run scripts/test_packages.sh as root" if missing else None


@contextmanager
def prepared(
    case: str, containers: Containers, runs: SlurmRuns, folder: Path, *, group: str = "root"
) -> Iterator[RuntimeCase]:
    """Prepare a runtime on the nodes for the duration of the block.

    Args:
        folder: an empty folder for the state of daemons.
        group: users who may use the daemons.
    """
    image = small_image(containers)
    runtime = case.partition("-")[0]
    flags = ",".join(f"'{flag}'" for flag in mount_flags(runtime))
    settings = [f"container.mounts=[{runs.no_mlflow}]", f"container.extra_args=[{flags}]"]

    earlier = frozenset(container_mounts(runs.cluster))

    def ready(reference: Path | str, **more: object) -> RuntimeCase:
        own = (f"container.runtime={runtime}", f"container.image={reference}")
        return RuntimeCase(case, (*own, *settings), earlier_mounts=earlier, **more)  # type: ignore[arg-type]

    with ExitStack() as stack:
        if case == "podman":
            env = podman_env(containers, folder, stack.enter_context(TemporaryDirectory(prefix="podman-")))
            stack.callback(_podman, env, "rm", "--all", "--force")
            names = ("ps", "--all", "--format", "{{.Names}}", "--filter")
            yield ready(
                image.name, env=env, containers=lambda run: _podman(env, *names, f"label=hpcdist.run={run}").split()
            )
        elif case == "docker":
            daemons = stack.enter_context(docker_nodes(runs.cluster, image, folder, group))
            path = f"{daemons.bin}:{os.environ['PATH']}"
            yield ready(
                image.name,
                env={"PATH": path},
                containers=daemons.containers,
                restore=daemons.start_all,
                mounts_of=daemons.data,
            )
        elif case.startswith("apptainer"):
            apptainer = RUNTIMES / "apptainer/bin"
            reference = image.folder if case == "apptainer-folder" else image.sif(str(apptainer / "apptainer"))
            yield ready(reference, env={"PATH": f"{apptainer}:{os.environ['PATH']}", **apptainer_env()})
        elif case == "charliecloud":
            yield ready(image.folder)
        else:
            path = f"{RUNTIMES / 'enroot/bin'}:{os.environ['PATH']}"
            ENROOT_STATE.mkdir(exist_ok=True)
            ENROOT_STATE.chmod(0o1777)
            if case == "pyxis":
                stack.enter_context(pyxis_plugin(runs.cluster))
            reference = image.folder if case == "enroot-folder" else image.sqsh
            yield ready(reference, env={"PATH": path}, restore=lambda: remove_enroot_state(runs.cluster))


def apptainer_env() -> dict[str, str]:
    """Return the variables without which apptainer does not start for a root without all capabilities."""
    return {} if has_capability(CAP_SYS_RESOURCE) else {"APPTAINER_DROP_CAPS": "CAP_SYS_RESOURCE"}


def podman_env(containers: Containers, folder: Path, run_root: str) -> dict[str, str]:
    """Return the variables of a podman with the images of the tests' store, but containers of its own.

    Job ids start at 1 in every dev cluster, so a killed session would leave containers of the same names.

    Args:
        run_root: at most 50 characters; with more, `podman container cleanup` fails, and each container ends 20 s late.
    """
    storage = folder / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{run_root}"\n'
        f'[storage.options]\nadditionalimagestores = ["{STORE}/graph"]\n'
    )
    return {"CONTAINERS_CONF": containers.env["CONTAINERS_CONF"], "CONTAINERS_STORAGE_CONF": str(storage)}


def _podman(env: Mapping[str, str], *arguments: str) -> str:
    command = ["podman", *arguments]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@contextmanager
def pyxis_plugin(cluster: DevCluster) -> Iterator[None]:
    """Give all nodes the plugin; slurmd reads its plugins when it starts."""
    conf = cluster.layout.conf / "plugstack.conf"
    conf.write_text(f"required {PYXIS}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            devcluster_settings.BARE_ENV, "PATH", f"{RUNTIMES / 'enroot/bin'}:{devcluster_settings.BARE_ENV['PATH']}"
        )
        try:
            _restart(cluster)
            yield
        finally:
            conf.unlink()
    _restart(cluster)


def _restart(cluster: DevCluster) -> None:
    for node in cluster.settings.nodes:
        devcluster_cluster.kill_node(cluster.layout, node, keep_link=True)
    for node in cluster.settings.nodes:
        devcluster_cluster.start_node(cluster.layout, node)
    cluster.restore_nodes()


# --- what a job leaves
def left_on_nodes(cluster: DevCluster, lost: Collection[str] = ()) -> list[str]:
    """Return what is left of containers: processes on the nodes, and enroot's containers on those that are not lost."""
    members = cluster.node_members()
    names = []
    for pid in (pid for pids in members.values() for pid in pids):
        with suppress(psutil.NoSuchProcess):
            names.append(psutil.Process(pid).name())  # zombies are in no namespace
    return [*(name for name in names if name not in _DAEMONS), *map(str, enroot_state(cluster, lost))]


def container_mounts(cluster: DevCluster) -> set[str]:
    """Return the mount points of images and containers in the mount namespaces of this process and of all nodes.

    Those in the store of the container tests, which may run at the same time, are left out.
    """
    members = cluster.node_members()
    found = set()
    for pid in ("self", *(pid for pids in members.values() for pid in pids)):
        with suppress(OSError):  # the process has ended
            for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
                place, kind = line.split()[4], line.partition(" - ")[2].partition(" ")[0]
                is_container = kind == "overlay" and place.endswith("/merged") and not place.startswith(f"{STORE}/")
                if is_container or kind.startswith(_IMAGE_MOUNTS):
                    found.add(place)
    return found


def enroot_state(cluster: DevCluster, lost: Collection[str] = ()) -> list[Path]:
    """Return the containers that enroot has unpacked on the cluster's nodes and not removed."""
    kept = [node for node in cluster.settings.nodes if node not in lost]
    inodes = {os.stat(cluster.layout.namespace(node))[stat.ST_INO] for node in kept}
    return [path for inode in inodes for path in ENROOT_STATE.glob(f"{inode}-*/data/*")]


def remove_enroot_state(cluster: DevCluster) -> None:
    for path in enroot_state(cluster):
        shutil.rmtree(path)


def assert_nothing_left(case: RuntimeCase, runs: SlurmRuns, name: str, *, lost: Collection[str] = ()) -> None:
    """Assert that neither processes nor containers nor mounts of a run are left, within `REMOVAL_TIMEOUT_S`.

    Args:
        lost: nodes whose disks keep what was unpacked, such as one whose power has failed. On this machine the mounts
            of its daemon stay as well until it starts again.
    """
    mounted = [place for place in map(case.mounts_of, lost) if place is not None]

    def left() -> list[str]:
        mounts = container_mounts(runs.cluster) - case.earlier_mounts
        mounts = {place for place in mounts if not any(map(Path(place).is_relative_to, mounted))}
        return [*case.containers(runs.run_dir(name).path), *left_on_nodes(runs.cluster, lost), *mounts]

    try:
        wait_for(lambda: not left(), "everything to be removed", timeout_s=REMOVAL_TIMEOUT_S)
    except AssertionError as error:
        raise AssertionError(f"left of {name}: {left()}") from error
    attempt = runs.attempt(name).path
    assert not [*attempt.glob("*.line"), *attempt.glob("*.exit")]


# --- Runs of the matrix of container runtimes and faults.


def subject_of(runtime: RuntimeCase) -> Subject:
    """Return the subject of fault injection whose ranks are in containers of a runtime."""
    return Subject(
        name=runtime.name,
        overrides=(*HOLD_OVERRIDES, *runtime.overrides),
        hold_at=HOLD_STEP,
        last_save=DDP.last_save,
        interval=DDP.interval,
        last_step=LAST_STEP,
    )


def assert_inside(scene: FaultScene, ranks: dict[int, psutil.Process]) -> None:
    """Assert that all ranks run in a root file system of their own, on the expected nodes, as the run's owner."""
    assert sorted(ranks) == [0, 1, 2, 3]
    here, owner = os.stat("/"), scene.runs.run_dir(scene.name).path.stat().st_uid
    for rank, process in ranks.items():
        there = os.stat(f"/proc/{process.pid}/root")
        assert (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)
        assert process.uids().real == owner
        assert process.environ()["SLURMD_NODENAME"] == f"n{rank // 2 + 1}"
