"""Device and backend of a rank. Tests with GPUs replace the functions of torch that find them."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from launcher_env import OWN, STEP, Env, topology_of
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hpcdist.config.cluster_schema import ClusterConfig, RoleRequest
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.config.topology import Topology
from hpcdist.errors import ConfigError, PreflightError, TopologyError
from hpcdist.rank import collective_check
from hpcdist.rank.collective_check import blame, log_env, terms, uses_tcp
from hpcdist.rank.device import (
    Device,
    bind_to_cpus,
    cpus_beside,
    gpu_index,
    listed,
    ranks_on_node,
    refuse_shared_gpu,
    select_device,
)
from hpcdist.run.folder import Attempt

HYBRID = {"master": 1, "trainer": 2, "parameter_server": 1}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "cuda", 2)


def see(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Let torch be built for a type of GPU, of which this process sees `count`."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda _: True)
    module = SimpleNamespace(get_device_properties=lambda _: properties("8932f937-d72c"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)


def properties(uuid: str) -> SimpleNamespace:
    """Return the properties of a GPU as torch does."""
    address = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0}
    return SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, uuid=uuid, **address)


def place_all(config: Config) -> list[tuple[str, str]]:
    """Return device and backend of each of four ranks on one node."""
    found = [select_device(config, topology_of(number, 4), {}) for number in range(4)]
    return [(str(each.device), each.backend) for each in found]


@pytest.mark.usefixtures("two_gpus")
def test_gpus_go_to_the_trainers_if_other_roles_use_the_cpu() -> None:
    expected = [("cpu", "gloo"), ("cuda:0", "gloo"), ("cuda:1", "gloo"), ("cpu", "gloo")]
    by_device = Config(roles=HYBRID, launch=LaunchConfig(devices={"master": "cpu", "parameter_server": "cpu"}))
    assert place_all(by_device) == expected
    by_request = Config(roles=HYBRID, cluster=ClusterConfig(roles={"trainer": RoleRequest(gpus_per_node=2)}))
    assert place_all(by_request) == expected
    of_all = select_device(Config(roles={"agent": 1, "observer": 1}), topology_of(1, 2), {})
    assert str(of_all) == "cuda:1 (NVIDIA H100 80GB HBM3, 80 GiB), nccl"
    assert (of_all.uuid, of_all.pci) == ("GPU-8932f937-d72c", "0000:1b:00.0")


@pytest.mark.parametrize(
    ("asked", "built_for", "found"),
    [
        ("auto", "cuda", ("cuda:0", "nccl")),
        ("xpu", "xpu", ("xpu:0", "xccl")),
        ("auto", "xpu", ("cpu", "gloo")),  # a local run has counted no GPU of NVIDIA
        ("cpu", "cuda", ("cpu", "gloo")),
    ],
)
def test_type_of_gpu(monkeypatch: pytest.MonkeyPatch, asked: Any, built_for: str, found: tuple[str, str]) -> None:
    see(monkeypatch, built_for, 1)
    placed = select_device(Config(launch=LaunchConfig(device=asked)), topology_of(0, 1), {})
    assert (str(placed.device), placed.backend) == found


def test_role_that_requires_a_gpu_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "cuda", 0)
    config = Config(roles=HYBRID, launch=LaunchConfig(devices={"trainer": "cuda"}))
    assert select_device(config, topology_of(0, 4), {}).device.type == "cpu"
    with pytest.raises(ConfigError, match=r"^launch\.devices\.trainer=cuda, but no GPU is visible here: use "):
        select_device(config, topology_of(1, 4), {})
    see(monkeypatch, "cuda", 4)  # of another type
    with pytest.raises(ConfigError, match=r"^launch\.device=xpu, but no GPU is visible here: use launch\.device=auto "):
        select_device(Config(launch=LaunchConfig(device="xpu")), topology_of(0, 1), {})


def test_devices_of_all_ranks_are_counted_by_name() -> None:
    assert listed(["CPU", "CPU"]) == "CPU"
    assert listed(["CPU", "NVIDIA A100", "NVIDIA A100"]) == "1 × CPU, 2 × NVIDIA A100"


def test_ranks_on_node_follow_the_distribution() -> None:
    cyclic = STEP | {"SLURM_GTIDS": "1,4,5"}
    assert ranks_on_node(Topology.from_env(cyclic), cyclic) == [1, 4, 5]
    assert ranks_on_node(Topology.from_env(OWN), OWN) == [2, 3]
    assert ranks_on_node(Topology.from_env(STEP), STEP) == [0, 1, 2]
    wrong = STEP | {"SLURM_GTIDS": "3,x"}
    with pytest.raises(TopologyError, match=r"^SLURM_GTIDS: must be whole numbers separated by commas, got '3,x'; "):
        ranks_on_node(Topology.from_env(wrong), wrong)


# --- GPU of each rank: the table in docs/how-to/gpus.md. A task sees the GPUs that its cgroup admits and
# CUDA_VISIBLE_DEVICES selects, here as torch counts them.


def gpus_of(monkeypatch: pytest.MonkeyPatch, visible: list[str], env: Env) -> list[str]:
    """Return the GPU of each rank of a node, or the error of the first rank that is refused.

    Args:
        visible: the GPUs that each rank sees, a letter each.
    """
    store, found = HashStore(), []
    for rank, gpus in enumerate(visible):
        see(monkeypatch, "cuda", len(gpus))
        index = gpu_index(rank, len(visible), torch.accelerator.device_count())
        module = SimpleNamespace(get_device_properties=lambda device, gpus=gpus: properties(gpus[device.index]))
        monkeypatch.setattr(torch, "get_device_module", lambda _, module=module: module)
        device = torch.device("cpu") if index is None else torch.device("cuda", index)
        refuse_shared_gpu(device, topology_of(rank, len(visible)), store, env)
        found.append("" if index is None else gpus[index])
    return found


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        pytest.param(["abcd"] * 4, "a b c d", id="--gpus-per-node=4, --gpu-bind=none"),
        pytest.param(["a", "b", "c", "d"], "a b c d", id="--gpus-per-task=1, with or without constrained devices"),
        pytest.param(["ab", "cd"], "a d", id="--gpus-per-task=2, two tasks"),
        pytest.param(["ab", "cd", "ef", "gh"], "a c e g", id="--gpus-per-task=2, four tasks"),
        pytest.param(["d", "c", "b", "a"], "d c b a", id="--gpu-bind=single:1 or map_gpu:3,2,1,0"),
        pytest.param(["abcd"] * 2, "a b", id="variable not set, two of four GPUs"),
        pytest.param(["cd"] * 2, "c d", id="indices 2,3 or UUIDs"),
        pytest.param(["x", "y"], "x y", id="a UUID or a MIG slice for each task"),
        pytest.param(["x"], "x", id="two MIG slices, one rank"),
        pytest.param(["", ""], " ", id="empty string"),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, visible: list[str], expected: str) -> None:
    assert gpus_of(monkeypatch, visible, {}) == expected.split(" ")


@pytest.mark.parametrize(
    ("visible", "env", "rank", "known"),
    [
        pytest.param(["ab"] * 4, {}, 1, "CUDA_VISIBLE_DEVICES not set", id="more ranks than GPUs"),
        pytest.param(["a"] * 2, {"CUDA_VISIBLE_DEVICES": "0,7"}, 1, "CUDA_VISIBLE_DEVICES=0,7", id="index without GPU"),
        pytest.param(
            ["a", "b", "a", "b"],
            {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0"},
            2,
            "SLURM_GPUS_ON_NODE=2, CUDA_VISIBLE_DEVICES=0",
            id="--ntasks-per-gpu=2",
        ),
        pytest.param(["ab", "ab", "cd", "cd"], {}, 1, "CUDA_VISIBLE_DEVICES not set", id="--gpu-bind=closest"),
        pytest.param(["x"] * 2, {"CUDA_VISIBLE_DEVICES": "MIG-x,MIG-y"}, 1, "CUDA_VISIBLE_DEVICES=M", id="MIG slices"),
        pytest.param(
            ["a"] * 2, {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0"}, 1, "SLURM_", id="0 in launch.env"
        ),
    ],
)
def test_two_ranks_on_a_gpu_are_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, visible: list[str], env: Env, rank: int, known: str
) -> None:
    with pytest.raises(TopologyError) as caught:
        gpus_of(monkeypatch, visible, env)
    text = str(caught.value)
    assert text.startswith(f"rank {rank} sees {len(visible[rank])} GPU(s) ({known}")
    assert f" would use the same one as another of {len(visible)} ranks on its node, GPU-{visible[rank][0]}; " in text
    assert text.endswith(
        "request a GPU for each rank (Slurm: --gpus-per-node and --gpu-bind=none), start fewer ranks"
        " (launch.num_ranks), or leave CUDA_VISIBLE_DEVICES unset"
    )


def test_gpus_of_other_nodes_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "cuda", 1)
    store, gpu = HashStore(), torch.device("cuda", 0)
    for rank in (0, 1):
        refuse_shared_gpu(gpu, topology_of(rank, 2, 2, hosts=("n1", "n2")), store, {})


@pytest.mark.parametrize(
    ("near", "num_ranks", "env", "bound"),
    [
        ("0-1,4", 1, {}, {0, 1}),
        ("0-3", 1, {}, None),  # one NUMA node
        ("4-7", 1, {}, None),
        ("0", 1, {}, None),  # fewer than the threads
        ("0-1", 2, {}, None),  # fewer than the threads of both ranks with GPUs there
        ("0-1", 1, {"SLURM_CPU_BIND_TYPE": "mask_cpu:"}, None),
        ("0-1", 1, {"SLURM_CPU_BIND_TYPE": "none"}, {0, 1}),
        ("", 1, {}, None),  # a CPU, or unknown
    ],
)
def test_rank_uses_the_cpus_beside_its_gpu(
    monkeypatch: pytest.MonkeyPatch, near: str, num_ranks: int, env: Env, bound: set[int] | None
) -> None:
    calls: list[set[int]] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cpus: calls.append(cpus))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    bind_to_cpus(near, num_ranks, env)
    assert calls == ([] if bound is None else [bound])


def test_linux_lists_the_cpus_beside_a_pci_device(tmp_path: Path) -> None:
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-1,4\n")
    gpu = Device(device=torch.device("cuda", 0), backend="nccl", pci=folder.name)
    assert cpus_beside(gpu, tmp_path) == "0-1,4"
    assert cpus_beside(replace(gpu, pci="0000:1c:00.0"), tmp_path) == cpus_beside(replace(gpu, pci=""), tmp_path) == ""


# --- Transport between nodes in the log of NCCL; lines as in NVIDIA/nccl issues #952, #707 and #1814.


TOPOLOGY = topology_of(2, 4, 2, hosts=("n1", "n2"), master_addr="n1", launcher="slurm")


@pytest.mark.parametrize(
    ("log", "is_tcp"),
    [
        ("", False),
        (
            "n2:91:91 [0] NCCL INFO NET/IB : No device found.\n"
            "n2:91:91 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0>\n"
            "n2:91:91 [0] NCCL INFO Using network Socket\n",
            True,
        ),
        ("n2:91:91 [0] NCCL INFO Using network AWS Libfabric\n", False),
        ("n2:91:114 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3\n", True),
        (
            "n2:91:91 [0] NCCL INFO Using network Socket\n"
            "n2:91:114 [0] NCCL INFO Channel 01 : 2[c7000] -> 0[87000] [receive] via NET/IB/5/GDRDMA\n",
            False,
        ),
    ],
)
def test_transport_is_read_from_recorded_lines(log: str, is_tcp: bool) -> None:
    assert uses_tcp(log) == is_tcp


def device(sysfs: Path, name: str, state: str, link: str) -> None:
    port = sysfs / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{link}\n")


def test_nccl_log_is_enabled_on_nodes_with_infiniband(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "001")
    device(tmp_path, "mlx5_1", "1: DOWN", "InfiniBand")
    device(tmp_path, "mlx5_2", "4: ACTIVE", "Ethernet")
    assert log_env(TOPOLOGY, attempt, {}, tmp_path) == {}
    device(tmp_path, "mlx5_0", "4: ACTIVE", "InfiniBand")
    wanted = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": f"{tmp_path}/001/nccl.node-00001.log",
    }
    assert log_env(TOPOLOGY, attempt, {}, tmp_path) == wanted
    # Variables of the user take precedence, and only the first rank of a node writes a log.
    assert log_env(TOPOLOGY, attempt, {"NCCL_DEBUG": "WARN"}, tmp_path) == {}
    assert log_env(replace(TOPOLOGY, local_rank=1, rank=3), attempt, {}, tmp_path) == {}


# --- The all-reduce check: exactness of its sums, and the messages about wrong sums and about a timeout.


NAMES = ["rank 0 on n1", "rank 1 on n1", "rank 2 on n2", "rank 3 on n2"]


@pytest.mark.parametrize(
    ("culprits", "finders", "message"),
    [
        (
            [0, 0, 3, 0],
            [1, 1, 0, 1],
            ": the values of rank 2 on n2 arrive wrong at 3 of 4 ranks; have the node's memory",
        ),
        ([0, 1, 1, 0], [0, 1, 0, 0], " at rank 1 on n1 alone; have the node's memory"),
        ([0, 0, 0, 0], [1, 1, 0, 0], " at 2 of 4 ranks, by no single rank's fault; have the network"),
    ],
    ids=["one sender", "one receiver", "several receivers"],
)
def test_message_names_the_rank_only_if_a_single_rank_is_faulty(
    culprits: list[int], finders: list[int], message: str
) -> None:
    text = blame("nccl", "bfloat16", culprits, finders, NAMES)
    assert text.startswith(f"an all-reduce of bfloat16 over nccl gives wrong sums{message}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("num_ranks", [2, 7, 300])
def test_every_partial_sum_is_exact(num_ranks: int, dtype: torch.dtype) -> None:
    """Backends add in any order; here one rank after the other, in the dtype itself."""
    sums = torch.zeros((2, 700), dtype=dtype)
    for rank in range(num_ranks):
        own, expected = terms(rank, num_ranks, 700, dtype)
        sums += own
    assert torch.equal(sums, expected)
    assert (sums[0] > 0).all(), "an element without a contribution would hide a fault"


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
        collective_check.check(fake, torch.device("cpu"), "nccl", fake, fake, timeout_s=0.01, on_expiry=errors.append)
    assert str(errors[0]) == (
        "the ranks are connected, but an all-reduce over nccl did not finish within 0.01 s: does a firewall block"
        " ports between the nodes, or do they have several networks? NCCL_SOCKET_IFNAME selects the interface"
    )
