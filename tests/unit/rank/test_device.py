"""Which device and backend a rank gets; two GPUs are pretended, and none is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcdist.config.schema import ClusterConfig, Config, LaunchConfig, RoleRequest
from hpcdist.errors import ConfigError
from hpcdist.rank.device import place
from hpcdist.rank.topology import Topology

HYBRID = {"master": 1, "trainer": 2, "parameter_server": 1}


def rank(number: int, world_size: int = 4, launcher: Any = "hpcdist") -> Topology:
    return Topology(
        rank=number,
        world_size=world_size,
        local_rank=number,
        local_world_size=world_size,
        node_rank=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=1,
        launcher=launcher,
        job_id="1",
        attempt=1,
    )


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr("hpcdist.rank.device.dist.is_nccl_available", lambda: True)


def placed(config: Config, env: dict[str, str] | None = None, launcher: Any = "hpcdist") -> list[tuple[str, str]]:
    """Device and backend of each of four ranks on one machine."""
    found = [place(config, rank(number, launcher=launcher), env or {}) for number in range(4)]
    return [(str(device), backend) for device, backend in found]


@pytest.mark.usefixtures("two_gpus")
def test_roles_without_a_gpu_leave_them_to_the_trainers() -> None:
    expected = [("cpu", "gloo"), ("cuda:0", "gloo"), ("cuda:1", "gloo"), ("cpu", "gloo")]
    by_device = Config(roles=HYBRID, launch=LaunchConfig(devices={"master": "cpu", "parameter_server": "cpu"}))
    assert placed(by_device) == expected
    by_request = Config(roles=HYBRID, cluster=ClusterConfig(roles={"trainer": RoleRequest(gpus_per_node=2)}))
    assert placed(by_request) == expected


@pytest.mark.usefixtures("two_gpus")
def test_two_ranks_that_want_gpus_and_see_too_few() -> None:
    with pytest.raises(Exception, match=r"sees 2 GPU\(s\) .*, but 3 ranks use GPUs on its node"):
        placed(Config(roles=HYBRID, launch=LaunchConfig(devices={"master": "cpu"})))


@pytest.mark.usefixtures("two_gpus")
def test_all_on_gpus_use_nccl() -> None:
    config = Config(roles={"agent": 1, "observer": 1})
    assert place(config, rank(1, 2), {}) == (torch.device("cuda", 1), "nccl")


def test_a_role_that_must_have_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = Config(roles=HYBRID, launch=LaunchConfig(devices={"trainer": "cuda"}))
    assert str(place(config, rank(0), {})[0]) == "cpu"
    with pytest.raises(ConfigError, match=r"^launch\.devices\.trainer=cuda, but no GPU is visible here: use "):
        place(config, rank(1), {})


def test_roles_that_do_not_make_up_the_world() -> None:
    with pytest.raises(ConfigError, match=r"^roles add up to 4 ranks \(.*\), but 2 were started$"):
        place(Config(roles=HYBRID), rank(0, 2), {})
