"""Topology, from hpcdist's variables or those of Slurm, its invariants, and roles of ranks."""

import dataclasses
import re
from itertools import pairwise
from typing import Any

import pytest
from launcher_env import BATCH, OWN, STEP, Env, layout, without

from hpcdist.config.roles import Roles, rank_table
from hpcdist.config.topology import Topology, port_for
from hpcdist.errors import ConfigError, TopologyError

VALID: dict[str, Any] = {
    "rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "node_rank": 1, "num_nodes": 2,
    "hosts": ("n1", "n2"), "master_addr": "n1", "master_port": 20500, "launcher": "hpcdist", "job_id": "17",
    "attempt": 2,
}  # fmt: skip


def test_token_depends_on_job_and_attempt() -> None:
    topology = Topology(**VALID)
    assert "17" in topology.token
    others = (dataclasses.replace(topology, attempt=3), dataclasses.replace(topology, job_id="18"))
    assert len({topology.token, *(other.token for other in others)}) == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rank": 4}, "0 <= rank < world_size, got rank=4, world_size=4"),
        ({"local_rank": -1}, "0 <= local_rank < local_world_size, got local_rank=-1, local_world_size=2"),
        ({"node_rank": 2}, "0 <= node_rank < num_nodes, got node_rank=2, num_nodes=2"),
        ({"node_rank": 0, "num_nodes": 1, "hosts": ()},
         "local_world_size == world_size if num_nodes == 1, got world_size=4, local_world_size=2, num_nodes=1"),
        ({"local_world_size": 4},
         "local_world_size + num_nodes <= world_size + 1, got world_size=4, local_world_size=4, num_nodes=2"),
        ({"hosts": ("n1",)}, "num_nodes names in hosts, or none, got num_nodes=2, hosts=('n1',)"),
        ({"hosts": ("n1", "n1")}, "distinct names in hosts, got hosts=('n1', 'n1')"),
        ({"master_addr": "a b"}, "a name or address in master_addr, got master_addr='a b'"),
        ({"master_port": 65536}, "1 <= master_port <= 65535, got master_port=65536"),
        ({"job_id": ""}, "a job_id without spaces, got job_id=''"),
        ({"attempt": -1}, "attempt >= 0, got attempt=-1"),
    ],
)  # fmt: skip
def test_inconsistent_fields_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(f"a topology requires {problem}") + "$"):
        Topology(**VALID | changes)


# --- Incomplete, invalid or contradictory variables of each launcher, by the end of the message.


REFUSED: dict[str, list[tuple[Env, str]]] = {
    "or unset these variables": [
        (without(OWN, "HPCDIST_LOCAL_RANK", "HPCDIST_MASTER_PORT"), "but HPCDIST_LOCAL_RANK, HPCDIST_MASTER_PORT not"),
        (OWN | {"HPCDIST_RANK": "one"}, "HPCDIST_RANK must be a whole number, got 'one'; let"),
        (OWN | {"HPCDIST_RANK": "9" * 5000}, "HPCDIST_RANK must be a whole number, got '999"),
        (OWN | {"HPCDIST_RANK": "4"}, "0 <= rank < world_size, got rank=4, world_size=4 (from HPCDIST_RANK=4, "),
    ],
    "pass its SLURM_ variables on unchanged, also into containers": [
        (STEP | {"SLURM_STEP_NUM_TASKS": "6"}, "up to 5 tasks, but SLURM_STEP_NUM_TASKS differs (SLURM_PROCID=1, "),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-2]"}, "names 2 nodes, SLURM_STEP_TASKS_PER_NODE counts 3 (SLURM_PROCID=1"),
        (STEP | {"SLURM_NODEID": "3"}, "SLURM_NODEID is not less than the number of nodes in SLURM_STEP_NODELIST, 3 ("),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-2],n1"}, "distinct names in hosts, got hosts=('n1', 'n2', 'n1')"),
        *(
            (STEP | {name: "x"}, f"{name} must be a whole number")
            for name in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_RESTART_COUNT", "HPCDIST_ATTEMPT")
        ),
        (STEP | {"SLURM_LOCALID": ""}, "SLURM_LOCALID must be set"),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: nodelist 'n[1-': 'n[1-' is not"),
        *(
            (without(STEP, name), f"{name} must be set")
            for name in ("SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
        ),
        (STEP | {"SLURM_JOB_ID": "a b"}, "a job_id without spaces, got job_id='a b' (from SLURM_PROCID=1, "),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "neither a rank of `hpcdist run` nor an srun task (no variable)"),
        (BATCH | {"HPCDIST_ATTEMPT": "1"}, "nor an srun task (SLURM_JOB_ID=14, SLURM_PROCID=0, HPCDIST_ATTEMPT=1)"),
        (BATCH | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, "task (SLURM_JOB_ID=14, SLURM_STEP_ID=4294967291, SLURM_PROCID"),
        (without(STEP, "SLURM_PROCID"), "nor an srun task (SLURM_JOB_ID=42, SLURM_STEP_ID=0)"),
    ],
}


