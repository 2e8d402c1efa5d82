"""A rank that the kernel kills because of a memory limit, in a real control group."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_scene import Scene

from hpcdist.host.cgroups import memory_kills, memory_limit_bytes

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

LIMIT_BYTES = 300 * 2**20
#: Version 1 has a folder for the memory controller.
TOPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
ALLOCATES = "content = b'x' * (400 * 2**20)"


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
        assert scene.parents() == [parent], "the kernel prefers the rank"
    assert (control.exits[0], control.memory_limits) == (-9, {})
    assert (ranks.exits, ranks.memory_limits) == ({0: 0, 1: -9}, {1: LIMIT_BYTES})


def test_kills_and_limits_are_read_in_both_versions(tmp_path: Path) -> None:
    files = {
        "v2/proc/self/cgroup": "0::/slurm/job_41\n",
        "v2/sys/fs/cgroup/slurm/job_41/memory.events": "low 0\nmax 9\noom 3\noom_kill 2\n",
        "v2/sys/fs/cgroup/slurm/job_41/memory.max": "max\n",
        "v1/proc/self/cgroup": "4:memory:/slurm/job_41\n",
        "v1/sys/fs/cgroup/memory/slurm/job_41/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        "v1/sys/fs/cgroup/memory/slurm/job_41/memory.limit_in_bytes": f"{LIMIT_BYTES}\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ((second, num_second),) = memory_kills(tmp_path / "v2").items()
    ((first, num_first),) = memory_kills(tmp_path / "v1").items()
    assert (num_second, memory_limit_bytes(second)) == (2, None)
    assert (num_first, memory_limit_bytes(first)) == (1, LIMIT_BYTES)
