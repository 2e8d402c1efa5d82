"""Transport between nodes in the log of NCCL; lines as in NVIDIA/nccl issues #952, #707 and #1814."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config.topology import Topology
from hpcdist.rank import collective_check
from hpcdist.rank.collective_check import NOT_SEEN, OTHER, SOCKETS, active_infiniband, judge, log_env, transport
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