@pytest.mark.parametrize(
    ("env", "problem", "fix"), [(env, problem, fix) for fix, cases in REFUSED.items() for env, problem in cases]
)
def test_incomplete_or_contradictory_variables_are_refused(env: Env, problem: str, fix: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)) as caught:
        Topology.from_env(env)
    assert str(caught.value).endswith(fix)
    assert str(caught.value).count(fix) == 1
    assert len(str(caught.value)) < 600


# --- ports


def test_ports_differ_between_attempts_and_consecutive_jobs() -> None:
    for job_id in ("1", "20250101-120000", "", "a\udcff", "9" * 40):
        ports = [port_for(job_id, attempt) for attempt in range(13000)]
        assert all(20480 <= port <= 32760 for port in ports)
        assert all(now != next_port for now, next_port in pairwise(ports))
    for prefix in ("", "run-"):
        ports = [port_for(f"{prefix}{job}", attempt) for job in (1000, 1001) for attempt in range(16)]
        assert len(set(ports)) == len(ports)
        assert len({port_for(f"{prefix}{job}", 0) for job in range(12281)}) == 12281
    assert port_for("1234", 0) == 24778, "in every process"


# --- from the variables of Slurm, inside and outside of srun steps


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
        ({"SLURM_PROCID": "4", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}, (4, 5, 2, 3, 0, 3)),
        # --distribution=arbitrary, hostfile n3 n1 n3 n2: rank 2
        (
            {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "4"}
            | {"SLURM_STEP_TASKS_PER_NODE": "1(x2),2"},
            (2, 4, 1, 2, 2, 3),
        ),
    ],
)
def test_layouts_of_slurm_steps(changes: Env, expected: tuple[int, ...]) -> None:
    topology = Topology.from_env(STEP | changes)
    assert layout(topology) == expected
    assert topology.master_addr == topology.hosts[0]


def test_own_variables_override_those_of_slurm() -> None:
    assert Topology.from_env(STEP | OWN) == Topology(**VALID | {"hosts": ()})
    requeued = Topology.from_env(STEP | {"SLURM_RESTART_COUNT": "1"})
    restarted = Topology.from_env(STEP | {"SLURM_RESTART_COUNT": "1", "HPCDIST_ATTEMPT": "5"})
    assert (requeued.attempt, restarted.attempt) == (1, 5)
    assert requeued.token != restarted.token
    own = {name: OWN[name] for name in OWN if name.endswith(("ADDR", "PORT", "JOB_ID"))}
    overridden = Topology.from_env(STEP | own | {"HPCDIST_MASTER_ADDR": "n1-ib"})
    assert (overridden.master_addr, overridden.master_port) == ("n1-ib", 20500)
    assert (overridden.job_id, overridden.launcher, overridden.hosts) == ("17", "slurm", ("n1", "n2", "n3"))


def test_rank_0_on_another_node_needs_its_address() -> None:
    on_last_node = STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    topology = Topology.from_env(on_last_node | {"HPCDIST_MASTER_ADDR": "n3"})
    assert (topology.rank, topology.node_rank, topology.master_addr) == (0, 2, "n3")
    problem = r"rank 0 is expected on n1, but it is on n3 .*SLURM_NODEID=2.*; set HPCDIST_MASTER_ADDR=n3 for"
    with pytest.raises(TopologyError, match=problem):
        Topology.from_env(on_last_node)


