"""Requests of roles to Slurm, the placement of their ranks, and node lists."""

import re
from typing import Any

import pytest

from hpcdist.config.launch_schema import ClusterConfig, RoleRequest
from hpcdist.config.schema import Config, ElasticConfig
from hpcdist.config.topology import expand, expand_tasks
from hpcdist.errors import ConfigError, HpcdistError, TopologyError
from hpcdist.slurm.components import (
    JobComponent,
    allocations,
    component_cluster,
    components,
    hosts_by_rank,
    is_het,
    merged,
    nodes_of,
    rank_table_lines,
)


def config(counts: dict[str, int], requests: dict[str, dict[str, Any]] | None = None, **cluster: Any) -> Config:
    roles = {role: RoleRequest(**request) for role, request in (requests or {}).items()}
    return Config(roles=counts, cluster=ClusterConfig(roles=roles, **cluster))


def part(*roles: str, **changes: Any) -> JobComponent:
    values: dict[str, Any] = {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0, "cpus_per_task": 1}
    values |= dict.fromkeys(("mem", "partition", "constraint"))
    return JobComponent(roles=roles, **values | changes)


HYBRID = {"master": 1, "trainer": 4, "parameter_server": 3}


def test_role_with_a_request_has_its_own_nodes_and_inherits_other_settings() -> None:
    cfg = config(
        HYBRID,
        {"trainer": {"gpus_per_node": 2, "partition": "gpu", "mem": "64G", "nodes": 2, "sbatch": {"gpu-freq": "high"}}},
        tasks_per_node=4,
        cpus_per_task=3,
        partition="cpu",
        constraint="new",
    )
    rest: dict[str, Any] = {"cpus_per_task": 3, "constraint": "new"}
    gpus: dict[str, Any] = {"gpus_per_node": 2, "mem": "64G", "partition": "gpu", "sbatch": {"gpu-freq": "high"}}
    assert components(cfg) == (
        part("master", partition="cpu", **rest),
        part("trainer", nodes=2, tasks_per_node=2, **gpus, **rest),
        part("parameter_server", tasks_per_node=3, partition="cpu", **rest),
    )
    assert is_het(cfg)


def test_adjacent_roles_without_requests_share_a_component() -> None:
    cfg = config({"master": 1, "helper": 3, "trainer": 2}, {"trainer": {"gpus_per_node": 1}}, tasks_per_node=2)
    assert components(cfg) == (
        part("master", "helper", nodes=2, tasks_per_node=2),
        part("trainer", tasks_per_node=2, gpus_per_node=1),
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
    found = components(cfg)[1]
    assert (found.nodes, found.tasks_per_node) == shape


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
        components(config(counts, requests, **cluster))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("request_", "het", "expected"),
    [
        ({"gpus_per_node": 1}, None, True),
        ({"mem": "1G"}, None, True),
        ({"nodes": 1}, None, False),  # only the numbers of nodes differ
        ({"nodes": 1}, True, True),
        ({"gpus_per_node": 1}, False, False),
    ],
)
def test_roles_with_different_hardware_need_a_heterogeneous_job(
    request_: dict[str, Any], het: bool | None, expected: bool
) -> None:
    assert is_het(config({"server": 1, "worker": 2}, {"worker": request_}, het=het)) == expected


def test_single_allocation_has_the_sum_of_nodes_and_the_maximum_of_other_requests() -> None:
    cfg = config(
        {"server": 1, "worker": 4},
        {"server": {"cpus_per_task": 8, "mem": "900M"}, "worker": {"nodes": 2, "gpus_per_node": 2, "mem": "2G"}},
        het=False,
        partition="main",
        constraint="a|b",
    )
    assert allocations(cfg) == (
        part(
            *("server", "worker"),
            nodes=3,
            tasks_per_node=2,
            gpus_per_node=2,
            cpus_per_task=8,
            mem="2G",
            partition="main",
            constraint="a|b",
        ),
    )


def test_type_of_gpus_is_inherited_and_the_same_in_one_allocation() -> None:
    cluster = {"gpus_per_node": 4, "gpu_type": "a100"}
    roles = {"master": 1, "server": 1, "worker": 2}
    requests = {"server": {"gpus_per_node": 0, "gpu_type": "v100"}, "worker": {"gpus_per_node": 2}}
    cfg = config(roles, requests, het=False, **cluster)
    assert [component_cluster(cfg.cluster, part).gpu_request for part in components(cfg)] == ["a100:4", None, "a100:2"]
    (whole,) = allocations(cfg)
    assert component_cluster(cfg.cluster, whole).gpu_request == "a100:4"
    assert str(components(cfg)[2]) == "2 nodes × 1, 2 a100 GPUs each"
    other = {**requests, "worker": {"gpu_type": "h100"}}
    assert is_het(config(roles, other, **cluster))
    with pytest.raises(ConfigError, match=r"^cluster\.roles: gpu_type differs between roles, which needs a heterog"):
        allocations(config(roles, other, het=False, **cluster))


