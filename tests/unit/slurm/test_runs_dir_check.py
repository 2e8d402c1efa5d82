"""Which folders other machines see."""

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
def test_the_file_system_of_a_folder(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_this_machines_own() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/somewhere"), "") == ""


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "gpfs", "beegfs", "fuse.juicefs", ""])
def test_what_is_no_disk_of_this_machine_counts_as_shared(kind: str) -> None:
    assert runs_dir_problems(Path("/tmp/runs"), kind, {"n1", "n2"}, "login") == ([], [])


def test_a_folder_that_no_other_machine_sees() -> None:
    wrong, doubts = runs_dir_problems(Path("/tmp/runs"), "ext4", {"n1"}, "login")
    assert doubts == []
    assert wrong == [
        "runs_dir=/tmp/runs: each machine has its own /tmp, and the nodes would not see the run folder:"
        " set runs_dir (or HPCDIST_RUNS_DIR) to a folder on a shared file system"
    ]
    (line,), _ = runs_dir_problems(Path("/scratch"), "tmpfs", {"n1"}, "login")
    assert line.startswith("runs_dir=/scratch: tmpfs is in this machine's memory, and the nodes ")


def test_a_disk_that_this_machine_may_export_is_a_doubt() -> None:
    wrong, doubts = runs_dir_problems(Path("/home/ada/runs"), "xfs", {"n1"}, "login")
    assert wrong == []
    assert doubts == [
        "runs_dir=/home/ada/runs is on xfs, a file system of this machine: the nodes must see it under the same path;"
        " if they do, set cluster.shared_runs=true"
    ]


def test_where_this_machine_is_the_only_node() -> None:
    assert runs_dir_problems(Path("/tmp/runs"), "ext4", {"login"}, "login") == ([], [])
