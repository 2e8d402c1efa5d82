"""The group of all nodes, with one process per node on loopback addresses."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from context_scene import new_run
from spawn import Rank, spawn_ranks

#: Time for the nodes to join; the machine may be busy.
JOIN_S = 60.0


def join(here: Rank, run: Path, names: str, missing: int | None = None, join_s: float = JOIN_S) -> dict[str, Any]:
    """Join as the node of this rank, in the environment of a task of srun; one node may be missing."""
    from hpcdist.checks import node_group

    number, size = here.rank, here.world_size
    os.environ |= {
        "SLURM_JOB_ID": str(os.getppid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(number),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": names,
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})",
        "HPCDIST_ATTEMPT": "1",
    }
    dist.destroy_process_group()  # that of the tests
    found = {} if number == missing else node_group.join(run, 1, join_s)
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it at run time
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # for the end of the test's ranks
    return found


def run_folder(folder: Path) -> Path:
    run = new_run(folder)
    run.new_attempt()
    return run.path


def test_nodes_time_a_computation_and_transfers(tmp_path: Path) -> None:
    found = spawn_ranks(join, 3, run=run_folder(tmp_path), names="127.0.0.[1-3]")
    assert [group.get("error") for group in found] == [None] * 3
    names = {f"127.0.0.{number}" for number in (1, 2, 3)}
    for number, group in enumerate(found, 1):
        others = names - {f"127.0.0.{number}"}
        assert group["joined"]
        assert group["connections"] == dict.fromkeys(others, "")
        assert group["received_s"].keys() == others
        assert min(group["compute_s"], *group["received_s"].values()) > 0


def test_unreachable_node_is_seen_by_all_others(tmp_path: Path) -> None:
    found = spawn_ranks(join, 3, run=run_folder(tmp_path), names="127.0.0.1,127.0.0.2,n3.invalid")
    assert [group.get("error") for group in found] == [None] * 3
    assert [bool(group["connections"].get("n3.invalid")) for group in found] == [True, True, False]
    assert not any("received_s" in group for group in found), "gloo would fail without naming the connection"


@pytest.mark.parametrize(("missing", "join_s"), [(0, 1.0), (2, 10.0)])
def test_nodes_do_not_wait_longer_than_asked(tmp_path: Path, missing: int, join_s: float) -> None:
    """Without the first node none joins; without the last one the others do, for which a busy machine needs seconds."""
    found = spawn_ranks(join, 3, run=run_folder(tmp_path), names="127.0.0.[1-3]", missing=missing, join_s=join_s)
    present = [group for number, group in enumerate(found) if number != missing]
    assert [group["joined"] for group in present] == [missing != 0] * 2
    assert all(group["error"] for group in present)
