"""The check that the nodes can see the runs folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.slurm.job.submit_checks import runs_dir_problems


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
