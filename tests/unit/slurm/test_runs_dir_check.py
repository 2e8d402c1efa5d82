"""The check that the nodes can see the runs folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.machine.storage import file_system
from hpcdist.slurm.submit.runs_dir_check import runs_dir_problems

MOUNTS = """\
22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /home rw shared:2 master:3 - nfs4 server:/home rw,vers=4.2
24 22 0:22 / /my\\040data rw - lustre mds:/data rw
25 22 0:23 / /home/ada/scratch rw - xfs /dev/sdb rw
26 22 0:24 / /over rw - ext4 /dev/sdc rw
27 26 0:25 / /over rw - beegfs beegfs_nodev rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/ada/runs", "nfs4"),
        ("/homeless/runs", "ext4"),
        ("/my data/runs", "lustre"),
        ("/home/ada/scratch/runs", "xfs"),
        ("/over", "beegfs"),
    ],
)
def test_file_system_of_a_folder(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_file_system_of_this_machine() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/somewhere"), "") == ""


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "gpfs", "beegfs", "fuse.juicefs", ""])
def test_network_and_unknown_file_systems_count_as_shared(kind: str) -> None:
    assert runs_dir_problems(Path("/tmp/runs"), kind, {"n1", "n2"}, "login") == ([], [])


def test_temporary_and_memory_file_systems_are_errors() -> None:
    errors, warnings = runs_dir_problems(Path("/tmp/runs"), "ext4", {"n1"}, "login")
    assert warnings == []
    assert errors == [
        "runs_dir=/tmp/runs: each machine has its own /tmp, and the nodes would not see the run folder:"
        " set runs_dir (or HPCDIST_RUNS_DIR) to a folder on a shared file system"
    ]
    (line,), _ = runs_dir_problems(Path("/scratch"), "tmpfs", {"n1"}, "login")
    assert line.startswith("runs_dir=/scratch: tmpfs is in this machine's memory, and the nodes ")


def test_local_disk_that_may_be_exported_is_a_warning() -> None:
    errors, warnings = runs_dir_problems(Path("/home/ada/runs"), "xfs", {"n1"}, "login")
    assert errors == []
    assert warnings == [
        "runs_dir=/home/ada/runs is on xfs, a file system of this machine: the nodes must see it under the same path;"
        " if they do, set cluster.shared_runs=true"
    ]


def test_any_folder_is_valid_if_this_machine_is_the_only_node() -> None:
    assert runs_dir_problems(Path("/tmp/runs"), "ext4", {"login"}, "login") == ([], [])
