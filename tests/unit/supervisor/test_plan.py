"""Plans of local runs for combinations of configs and machines."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

import pytest

from hpcdist.config.launch_schema import ClusterConfig, LaunchConfig, RoleRequest
from hpcdist.config.schema import Config, DataConfig, ElasticConfig
from hpcdist.config.topology import Topology, port_for
from hpcdist.errors import ConfigError
from hpcdist.supervisor import plan as plans
from hpcdist.supervisor.plan import LOOPBACK, Machine, Plan, free_port, make_plan, note_on_fewer_ranks
from tests.support.fake_nvml import gpu, install_fake_nvml

CPU = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
GPU = {name: value for name, value in CPU.items() if not name.startswith("MALLOC")}


def planned(num_cpus: int, num_gpus: int, **launch: Any) -> Plan:
    return make_plan(Config(launch=LaunchConfig(**launch)), Machine(num_cpus=num_cpus, num_gpus=num_gpus))


@pytest.mark.parametrize(
    ("num_cpus", "num_gpus", "launch", "expected"),
    [
        (8, 0, {}, (2, "cpu", "gloo", 4)),
        (8, 4, {}, (4, "cuda", "nccl", 2)),
        (8, 4, {"num_ranks": 3}, (3, "cuda", "nccl", 2)),
        (8, 4, {"device": "cpu"}, (2, "cpu", "gloo", 4)),
        (8, 4, {"device": "cpu", "num_ranks": 8}, (8, "cpu", "gloo", 1)),
        (8, 2, {"device": "cuda"}, (2, "cuda", "nccl", 4)),
        (8, 2, {"backend": "gloo"}, (2, "cuda", "gloo", 4)),
        (1, 0, {}, (2, "cpu", "gloo", 1)),
        (2, 0, {"num_ranks": 5}, (5, "cpu", "gloo", 1)),
        (7, 0, {"num_ranks": 3}, (3, "cpu", "gloo", 2)),
        (7, 0, {"num_ranks": 3, "num_threads": 5}, (3, "cpu", "gloo", 5)),
    ],
)
def test_plan_of_ranks_device_backend_and_threads(
    num_cpus: int, num_gpus: int, launch: dict[str, Any], expected: tuple[int, str, str, int]
) -> None:
    plan = planned(num_cpus, num_gpus, **launch)
    num_ranks, device, backend, threads = expected
    env = {"OMP_NUM_THREADS": str(threads)} | (GPU if device == "cuda" else CPU)
    assert plan == Plan(num_ranks=num_ranks, device=device, backend=backend, threads=threads, env=env)  # type: ignore[arg-type]


def test_launch_env_overrides_variables() -> None:
    plan = planned(8, 0, env={"OMP_NUM_THREADS": "9", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0"})
    assert plan.env == CPU | {"OMP_NUM_THREADS": "9", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0"}
    assert plan.threads == 4


def test_topology_of_a_local_rank_inside_a_slurm_job() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "99"}
    plan = replace(planned(8, 0, num_ranks=4), env={"A": "b", "HPCDIST_RANK": "77"})
    env = plan.rank_env(3, job_id="exp/first", attempt=2, master_port=20000)
    assert (env["A"], env["HPCDIST_RANK"], plan.env["HPCDIST_RANK"]) == ("b", "3", "77")
    found = Topology.from_env(slurm | env)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 3, 4)
    assert (found.master_addr, found.master_port) == ("127.0.0.1", 20000)
    assert (found.job_id, found.attempt, found.num_nodes) == ("exp/first", 2, 1)


# --- the machine


def test_gpus_are_counted_by_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "count_gpus", lambda: pytest.fail("the driver was queried"))
    assert [Machine.inspect({"CUDA_VISIBLE_DEVICES": value}).num_gpus for value in ("", " 0, 1 ")] == [0, 2]


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_gpus_are_counted_by_the_driver(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    install_fake_nvml(monkeypatch, *[gpu("NVIDIA H200")] * num_gpus)
    assert Machine.inspect({}).num_gpus == num_gpus


def test_cores_are_counted_by_cpu_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5})
    assert Machine.inspect({"CUDA_VISIBLE_DEVICES": ""}).num_cpus == 3


# --- elastic runs


def planned_elastic(num_gpus: int, num_ranks: int, **elastic: Any) -> Plan:
    config = Config(launch=LaunchConfig(num_ranks=num_ranks), elastic=ElasticConfig(**elastic))
    return make_plan(config, Machine(num_cpus=8, num_gpus=num_gpus))


def test_fewer_gpus_than_ranks_suffice_down_to_min_ranks() -> None:
    assert [planned_elastic(gpus, 4, min_ranks=2).num_ranks for gpus in (2, 3, 4, 5)] == [2, 3, 4, 4]
    with pytest.raises(ConfigError, match=r"^launch\.num_ranks=4, but 1 GPUs are visible"):
        planned_elastic(1, 4, min_ranks=2)
    with pytest.raises(ConfigError, match=r"^2 ranks are fewer than elastic\.min_ranks=3: change one of them"):
        planned_elastic(0, 0, min_ranks=3)


def test_start_with_fewer_ranks_than_requested_is_noted() -> None:
    launch, elastic = LaunchConfig(num_ranks=4), ElasticConfig(min_ranks=2)
    fixed = Config(launch=launch, elastic=elastic)
    free = Config(launch=launch, elastic=elastic, data=DataConfig(global_batch_size=64))
    sentence = "3 GPUs are visible: 3 ranks instead of launch.num_ranks=4 (elastic.min_ranks=2)"
    for config, note in ((free, sentence), (fixed, f"{sentence}; without data.global_batch_size a step has less data")):
        assert note_on_fewer_ranks(config, make_plan(config, Machine(num_cpus=8, num_gpus=3))) == note
        assert note_on_fewer_ranks(config, make_plan(config, Machine(num_cpus=8, num_gpus=5))) == ""


def test_exact_sums_use_one_thread_on_any_number_of_ranks() -> None:
    assert {planned_elastic(0, ranks, exact=True).threads for ranks in (1, 2, 4)} == {1}


# --- ports


def test_port_depends_on_job_and_attempt() -> None:
    assert free_port("exp/free-ports", 1) == port_for("exp/free-ports", 1)
    assert free_port("exp/free-ports", 2) != free_port("exp/free-ports", 1)


@pytest.mark.parametrize("address", [LOOPBACK, "0.0.0.0"])
def test_port_in_use_is_skipped(address: str) -> None:
    job_id = f"exp/taken-{address}"
    port = port_for(job_id, 1)
    with socket.socket() as listener:
        listener.bind((address, port))
        listener.listen()
        assert free_port(job_id, 1) == port_for(job_id, 2)
    assert free_port(job_id, 1) == port


def test_machine_without_free_ports_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setattr(plans, "port_for", lambda *_: taken)
        with pytest.raises(ConfigError, match=r"^no free port for job exp/first on this machine: `ss -ltnp`"):
            free_port("exp/first", 1)


# --- roles

HYBRID = {"master": 1, "trainer": 1, "parameter_server": 2}


def planned_with_roles(
    num_gpus: int, roles: dict[str, int], cluster: ClusterConfig | None = None, **launch: Any
) -> Plan:
    config = Config(roles=roles, launch=LaunchConfig(**launch), cluster=cluster or ClusterConfig())
    return make_plan(config, Machine(num_cpus=8, num_gpus=num_gpus))


def devices(plan: Plan) -> list[str]:
    return [plan.device_of(rank) for rank in range(plan.num_ranks)]


def test_number_of_ranks_is_the_sum_of_the_roles() -> None:
    plan = planned_with_roles(0, HYBRID)
    assert (plan.num_ranks, plan.device, plan.backend, plan.threads) == (4, "cpu", "gloo", 2)
    assert plan == planned_with_roles(0, HYBRID, num_ranks=4)


@pytest.mark.parametrize(
    ("num_gpus", "roles", "launch", "message"),
    [
        (0, {}, {"device": "cuda"}, "launch.device=cuda, but no GPU is visible here: use launch.device=auto or cpu"),
        (2, {}, {"num_ranks": 3}, "launch.num_ranks=3, but 2 GPUs are visible: lower it, or use launch.device=cpu"),
        (
            0,
            HYBRID,
            {"num_ranks": 3},
            "roles add up to 4 ranks (master 1, trainer 1, parameter_server 2), but launch.num_ranks=3: leave"
            " launch.num_ranks out, or change one of them",
        ),
        (
            1,
            HYBRID,
            {"devices": {"master": "cpu"}},
            "roles: 3 ranks need a GPU each (trainer 1, parameter_server 2), but 1 are visible: run some roles without"
            " one, as in launch.devices.parameter_server=cpu",
        ),
        (
            0,
            HYBRID,
            {"devices": {"trainer": "cuda"}},
            "launch.devices.trainer=cuda, but no GPU is visible here: use launch.devices.trainer=auto or cpu",
        ),
    ],
)
def test_plan_that_does_not_fit_the_machine_is_an_error(
    num_gpus: int, roles: dict[str, int], launch: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        planned_with_roles(num_gpus, roles, **launch)
    assert str(caught.value) == message


def test_roles_on_cpu_need_no_gpu() -> None:
    plan = planned_with_roles(1, HYBRID, devices={"master": "cpu", "parameter_server": "cpu"})
    assert devices(plan) == ["cpu", "cuda", "cpu", "cpu"]
    # NCCL does not support ranks without a GPU.
    assert (plan.device, plan.backend) == ("cuda", "gloo")
    cluster = ClusterConfig(roles={"trainer": RoleRequest(gpus_per_node=1)})
    assert devices(planned_with_roles(1, HYBRID, cluster)) == devices(plan)


def test_ranks_without_a_gpu_get_the_malloc_variables() -> None:
    plan = planned_with_roles(1, HYBRID, devices={"master": "cpu", "parameter_server": "cpu"}, env={"A": "b"})
    topology: dict[str, Any] = {"job_id": "e/r", "attempt": 1, "master_port": 1}
    envs = [plan.rank_env(rank, **topology) for rank in range(4)]
    assert [{k: env[k] for k in env if k.startswith("MALLOC_")} != {} for env in envs] == [True, False, True, True]
    assert {env["A"] for env in envs} == {"b"}


def test_roles_on_gpus_use_nccl() -> None:
    plan = planned_with_roles(2, {"agent": 1, "observer": 1})
    assert (devices(plan), plan.backend) == (["cuda", "cuda"], "nccl")
