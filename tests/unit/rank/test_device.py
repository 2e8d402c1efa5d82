"""Device and backend of a rank. Tests with GPUs replace the functions of torch that find them."""

from __future__ import annotations

import re

import pytest
import torch
from launcher_env import HET, OWN, STEP, Env

from hpcdist.config.launch_schema import ClusterConfig, LaunchConfig, RoleRequest
from hpcdist.config.schema import Config
from hpcdist.config.topology import Topology
from hpcdist.errors import ConfigError, TopologyError
from hpcdist.rank.device import cuda_index, place, ranks_on_node

HYBRID = {"master": 1, "trainer": 2, "parameter_server": 1}


def rank_of_node(number: int, world_size: int = 4) -> Topology:
    """Return the topology of a rank on a single node."""
    return Topology(
        rank=number,
        world_size=world_size,
        local_rank=number,
        local_world_size=world_size,
        node_rank=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=1,
        launcher="hpcdist",
        job_id="1",
        attempt=1,
    )


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr("hpcdist.rank.device.dist.is_nccl_available", lambda: True)


def place_all(config: Config) -> list[tuple[str, str]]:
    """Return device and backend of each of four ranks on one node."""
    found = [place(config, rank_of_node(number), {}) for number in range(4)]
    return [(str(device), backend) for device, backend in found]


@pytest.mark.usefixtures("two_gpus")
def test_gpus_go_to_the_trainers_if_other_roles_use_the_cpu() -> None:
    expected = [("cpu", "gloo"), ("cuda:0", "gloo"), ("cuda:1", "gloo"), ("cpu", "gloo")]
    by_device = Config(roles=HYBRID, launch=LaunchConfig(devices={"master": "cpu", "parameter_server": "cpu"}))
    assert place_all(by_device) == expected
    by_request = Config(roles=HYBRID, cluster=ClusterConfig(roles={"trainer": RoleRequest(gpus_per_node=2)}))
    assert place_all(by_request) == expected


@pytest.mark.usefixtures("two_gpus")
def test_more_ranks_with_gpus_than_visible_gpus_are_refused() -> None:
    with pytest.raises(Exception, match=r"sees 2 GPU\(s\) .*, but 3 ranks use GPUs on its node"):
        place_all(Config(roles=HYBRID, launch=LaunchConfig(devices={"master": "cpu"})))


@pytest.mark.usefixtures("two_gpus")
def test_ranks_that_all_use_gpus_use_nccl() -> None:
    config = Config(roles={"agent": 1, "observer": 1})
    assert place(config, rank_of_node(1, 2), {}) == (torch.device("cuda", 1), "nccl")


def test_role_that_requires_a_gpu_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = Config(roles=HYBRID, launch=LaunchConfig(devices={"trainer": "cuda"}))
    assert str(place(config, rank_of_node(0), {})[0]) == "cpu"
    with pytest.raises(ConfigError, match=r"^launch\.devices\.trainer=cuda, but no GPU is visible here: use "):
        place(config, rank_of_node(1), {})


def test_roles_that_do_not_add_up_to_the_world_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^roles add up to 4 ranks \(.*\), but 2 were started$"):
        place(Config(roles=HYBRID), rank_of_node(0, 2), {})


def test_ranks_on_node_follow_the_distribution() -> None:
    assert ranks_on_node(Topology.from_env(HET), HET) == [3, 4]
    cyclic = STEP | {"SLURM_GTIDS": "1,4,5"}
    assert ranks_on_node(Topology.from_env(cyclic), cyclic) == [1, 4, 5]
    assert ranks_on_node(Topology.from_env(OWN), OWN) == [2, 3]
    assert ranks_on_node(Topology.from_env(STEP), STEP) == [0, 1, 2]
    wrong = HET | {"SLURM_GTIDS": "3,x"}
    with pytest.raises(TopologyError, match=r"^SLURM_GTIDS: must be whole numbers separated by commas, got '3,x'; "):
        ranks_on_node(Topology.from_env(wrong), wrong)


# --- index of the GPU


@pytest.mark.parametrize(
    ("local_rank", "num_local", "num_visible", "env", "index"),
    [
        (1, 2, 0, {}, None),
        (0, 1, 1, {}, 0),
        (3, 4, 4, {}, 3),  # all of the node's
        (3, 4, 8, {}, 3),
        (1, 2, 2, {"SLURM_GPUS_ON_NODE": "4"}, 1),  # --gpus-per-task=2, or a view narrowed by the user
        (3, 4, 1, {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 0),  # one for each task
        (3, 4, 1, {"SLURM_GPUS_ON_NODE": "8"}, 0),
        (3, 4, 2, {"SLURM_GPUS_ON_NODE": "8"}, 0),  # two for each task
        (1, 2, 1, {"CUDA_VISIBLE_DEVICES": "1"}, 0),  # a launcher that sets one for each rank
        (1, 2, 1, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c"}, 0),
    ],
)
def test_cuda_index_of_ranks_with_enough_gpus(
    local_rank: int, num_local: int, num_visible: int, env: Env, index: int | None
) -> None:
    assert cuda_index(rank_of_node(local_rank, num_local), num_visible, env) == index


@pytest.mark.parametrize(
    ("num_local", "num_visible", "env", "known"),
    [
        (4, 2, {}, "CUDA_VISIBLE_DEVICES not set"),
        (4, 2, {"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),
        (2, 1, {}, "CUDA_VISIBLE_DEVICES not set"),  # a machine with one GPU
        (2, 1, {"CUDA_VISIBLE_DEVICES": "0,7"}, "CUDA_VISIBLE_DEVICES=0,7"),
        (2, 1, {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"}, "SLURM_GPUS_ON_NODE=1, CUDA_VISIBLE_"),
        (4, 1, {"SLURM_GPUS_ON_NODE": "2"}, "SLURM_GPUS_ON_NODE=2"),  # --ntasks-per-gpu=2
        (8, 2, {"SLURM_GPUS_ON_NODE": "8"}, "SLURM_GPUS_ON_NODE=8"),  # --gpu-bind=closest
    ],
)
def test_cuda_index_refuses_to_share_a_gpu_between_ranks(
    num_local: int, num_visible: int, env: Env, known: str
) -> None:
    problem = re.escape(f"rank 1 sees {num_visible} GPU(s) ({known}")
    fix = f"--gpus-per-node={num_local} --gpu-bind=none), or start fewer ranks here (launch.num_ranks={num_visible})"
    with pytest.raises(TopologyError, match=problem) as caught:
        cuda_index(rank_of_node(1, num_local), num_visible, env)
    assert f"but {num_local} ranks run on its node, so two ranks would use the same GPU" in str(caught.value)
    assert str(caught.value).endswith(fix)


def test_cuda_index_refuses_invalid_number_of_gpus() -> None:
    with pytest.raises(TopologyError, match="SLURM_GPUS_ON_NODE must be a whole number, got 'gpu:2'"):
        cuda_index(rank_of_node(1, 2), 1, {"SLURM_GPUS_ON_NODE": "gpu:2"})


def test_cuda_index_counts_only_ranks_that_use_gpus() -> None:
    """A master, two trainers and a parameter server on a machine with two GPUs."""
    assert [cuda_index(rank_of_node(rank, 4), 2, {}, [1, 2]) for rank in (1, 2)] == [0, 1]
    with pytest.raises(TopologyError, match=r"but 2 ranks use GPUs on its node, so two ranks would use the same GPU"):
        cuda_index(rank_of_node(1, 4), 1, {}, [1, 2])
