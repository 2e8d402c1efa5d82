"""Transport between nodes in the log of NCCL; lines as in NVIDIA/nccl issues #952, #707 and #1814."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpcdist.config.topology import Topology
from hpcdist.errors import PreflightError
from hpcdist.rank import collective_check
from hpcdist.rank.collective_check import (
    NOT_SEEN,
    OTHER,
    SOCKETS,
    active_infiniband,
    blame,
    contribution,
    expected,
    judge,
    largest_exact,
    log_env,
    transport,
)
from hpcdist.run.folder import Attempt

TOPOLOGY = Topology(
    rank=2,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    node_rank=1,
    num_nodes=2,
    hosts=("n1", "n2"),
    master_addr="n1",
    master_port=1,
    launcher="slurm",
    job_id="1",
    attempt=1,
)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", NOT_SEEN),
        ("n2:91:115 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read\n", NOT_SEEN),
        (
            "n2:91:91 [0] NCCL INFO NET/IB : No device found.\n"
            "n2:91:91 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0>\n"
            "n2:91:91 [0] NCCL INFO Using network Socket\n",
            SOCKETS,
        ),
        ("n2:91:91 [0] NCCL INFO Using network IB\n", OTHER),
        ("n2:91:91 [0] NCCL INFO Using network AWS Libfabric\n", OTHER),
        ("n2:91:114 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3\n", SOCKETS),
        (
            "n2:91:91 [0] NCCL INFO NET/Socket : Using [0]ib0:10.0.0.2<0>\n"
            "n2:91:114 [0] NCCL INFO Channel 01 : 2[c7000] -> 0[87000] [receive] via NET/IB/5/GDRDMA\n",
            OTHER,
        ),
        ("n2:91:114 [4] NCCL INFO Channel 06/0 : 36[4] -> 20[4] [send] via NET/IBext_v8/3\n", OTHER),
    ],
)
def test_transport_is_read_from_recorded_lines(log: str, expected: int) -> None:
    assert transport(log) == expected


def test_warning_names_the_nodes_that_use_sockets() -> None:
    assert judge([OTHER, NOT_SEEN], ["n1", "n2"]) == []
    (line,) = judge([SOCKETS, OTHER, SOCKETS], ["n1", "n2", "n3"])
    assert line.startswith("NCCL uses TCP sockets on n1, n3, although InfiniBand is active there: ")
    assert "/dev/infiniband" in line


def device(sysfs: Path, name: str, state: str, link: str) -> None:
    port = sysfs / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{link}\n")


def test_nccl_log_is_enabled_on_nodes_with_infiniband(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "001")
    device(tmp_path, "mlx5_1", "1: DOWN", "InfiniBand")
    device(tmp_path, "mlx5_2", "4: ACTIVE", "Ethernet")
    assert active_infiniband(tmp_path) == []
    assert log_env(TOPOLOGY, attempt, {}, tmp_path) == {}
    device(tmp_path, "mlx5_0", "4: ACTIVE", "InfiniBand")
    assert active_infiniband(tmp_path) == ["mlx5_0"]
    wanted = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": f"{tmp_path}/001/nccl.node-00001.log",
    }
    assert log_env(TOPOLOGY, attempt, {}, tmp_path) == wanted
    # Variables of the user take precedence, and only the first rank of a node writes a log.
    assert log_env(TOPOLOGY, attempt, {"NCCL_DEBUG": "WARN"}, tmp_path) == {}
    assert log_env(replace(TOPOLOGY, local_rank=1, rank=3), attempt, {}, tmp_path) == {}
    assert collective_check.file_of(attempt, 1).name == "nccl.node-00001.log"


# --- The all-reduce check: exactness of its sums, and the messages about wrong sums and about a timeout.


NAMES = ["rank 0 on n1", "rank 1 on n1", "rank 2 on n2", "rank 3 on n2"]


@pytest.mark.parametrize(
    ("culprits", "finders", "message"),
    [
        ([0, 0, 3, 0], [1, 1, 0, 1], ": what rank 2 on n2 adds arrives wrong at 3 of 4 ranks; have the node's memory"),
        ([0, 1, 1, 0], [0, 1, 0, 0], " at rank 1 on n1 alone; have the node's memory"),
        ([4, 4, 4, 4], [1, 1, 1, 1], " at 4 of 4 ranks, by no single rank's fault; try another launch.backend"),
        ([0, 0, 0, 0], [1, 1, 0, 0], " at 2 of 4 ranks, by no single rank's fault; try another launch.backend"),
    ],
    ids=["one sender", "one receiver", "all ranks", "several receivers"],
)
def test_message_names_the_rank_only_if_a_single_rank_is_faulty(
    culprits: list[int], finders: list[int], message: str
) -> None:
    text = blame("nccl", "bfloat16", culprits, finders, NAMES)
    assert text.startswith(f"an all-reduce of bfloat16 over nccl gives wrong sums{message}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("num_ranks", [2, 7, 16, 40, 300])
def test_every_partial_sum_is_exact(num_ranks: int, dtype: torch.dtype) -> None:
    """Backends add in any order; here one rank after the other, in the dtype itself."""
    sums = torch.zeros((2, 700), dtype=dtype)
    for rank in range(num_ranks):
        sums += contribution(rank, num_ranks, 700, dtype)
    assert torch.equal(sums, expected(num_ranks, 700, dtype))
    assert (sums[0] > 0).all(), "an element without a contribution would hide a fault"


def test_largest_exact_number_follows_from_the_mantissa() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
    assert [largest_exact(dtype) for dtype in dtypes] == [2**8, 2**11, 2**24, 255]


def test_timeout_error_names_firewall_and_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[PreflightError] = []

    def hang(*_: Any) -> None:
        end = time.monotonic() + 30
        while not errors and time.monotonic() < end:
            time.sleep(0.01)
        raise KeyboardInterrupt  # the real process exits

    monkeypatch.setattr(collective_check, "check_sums", hang)
    fake = cast(Any, SimpleNamespace(control=object(), rank=0))
    with pytest.raises(KeyboardInterrupt):
        collective_check.check(
            "quick", fake, torch.device("cpu"), "nccl", fake, fake, timeout_s=0.01, on_expiry=errors.append
        )
    assert str(errors[0]) == (
        "the ranks are connected, but an all-reduce over nccl did not finish within 0.01 s: does a firewall block"
        " ports between the nodes, or do they have several networks? NCCL_SOCKET_IFNAME selects the interface"
    )
