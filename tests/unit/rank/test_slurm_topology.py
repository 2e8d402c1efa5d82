"""Topology from the variables of Slurm, inside and outside of srun steps."""

from __future__ import annotations

import re

import pytest
from launcher_env import ARBITRARY, BATCH, HET, OWN, STEP, Env, layout, without

from hpcdist.config.topology import Topology, port_for
from hpcdist.errors import TopologyError


def test_rank_of_a_slurm_step() -> None:
    topology = Topology.from_env(STEP)
    assert layout(topology) == (1, 5, 1, 3, 0, 3)
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
def test_layouts_of_slurm_steps(changes: Env, expected: tuple[int, ...]) -> None:
    topology = Topology.from_env(STEP | changes)
    assert layout(topology) == expected
    assert topology.master_addr == topology.hosts[0]


def test_variables_of_the_job_replace_missing_step_variables() -> None:
    env = without(STEP, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID")
    assert Topology.from_env(env) == Topology.from_env(STEP)


def test_own_variables_override_attempt_and_rendezvous_of_slurm() -> None:
    requeued = Topology.from_env(STEP | {"SLURM_RESTART_COUNT": "1"})
    restarted = Topology.from_env(STEP | {"SLURM_RESTART_COUNT": "1", "HPCDIST_ATTEMPT": "5"})
    assert (requeued.attempt, restarted.attempt) == (1, 5)
    assert requeued.token != restarted.token
    own = {name: OWN[name] for name in OWN if name.endswith(("ADDR", "PORT", "JOB_ID"))}
    overridden = Topology.from_env(STEP | own | {"HPCDIST_MASTER_ADDR": "n1-ib"})
    assert (overridden.master_addr, overridden.master_port) == ("n1-ib", 20500)
    assert (overridden.job_id, overridden.launcher, overridden.hosts) == ("17", "slurm", ("n1", "n2", "n3"))


RANK_0_ON_LAST_NODE = STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}


def test_rank_0_on_another_node_is_accepted_with_its_address() -> None:
    topology = Topology.from_env(RANK_0_ON_LAST_NODE | {"HPCDIST_MASTER_ADDR": "n3"})
    assert (topology.rank, topology.node_rank, topology.master_addr) == (0, 2, "n3")


def test_rank_0_on_another_node_is_refused_without_its_address() -> None:
    problem = r"rank 0 is expected on n1, but it is on n3 .*SLURM_NODEID=2.*; set HPCDIST_MASTER_ADDR=n3 for"
    with pytest.raises(TopologyError, match=problem):
        Topology.from_env(RANK_0_ON_LAST_NODE)


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
def test_incomplete_or_contradictory_slurm_variables_are_refused(env: Env, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)) as caught:
        Topology.from_env(env)
    assert str(caught.value).endswith("pass its SLURM_ variables on unchanged, also into containers")


def test_ranks_of_a_heterogeneous_step_are_numbered_over_all_components() -> None:
    topology = Topology.from_env(HET)
    assert layout(topology) == (4, 5, 1, 2, 2, 3)
    assert (topology.hosts, topology.master_addr, topology.job_id) == (("n1", "n2", "n3"), "n1", "3")
    first = HET | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
    assert layout(Topology.from_env(first)) == (0, 5, 0, 1, 0, 3)
    assert Topology.from_env(first).token == topology.token


def test_nodes_of_a_heterogeneous_step_are_ordered_by_component() -> None:
    """As recorded with Slurm 22.05: the node of the first component is the last by name, but has SLURM_NODEID 0."""
    env = HET | {
        "SLURM_JOB_NODELIST": "n[1-2,4]",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n4",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]",
        "SLURM_STEP_NODELIST": "n[1-2,4]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    }
    topology = Topology.from_env(env)
    assert layout(topology) == (4, 5, 1, 2, 2, 3)
    assert (topology.hosts, topology.master_addr) == (("n4", "n1", "n2"), "n4")
    first = env | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert layout(Topology.from_env(first)) == (0, 5, 0, 1, 0, 3)


def test_step_in_one_component_of_a_heterogeneous_job() -> None:
    env = HET | {
        "SLURM_NODEID": "1",
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[2-3]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    assert layout(Topology.from_env(env)) == (3, 4, 1, 2, 1, 2)
    assert Topology.from_env(env | {"SLURM_JOB_NODELIST_HET_GROUP_1": ""}).hosts == ("n2", "n3")


def test_master_of_an_arbitrary_distribution_is_the_node_of_rank_0() -> None:
    topology = Topology.from_env(ARBITRARY | {"HPCDIST_MASTER_ADDR": "n3"})
    assert (layout(topology), topology.master_addr) == ((0, 5, 0, 1, 2, 3), "n3")
    other = {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "HPCDIST_MASTER_ADDR": "n3"}
    assert layout(Topology.from_env(ARBITRARY | other)) == (2, 5, 1, 2, 0, 3)


# --- Slurm jobs without an srun step


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # batch step
        {"SLURM_STEPID": str(0xFFFFFFFA)},  # interactive step
        {"SLURM_NTASKS": "", "SLURM_NPROCS": "", "SLURM_TASKS_PER_NODE": "8"},  # sbatch -N1 --exclusive
    ],
)
def test_allocation_of_one_task_without_a_step_is_a_single_rank(changes: Env) -> None:
    topology = Topology.from_env(BATCH | {"SLURM_RESTART_COUNT": "2"} | changes)
    assert (topology.launcher, topology.job_id, topology.attempt) == ("single", "14", 2)


@pytest.mark.parametrize(
    ("env", "shown"),
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
def test_process_outside_of_a_step_is_refused_in_a_job_of_several_tasks(env: Env, shown: str) -> None:
    with pytest.raises(TopologyError, match="the Slurm job has several tasks") as caught:
        Topology.from_env(env)
    assert shown in str(caught.value)
    assert "but this process is not an srun task; put srun before the command or use" in str(caught.value)
