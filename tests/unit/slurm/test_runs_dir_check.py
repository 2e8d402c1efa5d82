"""Which folders other machines see."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.slurm.submit.runs_dir_check import runs_dir_problems


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
