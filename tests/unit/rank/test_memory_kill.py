"""A rank that the kernel kills because of a memory limit, in a real control group."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_scene import Scene

from hpcdist.host.cgroups import MemoryCounts, MemoryKill, memory_counts, memory_kill, memory_limit_bytes

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

LIMIT_BYTES = 300 * 2**20
#: Version 1 has a folder for the memory controller.
TOPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
ALLOCATES = "content = b'x' * (400 * 2**20)"
CHILD_ALLOCATES = f"""
import subprocess, sys
assert subprocess.run([sys.executable, "-c", {ALLOCATES!r}]).returncode == -9
"""
LIMIT = MemoryKill(count=1, scope="group", limit_bytes=LIMIT_BYTES)


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group with a memory limit and without swap."""
    top = next((top for top in TOPS if (top / "cgroup.procs").exists()), None)
    if top is None or os.geteuid() != 0:
        pytest.skip("needs root and control groups")
    folder = top / f"hpcdist-test-{os.getpid()}"
    try:
        folder.mkdir()
        version_1 = (folder / "memory.limit_in_bytes").exists()
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"control groups cannot be created here: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.lost_night
def test_rank_killed_for_memory_is_told_from_other_kills(tmp_path: Path, runs_dir: Path, limited_group: Path) -> None:
    scene = Scene(tmp_path / "code", runs_dir)
    with scene.launcher:
        scene.finish("pass", "pass")  # the parent has finished its imports
        (parent,) = scene.parents()
        (limited_group / "cgroup.procs").write_text(str(parent))
        _, control = scene.start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "pass")
        while control.remaining:
            control.wait(20.0)
        control.close()
        _, ranks = scene.start("pass", ALLOCATES)
        while ranks.remaining:
            ranks.wait(20.0)
        ranks.close()
        _, beside = scene.start(CHILD_ALLOCATES, "pass")
        while beside.remaining:
            beside.wait(20.0)
        beside.close()
        assert scene.parents() == [parent], "the kernel prefers the rank"
    assert (control.exits[0], control.memory_kills) == (-9, {})
    assert (ranks.exits, ranks.memory_kills[1]) == ({0: 0, 1: -9}, LIMIT)
    assert (beside.exits, beside.memory_kills[0]) == ({0: 0, 1: 0}, LIMIT), "a child of a rank that succeeds"


def write_groups(root: Path, own: str, groups: dict[str, tuple[int, int, int | None]]) -> None:
    """Write control groups of version 2: by path, kills, hits of the limit, and the limit in MiB."""
    files = {"proc/self/cgroup": f"0::{own}\n", "proc/meminfo": "MemTotal:       16384 kB\n"}
    for path, (kills, hits, limit_mib) in groups.items():
        limit = "max" if limit_mib is None else limit_mib * 2**20
        files |= {
            f"sys/fs/cgroup{path}/memory.events": f"low 0\nmax 9\noom 99\noom_kill {kills}\n",
            f"sys/fs/cgroup{path}/memory.events.local": f"low 0\nmax 9\noom {hits}\noom_kill 0\n",
            f"sys/fs/cgroup{path}/memory.max": f"{limit}\n",
        }
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


SLURM = "/system.slice/slurmstepd.scope/job_41"


@pytest.mark.lost_night
@pytest.mark.parametrize(
    ("own", "groups", "expected"),
    [
        (f"{SLURM}/step_0/task_0", {f"{SLURM}/step_0/task_0": (1, 0, None), f"{SLURM}/step_0": (1, 1, 90),
         SLURM: (1, 0, 90)}, ("step", 90)),
        (f"{SLURM}/step_0/task_0", {f"{SLURM}/step_0/task_0": (1, 0, None), f"{SLURM}/step_0": (1, 0, 90),
         SLURM: (1, 1, 90)}, ("job", 90)),
        # In a container with a name space of its own, and in one without.
        ("/", {"/": (1, 1, 70)}, ("container", 70)),
        ("/docker/af31", {"/docker/af31": (1, 1, 70), "/docker": (1, 0, None)}, ("container", 70)),
        ("/a.slice/libpod-af31.scope", {"/a.slice/libpod-af31.scope": (1, 1, 70)}, ("container", 70)),
        ("/user.slice/user-7.slice", {"/user.slice/user-7.slice": (1, 1, 50)}, ("group", 50)),
        # The kernel counts kills in a group with a limit also if the machine's memory is exhausted.
        ("/user.slice/user-7.slice", {"/user.slice/user-7.slice": (1, 0, 50)}, ("machine", 16)),
        # A task of the same step that is killed is not of this group.
        (f"{SLURM}/step_0/task_0", {f"{SLURM}/step_0/task_0": (0, 0, None), f"{SLURM}/step_0": (1, 1, 90)}, None),
    ],
)  # fmt: skip
def test_kill_is_told_apart_by_whose_memory_was_exhausted(
    tmp_path: Path, own: str, groups: dict[str, tuple[int, int, int | None]], expected: tuple[str, int] | None
) -> None:
    write_groups(tmp_path, own, {path: (0, 0, limit) for path, (_, _, limit) in groups.items()})
    before = memory_counts(tmp_path)
    assert memory_kill(before, tmp_path) is None
    write_groups(tmp_path, own, groups)
    kill = memory_kill(before, tmp_path)
    assert (None if kill is None else (kill.scope, kill.limit_bytes // 2**20)) == expected


def test_kills_and_limits_are_read_in_both_versions(tmp_path: Path) -> None:
    files = {
        "v2/proc/self/cgroup": "0::/slurm/job_41\n",
        "v2/sys/fs/cgroup/slurm/job_41/memory.events": "low 0\nmax 9\noom 3\noom_kill 2\n",
        "v2/sys/fs/cgroup/slurm/job_41/memory.max": "max\n",
        "v1/proc/self/cgroup": "4:memory:/slurm/job_41\n",
        "v1/sys/fs/cgroup/memory/slurm/job_41/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        "v1/sys/fs/cgroup/memory/slurm/job_41/memory.limit_in_bytes": f"{LIMIT_BYTES}\n",
        "v1/sys/fs/cgroup/memory/slurm/job_41/memory.failcnt": "7\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ((second, second_counts),) = memory_counts(tmp_path / "v2").items()
    ((first, first_counts),) = memory_counts(tmp_path / "v1").items()
    assert (second_counts, memory_limit_bytes(second)) == (MemoryCounts(kills=2, hits=3), None)
    assert (first_counts, memory_limit_bytes(first)) == (MemoryCounts(kills=1, hits=7), LIMIT_BYTES)
    (first / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit_bytes(first) is None, "as version 1 shows that there is no limit"
