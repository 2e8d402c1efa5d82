"""Container runtimes of the matrix runtime x fault: what each one needs on this machine, and what it must not leave."""

import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from containers import RUNTIMES, STORE, Containers, mount_flags, small_image
from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, LAST_STEP, wait_for
from slurm_cluster import DevCluster
from slurm_faults import DDP, FaultScene, Subject
from slurm_runs import SlurmRuns

from hpcdist.devcluster import node_faults
from hpcdist.devcluster import settings as devcluster_settings
from hpcdist.host.machine import CAP_SYS_RESOURCE, has_capability
from hpcdist.supervisor.hang import find_ranks

#: enroot's state of all nodes, see scripts/runtimes/enroot.sh.
ENROOT_STATE = Path("/tmp/enroot-state")
PYXIS = RUNTIMES / "pyxis/spank_pyxis.so"
#: Nothing of a container is left on a node this long after its job.
REMOVAL_TIMEOUT_S = 120.0
#: Processes of a node that outlive jobs.
_DAEMONS = ("slurmd", "slurmstepd")
#: Beginnings of the types of file systems that squashfuse, squashfuse_ll and fuse-overlayfs mount.
_IMAGE_MOUNTS = ("fuse.squash", "fuse.fuse-overlayfs")


@dataclass(frozen=True)
class RuntimeCase:
    """A runtime with one form of image, ready to use on the nodes of the dev cluster."""

    name: str
    overrides: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)  #: of whoever submits; it reaches the job
    #: Remove what the disk of a dead node has kept.
    restore: Callable[[], None] = lambda: None
    #: Mounts of this machine that other sessions have made.
    earlier_mounts: frozenset[str] = frozenset()

    @property
    def runtime(self) -> str:
        return self.name.partition("-")[0]


_APPTAINER, _ENROOT = str(RUNTIMES / "apptainer/bin/apptainer"), str(RUNTIMES / "enroot/bin/enroot")
#: The programs that each case needs.
_PROGRAMS = {
    "apptainer-folder": [_APPTAINER],
    "apptainer-sif": [_APPTAINER, "mksquashfs"],
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
def prepared(case: str, containers: Containers, runs: SlurmRuns) -> Iterator[RuntimeCase]:
    """Prepare a runtime on the nodes for the duration of the block."""
    image = small_image(containers)
    runtime = case.partition("-")[0]
    flags = ",".join(f"'{flag}'" for flag in mount_flags(runtime))
    settings = [f"container.mounts=[{runs.no_mlflow}]", f"container.extra_args=[{flags}]"]
    earlier = frozenset(container_mounts(runs.cluster))

    def ready(reference: Path, program: str, env: Mapping[str, str], restore: Callable[[], None]) -> RuntimeCase:
        own = (f"container.runtime={runtime}", f"container.image={reference}")
        path = f"{RUNTIMES / program / 'bin'}:{os.environ['PATH']}"
        return RuntimeCase(case, (*own, *settings), {"PATH": path, **env}, restore, earlier)

    if runtime == "apptainer":
        reference = image.folder if case == "apptainer-folder" else image.sif(_APPTAINER)
        yield ready(reference, "apptainer", apptainer_env(), lambda: None)
        return
    ENROOT_STATE.mkdir(exist_ok=True)
    ENROOT_STATE.chmod(0o1777)
    # Of a killed test session, whose nodes had the same namespaces: the kernel uses their numbers again.
    remove_enroot_state(runs.cluster)
    reference = image.folder if case == "enroot-folder" else image.sqsh
    with pyxis_plugin(runs.cluster) if case == "pyxis" else nullcontext():
        yield ready(reference, "enroot", {}, lambda: remove_enroot_state(runs.cluster))


def apptainer_env() -> dict[str, str]:
    """Return the variables without which apptainer does not start for a root without all capabilities."""
    return {} if has_capability(CAP_SYS_RESOURCE) else {"APPTAINER_DROP_CAPS": "CAP_SYS_RESOURCE"}


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
        node_faults.kill_node(cluster.layout, node, keep_link=True)
    for node in cluster.settings.nodes:
        node_faults.start_node(cluster.layout, node)
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
        lost: nodes that keep unpacked files on their disks, for example after a power failure.
    """

    def left() -> list[str]:
        return [*left_on_nodes(runs.cluster, lost), *(container_mounts(runs.cluster) - case.earlier_mounts)]

    try:
        wait_for(lambda: not left(), "everything to be removed", timeout_s=REMOVAL_TIMEOUT_S)
    except AssertionError as error:
        raise AssertionError(f"left of {name}: {left()}") from error


# --- Runs of the matrix of container runtimes and faults.


def subject_of(runtime: RuntimeCase) -> Subject:
    """Return the subject of fault injection with ranks in containers of a runtime."""
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
    if owner == os.getuid():  # the supervisor's own search for ranks, which sees those of its user
        found = [
            rank.rank for node in ("n1", "n2") for rank in find_ranks(scene.runs.run_dir(scene.name).path, 1, node)
        ]
        assert found == [0, 1, 2, 3]
