"""Nodes of roles inside one allocation, the placement of their ranks, and node lists."""

import re
from typing import Any

import pytest

from hpcdist.config.cluster_schema import ClusterConfig, RoleRequest
from hpcdist.config.schema import Config
from hpcdist.config.slurm_notation import expand, expand_tasks
from hpcdist.errors import ConfigError, HpcdistError, TopologyError
from hpcdist.slurm.placement import (
    RoleNodes,
    hosts_by_rank,
    job_nodes,
    rank_table_lines,
    requested_cluster,
    role_nodes,
)


def config(counts: dict[str, int], requests: dict[str, dict[str, int]] | None = None, **cluster: Any) -> Config:
    roles = {role: RoleRequest(**request) for role, request in (requests or {}).items()}
    return Config(roles=counts, cluster=ClusterConfig(roles=roles, **cluster))


def part(*roles: str, **changes: int) -> RoleNodes:
    return RoleNodes(roles=roles, **{"nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0, "cpus_per_task": 1} | changes)


def test_role_with_a_request_has_nodes_to_itself() -> None:
    counts = {"master": 1, "helper": 3, "trainer": 4, "parameter_server": 3}
    cfg = config(counts, {"trainer": {"gpus_per_node": 2, "nodes": 2}}, tasks_per_node=4, cpus_per_task=3)
    assert role_nodes(cfg) == (
        part("master", "helper", tasks_per_node=4, cpus_per_task=3),
        part("trainer", nodes=2, tasks_per_node=2, gpus_per_node=2, cpus_per_task=3),
        part("parameter_server", tasks_per_node=3, cpus_per_task=3),
    )


@pytest.mark.parametrize(
    ("request_", "shape"),
    [
        *(({}, (2, 3)), ({"tasks_per_node": 2}, (3, 2)), ({"tasks_per_node": 12}, (1, 6))),
        ({"nodes": 1, "tasks_per_node": 6}, (1, 6)),
    ],
)
def test_nodes_and_tasks_are_derived_from_the_number_of_ranks(request_: dict[str, int], shape: tuple[int, int]) -> None:
    cfg = config({"a": 1, "b": 6}, {"b": {"cpus_per_task": 2, **request_}}, tasks_per_node=3)
    found = role_nodes(cfg)[1]
    assert (found.nodes, found.tasks_per_node) == shape


def test_nodes_may_have_a_multiple_of_the_ranks_of_a_single_role() -> None:
    assert role_nodes(config({"stage": 2}, nodes=3, tasks_per_node=2)) == (part("stage", nodes=3, tasks_per_node=2),)


@pytest.mark.parametrize(
    ("counts", "requests", "cluster", "message"),
    [
        ({"server": 1, "worker": 4}, {}, {"nodes": 2, "tasks_per_node": 2},
         "roles add up to 5 ranks (server 1, worker 4), but cluster.nodes=2 × cluster.tasks_per_node=2 is 4: change"
         " one of them, or request nodes for single roles under cluster.roles"),
        ({"server": 1, "worker": 4}, {"worker": {"nodes": 3, "tasks_per_node": 2}}, {},
         "cluster.roles.worker: nodes=3 × tasks_per_node=2 is 6, but roles.worker is 4"),
        ({"server": 1, "worker": 4}, {"worker": {"nodes": 3}}, {},
         "cluster.roles.worker.nodes=3: roles.worker=4 ranks cannot be distributed evenly over these nodes"),
        ({"master": 1, "server": 4, "worker": 1}, {"worker": {"gpus_per_node": 1}}, {"tasks_per_node": 2},
         "cluster.tasks_per_node=2: roles.master + roles.server is 5 ranks, not a multiple of that; set"
         " cluster.roles.master.nodes"),
    ],
)  # fmt: skip
def test_inconsistent_numbers_are_rejected(
    counts: dict[str, int], requests: dict[str, dict[str, Any]], cluster: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        role_nodes(config(counts, requests, **cluster))
    assert str(caught.value) == message


def test_allocation_sums_nodes_and_takes_maxima_of_the_rest() -> None:
    cfg = config(
        {"server": 1, "worker": 4},
        {"server": {"cpus_per_task": 8}, "worker": {"nodes": 2, "gpus_per_node": 2}},
        gpu_type="a100",
        partition="main",
    )
    found = requested_cluster(cfg)
    assert (found.nodes, found.tasks_per_node, found.gpus_per_node, found.cpus_per_task) == (3, 2, 2, 8)
    assert (found.gpu_request, found.partition) == ("a100:2", "main")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"roles": {"server": 1, "worker": 3}, "cluster": {"nodes": 4, "min_nodes": 2}},
         "cluster.min_nodes=2: a run with roles has a fixed number of ranks: remove it"),
        ({"roles": {"a": 1, "b": 3}, "cluster": {"spare_nodes": 1, "roles": {"b": RoleRequest(nodes=3)}}},
         "cluster.spare_nodes=1: a run with cluster.roles has a fixed node for each rank: remove it, or cluster.roles"),
    ],
)  # fmt: skip
def test_ranges_of_nodes_that_contradict_other_keys_are_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        role_nodes(Config(**config | {"cluster": ClusterConfig(**config["cluster"])}))