# --- roles of ranks, and the table of ranks


RL = {"agent": 1, "observer": 4}


def test_ranks_are_assigned_in_the_order_of_the_roles() -> None:
    roles = Roles.of({"master": 1, "trainer": 2, "parameter_server": 3}, 6)
    assert [roles.name_of(rank) for rank in range(6)] == [
        *("master:0", "trainer:0", "trainer:1"),
        *("parameter_server:0", "parameter_server:1", "parameter_server:2"),
    ]
    assert [roles.of_rank(rank) for rank in (0, 2, 5)] == [("master", 0), ("trainer", 1), ("parameter_server", 2)]
    assert roles.names == ("master", "trainer", "parameter_server")
    assert [list(roles.ranks_of(role)) for role in roles.names] == [[0], [1, 2], [3, 4, 5]]
    assert (roles.count("trainer"), roles.count("agent"), roles.world_size) == (2, 0, 6)
    assert str(roles) == "master 1, trainer 2, parameter_server 3"
    roles = Roles.of({}, 3)
    assert (roles.names, list(roles.ranks_of("trainer")), roles.name_of(2)) == (("trainer",), [0, 1, 2], "trainer:2")


def test_wrong_counts_and_unknown_roles_or_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^roles add up to 5 ranks \(agent 1, observer 4\), but 4 were started$"):
        Roles.of(RL, 4)
    roles = Roles.of(RL, 5)
    with pytest.raises(ConfigError, match=r"^no rank has the role 'server': the roles are agent 1, observer 4$"):
        roles.ranks_of("server")
    for rank in (5, -1):
        with pytest.raises(IndexError, match=rf"^rank {rank} of 5$"):
            roles.of_rank(rank)


def test_single_role_may_have_a_multiple_of_its_ranks() -> None:
    roles = Roles.of({"stage": 2}, 6)
    assert roles.counts == (("stage", 6),)
    assert roles.name_of(5) == "stage:5"
    with pytest.raises(
        ConfigError, match=r"^roles add up to 2 ranks \(stage 2\) or a multiple of them, but 3 were started$"
    ):
        Roles.of({"stage": 2}, 3)


def test_require_refuses_other_roles_and_counts() -> None:
    Roles.of(RL, 5).require(agent=1, observer=None)
    Roles.of(RL, 5).require(observer=4, agent=1)
    problem = "this trainer needs the roles agent 1, observer 1 or more, got "
    with pytest.raises(ConfigError) as caught:
        Roles.of({}, 5).require(agent=1, observer=None)
    assert str(caught.value) == f"{problem}trainer 5: set roles='{{agent: 1, observer: 1}}'"
    for wrong in ({"agent": 2, "observer": 3}, {"agent": 1}, {"agent": 1, "observer": 3, "judge": 1}):
        with pytest.raises(ConfigError, match=problem):
            Roles.of(wrong, sum(wrong.values())).require(agent=1, observer=None)


def test_rank_table_has_one_line_for_each_role_on_each_node() -> None:
    roles = Roles.of({"master": 1, "trainer": 3, "parameter_server": 2}, 6)
    places = [(range(2), "n1"), (range(2, 4), "n2"), (range(4, 6), "n3")]
    assert rank_table(roles, places, {"master": "cpu", "trainer": "cuda", "parameter_server": "cpu"}) == [
        "rank  role                  device  place",
        "0     master:0              cpu     n1",
        "1     trainer:0             cuda    n1",
        "2-3   trainer:1-2           cuda    n2",
        "4-5   parameter_server:0-1  cpu     n3",
    ]
    roles = Roles.of({"parameter_server": 512, "trainer": 3584}, 4096)
    assert rank_table(roles, [(range(4096), "")], {}) == [
        "rank      role                    device",
        "0-511     parameter_server:0-511",
        "512-4095  trainer:0-3583",
    ]
