"""Additional flags of sbatch and srun, with a fake sbatch that accepts two flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.config.launch_schema import ClusterConfig
from hpcdist.slurm.flags import conflicting_flags, option_value, rejected_flags

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


@pytest.fixture
def fake_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the fake sbatch; its file `calls` contains the arguments of each call."""
    (tmp_path / "sbatch").write_text(
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/calls
for option in "$@"; do case "$option" in
    --mail-type=FAIL|--exclusive) ;;
    --begin=*) echo 'Invalid time specification (pos=0): x' >&2; echo 'sbatch: error: Invalid --begin specification' >&2
        exit 255 ;;
    --help) exit 0 ;;
    *) echo "sbatch: unrecognized option '$option'" >&2; echo 'Try "sbatch --help" for more' >&2; exit 255 ;;
esac; done
"""
    )
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_flags_that_hpcdist_sets_are_rejected() -> None:
    cluster = ClusterConfig(
        sbatch={"nodes": "3", "time": "1", "output": "x", "N": "3", "mail-type": "FAIL", "ntasks_per_node": "2"},
        srun={"--mpi": "none", "cpus-per-task": "2", "kill-on-bad-exit": "0", "mpi": "none"},
    )
    assert conflicting_flags(cluster) == [
        "cluster.sbatch.nodes repeats a key of the config: use cluster.nodes",
        "cluster.sbatch.time repeats a key of the config: use cluster.time_limit_min",
        "cluster.sbatch.output: hpcdist sets --output itself: remove it",
        "cluster.sbatch.N: write the flag's long name without dashes, such as mail-type",
        "cluster.sbatch.ntasks_per_node repeats a key of the config: use cluster.tasks_per_node",
        "cluster.srun.--mpi: write the flag's long name without dashes, such as mail-type",
        "cluster.srun.cpus-per-task repeats a key of the config: use cluster.cpus_per_task",
        "cluster.srun.kill-on-bad-exit: hpcdist sets --kill-on-bad-exit itself: remove it",
    ]


def test_flags_of_runs_that_outlive_nodes_are_free_for_others() -> None:
    flags = {"no-kill": "true", "mincpus": "2"}
    assert conflicting_flags(ClusterConfig(nodes=2, sbatch=flags)) == []
    assert conflicting_flags(ClusterConfig(nodes=2, spare_nodes=1, sbatch=flags)) == [
        "cluster.sbatch.no-kill repeats a key of the config: use cluster.min_nodes or cluster.spare_nodes"
    ]
    assert len(conflicting_flags(ClusterConfig(nodes=2, min_nodes=1, sbatch=flags))) == 2


def test_valid_flags_take_one_call_of_sbatch(fake_sbatch: Path) -> None:
    assert rejected_flags("sbatch", {}) == []
    assert not (fake_sbatch / "calls").exists()
    assert rejected_flags("sbatch", {"mail-type": "FAIL", "exclusive": "true", "mail-user": "false"}) == []
    assert (fake_sbatch / "calls").read_text() == "--mail-type=FAIL --exclusive --help\n"


def test_each_rejected_flag_is_reported(fake_sbatch: Path) -> None:
    flags = {"mail-typ": "FAIL", "mail-type": "FAIL", "nodes": "3", "begin": "x"}
    why = "sbatch rejects it: Invalid time specification (pos=0): x; Invalid --begin specification"
    assert rejected_flags("sbatch", flags, options={"begin"}) == [
        "cluster.sbatch.mail-typ=FAIL: sbatch has no such flag",
        f"--begin x: {why}",
    ]
    assert rejected_flags("sbatch", {"begin": "x"}) == [f"cluster.sbatch.begin=x: {why}"]


def test_flags_are_not_checked_without_srun(fake_sbatch: Path) -> None:
    assert rejected_flags("srun", {"foo": "1"}) == []


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("false", None), ("", ""), ("user", "user")]
)
def test_flags_without_a_value(text: str, value: str | bool | None) -> None:
    assert option_value(text) == value