def test_ranks_fill_the_nodes_of_their_role() -> None:
    roles = config({"server": 1, "worker": 4}, {"worker": {"nodes": 2}})
    assert job_nodes(Config(cluster=ClusterConfig(nodes=3)), {"SLURM_JOB_NODELIST": "n[1-3]"}) == ["n1", "n2", "n3"]
    nodes = job_nodes(roles, {"SLURM_JOB_NODELIST": "n[1-4]"})
    assert hosts_by_rank(role_nodes(roles), nodes) == ["n1", "n2", "n2", "n3", "n3"]
    with pytest.raises(HpcdistError, match=r"^the roles need 3 nodes, but the job has 2: n1, n2$"):
        job_nodes(roles, {"SLURM_JOB_NODELIST": "n[1-2]"})


# --- the rank table


def test_table_without_and_with_hosts() -> None:
    requests = {"worker": {"nodes": 2, "gpus_per_node": 2}}
    request: dict[str, Any] = {"partition": "main", "constraint": "new", "gpu_type": "a100"}
    roles = config({"server": 1, "worker": 4}, requests, **request)
    assert rank_table_lines(roles) == [
        "rank  role        device  place",
        "0     server:0    cpu     1 node × 1, partition main, new",
        "1-4   worker:0-3  cuda    2 nodes × 2, 2 a100 GPUs each, partition main, new",
    ]
    assert rank_table_lines(roles, ["n1", "n2", "n3"])[1:] == [
        "0     server:0    cpu     n1",
        "1-2   worker:0-1  cuda    n2",
        "3-4   worker:2-3  cuda    n3",
    ]


def test_table_of_many_ranks_is_abbreviated() -> None:
    cfg = config({"server": 1, "worker": 4096}, {"worker": {"nodes": 512, "gpus_per_node": 8}})
    assert rank_table_lines(cfg, [f"n{number}" for number in range(1, 514)])[1:] == [
        "0       server:0       cpu     n1",
        "1-4096  worker:0-4095  cuda    n2 … n513 (512 nodes × 8, 8 GPUs each)",
    ]


# --- Expansion of node lists and task counts.


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("login-1.site.org", "login-1.site.org"),
        ("n[3,1-2],m7", "n3 n1 n2 m7"),
        ("n[008-011]", "n008 n009 n010 n011"),
        ("n[01,1]", "n01 n1"),
        ("n[1-3]-ib", "n1-ib n2-ib n3-ib"),
        ("m[1-2]n[3-4]o[5-6]", "m1n3o5 m1n3o6 m2n3o5 m2n3o6 m1n4o5 m1n4o6 m2n4o5 m2n4o6"),  # as scontrol prints it
        ("x[1-2]y[1,3]z,w", "x1y1z x1y3z x2y1z x2y3z w"),
    ],
)
def test_nodelist_is_expanded_in_order(nodelist: str, hosts: str) -> None:
    assert expand(nodelist) == hosts.split()


@pytest.mark.parametrize(
    ("nodelist", "problem"),
    [
        *((text, f"{text!r} is not a node name") for text in ("", "n[1-", "n[1]-[", "n]", "(null)", "n1\n")),
        ("ok,-oProxyCommand", "'-oProxyCommand' is not a node name"),
        *((f"n[1,{text}]", f"expected a number or a range like 1-3, got {text!r}") for text in ("3-1", "a-b", "", "²")),
        ("n[" + "9" * 30 + "]", "expected a number or a range like 1-3, got '999"),
        *((text, "more than 1,000,000 names") for text in ("n[1-99999999999]", "a[1-600000],b[1-600000]")),
        ("x" * 250 + "[1000001-1000002]", "a node name of more than 255 characters"),
    ],
)
def test_malformed_nodelist_is_rejected(nodelist: str, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)):
        expand(nodelist)


@pytest.mark.parametrize(
    ("text", "tasks"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1(x2),16", [1, 1, 16]), ("3,1(x2)", [3, 1, 1])]
)
def test_tasks_per_node(text: str, tasks: list[int]) -> None:
    assert expand_tasks(text) == tasks


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "tasks per node '': '' is not a count like 2 or 2(x3)"),
        ("2(x", "'2(x' is not a count like 2 or 2(x3); use the value that Slurm sets"),
        ("0", "'0' is not a count"),
        ("1(x600000),1(x600000)", "more than 1,000,000 nodes; check the value"),
    ],
)
def test_malformed_tasks_per_node_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)):
        expand_tasks(text)
