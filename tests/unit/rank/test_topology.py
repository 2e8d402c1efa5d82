"""Topology from mappings. Slurm's are as srun 22.05 set them on three nodes, cut down to what is read."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import Any

import pytest

from hpcdist.errors import TopologyError
from hpcdist.rank.topology import Topology, cuda_index, port_for, ranks_on_node

Env = dict[str, str]

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
OWN: Env = {
    "HPCDIST_RANK": "3",
    "HPCDIST_WORLD_SIZE": "4",
    "HPCDIST_LOCAL_RANK": "1",
    "HPCDIST_LOCAL_WORLD_SIZE": "2",
    "HPCDIST_NODE_RANK": "1",
    "HPCDIST_NUM_NODES": "2",
    "HPCDIST_MASTER_ADDR": "n1",
    "HPCDIST_MASTER_PORT": "20500",
    "HPCDIST_JOB_ID": "17",
    "HPCDIST_ATTEMPT": "2",
}
TORCHRUN: Env = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
STEP: Env = {  # srun -N3 -n5, rank 1
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "3,1(x2)",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_TASKS_PER_NODE": "3,1(x2)",
}
HET: Env = {  # one step over two components, 1 x 1 and 2 x 2 tasks, as rank 4 saw it
    "SLURM_GTIDS": "3,4",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_ID_HET_GROUP_0": "3",
    "SLURM_JOB_ID_HET_GROUP_1": "4",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_NPROCS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "4",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_TASKS_PER_NODE": "1,2(x2)",
}
ARBITRARY: Env = {  # a host file of n3 n1 n1 n2 n2, as rank 0 saw it: Slurm sorts the nodes
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "10",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
BATCH: Env = {  # the shell of sbatch -n1
    "SLURM_JOB_ID": "14",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1",
}


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


def place(topology: Topology) -> tuple[int, ...]:
    return (
        topology.rank,
        topology.world_size,
        topology.local_rank,
        topology.local_world_size,
        topology.node_rank,
        topology.num_nodes,
    )


# --- the value ---------------------------------------------------------------------------------------------


def test_valid_topology_is_frozen_and_has_a_token() -> None:
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
def test_invariants(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(f"a topology requires {problem}") + "$"):
        Topology(**VALID | changes)


# --- our own variables -------------------------------------------------------------------------------------


def test_own_variables_come_before_all_others() -> None:
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
def test_own_variables_refused(env: Env, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)) as caught:
        Topology.from_env(env)
    assert str(caught.value).endswith("or unset these variables")
    assert len(str(caught.value)) < 600


# --- torchrun's --------------------------------------------------------------------------------------------


def test_torchrun_comes_before_slurm() -> None:
    topology = Topology.from_env(STEP | TORCHRUN)
    assert place(topology) == (5, 8, 1, 4, 1, 2)
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
def test_torchrun_layouts(env: Env, expected: tuple[int, ...]) -> None:
    topology = Topology.from_env(env)
    assert place(topology) == expected
    assert topology.launcher == "torchrun"


def test_torchrun_restart_and_neighbour_change_the_token() -> None:
    first = Topology.from_env(TORCHRUN)
    restarted = Topology.from_env(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"})
    neighbour = Topology.from_env(TORCHRUN | {"MASTER_PORT": "29501"})
    assert len({first.token, restarted.token, neighbour.token}) == 3


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
def test_torchrun_refused(env: Env, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)) as caught:
        Topology.from_env(env)
    assert str(caught.value).endswith("set the variables for every rank, or unset them all")


# --- Slurm's -----------------------------------------------------------------------------------------------


def test_slurm_step() -> None:
    topology = Topology.from_env(STEP)
    assert place(topology) == (1, 5, 1, 3, 0, 3)
    assert topology.hosts == ("n1", "n2", "n3")
    assert (topology.launcher, topology.job_id, topology.attempt) == ("slurm", "42", 0)
    assert (topology.master_addr, topology.master_port) == ("n1", port_for("42", 0))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # --distribution=cyclic: ranks 1, 2 on other nodes, 3 and 4 back on the first
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}, (1, 5, 0, 1, 1, 3)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}, (3, 5, 1, 3, 0, 3)),
        ({"SLURM_PROCID": "4", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}, (4, 5, 2, 3, 0, 3)),
        # --distribution=arbitrary, hostfile n3 n1 n3 n2: rank 2
        (
            {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "4"}
            | {"SLURM_STEP_TASKS_PER_NODE": "1(x2),2"},
            (2, 4, 1, 2, 2, 3),
        ),
        # a step of two nodes in a job of three
        (
            {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2"}
            | {"SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "6"},
            (1, 2, 0, 1, 1, 2),
        ),
        # srun --het-group=0,1 over groups of 1 and 2 tasks: step variables count both groups
        (
            {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "3"}
            | {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1,2", "SLURM_NTASKS": "3"}
            | {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_1": "n2", "SLURM_NTASKS_HET_GROUP_1": "2"},
            (2, 3, 1, 2, 1, 2),
        ),
    ],
)
def test_slurm_layouts(changes: Env, expected: tuple[int, ...]) -> None:
    topology = Topology.from_env(STEP | changes)
    assert place(topology) == expected
    assert topology.master_addr == topology.hosts[0]


def test_slurm_falls_back_to_the_jobs_variables() -> None:
    env = without(STEP, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID")
    assert Topology.from_env(env) == Topology.from_env(STEP)


def test_slurm_attempts_and_overrides() -> None:
    requeued = Topology.from_env(STEP | {"SLURM_RESTART_COUNT": "1"})
    restarted = Topology.from_env(STEP | {"SLURM_RESTART_COUNT": "1", "HPCDIST_ATTEMPT": "5"})
    assert (requeued.attempt, restarted.attempt) == (1, 5)
    assert requeued.token != restarted.token
    own = {name: OWN[name] for name in OWN if name.endswith(("ADDR", "PORT", "JOB_ID"))}
    overridden = Topology.from_env(STEP | own | {"HPCDIST_MASTER_ADDR": "n1-ib"})
    assert (overridden.master_addr, overridden.master_port) == ("n1-ib", 20500)
    assert (overridden.job_id, overridden.launcher, overridden.hosts) == ("17", "slurm", ("n1", "n2", "n3"))


RANK_0_ELSEWHERE = STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}


def test_slurm_rank_0_on_another_node_is_found_by_its_address() -> None:
    topology = Topology.from_env(RANK_0_ELSEWHERE | {"HPCDIST_MASTER_ADDR": "n3"})
    assert (topology.rank, topology.node_rank, topology.master_addr) == (0, 2, "n3")


def test_slurm_rank_0_on_another_node_without_its_address() -> None:
    problem = r"rank 0 is expected on n1, but it is on n3 .*SLURM_NODEID=2.*; set HPCDIST_MASTER_ADDR=n3 for"
    with pytest.raises(TopologyError, match=problem):
        Topology.from_env(RANK_0_ELSEWHERE)


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "6"},
            "SLURM_STEP_TASKS_PER_NODE adds up to 5 tasks, but SLURM_STEP_NUM_TASKS differs (SLURM_PROCID=1, "
            "SLURM_LOCALID=1, SLURM_NODEID=0, SLURM_STEP_NUM_TASKS=6, SLURM_STEP_NODELIST=n[1-3], "
            "SLURM_STEP_TASKS_PER_NODE=3,1(x2))",
        ),
        (
            STEP | {"SLURM_STEP_NODELIST": "n[1-2]"},
            "SLURM_STEP_NODELIST names 2 nodes, SLURM_STEP_TASKS_PER_NODE counts 3 (SLURM_PROCID=1",
        ),
        (STEP | {"SLURM_NODEID": "3"}, "SLURM_NODEID is not less than the number of nodes in SLURM_STEP_NODELIST, 3 ("),
        (STEP | {"SLURM_LOCALID": "3"}, "local_rank=3, local_world_size=3 (from SLURM_PROCID=1, SLURM_LOCALID=3"),
        (STEP | {"SLURM_PROCID": "5"}, "rank=5, world_size=5 (from SLURM_PROCID=5"),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-2],n1"}, "distinct names in hosts, got hosts=('n1', 'n2', 'n1')"),
        (STEP | {"SLURM_PROCID": "x"}, "SLURM_PROCID must be a whole number, got 'x'"),
        (STEP | {"SLURM_NODEID": "-1"}, "SLURM_NODEID must be a whole number, got '-1'"),
        (STEP | {"SLURM_LOCALID": ""}, "SLURM_LOCALID must be set"),
        (STEP | {"SLURM_RESTART_COUNT": "x"}, "SLURM_RESTART_COUNT must be a whole number"),
        (STEP | {"HPCDIST_ATTEMPT": "x"}, "HPCDIST_ATTEMPT must be a whole number"),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: nodelist 'n[1-', character 2: '[' without ']'"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,"}, "SLURM_STEP_TASKS_PER_NODE: tasks per node '3,': '' is not"),
        (without(STEP, "SLURM_JOB_ID"), "SLURM_JOB_ID must be set"),
        (
            without(STEP, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
            "SLURM_STEP_NUM_TASKS or SLURM_NTASKS must be set",
        ),
        (without(STEP, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST must be set"),
        (without(STEP, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "SLURM_TASKS_PER_NODE must be set"),
    ],
)
def test_slurm_refused(env: Env, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)) as caught:
        Topology.from_env(env)
    assert str(caught.value).endswith("pass its SLURM_ variables on unchanged, also into containers")


# --- none of them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PATH": "/bin", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"RANK": "", "WORLD_SIZE": "", "HPCDIST_RANK": ""},
    ],
)
def test_world_of_one(env: Env) -> None:
    topology = Topology.from_env(env)
    assert place(topology) == (0, 1, 0, 1, 0, 1)
    assert (topology.launcher, topology.master_addr, topology.job_id) == ("single", "127.0.0.1", "single")
    assert (topology.hosts, topology.attempt) == ((), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # batch step
        {"SLURM_STEPID": str(0xFFFFFFFA)},  # interactive step
        {"SLURM_NTASKS": "", "SLURM_NPROCS": "", "SLURM_TASKS_PER_NODE": "8"},  # sbatch -N1 --exclusive
    ],
)
def test_world_of_one_in_an_allocation_of_one_task(changes: Env) -> None:
    topology = Topology.from_env(BATCH | {"SLURM_RESTART_COUNT": "2"} | changes)
    assert (topology.launcher, topology.job_id, topology.attempt) == ("single", "14", 2)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (BATCH | {"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4"),
        (BATCH | {"SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, "SLURM_NTASKS=4, SLURM_NNODES=2"),
        (BATCH | {"SLURM_NNODES": "2"}, "SLURM_NNODES=2"),
        (BATCH | {"SLURM_NTASKS_PER_NODE": "8"}, "SLURM_NTASKS_PER_NODE=8"),
        (BATCH | {"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE=2"),
        (BATCH | {"SLURM_JOB_NODELIST": "n[1-2]"}, "SLURM_JOB_NODELIST=n[1-2]"),
        (without(STEP, "SLURM_STEP_ID", "SLURM_STEPID"), "SLURM_PROCID=1"),
        (without(STEP, "SLURM_PROCID"), "SLURM_NTASKS=5"),
        (STEP | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, "SLURM_NTASKS=5"),
        (STEP | {"SLURM_STEP_ID": "batch"}, "SLURM_NTASKS=5"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3"),
        ({"SLURM_NTASKS": "4", "MASTER_ADDR": "localhost"}, "SLURM_NTASKS=4"),
    ],
)
def test_no_world_of_one_in_a_job_of_several_tasks(env: Env, named: str) -> None:
    with pytest.raises(TopologyError, match="the Slurm job has several tasks") as caught:
        Topology.from_env(env)
    assert named in str(caught.value)
    assert "but this process is not an srun task; put srun before the command or use" in str(caught.value)


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
def test_no_world_of_one_by_halves(env: Env, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)):
        Topology.from_env(env)


# --- ports -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job_id", ["1", "4294967295", "20250101-120000", "run", "", "1234_7", "a\udcff", "9" * 40])
def test_ports_are_fixed_and_in_their_range(job_id: str) -> None:
    ports = [port_for(job_id, attempt) for attempt in range(13000)]
    assert ports == [port_for(job_id, attempt) for attempt in range(13000)]
    assert all(20480 <= port <= 32760 for port in ports)
    assert all(now != following for now, following in pairwise(ports))


@pytest.mark.parametrize("prefix", ["", "run-"])
def test_ports_of_jobs_that_follow_each_other(prefix: str) -> None:
    near = [port_for(f"{prefix}{job}", attempt) for job in (1000, 1001) for attempt in range(16)]
    assert len(set(near)) == len(near)
    assert len({port_for(f"{prefix}{job}", 0) for job in range(12281)}) == 12281


def test_ports_are_the_same_in_every_process() -> None:
    assert port_for("1234", 0) == 24778


# --- roles on different nodes ---------------------------------------------------------------------------------


def test_ranks_count_through_a_heterogeneous_step() -> None:
    topology = Topology.from_env(HET)
    assert place(topology) == (4, 5, 1, 2, 2, 3)
    assert (topology.hosts, topology.master_addr, topology.job_id) == (("n1", "n2", "n3"), "n1", "3")
    first = HET | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
    assert place(Topology.from_env(first)) == (0, 5, 0, 1, 0, 3)
    assert Topology.from_env(first).token == topology.token


def test_nodes_of_a_heterogeneous_step_count_by_component() -> None:
    """Seen with 22.05: the first component's node comes last by name, and is SLURM_NODEID 0."""
    env = HET | {
        "SLURM_JOB_NODELIST": "n[1-2,4]",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n4",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]",
        "SLURM_STEP_NODELIST": "n[1-2,4]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    }
    topology = Topology.from_env(env)
    assert place(topology) == (4, 5, 1, 2, 2, 3)
    assert (topology.hosts, topology.master_addr) == (("n4", "n1", "n2"), "n4")
    first = env | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert place(Topology.from_env(first)) == (0, 5, 0, 1, 0, 3)


def test_a_step_in_one_component_alone() -> None:
    env = HET | {
        "SLURM_NODEID": "1",
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[2-3]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    assert place(Topology.from_env(env)) == (3, 4, 1, 2, 1, 2)
    assert Topology.from_env(env | {"SLURM_JOB_NODELIST_HET_GROUP_1": ""}).hosts == ("n2", "n3")


def test_ranks_that_were_told_their_nodes_meet_where_rank_0_is() -> None:
    topology = Topology.from_env(ARBITRARY | {"HPCDIST_MASTER_ADDR": "n3"})
    assert (place(topology), topology.master_addr) == ((0, 5, 0, 1, 2, 3), "n3")
    other = {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "HPCDIST_MASTER_ADDR": "n3"}
    assert place(Topology.from_env(ARBITRARY | other)) == (2, 5, 1, 2, 0, 3)


def test_the_ranks_of_a_node() -> None:
    assert ranks_on_node(Topology.from_env(HET), HET) == [3, 4]
    cyclic = STEP | {"SLURM_GTIDS": "1,4,5"}
    assert ranks_on_node(Topology.from_env(cyclic), cyclic) == [1, 4, 5]
    assert ranks_on_node(Topology.from_env(OWN), OWN) == [2, 3]
    assert ranks_on_node(Topology.from_env(STEP), STEP) == [0, 1, 2]
    wrong = HET | {"SLURM_GTIDS": "3,x"}
    with pytest.raises(TopologyError, match=r"^SLURM_GTIDS: must be whole numbers separated by commas, got '3,x'; "):
        ranks_on_node(Topology.from_env(wrong), wrong)


# --- GPUs --------------------------------------------------------------------------------------------------


def on_node(local_rank: int, local_world_size: int) -> Topology:
    local = {"local_rank": local_rank, "local_world_size": local_world_size, "rank": local_rank}
    return Topology(**VALID | local | {"world_size": local_world_size + 1, "node_rank": 0})


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
def test_cuda_index(local_rank: int, num_local: int, num_visible: int, env: Env, index: int | None) -> None:
    assert cuda_index(on_node(local_rank, num_local), num_visible, env) == index


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
def test_cuda_index_refuses_to_share(num_local: int, num_visible: int, env: Env, known: str) -> None:
    problem = re.escape(f"rank 1 sees {num_visible} GPU(s) ({known}")
    fix = f"--gpus-per-node={num_local} --gpu-bind=none), or start fewer ranks here (launch.num_ranks={num_visible})"
    with pytest.raises(TopologyError, match=problem) as caught:
        cuda_index(on_node(1, num_local), num_visible, env)
    assert f"but {num_local} ranks run on its node, so two ranks would use the same GPU" in str(caught.value)
    assert str(caught.value).endswith(fix)


def test_cuda_index_reads_strictly() -> None:
    with pytest.raises(TopologyError, match="SLURM_GPUS_ON_NODE must be a whole number, got 'gpu:2'"):
        cuda_index(on_node(1, 2), 1, {"SLURM_GPUS_ON_NODE": "gpu:2"})


def test_cuda_index_counts_those_alone_that_use_gpus() -> None:
    """A master, two trainers and a parameter server on a machine with two GPUs."""
    assert [cuda_index(on_node(rank, 4), 2, {}, [1, 2]) for rank in (1, 2)] == [0, 1]
    with pytest.raises(TopologyError, match=r"but 2 ranks use GPUs on its node, so two ranks would use the same GPU"):
        cuda_index(on_node(1, 4), 1, {}, [1, 2])