def test_single_allocation_requests_the_maximum_memory() -> None:
    maxima = {(None, None): None, (None, "1G"): "1G", ("1T", "1000G"): "1T", ("5000", "4G"): "5000", ("1G", "0"): "0"}
    for (one, other), maximum in maxima.items():
        assert merged([part("a", mem=one), part("b", mem=other)]).mem == maximum


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"partition": "gpu"},
         "cluster.roles: partition differs between roles, which needs a heterogeneous job (cluster.het)"),
        ({"constraint": "fast"},
         "cluster.roles: constraint differs between roles, which needs a heterogeneous job (cluster.het)"),
        ({"mem": "lots"}, "cluster.roles.worker.mem=lots is not a memory size: write 64G, or MiB without a unit"),
    ],
)  # fmt: skip
def test_requests_that_need_a_heterogeneous_job_are_rejected(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        allocations(config({"server": 1, "worker": 2}, {"worker": request_}, het=False, mem="1G"))


def test_memory_must_be_set_for_all_components_or_none() -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.roles\.worker\.mem must be set because server sets it$"):
        allocations(config({"server": 1, "worker": 2}, {"server": {"mem": "64G"}, "worker": {}}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"roles": {"server": 1, "worker": 3}, "cluster": {"nodes": 4, "min_nodes": 2}},
         "cluster.min_nodes=2: a run with roles has a fixed number of ranks: remove it"),
        ({"cluster": {"nodes": 2}, "elastic": ElasticConfig(min_ranks=3)}, "cluster.nodes=2 × cluster.tasks_per_node=1"
         " is less than elastic.min_ranks=3: raise the first or lower the last"),
        ({"roles": {"a": 1, "b": 3}, "cluster": {"spare_nodes": 1, "roles": {"b": RoleRequest(nodes=3)}}},
         "cluster.spare_nodes=1: a spare node can replace no node of another request: remove it, or cluster.roles"),
    ],
)  # fmt: skip
def test_ranges_of_nodes_that_contradict_other_keys_are_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        components(Config(**config | {"cluster": ClusterConfig(**config["cluster"])}))


def test_nodes_of_each_component() -> None:
    requests = {"worker": {"nodes": 2}}
    alike = config({"server": 1, "worker": 4}, requests)
    assert nodes_of(Config(), {"SLURM_JOB_NODELIST": "n[1-3]"}) == [("n1", "n2", "n3")]
    assert nodes_of(alike, {"SLURM_JOB_NODELIST": "n[1-3]"}) == [("n1",), ("n2", "n3")]
    with pytest.raises(HpcdistError, match=r"^the roles need 3 nodes, but the job has 2: n1, n2$"):
        nodes_of(alike, {"SLURM_JOB_NODELIST": "n[1-2]"})
    assert hosts_by_rank(components(alike), [("n3",), ("n1", "n2")]) == ["n3", "n1", "n1", "n2", "n2"]
    # In the batch step of a heterogeneous job SLURM_JOB_NODELIST contains only the first component's nodes.
    groups = {"": "n2", "_HET_GROUP_0": "n2", "_HET_GROUP_1": "n[3-4]"}
    env = {f"SLURM_JOB_NODELIST{group}": nodes for group, nodes in groups.items()}
    assert nodes_of(config({"server": 1, "worker": 4}, requests, het=True), env) == [("n2",), ("n3", "n4")]


# --- the rank table

ROLES = config(
    {"server": 1, "worker": 4}, {"worker": {"nodes": 2, "gpus_per_node": 2, "constraint": "a100"}}, partition="main"
)


def test_table_without_and_with_hosts() -> None:
    assert rank_table_lines(ROLES) == [
        "rank  role        device  place",
        "0     server:0    cpu     component 0: 1 node × 1, partition main",
        "1-4   worker:0-3  cuda    component 1: 2 nodes × 2, 2 GPUs each, partition main, a100",
    ]
    placed = Config(roles=ROLES.roles, cluster=ClusterConfig(roles={"worker": RoleRequest(nodes=2)}))
    assert [line.split("cpu")[1].strip() for line in rank_table_lines(placed)[1:]] == ["1 node × 1", "2 nodes × 2"]
    assert rank_table_lines(ROLES, [("n3",), ("n1", "n2")])[1:] == [
        "0     server:0    cpu     n3",
        "1-2   worker:0-1  cuda    n1",
        "3-4   worker:2-3  cuda    n2",
    ]


def test_table_of_many_ranks_is_abbreviated() -> None:
    cfg = config({"server": 1, "worker": 4096}, {"worker": {"nodes": 512, "gpus_per_node": 8}})
    assert rank_table_lines(cfg, [("n1",), tuple(f"n{number}" for number in range(2, 514))])[1:] == [
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
