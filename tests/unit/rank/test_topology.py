"""Topology: its invariants, and how it is read from the variables of hpcdist, of torchrun and of no launcher."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import Any

import pytest
from launcher_env import OWN, STEP, TORCHRUN, Env, layout, without

from hpcdist.config.topology import Topology, port_for
from hpcdist.errors import TopologyError

VALID: dict[str, Any] = {
    "rank": 3,
    "world_size": 4,
    "local_rank": 1,
    "local_world_size": 2,
    "node_rank": 1,
    "num_nodes": 2,
    "hosts": ("n1", "n2"),
    "master_addr": "n1",
    "master_port": 20500,
    "launcher": "hpcdist",
    "job_id": "17",
    "attempt": 2,
}


# --- invariants


def test_topology_is_frozen_and_its_token_depends_on_job_and_attempt() -> None:
    topology = Topology(**VALID)
    assert "17" in topology.token
    assert topology.token != dataclasses.replace(topology, attempt=3).token
    assert topology.token != dataclasses.replace(topology, job_id="18").token
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology.rank = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rank": 4}, "0 <= rank < world_size, got rank=4, world_size=4"),
        ({"rank": -1}, "0 <= rank < world_size, got rank=-1, world_size=4"),
        ({"local_rank": 2}, "0 <= local_rank < local_world_size, got local_rank=2, local_world_size=2"),
        ({"local_rank": -1}, "0 <= local_rank < local_world_size, got local_rank=-1, local_world_size=2"),
        ({"node_rank": 2}, "0 <= node_rank < num_nodes, got node_rank=2, num_nodes=2"),
        ({"node_rank": -1}, "0 <= node_rank < num_nodes, got node_rank=-1, num_nodes=2"),
        (
            {"node_rank": 0, "num_nodes": 1, "hosts": ()},
            "local_world_size == world_size if num_nodes == 1, got world_size=4, local_world_size=2, num_nodes=1",
        ),
        (
            {"local_world_size": 4},
            "local_world_size + num_nodes <= world_size + 1, got world_size=4, local_world_size=4, num_nodes=2",
        ),
        ({"hosts": ("n1",)}, "num_nodes names in hosts, or none, got num_nodes=2, hosts=('n1',)"),
        ({"hosts": ("n1", "n1")}, "distinct names in hosts, got hosts=('n1', 'n1')"),
        ({"master_addr": ""}, "a name or address in master_addr, got master_addr=''"),
        ({"master_addr": "a b"}, "a name or address in master_addr, got master_addr='a b'"),
        ({"master_port": 0}, "1 <= master_port <= 65535, got master_port=0"),
        ({"master_port": 65536}, "1 <= master_port <= 65535, got master_port=65536"),
        ({"job_id": ""}, "a job_id without spaces, got job_id=''"),
        ({"attempt": -1}, "attempt >= 0, got attempt=-1"),
        ({"launcher": "single"}, "world_size == 1 if launcher is 'single', got world_size=4, launcher='single'"),
    ],
)
def test_inconsistent_fields_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(f"a topology requires {problem}") + "$"):
        Topology(**VALID | changes)


# --- variables of hpcdist


def test_own_variables_take_precedence_over_torchrun_and_slurm() -> None:
    assert Topology.from_env(STEP | TORCHRUN | OWN) == Topology(**VALID | {"hosts": ()})


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        (without(OWN, "HPCDIST_LOCAL_RANK", "HPCDIST_MASTER_PORT"), "but HPCDIST_LOCAL_RANK, HPCDIST_MASTER_PORT not"),
        (OWN | {"HPCDIST_JOB_ID": ""}, "but HPCDIST_JOB_ID not; let `hpcdist run`"),
        ({"HPCDIST_RANK": "1"}, "HPCDIST_RANK=1 set, but HPCDIST_WORLD_SIZE, "),
        ({"HPCDIST_ATTEMPT": "1"}, "HPCDIST_ATTEMPT=1 set, but HPCDIST_RANK, HPCDIST_WORLD_SIZE, "),
        (OWN | {"HPCDIST_RANK": "one"}, "HPCDIST_RANK must be a whole number, got 'one'; let"),
        (OWN | {"HPCDIST_RANK": "-1"}, "HPCDIST_RANK must be a whole number, got '-1'"),
        (OWN | {"HPCDIST_RANK": "1.0"}, "HPCDIST_RANK must be a whole number, got '1.0'"),
        (OWN | {"HPCDIST_RANK": " 1"}, "HPCDIST_RANK must be a whole number, got ' 1'"),
        (OWN | {"HPCDIST_RANK": "²"}, "HPCDIST_RANK must be a whole number, got '²'"),
        (OWN | {"HPCDIST_RANK": "9" * 5000}, "HPCDIST_RANK must be a whole number, got '999"),
        (OWN | {"HPCDIST_MASTER_PORT": "99999"}, "HPCDIST_MASTER_PORT=99999"),
        (
            OWN | {"HPCDIST_RANK": "4"},
            "a topology requires 0 <= rank < world_size, got rank=4, world_size=4 (from HPCDIST_RANK=4, "
            "HPCDIST_WORLD_SIZE=4, HPCDIST_LOCAL_RANK=1, HPCDIST_LOCAL_WORLD_SIZE=2, HPCDIST_NODE_RANK=1, "
            "HPCDIST_NUM_NODES=2, HPCDIST_MASTER_ADDR=n1, HPCDIST_MASTER_PORT=20500, "
            "HPCDIST_JOB_ID=17, HPCDIST_ATTEMPT=2); let `hpcdist run` or `hpcdist submit` start the ranks, "
            "or unset these variables",
        ),
    ],
)
def test_incomplete_or_invalid_own_variables_are_refused(env: Env, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)) as caught:
        Topology.from_env(env)
    assert str(caught.value).endswith("or unset these variables")
    assert len(str(caught.value)) < 600


# --- variables of torchrun


def test_torchrun_takes_precedence_over_slurm() -> None:
    topology = Topology.from_env(STEP | TORCHRUN)
    assert layout(topology) == (5, 8, 1, 4, 1, 2)
    assert (topology.launcher, topology.master_addr, topology.master_port) == ("torchrun", "n1", 29500)
    assert (topology.hosts, topology.attempt) == ((), 0)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (without(TORCHRUN, "GROUP_WORLD_SIZE"), (5, 8, 1, 4, 1, 2)),
        (without(TORCHRUN, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), (5, 8, 1, 4, 1, 2)),
        (TORCHRUN | {"WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "3"}, (5, 7, 1, 3, 1, 2)),  # uneven: 4 and 3
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "h", "MASTER_PORT": "1"},
            (1, 2, 1, 2, 0, 1),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, (0, 1, 0, 1, 0, 1)),
    ],
)
def test_torchrun_layouts_with_optional_variables_left_out(env: Env, expected: tuple[int, ...]) -> None:
    topology = Topology.from_env(env)
    assert layout(topology) == expected
    assert topology.launcher == "torchrun"


def test_token_differs_after_torchrun_restart_and_between_ports() -> None:
    first = Topology.from_env(TORCHRUN)
    restarted = Topology.from_env(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"})
    other_run = Topology.from_env(TORCHRUN | {"MASTER_PORT": "29501"})
    assert len({first.token, restarted.token, other_run.token}) == 3


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"TORCHELASTIC_RUN_ID": "x"}, "RANK must be set"),
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE must be set"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR must be set"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT must be set"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK must be set"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE must be set"),
        (without(TORCHRUN, "GROUP_RANK"), "GROUP_RANK must be set"),
        (
            without(TORCHRUN, "GROUP_WORLD_SIZE") | {"LOCAL_WORLD_SIZE": "3"},
            "GROUP_WORLD_SIZE must be set",
        ),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "local_world_size=0"),
        (TORCHRUN | {"RANK": "8"}, "rank=8, world_size=8 (from RANK=8, LOCAL_RANK=1, GROUP_RANK=1, WORLD_SIZE=8, "),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local_rank=4, local_world_size=4 (from RANK=5, LOCAL_RANK=4"),
        (TORCHRUN | {"GROUP_RANK": "2"}, "node_rank=2, num_nodes=2"),
        (TORCHRUN | {"RANK": "x"}, "RANK must be a whole number, got 'x'"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "1 <= master_port <= 65535, got master_port=0 (from "),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT must be a whole number, got 'http'"),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "a b"}, "a job_id without spaces, got job_id='a b-29500'"),
    ],
)
def test_incomplete_or_invalid_torchrun_variables_are_refused(env: Env, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)) as caught:
        Topology.from_env(env)
    assert str(caught.value).endswith("set the variables for every rank, or unset them all")


# --- no launcher


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PATH": "/bin", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"RANK": "", "WORLD_SIZE": "", "HPCDIST_RANK": ""},
    ],
)
def test_environment_without_a_launcher_is_a_single_rank(env: Env) -> None:
    topology = Topology.from_env(env)
    assert layout(topology) == (0, 1, 0, 1, 0, 1)
    assert (topology.launcher, topology.master_addr, topology.job_id) == ("single", "127.0.0.1", "single")
    assert (topology.hosts, topology.attempt) == ((), 0)


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"RANK": "0"}, "RANK=0 set, but WORLD_SIZE, MASTER_ADDR, MASTER_PORT not; start the ranks with torchrun"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1, WORLD_SIZE=1 set, but MASTER_ADDR, MASTER_PORT not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 set, but RANK, MASTER_ADDR, MASTER_PORT not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 set, but RANK"),
        ({"WORLD_SIZE": "all"}, "WORLD_SIZE must be a whole number, got 'all'"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS must be a whole number, got 'many'; put srun"),
        ({"SLURM_JOB_NODELIST": "(null)"}, "SLURM_JOB_NODELIST: nodelist '(null)', character 1"),
        ({"SLURM_JOB_ID": "a b"}, "a job_id without spaces, got job_id='a b' (from SLURM_JOB_ID=a b)"),
    ],
)
def test_variables_that_indicate_more_ranks_are_refused(env: Env, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)):
        Topology.from_env(env)


# --- ports


@pytest.mark.parametrize("job_id", ["1", "4294967295", "20250101-120000", "run", "", "1234_7", "a\udcff", "9" * 40])
def test_ports_are_deterministic_and_in_range(job_id: str) -> None:
    ports = [port_for(job_id, attempt) for attempt in range(13000)]
    assert ports == [port_for(job_id, attempt) for attempt in range(13000)]
    assert all(20480 <= port <= 32760 for port in ports)
    assert all(now != next_port for now, next_port in pairwise(ports))


@pytest.mark.parametrize("prefix", ["", "run-"])
def test_ports_of_consecutive_jobs_differ(prefix: str) -> None:
    ports = [port_for(f"{prefix}{job}", attempt) for job in (1000, 1001) for attempt in range(16)]
    assert len(set(ports)) == len(ports)
    assert len({port_for(f"{prefix}{job}", 0) for job in range(12281)}) == 12281


def test_port_does_not_depend_on_the_process() -> None:
    assert port_for("1234", 0) == 24778
